//! What a call that ended with an error leaves behind: nothing that was computed or committed is lost, and the next call goes on with what
//! was due.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::process::Command;
use std::rc::Rc;

use crate::scripted::{begun, layer, params};
use ftcore::{Error, ErrorKind, Step};
use oxccl_diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters, RoundReport, SliceParameters};
use training_rig::{Nothing, ScriptedReplica};

type Run = Diloco<ScriptedReplica, SliceParameters>;

fn configs() -> [DilocoConfig; 3] {
    let plain = DilocoConfig {
        outer: OuterOptimizer::Nesterov {
            lr: 0.5,
            momentum: 0.5,
        },
        ..DilocoConfig::diloco(4)
    };
    let streaming = DilocoConfig {
        fragments: 2,
        delay: 1,
        mixing: 0.5,
        ..plain.clone()
    };
    let eager = DilocoConfig {
        eager: true,
        ..plain.clone()
    };
    [plain, streaming, eager]
}

/// What was sent: the step and the first value.
type Sent = Rc<RefCell<Vec<(i64, f32)>>>;

fn watched() -> (ScriptedReplica, Sent) {
    let sent = Sent::default();
    let seen = sent.clone();
    let replica = ScriptedReplica::by_step(move |step, own| {
        seen.borrow_mut().push((step, own[0]));
        own.iter().map(|x| 1.5 * x).collect()
    });
    (replica, sent)
}

/// One inner step, number `at`, then whatever is due, again after each error that may be retried; how many there were.
fn inner_step(d: &mut Run, at: usize, reports: &mut Vec<RoundReport>) -> usize {
    for i in 0..d.params().len() {
        let by = 1.0 + (at * 7 % 5) as f32;
        d.params_mut()
            .write(i, &mut |w| w.iter_mut().for_each(|w| *w -= by))
            .unwrap();
    }
    let mut errors = 0;
    loop {
        match d.after_inner_step(&mut Nothing) {
            Ok(done) => {
                reports.extend(done);
                return errors;
            }
            Err(e) => {
                assert!(e.is_retryable(), "{e}");
                errors += 1;
                assert!(errors < 20, "it never went on: {e}");
            }
        }
    }
}

/// 14 inner steps; the steps that were reported, what was sent, the errors on the way, and the end.
fn run(config: &DilocoConfig, prepare: impl FnOnce(&mut ScriptedReplica)) -> (Vec<i64>, Sent, usize, Run) {
    let (mut replica, sent) = watched();
    prepare(&mut replica);
    let mut d = begun(replica, &[2, 3], config.clone());
    let mut reports = Vec::new();
    let errors = (0..14).map(|at| inner_step(&mut d, at, &mut reports)).sum();
    let steps = reports.iter().map(|r| r.step.0).collect();
    (steps, sent, errors, d)
}

fn assert_same(config: &DilocoConfig, (steps, _, errors, d): (Vec<i64>, Sent, usize, Run), at_least: usize) {
    let (expected, _, _, undisturbed) = run(config, |_| {});
    assert!(errors >= at_least, "{errors} errors: {config:?}");
    assert_eq!(steps, expected, "each round is reported once: {config:?}");
    assert_eq!(
        d.global_hash().unwrap(),
        undisturbed.global_hash().unwrap(),
        "{config:?}"
    );
    assert_eq!(d.params(), undisturbed.params(), "{config:?}");
}

#[test]
fn a_quorum_that_times_out_where_a_round_is_begun_costs_neither_the_round_nor_a_report() {
    for config in configs() {
        let late = run(&config, |r| {
            // The first is that of the initial synchronisation.
            r.quorums = VecDeque::from([true, false, true, false, false, true, false]);
        });
        assert_same(&config, late, 4);
    }
}

