//! Runs a schedule on all ranks without sockets, and the properties that every schedule must have.
//!
//! Elements are i64 and the reduction is a sum, so any element that is lost, doubled or misplaced changes the result.

mod layers;
mod neighbours;
mod shares;

use std::collections::BTreeSet;

use super::*;

const ELEMENT: usize = 8;

/// What a reduction does with the bytes of elements.
type Add = fn(&mut [u8], &[u8]);

struct Rank {
    add: Add,
    buffers: [Vec<u8>; 3],
    counts: Vec<u32>,
    /// Ranks whose entry this rank depends on so far.
    knows: BTreeSet<u32>,
}

fn index(buffer: Buffer) -> usize {
    match buffer {
        Buffer::In => 0,
        Buffer::Out => 1,
        Buffer::Scratch => 2,
    }
}

fn add(into: &mut [u8], from: &[u8]) {
    for (a, b) in into
        .as_chunks_mut::<ELEMENT>()
        .0
        .iter_mut()
        .zip(from.as_chunks::<ELEMENT>().0)
    {
        *a = (i64::from_ne_bytes(*a) + i64::from_ne_bytes(*b)).to_ne_bytes();
    }
}

impl Rank {
    fn get(&self, span: &Span) -> Vec<u8> {
        if span.len() == 0 {
            return Vec::new();
        }
        assert!(span.range.start.is_multiple_of(ELEMENT) && span.range.end.is_multiple_of(ELEMENT));
        self.buffers[index(span.buffer)][span.range.clone()].to_vec()
    }

    fn at(&mut self, span: &Span) -> &mut [u8] {
        if span.len() == 0 {
            return &mut [];
        }
        assert_ne!(span.buffer, Buffer::In, "the input is never written");
        &mut self.buffers[index(span.buffer)][span.range.clone()]
    }

    fn local(&mut self, steps: &[Local]) {
        for step in steps {
            match step {
                Local::Copy { from, into } => {
                    let data = self.get(from);
                    self.at(into).copy_from_slice(&data);
                }
                Local::Reduce { from, into } => {
                    let data = self.get(from);
                    assert_eq!(data.len(), into.len());
                    (self.add)(self.at(into), &data);
                }
                Local::Finish { span, slot } => {
                    assert!(*slot < self.counts.len());
                    let _ = self.at(span);
                }
                Local::Count { from, into } => {
                    let count = self.counts[*from];
                    self.counts[into.clone()].fill(count);
                }
            }
        }
    }
}

/// Runs all ranks; checks that both ends agree on every message; gives the final state of every rank.
fn simulate(schedules: &[Schedule], inputs: &[Vec<u8>], outputs: &[Vec<u8>], own: &[u32]) -> Vec<Rank> {
    simulate_by(add, schedules, inputs, outputs, own)
}

