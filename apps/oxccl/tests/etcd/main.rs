//! The job's record on a real etcd of three members, with several lighthouses as processes, under real kills: nothing is lost, nothing is told
//! twice, and training goes on with the same step. And beside it the restart of a single lighthouse with its file.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ftcore::Epoch;
use oxccl::coordination::{LighthouseClient, Member, Quorum};
use oxccl::core::Step;
use oxccl::core::{ErrorKind, Result};
use rustix::process::Signal;

use cluster::{Cluster, Lighthouse, Link, leading, lighthouse_over, lighthouses, list, soon, wait_until};
use job::Job;

mod cluster;
mod job;

/// How often a lighthouse is killed.
const KILLS: usize = 20;
/// No recovery may take longer on any machine. The figures are printed.
const AT_MOST: Duration = Duration::from_secs(10);

/// One test at a time: they measure.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn member(id: &str, step: i64, last: Epoch) -> Member {
    Member {
        replica_id: format!("{id}:1"),
        address: format!("http://127.0.0.1:{}", 7000 + id.len()),
        store_address: "127.0.0.1:1".into(),
        step: Step(step),
        world_size: 1,
        last_quorum_id: last,
        ..Member::default()
    }
}

/// Each of `members` asks at `url`.
fn ask(url: &str, members: Vec<Member>) -> Vec<JoinHandle<Result<Quorum>>> {
    let calls = members.into_iter().map(|member| {
        let client = LighthouseClient::connect(url, soon()).unwrap();
        std::thread::spawn(move || client.quorum(&member, soon()))
    });
    calls.collect()
}

/// The one quorum that all of `members` get.
fn quorum(url: &str, members: Vec<Member>) -> Quorum {
    let calls = ask(url, members);
    let mut quorums: Vec<Quorum> = calls.into_iter().map(|c| c.join().unwrap().unwrap()).collect();
    let first = quorums.remove(0);
    assert!(quorums.iter().all(|q| *q == first));
    first
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at =
        |percent: usize| times[(times.len() * percent).div_ceil(100).saturating_sub(1)].as_secs_f64() * 1e3;
    println!(
        "{what}: {} times, p50 {:.0} ms, p99 {:.0} ms",
        times.len(),
        at(50),
        at(99)
    );
    assert!(times.iter().all(|t| *t < AT_MOST), "{times:?}");
}

#[test]
fn the_record_outlives_every_lighthouse() {
    let _alone = alone();
    let cluster = Cluster::start();
    let mut all = lighthouses(&cluster, "outlives", 1);
    leading(&all);
    let url = all[0].url.clone();
    let first = quorum(&url, vec![member("a", 0, Epoch(0)), member("b", 0, Epoch(0))]);
    all[0].restart();
    leading(&all);
    // A state that does not descend from the record is refused, which only the record can tell.
    let foreign = Member {
        lineage: "f".repeat(64),
        ..member("c", 9, Epoch(0))
    };
    let refused = ask(&url, vec![foreign]).remove(0).join().unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    let epoch = first.quorum_id;
    let second = quorum(&url, vec![member("a", 0, epoch), member("b", 0, epoch)]);
    assert!(second.quorum_id > epoch);
}

/// `/oxccl/fenced/record` in base64.
const FENCED_RECORD: &str = "L294Y2NsL2ZlbmNlZC9yZWNvcmQ=";

