//! Whose outer gradient weighs how much: a replica that healed into a step holds a copy of its source's, and weighs in only if all do.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use crate::scripted::{begun, layer, params};
use ftcore::{ProcessGroupExt, Step};
use oxccl_diloco::{Diloco, DilocoConfig, Parameters, RoundReport, SliceParameters};
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, Source, gloo, ranks};

type Run = Diloco<ScriptedReplica, SliceParameters>;

/// Plain, overlapping and eager, all with an outer step that adopts the mean.
fn configs() -> [DilocoConfig; 3] {
    let plain = DilocoConfig::local_sgd(4);
    let overlapping = DilocoConfig {
        delay: 2,
        ..plain.clone()
    };
    let eager = DilocoConfig {
        eager: true,
        ..plain.clone()
    };
    [plain, overlapping, eager]
}

/// Inner steps that take `by` off everything, until so many rounds are done.
fn rounds(d: &mut Run, by: f32, n: usize) -> Vec<RoundReport> {
    let mut reports = Vec::new();
    while reports.len() < n {
        for i in 0..d.params().len() {
            d.params_mut()
                .write(i, &mut |w| w.iter_mut().for_each(|w| *w -= by))
                .unwrap();
        }
        reports.extend(d.after_inner_step(&mut Nothing).unwrap());
    }
    reports
}

/// Waits until no other rank needs this one for what is in flight.
fn settle(d: &Run) {
    d.replica().group().barrier().unwrap();
}

fn global(d: &mut Run) -> f32 {
    d.with_global(|p| p.get(0).unwrap()[0]).unwrap()
}

#[test]
fn inv4_a_replica_that_healed_into_a_round_does_not_weigh_in_in_any_attempt_at_it() {
    for config in configs() {
        let (offer, heal) = channel();
        let (offer, heal) = (Mutex::new(Some(offer)), Mutex::new(Some(heal)));
        let ends = ranks(3, |rank, store| {
            let mut replica = ScriptedReplica::connected(gloo(1, store, (rank, 3)), (rank, 3));
            // The first round fails twice on all.
            replica.votes = VecDeque::from([true, false, false]);
            if rank == 2 {
                replica.heal = heal.lock().unwrap().take().map(Source::From);
                replica.heal_after = 1;
            }
            let mut d = begun(replica, &[3], config.clone());
            if rank == 0 {
                *d.replica().offer.lock().unwrap() = offer.lock().unwrap().take();
            }
            let report = rounds(&mut d, (rank + 1) as f32, 1).remove(0);
            settle(&d);
            (report, global(&mut d))
        });
        // Inner steps that were made by the time at which the round is sent.
        let sent = (4 - config.delay) as f32;
        for (rank, (report, global)) in ends.iter().enumerate() {
            assert_eq!((report.step, report.failed_attempts), (Step(1), 2));
            assert_eq!(report.contributors, 2, "rank {rank}: {config:?}");
            // The mean of 1 and 2 in each inner step. With the copy of rank 0's it would be 4/3.
            assert_eq!(*global, -1.5 * sent, "rank {rank}: {config:?}");
            assert_eq!(report.healed.is_some(), rank == 2);
        }
    }
}

/// The state of a run in its second round, which it has just sent, with its step: what a peer gets that heals then.
fn source(config: &DilocoConfig) -> (i64, StateDict) {
    let mut d = begun(ScriptedReplica::identical(), &[3], config.clone());
    rounds(&mut d, 1.0, 1);
    let sent = |d: &Run| d.replica().snapshot.get_f32("param/p0").unwrap();
    let first = sent(&d);
    while sent(&d) == first && !config.eager {
        d.params_mut()
            .write(0, &mut |w| w.iter_mut().for_each(|w| *w -= 5.0))
            .unwrap();
        d.after_inner_step(&mut Nothing).unwrap();
    }
    (2, d.replica().snapshot.clone())
}

#[test]
fn inv4_where_all_healed_into_a_round_their_copies_are_averaged() {
    for config in configs() {
        let (step, state) = source(&config);
        let moved = state.get_f32("global/p0").unwrap()[0] - state.get_f32("param/p0").unwrap()[0];
        let base = state
            .get_f32("base/p0")
            .map_or(moved, |base| base[0] - state.get_f32("param/p0").unwrap()[0]);
        assert!(base > 0.0, "the test would show nothing: {config:?}");
        let before = state.get_f32("global/p0").unwrap()[0];
        let ends = ranks(3, |rank, store| {
            let mut replica = ScriptedReplica::connected(gloo(1, store, (rank, 3)), (rank, 3));
            replica.all_healed = true;
            replica.heal = Some(Source::Now(step, state.clone()));
            replica.votes = VecDeque::from([false, true]);
            let mut d = Diloco::with_layers(replica, params(&[3]), config.clone(), &layer).unwrap();
            let mut reports = d.begin(&mut Nothing).unwrap();
            if reports.is_empty() {
                // What each does after it has sent the copy does not count in this round.
                reports = rounds(&mut d, 10.0 * (rank + 1) as f32, 1);
            }
            settle(&d);
            (reports.remove(0), global(&mut d))
        });
        for (report, global) in &ends {
            assert_eq!((report.step.0, report.contributors), (step, 3));
            assert_eq!(*global, before - base, "{config:?}");
        }
    }
}

