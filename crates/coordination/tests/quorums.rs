//! Lighthouse and manager servers together over loopback: quorums form, deaths are pushed, restarts go on.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::rig::*;
use ftcore::{Epoch, ErrorKind, Result, Step};
use oxccl_coordination::{
    CommitVote, LighthouseConfig, LighthouseServer, ManagerClient, ManagerServer, QuorumRequest,
};
use protocol::Lineage;

#[test]
fn three_replicas_get_one_quorum_and_their_places_in_it() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(3),
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    let (mut a, mut b, mut c) = (
        Replica::start("a:1", &url),
        Replica::start("b:1", &url),
        Replica::start("c:1", &url),
    );
    let first = quorum(&mut [&mut c, &mut a, &mut b], 0);
    let ranks: Vec<_> = first.iter().map(|r| r.replica_rank).collect();
    assert_eq!(ranks, [2, 0, 1]);
    for r in &first {
        assert_eq!(
            (r.quorum_id, r.replica_world_size, r.store_address.as_str()),
            (first[0].quorum_id, 3, "store-of-a-1:1")
        );
        assert_eq!(r.replica_ids, ["a:1", "b:1", "c:1"]);
        assert_eq!(
            r.heal,
            r.replica_rank != 0,
            "the first one is the source of the initial state"
        );
    }
    assert_eq!(first[1].recover_dst_replica_ranks, [1, 2]);
    assert_eq!(first[0].recover_src_manager_address, a.server.address());
    let second = quorum(&mut [&mut a, &mut b, &mut c], 1);
    assert_eq!(second[0].quorum_id, first[0].quorum_id, "nothing changed");
    assert!(second.iter().all(|r| !r.heal && r.max_step == Step(1)));
}

#[test]
fn l27_a_killed_manager_is_pushed_to_the_others_long_before_its_heartbeat_is_missed() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(3),
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    let (mut a, mut b, mut c) = (
        Replica::start("a:1", &url),
        Replica::start("b:1", &url),
        Replica::start("c:1", &url),
    );
    let epoch = quorum(&mut [&mut a, &mut b, &mut c], 0)[0].quorum_id;
    let killed = Instant::now();
    drop(c);
    for survivor in [&a, &b] {
        let (reason, departed) = survivor.abort_of(epoch);
        assert_eq!(departed, ["c:1"]);
        assert!(reason.contains("c:1 is gone"), "{reason}");
    }
    let next = quorum(&mut [&mut a, &mut b], 0);
    // The heartbeat time-out is 30 s, the join time-out 20 s.
    assert!(
        killed.elapsed() < Duration::from_secs(5),
        "{:?}",
        killed.elapsed()
    );
    assert!(next[0].quorum_id > epoch);
    assert_eq!(next[0].replica_ids, ["a:1", "b:1"]);
}

#[test]
fn a_replica_that_was_cut_off_without_a_reset_is_noticed_by_its_silence() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        heartbeat_timeout: Duration::from_secs(3),
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    let line = Proxy::to(&url);
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &line.url));
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    let frozen = Instant::now();
    line.freeze();
    assert_eq!(a.abort_of(epoch).1, ["b:1"]);
    assert!(
        frozen.elapsed() < Duration::from_secs(15),
        "{:?}",
        frozen.elapsed()
    );
    assert_eq!(quorum(&mut [&mut a], 0)[0].replica_ids, ["a:1"]);
}

#[test]
fn l27_a_reported_error_aborts_the_epoch_on_all_replicas_and_removes_none() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(2)
    })
    .unwrap();
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    a.client.report(epoch, "the all-reduce failed", soon()).unwrap();
    for replica in [&a, &b] {
        let (reason, departed) = replica.abort_of(epoch);
        assert!(
            reason.contains("a:1 reported: rank 0: the all-reduce failed"),
            "{reason}"
        );
        assert_eq!(departed, Vec::<String>::new());
    }
    let next = quorum(&mut [&mut a, &mut b], 0);
    assert_eq!(next[0].replica_world_size, 2);
    assert!(next[0].quorum_id > epoch, "its groups are dead");
}

#[test]
fn a_replica_that_leaves_is_not_waited_for() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    quorum(&mut [&mut a, &mut b], 0);
    b.server.leave(soon()).unwrap();
    let start = Instant::now();
    assert_eq!(quorum(&mut [&mut a], 0)[0].replica_ids, ["a:1"]);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "the join time-out is 20 s"
    );
    b.server.shutdown(soon()).unwrap();
}