#[test]
fn a_leader_that_was_stopped_beyond_its_lease_delivers_nothing_and_writes_nothing() {
    let _alone = alone();
    let cluster = Cluster::start();
    let all = lighthouses(&cluster, "fenced", 2);
    let mut epoch = Epoch(0);
    // The same epoch would be delivered again without a write; a failure in a row makes a new one, which is saved first.
    for commit_failures in [0, 1] {
        let old = leading(&all);
        let (old, new) = (&all[old], &all[1 - old]);
        let with = |epoch: Epoch| {
            ["a", "b"].map(|id| Member {
                commit_failures,
                ..member(id, 0, epoch)
            })
        };
        let joined =
            |url: &str, epoch: Epoch| quorum(url, vec![member("a", 0, epoch), member("b", 0, epoch)]);
        // A follower says who leads.
        let refused = ask(&new.url, vec![member("a", 0, epoch)])
            .remove(0)
            .join()
            .unwrap();
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        assert!(refused.to_string().contains(&old.url), "{refused}");
        let before = joined(&old.url, epoch).quorum_id;
        // These wait in the stopped process's sockets.
        let clients = [0, 1].map(|_| old.client());
        old.process.stop();
        let late = with(before).into_iter().zip(clients).map(|(member, client)| {
            std::thread::spawn(move || client.quorum(&member, Instant::now() + Duration::from_secs(30)))
        });
        let late: Vec<JoinHandle<Result<Quorum>>> = late.collect();
        wait_until("the other one leads", || new.status().leads.then_some(()));
        let after = joined(&new.url, before).quorum_id;
        assert!(after > before);
        let revision = cluster.revision(FENCED_RECORD).unwrap();
        old.process.signal(Signal::CONT);
        for call in late {
            let answer = call.join().unwrap();
            assert!(
                answer.is_err(),
                "a stopped leader delivered {answer:?}; it said:\n{}",
                old.said()
            );
        }
        wait_until("the old one follows", || {
            (old.status().leader.as_ref() == Some(&new.url)).then_some(())
        });
        assert_eq!(cluster.revision(FENCED_RECORD), Some(revision), "{}", old.said());
        assert!(new.status().leads, "{}", new.said());
        epoch = joined(&new.url, after).quorum_id;
        assert_eq!(epoch, after, "the same members go on in their epoch");
    }
}

/// `/oxccl/replaced/leader` and `/oxccl/replaced/record` in base64.
const REPLACED_LEADER: &str = "L294Y2NsL3JlcGxhY2VkL2xlYWRlcg==";
const REPLACED_RECORD: &str = "L294Y2NsL3JlcGxhY2VkL3JlY29yZA==";
/// `{"address":"http://127.0.0.1:9","incarnation":"other"}` in base64.
const ANOTHER: &str = "eyJhZGRyZXNzIjoiaHR0cDovLzEyNy4wLjAuMTo5IiwiaW5jYXJuYXRpb24iOiJvdGhlciJ9";

#[test]
fn a_leader_that_is_awake_and_was_replaced_delivers_nothing_and_writes_nothing() {
    let _alone = alone();
    let cluster = Cluster::start();
    let all = lighthouses(&cluster, "replaced", 1);
    let url = &all[0].url;
    let mut epoch = Epoch(0);
    // As above. Its lease is alive, and it has not looked at the key yet: only the fence is left.
    for commit_failures in [0, 1] {
        leading(&all);
        epoch = quorum(url, vec![member("a", 0, epoch), member("b", 0, epoch)]).quorum_id;
        let revision = cluster.revision(REPLACED_RECORD).unwrap();
        let clients = ["a", "b"].map(|id| (id, all[0].client()));
        cluster.put(REPLACED_LEADER, ANOTHER);
        let calls = clients.map(|(id, client)| {
            let member = Member {
                commit_failures,
                ..member(id, 0, epoch)
            };
            std::thread::spawn(move || client.quorum(&member, soon()))
        });
        for call in calls {
            let refused = call.join().unwrap().expect_err("a replaced leader delivered");
            assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
        }
        assert_eq!(
            cluster.revision(REPLACED_RECORD),
            Some(revision),
            "{}",
            all[0].said()
        );
        cluster.delete(REPLACED_LEADER);
    }
}

/// `/oxccl/cut/record` in base64.
const CUT_RECORD: &str = "L294Y2NsL2N1dC9yZWNvcmQ=";

