//! The layered schedules on hosts of every shape: the right result, and no more bytes between hosts than there must be.

use proptest::prelude::*;

use super::*;

/// By rank: the lowest rank of its host, from any names of hosts.
fn lowest(names: &[usize]) -> Vec<u32> {
    let first = |name| names.iter().position(|n| n == name).unwrap() as u32;
    names.iter().map(first).collect()
}

/// Uneven hosts, ranks in a row and interleaved; each has several hosts and several ranks on one.
const SHAPES: [&[usize]; 11] = [
    &[0, 1, 1, 1],
    &[0, 0, 0, 1],
    &[0, 0, 1],
    &[0, 1, 0],
    &[0, 1, 0, 1],
    &[0, 1, 1, 0, 0],
    &[0, 0, 1, 1, 2, 2],
    &[0, 1, 2, 0, 1, 2, 0, 1, 2],
    &[2, 0, 1, 0, 2, 2, 0],
    &[0, 0, 1, 2, 3, 4],
    &[0, 0, 0, 0, 0, 1, 1, 2, 2, 2],
];

/// One rail; between hosts an exchange, everything to all ranks, and parts to all ranks.
const ELEMENTS: [usize; 6] = [0, 1, 5, 2048, 2050, 30_000];

fn hosts(names: &[usize]) -> Hosts {
    let hosts = Hosts::new(&lowest(names));
    assert!(hosts.is_layered());
    hosts
}

/// The payload that each host sends to other ones.
fn crossing(schedules: &[Schedule], names: &[usize]) -> Vec<usize> {
    let mut sent = vec![0; names.iter().max().unwrap() + 1];
    for (schedule, from) in schedules.iter().zip(names) {
        for send in schedule.rounds.iter().flat_map(|r| &r.sends) {
            if names[send.peer as usize] != *from {
                sent[*from] += send.from.len();
            }
        }
    }
    sent
}

fn all_reduce_is_right(names: &[usize], count: usize) {
    let (hosts, n) = (hosts(names), names.len());
    let own: Vec<u32> = (0..n as u32).map(|r| u32::from(r % 3 != 1)).collect();
    let data: Vec<_> = (0..n).map(|r| values(r, count)).collect();
    let schedules: Vec<_> = (0..n as u32)
        .map(|r| layered::all_reduce(r, &hosts, count * ELEMENT, ELEMENT))
        .collect();
    let ranks = simulate(&schedules, &vec![Vec::new(); n], &data, &own);
    let sum = sum_of(n, count);
    for (rank, s) in ranks.iter().zip(&schedules) {
        assert_eq!(rank.buffers[1], sum, "{names:?}, {count} elements");
        assert_eq!(rank.counts[s.result.unwrap()], own.iter().sum::<u32>());
    }
}

#[test]
fn a_layered_all_reduce_sums_every_element_and_every_contributor_once() {
    for names in SHAPES {
        for count in ELEMENTS {
            all_reduce_is_right(names, count);
        }
    }
    // Rings between hosts.
    all_reduce_is_right(&[0, 0, 1, 2], 3 * BLOCK_BYTES / ELEMENT / 2);
}

#[test]
fn a_layered_all_reduce_sends_no_more_between_hosts_than_if_each_were_one_rank() {
    for names in SHAPES {
        let hosts = hosts(names);
        let (h, n) = (hosts.count() as usize, names.len() as u32);
        // Whole in parts for any of these numbers of rails and hosts.
        let bytes = 4 * 9 * 5 * 7 * 1000 * ELEMENT;
        let schedules: Vec<_> = (0..n)
            .map(|r| layered::all_reduce(r, &hosts, bytes, ELEMENT))
            .collect();
        assert_eq!(crossing(&schedules, names), vec![2 * (h - 1) * bytes / h; h]);
        // The ring over all ranks sends as much over every one of its edges that leads to another host.
        let flat: Vec<_> = (0..n)
            .map(|r| ring::all_reduce_ring(r, n, bytes, ELEMENT))
            .collect();
        let most = crossing(&flat, names).into_iter().max().unwrap();
        assert!(most > 2 * (h - 1) * bytes / h, "{names:?}");
    }
}

#[test]
fn all_ranks_of_the_smallest_host_drive_the_link_at_once() {
    let hosts = hosts(&[0, 0, 1, 1, 1]);
    let drives = |bytes: usize| {
        let of = |r| layered::all_reduce(r, &hosts, bytes, 4);
        let crosses = |r: u32| {
            let mut sends = of(r).rounds.into_iter().flat_map(|round| round.sends);
            sends.any(|s| hosts.on_host(s.peer).host != hosts.on_host(r).host)
        };
        (0..5).filter(|&r| crosses(r)).collect::<Vec<_>>()
    };
    assert_eq!(drives(1 << 20), [0, 1, 2, 3]);
    assert_eq!(drives(layered::ONE_RAIL_MAX_BYTES), [0, 2]);
}

#[test]
fn a_layered_broadcast_reaches_everybody_from_every_root_and_every_host_once() {
    for names in SHAPES {
        let (hosts, n) = (hosts(names), names.len());
        for root in 0..n as u32 {
            for count in COUNTS {
                let schedules: Vec<_> = (0..n as u32)
                    .map(|r| layered::broadcast(r, &hosts, root, count * ELEMENT))
                    .collect();
                let data: Vec<_> = (0..n).map(|r| values(r, count)).collect();
                let ranks = simulate(&schedules, &vec![Vec::new(); n], &data, &vec![1; n]);
                for rank in ranks {
                    assert_eq!(rank.buffers[1], values(root as usize, count));
                }
                let crossed: usize = crossing(&schedules, names).iter().sum();
                assert_eq!(crossed, (hosts.count() as usize - 1) * count * ELEMENT);
            }
        }
    }
}

