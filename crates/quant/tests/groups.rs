//! The quantised group over gloo, with ranks as threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, Epoch, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, Store, SubmitOptions, Tensor, deadline_in,
};
use quant::{Codec, QuantizedGroup};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

fn group(codec: Codec) -> QuantizedGroup {
    let inner = GlooGroup::new("q", GroupOptions::default()).unwrap();
    QuantizedGroup::new(Arc::new(inner), codec, Duration::from_secs(20)).unwrap()
}

fn configure(
    group: &QuantizedGroup,
    store: &Arc<dyn Store>,
    epoch: u64,
    rank: u32,
    world: u32,
) -> Result<()> {
    group.configure(Configuration {
        store: store.clone(),
        prefix: "t".to_string(),
        name: "q".to_string(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: soon(),
    })?;
    // What a test does next must not reach a rank that is still configuring.
    store.barrier(&format!("configured/{epoch}"), world, soon())
}

/// Runs `body` on `world` ranks, unconfigured; the results in rank order.
fn ranks<T: Send>(world: u32, body: impl Fn(u32, Arc<dyn Store>) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::default());
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let store = store.clone();
                scope.spawn(move || body(rank, store))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn values(rank: u32, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7 + 3) as f32 * (rank as f32 + 0.3)).sin())
        .collect()
}

