//! The engine against the published rules (arXiv 2311.08105 and 2501.18512), written down a second time, for all replicas at once and
//! on the papers' own time axis: every bit of every step, with replicas that differ.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::collections::VecDeque;
use std::sync::Arc;

use ftcore::Step;

use crate::scripted::begun;
use oxccl_diloco::{DilocoConfig, OuterOptimizer, Parameters, Pattern};
use training_rig::{Nothing, ScriptedReplica};

/// Elements per layer.
const LAYERS: [usize; 6] = [2, 1, 3, 1, 2, 1];

/// What an inner step of replica `m` makes of element `i`. Plain numbers, in the same order of operations on both sides.
fn inner_step(m: usize, t: u64, i: usize, w: f32) -> f32 {
    let target = (i as f32 + 1.0) * 0.25 - m as f32 * 0.75 + (t % 5) as f32 * 0.125;
    w - 0.125 * (m as f32 + 1.0) * (w - target)
}

/// Where layer `l` begins among all elements.
fn start(l: usize) -> usize {
    LAYERS[..l].iter().sum()
}

/// One setting of the published algorithm.
#[derive(Debug, Clone)]
struct Setting {
    replicas: usize,
    h: u64,
    p: u64,
    pattern: Pattern,
    tau: u64,
    alpha: f32,
    lr: f32,
    mu: f32,
}

/// What comes of it: per step of the published time axis the local parameters of replica 0 and the outer copy, and per send every
/// replica's part of the outer gradient.
struct History {
    local: Vec<Vec<f32>>,
    outer: Vec<Vec<f32>>,
    sent: Vec<Vec<Vec<f32>>>,
}

impl Setting {
    /// The elements of the published fragment q. Which fragment is called 0 is arbitrary; the engine's is the one that is sent first, the
    /// paper's the one that is sent at multiples of H.
    fn elements(&self, q: u64) -> Vec<usize> {
        let per = (LAYERS.len() as u64).div_ceil(self.p) as usize;
        let ours = |l: usize| match self.pattern {
            Pattern::Strided => l as u64 % self.p,
            Pattern::Sequential => (l / per) as u64,
        };
        let of_q = (0..LAYERS.len()).filter(|&l| (ours(l) + 1) % self.p == q);
        of_q.flat_map(|l| start(l)..start(l) + LAYERS[l]).collect()
    }

    fn published(&self, steps: u64) -> History {
        let (n, m) = (LAYERS.iter().sum(), self.replicas);
        let mut theta = vec![vec![0.0f32; n]; m];
        let (mut outer, mut momentum) = (vec![0.0f32; n], vec![0.0f32; n]);
        let mut in_flight: Vec<Option<Vec<f32>>> = vec![None; self.p as usize];
        let mut history = History {
            local: Vec::new(),
            outer: Vec::new(),
            sent: Vec::new(),
        };
        // The engine counts from the first inner step, with which the paper's t is at tau + 1.
        for t in self.tau + 1..=self.tau + steps {
            for (m, theta) in theta.iter_mut().enumerate() {
                for (i, w) in theta.iter_mut().enumerate() {
                    *w = inner_step(m, t - self.tau, i, *w);
                }
            }
            for q in 0..self.p {
                let offset = q * self.h / self.p;
                let elements = self.elements(q);
                if t >= offset && (t - offset).is_multiple_of(self.h) {
                    let parts: Vec<Vec<f32>> = theta
                        .iter()
                        .map(|theta| elements.iter().map(|&i| outer[i] - theta[i]).collect())
                        .collect();
                    in_flight[q as usize] = Some(mean(&parts));
                    history.sent.push(parts);
                }
                if t >= offset + self.tau
                    && (t - offset - self.tau).is_multiple_of(self.h)
                    && let Some(d) = in_flight[q as usize].take()
                {
                    for (&i, d) in elements.iter().zip(d) {
                        momentum[i] = self.mu * momentum[i] + d;
                        outer[i] -= self.lr * (d + self.mu * momentum[i]);
                        for theta in &mut theta {
                            theta[i] = self.alpha * theta[i] + (1.0 - self.alpha) * outer[i];
                        }
                    }
                }
            }
            history.local.push(theta[0].clone());
            history.outer.push(outer.clone());
        }
        history
    }

