//! Rounds over quantised groups that feed errors back, with every rank there: failed commits, healing and restarts change no bit.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::VecDeque;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use ftcore::{ProcessGroupExt, Result, Store};
use oxccl_diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters};
use quant::ErrorFeedback;
use replica::State;
use replica::StateDict;
use training_rig::{ScriptedReplica, Source, configuration, ranks, two_bits};

const WORLD: u32 = 3;

/// The inner loop: its steps depend on the rank and on how many it has made.
struct Walk {
    rank: u32,
    made: i64,
}

impl State for Walk {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("made", &[self.made])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.made = from.get_i64s("made")?[0];
        Ok(())
    }
}

impl Walk {
    fn step(&mut self, params: &mut SliceParameters) {
        self.made += 1;
        for i in 0..params.len() {
            let (at, own) = (self.made as f32 + 0.31 * self.rank as f32, i as f32);
            let moved = |(k, w): (usize, &mut f32)| *w -= (at * (k as f32 + 0.5) + own).sin() * 0.1 + 0.02;
            params
                .write(i, &mut |w| w.iter_mut().enumerate().for_each(moved))
                .unwrap();
        }
    }
}

type Run = Diloco<ScriptedReplica, SliceParameters>;

/// Everything that must not differ: the global parameters by their hash, the local ones, and what is owed, in bits.
type End = (String, SliceParameters, Vec<(String, Vec<u32>)>);

/// What a rank owed right after it had healed.
type Adopted = Arc<Mutex<Option<Vec<(String, Vec<f32>)>>>>;

/// One rank of a run, not begun.
struct Rank {
    diloco: Run,
    walk: Walk,
    residuals: Arc<ErrorFeedback>,
    adopted: Adopted,
}

impl Rank {
    fn make(
        store: &Arc<dyn Store>,
        rank: u32,
        config: &DilocoConfig,
        prepare: impl FnOnce(&mut ScriptedReplica),
    ) -> Self {
        Self::make_at(1, store, rank, config, prepare)
    }

    fn make_at(
        epoch: u64,
        store: &Arc<dyn Store>,
        rank: u32,
        config: &DilocoConfig,
        prepare: impl FnOnce(&mut ScriptedReplica),
    ) -> Self {
        let group = two_bits(epoch, store, (rank, WORLD));
        let residuals = group.error_feedback().unwrap();
        let mut member = ScriptedReplica::connected(group, (rank, WORLD));
        let (adopted, owed) = (Adopted::default(), residuals.clone());
        let seen = adopted.clone();
        member.on_healed = Some(Box::new(move || *seen.lock().unwrap() = Some(owed.state())));
        prepare(&mut member);
        let sizes = [700usize, 500, 177];
        let params = sizes
            .iter()
            .zip(0..)
            .map(|(n, i)| (format!("p{i}"), vec![0.0; *n]));
        let layer = |name: &str| name[1..].parse().unwrap();
        let diloco = Diloco::with_layers(
            member,
            SliceParameters::new(params.collect()),
            config.clone(),
            &layer,
        )
        .unwrap();
        Self {
            diloco: diloco.with_error_feedback(residuals.clone()),
            walk: Walk { rank, made: 0 },
            residuals,
            adopted,
        }
    }

    fn begin(&mut self) {
        self.diloco.begin(&mut self.walk).unwrap();
    }

    fn steps(&mut self, n: usize) -> u32 {
        let mut failed = 0;
        for _ in 0..n {
            self.walk.step(self.diloco.params_mut());
            let reports = self.diloco.after_inner_step(&mut self.walk).unwrap();
            failed += reports.iter().map(|r| r.failed_attempts).sum::<u32>();
        }
        failed
    }

    /// Waits until no other rank needs this one for a round in flight.
    fn settle(&self) {
        self.diloco.replica().group().barrier().unwrap();
    }

    fn end(&mut self) -> End {
        self.settle();
        let residuals = self.residuals.state().into_iter();
        let residuals = residuals.map(|(n, d)| (n, d.iter().map(|v| v.to_bits()).collect()));
        (
            self.diloco.global_hash().unwrap(),
            self.diloco.params().clone(),
            residuals.collect(),
        )
    }
}

/// Runs `body` on every rank; the results in rank order.
fn world<T: Send>(body: impl Fn(u32, &Arc<dyn Store>) -> T + Sync) -> Vec<T> {
    ranks(WORLD, body)
}

fn configs() -> [DilocoConfig; 3] {
    let streaming = DilocoConfig {
        sync_every: 6,
        fragments: 2,
        delay: 1,
        mixing: 0.5,
        bucket_elements: 600,
        ..DilocoConfig::default()
    };
    let blocking = DilocoConfig {
        fragments: 1,
        delay: 0,
        mixing: 0.0,
        sync_every: 3,
        ..streaming.clone()
    };
    let eager = DilocoConfig {
        eager: true,
        ..blocking.clone()
    };
    [streaming, blocking, eager]
}

/// 14 inner steps, undisturbed.
fn undisturbed(config: &DilocoConfig) -> Vec<End> {
    let all = world(|rank, store| {
        let mut r = Rank::make(store, rank, config, |_| {});
        r.begin();
        r.steps(14);
        r.end()
    });
    assert!(all.iter().all(|r| r.0 == all[0].0));
    assert!(
        all.iter().all(|r| r.2.iter().any(|(n, _)| n.contains("summed"))),
        "both roles owe"
    );
    all
}

