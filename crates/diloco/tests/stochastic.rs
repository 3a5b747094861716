//! Rounds over groups that round at random: what is drawn follows from the step, so that a repeated round and a run that goes on give the same
//! bits.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::VecDeque;
use std::sync::Arc;

use crate::scripted::{layer, params};
use ftcore::{ProcessGroupExt, Store};
use oxccl_diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters};
use quant::{Codec, QuantizeOptions, Rounding};
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, quantised, ranks};

const WORLD: u32 = 3;

/// Runs rounds `from..to` on a rank; the hash of the global parameters after each, and the state at the end.
fn run(
    (store, epoch, rank): (&Arc<dyn Store>, u64, u32),
    votes: &[bool],
    saved: Option<&StateDict>,
    rounds: std::ops::Range<u32>,
) -> (Vec<String>, StateDict) {
    let options = QuantizeOptions {
        codec: Codec::Int4B64.into(),
        rounding: Rounding::Stochastic { key: 7 },
        ..QuantizeOptions::default()
    };
    let group = quantised(epoch, store, (rank, WORLD), options);
    let mut replica = ScriptedReplica::connected(group.clone(), (rank, WORLD));
    replica.votes = VecDeque::from(votes.to_vec());
    // Step 0 is the initial synchronisation.
    replica.step = if rounds.start == 0 {
        0
    } else {
        i64::from(rounds.start) + 1
    };
    let config = DilocoConfig {
        outer: OuterOptimizer::Sgd { lr: 1.0 },
        bucket_elements: 300,
        ..DilocoConfig::diloco(1)
    };
    let mut d = Diloco::with_layers(replica, params(&[700, 33]), config, &layer).unwrap();
    let drawn = group.clone();
    d.before_reduce(move |step| drawn.start_round(step.0.unsigned_abs()));
    if let Some(saved) = saved {
        d.restore(saved, &mut Nothing).unwrap();
    }
    d.begin(&mut Nothing).unwrap();
    let mut hashes = Vec::new();
    for at in rounds {
        for i in 0..2 {
            let moved = |(k, w): (usize, &mut f32)| *w -= (at as f32 + k as f32 * 0.7 + rank as f32).sin();
            d.params_mut()
                .write(i, &mut |w| w.iter_mut().enumerate().for_each(moved))
                .unwrap();
        }
        d.after_inner_step(&mut Nothing).unwrap();
        hashes.push(d.global_hash().unwrap());
    }
    group.barrier().unwrap();
    let state = d.save(&mut Nothing).unwrap();
    (hashes, state)
}

#[test]
fn a_round_that_is_done_again_and_a_run_that_goes_on_draw_the_same_numbers() {
    let undisturbed = ranks(WORLD, |rank, store| run((store, 1, rank), &[], None, 0..4).0);
    assert!(undisturbed.iter().all(|hashes| *hashes == undisturbed[0]));
    let failed = [true, false, true, false, false, true];
    let repeated = ranks(WORLD, |rank, store| run((store, 1, rank), &failed, None, 0..4).0);
    assert_eq!(repeated, undisturbed, "votes that failed");
    let resumed = ranks(WORLD, |rank, store| {
        let (mut hashes, state) = run((store, 1, rank), &[], None, 0..2);
        let again: Arc<dyn Store> = Arc::new(ftcore::PrefixStore::new(store.clone(), "again"));
        hashes.extend(run((&again, 2, rank), &[], Some(&state), 2..4).0);
        hashes
    });
    assert_eq!(resumed, undisturbed, "stopped in the middle");
}
