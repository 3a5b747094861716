//! Ranks of two hosts (even and odd ones, with shared memory within each and TCP between them): what crosses, counted where it leaves.

use ftcore::{Collective, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor};

use crate::ranks::{soon, with_groups_over};

/// Elements of 4 bytes: whole in parts for 2 hosts and 2 rails.
const COUNT: usize = 1 << 20;
const BYTES: u64 = COUNT as u64 * 4;
/// Headers of frames, and of what ranks say on their control connections.
const HEADERS: u64 = 4096;

fn values(rank: u32, count: usize) -> Tensor {
    let of = |i: usize| ((i * 7 + rank as usize * 13) % 1000) as f32 * 1.001 + 1e-3;
    Tensor::from_vec((0..count).map(of).collect::<Vec<f32>>())
}

/// What every rank sent to the other host while it ran `call`, by rank, and the last tensor of the call.
fn crossing(world: u32, call: impl Fn(u32) -> Collective + Sync) -> Vec<(u64, Vec<u8>)> {
    with_groups_over("mixed", world, |rank, group| {
        let barrier = || group.run_blocking(Collective::Barrier, SubmitOptions::by(soon()));
        barrier().unwrap();
        let before = group.sent_elsewhere();
        let done = group.run_blocking(call(rank), SubmitOptions::by(soon())).unwrap();
        let sent = group.sent_elsewhere() - before;
        barrier().unwrap();
        group.shutdown(soon()).unwrap();
        (sent, done.tensors.last().unwrap().bytes().to_vec())
    })
}

/// By host: even ranks, odd ranks.
fn by_host(ranks: &[(u64, Vec<u8>)]) -> [u64; 2] {
    let of = |odd: usize| ranks.iter().skip(odd).step_by(2).map(|(sent, _)| sent).sum();
    [of(0), of(1)]
}

fn assert_about(sent: u64, expected: u64) {
    let most = expected + HEADERS;
    assert!((expected..=most).contains(&sent), "{sent} bytes, not {expected}");
}

#[test]
fn an_all_reduce_sends_the_vector_over_the_network_once_per_host_and_equals_on_all_ranks() {
    for world in [3, 4, 5] {
        let ranks = crossing(world, |rank| Collective::AllReduce {
            tensors: vec![values(rank, COUNT)],
            op: ReduceOp::Avg,
        });
        // 2 (h - 1) / h of it for h = 2 hosts, however many ranks they have.
        for sent in by_host(&ranks) {
            assert_about(sent, BYTES);
        }
        assert!(
            ranks.windows(2).all(|pair| pair[0].1 == pair[1].1),
            "world {world}"
        );
        // Both ranks of the smaller host drive the link, each with its half.
        if world > 3 {
            for (sent, _) in &ranks[..4] {
                assert_about(*sent, BYTES / 2);
            }
        }
    }
}

#[test]
fn a_broadcast_and_a_reduce_send_the_vector_over_the_network_once() {
    let ranks = crossing(5, |rank| Collective::Broadcast {
        tensors: vec![values(rank, COUNT)],
        root: 2,
    });
    let [even, odd] = by_host(&ranks);
    assert_about(even, BYTES);
    assert_about(odd, 0);
    assert!(ranks.iter().all(|(_, data)| data == values(2, COUNT).bytes()));

    let ranks = crossing(5, |rank| Collective::Reduce {
        tensor: values(rank, COUNT),
        op: ReduceOp::Max,
        root: 2,
    });
    let [even, odd] = by_host(&ranks);
    assert_about(even, 0);
    assert_about(odd, BYTES);
}

#[test]
fn an_all_gather_and_a_reduce_scatter_bring_every_host_just_what_it_lacks() {
    let part = COUNT / 4;
    let ranks = crossing(4, |rank| Collective::AllGatherInto {
        pairs: vec![(values(rank, part), values(0, COUNT))],
    });
    for sent in by_host(&ranks) {
        assert_about(sent, BYTES / 2);
    }
    let whole: Vec<u8> = (0..4).flat_map(|r| values(r, part).bytes().to_vec()).collect();
    assert!(ranks.iter().all(|(_, data)| *data == whole));

    let ranks = crossing(4, |rank| Collective::ReduceScatterInto {
        pairs: vec![(values(rank, COUNT), values(0, part))],
        op: ReduceOp::Sum,
    });
    for sent in by_host(&ranks) {
        assert_about(sent, BYTES / 2);
    }
}
