//! The quantised group over gloo: what its results are, with ranks as threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use crate::ranks::{self, bits, configure, configured, error_of, group, ranks, reduce, soon, values};
use ftcore::float_mode::foreign::{self, MODES};
use ftcore::{
    Collective, DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions,
    Tensor,
};
use half::{bf16, f16};
use oxccl_quant::{Accuracy, Codec, CodecChoice, Moves, QuantizeOptions, QuantizedGroup, Rounding};

fn with(codec: Codec) -> QuantizeOptions {
    QuantizeOptions {
        codec: codec.into(),
        error_feedback: codec == Codec::Int2B64,
        ..QuantizeOptions::default()
    }
}

/// The sum or average of the ranks' values, exactly.
fn exact(world: u32, count: usize, op: ReduceOp) -> Vec<f32> {
    let inputs: Vec<_> = (0..world).map(|r| values(r, count)).collect();
    let divisor = if op == ReduceOp::Avg { world as f32 } else { 1.0 };
    (0..count)
        .map(|i| inputs.iter().map(|v| v[i]).sum::<f32>() / divisor)
        .collect()
}

/// The most by which a reduction of `values` may miss.
fn bound(codec: Codec, world: u32, op: ReduceOp) -> f32 {
    if world == 1 {
        return 0.0;
    }
    let divisor = if op == ReduceOp::Avg { world as f32 } else { 1.0 };
    let once = world as f32 * error_of(codec, 1.0);
    (once + error_of(codec, world as f32 + once)) / divisor
}

#[test]
fn all_ranks_hold_the_same_bits_close_to_the_exact_result() {
    let counts = [0, 1, 127, 129, 1000, 20_001];
    for world in 1..=4 {
        for (codec, accuracy) in Codec::ALL
            .into_iter()
            .map(|c| (c, Accuracy::Economic))
            .chain([(Codec::Int8B64, Accuracy::Best), (Codec::Int2B64, Accuracy::Best)])
        {
            let options = QuantizeOptions {
                accuracy,
                ..with(codec)
            };
            let all = configured(world, &options, |rank, g, _| {
                let calls = counts
                    .iter()
                    .flat_map(|&n| [ReduceOp::Sum, ReduceOp::Avg].map(|op| (n, op)));
                calls
                    .map(|(n, op)| (n, op, reduce(g, values(rank, n), op, true).unwrap()))
                    .collect::<Vec<_>>()
            });
            for (i, (n, op, (first, contributors))) in all[0].iter().enumerate() {
                assert_eq!(*contributors, world);
                for other in &all[1..] {
                    assert_eq!(bits(&other[i].2.0), bits(first), "{codec} {world} {n}");
                }
                let bound = bound(codec, world, *op);
                for (exact, got) in exact(world, *n, *op).iter().zip(first) {
                    assert!(
                        (exact - got).abs() <= bound,
                        "{codec} {world} {n} {op}: {exact} {got}"
                    );
                }
            }
        }
    }
}

