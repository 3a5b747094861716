//! What the machine does at best, for `cargo xtask bench-peers`, which is not built to be fast: how fast threads copy at the same
//! time, and how long a word takes from one core to another.

use std::hint::{black_box, spin_loop};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use oxccl::core::{Error, ErrorKind, Result, copy_bytes};
use serde::Serialize;

use super::plan;
use crate::ExitCode;

const ROUNDS: usize = 7;
/// How much each thread copies in a round, at least, so that starting them does not count.
const COPIED: usize = 32 << 20;
const MOST_COPIES: usize = 1 << 20;
const HAND_OVERS: u32 = 20_000;
/// So many hand-overs are timed together: an interrupt in one block does not count.
const BLOCK: u32 = 500;
/// How often a thread looks for the word before it lets others have its core: far longer than a hand-over between two cores takes.
const LOOKS: u32 = 1 << 14;
/// For so long it is measured at most.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// How `bench-peers` asks.
#[derive(Debug, clap::Args)]
pub(crate) struct LimitArguments {
    /// Threads that copy at the same time.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(plan::MAX_RANKS)))]
    threads: u32,
    #[arg(long, value_delimiter = ',', value_parser = plan::parse_size)]
    sizes: Vec<u64>,
}

#[derive(Serialize)]
struct Limits {
    cores: usize,
    /// Microseconds between two cores; none where there is one.
    hand_over_us: Option<f64>,
    copies: Vec<Copies>,
}

#[derive(Serialize)]
struct Copies {
    bytes: u64,
    /// Of each thread.
    bytes_per_second: f64,
}

pub(crate) fn run(arguments: LimitArguments) -> Result<ExitCode> {
    let threads = arguments.threads as usize;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let hand_over_us = (threads > 1 && cores > 1).then(hand_over).transpose()?;
    let mut copies = Vec::new();
    for &bytes in &arguments.sizes {
        let size = usize::try_from(bytes)
            .map_err(|_| Error::invalid(format!("{bytes} bytes do not fit in memory")))?;
        copies.push(Copies {
            bytes,
            bytes_per_second: copy_rate(threads, size)?,
        });
    }
    let limits = Limits {
        cores,
        hand_over_us,
        copies,
    };
    crate::results::json(&limits, "the limits")?;
    Ok(ExitCode::SUCCESS)
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::Internal, what)
}

/// Bytes per second and thread at which `threads` threads copy buffers of their own of `bytes` bytes at the same time.
fn copy_rate(threads: usize, bytes: usize) -> Result<f64> {
    let copies = COPIED.div_ceil(bytes.max(1)).min(MOST_COPIES);
    let barrier = Barrier::new(threads);
    let work = || {
        let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
        (0..ROUNDS)
            .map(|_| {
                barrier.wait();
                let start = Instant::now();
                for _ in 0..copies {
                    copy_bytes(black_box(&mut to), black_box(&from));
                }
                barrier.wait();
                start.elapsed().as_secs_f64()
            })
            .collect::<Vec<f64>>()
    };
    let rounds = thread::scope(|scope| -> Result<Vec<f64>> {
        let spawn = |_| {
            let builder = thread::Builder::new().name("ox-copy".to_owned());
            builder
                .spawn_scoped(scope, work)
                .map_err(|e| Error::io("start a thread to copy with", e))
        };
        let threads = (0..threads).map(spawn).collect::<Result<Vec<_>>>()?;
        // A thread that got its core late sees a short round; the first to start sees all of it.
        let mut rounds = vec![0.0; ROUNDS];
        for thread in threads {
            let times = thread.join().map_err(|_| failed("a copying thread panicked"))?;
            for (round, time) in rounds.iter_mut().zip(times) {
                *round = time.max(*round);
            }
        }
        Ok(rounds)
    })?;
    let slowest = rounds.into_iter().fold(f64::MAX, f64::min);
    Ok(copies as f64 * bytes as f64 / slowest.max(1e-12))
}

/// Microseconds for a word to another core, half of its way there and back: the best block of those for which there is time, or the mean of what there was
/// time for. Where both threads share a core, or others have theirs, each hand-over may cost time slices.
fn hand_over() -> Result<f64> {
    let word = AtomicU32::new(0);
    let deadline = Instant::now() + TIME_LIMIT;
    // Waits for `value`; false at the deadline (the other thread may have failed to start).
    let wait = |value: u32| {
        let mut looks = 0u32;
        while word.load(Ordering::Acquire) != value {
            spin_loop();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                if Instant::now() >= deadline {
                    return false;
                }
                thread::yield_now();
            }
        }
        true
    };
    thread::scope(|scope| {
        let echo =
            || (0..HAND_OVERS).all(|i| wait(2 * i + 1) && (word.store(2 * i + 2, Ordering::Release), true).1);
        let builder = thread::Builder::new().name("ox-echo".to_owned());
        let echo = builder
            .spawn_scoped(scope, echo)
            .map_err(|e| Error::io("start a thread to measure with", e))?;
        let mut best = f64::MAX;
        let (mut from, mut done) = (Instant::now(), 0);
        for i in 0..HAND_OVERS {
            word.store(2 * i + 1, Ordering::Release);
            let answered = wait(2 * i + 2);
            done += u32::from(answered);
            if done == BLOCK || (!answered && done > 0 && best == f64::MAX) {
                let now = Instant::now();
                best = best.min((now - from).as_secs_f64() / f64::from(done));
                (from, done) = (now, 0);
            }
            if !answered {
                break;
            }
        }
        echo.join().map_err(|_| failed("the echoing thread panicked"))?;
        if best == f64::MAX {
            return Err(failed(&format!(
                "the other core does not answer within {TIME_LIMIT:?}"
            )));
        }
        Ok(best / 2.0 * 1e6)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_a_rate_whatever_their_size() {
        for bytes in [0, 4, 1 << 20] {
            assert_eq!(copy_rate(2, bytes).unwrap() > 0.0, bytes > 0, "{bytes}");
        }
    }

    #[test]
    fn two_threads_on_one_core_hand_over_too() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        // The thread that it starts inherits its one core.
        let measured = thread::spawn(|| {
            let here = sched_getaffinity(None).unwrap();
            let core = (0..CpuSet::MAX_CPU).find(|core| here.is_set(*core)).unwrap();
            let mut one = CpuSet::new();
            one.set(core);
            sched_setaffinity(None, &one).unwrap();
            hand_over()
        });
        assert!(measured.join().unwrap().unwrap() > 0.0);
    }
}