/// The same with another reduction.
fn simulate_by(
    add: Add,
    schedules: &[Schedule],
    inputs: &[Vec<u8>],
    outputs: &[Vec<u8>],
    own: &[u32],
) -> Vec<Rank> {
    let world = schedules.len();
    let mut ranks: Vec<Rank> = (0..world)
        .map(|r| Rank {
            add,
            buffers: [
                inputs[r].clone(),
                outputs[r].clone(),
                vec![0xEE; schedules[r].scratch],
            ],
            counts: vec![own[r]; schedules[r].slots],
            knows: BTreeSet::from([r as u32]),
        })
        .collect();
    for (rank, schedule) in ranks.iter_mut().zip(schedules) {
        rank.local(&schedule.before);
        assert_eq!(schedule.rounds.len(), schedules[0].rounds.len());
        assert_eq!(schedule.algorithm, schedules[0].algorithm);
    }
    for k in 0..schedules[0].rounds.len() {
        let mut wire = Vec::new();
        for (r, schedule) in schedules.iter().enumerate() {
            let peers: BTreeSet<u32> = schedule.rounds[k].sends.iter().map(|s| s.peer).collect();
            assert_eq!(
                peers.len(),
                schedule.rounds[k].sends.len(),
                "one send per peer and round"
            );
            for s in &schedule.rounds[k].sends {
                assert_ne!(s.peer as usize, r);
                let count = s.slot.map_or(0, |slot| ranks[r].counts[slot]);
                wire.push((
                    r as u32,
                    s.peer,
                    ranks[r].get(&s.from),
                    count,
                    ranks[r].knows.clone(),
                ));
            }
            // While a range is sent, nothing in the same round may write it.
            for s in &schedule.rounds[k].sends {
                for v in &schedule.rounds[k].recvs {
                    let apart = s.from.buffer != v.into.buffer
                        || s.from.range.end <= v.into.range.start
                        || v.into.range.end <= s.from.range.start;
                    assert!(
                        apart
                            || s.from.len() == 0
                            || v.into.len() == 0
                            || (matches!(v.landing, Landing::Exchange) && s.from == v.into),
                        "a round overwrites what it sends"
                    );
                }
            }
        }
        // Copies of whole buffers, of the rounds that need them only.
        let begins_early = |r: usize| matches!(&schedules[r].rounds[k..], [round, next, ..] if may_begin_early(&round.after, &next.sends, false));
        let before: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(r, rank)| begins_early(r).then(|| rank.buffers.clone()))
            .collect();
        for (r, schedule) in schedules.iter().enumerate() {
            for v in &schedule.rounds[k].recvs {
                let at = wire
                    .iter()
                    .position(|m| m.0 == v.peer && m.1 == r as u32)
                    .expect("every receive has its send in the same round");
                let (_, _, data, count, knows) = wire.swap_remove(at);
                assert_eq!(data.len(), v.into.len(), "both ends agree on the length");
                match &v.landing {
                    Landing::Copy | Landing::Past => ranks[r].at(&v.into).copy_from_slice(&data),
                    Landing::Reduce | Landing::ReduceNext | Landing::Exchange => {
                        add(ranks[r].at(&v.into), &data)
                    }
                    Landing::ReduceWith(with) => {
                        let mut sum = ranks[r].get(with);
                        assert_eq!(sum.len(), data.len());
                        add(&mut sum, &data);
                        ranks[r].at(&v.into).copy_from_slice(&sum);
                    }
                }
                match v.count {
                    Count::Ignore => {}
                    Count::Add(slot) => ranks[r].counts[slot] += count,
                    Count::Set(slot) => ranks[r].counts[slot] = count,
                }
                ranks[r].knows.extend(knows);
            }
        }
        assert!(wire.is_empty(), "every send has its receive in the same round");
        for (r, schedule) in schedules.iter().enumerate() {
            let early = before[r]
                .as_ref()
                .map(|before| (before, ranks[r].buffers.clone()));
            ranks[r].local(&schedule.rounds[k].after);
            if let Some((before, landed)) = early {
                check_early(&schedule.rounds[k..], before, &landed, &ranks[r].buffers);
            }
        }
    }
    let all: BTreeSet<u32> = (0..world as u32).collect();
    for rank in &ranks {
        assert_eq!(rank.knows, all, "no rank finishes before all ranks have entered");
    }
    ranks
}

/// What the next round may send before this one is over is what it sends in the end, however much has landed by then.
fn check_early(rounds: &[Round], before: &[Vec<u8>; 3], landed: &[Vec<u8>; 3], after: &[Vec<u8>; 3]) {
    let [round, next, ..] = rounds else { return };
    let mut now = before.clone();
    for share in 0..4 {
        let so_far = |v: &Recv| v.into.len() * share / 3 / ELEMENT * ELEMENT;
        for v in &round.recvs {
            let (at, range) = (index(v.into.buffer), v.into.range.clone());
            let range = range.start..range.start + so_far(v);
            now[at][range.clone()].copy_from_slice(&landed[at][range]);
        }
        for send in &next.sends {
            let ready = ready_early(send, round.recvs.iter().map(|v| (v, so_far(v))));
            let (at, start) = (index(send.from.buffer), send.from.range.start);
            assert_eq!(now[at][start..start + ready], after[at][start..start + ready]);
            assert!(
                share < 3 || ready == send.from.len(),
                "all of it once all has landed"
            );
        }
    }
}

fn values(rank: usize, count: usize) -> Vec<u8> {
    let value = |i| (rank as i64 + 1) * 1_000_003 + i as i64 * 7 + 1;
    let all: Vec<[u8; ELEMENT]> = (0..count).map(|i| value(i).to_ne_bytes()).collect();
    all.into_flattened()
}

fn sum_of(world: usize, count: usize) -> Vec<u8> {
    let mut total = vec![0; count * ELEMENT];
    for r in 0..world {
        add(&mut total, &values(r, count));
    }
    total
}

const COUNTS: [usize; 8] = [0, 1, 2, 3, 7, 16, 17, 100];

/// Uneven lengths, some zero.
fn uneven(world: usize, seed: usize) -> Vec<usize> {
    (0..world).map(|i| ((i * 5 + seed * 3) % 7) * ELEMENT).collect()
}