fn reduce(g: &QuantizedGroup, values: Vec<f32>, op: ReduceOp, contribute: bool) -> Result<(Vec<f32>, u32)> {
    let options = SubmitOptions {
        contribute,
        ..SubmitOptions::by(soon())
    };
    let tensors = vec![Tensor::from_vec(values)];
    let work = g
        .run(Collective::AllReduce { tensors, op }, options)
        .map_err(Error::from)?;
    let done = work.take()?;
    let contributors = done.contributors;
    Ok((done.into_tensor()?.as_slice::<f32>()?.to_vec(), contributors))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn all_ranks_hold_the_same_bits_close_to_the_exact_result() {
    for world in 1..=4 {
        for codec in Codec::ALL {
            let counts = [0, 1, 127, 129, 1000, 40_001];
            let all = ranks(world, |rank, store| {
                let g = group(codec);
                configure(&g, &store, 1, rank, world).unwrap();
                let done: Vec<_> = counts
                    .iter()
                    .flat_map(|&n| [ReduceOp::Sum, ReduceOp::Avg].map(|op| (n, op)))
                    .map(|(n, op)| (n, op, reduce(&g, values(rank, n), op, true).unwrap()))
                    .collect();
                g.shutdown(soon()).unwrap();
                done
            });
            for (i, (n, op, (first, contributors))) in all[0].iter().enumerate() {
                assert_eq!(*contributors, world);
                for other in &all[1..] {
                    assert_eq!(bits(&other[i].2.0), bits(first), "{codec} {world} {n}");
                }
                let divisor = if *op == ReduceOp::Avg { world as f32 } else { 1.0 };
                let inputs: Vec<_> = (0..world).map(|r| values(r, *n)).collect();
                for (j, got) in first.iter().enumerate() {
                    let exact: f32 = inputs.iter().map(|v| v[j]).sum::<f32>() / divisor;
                    let bound = match codec {
                        Codec::Int4Hadamard { .. } => 0.6,
                        Codec::MxE4M3 | Codec::MxE5M2 => 0.26,
                        _ => 0.03,
                    };
                    let bound = if world == 1 {
                        0.0
                    } else {
                        bound * 2.0 * world as f32 / divisor
                    };
                    assert!((exact - got).abs() <= bound, "{codec} {world} {n}: {exact} {got}");
                }
            }
        }
    }
}

#[test]
fn averages_divide_by_the_contributors_of_the_same_exchange() {
    for world in 2..=4 {
        for idle in [1, world] {
            let all = ranks(world, |rank, store| {
                let g = group(Codec::Int8B64);
                configure(&g, &store, 1, rank, world).unwrap();
                reduce(&g, vec![127.0; 300], ReduceOp::Avg, rank >= idle).unwrap()
            });
            let expected = if idle == world { 0.0 } else { 127.0 };
            for (values, contributors) in all {
                assert_eq!(contributors, world - idle);
                assert_eq!(values, vec![expected; 300]);
            }
        }
    }
}

#[test]
fn calls_run_in_order_and_what_is_not_quantised_is_exact() {
    ranks(3, |rank, store| {
        let g = group(Codec::Int8B64);
        configure(&g, &store, 1, rank, 3).unwrap();
        let parts = vec![
            Tensor::from_vec(vec![1.0f32; 5]).reshape(&[5, 1]).unwrap(),
            Tensor::from_vec(vec![2.0f32; 200]),
        ];
        let sum = g.allreduce_coalesced(parts, ReduceOp::Sum).unwrap();
        let cast = g.broadcast(Tensor::from_vec(vec![rank as f32 + 0.1]), 2).unwrap();
        let ints = g
            .allreduce(Tensor::from_vec(vec![1_000_001i64]), ReduceOp::Sum)
            .unwrap();
        let max = g
            .allreduce(Tensor::from_vec(vec![0.1f32 + rank as f32]), ReduceOp::Max)
            .unwrap();
        let again = g
            .allreduce(Tensor::from_vec(vec![1.0f32; 9]), ReduceOp::Avg)
            .unwrap();
        let sum = sum.take().unwrap().tensors;
        assert_eq!((sum[0].shape(), sum[1].count()), (&[5usize, 1][..], 200));
        assert!((sum[0].as_slice::<f32>().unwrap()[4] - 3.0).abs() < 0.1);
        assert!((sum[1].as_slice::<f32>().unwrap()[199] - 6.0).abs() < 0.1);
        assert_eq!(cast.take_tensor().unwrap().as_slice::<f32>().unwrap(), [2.1]);
        assert_eq!(
            ints.take_tensor().unwrap().as_slice::<i64>().unwrap(),
            [3_000_003]
        );
        assert_eq!(max.take_tensor().unwrap().as_slice::<f32>().unwrap(), [2.1]);
        assert_eq!(again.contributors().max(again.take().unwrap().contributors), 3);
        g.shutdown(soon()).unwrap();
    });
}

#[test]
fn l12_a_rank_with_another_format_is_named_at_configure() {
    for other in [Codec::MxE4M3, Codec::Int4Hadamard { seed: 1 }] {
        let all = ranks(3, |rank, store| {
            let g = group(if rank == 1 {
                other
            } else {
                Codec::Int4Hadamard { seed: 2 }
            });
            let e = configure(&g, &store, 1, rank, 3).unwrap_err();
            let refused = g
                .allreduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
                .unwrap_err();
            assert_eq!(refused.error.kind(), ErrorKind::InvalidState);
            (rank, e)
        });
        // The last to look may be told by a rank that found out before.
        let typed = all
            .iter()
            .filter(|(_, e)| e.kind() == ErrorKind::Mismatch)
            .count();
        assert!(typed >= 1, "{all:?}");
        for (_, e) in all {
            let text = e.to_string();
            assert!(
                text.contains("rank 1") && text.contains(&other.to_string()),
                "{text}"
            );
        }
    }
}

#[test]
fn l22_an_infinity_or_nan_of_one_rank_reaches_all() {
    for world in [2, 3] {
        let all = ranks(world, |rank, store| {
            let g = group(Codec::Int8B64);
            configure(&g, &store, 1, rank, world).unwrap();
            let mut v = vec![1.0; 500];
            if rank == 1 {
                (v[7], v[490]) = (f32::NEG_INFINITY, f32::NAN);
            }
            let done = reduce(&g, v, ReduceOp::Sum, true).unwrap().0;
            (done, g.non_finite())
        });
        for (rank, (v, counted)) in all.into_iter().enumerate() {
            assert_eq!(v[7], f32::NEG_INFINITY);
            assert!(v[490].is_nan() && v[8].is_finite());
            assert_eq!(counted, if rank == 1 { 2 } else { 0 });
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

#[test]
fn ranks_that_call_different_reductions_are_told_both() {
    for world in [2, 3] {
        let all = ranks(world, |rank, store| {
            let g = group(Codec::Int4Hadamard { seed: 0 });
            configure(&g, &store, 1, rank, world).unwrap();
            // One and two values take the same number of bytes.
            reduce(&g, vec![1.0; 1 + rank as usize % 2], ReduceOp::Sum, true).unwrap_err()
        });
        assert!(all.iter().any(|e| e.kind() == ErrorKind::Mismatch), "{all:?}");
        for e in all {
            assert!(
                e.to_string().contains("1 elements") && e.to_string().contains("2 elements"),
                "{e}"
            );
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
                .allreduce(Tensor::from_vec(vec![1.0f32; 10]), ReduceOp::Sum)
                .unwrap();
            let b = g
                .allreduce(Tensor::from_vec(vec![1.0f32; 20]), ReduceOp::Sum)
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
fn split_groups_are_quantised_too() {
    ranks(3, |rank, store| {
        let g = group(Codec::Int8B64);
        configure(&g, &store, 1, rank, 3).unwrap();
        let child = g.split(Some(u32::from(rank == 2)), 0, soon()).unwrap().unwrap();
        let work = child
            .allreduce(Tensor::from_vec(vec![1.0f32, 0.001]), ReduceOp::Sum)
            .unwrap();
        let sum = work.take_tensor().unwrap();
        let sum = sum.as_slice::<f32>().unwrap();
        if rank == 2 {
            assert_eq!(sum, [1.0, 0.001]);
        } else {
            // A thousandth of the peak is below half a step.
            assert!((sum[0] - 2.0).abs() < 0.02 && sum[1] == 0.0, "{sum:?}");
        }
    });
}