#[test]
fn a_leave_whose_connection_broke_is_sent_again() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let proxy = Proxy::to(&lighthouse.address());
    let (mut a, mut b) = (
        Replica::start("a:1", &lighthouse.address()),
        Replica::start("b:1", &proxy.url),
    );
    quorum(&mut [&mut a, &mut b], 0);
    proxy.lose_next();
    b.server.leave(soon()).unwrap();
    a.server.leave(soon()).unwrap();
    // Both have left, so the run is over for a replica of an earlier quorum.
    let late = protocol::Member {
        last_quorum_id: a.last - 1,
        ..member("c:1")
    };
    let error = client(&lighthouse).quorum(&late, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.to_string().contains("the run is over"), "{error}");
}

#[test]
fn l01_a_restarted_lighthouse_goes_on_with_higher_ids_and_the_members_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let start = of_a_record(dir.path(), 2);
    let lighthouse = start("127.0.0.1:0").unwrap();
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    let before = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    lighthouse.shutdown(soon()).unwrap();
    let lighthouse = start(&socket_of(&url).to_string()).unwrap();
    assert_eq!(lighthouse.address(), url);
    let tool = client(&lighthouse);
    until(&tool, "both reattach", |s| s.attached == ["a:1", "b:1"]);
    let healthy = |s: &oxccl_coordination::LighthouseStatus| {
        s.healthy.iter().map(|h| h.replica_id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        healthy(&tool.status(soon()).unwrap()),
        ["a:1", "b:1"],
        "known before they ask"
    );
    let after = quorum_of(&mut [&mut a, &mut b], 1);
    assert!(
        after[0].quorum_id > before,
        "{} after {before}",
        after[0].quorum_id
    );
    // And the new one pushes as the old one did.
    let epoch = after[0].quorum_id;
    drop(b);
    assert_eq!(a.abort_of(epoch).1, ["b:1"]);
}

/// Starts lighthouses that share a record, one after another, for a first quorum of that many.
fn of_a_record(folder: &Path, first: usize) -> impl Fn(&str) -> Result<LighthouseServer> + Copy {
    move |bind| {
        LighthouseServer::start(LighthouseConfig {
            bind: bind.into(),
            initial_replicas: Some(first),
            state_file: Some(folder.join("state")),
            ..config(2)
        })
    }
}

/// A lighthouse in the place of one that ended suddenly, whose port may close a little later.
fn at_its_port(url: &str, start: impl Fn(&str) -> Result<LighthouseServer>) -> LighthouseServer {
    let end = soon();
    loop {
        match start(&socket_of(url).to_string()) {
            Ok(lighthouse) => return lighthouse,
            Err(e) => assert!(e.kind() == ErrorKind::Conflict && Instant::now() < end, "{e}"),
        }
    }
}

/// The lighthouse ends between its answer to one member and that to the other: the first one would wait for the second in the step for as long as an
/// operation may take.
#[test]
fn a_member_whose_answer_went_down_with_the_lighthouse_is_not_waited_for_in_the_step() {
    let dir = tempfile::tempdir().unwrap();
    let start = of_a_record(dir.path(), 2);
    let lighthouse = start("127.0.0.1:0").unwrap();
    let url = lighthouse.address();
    let line = Proxy::to(&url);
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &line.url));
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    let asks = {
        let (client, request) = (b.client.clone(), b.request(1));
        std::thread::spawn(move || client.quorum(&request, soon()))
    };
    until(&client(&lighthouse), "b waits", |s| s.waiting.len() == 1);
    line.freeze();
    assert_eq!(quorum(&mut [&mut a], 1)[0].quorum_id, epoch);
    drop(lighthouse);
    let _successor = at_its_port(&url, start);
    line.thaw();
    let lost = asks.join().unwrap().unwrap_err();
    assert!(lost.is_retryable(), "{lost}");
    // b asks again, as often as its connections break; a is in the step, which ends.
    let again = {
        let (client, request) = (b.client.clone(), b.request(1));
        std::thread::spawn(move || {
            loop {
                match client.quorum(&request, soon()) {
                    Err(e) if e.is_retryable() => std::thread::park_timeout(Duration::from_millis(20)),
                    other => return other,
                }
            }
        })
    };
    let (reason, departed) = a.abort_of(epoch);
    assert!(reason.contains("b:1 asks again"), "{reason}");
    assert_eq!(departed, Vec::<String>::new());
    let after = quorum(&mut [&mut a], 1)[0].quorum_id;
    assert!(after > epoch);
    assert_eq!(again.join().unwrap().unwrap().quorum_id, after);
}

