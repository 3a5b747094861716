//! INV-1 to INV-6 under fire: replicas are killed with SIGKILL at random moments, also while they heal, reduce or vote.
//! Survivors keep committing, nothing hangs, and no two replicas ever hold different parameters for one step.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::deadline_in;
use oxccl_tests::{Said, Worker};

const WORKER: &str = env!("CARGO_BIN_EXE_worker");

/// Steps from one kill to the next, at least.
const PACE: i64 = 60;

/// A generous limit on silence: a hang shows as this, not as an endless test.
const SILENCE: Duration = Duration::from_secs(40);

fn lighthouse(replicas: usize) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(replicas),
        join_timeout: Duration::from_secs(30),
        // Far beyond the test's time limit: deaths must be noticed by evidence, not by a missed heartbeat.
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

/// xorshift: the kills are random but the same on every run.
struct Dice(u64);
impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

struct Campaign {
    mode: &'static str,
    rounds: i64,
    url: String,
    says: Sender<(usize, usize, Said)>,
    hears: Receiver<(usize, usize, Said)>,
    workers: Vec<Worker>,
    /// Per replica: whether its current incarnation has committed anything, and its last step.
    committed: Vec<Option<i64>>,
    /// (step) → (hash, who said so).
    hashes: BTreeMap<i64, (String, Vec<(usize, usize)>)>,
    finals: BTreeMap<usize, String>,
    heals: usize,
}

impl Campaign {
    fn new(mode: &'static str, replicas: usize, rounds: i64, url: String) -> Self {
        let (says, hears) = channel();
        let mut c = Self {
            mode,
            rounds,
            url,
            says,
            hears,
            workers: Vec::new(),
            committed: vec![None; replicas],
            hashes: BTreeMap::new(),
            finals: BTreeMap::new(),
            heals: 0,
        };
        for r in 0..replicas {
            let w = c.spawn(r, 0);
            c.workers.push(w);
        }
        c
    }

    fn spawn(&self, replica: usize, incarnation: usize) -> Worker {
        let args = [
            self.mode,
            &self.url,
            &format!("r{replica}"),
            &replica.to_string(),
            &self.rounds.to_string(),
        ]
        .map(String::from);
        Worker::start(WORKER, replica, incarnation, &args, self.says.clone())
    }

    fn restart(&mut self, replica: usize) {
        self.workers[replica].kill();
        let incarnation = self.workers[replica].incarnation + 1;
        self.committed[replica] = None;
        self.workers[replica] = self.spawn(replica, incarnation);
    }

    /// The next word of an incarnation that is still alive; panics on silence, failure or unequal parameters.
    fn hear(&mut self, deadline: Instant) -> Option<(usize, Said)> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (replica, incarnation, said) = match self.hears.recv_timeout(left) {
                Ok(x) => x,
                Err(RecvTimeoutError::Timeout) => return None,
                Err(e) => panic!("{e}"),
            };
            let alive = self.workers[replica].incarnation == incarnation;
            match &said {
                Said::Failed(text) if alive => panic!("replica {replica} incarnation {incarnation}: {text}"),
                Said::Healed { .. } => self.heals += 1,
                Said::Committed { step, hash, .. } => {
                    let entry = self
                        .hashes
                        .entry(*step)
                        .or_insert_with(|| (hash.clone(), Vec::new()));
                    // INV-6. A step that only an incarnation now dead had committed may be done again by the others.
                    let witnesses_alive = entry.1.iter().any(|(r, l)| self.workers[*r].incarnation == *l);
                    if entry.0 != *hash && alive {
                        assert!(
                            !witnesses_alive,
                            "step {step}: replica {replica} incarnation {incarnation} has {hash}, {:?} had {}",
                            entry.1, entry.0
                        );
                        *entry = (hash.clone(), Vec::new());
                    }
                    if alive {
                        entry.1.push((replica, incarnation));
                        self.committed[replica] = Some(*step);
                    }
                }
                Said::Finished { hash } => {
                    self.finals.insert(replica, hash.clone());
                }
                _ => {}
            }
            if alive {
                return Some((replica, said));
            }
        }
    }

    /// Listens until `until` holds; panics after `SILENCE` without it.
    fn listen(&mut self, what: &str, mut until: impl FnMut(&Self, usize, &Said) -> bool) {
        let deadline = deadline_in(SILENCE);
        while let Some((replica, said)) = self.hear(deadline) {
            if until(self, replica, &said) {
                return;
            }
        }
        panic!(
            "nothing for {SILENCE:?} while waiting for {what}; committed so far: {:?}",
            self.committed
        );
    }

    /// Listens for a random moment, so that kills fall anywhere.
    fn drift(&mut self, moment: Duration) {
        let deadline = deadline_in(moment);
        while self.hear(deadline).is_some() {}
    }

    fn highest(&self) -> i64 {
        self.committed.iter().flatten().copied().max().unwrap_or(0)
    }

    fn finish(mut self, replicas: usize) {
        while self.finals.len() < replicas {
            self.listen("the end", |c, _, said| {
                matches!(said, Said::Finished { .. }) && c.finals.len() <= replicas
            });
        }
        let first = self.finals[&0].clone();
        assert!(
            self.finals.values().all(|h| *h == first),
            "unequal parameters at the end: {:?}",
            self.finals
        );
        for w in &mut self.workers {
            assert!(w.succeeded(), "replica {} did not exit cleanly", w.replica);
        }
    }
}

