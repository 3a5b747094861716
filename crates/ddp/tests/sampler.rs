//! Samples over random joins, deaths, lost votes and heals: each one of a data epoch is used exactly once by the steps that count.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::sync::Mutex;
use std::sync::mpsc::channel;

use ftcore::{ProcessGroupExt, Result, Step};
use oxccl_ddp::{Ddp, DdpConfig, Sampler, Slot};
use proptest::prelude::*;
use replica::Participation;
use replica::StateDict;
use training_rig::{ScriptedReplica, Source, gloo, ranks};

/// A replica's state: what heals. Every committed step leaves its samples in it.
#[derive(Clone, Default)]
struct State {
    step: Step,
    cursor: u64,
    used: Vec<u64>,
}

#[derive(Clone, Default)]
struct Replica {
    state: State,
    healed_into: Option<Step>,
}

/// What befalls the members in an attempt, as bits by member.
#[derive(Debug, Clone)]
struct Fate {
    /// Who loses its vote.
    lost: u8,
    /// Who dies after it, and is there again with nothing.
    dies: u8,
    joins: bool,
}

fn fates() -> impl Strategy<Value = Vec<Fate>> {
    let quiet = Just(0u8);
    let some = prop_oneof![3 => quiet, 1 => any::<u8>(), 1 => Just(u8::MAX)];
    let fate = (some.clone(), some, prop::bool::weighted(0.2));
    let fate = fate.prop_map(|(lost, dies, joins)| Fate { lost, dies, joins });
    prop::collection::vec(fate, 10..80)
}

fn bit(mask: u8, i: usize) -> bool {
    mask >> (i % 8) & 1 == 1
}

/// One attempt at the newest step.
fn attempt(sampler: &Sampler, members: &mut [Replica], fate: &Fate) {
    let newest = members.iter().max_by_key(|m| m.state.step).unwrap().state.clone();
    for m in members.iter_mut().filter(|m| m.state.step < newest.step) {
        (m.state, m.healed_into) = (newest.clone(), Some(newest.step));
    }
    let all_healed = members.iter().all(|m| m.healed_into == Some(newest.step));
    let contributes = |m: &Replica| all_healed || m.healed_into != Some(newest.step);
    let contributors = u32::try_from(members.iter().filter(|m| contributes(m)).count()).unwrap();
    let mut taken = Vec::new();
    let mut sum = 0.0;
    for i in 0..contributors {
        let part = sampler.part(newest.cursor, (i, contributors)).unwrap();
        sum += f64::from(part.weight);
        taken.extend(part.samples);
    }
    assert!(
        (sum - f64::from(contributors)).abs() < 1e-3,
        "the weights are 1 in the mean"
    );
    let committed = |(i, _): &(usize, &mut Replica)| !bit(fate.lost, *i);
    for (_, m) in members.iter_mut().enumerate().filter(committed) {
        m.state.used.extend(&taken);
        m.state.cursor = sampler.advance(m.state.cursor, contributors);
        m.state.step += 1;
        assert_eq!(m.state.used.len() as u64, m.state.cursor);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn each_sample_of_a_data_epoch_is_used_exactly_once_whoever_comes_and_goes(
        (samples, batch, members, seed) in (1u64..60, 1u64..6, 1usize..5, any::<u64>()),
        fates in fates(),
    ) {
        let sampler = Sampler::new(seed, samples, batch).unwrap();
        let mut all = vec![Replica::default(); members];
        for fate in &fates {
            attempt(&sampler, &mut all, fate);
            // The state itself must survive: the replica that has the newest dies only if another one has it, too.
            for i in 0..all.len() {
                let newest = all.iter().map(|m| m.state.step).max().unwrap();
                let alone = all.iter().filter(|m| m.state.step == newest).count() == 1;
                if bit(fate.dies, i) && !(alone && all[i].state.step == newest) {
                    all[i] = Replica::default();
                }
            }
            if fate.joins && all.len() < 6 {
                all.push(Replica::default());
            }
        }
        let used = &all.iter().max_by_key(|m| m.state.step).unwrap().state.used;
        for (epoch, chunk) in used.chunks(usize::try_from(samples).unwrap()).enumerate() {
            let mut seen = chunk.to_vec();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), chunk.len(), "a sample came twice in epoch {}", epoch);
            prop_assert!(seen.last().is_none_or(|last| *last < samples));
        }
    }

    #[test]
    fn a_data_epoch_is_a_permutation_whatever_the_size_of_the_data_set(
        samples in 1u64..3000, seed in any::<u64>(), epoch in 0u64..1000,
    ) {
        let sampler = Sampler::new(seed, samples, samples).unwrap();
        let mut all = sampler.part(epoch * samples, (0, 1)).unwrap().samples;
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..samples));
    }
}