#[test]
fn after_a_sudden_end_of_the_lighthouse_the_same_step_goes_on_and_nobody_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let start = of_a_record(dir.path(), 3);
    let mut lighthouse = start("127.0.0.1:0").unwrap();
    let url = lighthouse.address();
    let mut replicas = ["a:1", "b:1", "c:1"].map(|id| Replica::start(id, &url));
    let ask = |replica: &Replica, lineage: &Lineage, step: i64| {
        let request = QuorumRequest {
            lineage: lineage.as_str().into(),
            ..replica.request(step)
        };
        let client = replica.client.clone();
        std::thread::spawn(move || {
            loop {
                match client.quorum(&request, soon()) {
                    Err(e) if e.is_retryable() => std::thread::park_timeout(Duration::from_millis(20)),
                    other => return other.unwrap(),
                }
            }
        })
    };
    let mut lineage = Lineage::default();
    let mut epochs = Vec::new();
    for step in 0..9 {
        let first = ask(&replicas[0], &lineage, step);
        if step == 3 || step == 6 {
            until(&client(&lighthouse), "a:1 waits", |s| !s.waiting.is_empty());
            // Nothing is told, and nothing more is saved.
            drop(lighthouse);
            lighthouse = at_its_port(&url, start);
        }
        let others = [1, 2].map(|i| ask(&replicas[i], &lineage, step));
        for (replica, call) in replicas.iter_mut().zip([first].into_iter().chain(others)) {
            let result = call.join().unwrap();
            assert_eq!(result.replica_ids, ["a:1", "b:1", "c:1"]);
            assert_eq!((result.max_step.0, result.heal && step > 0), (step, false));
            replica.last = result.quorum_id;
        }
        assert!(replicas.iter().all(|r| r.last == replicas[0].last));
        epochs.push(replicas[0].last);
        lineage = lineage.after(replicas[0].last, Step(step));
    }
    // One epoch from each start to the next, each above the one before.
    for (step, pair) in (1..).zip(epochs.windows(2)) {
        let restarted = step == 3 || step == 6;
        assert_eq!(
            (pair[1] > pair[0], pair[1] == pair[0]),
            (restarted, !restarted),
            "{epochs:?}"
        );
    }
    // A state of another history is still none of this job's.
    let error = client(&lighthouse)
        .quorum(
            &oxccl_coordination::Member {
                step: Step(10),
                lineage: lineage.after(Epoch(1), Step(9)).as_str().into(),
                ..member("rumour")
            },
            soon(),
        )
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(
        error
            .to_string()
            .contains("does not descend from the recorded state"),
        "{error}"
    );
}

#[test]
fn l28_a_lighthouse_that_is_gone_is_told_to_all_ranks_at_once_and_asking_again_works() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let server = ManagerServer::start(manager_config("a:1", &url, 2)).unwrap();
    let ask = |rank: u32| {
        let client = ManagerClient::connect(&server.address(), soon()).unwrap();
        std::thread::spawn(move || {
            let request = QuorumRequest {
                group_rank: rank,
                ..QuorumRequest::default()
            };
            let start = Instant::now();
            (client.quorum(&request, soon()), start.elapsed())
        })
    };
    let calls = [ask(0), ask(1)];
    until(&client(&lighthouse), "a:1 waits", |s| {
        s.waiting.iter().any(|w| w.replica_id == "a:1")
    });
    lighthouse.shutdown(soon()).unwrap();
    for call in calls {
        let (answer, waited) = call.join().unwrap();
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(
            error.is_retryable() && error.to_string().contains("lighthouse"),
            "{error}"
        );
        assert!(
            waited < Duration::from_secs(10),
            "its deadline was 30 s: {waited:?}"
        );
    }
    let again = LighthouseServer::start(LighthouseConfig {
        bind: socket_of(&url).to_string(),
        ..config(1)
    })
    .unwrap();
    assert_eq!(again.address(), url);
    for call in [ask(0), ask(1)] {
        assert_eq!(call.join().unwrap().0.unwrap().replica_ids, ["a:1"]);
    }
}

#[test]
fn l28_retries_bridge_a_restart_of_the_lighthouse_within_the_callers_deadline() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let mut config_of_a = manager_config("a:1", &url, 1);
    config_of_a.quorum_retries = 100;
    let server = ManagerServer::start(config_of_a).unwrap();
    let rank = ManagerClient::connect(&server.address(), soon()).unwrap();
    let call = std::thread::spawn(move || rank.quorum(&QuorumRequest::default(), soon()));
    until(&client(&lighthouse), "a:1 waits", |s| !s.waiting.is_empty());
    lighthouse.shutdown(soon()).unwrap();
    let _again = LighthouseServer::start(LighthouseConfig {
        bind: socket_of(&url).to_string(),
        ..config(1)
    })
    .unwrap();
    assert_eq!(call.join().unwrap().unwrap().replica_ids, ["a:1"]);
}