#[test]
fn with_eager_updates_a_replica_looks_ahead_by_its_part_of_the_mean_once_and_by_nothing_if_it_has_none() {
    let [_, _, eager] = configs();
    let (step, state) = source(&eager);
    let finished = state.get_f32("global/p0").unwrap();
    let own = state.get_f32("base/p0").unwrap()[0] - state.get_f32("param/p0").unwrap()[0];
    for (all_healed, share) in [(false, 0.0), (true, 0.5)] {
        let mut replica = ScriptedReplica::identical();
        replica.all_healed = all_healed;
        replica.heal = Some(Source::Now(step, state.clone()));
        // The round that it healed into fails twice.
        replica.votes = VecDeque::from([false, false]);
        let mut d = Diloco::with_layers(replica, params(&[3]), eager.clone(), &layer).unwrap();
        assert!(d.begin(&mut Nothing).unwrap().is_empty());
        let ahead = finished[0] - share * own;
        assert_eq!(d.params().get(0).unwrap(), [ahead; 3]);
        let report = rounds(&mut d, 1.0, 1).remove(0);
        assert_eq!((report.step.0, report.failed_attempts), (step, 2));
        // What was finished, and half of the 4 that it has moved by since: looking ahead in the repeated attempts would add to it.
        let global = global(&mut d);
        assert_eq!(global, finished[0] - own);
        assert_eq!(d.params().get(0).unwrap(), [global - 2.0; 3]);
    }
}

/// The first value of each of the two fragments, globally.
fn globals(d: &mut Run) -> [f32; 2] {
    d.with_global(|p| [p.get(0).unwrap()[0], p.get(1).unwrap()[0]])
        .unwrap()
}

/// Two fragments and an outer step that adopts the mean.
fn two_fragments(delay: u64, mixing: f32, eager: bool) -> DilocoConfig {
    DilocoConfig {
        sync_every: 8,
        fragments: 2,
        delay,
        mixing,
        eager,
        ..DilocoConfig::local_sgd(8)
    }
}

#[test]
fn inv4_inner_steps_of_the_source_count_once_in_every_fragment_after_a_heal() {
    // Of three rounds of four inner steps: the first and the third are of one fragment, the second of the other. Ranks 0, 1 and 2 take 1, 2 and 6 off
    // in every inner step, and rank 2 has healed into the first round when it was sent.
    let cases = [
        // -4 and -8; -8, -16 and four steps of 6; from the mix on -8, -16 and eight steps of 6.
        (two_fragments(0, 0.0, false), [-6.0, -16.0, -30.0]),
        (two_fragments(0, 0.5, false), [-6.0, -16.0, -30.0]),
        // -3 and -6; -7, -14 and four steps of 6; from (-4.25, -6.25, -4.5) on -7, -14 and seven steps of 6.
        (two_fragments(1, 0.5, false), [-4.5, -15.0, -26.0]),
        (two_fragments(0, 0.0, true), [-6.0, -16.0, -30.0]),
    ];
    for (config, expected) in cases {
        let (offer, heal) = channel();
        let (offer, heal) = (Mutex::new(Some(offer)), Mutex::new(Some(heal)));
        let ends = ranks(3, |rank, store| {
            let mut replica = ScriptedReplica::connected(gloo(1, store, (rank, 3)), (rank, 3));
            if rank == 2 {
                replica.heal = heal.lock().unwrap().take().map(Source::From);
                replica.heal_after = 1;
            }
            let mut d = begun(replica, &[3, 3], config.clone());
            if rank == 0 {
                *d.replica().offer.lock().unwrap() = offer.lock().unwrap().take();
            }
            let by = [1.0, 2.0, 6.0][rank as usize];
            let all = [(); 3].map(|_| {
                let report = rounds(&mut d, by, 1).remove(0);
                (report.contributors, globals(&mut d))
            });
            settle(&d);
            all
        });
        let [first, second, third] = expected;
        let known = [(2, [first, 0.0]), (3, [first, second]), (3, [third, second])];
        for (rank, end) in ends.iter().enumerate() {
            assert_eq!(*end, known, "rank {rank}: {config:?}");
        }
    }
}

#[test]
fn inv4_a_copy_that_was_in_flight_when_all_were_stopped_does_not_weigh_in_afterwards() {
    let [_, overlapping, eager] = configs();
    for config in [overlapping, eager] {
        let run = |stops: bool| {
            let (offer, heal) = channel();
            let (offer, heal) = (Mutex::new(Some(offer)), Mutex::new(Some(heal)));
            ranks(3, |rank, store| {
                let mut replica = ScriptedReplica::connected(gloo(1, store, (rank, 3)), (rank, 3));
                if rank == 2 {
                    replica.heal = heal.lock().unwrap().take().map(Source::From);
                    replica.heal_after = 1;
                }
                let mut d = begun(replica, &[3], config.clone());
                if rank == 0 {
                    *d.replica().offer.lock().unwrap() = offer.lock().unwrap().take();
                }
                let by = (rank + 1) as f32;
                // Between sending and finishing.
                let made = if config.eager { 5 } else { 3 };
                for _ in 0..made {
                    d.params_mut()
                        .write(0, &mut |w| w.iter_mut().for_each(|w| *w -= by))
                        .unwrap();
                    assert!(d.after_inner_step(&mut Nothing).unwrap().is_empty());
                }
                if stops {
                    let saved = d.save(&mut Nothing).unwrap();
                    settle(&d);
                    let mut replica = ScriptedReplica::connected(gloo(2, store, (rank, 3)), (rank, 3));
                    replica.step = d.step().0;
                    d = Diloco::with_layers(replica, params(&[3]), config.clone(), &layer).unwrap();
                    d.restore(&saved, &mut Nothing).unwrap();
                    assert!(d.begin(&mut Nothing).unwrap().is_empty());
                }
                let all = [(); 2].map(|_| {
                    let report = rounds(&mut d, by, 1).remove(0);
                    (report.step, report.contributors, global(&mut d))
                });
                settle(&d);
                all
            })
        };
        let unstopped = run(false);
        assert_eq!(unstopped[2][0].1, 2, "{unstopped:?}");
        assert_eq!(run(true), unstopped, "{config:?}");
    }
}
