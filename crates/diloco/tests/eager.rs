//! Eager updates and repeated rounds where a replica's own part is not just half of everything: among any number of replicas, right after
//! it has healed, and when it heals between two attempts at a round.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use ftcore::Step;

use crate::scripted::{begun, layer, params};
use oxccl_diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters};
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, Source};

type Run = Diloco<ScriptedReplica, SliceParameters>;

fn config(eager: bool, lr: f32) -> DilocoConfig {
    DilocoConfig {
        eager,
        outer: OuterOptimizer::Sgd { lr },
        ..DilocoConfig::diloco(4)
    }
}

/// One inner step takes `by` off everything.
fn inner_steps(d: &mut Run, n: usize, by: f32) {
    for _ in 0..n {
        for i in 0..d.params().len() {
            d.params_mut()
                .write(i, &mut |w| w.iter_mut().for_each(|w| *w -= by))
                .unwrap();
        }
        d.after_inner_step(&mut Nothing).unwrap();
    }
}

/// The state of a run that stands in its second round, in which it moves by `by`, with its step: what a peer gets that heals then.
fn source(config: &DilocoConfig, by: f32) -> (i64, StateDict) {
    let mut d = begun(ScriptedReplica::identical(), &[2], config.clone());
    inner_steps(&mut d, 4, 1.0);
    inner_steps(&mut d, 4, by);
    (2, d.replica().snapshot.clone())
}

#[test]
fn a_replicas_own_part_is_one_in_as_many_as_there_are() {
    // Inner steps take 1 each, so every outer gradient of this replica is 4, and the mean is `scale` times that. What it looks ahead by is
    // lr · 4 / M, on top of what is finished.
    for world in [1u32, 2, 3, 5] {
        for (scale, lr) in [(1.0f32, 0.5f32), (2.0, 0.25)] {
            let replica = ScriptedReplica::averaging(move |own| own.iter().map(|x| scale * x).collect());
            let mut d = begun(replica.among(world), &[2], config(true, lr));
            for finished in 0..4u8 {
                inner_steps(&mut d, 4, 1.0);
                let global = -lr * scale * 4.0 * f32::from(finished);
                let known = d.with_global(|p| p.get(0).unwrap()[0]).unwrap();
                let ahead = global - lr * 4.0 / world as f32;
                let local = d.params().get(0).unwrap()[1];
                assert!(
                    (known - global).abs() < 1e-4 && (local - ahead).abs() < 1e-4,
                    "{world}: {known} {local}"
                );
            }
        }
    }
}

#[test]
fn a_replica_that_just_healed_has_no_part_in_the_mean_to_look_ahead_by() {
    let config = config(true, 0.5);
    let (step, state) = source(&config, 3.0);
    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(step, state.clone()));
    let mut d = Diloco::with_layers(replica, params(&[2]), config, &layer).unwrap();
    d.begin(&mut Nothing).unwrap();
    // It goes on from what is finished, not from the source's parameters, and not from where the source looks ahead to.
    let global = d.with_global(|p| p.get(0).unwrap().to_vec()).unwrap();
    assert_eq!(d.params().get(0).unwrap(), global);
    assert_ne!(state.get_f32("param/p0").unwrap(), global);
}

#[test]
fn a_round_whose_parameters_are_healed_over_before_it_is_reported_says_so() {
    let config = config(true, 0.5);
    let (step, state) = source(&config, 3.0);
    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(step, state));
    // The quorums of the initial synchronisation and of the first round go by; that of the second comes before the first is reported.
    replica.heal_after = 2;
    let mut d = begun(replica, &[2], config);
    inner_steps(&mut d, 7, 1.0);
    let last = |d: &mut Run| d.after_inner_step(&mut Nothing).unwrap();
    let first = last(&mut d);
    let told: Vec<_> = first
        .iter()
        .map(|r| (r.step, r.healed.is_some(), r.superseded))
        .collect();
    assert_eq!(told, [(Step(1), false, true)]);
    inner_steps(&mut d, 3, 1.0);
    let second = last(&mut d);
    let told: Vec<_> = second
        .iter()
        .map(|r| (r.step, r.healed.is_some(), r.superseded))
        .collect();
    assert_eq!(told, [(Step(step), true, false)]);
}

#[test]
fn l13_a_replica_that_heals_between_two_attempts_sends_what_it_healed_to_and_not_what_it_had_kept() {
    for eager in [false, true] {
        let config = config(eager, 1.0);
        let (step, state) = source(&config, 10.0);
        let sent = Rc::new(RefCell::new(Vec::new()));
        let seen = sent.clone();
        let mut replica = ScriptedReplica::averaging(move |own| {
            seen.borrow_mut().push(own[0]);
            own.to_vec()
        });
        // The second round: lost, then healed and voted down, then done.
        replica.heal = Some(Source::Now(step, state));
        replica.heal_after = 3;
        replica.reductions = VecDeque::from([true, false, true, true]);
        replica.votes = VecDeque::from([true, true, false, true]);
        let mut d = begun(replica, &[2], config);
        inner_steps(&mut d, 12, 1.0);
        let sent = sent.borrow();
        assert_eq!(sent[..2], [4.0, 4.0], "its own first rounds");
        assert_eq!(sent[2..4], [40.0, 40.0], "{sent:?}");
    }
}

#[test]
fn a_round_that_never_commits_ends_at_its_time_out_and_says_which_step() {
    let mut replica = ScriptedReplica::identical();
    replica.votes = VecDeque::from([true, false, false]);
    let config = DilocoConfig {
        round_timeout: std::time::Duration::from_nanos(1),
        ..config(false, 1.0)
    };
    let mut d = begun(replica, &[2], config);
    for step in 0..4 {
        d.params_mut().write(0, &mut |w| w[0] -= 1.0).unwrap();
        let outcome = d.after_inner_step(&mut Nothing);
        if step < 3 {
            outcome.unwrap();
            continue;
        }
        let e = outcome.unwrap_err();
        assert_eq!(e.kind(), ftcore::ErrorKind::Timeout);
        assert!(
            e.to_string().contains("step 1 did not commit in 1 attempts"),
            "{e}"
        );
    }
    assert_eq!(d.step(), Step(1));
}

#[test]
fn a_replica_that_lost_a_vote_which_the_others_won_makes_its_inner_steps_of_the_next_round() {
    let config = config(true, 0.5);
    let (step, state) = source(&config, 10.0);
    let sent = Rc::new(RefCell::new(Vec::new()));
    let seen = sent.clone();
    let mut replica = ScriptedReplica::averaging(move |own| {
        seen.borrow_mut().push(own[0]);
        own.to_vec()
    });
    // The first round is lost here only: at the retry the others are in the second.
    replica.votes = VecDeque::from([true, false]);
    replica.heal = Some(Source::Now(step, state));
    replica.heal_after = 2;
    let mut d = begun(replica, &[2], config);
    inner_steps(&mut d, 8, 1.0);
    assert_eq!(
        (d.step(), sent.borrow().len()),
        (Step(step), 2),
        "a round without inner steps"
    );
    inner_steps(&mut d, 3, 1.0);
    assert_eq!(d.step(), Step(step));
    inner_steps(&mut d, 1, 1.0);
    assert_eq!(d.step(), Step(step + 1));
    // Its own round, that of the source of which it sends a copy, and the four inner steps that it made meanwhile.
    assert_eq!(*sent.borrow(), [4.0, 40.0, 4.0]);
}