#[test]
fn a_quorum_that_times_out_between_two_attempts_at_a_round_keeps_its_gradient() {
    for config in configs() {
        let (steps, sent, errors, d) = run(&config, |r| {
            r.votes = VecDeque::from([true, false, false]);
            r.quorums = VecDeque::from([true, true, false, false, true, false, true]);
        });
        let first: Vec<f32> = sent
            .borrow()
            .iter()
            .filter(|(step, _)| *step == 1)
            .map(|(_, x)| *x)
            .collect();
        assert!(
            first.len() >= 3 && first.iter().all(|x| *x == first[0]),
            "{first:?}"
        );
        assert_same(&config, (steps, sent, errors, d), 3);
    }
}

#[test]
fn a_vote_without_an_answer_twice_is_two_lost_votes() {
    for config in configs() {
        let unanswered = run(&config, |r| {
            r.unanswered = VecDeque::from([None, Some(ErrorKind::Timeout), Some(ErrorKind::Unavailable)]);
        });
        assert_eq!(
            unanswered
                .1
                .borrow()
                .iter()
                .filter(|(step, _)| *step == 1)
                .count()
                % 3,
            0
        );
        assert_same(&config, unanswered, 0);
    }
}

#[test]
fn a_round_that_timed_out_goes_on_with_the_gradient_that_was_kept() {
    for config in configs() {
        let config = DilocoConfig {
            round_timeout: std::time::Duration::from_nanos(1),
            ..config
        };
        let late = run(&config, |r| {
            r.votes = VecDeque::from([true, false, false, true, false]);
        });
        assert_same(&config, late, 3);
    }
}

/// Takes what is left of the address space but for a mebibyte, which is too little for a thread's stack.
fn no_room_for_a_thread() -> Vec<Vec<u8>> {
    let mut taken = Vec::new();
    loop {
        let mut some = Vec::new();
        if some.try_reserve_exact(1 << 20).is_err() {
            taken.pop();
            return taken;
        }
        taken.push(some);
    }
}

#[test]
fn inv4_a_round_whose_thread_cannot_start_is_called_again_and_its_inner_steps_count_once() {
    const CHILD: &str = "OXCCL_TEST_NO_ROOM_FOR_A_THREAD";
    if std::env::var_os(CHILD).is_none() {
        // A process of its own: other tests would find no memory either, and leave stacks to be used again. The limit is of kibibytes.
        let output = Command::new("sh")
            .args(["-c", "ulimit -S -v 1048576 && exec \"$0\" \"$@\""])
            .arg(std::env::current_exe().unwrap())
            .arg("retries::inv4_a_round_whose_thread_cannot_start_is_called_again_and_its_inner_steps_count_once")
            .args(["--exact", "--nocapture"])
            .env(CHILD, "1")
            .env_remove("RUST_MIN_STACK")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}\n{errors}"
        );
        return;
    }
    let [_, _, config] = configs();
    assert!(config.eager);
    let (replica, sent) = watched();
    let mut d = begun(replica, &[2, 3], config.clone());
    let (mut attempts, mut taken) = (0, Vec::new());
    d.before_reduce(move |_| {
        attempts += 1;
        // The first fails, and what it took is given back when it is repeated.
        taken.clear();
        if attempts == 1 {
            taken = no_room_for_a_thread();
        }
    });
    let mut reports = Vec::new();
    let errors = (0..14).map(|at| inner_step(&mut d, at, &mut reports)).sum();
    assert_eq!(errors, 1, "a thread that cannot start, once");
    let steps = reports.iter().map(|r| r.step.0).collect();
    assert_same(&config, (steps, sent, errors, d), 1);
}

