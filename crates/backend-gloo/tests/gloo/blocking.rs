//! Blocking calls run on the caller's thread: alone, beside submitted work, with peers that take the other way, and when
//! something goes wrong.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use ftcore::{
    Collective, DType, ErrorKind, Feature, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor,
    deadline_in,
};

use crate::ranks::{eventually, soon, with_groups};

fn by_soon() -> SubmitOptions {
    SubmitOptions::by(soon())
}

/// Longer than a ring, around chunk and block sizes, and nothing at all.
const COUNTS: [usize; 12] = [
    0, 1, 3, 16, 1000, 8191, 8192, 8193, 65_537, 200_001, 1_100_000, 2_500_007,
];

#[test]
fn borrowed_memory_of_any_length_is_reduced_in_place_with_equal_bytes_on_all_ranks() {
    for world in 1..=4u32 {
        with_groups(world, |rank, group| {
            assert!(group.capabilities().has(Feature::Borrow));
            for n in COUNTS {
                let of = |r: u32, i: usize| ((i * 31 + 7 * r as usize) % 1000) as f32 * 0.37 - 100.0;
                let mut data: Vec<f32> = (0..n).map(|i| of(rank, i)).collect();
                group
                    .all_reduce_slice_with(&mut data, ReduceOp::Sum, by_soon())
                    .unwrap();
                for (i, x) in data.iter().enumerate() {
                    let sum: f64 = (0..world).map(|r| f64::from(of(r, i))).sum();
                    assert!(
                        (f64::from(*x) - sum).abs() < 1e-2,
                        "world {world} n {n} at {i}: {x} {sum}"
                    );
                }
                // Bitwise equal (INV-3): the maximum and the minimum of the bits are the same.
                let bits: Vec<i64> = data.iter().map(|x| i64::from(x.to_bits())).collect();
                let (mut low, mut high) = (bits.clone(), bits);
                group
                    .all_reduce_slice_with(&mut low, ReduceOp::Min, by_soon())
                    .unwrap();
                group
                    .all_reduce_slice_with(&mut high, ReduceOp::Max, by_soon())
                    .unwrap();
                assert!(low == high, "world {world} n {n}: the ranks differ");
                let mut mean = vec![rank as i32 * 3; n];
                group
                    .all_reduce_slice_with(&mut mean, ReduceOp::Avg, by_soon())
                    .unwrap();
                let expected = (0..world as i32).map(|r| r * 3).sum::<i32>() / world as i32;
                assert!(mean.iter().all(|x| *x == expected));
                let mut data = vec![rank as u16; n];
                group
                    .broadcast_slice_with(&mut data, world - 1, by_soon())
                    .unwrap();
                assert!(data.iter().all(|x| *x == world as u16 - 1));
            }
        });
    }
}

#[test]
fn ranks_that_would_read_each_others_memory_and_wait_in_vain_name_who_is_missing() {
    with_groups(2, |rank, group| {
        if rank == 1 {
            eventually("the notice", || group.error().is_some());
            return;
        }
        let tensor = group.alloc(DType::F32, 1 << 16).unwrap();
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Sum,
        };
        let by = SubmitOptions::by(deadline_in(Duration::from_secs(1)));
        let failed = group.run_blocking(op, by).unwrap_err();
        assert_eq!(failed.error.kind(), ErrorKind::Timeout);
        assert!(
            failed.error.to_string().contains("waiting for rank 1"),
            "{}",
            failed.error
        );
        assert_eq!(failed.tensors.len(), 1);
    });
}

#[test]
fn a_rank_that_blocks_and_one_that_submits_are_in_the_same_operation() {
    with_groups(3, |rank, group| {
        for round in 0..60u32 {
            let n = [1, 700, 40_000][round as usize % 3];
            let mut data = vec![rank as i64 + 1; n];
            if (round + rank) % 2 == 0 {
                group
                    .all_reduce_slice_with(&mut data, ReduceOp::Sum, by_soon())
                    .unwrap();
            } else {
                let work = group.all_reduce(Tensor::from_vec(data), ReduceOp::Sum).unwrap();
                data = work.take_tensor().unwrap().into_vec().unwrap();
                assert_eq!(work.contributors(), 3);
            }
            assert!(data.iter().all(|x| *x == 6));
            if (round + rank) % 3 == 0 {
                group.run_blocking(Collective::Barrier, by_soon()).unwrap();
            } else {
                group.barrier().unwrap();
            }
        }
    });
}

#[test]
fn blocking_calls_keep_their_place_behind_submitted_ones() {
    with_groups(2, |rank, group| {
        let works: Vec<_> = (0..20i64)
            .map(|i| {
                let data = Tensor::from_vec(vec![i; 5000]);
                group.all_reduce(data, ReduceOp::Sum).unwrap()
            })
            .collect();
        let mut last = vec![rank as f64; 3];
        group
            .all_reduce_slice_with(&mut last, ReduceOp::Sum, by_soon())
            .unwrap();
        assert_eq!(last, [1.0; 3]);
        for (i, work) in (0i64..).zip(works) {
            let sums = work.take_tensor().unwrap().into_vec::<i64>().unwrap();
            assert!(sums.iter().all(|x| *x == 2 * i));
        }
    });
}

