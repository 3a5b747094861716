use oxccl::launch::{ReplicaEvent, ReplicaState};
use oxccl_launch::{ReplicaOutcome, StopReason};

use super::chaos::Cost;
use super::*;

fn facts() -> RunFacts {
    RunFacts {
        program: "train".into(),
        replicas: 2,
        ranks: 1,
        parameters: 1_000_000,
        gradient_bytes: 4_000_000,
        seed: 1,
        stall_limit_ms: Some(1000.0),
    }
}

fn ms(ms: u64) -> u64 {
    1_000_000_000 + ms * 1000
}

fn spawned(replica: u32, incarnation: u32, t: u64) -> SupervisorEvent {
    SupervisorEvent::Spawned {
        replica,
        rank: 0,
        incarnation,
        pid: 1,
        t_us: ms(t),
    }
}

fn exited(replica: u32, incarnation: u32, signal: Option<i32>, t: u64) -> SupervisorEvent {
    let status = if signal.is_none() { Some(0) } else { None };
    let restart_in_ms = signal.map(|_| 500);
    SupervisorEvent::Exited {
        replica,
        rank: 0,
        incarnation,
        status,
        signal,
        tail: String::new(),
        restart_in_ms,
        cause: (status != Some(0)).then_some(0),
        t_us: ms(t),
    }
}

fn says(replica: u32, incarnation: u32, t: u64, kind: EventKind) -> SupervisorEvent {
    SupervisorEvent::Replica(ReplicaEvent {
        replica,
        incarnation,
        rank: 0,
        t_us: ms(t),
        kind,
    })
}

fn commit(
    replica: u32,
    incarnation: u32,
    t: u64,
    step: u64,
    failed_attempts: u32,
    inner_ms: f64,
) -> SupervisorEvent {
    let commit = Commit {
        step,
        epoch: 1,
        failed_attempts,
        participants: 2,
        contributors: 2,
        hash: Some(format!("hash-of-{step}")),
        inner_ms,
        sync_ms: 10.0,
        bytes_sent: step * 1000,
        bytes_recv: step * 900,
    };
    says(replica, incarnation, t, EventKind::Commit(commit))
}

fn end(replica: u32, incarnation: u32, t: u64, hash: &str, inner_steps: u64) -> SupervisorEvent {
    let end = Final {
        step: 4,
        hash: hash.into(),
        heldout_loss: 1.5,
        heldout_accuracy: None,
        train_loss: 1.25,
        inner_steps,
        bytes_sent: 5000,
        bytes_recv: 4500,
        state: ReplicaState::Done,
    };
    says(replica, incarnation, t, EventKind::Final(end))
}

fn finished() -> SupervisorEvent {
    let replica = |replica| ReplicaOutcome {
        replica,
        incarnations: 1,
        exit: Some(ExitSummary {
            status: Some(0),
            signal: None,
        }),
        tail: String::new(),
    };
    SupervisorEvent::Finished(Outcome {
        stop: StopReason::Completed,
        replicas: vec![replica(0), replica(1)],
    })
}

/// Replica 1 is killed at 2300 ms inside step 3, comes back at 2800 ms and commits at 4100 ms.
fn a_run_with_a_kill() -> Vec<SupervisorEvent> {
    let step = |replica, incarnation, t, inner_step| {
        says(
            replica,
            incarnation,
            t,
            EventKind::Step {
                inner_step,
                loss: 2.0,
                tokens_per_s: 100.0,
            },
        )
    };
    vec![
        spawned(0, 0, 0),
        spawned(1, 0, 0),
        step(1, 0, 500, 0),
        commit(0, 0, 1000, 1, 0, 900.0),
        commit(1, 0, 1001, 1, 0, 900.0),
        commit(0, 0, 2000, 2, 0, 900.0),
        commit(1, 0, 2001, 2, 0, 900.0),
        step(1, 0, 2200, 19),
        exited(1, 0, Some(9), 2300),
        spawned(1, 1, 2800),
        // The survivor's attempt has failed; with 200 ms more of inner compute it commits alone.
        commit(0, 0, 3200, 3, 1, 500.0),
        says(
            1,
            1,
            3400,
            EventKind::Healed {
                step: 3,
                bytes: 4_000_000,
                ms: 120.0,
            },
        ),
        commit(0, 0, 4100, 4, 0, 850.0),
        commit(1, 1, 4100, 4, 0, 600.0),
        end(0, 0, 4200, "same", 40),
        end(1, 1, 4200, "same", 10),
        exited(0, 0, None, 4300),
        exited(1, 1, None, 4300),
        finished(),
    ]
}