#[test]
fn a_layered_reduce_sums_on_the_root_and_leaves_every_other_input_alone() {
    for names in SHAPES {
        let (hosts, n) = (hosts(names), names.len());
        for root in 0..n as u32 {
            for count in COUNTS {
                let schedules: Vec<_> = (0..n as u32)
                    .map(|r| layered::reduce(r, &hosts, root, count * ELEMENT))
                    .collect();
                let on = |r: usize, out: bool| match (r == root as usize) == out {
                    true => values(r, count),
                    false => Vec::new(),
                };
                let inputs: Vec<_> = (0..n).map(|r| on(r, false)).collect();
                let outputs: Vec<_> = (0..n).map(|r| on(r, true)).collect();
                let ranks = simulate(&schedules, &inputs, &outputs, &vec![1; n]);
                for (r, rank) in ranks.iter().enumerate() {
                    if r == root as usize {
                        assert_eq!(rank.buffers[1], sum_of(n, count));
                        assert_eq!(rank.counts[0], n as u32);
                    } else {
                        assert_eq!(rank.buffers[0], values(r, count));
                    }
                }
                let crossed: usize = crossing(&schedules, names).iter().sum();
                assert_eq!(crossed, (hosts.count() as usize - 1) * count * ELEMENT);
            }
        }
    }
}

fn parts_are_right(names: &[usize], lengths: &[usize]) {
    let (hosts, n) = (hosts(names), names.len());
    let parts = parts_of(lengths);
    let total: usize = lengths.iter().sum();
    let whole: Vec<u8> = (0..n).flat_map(|r| values(r, lengths[r] / ELEMENT)).collect();
    // What belongs to ranks of other hosts than `host`.
    let elsewhere = |host: usize| -> usize {
        let of = lengths.iter().zip(names);
        of.filter(|(_, name)| **name != host).map(|(l, _)| l).sum()
    };

    let gathers: Vec<_> = (0..n as u32)
        .map(|r| layered::all_gather(r, &hosts, &parts))
        .collect();
    let inputs: Vec<_> = (0..n).map(|r| values(r, lengths[r] / ELEMENT)).collect();
    for rank in simulate(&gathers, &inputs, &vec![vec![0; total]; n], &vec![1; n]) {
        assert_eq!(rank.buffers[1], whole, "{names:?} {lengths:?}");
    }

    let scatters: Vec<_> = (0..n as u32)
        .map(|r| layered::reduce_scatter(r, &hosts, &parts))
        .collect();
    let inputs: Vec<_> = (0..n).map(|r| values(r, total / ELEMENT)).collect();
    let outputs: Vec<_> = lengths.iter().map(|&l| vec![0; l]).collect();
    let own: Vec<u32> = (0..n as u32).map(|r| r % 2).collect();
    let sum = sum_of(n, total / ELEMENT);
    for (r, rank) in simulate(&scatters, &inputs, &outputs, &own).iter().enumerate() {
        assert_eq!(
            rank.buffers[1],
            sum[parts[r].clone()],
            "rank {r} of {names:?} {lengths:?}"
        );
        assert_eq!(rank.counts[scatters[r].result.unwrap()], own.iter().sum::<u32>());
    }

    in_place_is_right(
        &parts,
        |r| layered::all_gather(r, &hosts, &parts),
        |r| layered::reduce_scatter(r, &hosts, &parts),
    );

    // Into every host comes what it lacks, and out of all together goes what came in.
    let crossed = |schedules: &[Schedule]| crossing(schedules, names).iter().sum::<usize>();
    let least: usize = (0..hosts.count() as usize).map(elsewhere).sum();
    assert_eq!((crossed(&gathers), crossed(&scatters)), (least, least));
}

#[test]
fn layered_all_gather_and_reduce_scatter_place_uneven_parts() {
    for names in SHAPES {
        for seed in 0..5 {
            parts_are_right(names, &uneven(names.len(), seed));
        }
    }
}

#[test]
fn ranks_of_one_host_or_of_a_host_each_are_not_layered() {
    for names in [&[0, 0, 0][..], &[0, 1, 2], &[0], &[]] {
        assert!(!Hosts::new(&lowest(names)).is_layered(), "{names:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_hosts_and_any_lengths_give_the_right_result(
        names in proptest::collection::vec(0usize..4, 3..12),
        lengths in proptest::collection::vec(0usize..40, 12),
        count in 0usize..5000,
    ) {
        // Numbered without gaps, in the order in which they come.
        let mut known: Vec<usize> = names.clone();
        known.sort_unstable();
        known.dedup();
        let names: Vec<usize> = names.iter().map(|n| known.iter().position(|k| k == n).unwrap()).collect();
        if Hosts::new(&lowest(&names)).is_layered() {
            all_reduce_is_right(&names, count);
            let lengths: Vec<usize> = lengths.iter().take(names.len()).map(|l| l * ELEMENT).collect();
            parts_are_right(&names, &lengths);
        }
    }
}