#[test]
fn an_abort_ends_a_blocking_call_on_all_ranks_and_gives_the_memory_back() {
    for n in [4usize, 1_000_000] {
        let entered = Barrier::new(3);
        with_groups(3, |rank, group| {
            if rank == 2 {
                entered.wait();
                // The others are in their calls, or about to be.
                group.abort("no more");
                return;
            }
            let (entered, group) = (&entered, &group);
            std::thread::scope(|scope| {
                let call = scope.spawn(move || {
                    let tensors = vec![Tensor::zeros(DType::F32, n)];
                    let op = ReduceOp::Sum;
                    group.run_blocking(Collective::AllReduce { tensors, op }, by_soon())
                });
                entered.wait();
                let began = Instant::now();
                let failed = call.join().unwrap().unwrap_err();
                assert_eq!(failed.tensors.len(), 1);
                assert!(
                    matches!(failed.error.kind(), ErrorKind::Aborted | ErrorKind::Poisoned),
                    "{}",
                    failed.error
                );
                assert!(failed.error.to_string().contains("no more"), "{}", failed.error);
                // INV-2 says 100 ms; the margin is for a machine that is busy with other tests.
                assert!(began.elapsed() < Duration::from_secs(5));
            });
        });
    }
}

#[test]
fn a_blocking_call_ends_at_its_deadline_naming_the_rank_it_waits_for() {
    for n in [1usize, 1_000_000] {
        with_groups(2, |rank, group| {
            if rank == 1 {
                eventually("rank 0's time-out", || group.error().is_some());
                assert_eq!(group.error().unwrap().kind(), ErrorKind::Timeout);
                return;
            }
            let mut data = vec![1f32; n];
            let began = Instant::now();
            let by = SubmitOptions::by(deadline_in(Duration::from_millis(150)));
            let e = group
                .all_reduce_slice_with(&mut data, ReduceOp::Sum, by)
                .unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
            assert!(e.to_string().contains("rank 1"), "{e}");
            assert!(began.elapsed() >= Duration::from_millis(150));
            assert!(began.elapsed() < Duration::from_secs(10));
            let e = group
                .all_reduce_slice_with(&mut data, ReduceOp::Sum, by_soon())
                .unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Poisoned, "{e}");
        });
    }
}

#[test]
fn l15_blocking_ranks_that_call_different_collectives_all_fail_naming_both() {
    type Call = fn(u32) -> Collective;
    let ways: [(&str, Call); 5] = [
        ("lengths", |r| {
            all_reduce(if r == 0 { 8 } else { 9 }, DType::F32, ReduceOp::Sum)
        }),
        ("dtypes", |r| {
            all_reduce(8, if r == 0 { DType::F32 } else { DType::I32 }, ReduceOp::Sum)
        }),
        ("reductions", |r| {
            all_reduce(8, DType::F32, if r == 0 { ReduceOp::Sum } else { ReduceOp::Max })
        }),
        ("small and large", |r| {
            all_reduce(if r == 0 { 8 } else { 3_000_000 }, DType::F32, ReduceOp::Sum)
        }),
        ("operations", |r| match r {
            0 => Collective::Barrier,
            _ => all_reduce(8, DType::F32, ReduceOp::Sum),
        }),
    ];
    for (what, call) in ways {
        for world in [2, 3] {
            with_groups(world, |rank, group| {
                let e = group.run_blocking(call(rank), by_soon()).unwrap_err().error;
                // A rank that comes late finds the group poisoned, with the same cause.
                assert!(
                    matches!(e.kind(), ErrorKind::Mismatch | ErrorKind::Poisoned),
                    "{what} rank {rank} of {world}: {e}"
                );
                let text = e.to_string();
                assert!(
                    text.contains("all_reduce(") && text.contains(", this rank "),
                    "{what}: {e}"
                );
            });
        }
    }
}

fn all_reduce(n: usize, dtype: DType, op: ReduceOp) -> Collective {
    let tensors = vec![Tensor::zeros(dtype, n)];
    Collective::AllReduce { tensors, op }
}

#[test]
fn messages_pass_while_a_rank_blocks_in_a_collective() {
    with_groups(2, |rank, group| {
        if rank == 0 {
            std::thread::scope(|scope| {
                let blocked = scope.spawn(|| {
                    let mut data = [1i32; 5];
                    group
                        .all_reduce_slice_with(&mut data, ReduceOp::Sum, by_soon())
                        .unwrap();
                    data
                });
                // Rank 1 enters the collective only after this exchange.
                let work = group.recv(Tensor::zeros(DType::U8, 100_000), 1, 7).unwrap();
                assert!(work.take_tensor().unwrap().bytes().iter().all(|b| *b == 9));
                group
                    .send(Tensor::from_vec(vec![3u8]), 1, 8)
                    .unwrap()
                    .wait(soon())
                    .unwrap();
                assert_eq!(blocked.join().unwrap(), [3; 5]);
            });
            return;
        }
        group
            .send(Tensor::from_vec(vec![9u8; 100_000]), 0, 7)
            .unwrap()
            .wait(soon())
            .unwrap();
        let work = group.recv(Tensor::zeros(DType::U8, 1), 0, 8).unwrap();
        assert_eq!(work.take_tensor().unwrap().bytes(), [3]);
        let mut data = [2i32; 5];
        group
            .all_reduce_slice_with(&mut data, ReduceOp::Sum, by_soon())
            .unwrap();
        assert_eq!(data, [3; 5]);
    });
}