#[test]
fn the_stall_is_the_gap_between_commits_less_all_inner_compute_in_it() {
    let report = Report::new(&facts(), &a_run_with_a_kill());
    assert!(report.ok, "{:?}", report.problems);
    assert_eq!(report.exit_code(), 0);
    // 3200 - 2000 = 1200 ms between the commits of steps 2 and 3, of which 500 ms were compute.
    let stall = report.longest_stall.clone().unwrap();
    assert_eq!((stall.replica, stall.step, stall.death_of), (0, 3, Some(1)));
    assert_eq!(
        (stall.gap_ms, stall.inner_ms, stall.stall_ms),
        (1200.0, 500.0, 700.0)
    );
    assert_eq!(report.figures[0].longest_stall_ms, 700.0);
    // The dead replica's own pause over its two incarnations is no stall: the other one's incarnations tell.
    assert_eq!(report.figures[1].longest_stall_ms, 100.0);
}

#[test]
fn a_death_is_that_of_the_rank_that_caused_it_and_not_of_the_one_whose_end_was_seen_first() {
    let exited = |rank, status, signal, cause: Option<u32>, t| SupervisorEvent::Exited {
        replica: 1,
        rank,
        incarnation: 0,
        status,
        signal,
        tail: String::new(),
        restart_in_ms: cause.map(|_| 500),
        cause,
        t_us: ms(t),
    };
    // Rank 0 lost rank 1, and the supervisor's thread that waits for it was woken first.
    let events = [
        exited(0, Some(1), None, None, 2300),
        exited(1, None, Some(9), Some(1), 2301),
    ];
    let deaths = Report::new(&facts(), &events).deaths;
    let [death] = &deaths[..] else {
        panic!("{deaths:?}")
    };
    assert_eq!(
        (death.rank, death.exit.as_str(), death.t_us),
        (1, "SIGKILL", ms(2301))
    );
}

#[test]
fn a_death_tells_how_long_the_way_back_took() {
    let report = Report::new(&facts(), &a_run_with_a_kill());
    let [death] = &report.deaths[..] else {
        panic!("{:?}", report.deaths)
    };
    assert_eq!(
        (death.replica, death.incarnation, death.exit.as_str()),
        (1, 0, "SIGKILL")
    );
    assert_eq!(death.restart_to_commit_ms, Some(1300.0));
    assert_eq!(
        (death.healed_step, death.healed_bytes, death.healed_ms),
        (Some(3), Some(4_000_000), Some(120.0))
    );
    assert_eq!(death.stall.as_ref().unwrap().stall_ms, 700.0);
    // Of one line each again.
    let text = report.to_string().replace(&format!("\n{}", " ".repeat(15)), " ");
    for wanted in [
        "replica 1 (incarnation 0, SIGKILL) at 2.3 s; restarted after 500 ms, first commit 1300 ms later",
        "healed to step 3: 4.0 MB in 120 ms",
        "longest stall  700 ms (replica 0, before step 3, while replica 1 died",
        "bitwise equal",
        "result         ok",
    ] {
        assert!(text.contains(wanted), "{wanted:?} is missing in:\n{text}");
    }
}

#[test]
fn bytes_and_steps_of_all_incarnations_count_against_data_parallel() {
    let report = Report::new(&facts(), &a_run_with_a_kill());
    // Replica 1: 20 steps in its first incarnation (0..=19, as seen) and 10 in its second (as told at the end).
    assert_eq!(
        report.figures.iter().map(|f| f.inner_steps).collect::<Vec<_>>(),
        [40, 30]
    );
    assert_eq!(report.figures[1].bytes_sent, 2000 + 5000);
    assert_eq!(report.wire.sent, 5000 + 7000);
    // Two replicas: 2 (n - 1) / n = 1, so 70 steps of 4 MB.
    assert_eq!(report.wire.data_parallel, 70 * 4_000_000);
    assert_eq!(
        (report.figures[0].commits, report.figures[0].failed_commits),
        (4, 1)
    );
}

#[test]
fn attempts_that_failed_are_what_a_commit_tells_of_and_are_counted_in_the_cost() {
    let cost = Cost::new(None, Vec::new(), &a_run_with_a_kill());
    assert_eq!((cost.retried, cost.restarts, cost.heals), (1, 1, 1));
}