#[test]
fn every_all_reduce_algorithm_sums_every_element_and_every_contributor_once() {
    for world in 1..=9u32 {
        let n = world as usize;
        for count in COUNTS {
            let bytes = count * ELEMENT;
            let own: Vec<u32> = (0..world).map(|r| u32::from(r % 3 != 1)).collect();
            let contributors: u32 = own.iter().sum();
            let data: Vec<_> = (0..n).map(|r| values(r, count)).collect();
            let nothing = vec![Vec::new(); n];
            type Make = fn(u32, u32, usize) -> Schedule;
            let mut makers: Vec<Make> =
                vec![|r, w, b| all_reduce(r, w, b, ELEMENT, false, &[]), |r, w, b| {
                    all_reduce(r, w, b, ELEMENT, true, &[])
                }];
            if world > 1 {
                makers.extend([
                    linear::all_reduce_direct as Make,
                    tree::all_reduce_tree,
                    |r, w, b| ring::all_reduce_ring(r, w, b, ELEMENT),
                    |r, w, b| exchange::all_reduce_cross(r, w, b, ELEMENT),
                ]);
            }
            for make in makers {
                let schedules: Vec<_> = (0..world).map(|r| make(r, world, bytes)).collect();
                for (rank, s) in simulate(&schedules, &nothing, &data, &own).iter().zip(&schedules) {
                    assert_eq!(
                        rank.buffers[1],
                        sum_of(n, count),
                        "{:?} world {world} n {count}",
                        s.algorithm
                    );
                    assert_eq!(rank.counts[s.result.unwrap()], contributors, "{:?}", s.algorithm);
                }
            }
        }
    }
}

#[test]
fn a_ring_passes_on_what_has_landed_and_no_more() {
    let s = ring::all_reduce_ring(1, 4, 400, 4);
    for pair in s.rounds.windows(2) {
        let [round, next] = pair else { unreachable!() };
        let recvs = || round.recvs.iter();
        assert_eq!(ready_early(&next.sends[0], recvs().map(|r| (r, 0))), 0);
        assert_eq!(ready_early(&next.sends[0], recvs().map(|r| (r, 40))), 40);
        assert!(may_begin_early(&round.after, &next.sends, false));
        let early = may_begin_early(&round.after, &next.sends, true);
        assert_eq!(early, round.after.is_empty());
    }
}

#[test]
fn the_choice_of_algorithm_covers_all_of_them_and_depends_on_nothing_but_world_and_bytes() {
    for one_host in [false, true] {
        let large = if one_host {
            Algorithm::Cross
        } else {
            Algorithm::Ring
        };
        assert_eq!(all_reduce_algorithm(1, 1 << 30, one_host), Algorithm::Local);
        assert_eq!(all_reduce_algorithm(2, 1024, one_host), Algorithm::Exchange);
        assert_eq!(all_reduce_algorithm(3, 1024, one_host), Algorithm::Direct);
        assert_eq!(
            all_reduce_algorithm(3, DIRECT_MAX_BYTES + 1, one_host),
            Algorithm::Cross
        );
        assert_eq!(all_reduce_algorithm(3, BLOCK_BYTES + 1, one_host), large);
        assert_eq!(all_reduce_algorithm(9, TREE_MAX_BYTES, one_host), Algorithm::Tree);
        assert_eq!(all_reduce_algorithm(100, 4, one_host), Algorithm::Tree);
        assert_eq!(all_reduce_algorithm(100, 1 << 20, one_host), large);
    }
}

#[test]
fn broadcast_reaches_everybody_from_every_root() {
    for world in 1..=9u32 {
        for root in 0..world {
            for count in COUNTS {
                let schedules: Vec<_> = (0..world)
                    .map(|r| broadcast(r, world, root, count * ELEMENT))
                    .collect();
                let data: Vec<_> = (0..world as usize).map(|r| values(r, count)).collect();
                let nothing = vec![Vec::new(); world as usize];
                for rank in simulate(&schedules, &nothing, &data, &vec![1; world as usize]) {
                    assert_eq!(rank.buffers[1], values(root as usize, count));
                }
            }
        }
    }
}