fn campaign(mode: &'static str, kills: i64, seed: u64) {
    let replicas = 3;
    let lighthouse = lighthouse(replicas);
    // Far more steps than the kills can take, so that no replica finishes while others still have to heal.
    let rounds = kills * PACE + 300;
    let mut dice = Dice(seed);
    let mut c = Campaign::new(mode, replicas, rounds, lighthouse.address());
    c.listen("the first commit of all", |c, _, _| {
        c.committed.iter().all(Option::is_some)
    });
    let mut gaps = Vec::new();
    for k in 0..kills {
        c.listen("progress", |c, _, _| c.highest() >= k * PACE);
        assert!(c.highest() < rounds - 50, "the run is too short for its kills");
        // Only an incarnation that others can spare: another replica must hold the state.
        let mut victims: Vec<usize> = (0..replicas)
            .filter(|v| (0..replicas).any(|o| o != *v && c.committed[o].is_some()))
            .collect();
        // Every third kill hits an incarnation that has not committed yet, if there is one: while it starts, joins or heals.
        let young: Vec<usize> = victims
            .iter()
            .copied()
            .filter(|v| c.committed[*v].is_none())
            .collect();
        if k % 3 == 0 && !young.is_empty() {
            victims = young;
        }
        let victim = victims[dice.below(victims.len() as u64) as usize];
        match dice.below(3) {
            0 => {}
            1 => c.listen("a reduction", |_, _, said| matches!(said, Said::Reducing { .. })),
            _ => {}
        }
        c.drift(Duration::from_micros(dice.below(30_000)));
        let before = c.highest();
        let killed = Instant::now();
        c.restart(victim);
        if k % 5 == 4 {
            // And once more right away, in the middle of its recovery.
            c.drift(Duration::from_micros(dice.below(150_000)));
            c.restart(victim);
        }
        c.listen("a commit after the kill", |c, _, _| c.highest() > before);
        gaps.push(killed.elapsed());
    }
    gaps.sort();
    let at = |percent: usize| gaps[(gaps.len() - 1) * percent / 100].as_secs_f64() * 1e3;
    println!(
        "{mode}: {kills} kills, {} recoveries; kill to the next commit p50 {:.1} ms, p99 {:.1} ms",
        c.heals,
        at(50),
        at(99)
    );
    assert!(c.heals > 0, "no replica ever healed: the kills proved nothing");
    c.finish(replicas);
    lighthouse.shutdown(deadline_in(Duration::from_secs(5))).unwrap();
}

// Together 60 kills: 20 + 15 + 15, and every fifth a double one.
#[test]
fn kills_at_random_moments_under_data_parallel() {
    campaign("ddp", 20, 0x5EED_0001);
}

#[test]
fn kills_at_random_moments_under_diloco() {
    campaign("diloco", 15, 0x5EED_0002);
}

#[test]
fn kills_at_random_moments_under_streaming_diloco() {
    campaign("streaming", 15, 0x5EED_0003);
}

#[test]
fn two_runs_without_kills_end_in_the_same_bits() {
    let run = || {
        let lighthouse = lighthouse(2);
        let mut c = Campaign::new("streaming", 2, 12, lighthouse.address());
        while c.finals.len() < 2 {
            c.listen("the end", |_, _, said| matches!(said, Said::Finished { .. }));
        }
        (
            c.hashes
                .iter()
                .map(|(s, (h, _))| (*s, h.clone()))
                .collect::<Vec<_>>(),
            c.finals[&0].clone(),
        )
    };
    let (first, second) = (run(), run());
    assert!(first.0.len() >= 12, "{first:?}");
    assert_eq!(first, second);
}

#[test]
fn two_replicas_with_different_shapes_are_both_named_and_nothing_is_corrupted() {
    let lighthouse = lighthouse(2);
    let (says, hears) = channel();
    let start = |replica: usize, width: &str| {
        let args = [
            "streaming",
            &lighthouse.address(),
            &format!("r{replica}"),
            &replica.to_string(),
            "6",
            width,
        ]
        .map(String::from);
        Worker::start(WORKER, replica, 0, &args, says.clone())
    };
    let (_a, _b) = (start(0, "100"), start(1, "101"));
    let deadline = deadline_in(SILENCE);
    let (mut failed, mut finished) = (None, None);
    while failed.is_none() || finished.is_none() {
        let left = deadline.saturating_duration_since(Instant::now());
        match hears
            .recv_timeout(left)
            .expect("one replica fails, the other finishes")
        {
            (r, _, Said::Failed(text)) => failed = Some((r, text)),
            (r, _, Said::Finished { .. }) => finished = Some(r),
            _ => {}
        }
    }
    let (loser, text) = failed.unwrap();
    assert_ne!(Some(loser), finished);
    assert!(
        text.contains("replica 'r0:") && text.contains("replica 'r1:"),
        "{text}"
    );
    assert!(
        text.contains("layer0.w[100]") && text.contains("layer0.w[101]"),
        "{text}"
    );
}