#[test]
fn a_leader_that_is_awake_and_cut_off_from_etcd_delivers_nothing_and_writes_nothing() {
    let _alone = alone();
    let cluster = Cluster::start();
    let mut epoch = Epoch(0);
    // As above. What it sends to etcd arrives when it has long been replaced.
    for commit_failures in [0, 1] {
        let link = Link::to(&cluster);
        let old = lighthouse_over(&link.addresses(), &cluster, "cut");
        wait_until("it leads", || old.status().leads.then_some(()));
        let new = lighthouse_over(&cluster.addresses(), &cluster, "cut");
        wait_until("the other one follows", || new.status().leader);
        let joined =
            |url: &str, epoch: Epoch| quorum(url, vec![member("a", 0, epoch), member("b", 0, epoch)]);
        let before = joined(&old.url, epoch).quorum_id;
        link.cut(true);
        let members = ["a", "b"].map(|id| Member {
            commit_failures,
            ..member(id, 0, before)
        });
        let calls = ask(&old.url, members.into());
        wait_until("the other one leads", || new.status().leads.then_some(()));
        for call in calls {
            let refused = call
                .join()
                .unwrap()
                .expect_err("a leader that is cut off delivered");
            assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
        }
        // It leads no more although it hears nothing.
        wait_until("the old one gives up", || {
            old.try_status().filter(|s| !s.leads).map(drop)
        });
        epoch = joined(&new.url, before).quorum_id;
        assert!(epoch > before);
        let revision = cluster.revision(CUT_RECORD).unwrap();
        link.cut(false);
        wait_until("the old one follows", || {
            (old.status().leader.as_ref() == Some(&new.url)).then_some(())
        });
        assert_eq!(cluster.revision(CUT_RECORD), Some(revision), "{}", old.said());
        assert!(new.status().leads, "{}", new.said());
    }
}

#[test]
fn training_goes_on_with_the_same_step_when_the_leading_lighthouse_is_cut_off_from_etcd() {
    let _alone = alone();
    let cluster = Cluster::start();
    let links = [(); 3].map(|()| Link::to(&cluster));
    let all: Vec<Lighthouse> = links
        .iter()
        .map(|link| lighthouse_over(&link.addresses(), &cluster, "links"))
        .collect();
    leading(&all);
    let mut job = Job::start(2, &list(&all));
    let mut times = Vec::new();
    for _ in 0..3 {
        job.run(10);
        let leads = leading(&all);
        let cut = Instant::now();
        links[leads].cut(true);
        times.push(job.first_of_next_epoch().at - cut);
        links[leads].cut(false);
    }
    job.finish();
    report(
        "a leading lighthouse is cut off from etcd to the next commit",
        times,
    );
}

#[test]
fn training_goes_on_with_the_same_step_when_the_leading_lighthouse_is_killed() {
    let _alone = alone();
    let cluster = Cluster::start();
    let mut all = lighthouses(&cluster, "kills", 3);
    leading(&all);
    let mut job = Job::start(2, &list(&all));
    let mut times = Vec::new();
    for _ in 0..KILLS {
        job.run(10);
        let leads = leading(&all);
        let killed = Instant::now();
        all[leads].process.kill();
        times.push(job.first_of_next_epoch().at - killed);
        all[leads].restart();
    }
    // By the kernel's word, not by the end of a lease.
    let evident = all
        .iter()
        .map(|l| l.said().matches("nothing listens at its address").count());
    assert!(evident.sum::<usize>() >= KILLS / 2);
    // One that ends in order hands over.
    let leads = leading(&all);
    all[leads].process.signal(Signal::TERM);
    job.first_of_next_epoch();
    let steps = job.finish();
    println!("{steps} steps");
    report(
        "SIGKILL of the leading one of three lighthouses to the next commit",
        times,
    );
}

#[test]
fn training_goes_on_when_members_of_etcd_are_killed() {
    let _alone = alone();
    let mut cluster = Cluster::start();
    let all = lighthouses(&cluster, "members", 3);
    leading(&all);
    let mut job = Job::start(2, &list(&all));
    // One after the other: one of them is etcd's own leader.
    for member in 0..3 {
        job.run(10);
        cluster.kill(member);
        job.run(30);
        cluster.restart(member);
    }
    job.finish();
}

#[test]
fn training_goes_on_with_the_same_step_when_a_single_lighthouse_is_restarted_with_its_file() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("record.json");
    let mut lighthouse = Lighthouse::start(folder.path(), &["--state-file", file.to_str().unwrap()]);
    let mut job = Job::start(2, &lighthouse.url);
    let mut times = Vec::new();
    for _ in 0..KILLS {
        job.run(10);
        let back = lighthouse.restart();
        times.push(job.first_of_next_epoch().at.saturating_duration_since(back));
    }
    let steps = job.finish();
    println!("{steps} steps");
    report("a killed lighthouse is back to the next commit", times);
}

#[test]
fn an_etcd_that_does_not_answer_is_named_with_what_to_do() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args(["lighthouse", "--bind", "127.0.0.1:0", "--etcd", &address])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains(&address) && said.contains("client ports"), "{said}");
}
