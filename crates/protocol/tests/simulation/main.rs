//! The joint simulation: n replicas of m ranks, their servers and a lighthouse, all of the real state machines, under virtual
//! time. Kills, stops, hangs, cuts, restarts, lost connections and strangers at random; the promises (INV-4 to 7) are looked at
//! after every event, and each replica that is able to commit must do so within a bounded time of the last fault.
//!
//! A seed determines a run wholly. A run that fails is made small (faults are left out while it still fails) and told with its
//! last events. `OXCCL_SIMULATION=FROM..TO` runs other seeds.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed, and says where"
)]

mod checks;
mod ends;
mod groups;
mod program;
mod random;
mod sources;
mod trainer;
mod world;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use random::{Scenario, Training};

/// What runs with every build; `--include-ignored` runs twenty times as many.
const SEEDS: Range<u64> = 0..5_000;

/// Seeds that failed once. What they draw changes with the model; the orders of events that they showed are rare.
const FAILED_ONCE: [u64; 29] = [
    169, 17_558, 19_592, 35_431, 41_217, 42_788, 48_123, 74_543, 80_508, 97_676, 98_403, 127_807, 158_130,
    171_792, 187_011, 203_660, 225_703, 1_167, 201_105, 209_301, 210_452, 214_074, 216_092, 242_200, 273_119,
    283_003, 289_600, 3_837, 440_678,
];

fn with_more(seed: u64) -> Scenario {
    Scenario::of(seed).with_more()
}

/// The same failure with as little as possible.
fn minimised(mut scenario: Scenario) -> Scenario {
    let fails = |s: &Scenario| world::run(s, false).violation.is_some();
    loop {
        let mut smaller = Vec::new();
        for i in 0..scenario.faults.len() {
            let mut s = scenario.clone();
            s.faults.remove(i);
            smaller.push(s);
        }
        let changes = [
            |s: &mut Scenario| s.loss = 0,
            |s: &mut Scenario| s.spares = false,
            |s: &mut Scenario| s.disorder = 0,
            |s: &mut Scenario| s.clock_jumps = false,
            |s: &mut Scenario| s.max_retries = None,
            |s: &mut Scenario| s.last = None,
            |s: &mut Scenario| s.says_last = true,
            |s: &mut Scenario| s.initial = true,
            |s: &mut Scenario| s.forgets = false,
            |s: &mut Scenario| s.counts_back = false,
            |s: &mut Scenario| s.asks_late = false,
            |s: &mut Scenario| s.training = Training::DataParallel { by_place: false },
        ];
        for change in changes {
            let mut s = scenario.clone();
            change(&mut s);
            if format!("{s:?}") != format!("{scenario:?}") {
                smaller.push(s);
            }
        }
        match smaller.into_iter().find(fails) {
            Some(s) => scenario = s,
            None => return scenario,
        }
    }
}

fn keep_the_promises(seeds: Range<u64>, draw: fn(u64) -> Scenario) {
    let next = AtomicU64::new(seeds.start);
    let (events, commits, spares) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let failed: Mutex<Vec<u64>> = Mutex::default();
    let begun = std::time::Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || failed.lock().unwrap().len() >= 20 {
                        return;
                    }
                    let outcome = world::run(&draw(seed), false);
                    events.fetch_add(outcome.events, Ordering::Relaxed);
                    commits.fetch_add(outcome.commits, Ordering::Relaxed);
                    spares.fetch_add(outcome.spares, Ordering::Relaxed);
                    if outcome.violation.is_some() {
                        failed.lock().unwrap().push(seed);
                    }
                }
            });
        }
    });
    println!(
        "seeds {seeds:?}: {events:?} events, {commits:?} committed steps, {spares:?} quorums with spares in {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    let mut failed = failed.into_inner().unwrap();
    failed.sort_unstable();
    for seed in &failed {
        let violation = world::run(&draw(*seed), false).violation;
        println!("seed {seed}: {}", violation.unwrap_or_default());
    }
    if let Some(&seed) = failed.first() {
        let scenario = minimised(draw(seed));
        let outcome = world::run(&scenario, true);
        let trace = outcome.trace.join("\n");
        panic!(
            "seed {seed} fails as\n{scenario:#?}\n{trace}\n{}",
            outcome.violation.unwrap_or_default()
        );
    }
}

#[test]
fn whatever_happens_the_promises_hold_and_whoever_can_commit_does() {
    let asked = std::env::var("OXCCL_SIMULATION").ok().and_then(|text| {
        let (from, to) = text.split_once("..")?;
        Some(from.trim().parse().ok()?..to.trim().parse().ok()?)
    });
    keep_the_promises(asked.unwrap_or(SEEDS), with_more);
}

#[test]
fn a_death_right_after_a_commit_costs_no_survivor_the_step() {
    let mut deaths = 0;
    for seed in 0..500 {
        let scenario = Scenario::of_deaths_after_commits(seed);
        let outcome = world::run(&scenario, false);
        deaths += outcome.deaths_at_commits;
        if let Some(violation) = outcome.violation {
            let trace = world::run(&scenario, true).trace.join("\n");
            println!("seed {seed}: {violation}");
            panic!("seed {seed} fails as\n{scenario:#?}\n{trace}\n{violation}");
        }
    }
    assert!(deaths > 500, "{deaths}");
}

#[test]
fn seeds_that_failed_once_keep_the_promises() {
    for seed in FAILED_ONCE {
        keep_the_promises(seed..seed + 1, Scenario::of);
        keep_the_promises(seed..seed + 1, with_more);
    }
}

#[test]
#[ignore = "long: a hundred thousand seeds"]
fn a_hundred_thousand_seeds_keep_the_promises() {
    keep_the_promises(SEEDS.end..SEEDS.end + 100_000, with_more);
}

#[test]
fn a_seed_replays_exactly() {
    for seed in 0..50 {
        let [a, b] = [0, 1].map(|_| world::run(&with_more(seed), true));
        assert_eq!((a.events, a.commits), (b.events, b.commits));
        assert_eq!(a.trace, b.trace);
    }
}