#[test]
fn l23_min_replicas_holds_for_the_survivor_of_a_quorum() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    quorum(&mut [&mut a, &mut b], 0);
    drop(b);
    let error = a
        .client
        .quorum(&a.request(0), Instant::now() + Duration::from_secs(1))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let mut b = Replica::start("b:2", &url);
    let both = quorum(&mut [&mut a, &mut b], 0);
    assert_eq!(
        both[0].replica_ids,
        ["a:1", "b:2"],
        "the new incarnation takes the old one's place"
    );
}

#[test]
fn l24_a_rank_whose_connection_broke_is_not_waited_with() {
    let lighthouse = lighthouse(1);
    let server = ManagerServer::start(manager_config("a:1", &lighthouse.address(), 2)).unwrap();
    let line = Proxy::to(&server.address());
    let through_the_line = ManagerClient::connect(&line.url, soon()).unwrap();
    let direct = ManagerClient::connect(&server.address(), soon()).unwrap();
    let ask = |client: &ManagerClient, rank: u32, step: Step, deadline: Instant| {
        client.quorum(
            &QuorumRequest {
                group_rank: rank,
                step,
                ..QuorumRequest::default()
            },
            deadline,
        )
    };
    let end = soon();
    let request = QuorumRequest {
        step: Step(5),
        checkpoint_metadata: "arrived".into(),
        ..QuorumRequest::default()
    };
    let lost = std::thread::spawn(move || through_the_line.quorum(&request, soon()));
    // Its arrival shows in what it leaves behind.
    while direct.checkpoint_metadata(0, soon()).ok().as_deref() != Some("arrived") {
        assert!(Instant::now() < end, "the call never arrived");
    }
    line.cut();
    assert_eq!(lost.join().unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    timed_out_saying("rank 0 of this replica did not ask", |deadline| {
        ask(&direct, 1, Step(5), deadline).unwrap_err()
    });
}

#[test]
fn l08_ranks_of_a_replica_that_were_configured_differently_are_all_told_naming_both() {
    let lighthouse = lighthouse(1);
    let server = ManagerServer::start(manager_config("a:1", &lighthouse.address(), 2)).unwrap();
    let calls: Vec<_> = (0..2)
        .map(|rank| {
            let client = ManagerClient::connect(&server.address(), soon()).unwrap();
            std::thread::spawn(move || {
                let request = QuorumRequest {
                    group_rank: rank,
                    init_sync: rank == 1,
                    ..QuorumRequest::default()
                };
                client.quorum(&request, soon())
            })
        })
        .collect();
    for call in calls {
        let error = call.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(
            error.to_string().contains("rank 0") && error.to_string().contains("rank 1"),
            "{error}"
        );
    }
}

#[test]
fn l02_a_vote_that_timed_out_at_one_step_decides_nothing_at_the_next() {
    let lighthouse = lighthouse(1);
    let server = ManagerServer::start(manager_config("a:1", &lighthouse.address(), 2)).unwrap();
    let ranks: Vec<_> = (0..2)
        .map(|_| ManagerClient::connect(&server.address(), soon()).unwrap())
        .collect();
    let vote = |rank: u32, step: Step, vote: bool| CommitVote {
        group_rank: rank,
        step,
        quorum_id: Epoch(9),
        attempt: 0,
        vote,
    };
    let short = || Instant::now() + Duration::from_secs(2);
    timed_out_saying("rank 1 did not vote", |deadline| {
        ranks[0]
            .should_commit(&vote(0, Step(5), true), deadline)
            .unwrap_err()
    });
    let error = ranks[1]
        .should_commit(&vote(1, Step(6), true), short())
        .unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::Timeout,
        "one vote alone decides nothing: {error}"
    );
    // Together they do, and a repeated call gets the same answer.
    let other = ranks[1].clone();
    let call = std::thread::spawn(move || {
        other.should_commit(
            &CommitVote {
                group_rank: 1,
                step: Step(6),
                quorum_id: Epoch(9),
                attempt: 1,
                vote: true,
            },
            soon(),
        )
    });
    let of_rank_0 = CommitVote {
        attempt: 1,
        ..vote(0, Step(6), true)
    };
    assert!(ranks[0].should_commit(&of_rank_0, soon()).unwrap());
    assert!(call.join().unwrap().unwrap());
    assert!(ranks[0].should_commit(&of_rank_0, soon()).unwrap());
    let error = ranks[0]
        .should_commit(
            &CommitVote {
                group_rank: 7,
                ..of_rank_0
            },
            soon(),
        )
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_rank_that_gives_up_ends_the_calls_of_all_ranks_those_that_wait_and_those_to_come() {
    let lighthouse = lighthouse(1);
    let server = ManagerServer::start(manager_config("a:1", &lighthouse.address(), 3)).unwrap();
    let rank = || ManagerClient::connect(&server.address(), soon()).unwrap();
    let vote = |group_rank: u32| CommitVote {
        group_rank,
        step: Step(4),
        vote: true,
        ..CommitVote::default()
    };
    let ask = |group_rank: u32| QuorumRequest {
        group_rank,
        step: Step(4),
        ..QuorumRequest::default()
    };
    let given_up = |error: ftcore::Error| {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("rank 1 of this replica cannot go on") && text.contains("no such dtype"),
            "{text}"
        );
    };
    std::thread::scope(|scope| {
        let waits = [0, 2].map(|group_rank| {
            let client = rank();
            scope.spawn(move || client.quorum(&ask(group_rank), soon()).unwrap_err())
        });
        let leaves = rank();
        let wrong = leaves.give_up(&vote(3), "x", soon()).unwrap_err();
        assert_eq!(wrong.kind(), ErrorKind::InvalidArgument, "{wrong}");
        leaves.give_up(&vote(1), "no such dtype", soon()).unwrap();
        for wait in waits {
            given_up(wait.join().unwrap());
        }
    });
    // The first reason stays.
    rank().give_up(&vote(0), "another one", soon()).unwrap();
    given_up(rank().quorum(&ask(0), soon()).unwrap_err());
    given_up(rank().should_commit(&vote(2), soon()).unwrap_err());
}

