//! What the machine could do at best, measured in the same session.
//!
//! What crosses between ranks ([`Operation::crossing`](super::operations::Operation::crossing)) is copied at least once. The
//! limit is that many bytes at the rate at which all ranks' cores copy at the same time, plus one hand-over of a cache line
//! (that the data are there; that they have been taken may be said later), where every rank has a core of its own.

use std::collections::BTreeMap;
use std::hint::{black_box, spin_loop};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::operations::Point;

const ROUNDS: usize = 7;
/// How much each thread copies in a round, at least, so that starting them does not count.
const COPIED: usize = 32 << 20;
const HAND_OVERS: u32 = 20_000;
/// So many hand-overs are timed together: an interrupt in one block does not count.
const BLOCK: u32 = 500;
/// How often a thread looks for the word before it lets others have its core: far longer than a hand-over between two cores takes.
const LOOKS: u32 = 1 << 14;
/// Up to so many bytes an operation is short.
const SHORT: u64 = 4_096;
/// For so long it is measured at most.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The limit in microseconds of each point that has one: where ranks share cores, a short operation takes what the switches between them
/// take, which is not measured here.
pub(super) fn measure(ranks: u32, cores: usize, points: &[Point]) -> Result<BTreeMap<Point, f64>> {
    let threads = usize::try_from(ranks).context("a number of ranks out of range")?;
    let hand_over = match threads <= cores {
        true => Some(two_hand_overs()? / 2.0),
        false => None,
    };
    let mut rates = BTreeMap::new();
    let mut limits = BTreeMap::new();
    for point in points {
        if hand_over.is_none() && point.bytes <= SHORT {
            continue;
        }
        let mut limit = hand_over.unwrap_or_default();
        if point.bytes > 0 {
            let rate = match rates.get(&point.bytes) {
                Some(&rate) => rate,
                None => {
                    let bytes = usize::try_from(point.bytes).context("a size out of range")?;
                    copy_rate(threads, bytes)?
                }
            };
            rates.insert(point.bytes, rate);
            limit += point.operation.crossing(ranks) * point.bytes as f64 / rate * 1e6;
        }
        limits.insert(*point, limit);
    }
    Ok(limits)
}

/// Bytes per second and thread at which `threads` threads copy buffers of their own of `bytes` bytes at the same time.
fn copy_rate(threads: usize, bytes: usize) -> Result<f64> {
    let copies = COPIED.div_ceil(bytes);
    let barrier = Barrier::new(threads);
    let work = || {
        let numbers = bytes.div_ceil(size_of::<u64>());
        let (from, mut to) = (vec![1u64; numbers], vec![2u64; numbers]);
        (0..ROUNDS)
            .map(|_| {
                barrier.wait();
                let start = Instant::now();
                for _ in 0..copies {
                    copy(black_box(&mut to[..]), black_box(&from[..]));
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
                .context("no thread to copy with")
        };
        let threads = (0..threads).map(spawn).collect::<Result<Vec<_>>>()?;
        // A thread that got its core late sees a short round; the first to start sees all of it.
        let mut rounds = vec![0.0; ROUNDS];
        for thread in threads {
            let times = thread.join().map_err(|_| anyhow!("a copying thread failed"))?;
            for (round, time) in rounds.iter_mut().zip(times) {
                *round = time.max(*round);
            }
        }
        Ok(rounds)
    })?;
    let slowest = rounds.into_iter().fold(f64::MAX, f64::min);
    Ok(copies as f64 * bytes as f64 / slowest.max(1e-12))
}

/// A copy that is not `memcpy`'s, which is far from the limit on some processors (docs/benchmarks/kernels.md): every number goes up by one on its way.
fn copy(to: &mut [u64], from: &[u64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.wrapping_add(1);
    }
}

/// Microseconds for a word to another core and back: the best block of those for which there is time, or the mean of what there was
/// time for. Where both threads share a core, or others have theirs, each hand-over may cost time slices.
fn two_hand_overs() -> Result<f64> {
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
            .context("no thread to measure with")?;
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
        echo.join().map_err(|_| anyhow!("the echoing thread failed"))?;
        anyhow::ensure!(
            best < f64::MAX,
            "the other core does not answer within {TIME_LIMIT:?}"
        );
        Ok(best * 1e6)
    })
}

#[cfg(test)]
mod tests {
    use super::super::operations::{Operation, points};
    use super::*;

    #[test]
    fn the_limit_grows_with_the_bytes_that_cross_and_short_operations_have_one_where_each_rank_has_a_core() {
        let all = points(&Operation::ALL, Some(&[4, 1 << 20]), 2);
        let at = |operation, bytes| Point { operation, bytes };
        let two = measure(2, 64, &all).unwrap();
        let of = |operation, bytes| two[&at(operation, bytes)];
        assert_eq!(two.len(), all.len());
        assert!(of(Operation::Barrier, 0) > 0.0);
        assert!(of(Operation::AllReduce, 1 << 20) > of(Operation::AllReduce, 4));
        // The same rate and the same hand-over: half the bytes.
        let (reduced, gathered) = (
            of(Operation::AllReduce, 1 << 20),
            of(Operation::AllGatherInto, 1 << 20),
        );
        let hand_over = of(Operation::Barrier, 0);
        assert!(((reduced - hand_over) / (gathered - hand_over) - 2.0).abs() < 1e-6);
        let shared = measure(4, 1, &all).unwrap();
        assert!(shared[&at(Operation::Broadcast, 1 << 20)] > 0.0);
        assert!(!shared.contains_key(&at(Operation::AllReduce, 4)));
        assert!(!shared.contains_key(&at(Operation::Barrier, 0)));
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
            two_hand_overs()
        });
        assert!(measured.join().unwrap().unwrap() > 0.0);
    }
}