#[test]
fn unequal_parameters_fail_the_run() {
    let mut at_the_end = a_run_with_a_kill();
    at_the_end[15] = end(1, 1, 4200, "other", 10);
    let report = Report::new(&facts(), &at_the_end);
    assert_eq!((report.exit_code(), &report.hash), (1, &None));
    assert!(
        report.problems[0].contains("replica 0 has same, replica 1 has other"),
        "{:?}",
        report.problems
    );
    assert!(report.to_string().contains("FAILED"), "{report}");

    // A difference in the middle counts even if both end alike.
    let mut in_the_middle = a_run_with_a_kill();
    match &mut in_the_middle[6] {
        SupervisorEvent::Replica(ReplicaEvent {
            kind: EventKind::Commit(commit),
            ..
        }) => {
            commit.hash = Some("torn".into());
        }
        other => panic!("{other:?}"),
    }
    let report = Report::new(&facts(), &in_the_middle);
    assert_eq!(report.exit_code(), 1);
    assert!(
        report.problems[0].contains("differ after step 2"),
        "{:?}",
        report.problems
    );

    // The same step of another epoch is another history: all were lost, and went on from an earlier checkpoint.
    match &mut in_the_middle[6] {
        SupervisorEvent::Replica(ReplicaEvent {
            kind: EventKind::Commit(commit),
            ..
        }) => commit.epoch = 2,
        other => panic!("{other:?}"),
    }
    let report = Report::new(&facts(), &in_the_middle);
    assert!(report.ok, "{:?}", report.problems);
}

#[test]
fn each_way_to_fail_is_named() {
    let without = |dropped: &[usize]| -> Vec<SupervisorEvent> {
        let all = a_run_with_a_kill();
        all.into_iter()
            .enumerate()
            .filter(|(i, _)| !dropped.contains(i))
            .map(|(_, e)| e)
            .collect()
    };
    let failed = SupervisorEvent::Finished(Outcome {
        stop: StopReason::Deadline,
        replicas: vec![],
    });
    let mut other_step = a_run_with_a_kill();
    match &mut other_step[14] {
        SupervisorEvent::Replica(ReplicaEvent {
            kind: EventKind::Final(end),
            ..
        }) => end.step = 9,
        other => panic!("{other:?}"),
    }
    let mut not_finite = a_run_with_a_kill();
    match &mut not_finite[14] {
        SupervisorEvent::Replica(ReplicaEvent {
            kind: EventKind::Final(end),
            ..
        }) => end.heldout_loss = f64::NAN,
        other => panic!("{other:?}"),
    }
    let slow = RunFacts {
        stall_limit_ms: Some(600.0),
        ..facts()
    };
    for (events, facts, wanted) in [
        (without(&[15]), facts(), "replica 1 did not report its end"),
        (without(&[13]), facts(), "never committed again"),
        (without(&[18]), facts(), "not watched to its end"),
        (
            [without(&[18]), vec![failed]].concat(),
            facts(),
            "the deadline of the run passed",
        ),
        (vec![], facts(), "no replica was started"),
        (
            other_step,
            facts(),
            "replica 0 ended at step 9, replica 1 at step 4",
        ),
        (not_finite, facts(), "the held-out loss is NaN"),
        (
            a_run_with_a_kill(),
            slow,
            "stalled for 700 ms before step 3; 600 ms are allowed",
        ),
    ] {
        let report = Report::new(&facts, &events);
        assert_eq!(report.exit_code(), 1, "{wanted}");
        assert!(
            report.problems.iter().any(|p| p.contains(wanted)),
            "{wanted}: {:?}",
            report.problems
        );
    }
}

#[test]
fn the_report_is_written_as_data() {
    let report = Report::new(&facts(), &a_run_with_a_kill());
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["deaths"][0]["restart_to_commit_ms"], 1300.0);
    assert_eq!(json["figures"][1]["incarnations"], 2);
}

#[test]
fn the_table_is_aligned_and_no_line_is_wider_than_100_columns() {
    let text = Report::new(&facts(), &a_run_with_a_kill()).to_string();
    let table: Vec<usize> = text
        .lines()
        .skip(2)
        .take(4)
        .map(|line| line.chars().count())
        .collect();
    assert_eq!(table, [table[0]; 4], "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert_eq!(
        (thousands(0), thousands(999), thousands(1_234_567)),
        ("0".into(), "999".into(), "1,234,567".into())
    );
    assert_eq!(
        (bytes(999), bytes(1500), bytes(2_250_000_000)),
        ("999 B".into(), "1.5 kB".into(), "2.25 GB".into())
    );
}
