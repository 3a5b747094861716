//! The quantised group over gloo: what happens when ranks disagree, lie, die or wait too long.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::ranks::{self, configuration, configure, group, meet, ranks, reduce, soon, values, with_options};
use ftcore::{
    Checked, Collective, Completion, DType, ErrorKind, Failed, ProcessGroup, ProcessGroupExt, ReduceOp,
    Rejected, Result, SubmitOptions, Tensor, Work, Wrapper, deadline_in, execute_by_submit, work_pair,
};
use oxccl_quant::{Accuracy, Codec, Moves, QuantizeOptions, QuantizedGroup};

#[test]
fn l12_ranks_that_quantise_differently_are_all_told_both_ways_at_configure() {
    let base = QuantizeOptions {
        codec: Codec::Int4Hadamard { seed: 2 }.into(),
        ..QuantizeOptions::default()
    };
    let odd_ones = [
        (
            Codec::MxE4M3.into(),
            base.accuracy,
            base.moves,
            "mx-e4m3",
            "int4-h128:0000000000000002",
        ),
        (
            Codec::Int4Hadamard { seed: 1 }.into(),
            base.accuracy,
            base.moves,
            "int4-h128:0000000000000001",
            "int4-h128:0000000000000002",
        ),
        (
            base.codec,
            Accuracy::Best,
            base.moves,
            "accuracy best",
            "accuracy economic",
        ),
        (
            base.codec,
            base.accuracy,
            Moves::Quantized,
            "moves quantised",
            "moves exact",
        ),
    ];
    for (codec, accuracy, moves, theirs, ours) in odd_ones {
        for (world, odd) in [(2, 1), (3, 0), (3, 1), (4, 3)] {
            ranks(world, |rank, store| {
                let g = with_options(if rank == odd {
                    QuantizeOptions {
                        codec,
                        accuracy,
                        moves,
                        ..base.clone()
                    }
                } else {
                    base.clone()
                });
                let e = configure(&g, &store, 1, rank, world).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Mismatch, "rank {rank} of {world}: {e}");
                let text = e.to_string();
                assert!(text.contains(theirs) && text.contains(ours), "{text}");
                assert!(text.contains(&format!("rank {odd}")), "{text}");
                let refused = g
                    .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
                    .unwrap_err();
                assert_eq!(refused.error.kind(), ErrorKind::InvalidState);
                // With the same format the next epoch works.
                let g = with_options(base.clone());
                meet(&store, "again", world);
                configure(&g, &store, 2, rank, world).unwrap();
                reduce(&g, values(rank, 10), ReduceOp::Sum, true).unwrap();
                g.shutdown(soon()).unwrap();
            });
        }
    }
}

#[test]
fn a_lost_peer_fails_the_others_and_the_group_works_again_after_configure() {
    ranks(3, |rank, store| {
        let mut g = group(Codec::Int8B64);
        configure(&g, &store, 1, rank, 3).unwrap();
        reduce(&g, values(rank, 100), ReduceOp::Sum, true).unwrap();
        if rank == 2 {
            drop(g);
            g = group(Codec::Int8B64);
        } else {
            let e = reduce(&g, values(rank, 100), ReduceOp::Sum, true).unwrap_err();
            // Refused at once on a rank that the other survivor told before it called.
            let (kind, first) = (e.kind(), g.error().unwrap());
            assert!(kind == ErrorKind::PeerLost || kind == ErrorKind::Poisoned, "{e}");
            assert_eq!(first.kind(), ErrorKind::PeerLost, "{first}");
            assert!(e.to_string().contains("all_reduce"), "{e}");
            assert!(g.error().is_some());
            let e = reduce(&g, values(rank, 1), ReduceOp::Sum, true).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Poisoned, "{e}");
        }
        configure(&g, &store, 2, rank, 3).unwrap();
        let (_, contributors) = reduce(&g, values(rank, 100), ReduceOp::Sum, true).unwrap();
        assert_eq!(contributors, 3);
        g.shutdown(soon()).unwrap();
    });
}