#[test]
fn averages_divide_by_the_contributors_of_the_same_exchange() {
    for world in 2..=4 {
        for idle in [1, world] {
            let all = configured(world, &with(Codec::Int8B64), |rank, g, _| {
                reduce(g, vec![127.0; 300], ReduceOp::Avg, rank >= idle).unwrap()
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
fn halves_are_summed_in_f32_and_come_back_in_their_type() {
    for world in [2u32, 3] {
        configured(world, &with(Codec::Bf16), |rank, g, _| {
            let long: Vec<_> = (0..700).map(|i| f16::from_f32(i as f32 + rank as f32)).collect();
            let short = vec![f16::from_f32(60_000.0)];
            let tensors = vec![
                Tensor::from_vec(long).reshape(&[7, 100]).unwrap(),
                Tensor::zeros(DType::F16, 0),
                Tensor::from_vec(short),
            ];
            let done = g
                .all_reduce_coalesced(tensors, ReduceOp::Sum)
                .unwrap()
                .take()
                .unwrap();
            assert_eq!(done.tensors[0].shape(), [7, 100]);
            let offset: u32 = (0..world).sum();
            let sum = done.tensors[0].as_slice::<f16>().unwrap();
            // Up to 700 + 2 values of 8 significant bits each way: half a step at 512 per rank, one at the sum.
            let (want, got) = (500.0 * world as f32 + offset as f32, sum[500].to_f32());
            assert!((want - got).abs() <= 2.0 * world as f32 + 8.0, "{want} {got}");
            // What the narrow type cannot hold shows as infinity.
            assert_eq!(done.tensors[2].as_slice::<f16>().unwrap(), [f16::INFINITY]);
            let average = g
                .all_reduce(Tensor::from_vec(vec![bf16::from_f32(3.0); 9]), ReduceOp::Avg)
                .unwrap();
            let average = average.take_tensor().unwrap();
            assert_eq!(average.as_slice::<bf16>().unwrap(), [bf16::from_f32(3.0); 9]);
        });
    }
}

#[test]
fn reduce_scatter_rounds_once_and_gives_every_rank_its_part() {
    for world in 2..=4u32 {
        for codec in [Codec::Int8B64, Codec::Int4Hadamard { seed: 5 }, Codec::MxE4M3] {
            configured(world, &with(codec), |rank, g, _| {
                let (n, m) = (world as usize, 301);
                let bound = world as f32 * error_of(codec, 1.0);
                // One pair: no copies.
                let exact_sum = exact(world, n * m, ReduceOp::Sum);
                let mine = rank as usize * m..(rank as usize + 1) * m;
                let input = Tensor::from_vec(values(rank, n * m));
                let done = g
                    .reduce_scatter_into(input, Tensor::zeros(DType::F32, m), ReduceOp::Sum)
                    .unwrap()
                    .take()
                    .unwrap();
                assert_eq!(done.contributors, world);
                assert_eq!(
                    bits(done.tensors[0].as_slice::<f32>().unwrap()),
                    bits(&values(rank, n * m))
                );
                for (a, b) in exact_sum[mine]
                    .iter()
                    .zip(done.tensors[1].as_slice::<f32>().unwrap())
                {
                    assert!((a - b).abs() <= bound, "{codec} {world}: {a} {b}");
                }
                // Two pairs of different sizes, averaged.
                let pairs = [5usize, 130].map(|m| {
                    (
                        Tensor::from_vec(values(rank, n * m)),
                        Tensor::zeros(DType::F32, m),
                    )
                });
                let done = g
                    .reduce_scatter_into_coalesced(Vec::from(pairs), ReduceOp::Avg)
                    .unwrap()
                    .take()
                    .unwrap();
                for (i, m) in [5usize, 130].into_iter().enumerate() {
                    let exact = exact(world, n * m, ReduceOp::Avg);
                    let got = done.tensors[2 * i + 1].as_slice::<f32>().unwrap();
                    for (a, b) in exact[rank as usize * m..][..m].iter().zip(got) {
                        assert!((a - b).abs() <= bound, "{codec} {world} {m}: {a} {b}");
                    }
                }
                // A list with parts of different sizes, one of them empty.
                let size = |r: u32| if r == 1 { 0 } else { 40 + r as usize };
                let inputs = (0..world)
                    .map(|r| Tensor::from_vec(values(rank, size(r))))
                    .collect();
                let output = Tensor::zeros(DType::F32, size(rank));
                let got = g
                    .reduce_scatter(inputs, output, ReduceOp::Sum)
                    .unwrap()
                    .take_tensor()
                    .unwrap();
                let exact = exact(world, size(rank), ReduceOp::Sum);
                for (a, b) in exact.iter().zip(got.as_slice::<f32>().unwrap()) {
                    assert!((a - b).abs() <= bound, "{codec} {world}: {a} {b}");
                }
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_contribute_is_not_counted_in_reduce_scatter_either() {
    configured(3, &with(Codec::Int8B64), |rank, g, _| {
        let op = Collective::ReduceScatterInto {
            pairs: vec![(Tensor::from_vec(vec![127.0f32; 9]), Tensor::zeros(DType::F32, 3))],
            op: ReduceOp::Avg,
        };
        let options = SubmitOptions {
            contribute: rank != 0,
            ..SubmitOptions::by(soon())
        };
        let done = g.run(op, options).unwrap().take().unwrap();
        assert_eq!(done.contributors, 2);
        assert_eq!(done.tensors[1].as_slice::<f32>().unwrap(), [127.0; 3]);
    });
}

#[test]
fn moves_are_exact_unless_asked_for_and_then_equal_on_all_ranks() {
    for moves in [Moves::Exact, Moves::Quantized] {
        for world in [2u32, 3] {
            let options = QuantizeOptions {
                moves,
                ..with(Codec::Int8B64)
            };
            let all = configured(world, &options, |rank, g, _| {
                let before = g.traffic().sent;
                let sent = g.broadcast(Tensor::from_vec(values(7, 50_000)), 1).unwrap();
                let sent = sent.take_tensor().unwrap().into_vec::<f32>().unwrap();
                let bytes = g.traffic().sent - before;
                let n = world as usize;
                let into = g
                    .all_gather_into(
                        Tensor::from_vec(values(rank, 500)),
                        Tensor::zeros(DType::F32, 500 * n),
                    )
                    .unwrap();
                let into = into.take_tensor().unwrap().into_vec::<f32>().unwrap();
                let outputs = (0..n).map(|r| Tensor::zeros(DType::F32, 10 * r)).collect();
                let list = g
                    .all_gather(Tensor::from_vec(values(rank, 10 * rank as usize)), outputs)
                    .unwrap()
                    .take()
                    .unwrap();
                let list: Vec<_> = list.tensors[1..]
                    .iter()
                    .map(|t| t.as_slice::<f32>().unwrap().to_vec())
                    .collect();
                // Integers are never rounded.
                let ints = g
                    .broadcast(Tensor::from_vec(vec![i64::MAX - i64::from(rank); 3]), 0)
                    .unwrap();
                assert_eq!(
                    ints.take_tensor().unwrap().as_slice::<i64>().unwrap(),
                    [i64::MAX; 3]
                );
                (sent, into, list, bytes)
            });
            let quantised = moves == Moves::Quantized;
            for (sent, into, list, _) in &all {
                assert_eq!(bits(sent), bits(&all[0].0));
                assert_eq!(bits(into), bits(&all[0].1));
                assert_eq!(list, &all[0].2);
                assert_eq!(bits(sent) == bits(&values(7, 50_000)), !quantised);
                for r in 0..world as usize {
                    let own = values(r as u32, 500);
                    assert_eq!(bits(&into[500 * r..][..500]) == bits(&own), !quantised);
                    for (a, b) in into[500 * r..].iter().zip(&own).chain(list[r].iter().zip(&own)) {
                        assert!((a - b).abs() <= 0.005, "{a} {b}");
                    }
                }
            }
            let root = all[1].3;
            assert!(
                if quantised {
                    root < 120_000
                } else {
                    root >= 200_000
                },
                "{root}"
            );
        }
    }
}

#[test]
fn calls_run_in_order_and_what_is_not_quantised_is_exact() {
    configured(3, &with(Codec::Int8B64), |rank, g, _| {
        let parts = vec![
            Tensor::from_vec(vec![1.0f32; 5]).reshape(&[5, 1]).unwrap(),
            Tensor::from_vec(vec![2.0f32; 200]),
        ];
        let sum = g.all_reduce_coalesced(parts, ReduceOp::Sum).unwrap();
        let cast = g.broadcast(Tensor::from_vec(vec![rank as f32 + 0.1]), 2).unwrap();
        let next = g.send(Tensor::from_vec(vec![rank]), (rank + 1) % 3, 4).unwrap();
        let back = g.recv(Tensor::zeros(DType::U32, 1), (rank + 2) % 3, 4).unwrap();
        let all = g
            .all_to_all_into(
                Tensor::from_vec(vec![f64::from(rank); 3]),
                Tensor::zeros(DType::F64, 3),
                Vec::new(),
                Vec::new(),
            )
            .unwrap();
        let again = g
            .all_reduce(Tensor::from_vec(vec![1.0f32; 9]), ReduceOp::Avg)
            .unwrap();
        g.barrier().unwrap();
        let sum = sum.take().unwrap().tensors;
        assert_eq!((sum[0].shape(), sum[1].count()), (&[5usize, 1][..], 200));
        assert!((sum[0].as_slice::<f32>().unwrap()[4] - 3.0).abs() < 0.1);
        assert!((sum[1].as_slice::<f32>().unwrap()[199] - 6.0).abs() < 0.1);
        assert_eq!(cast.take_tensor().unwrap().as_slice::<f32>().unwrap(), [2.1]);
        next.take().unwrap();
        assert_eq!(
            back.take_tensor().unwrap().as_slice::<u32>().unwrap(),
            [(rank + 2) % 3]
        );
        assert_eq!(
            all.take_tensor().unwrap().as_slice::<f64>().unwrap(),
            [0.0, 1.0, 2.0]
        );
        assert_eq!(again.take().unwrap().contributors, 3);
    });
}

#[test]
fn reductions_that_rounding_would_falsify_are_unsupported_at_every_world_size() {
    for world in [1u32, 2] {
        configured(world, &with(Codec::Int8B64), |_, g, _| {
            for (tensor, op) in [
                (Tensor::zeros(DType::I32, 4), ReduceOp::Sum),
                (Tensor::zeros(DType::I64, 4), ReduceOp::Avg),
                (Tensor::zeros(DType::F64, 4), ReduceOp::Sum),
                (Tensor::zeros(DType::F32, 4), ReduceOp::Max),
                (Tensor::zeros(DType::F32, 4), ReduceOp::PremulSum(2.0)),
            ] {
                let dtype = tensor.dtype();
                let refused = g.all_reduce(tensor, op).unwrap_err();
                assert_eq!(refused.error.kind(), ErrorKind::Unsupported, "{refused}");
                assert_eq!(refused.op.tensors().len(), 1);
                let text = refused.to_string();
                assert!(
                    text.contains(&dtype.to_string()) && text.contains("int8-b64"),
                    "{text}"
                );
            }
            let refused = g
                .reduce(Tensor::zeros(DType::F32, 4), ReduceOp::Sum, 0)
                .unwrap_err();
            assert_eq!(refused.error.kind(), ErrorKind::Unsupported, "{refused}");
            // The group is as good as before.
            assert_eq!(
                reduce(g, vec![127.0; 3], ReduceOp::Avg, true).unwrap().0,
                [127.0; 3]
            );
        });
    }
}

#[test]
fn capabilities_are_those_of_the_wrapper() {
    let inner = ranks::gloo();
    let g = group(Codec::Int8B64);
    let c = g.capabilities();
    assert!(c.reduces(ReduceOp::Avg, DType::BF16) && !c.reduces(ReduceOp::Max, DType::F32));
    assert!(!c.reduces(ReduceOp::Sum, DType::I64) && c.moves.contains(DType::I64));
    assert!(!c.ops.contains(OpKind::Reduce) && c.ops.contains(OpKind::Send));
    assert!(c.has(Feature::BitwiseEqual) && c.has(Feature::Contributors) && !c.has(Feature::Borrow));
    for (op, text) in &c.notes {
        // Gloo's note on reduce and on f8 sums would be a lie here.
        assert!(
            !inner.capabilities().notes.iter().any(|(_, t)| t == text),
            "{op}: {text}"
        );
    }
    let note = |op: &str| c.notes.iter().find(|(o, _)| o == op).map(|(_, t)| t.to_string());
    assert!(note("all_reduce").unwrap().contains("int8-b64"));
    assert!(note("reduce").unwrap().contains("unsupported"));
    assert_eq!(&*g.info().backend, "gloo+int8-b64");
    // `auto` on the host.
    let auto = QuantizedGroup::new(ranks::gloo(), CodecChoice::Auto, Duration::from_secs(1)).unwrap();
    assert_eq!(auto.codec(), Codec::Int8B64);
    let refused = QuantizedGroup::new(ranks::gloo(), Codec::Int2B64, Duration::from_secs(1))
        .err()
        .unwrap();
    assert!(refused.to_string().contains("error_feedback"), "{refused}");
}

#[test]
fn l22_an_infinity_or_nan_of_one_rank_reaches_all() {
    for world in [2, 3] {
        for codec in [
            Codec::Int8B64,
            Codec::Int4Hadamard { seed: 1 },
            Codec::Int2B64,
            Codec::Bf16,
        ] {
            let all = configured(world, &with(codec), |rank, g, _| {
                let mut v = vec![1.0; 500];
                if rank == 1 {
                    (v[7], v[490]) = (f32::NEG_INFINITY, f32::NAN);
                }
                let done = reduce(g, v, ReduceOp::Sum, true).unwrap().0;
                (done, g.non_finite())
            });
            for (rank, (v, counted)) in all.into_iter().enumerate() {
                assert_eq!(v[7], f32::NEG_INFINITY, "{codec}");
                assert!(v[490].is_nan() && v[8].is_finite(), "{codec}");
                assert_eq!(counted, if rank == 1 { 2 } else { 0 });
            }
        }
    }
}

#[test]
fn bytes_on_the_wire_are_within_a_hundredth_of_the_formats() {
    let count = 1 << 18;
    for world in [2u32, 4] {
        for codec in [
            Codec::Int8B64,
            Codec::Int4Hadamard { seed: 0 },
            Codec::Int2B64,
            Codec::Bf16,
        ] {
            configured(world, &with(codec), |rank, g, _| {
                reduce(g, values(rank, 1), ReduceOp::Sum, true).unwrap();
                let before = g.traffic().sent;
                reduce(g, values(rank, count), ReduceOp::Sum, true).unwrap();
                let sent = (g.traffic().sent - before) as f64;
                let shares = 2.0 * f64::from(world - 1) / f64::from(world);
                let ideal = shares * count as f64 * codec.bits() / 8.0;
                assert!(sent <= 1.01 * ideal, "{codec} {world}: {sent} {ideal}");
                assert!(
                    sent >= 0.99 * ideal,
                    "{codec} {world}: counted too little: {sent} {ideal}"
                );
            });
        }
    }
}

#[test]
fn stochastic_rounding_repeats_a_round_and_differs_between_rounds() {
    let options = QuantizeOptions {
        rounding: Rounding::Stochastic { key: 11 },
        ..with(Codec::Int4B64)
    };
    for world in [2u32, 3] {
        let all = configured(world, &options, |rank, g, _| {
            let mut results = Vec::new();
            for round in [1, 2, 1] {
                g.start_round(round);
                for _ in 0..2 {
                    results.push(bits(
                        &reduce(g, values(rank, 3000), ReduceOp::Sum, true).unwrap().0,
                    ));
                }
            }
            results
        });
        for other in &all[1..] {
            assert_eq!(other, &all[0]);
        }
        assert_eq!(all[0][..2], all[0][4..]);
        assert!(all[0][0] != all[0][1] && all[0][0] != all[0][2]);
    }
}

#[test]
fn split_groups_are_quantised_too() {
    ranks(3, |rank, store| {
        let g = group(Codec::Int8B64);
        configure(&g, &store, 1, rank, 3).unwrap();
        let child = g.split(Some(u32::from(rank == 2)), 0, soon()).unwrap().unwrap();
        let work = child
            .all_reduce(Tensor::from_vec(vec![1.0f32, 0.001]), ReduceOp::Sum)
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

#[test]
fn split_groups_keep_the_options_of_the_group() {
    let options = QuantizeOptions {
        moves: Moves::Quantized,
        accuracy: Accuracy::Best,
        rounding: Rounding::Stochastic { key: 5 },
        ..with(Codec::Int8B64)
    };
    ranks(2, |rank, store| {
        let g = QuantizedGroup::with_options(ranks::gloo(), options.clone()).unwrap();
        configure(&g, &store, 1, rank, 2).unwrap();
        let child = g.split(Some(0), 0, soon()).unwrap().unwrap();
        let sent = child.broadcast(Tensor::from_vec(vec![1.0f32, 1e-5]), 0).unwrap();
        let got = sent.take_tensor().unwrap();
        // A broadcast that is exact would keep the small one.
        assert!((got.as_slice::<f32>().unwrap()[1] - 1e-5).abs() > 1e-6, "{got:?}");
    });
}

#[test]
fn with_error_feedback_the_group_below_is_split_and_not_this_one() {
    let options = QuantizeOptions {
        error_feedback: true,
        ..with(Codec::Int8B64)
    };
    ranks(2, |rank, store| {
        let g = QuantizedGroup::with_options(ranks::gloo(), options.clone()).unwrap();
        configure(&g, &store, 1, rank, 2).unwrap();
        assert!(!g.capabilities().has(Feature::Split));
        let e = g.split(Some(0), 0, soon()).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.to_string().contains("split the group below"), "{e}");
        // As it says.
        let below = ranks::gloo();
        configure(&*below, &store, 2, rank, 2).unwrap();
        let child = below.split(Some(0), 0, soon()).unwrap().unwrap();
        let child = QuantizedGroup::with_options(Arc::from(child), options.clone()).unwrap();
        configure(&child, &store, 3, rank, 2).unwrap();
        child.error_feedback().unwrap().begin("w");
        let (sum, contributors) = reduce(&child, vec![1.0; 8], ReduceOp::Sum, true).unwrap();
        assert!(contributors == 2 && (sum[0] - 2.0).abs() < 0.02, "{sum:?}");
    });
}

#[test]
fn inv3_the_mode_for_floats_of_one_ranks_threads_changes_no_bit() {
    // Codes below the normal numbers of their format, which a thread that flushes would decode to 0.
    let mut beside_a_peak = vec![0.01f32; 300];
    beside_a_peak.iter_mut().step_by(32).for_each(|v| *v = 1000.0);
    let small = vec![3e-5f32; 300];
    for (codec, values) in [(Codec::F16, small), (Codec::MxE4M3, beside_a_peak)] {
        for mode in MODES {
            let all = ranks(2, |rank, store| {
                let body = || {
                    // On a thread of the group, which is started here and so has this one's mode; and on this one.
                    let g = group(codec);
                    configure(&g, &store, 1, rank, 2).unwrap();
                    let submitted = reduce(&g, values.clone(), ReduceOp::Avg, true).unwrap().0;
                    let mut blocking = values.clone();
                    g.all_reduce_slice(&mut blocking, ReduceOp::Sum).unwrap();
                    g.shutdown(soon()).unwrap();
                    [submitted, blocking]
                };
                match rank {
                    0 => foreign::with(mode, body),
                    _ => body(),
                }
            });
            for (zero, one) in all[0].iter().zip(&all[1]) {
                assert_eq!(bits(zero), bits(one), "{codec}, mode {mode:#x}");
            }
            assert!(all[1][1].iter().all(|v| *v > 0.0), "{codec}");
        }
    }
}