#[test]
fn the_last_window_of_a_data_epoch_is_dealt_in_parts_that_differ_by_one_at_most() {
    let sampler = Sampler::new(3, 10, 4).unwrap();
    let parts = |cursor| {
        (0..3)
            .map(|i| sampler.part(cursor, (i, 3)).unwrap())
            .collect::<Vec<_>>()
    };
    let sizes = |cursor| parts(cursor).iter().map(|p| p.samples.len()).collect::<Vec<_>>();
    // 10 of the 12 that three would take; and what is left after one of one contributor, and of two.
    assert_eq!((sizes(0), sampler.advance(0, 3)), (vec![4, 3, 3], 10));
    assert_eq!((sizes(4), sampler.advance(4, 3)), (vec![2, 2, 2], 10));
    assert_eq!((sizes(8), sampler.advance(8, 3)), (vec![1, 1, 0], 10));
    assert_eq!(
        parts(8).iter().map(|p| p.weight).collect::<Vec<_>>(),
        [1.5, 1.5, 0.0]
    );
    assert_eq!((sampler.epoch(9), sampler.epoch(10)), (0, 1));
    assert_eq!(sampler.advance(8, 0), 8, "a round without data takes none");
    assert_eq!(sampler.part(0, (0, 2)).unwrap().weight, 1.0);
}

#[test]
fn orders_differ_between_data_epochs_and_seeds_and_are_the_same_on_all_replicas() {
    let order = |seed, epoch: u64| {
        let sampler = Sampler::new(seed, 1000, 1000).unwrap();
        sampler.part(epoch * 1000, (0, 1)).unwrap().samples
    };
    assert_eq!(order(1, 0), order(1, 0));
    for other in [order(1, 1), order(2, 0), (0..1000).collect()] {
        let same = order(1, 0).iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 20, "{same} of 1,000 samples are at the same place");
    }
    // Neighbours are torn apart: in a shuffle some 2 of 1,000 stay together.
    let near = order(1, 0)
        .windows(2)
        .filter(|w| w[0].abs_diff(w[1]) == 1)
        .count();
    assert!(near < 20, "{near}");
    // As many as there can be, without a table of them.
    let huge = Sampler::new(5, u64::MAX, 2).unwrap();
    assert_ne!(huge.part(7, (0, 1)).unwrap().samples, [7, 8]);
    assert_eq!(huge.advance(u64::MAX - 1, 3), u64::MAX);
}

#[test]
fn what_gives_nothing_to_train_on_is_refused() {
    assert!(Sampler::new(1, 0, 4).is_err() && Sampler::new(1, 4, 0).is_err());
    let e = Sampler::new(1, 4, 1).unwrap().part(0, (2, 2)).unwrap_err();
    assert!(e.to_string().contains("no contributor 2 among 2"), "{e}");
}

/// A model that counts how often each sample was used.
struct Counts {
    cursor: u64,
    used: Vec<f32>,
}

impl replica::State for Counts {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("cursor", &[i64::try_from(self.cursor).unwrap()])?;
        out.insert_f32("used", &[self.used.len()], &self.used)
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.cursor = u64::try_from(from.get_i64s("cursor")?[0]).unwrap();
        self.used = from.get_f32("used")?;
        Ok(())
    }
}

#[test]
fn steps_of_replicas_that_lose_votes_and_heal_use_each_sample_once() {
    const SAMPLES: u64 = 20;
    let (offer, heal) = channel();
    let (offer, heal) = (Mutex::new(Some(offer)), Mutex::new(Some(heal)));
    let ends = ranks(3, |rank, store| {
        let mut member = ScriptedReplica::connected(gloo(1, store, (rank, 3)), (rank, 3));
        // The second step, into which the last rank heals, and the third one are lost once.
        member.votes = [true, false, true, false].into();
        if rank == 2 {
            (member.heal, member.heal_after) = (heal.lock().unwrap().take().map(Source::From), 1);
        }
        let slots = [Slot::f32(20)];
        let mut ddp = Ddp::new(member, &slots, DdpConfig::default()).unwrap();
        let sampler = Sampler::new(9, SAMPLES, 2).unwrap();
        let mut state = Counts {
            cursor: 0,
            used: vec![0.0; 20],
        };
        let mut windows = Vec::new();
        while state.cursor < SAMPLES {
            if (rank, ddp.current_step()) == (0, Step(1)) {
                *ddp.replica().offer.lock().unwrap() = offer.lock().unwrap().take();
            }
            let compute = |state: &mut Counts, now: &Participation| {
                let contributors = if now.step == Step(1) { 2 } else { 3 };
                let mut gradient = vec![0.0; 20];
                for sample in sampler.part(state.cursor, (rank, contributors))?.samples {
                    gradient[usize::try_from(sample).unwrap()] += 1.0;
                }
                Ok(vec![gradient])
            };
            let mut averages = Vec::new();
            let keep = |_: &mut Counts, all: &[Vec<f32>]| {
                averages = all[0].clone();
                Ok(())
            };
            let report = ddp.step(&mut state, compute, keep).unwrap();
            let next = sampler.advance(state.cursor, report.contributors);
            windows.push(next - state.cursor);
            state.cursor = next;
            let counted = averages.iter().map(|a| a * report.contributors as f32);
            state.used.iter_mut().zip(counted).for_each(|(u, c)| *u += c);
        }
        // No other rank needs this one any more.
        ddp.replica().group().barrier().unwrap();
        (windows, state.used)
    });
    for (windows, used) in ends {
        assert_eq!(windows, [6, 4, 6, 4]);
        assert!(used.iter().all(|n| (n - 1.0).abs() < 1e-3), "{used:?}");
    }
}
