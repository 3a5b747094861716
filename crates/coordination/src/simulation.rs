//! The real servers and clients in one thread, under a network and a clock that are simulated.
//!
//! A lighthouse, the manager servers and the ranks' clients are the production code, from the gRPC services down to HTTP/2; `net` carries their
//! bytes, late, held up, cut, or not at all, and a tokio runtime with a paused clock jumps from one due event to the next. What trains is played
//! (`rank`), around the real [`protocol::rank::Rank`]. `job` lets a seed's faults happen and checks what is promised.
//!
//! The pure simulation of `protocol` has the wider faults and is a hundred times as fast; this one finds what goes wrong between the state
//! machines and the wire. See docs/decisions/0002-simulated-network.md.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::clock;

mod checks;
mod disk;
mod groups;
mod job;
mod net;
mod random;
mod rank;
mod replica;

pub(crate) use disk::Disk;
pub(crate) use net::{End, Host, Listener};

thread_local! {
    /// The simulated time at the start of the run, and the wall clock's then.
    static WALL: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// The wall clock of the simulation that this thread runs.
pub(crate) fn wall() -> Option<Duration> {
    WALL.get()
        .map(|(start, wall)| wall + clock::now().saturating_duration_since(start))
}

/// From now on the wall clock shows this.
fn set_wall(wall: Option<Duration>) {
    WALL.set(wall.map(|wall| (clock::now(), wall)));
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::job::{Scenario, run};

    /// What runs with every build.
    const SEEDS: Range<u64> = 0..60;

    #[test]
    fn real_servers_and_clients_keep_the_promises_over_a_network_that_does_not() {
        let asked = std::env::var("OXCCL_SIMULATION").ok().and_then(|text| {
            let (from, to) = text.split_once("..")?;
            Some(from.trim().parse().ok()?..to.trim().parse().ok()?)
        });
        keep_the_promises(asked.unwrap_or(SEEDS));
    }

    /// The end of an epoch that was never delivered, whose id those of a later lighthouse were below; a commit in an epoch which the others had left, at
    /// the first step and later; a step that only a lost replica had.
    #[test]
    fn seeds_that_failed_once_keep_the_promises() {
        for seed in [1506, 2944, 935, 1300, 1758] {
            keep_the_promises(seed..seed + 1);
        }
    }

    #[test]
    #[ignore = "long: twenty thousand seeds"]
    fn twenty_thousand_seeds_keep_the_promises() {
        keep_the_promises(SEEDS.end..SEEDS.end + 20_000);
    }

    fn keep_the_promises(seeds: Range<u64>) {
        let begun = std::time::Instant::now();
        let next = AtomicU64::new(seeds.start);
        let commits = AtomicU64::new(0);
        let failed: Mutex<Vec<u64>> = Mutex::default();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= seeds.end || failed.lock().unwrap().len() >= 10 {
                            return;
                        }
                        let outcome = run(&Scenario::of(seed));
                        commits.fetch_add(outcome.commits, Ordering::Relaxed);
                        if let Some(violation) = outcome.violation {
                            println!("seed {seed}: {violation}");
                            failed.lock().unwrap().push(seed);
                        }
                    }
                });
            }
        });
        println!(
            "seeds {seeds:?}: {commits:?} committed steps in {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        let mut failed = failed.into_inner().unwrap();
        failed.sort_unstable();
        if let Some(seed) = failed.first() {
            let scenario = Scenario::of(*seed);
            let outcome = run(&scenario);
            let trace = outcome.trace.join("\n");
            panic!(
                "seed {seed} of {failed:?} fails as\n{scenario:#?}\n{trace}\n{}",
                outcome.violation.unwrap_or_default()
            );
        }
    }

    #[test]
    fn a_seed_replays() {
        for seed in 0..10 {
            let [a, b] = [0, 1].map(|_| run(&Scenario::of(seed)));
            assert!(a.commits > 0, "seed {seed} commits nothing");
            assert_eq!(a.trace, b.trace, "seed {seed}");
        }
    }
}
