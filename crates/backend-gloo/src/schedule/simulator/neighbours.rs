//! The schedules of ranks that share memory: the right result whatever the lengths, over several pieces and blocks.

use super::*;

fn all_gather_and_reduce_scatter_are_right(lengths: &[usize]) {
    for block in [BLOCK_BYTES, usize::MAX] {
        all_gather_and_reduce_scatter_by(block, lengths);
    }
}

fn all_gather_and_reduce_scatter_by(block: usize, lengths: &[usize]) {
    let (n, world) = (lengths.len(), lengths.len() as u32);
    let parts = parts_of(lengths);
    in_place_is_right(
        &parts,
        |r| shared::all_gather(r, world, &parts),
        |r| shared::reduce_scatter(r, world, &parts, block),
    );
    let total: usize = lengths.iter().sum();
    let whole: Vec<u8> = (0..n).flat_map(|r| values(r, lengths[r] / ELEMENT)).collect();

    let schedules: Vec<_> = (0..world).map(|r| shared::all_gather(r, world, &parts)).collect();
    let inputs: Vec<_> = (0..n).map(|r| values(r, lengths[r] / ELEMENT)).collect();
    for rank in simulate(&schedules, &inputs, &vec![vec![0; total]; n], &vec![1; n]) {
        assert_eq!(rank.buffers[1], whole);
    }

    let schedules: Vec<_> = (0..world)
        .map(|r| shared::reduce_scatter(r, world, &parts, block))
        .collect();
    let inputs: Vec<_> = (0..n).map(|r| values(r, total / ELEMENT)).collect();
    let outputs: Vec<_> = lengths.iter().map(|&l| vec![0; l]).collect();
    let own: Vec<u32> = (0..world).map(|r| r % 2).collect();
    let sum = sum_of(n, total / ELEMENT);
    for (r, rank) in simulate(&schedules, &inputs, &outputs, &own).iter().enumerate() {
        assert_eq!(rank.buffers[1], sum[parts[r].clone()]);
        assert_eq!(rank.counts[schedules[r].result.unwrap()], own.iter().sum::<u32>());
        assert_eq!(
            schedules[r].scratch, 0,
            "sums stand where they belong from the first"
        );
    }
}

#[test]
fn neighbours_gather_and_scatter_parts_of_any_length() {
    for world in 2..=9 {
        for seed in 0..5 {
            all_gather_and_reduce_scatter_are_right(&uneven(world, seed));
        }
    }
    // Several pieces of some parts, where other parts have fewer or none.
    for lengths in [
        &[3 << 20, 0, 600_000, 8][..],
        &[1 << 20, 1 << 20],
        &[4_000_000, 2_000_000, 0],
    ] {
        all_gather_and_reduce_scatter_are_right(lengths);
    }
}

#[test]
fn neighbours_reduce_to_any_root_and_leave_every_other_input_alone() {
    // A tree for a few bytes, one block, several blocks of which the last is short.
    let counts = [0, 1, 7, 10_000, 2 * BLOCK_BYTES / ELEMENT + 5];
    for (world, counts) in [
        (2, &counts[..]),
        (3, &counts),
        (4, &counts),
        (5, &counts[..4]),
        (8, &counts[..4]),
    ] {
        let n = world as usize;
        let blocks = [BLOCK_BYTES, usize::MAX];
        for (count, block) in counts
            .iter()
            .flat_map(|&count| blocks.map(|block| (count, block)))
        {
            let root = world - 1 - (count as u32 % 2).min(world - 1);
            let bytes = count * ELEMENT;
            let schedules: Vec<_> = (0..world)
                .map(|r| shared::reduce(r, world, root, bytes, ELEMENT, block))
                .collect();
            let on = |r: usize, is_root: bool| match (r == root as usize) == is_root {
                true => values(r, count),
                false => Vec::new(),
            };
            let inputs: Vec<_> = (0..n).map(|r| on(r, false)).collect();
            let outputs: Vec<_> = (0..n).map(|r| on(r, true)).collect();
            let ranks = simulate(&schedules, &inputs, &outputs, &vec![1; n]);
            for (r, rank) in ranks.iter().enumerate() {
                if r == root as usize {
                    assert_eq!(rank.buffers[1], sum_of(n, count));
                    assert_eq!(rank.counts[schedules[r].result.unwrap()], world);
                } else {
                    assert_eq!(rank.buffers[0], values(r, count));
                }
            }
        }
    }
}

#[test]
fn neighbours_exchange_a_part_of_any_length_with_each_other() {
    let amount = |from: usize, to: usize| ((from * 3 + to) % 5) * ELEMENT;
    for world in 2..=9u32 {
        let n = world as usize;
        let of = |lengths: Vec<usize>| (parts_of(&lengths), lengths.iter().sum::<usize>());
        let (mut schedules, mut inputs, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for r in 0..n {
            let (input, sent) = of((0..n).map(|p| amount(r, p)).collect());
            let (output, received) = of((0..n).map(|p| amount(p, r)).collect());
            schedules.push(shared::all_to_all(r as u32, world, &input, &output));
            inputs.push(values(r, sent / ELEMENT));
            outputs.push(vec![0; received]);
        }
        for (r, rank) in simulate(&schedules, &inputs, &outputs, &vec![1; n])
            .iter()
            .enumerate()
        {
            let expected: Vec<u8> = (0..n)
                .flat_map(|p| {
                    let start: usize = (0..r).map(|q| amount(p, q)).sum();
                    inputs[p][start..start + amount(p, r)].to_vec()
                })
                .collect();
            assert_eq!(rank.buffers[1], expected);
        }
    }
}
