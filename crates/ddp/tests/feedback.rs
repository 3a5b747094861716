//! Steps over a quantised group that feeds errors back, with both ranks there: a failed commit and a restart change no bit.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::Arc;

use checkpoint::StateDict;
use ddp::{Ddp, DdpConfig};
use ftcore::{Result, Store};
use manager::State;
use training_rig::{ScriptedReplica, ranks, two_bits};

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
        let debts = group.error_feedback().unwrap();
        let mut member = ScriptedReplica::connected(group, (rank, WORLD));
        (member.step, member.votes) = (step, votes.iter().copied().collect());
        Ddp::new(member, DdpConfig::default())
            .unwrap()
            .with_error_feedback(debts)
    };
    let mut ddp = make(1, 0, votes);
    let mut state = Sum(vec![0.0; 2]);
    (0..3usize)
        .map(|n| {
            if restart == Some(n) {
                let saved = ddp.save(&mut state).unwrap();
                ddp = make(2, ddp.current_step(), &[]);
                state = Sum(Vec::new());
                ddp.restore(&saved, &mut state).unwrap();
            }
            let before = state.0.clone();
            let apply = |state: &mut Sum, averages: &[Vec<f32>]| {
                state.0 = before.iter().zip(&averages[0]).map(|(s, a)| s + a).collect();
                Ok(())
            };
            ddp.step(&mut state, &[vec![4.0, 1.0]], apply).unwrap();
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