#[test]
fn two_bits_with_error_feedback_follow_the_hand_computed_history() {
    // All replicas move by 4 and 1 in a round. First phases: 4, 1 → 2, 0 owing 2, 1; 6, 2 → 3, 3 owing 3, −1; 7, 0 → 3.5, 0.
    // The owner of the mean: 2, 0 → 1, 0 owing 1, 0; 4, 3 → 2, 2 owing 2, 1; 5.5, 1 → 2.75, 0.
    let config = DilocoConfig {
        outer: OuterOptimizer::Sgd { lr: 1.0 },
        ..DilocoConfig::diloco(1)
    };
    let histories = world(|rank, store| {
        let mut r = Rank::make(store, rank, &config, |_| {});
        r.begin();
        (0..3)
            .map(|_| {
                let moved = |w: &mut [f32]| {
                    w[0] -= 4.0;
                    w[1] -= 1.0;
                };
                r.diloco.params_mut().write(0, &mut |w| moved(w)).unwrap();
                r.diloco.after_inner_step(&mut r.walk).unwrap();
                let w = r.diloco.params().get(0).unwrap();
                [w[0], w[1]]
            })
            .collect::<Vec<_>>()
    });
    for history in histories {
        assert_eq!(history, [[-1.0, 0.0], [-3.0, -2.0], [-5.75, -2.0]]);
    }
}

#[test]
fn l13_a_failed_commit_leaves_what_is_owed_as_it_was() {
    for config in configs() {
        let disturbed = world(|rank, store| {
            let votes = [true, true, false, false, true, false];
            let mut r = Rank::make(store, rank, &config, |m| m.votes = VecDeque::from(votes));
            r.begin();
            let failed = r.steps(14);
            assert_eq!(failed, 3);
            r.end()
        });
        assert!(disturbed == undisturbed(&config), "{config:?}");
    }
}

#[test]
fn a_restarted_run_ends_with_the_same_bits_wherever_it_was_stopped() {
    for config in configs() {
        let expected = undisturbed(&config);
        let folder = tempfile::tempdir().unwrap();
        for stop in [1usize, 2, 3, 8] {
            let path = |rank: u32| folder.path().join(format!("{rank}.{stop}"));
            world(|rank, store| {
                let mut r = Rank::make(store, rank, &config, |_| {});
                r.begin();
                r.steps(stop);
                checkpoint::save(path(rank), &r.diloco.save(&mut r.walk).unwrap()).unwrap();
                r.settle();
            });
            let resumed = world(|rank, store| {
                let saved = checkpoint::load(path(rank)).unwrap();
                let step = saved.get_i64s("diloco/step").unwrap()[0];
                let mut early = Rank::make(store, rank, &config, |_| {});
                let e = early.diloco.restore(&saved, &mut early.walk);
                assert!(step == 0 || e.unwrap_err().to_string().contains("restore the replica first"));
                drop(early);
                let other: Arc<dyn Store> = Arc::new(ftcore::PrefixStore::new(store.clone(), "again"));
                let mut r = Rank::make(&other, rank, &config, |m| m.step = step);
                r.diloco.restore(&saved, &mut r.walk).unwrap();
                r.begin();
                r.steps(14 - stop);
                r.end()
            });
            assert!(resumed == expected, "stopped after {stop}: {config:?}");
        }
    }
}

#[test]
fn a_healed_replica_owes_nothing_of_what_its_source_owes_and_all_stay_bitwise_equal() {
    for config in configs() {
        let (offer, heal) = channel();
        let (offer, heal) = (Mutex::new(Some(offer)), Mutex::new(Some(heal)));
        let ends = world(|rank, store| {
            let mut r = Rank::make(store, rank, &config, |_| {});
            r.begin();
            r.steps(6);
            r.settle();
            let group = r.diloco.replica().group();
            if rank == 0 {
                *r.diloco.replica().offer.lock().unwrap() = offer.lock().unwrap().take();
            }
            if rank < WORLD - 1 {
                group.configure(configuration(2, store, (rank, WORLD))).unwrap();
                r.steps(8);
            } else {
                // The last rank dies and comes back in the next round.
                drop(r);
                drop(group);
                let heal = heal.lock().unwrap().take().map(Source::From);
                r = Rank::make_at(2, store, rank, &config, |m| m.heal = heal);
                r.begin();
                let made = usize::try_from(r.walk.made).unwrap();
                r.steps(14 - made);
            }
            r.settle();
            let adopted = r.adopted.lock().unwrap().clone();
            (
                r.diloco.step(),
                r.diloco.global_hash().unwrap(),
                adopted,
                r.residuals.state(),
            )
        });
        assert!(
            ends.iter().all(|e| (e.0, &e.1) == (ends[0].0, &ends[0].1)),
            "{config:?}"
        );
        let (adopted, after) = (&ends[2].2, &ends[2].3);
        assert_eq!(
            adopted.as_ref(),
            Some(&Vec::new()),
            "its source pays what it owes itself"
        );
        assert!(!ends[0].3.is_empty());
        assert!(
            after.iter().any(|(name, _)| name.contains(".summed@")),
            "it owes of its own sums since"
        );
    }
}