#[test]
fn the_end_of_a_run_is_retried_where_it_broke_off() {
    for config in configs() {
        // Without and with a quorum that does not come about, at each place.
        let mut ends = Vec::new();
        for failing in [usize::MAX].into_iter().chain(1..12) {
            let (mut replica, sent) = watched();
            replica.quorums = (0..12).map(|n| n != failing).collect();
            replica.votes = VecDeque::from([true, true, false, true, false, false]);
            let mut d = begun(replica, &[2, 3], config.clone());
            let mut reports = Vec::new();
            let mut errors: usize = (0..7).map(|at| inner_step(&mut d, at, &mut reports)).sum();
            while let Err(e) = d.finish(&mut Nothing) {
                assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
                errors += 1;
                assert!(errors < 5);
            }
            assert!(errors <= 1);
            let last = sent.borrow().iter().map(|(step, _)| *step).max().unwrap();
            assert_eq!(
                d.step(),
                Step(last + 2),
                "the closing round is one without data: {config:?}"
            );
            ends.push((d.step(), d.global_hash().unwrap(), errors));
        }
        assert!(
            ends.iter()
                .all(|(step, hash, _)| (step, hash) == (&ends[0].0, &ends[0].1))
        );
        assert!(
            ends.iter().filter(|(_, _, errors)| *errors == 1).count() >= 3,
            "{config:?}"
        );
    }
}

#[test]
fn a_vote_that_ends_the_run_is_told_and_is_not_followed_by_one_without_a_quorum() {
    for config in configs() {
        let (mut replica, _) = watched();
        replica.unanswered = VecDeque::from([None, Some(ErrorKind::InvalidArgument)]);
        let mut d = begun(replica, &[2, 3], config.clone());
        let mut told = Vec::new();
        for _ in 0..14 {
            if let Err(e) = d.after_inner_step(&mut Nothing) {
                told.push(e.kind());
            }
        }
        assert_eq!(told, [ErrorKind::InvalidArgument], "{config:?}");
    }
}

#[test]
fn what_is_out_of_order_is_refused_with_what_to_do_and_changes_nothing() {
    let refused = |outcome: Result<(), Error>, says: &str| {
        let e = outcome.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
        assert!(e.to_string().contains(says), "{e}");
    };
    for config in configs() {
        let config = DilocoConfig {
            rounds: Some(2),
            ..config
        };
        let (replica, _) = watched();
        let mut d = Diloco::with_layers(replica, params(&[2, 3]), config.clone(), &layer).unwrap();
        refused(d.after_inner_step(&mut Nothing).map(drop), "call begin");
        refused(d.finish(&mut Nothing), "call begin");
        refused(d.save(&mut Nothing).map(drop), "call begin");
        assert_eq!(d.step(), Step(0));
        d.begin(&mut Nothing).unwrap();
        refused(d.begin(&mut Nothing).map(drop), "begin was called already");
        let mut reports = Vec::new();
        inner_step(&mut d, 0, &mut reports);
        let saved = d.save(&mut Nothing).unwrap();
        let before = d.params().clone();
        refused(d.restore(&saved, &mut Nothing), "before begin");
        assert_eq!(d.params(), &before);
        let mut at = 1;
        while !d.is_finished() {
            inner_step(&mut d, at, &mut reports);
            at += 1;
        }
        assert_eq!(reports.iter().map(|r| r.step.0).collect::<Vec<_>>(), [1, 2]);
        refused(d.after_inner_step(&mut Nothing).map(drop), "finish");
        d.finish(&mut Nothing).unwrap();
        let end = d.global_hash().unwrap();
        refused(d.finish(&mut Nothing), "already");
        refused(d.after_inner_step(&mut Nothing).map(drop), "finish");
        refused(d.begin(&mut Nothing).map(drop), "already");
        assert_eq!((d.step(), d.global_hash().unwrap()), (Step(4), end));
    }
}

#[test]
fn a_leave_that_broke_off_may_be_repeated_and_no_step_comes_after_it() {
    for config in configs() {
        let (mut replica, _) = watched();
        replica.leaves_badly = true;
        let mut d = begun(replica, &[2, 3], config);
        assert_eq!(d.leave().unwrap_err().kind(), ErrorKind::Io);
        let e = d.after_inner_step(&mut Nothing).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
        d.leave().unwrap();
        assert_eq!(d.leave().unwrap_err().kind(), ErrorKind::InvalidState);
    }
}