#[test]
fn reduce_sums_on_the_root_and_leaves_the_others_inputs_alone() {
    for world in 1..=9u32 {
        let n = world as usize;
        for root in 0..world {
            for count in COUNTS {
                let schedules: Vec<_> = (0..world)
                    .map(|r| reduce(r, world, root, count * ELEMENT))
                    .collect();
                let on = |r: usize, is_root: bool| {
                    if (r == root as usize) == is_root {
                        values(r, count)
                    } else {
                        Vec::new()
                    }
                };
                let inputs: Vec<_> = (0..n).map(|r| on(r, false)).collect();
                let outputs: Vec<_> = (0..n).map(|r| on(r, true)).collect();
                let ranks = simulate(&schedules, &inputs, &outputs, &vec![1; n]);
                for (r, rank) in ranks.iter().enumerate() {
                    if r == root as usize {
                        assert_eq!(rank.buffers[1], sum_of(n, count));
                        assert_eq!(rank.counts[0], world);
                    } else {
                        assert_eq!(rank.buffers[0], values(r, count));
                    }
                }
            }
        }
    }
}

/// All-gathers and reduce-scatters of `parts` in which all ranks, or some, have one memory for input and output:
/// the right result, and no copy.
fn in_place_is_right(
    parts: &[Range<usize>],
    all_gather: impl Fn(u32) -> Schedule,
    reduce_scatter: impl Fn(u32) -> Schedule,
) {
    let (n, world) = (parts.len(), parts.len() as u32);
    let total = parts.last().map_or(0, |p| p.end);
    let length = |r: usize| parts[r].len() / ELEMENT;
    let whole: Vec<u8> = (0..n).flat_map(|r| values(r, length(r))).collect();
    let copies = |s: &Schedule| {
        let mut steps = s
            .before
            .iter()
            .chain(s.rounds.iter().flat_map(|round| &round.after));
        steps.any(|step| matches!(step, Local::Copy { .. }))
    };
    let choices: [fn(u32) -> bool; 3] = [|_| true, |r| r.is_multiple_of(2), |r| r % 3 == 1];
    for chosen in choices {
        let (mut schedules, mut inputs, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for r in 0..world {
            let (own, apart) = (values(r as usize, length(r as usize)), all_gather(r));
            let mut memory = vec![0; total];
            if chosen(r) {
                memory[parts[r as usize].clone()].copy_from_slice(&own);
                let s = in_place(apart, Buffer::In, &parts[r as usize]);
                assert!(!copies(&s), "{:?}", s.algorithm);
                schedules.push(s);
                inputs.push(Vec::new());
            } else {
                schedules.push(apart);
                inputs.push(own);
            }
            outputs.push(memory);
        }
        for rank in simulate(&schedules, &inputs, &outputs, &vec![1; n]) {
            assert_eq!(rank.buffers[1], whole);
        }

        let (mut schedules, mut inputs, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for r in 0..world {
            let (data, apart) = (values(r as usize, total / ELEMENT), reduce_scatter(r));
            if chosen(r) {
                let s = in_place(apart, Buffer::Out, &parts[r as usize]);
                assert!(!copies(&s), "{:?}", s.algorithm);
                schedules.push(s);
                inputs.push(Vec::new());
                outputs.push(data);
            } else {
                schedules.push(apart);
                inputs.push(data);
                outputs.push(vec![0; parts[r as usize].len()]);
            }
        }
        let own: Vec<u32> = (0..world).map(|r| r % 2).collect();
        let sum = sum_of(n, total / ELEMENT);
        for (r, rank) in simulate(&schedules, &inputs, &outputs, &own).iter().enumerate() {
            let result = match chosen(r as u32) {
                true => &rank.buffers[1][parts[r].clone()],
                false => &rank.buffers[1],
            };
            assert_eq!(result, &sum[parts[r].clone()], "rank {r} of {n}");
            assert_eq!(rank.counts[schedules[r].result.unwrap()], own.iter().sum::<u32>());
        }
    }
}

#[test]
fn gathers_and_scatters_in_place_go_together_with_others_by_every_algorithm() {
    for world in 1..=9u32 {
        for seed in 0..5 {
            let parts = parts_of(&uneven(world as usize, seed));
            in_place_is_right(
                &parts,
                |r| all_gather(r, world, &parts),
                |r| reduce_scatter(r, world, &parts),
            );
        }
    }
}

#[test]
fn all_gather_and_reduce_scatter_place_uneven_parts() {
    for world in 1..=9u32 {
        let n = world as usize;
        for seed in 0..5 {
            let lengths = uneven(n, seed);
            let parts = parts_of(&lengths);
            let total: usize = lengths.iter().sum();
            let whole: Vec<u8> = (0..n).flat_map(|r| values(r, lengths[r] / ELEMENT)).collect();

            let schedules: Vec<_> = (0..world).map(|r| all_gather(r, world, &parts)).collect();
            let inputs: Vec<_> = (0..n).map(|r| values(r, lengths[r] / ELEMENT)).collect();
            for rank in simulate(&schedules, &inputs, &vec![vec![0; total]; n], &vec![1; n]) {
                assert_eq!(rank.buffers[1], whole);
            }

            let schedules: Vec<_> = (0..world).map(|r| reduce_scatter(r, world, &parts)).collect();
            let inputs: Vec<_> = (0..n).map(|r| values(r, total / ELEMENT)).collect();
            let outputs: Vec<_> = lengths.iter().map(|&l| vec![0; l]).collect();
            let own: Vec<u32> = (0..world).map(|r| r % 2).collect();
            for (r, rank) in simulate(&schedules, &inputs, &outputs, &own).iter().enumerate() {
                assert_eq!(rank.buffers[1], sum_of(n, total / ELEMENT)[parts[r].clone()]);
                assert_eq!(rank.counts[schedules[r].result.unwrap()], own.iter().sum::<u32>());
            }
        }
    }
}

#[test]
fn gather_scatter_and_all_to_all_place_uneven_parts() {
    for world in 1..=9u32 {
        let n = world as usize;
        for root in 0..world {
            let lengths = uneven(n, root as usize);
            let parts = parts_of(&lengths);
            let total: usize = lengths.iter().sum();
            let whole: Vec<u8> = (0..n).flat_map(|r| values(r, lengths[r] / ELEMENT)).collect();
            let on_root = |r: u32| if r == root { parts.clone() } else { Vec::new() };

            let schedules: Vec<_> = (0..world)
                .map(|r| gather(r, world, root, &on_root(r), lengths[r as usize]))
                .collect();
            let inputs: Vec<_> = (0..n).map(|r| values(r, lengths[r] / ELEMENT)).collect();
            let ranks = simulate(&schedules, &inputs, &vec![vec![0; total]; n], &vec![1; n]);
            assert_eq!(ranks[root as usize].buffers[1], whole);

            let schedules: Vec<_> = (0..world)
                .map(|r| scatter(r, world, root, &on_root(r), lengths[r as usize]))
                .collect();
            let outputs: Vec<_> = lengths.iter().map(|&l| vec![0; l]).collect();
            let ranks = simulate(&schedules, &vec![whole.clone(); n], &outputs, &vec![1; n]);
            for (r, rank) in ranks.iter().enumerate() {
                assert_eq!(rank.buffers[1], values(r, lengths[r] / ELEMENT));
            }
        }
        // Rank r sends r*3+peer elements (mod 5) to each peer.
        let amount = |from: usize, to: usize| ((from * 3 + to) % 5) * ELEMENT;
        let parts = |lengths: Vec<usize>| (parts_of(&lengths), lengths.iter().sum::<usize>());
        let mut schedules = Vec::new();
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for r in 0..n {
            let (input, sent) = parts((0..n).map(|p| amount(r, p)).collect());
            let (output, received) = parts((0..n).map(|p| amount(p, r)).collect());
            schedules.push(all_to_all(r as u32, world, &input, &output));
            inputs.push(values(r, sent / ELEMENT));
            outputs.push(vec![0; received]);
        }
        let ranks = simulate(&schedules, &inputs, &outputs, &vec![1; n]);
        for (r, rank) in ranks.iter().enumerate() {
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

#[test]
fn barriers_hold_everybody_until_everybody_is_there() {
    for world in 1..=9u32 {
        for make in [barrier, monitored_barrier] {
            let schedules: Vec<_> = (0..world).map(|r| make(r, world)).collect();
            let nothing = vec![Vec::new(); world as usize];
            simulate(&schedules, &nothing, &nothing, &vec![1; world as usize]);
        }
    }
}

proptest::proptest! {
    #[test]
    fn even_parts_cover_all_bytes_in_whole_elements(count in 0usize..10_000, element in 1usize..9, world in 1u32..40) {
        let parts = even_parts(count * element, element, world);
        proptest::prop_assert_eq!(parts.len(), world as usize);
        let mut at = 0;
        for p in &parts {
            proptest::prop_assert_eq!(p.start, at);
            proptest::prop_assert!(p.len().is_multiple_of(element));
            at = p.end;
        }
        proptest::prop_assert_eq!(at, count * element);
        let (least, most) = (parts.iter().map(|p| p.len()).min(), parts.iter().map(|p| p.len()).max());
        proptest::prop_assert!(most.unwrap() - least.unwrap() <= element);
    }
}