/// A call that one odd rank makes, the one of the others, and a word of each.
type Variant = (fn() -> Collective, fn() -> Collective, [&'static str; 2]);

fn all_reduce(counts: &[usize], op: ReduceOp) -> Collective {
    let tensors = counts.iter().map(|&n| Tensor::zeros(DType::F32, n)).collect();
    Collective::AllReduce { tensors, op }
}

#[test]
fn l15_ranks_that_call_different_collectives_are_all_told_both_calls() {
    let variants: [Variant; 8] = [
        // One and two values take the same number of bytes.
        (
            || all_reduce(&[1], ReduceOp::Sum),
            || all_reduce(&[2], ReduceOp::Sum),
            ["1 elements", "2 elements"],
        ),
        (
            || all_reduce(&[100], ReduceOp::Sum),
            || all_reduce(&[50_000], ReduceOp::Sum),
            ["100 elements", "50000 elements"],
        ),
        (
            || all_reduce(&[8], ReduceOp::Sum),
            || all_reduce(&[8], ReduceOp::Avg),
            ["sum", "avg"],
        ),
        (
            || all_reduce(&[1, 3], ReduceOp::Sum),
            || all_reduce(&[3, 1], ReduceOp::Sum),
            ["2 tensors", "2 tensors"],
        ),
        (
            || all_reduce(&[8], ReduceOp::Sum),
            || Collective::Barrier,
            ["all_reduce(f32, 8 elements", "barrier"],
        ),
        (
            || Collective::AllReduce {
                tensors: vec![Tensor::zeros(DType::BF16, 8)],
                op: ReduceOp::Sum,
            },
            || all_reduce(&[8], ReduceOp::Sum),
            ["bf16", "f32"],
        ),
        (
            || Collective::Broadcast {
                tensors: vec![Tensor::zeros(DType::F32, 8)],
                root: 1,
            },
            || Collective::Broadcast {
                tensors: vec![Tensor::zeros(DType::F32, 8)],
                root: 0,
            },
            ["root 0", "root 1"],
        ),
        (
            || Collective::Broadcast {
                tensors: vec![Tensor::zeros(DType::F32, 8)],
                root: 0,
            },
            || all_reduce(&[800], ReduceOp::Avg),
            ["broadcast", "all_reduce"],
        ),
    ];
    for world in [2, 3, 4] {
        for (odd_call, call, words) in variants {
            for odd in [0, world - 1] {
                ranks(world, |rank, store| {
                    let g = group(Codec::Int4Hadamard { seed: 0 });
                    configure(&g, &store, 1, rank, world).unwrap();
                    let op = if rank == odd { odd_call() } else { call() };
                    let e = match g.run(op, SubmitOptions::by(soon())) {
                        Ok(work) => work.wait(soon()).unwrap_err(),
                        Err(_) => g.error().unwrap(),
                    };
                    assert_eq!(e.kind(), ErrorKind::Mismatch, "rank {rank} of {world}: {e}");
                    for word in words {
                        assert!(
                            e.to_string().contains(word),
                            "rank {rank} of {world}, odd {odd}: {word}: {e}"
                        );
                    }
                    // Later calls are told the same first cause.
                    let refused = g
                        .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
                        .unwrap_err();
                    assert_eq!(refused.error.kind(), ErrorKind::Poisoned, "{refused}");
                    assert!(refused.to_string().contains(words[0]), "{refused}");
                    meet(&store, "told", world);
                    configure(&g, &store, 2, rank, world).unwrap();
                    reduce(&g, values(rank, 10), ReduceOp::Sum, true).unwrap();
                    g.shutdown(soon()).unwrap();
                });
            }
        }
    }
}

#[test]
fn abort_ends_what_is_pending_and_queued_and_gives_the_tensors_back() {
    ranks(2, |rank, store| {
        let g = group(Codec::Int8B64);
        configure(&g, &store, 1, rank, 2).unwrap();
        if rank == 0 {
            let a = g
                .all_reduce(Tensor::from_vec(vec![1.0f32; 10]), ReduceOp::Sum)
                .unwrap();
            let b = g
                .all_reduce(Tensor::from_vec(vec![1.0f32; 20]), ReduceOp::Sum)
                .unwrap();
            a.abort("enough");
            for (work, n) in [(a, 10), (b, 20)] {
                let e = work.wait(soon()).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
                assert_eq!(work.recover().first().map(Tensor::count), Some(n));
            }
        } else {
            let deadline = soon();
            while g.error().is_none() && Instant::now() < deadline {
                std::thread::yield_now();
            }
            assert!(g.error().is_some());
        }
    });
}

#[test]
fn l35_a_call_queued_behind_a_slow_one_times_out_by_its_own_deadline() {
    ranks(2, |rank, store| {
        let g = group(Codec::Int8B64);
        configure(&g, &store, 1, rank, 2).unwrap();
        if rank == 0 {
            let submit = |n: usize, seconds: f64| {
                let tensors = vec![Tensor::zeros(DType::F32, n)];
                let op = ReduceOp::Sum;
                let options = SubmitOptions::by(deadline_in(Duration::from_secs_f64(seconds)));
                g.run(Collective::AllReduce { tensors, op }, options).unwrap()
            };
            let begun = Instant::now();
            // Rank 1 never joins in: the first would wait for it for a long time.
            let (slow, queued) = (submit(10, 300.0), submit(20, 0.3));
            for (work, n) in [(&queued, 20), (&slow, 10)] {
                let e = work.wait(soon()).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
                assert_eq!(work.recover().first().map(Tensor::count), Some(n));
            }
            let took = begun.elapsed();
            assert!(
                took >= Duration::from_millis(300) && took < Duration::from_secs(15),
                "{took:?}"
            );
            let e = reduce(&g, vec![1.0], ReduceOp::Sum, true).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Poisoned, "{e}");
        }
        meet(&store, "timed out", 2);
        configure(&g, &store, 2, rank, 2).unwrap();
        reduce(&g, values(rank, 10), ReduceOp::Sum, true).unwrap();
        g.shutdown(soon()).unwrap();
    });
}

/// What is done to bytes.
type Spoil = fn(&mut [u8]);

/// Never spoils.
const UNARMED: usize = usize::MAX;

/// Passes everything on, but spoils the bytes that come back of every collective after the next `armed` ones.
struct Tampering {
    inner: Arc<dyn ProcessGroup>,
    armed: Arc<AtomicUsize>,
    spoil: Spoil,
}

impl Wrapper for Tampering {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let kind = op.get().kind();
        let work = self.inner.submit(op, options)?;
        let (spoilt, completer) = work_pair(kind, soon(), |_| {});
        let less = |left: usize| (left != UNARMED).then(|| left.saturating_sub(1));
        let left = self.armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        let (armed, spoil) = (left == Ok(0), self.spoil);
        let source = work.clone();
        work.on_complete(move |status| match status {
            ftcore::Status::Failed(e) => completer.fail(e.clone(), source.recover()),
            _ => match source.take() {
                Ok(mut done) => {
                    if armed && let Some(last) = done.tensors.last_mut() {
                        spoil(last.bytes_mut());
                    }
                    completer.succeed(done);
                }
                Err(e) => completer.fail(e, Vec::new()),
            },
        });
        Ok(spoilt)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(&self, color: Option<u32>, key: u32, by: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.inner.split(color, key, by)
    }
}

#[test]
fn inv10_bytes_that_are_not_what_was_sent_fail_the_call_and_name_the_sender() {
    // The last byte is a value of the last rank's chunk; bytes 8 to 11 and 16 to 23 of the first say contributors and count.
    let spoils: [(Spoil, &str); 4] = [
        (|b| b.iter_mut().for_each(|b| *b = 0), "beginning"),
        (|b| b.last_mut().into_iter().for_each(|b| *b ^= 1), "checksum"),
        (|b| b[8] = 0xff, "contributors"),
        (|b| b[20] = 1, "values"),
    ];
    for world in [2u32, 3] {
        for (spoil, word) in spoils {
            spoilt_reduction(world, 700, 0, spoil, word);
        }
    }
}

#[test]
fn inv10_a_slice_that_was_spoilt_while_others_are_in_flight_fails_the_call_and_names_the_sender() {
    // Three slices of each part: of three ranks, the third step is the first gather.
    let spoils: [(Spoil, &str); 2] = [
        (|b| b.last_mut().into_iter().for_each(|b| *b ^= 1), "checksum"),
        (|b| b[8] ^= 1, "slice"),
    ];
    for (spoil, word) in spoils {
        spoilt_reduction(2, 150_000, 2, spoil, word);
    }
    spoilt_reduction(3, 1_150_000, 1, spoils[1].0, spoils[1].1);
    spoilt_reduction(3, 1_150_000, 2, spoils[0].0, spoils[0].1);
}

/// Rank 0's bytes are spoilt after `passed` collectives of a reduction: it fails saying `word`, and naming a rank. The next epoch works.
fn spoilt_reduction(world: u32, count: usize, passed: usize, spoil: Spoil, word: &str) {
    ranks(world, |rank, store| {
        let armed = Arc::new(AtomicUsize::new(UNARMED));
        let inner = Arc::new(Tampering {
            inner: ranks::gloo(),
            armed: armed.clone(),
            spoil,
        });
        let g = QuantizedGroup::new(inner, Codec::Int8B64, Duration::from_secs(20)).unwrap();
        configure(&g, &store, 1, rank, world).unwrap();
        reduce(&g, values(rank, 700), ReduceOp::Sum, true).unwrap();
        armed.store(if rank == 0 { passed } else { UNARMED }, Ordering::SeqCst);
        let done = reduce(&g, values(rank, count), ReduceOp::Sum, true);
        armed.store(UNARMED, Ordering::SeqCst);
        if rank == 0 {
            let e = done.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
            assert!(e.to_string().contains(word), "{word}: {e}");
            assert!(e.context().peer.is_some(), "{e}");
            assert_eq!(g.error().unwrap().kind(), ErrorKind::Protocol);
        }
        meet(&store, "spoilt", world);
        configure(&g, &store, 2, rank, world).unwrap();
        reduce(&g, values(rank, 700), ReduceOp::Sum, true).unwrap();
        g.shutdown(soon()).unwrap();
    });
}

#[test]
fn a_missing_rank_is_named_when_the_group_is_configured() {
    ranks(3, |rank, store| {
        if rank == 2 {
            return;
        }
        let g = group(Codec::Int8B64);
        // A rank that is still starting when the other's time runs out would be missing too.
        meet(&store, "made", 2);
        let mut configuration = configuration(&store, 1, rank, 3);
        configuration.deadline = deadline_in(Duration::from_secs(1));
        let e = g.configure(configuration).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(e.to_string().contains("rank 2 of 3"), "{e}");
    });
}
