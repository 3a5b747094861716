//! Steps over a quantised group that feeds errors back, with both ranks there: a failed commit and a restart change no bit.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use ftcore::{ProcessGroupExt, Result, Store};
use oxccl_ddp::{Ddp, DdpConfig, Slot};
use quant::ErrorFeedback;
use replica::State;
use replica::StateDict;
use training_rig::{ScriptedReplica, Source, ranks, two_bits};

const WORLD: u32 = 2;

/// What the averages add up to: the training loop's own state.
struct Sum(Vec<f32>);

impl State for Sum {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("sum", &[self.0.len()], &self.0)
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("sum")?;
        Ok(())
    }
}

/// What each step delivers on both ranks, if the gradients are 4 and 1 in every step; `restart` before that step.
fn history(votes: &[bool], restart: Option<usize>) -> Vec<[f32; 2]> {
    let histories = ranks(WORLD, |rank, store| one(rank, store, votes, restart));
    assert_eq!(histories[0], histories[1]);
    histories[0].clone()
}

fn one(rank: u32, store: &Arc<dyn Store>, votes: &[bool], restart: Option<usize>) -> Vec<[f32; 2]> {
    let make = |epoch: u64, step: i64, votes: &[bool]| {
        let group = two_bits(epoch, store, (rank, WORLD));
        let residuals = group.error_feedback().unwrap();
        let mut member = ScriptedReplica::connected(group, (rank, WORLD));
        (member.step, member.votes) = (step, votes.iter().copied().collect());
        Ddp::new(member, &[Slot::f32(2)], DdpConfig::default())
            .unwrap()
            .with_error_feedback(residuals)
    };
    let mut ddp = make(1, 0, votes);
    let mut state = Sum(vec![0.0; 2]);
    (0..3usize)
        .map(|n| {
            if restart == Some(n) {
                let saved = ddp.save(&mut state).unwrap();
                ddp = make(2, ddp.current_step().0, &[]);
                state = Sum(Vec::new());
                ddp.restore(&saved, &mut state).unwrap();
            }
            let before = state.0.clone();
            let apply = |state: &mut Sum, averages: &[Vec<f32>]| {
                state.0 = before.iter().zip(&averages[0]).map(|(s, a)| s + a).collect();
                Ok(())
            };
            ddp.step(&mut state, |_, _| Ok(vec![vec![4.0, 1.0]]), apply)
                .unwrap();
            [state.0[0] - before[0], state.0[1] - before[1]]
        })
        .collect()
}

#[test]
fn two_bits_with_error_feedback_follow_the_hand_computed_history() {
    // 4, 1 → 2, 0 owing 2, 1; so 6, 2 → 3, 3 owing 3, −1; so 7, 0 → 3.5, 0.
    assert_eq!(history(&[], None), [[2.0, 0.0], [3.0, 3.0], [3.5, 0.0]]);
}

#[test]
fn l13_a_failed_commit_and_a_restart_leave_what_is_owed_as_it_was() {
    let undisturbed = history(&[], None);
    assert_eq!(history(&[true, false, false, true, false], None), undisturbed);
    assert_eq!(history(&[false], Some(1)), undisturbed);
    assert_eq!(history(&[], Some(2)), undisturbed);
}

#[test]
fn a_replica_that_healed_owes_nothing_of_what_its_source_owes_and_pays_nothing_in_any_attempt_at_the_step() {
    let (offer, heal) = channel();
    let (offer, heal) = (Mutex::new(Some(offer)), Mutex::new(Some(heal)));
    let contributed = |residuals: &ErrorFeedback| {
        let mut all = residuals.state();
        all.retain(|(name, _)| name.ends_with(".contributed"));
        all
    };
    let ends = ranks(WORLD, |rank, store| {
        let group = two_bits(1, store, (rank, WORLD));
        let residuals = group.error_feedback().unwrap();
        let mut member = ScriptedReplica::connected(group, (rank, WORLD));
        // The second step fails twice on both.
        member.votes = [true, false, false].into();
        let adopted = Arc::new(Mutex::new(None));
        if rank == 1 {
            member.heal = heal.lock().unwrap().take().map(Source::From);
            member.heal_after = 1;
            let (seen, owed) = (adopted.clone(), residuals.clone());
            member.on_healed = Some(Box::new(move || *seen.lock().unwrap() = Some(contributed(&owed))));
        }
        let mut ddp = Ddp::new(member, &[Slot::f32(2)], DdpConfig::default())
            .unwrap()
            .with_error_feedback(residuals.clone());
        let mut state = Sum(vec![0.0; 2]);
        let mut averages = Vec::new();
        let mut after = Vec::new();
        for step in 0..2 {
            if (rank, step) == (0, 1) {
                *ddp.replica().offer.lock().unwrap() = offer.lock().unwrap().take();
            }
            let report = ddp.step(
                &mut state,
                |_, _| Ok(vec![vec![4.0, 1.0 + rank as f32]]),
                |_, a| {
                    averages = a[0].clone();
                    Ok(())
                },
            );
            assert_eq!(report.unwrap().failed_attempts, 2 * step);
            after.push(contributed(&residuals));
        }
        // No other rank needs this one any more.
        ddp.replica().group().barrier().unwrap();
        (adopted.lock().unwrap().clone(), after, averages)
    });
    let ((_, source, mean), (adopted, healed, seen)) = (&ends[0], &ends[1]);
    let owes = |residuals: &[(String, Vec<f32>)]| {
        residuals
            .iter()
            .any(|(_, residuals)| residuals.iter().any(|d| *d != 0.0))
    };
    assert!(owes(&source[0]) && owes(&healed[0]), "both owe something before");
    assert_eq!(
        adopted.as_ref(),
        Some(&Vec::new()),
        "its source pays what it owes itself"
    );
    assert!(!owes(&healed[1]), "the step changed nothing of it");
    assert_ne!(source[1], source[0], "its source paid");
    assert_eq!(mean, seen);
}