#[test]
fn a_replica_that_leaves_answers_all_its_ranks_first() {
    let lighthouse = lighthouse(1);
    let vote = |group_rank: u32| CommitVote {
        group_rank,
        step: Step(4),
        vote: true,
        ..CommitVote::default()
    };
    for round in 0..60 {
        let config = manager_config(&format!("a:{round}"), &lighthouse.address(), 3);
        let server = ManagerServer::start(config).unwrap();
        let rank = || ManagerClient::connect(&server.address(), soon()).unwrap();
        let (first, second, third) = (rank(), rank(), rank());
        std::thread::scope(|scope| {
            let votes = [(&second, 1), (&third, 2)]
                .map(|(client, r)| scope.spawn(move || client.should_commit(&vote(r), soon())));
            assert!(first.should_commit(&vote(0), soon()).unwrap());
            server.leave(soon()).unwrap();
            server.shutdown(soon()).unwrap();
            for voted in votes {
                assert!(voted.join().unwrap().unwrap(), "round {round}");
            }
        });
    }
    // Who waits for what will not come is told so.
    let server = ManagerServer::start(manager_config("b:1", &lighthouse.address(), 2)).unwrap();
    let waiting = ManagerClient::connect(&server.address(), soon()).unwrap();
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| waiting.quorum(&QuorumRequest::default(), soon()).unwrap_err());
        server.leave(soon()).unwrap();
        let error = asks.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(
            error.to_string().contains("rank 0 of this replica has left"),
            "{error}"
        );
    });
}

#[test]
fn checkpoint_addresses_are_kept_per_rank() {
    let lighthouse = lighthouse(1);
    let mut a = Replica::start("a:1", &lighthouse.address());
    assert_eq!(
        a.client.checkpoint_metadata(0, soon()).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let request = QuorumRequest {
        checkpoint_metadata: "http://here/7".into(),
        ..a.request(0)
    };
    a.last = a.client.quorum(&request, soon()).unwrap().quorum_id;
    assert_eq!(a.client.checkpoint_metadata(0, soon()).unwrap(), "http://here/7");
}

#[test]
fn a_guard_that_is_dropped_ends_the_watch_and_a_panicking_callback_does_not() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    let second = a.client.watch(0, std::sync::Arc::new(|_| panic!("on purpose")));
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    a.client.report(epoch, "one", soon()).unwrap();
    a.abort_of(epoch);
    b.abort_of(epoch);
    drop(second);
    let (guard, events) = watched(&a.client, 0);
    events
        .recv_timeout(TIME_LIMIT)
        .expect("a new watch begins with the last abort");
    drop(guard);
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    b.client.report(epoch, "two", soon()).unwrap();
    a.abort_of(epoch);
    assert!(
        events.recv_timeout(TIME_LIMIT).is_err(),
        "disconnected: the callback is gone with its guard"
    );
}
