//! Sums that ranks share unevenly: right, with the bits of the ring, and no more bytes than their shares.

use super::*;
use crate::schedule::rates::WHOLE;

/// Floating-point sums: another order gives other bits.
fn add_floats(into: &mut [u8], from: &[u8]) {
    let (into, from) = (into.as_chunks_mut::<ELEMENT>().0, from.as_chunks::<ELEMENT>().0);
    for (a, b) in into.iter_mut().zip(from) {
        *a = (f64::from_ne_bytes(*a) + f64::from_ne_bytes(*b)).to_ne_bytes();
    }
}

fn floats(rank: usize, count: usize) -> Vec<u8> {
    let value =
        |i: usize| ((rank * 7919 + i * 104_729) % 1009) as f64 / 3.0 * 10f64.powi((rank % 5) as i32 * 3);
    (0..count).flat_map(|i| value(i).to_ne_bytes()).collect()
}

/// Shares that make a whole; some are zero.
fn shares(world: usize, seed: usize) -> Vec<u32> {
    let weights: Vec<u32> = (0..world).map(|i| ((i * 5 + seed * 3) % 7) as u32).collect();
    let total = weights.iter().sum::<u32>();
    let mut shares: Vec<u32> = weights.iter().map(|w| WHOLE / total.max(1) * w).collect();
    let rest = WHOLE - shares.iter().sum::<u32>();
    shares[seed % world] += rest;
    shares
}

#[test]
fn uneven_shares_have_every_element_and_contributor_once_and_the_bits_of_the_ring() {
    for world in 3..=9u32 {
        let n = world as usize;
        for (seed, count) in [(0, 0), (1, 1), (2, 7), (3, 100), (4, 331), (5, 64)] {
            let bytes = count * ELEMENT;
            let shares = shares(n, seed);
            let own: Vec<u32> = (0..world).map(|r| u32::from(r % 3 != 1)).collect();
            let data: Vec<_> = (0..n).map(|r| floats(r, count)).collect();
            let nothing = vec![Vec::new(); n];
            let ring: Vec<_> = (0..world)
                .map(|r| ring::all_reduce_ring(r, world, bytes, ELEMENT))
                .collect();
            let ring = simulate_by(add_floats, &ring, &nothing, &data, &own);
            for segment in [ELEMENT, 24, 200, 1 << 20] {
                let schedules: Vec<_> = (0..world)
                    .map(|r| uneven::by_segments(r, &shares, bytes, ELEMENT, segment))
                    .collect();
                let ranks = simulate_by(add_floats, &schedules, &nothing, &data, &own);
                for (r, (rank, s)) in ranks.iter().zip(&schedules).enumerate() {
                    assert!(
                        rank.buffers[1] == ring[r].buffers[1],
                        "world {world} {shares:?} {segment}"
                    );
                    assert_eq!(rank.counts[s.result.unwrap()], own.iter().sum::<u32>());
                }
            }
        }
    }
}

#[test]
fn a_rank_sends_its_share_to_all_and_the_rest_once() {
    let bytes = 32 << 20;
    let shares = [0, WHOLE / 4, WHOLE / 4, WHOLE / 2];
    for (rank, expected) in [(0, 1.0), (1, 1.5), (3, 2.0)] {
        let s = all_reduce(rank, 4, bytes, 4, false, &shares);
        assert_eq!(s.algorithm, Algorithm::Uneven);
        let sends = || s.rounds.iter().flat_map(|round| &round.sends);
        let sent: usize = sends().map(|send| send.from.len()).sum();
        assert!(
            (sent as f64 / bytes as f64 - expected).abs() < 1e-3,
            "{rank}: {sent}"
        );
        // Of every segment the sums are handed out while the next one's parts go: only the last ones wait.
        let waits = s
            .rounds
            .windows(2)
            .filter(|w| !may_begin_early(&w[0].after, &w[1].sends, true));
        assert_eq!(waits.count(), 0, "rank {rank}");
        // A segment's copies from the other ranks are all the memory that it needs.
        let most = 3 * (shares[rank as usize] as usize * (1 << 20) / WHOLE as usize);
        assert!(s.scratch <= most, "{}", s.scratch);
    }
    // What is too short for several segments goes as ever.
    assert_eq!(
        all_reduce(0, 4, BLOCK_BYTES, 4, false, &shares).algorithm,
        Algorithm::Cross
    );
}
