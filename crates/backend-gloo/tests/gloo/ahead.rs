//! Several operations in flight: while one waits for other ranks, the next ones send already. Neither results nor failures may differ by that.

use std::sync::atomic::{AtomicBool, Ordering};

use ftcore::{DType, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp, Tensor, Work};

use crate::ranks::{eventually, soon, with_groups_over};

const ELEMENTS: usize = 1000;

/// Submits three all-reduces of 8000 bytes and waits until the bytes of all of them have gone out, though none can end.
fn three(group: &dyn ProcessGroup) -> Vec<Work> {
    let before = group.traffic().sent;
    let sum = |i: i64| group.all_reduce(Tensor::from_vec(vec![i; ELEMENTS]), ReduceOp::Sum);
    let works = (0..3).map(|i| sum(i).unwrap()).collect();
    eventually("the last of three operations to send", || {
        group.traffic().sent - before >= 3 * 8 * ELEMENTS as u64
    });
    works
}

#[test]
fn operations_send_while_the_one_before_them_waits() {
    for transport in ["shm", "tcp"] {
        let gone = AtomicBool::new(false);
        with_groups_over(transport, 2, |rank, group| {
            let works: Vec<Work> = if rank == 0 {
                let works = three(&group);
                gone.store(true, Ordering::Release);
                works
            } else {
                eventually("rank 0 to send", || gone.load(Ordering::Acquire));
                let sum = |i: i64| group.all_reduce(Tensor::from_vec(vec![10 * i; ELEMENTS]), ReduceOp::Sum);
                (0..3).map(|i| sum(i).unwrap()).collect()
            };
            for (i, work) in works.iter().enumerate() {
                let sum = work.take_tensor().unwrap().into_vec::<i64>().unwrap();
                assert_eq!(sum, vec![11 * i as i64; ELEMENTS], "{transport}");
                assert_eq!(work.contributors(), 2);
            }
        });
    }
}

#[test]
fn what_was_sent_ahead_fails_with_the_group_and_gives_its_tensors_back() {
    for transport in ["shm", "tcp"] {
        let gone = AtomicBool::new(false);
        with_groups_over(transport, 2, |rank, group| {
            if rank == 1 {
                eventually("rank 0 to send", || gone.load(Ordering::Acquire));
                group.abort("enough");
                return;
            }
            let works = three(&group);
            gone.store(true, Ordering::Release);
            for (i, work) in works.iter().enumerate() {
                let error = work.wait(soon()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Aborted, "{transport}: {error}");
                assert_eq!(error.context().seq, Some(i as u64), "{transport}: {error}");
                let tensors = work.recover();
                assert_eq!(
                    tensors.len(),
                    1,
                    "{transport}: operation {i} gives its tensor back"
                );
            }
        });
    }
}

/// Submits operation `i` of a sequence that all ranks share, and gives the bytes that must come out.
fn nth(group: &dyn ProcessGroup, i: u64, rank: u32, world: u32) -> (Work, Option<Vec<i64>>) {
    // Any mixture that is the same on all ranks.
    let x = i.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let n = [0, 1, 7, 300, 5000, 70_000][(x >> 40) as usize % 6];
    let part = |r: u32| vec![(i * 100) as i64 + i64::from(r); n];
    let own = Tensor::from_vec(part(rank));
    let sum = |times: i64| times * (i * 100) as i64 + i64::from(world * (world - 1) / 2);
    let all = Tensor::from_vec((0..world).flat_map(part).collect::<Vec<i64>>());
    let whole = || (0..world).flat_map(part).collect::<Vec<i64>>();
    let root = (x >> 50) as u32 % world;
    let times = i64::from(world);
    match (x >> 33) % 6 {
        0 | 1 => (
            group.all_reduce(own, ReduceOp::Sum).unwrap(),
            Some(vec![sum(times); n]),
        ),
        2 => (group.broadcast(own, root).unwrap(), Some(part(root))),
        3 => {
            let into = Tensor::zeros(DType::I64, n * world as usize);
            (group.all_gather_into(own, into).unwrap(), Some(whole()))
        }
        4 => {
            let into = Tensor::zeros(DType::I64, n);
            let work = group.reduce_scatter_into(all, into, ReduceOp::Sum).unwrap();
            let expected = times * ((i * 100) as i64 + i64::from(rank));
            (work, Some(vec![expected; n]))
        }
        _ => {
            let work = group.reduce(own, ReduceOp::Sum, root).unwrap();
            (work, (rank == root).then(|| vec![sum(times); n]))
        }
    }
}

#[test]
fn operations_of_all_kinds_and_sizes_in_flight_end_right_and_in_order() {
    for transport in ["shm", "tcp", "mixed"] {
        for world in [2, 3, 4] {
            with_groups_over(transport, world, |rank, group| {
                let works: Vec<_> = (0..60).map(|i| nth(&group, i, rank, world)).collect();
                for (i, (work, expected)) in works.into_iter().enumerate() {
                    let got = work.take_tensor().unwrap();
                    if let Some(expected) = expected {
                        let got = got.into_vec::<i64>().unwrap();
                        assert!(got == expected, "{transport}, {world} ranks, operation {i}");
                    }
                }
                group.barrier().unwrap();
            });
        }
    }
}