    fn config(&self) -> DilocoConfig {
        DilocoConfig {
            sync_every: self.h,
            fragments: self.p as usize,
            pattern: self.pattern,
            delay: self.tau,
            mixing: self.alpha,
            outer: OuterOptimizer::Nesterov {
                lr: self.lr,
                momentum: self.mu,
            },
            ..DilocoConfig::default()
        }
    }

    /// Runs the engine as replica 0 of these replicas, with `votes`, and holds every step to the published history.
    fn check(&self, votes: &[bool]) {
        let steps = 3 * self.h + 1;
        let history = Arc::new(self.published(steps));
        let (known, name) = (history.clone(), format!("{self:?}"));
        let mut replica = ScriptedReplica::by_step(move |step, own| {
            let mut parts = known.sent[usize::try_from(step).unwrap() - 1].clone();
            assert_eq!(bits(own), bits(&parts[0]), "sent at step {step}: {name}");
            parts[0] = own.to_vec();
            mean(&parts)
        });
        replica.votes = VecDeque::from(votes.to_vec());
        let mut d = begun(replica, &LAYERS, self.config());
        for t in 0..steps {
            for l in 0..LAYERS.len() {
                let step = |w: &mut [f32]| {
                    for (i, w) in (start(l)..).zip(w) {
                        *w = inner_step(0, t + 1, i, *w);
                    }
                };
                d.params_mut().write(l, &mut |w| step(w)).unwrap();
            }
            d.after_inner_step(&mut Nothing).unwrap();
            let flat = |p: &oxccl_diloco::SliceParameters| -> Vec<f32> {
                (0..LAYERS.len())
                    .flat_map(|l| p.get(l).unwrap().to_vec())
                    .collect()
            };
            let at = t as usize;
            assert_eq!(
                bits(&flat(d.params())),
                bits(&history.local[at]),
                "local, step {}: {self:?}",
                t + 1
            );
            let outer = d.with_global(flat).unwrap();
            assert_eq!(
                bits(&outer),
                bits(&history.outer[at]),
                "outer, step {}: {self:?}",
                t + 1
            );
        }
        assert!(
            d.step() > Step(i64::try_from(2 * self.p).unwrap()),
            "too few rounds: {self:?}"
        );
    }
}

/// The mean in rank order.
fn mean(parts: &[Vec<f32>]) -> Vec<f32> {
    let sum = |i: usize| parts.iter().map(|p| p[i]).fold(0.0, |a, b| a + b);
    (0..parts[0].len()).map(|i| sum(i) / parts.len() as f32).collect()
}

/// Zeros of either sign are the same value.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| (v + 0.0).to_bits()).collect()
}

/// Every fragment count, delay and mixing that goes with H = 6, of one to three replicas.
fn settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for (replicas, pattern) in [
        (1, Pattern::Strided),
        (2, Pattern::Sequential),
        (3, Pattern::Strided),
    ] {
        for p in [1u64, 2, 3] {
            for tau in 0..6 / p {
                for alpha in [0.0, 0.5, 1.0] {
                    for (lr, mu) in [(1.0, 0.0), (0.4, 0.9)] {
                        all.push(Setting {
                            replicas,
                            h: 6,
                            p,
                            pattern,
                            tau,
                            alpha,
                            lr,
                            mu,
                        });
                    }
                }
            }
        }
    }
    all
}

#[test]
fn streaming_diloco_is_the_published_rule_bit_for_bit_in_every_setting() {
    let settings = settings();
    assert_eq!(settings.len(), 3 * (6 + 3 + 2) * 3 * 2);
    settings.iter().for_each(|s| s.check(&[]));
}

#[test]
fn l13_failed_commits_do_not_change_a_bit_of_the_published_history() {
    for setting in settings().iter().filter(|s| s.replicas == 3) {
        // The first vote is that of the initial synchronisation.
        setting.check(&[true, false, true, false, false, true, true, false]);
    }
}
