//! Looking for a moment before sleeping, since being woken costs a good part of a small all-reduce.
//!
//! Every look gives the core away if anybody wants it, as oneCCL's own threads do (`CCL_YIELD`). Even so each thread that looks slows
//! those down that share its core: a caller looks only where the ranks have cores to spare.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ftcore::deadline_in;

/// How long a lane's thread looks for its next job.
const BETWEEN_JOBS: Duration = Duration::from_micros(100);
/// How long a caller looks for the end of its operation.
const AT_THE_END: Duration = Duration::from_micros(300);
/// A rank keeps so many cores busy: oneCCL's worker, the lane's thread in its call, and the caller that looks.
const BUSY: u32 = 3;

/// Looks for the next job; returns when it is `there`, or after a moment.
pub(super) fn between_jobs(there: impl Fn() -> bool) {
    look(deadline_in(BETWEEN_JOBS), there);
}

/// Looks for the end of an operation of `world` ranks, which may all be on this host; returns when it has `ended`, after a moment, or at
/// `deadline`.
pub(super) fn at_the_end(world: u32, deadline: Instant, ended: impl Fn() -> bool) {
    if world.saturating_mul(BUSY) <= cores() {
        look(deadline.min(deadline_in(AT_THE_END)), ended);
    }
}

fn cores() -> u32 {
    static CORES: OnceLock<u32> = OnceLock::new();
    *CORES.get_or_init(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        u32::try_from(cores).unwrap_or(u32::MAX)
    })
}

fn look(until: Instant, done: impl Fn() -> bool) {
    while !done() && Instant::now() < until {
        std::thread::yield_now();
    }
}
