//! Algorithms as data: pure functions (rank, world, bytes) → rounds of sends, receives and local steps.
//!
//! Nothing here knows a socket or a tensor. A schedule speaks about byte ranges of three logical buffers; `plan` says
//! which tensors those are, `execution` carries the rounds out over any transport, and the tests run all ranks in a
//! simulator. Rules that every schedule keeps (the tests check them):
//! - a round has at most one send and one receive per peer, and both ends of a transfer have it in the same round;
//! - which algorithm runs is a function of world size, bytes and the agreed topology only, so all ranks agree, and so is the
//!   order of reduction (INV-3);
//! - a rank cannot finish before every other rank has entered with the same fingerprint, directly or through others;
//!   frames without payload are added where the data alone would not say so. That is what lets a mismatch fail on *all*
//!   ranks, a broadcast's root included (L15).

mod exchange;
mod hosts;
pub(crate) mod layered;
mod linear;
pub(crate) mod rates;
mod ring;
pub(crate) mod shared;
mod tree;
pub(crate) mod uneven;

use std::ops::Range;

pub(crate) use hosts::Hosts;
pub(crate) use linear::{
    all_to_all, barrier, barrier_reach, barrier_rounds, gather, monitored_barrier, scatter,
};
pub(crate) use ring::{all_gather, reduce_scatter};
pub(crate) use tree::{broadcast, reduce};

/// Up to this many bytes in all, every rank sends its whole vector to every other one.
pub(crate) const DIRECT_MAX_BYTES: usize = 64 * 1024;
/// Up to this many ranks, likewise.
pub(crate) const DIRECT_MAX_WORLD: u32 = 16;
/// Up to this many ranks, all meet in one round of a barrier.
pub(crate) const FLAT_MAX_WORLD: u32 = 4;
/// Larger all-reduces between ranks that share memory go block by block of this many bytes, so that a block is still in the
/// cache when its sum comes back.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;
/// Up to this many bytes a larger world reduces to one rank and broadcasts.
pub(crate) const TREE_MAX_BYTES: usize = 16 * 1024;

/// How it is done; part of every frame and of the constants that ranks compare (INV-3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Algorithm {
    Local = 0,
    Direct = 1,
    Ring = 2,
    Tree = 3,
    Dissemination = 4,
    Pairwise = 5,
    Linear = 6,
    Star = 7,
    Exchange = 8,
    Cross = 9,
    Layered = 10,
    Uneven = 11,
}

/// A logical buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buffer {
    /// What the call reads and must not change.
    In,
    /// What the call writes; for in-place operations also what it reads.
    Out,
    /// Private memory of the operation.
    Scratch,
}

/// A range of bytes in a logical buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) buffer: Buffer,
    pub(crate) range: Range<usize>,
}

impl Span {
    pub(crate) fn new(buffer: Buffer, range: Range<usize>) -> Self {
        Self { buffer, range }
    }

    /// Nothing: a frame with a header only.
    pub(crate) fn empty() -> Self {
        Self::new(Buffer::Scratch, 0..0)
    }

    pub(crate) fn len(&self) -> usize {
        self.range.end.saturating_sub(self.range.start)
    }

    /// True if they have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (&self.range, &other.range);
        self.buffer == other.buffer && a.start.max(b.start) < a.end.min(b.end)
    }
}

/// One message to a peer.
#[derive(Debug, Clone)]
pub(crate) struct Send {
    pub(crate) peer: u32,
    pub(crate) from: Span,
    /// The counter whose value travels as `contributors`.
    pub(crate) slot: Option<usize>,
}

/// What happens with the bytes that arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Landing {
    /// `into = wire`
    Copy,
    /// As `Copy`, past the caches where the memory is written by this rank: a piece of something large.
    Past,
    /// `into = into ∘ wire`
    Reduce,
    /// `into = wire ∘ with`; equally long.
    ReduceWith(Span),
    /// `into = into ∘ wire` over the very bytes that this round sends to the same peer: never further than these have gone
    /// out.
    Exchange,
    /// As `Reduce`, never further than the receive before it in the round: the order of reduction is that of the list.
    ReduceNext,
}

/// What happens with the contributors that arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    Ignore,
    Add(usize),
    Set(usize),
}

/// One message from a peer.
#[derive(Debug, Clone)]
pub(crate) struct Recv {
    pub(crate) peer: u32,
    pub(crate) into: Span,
    pub(crate) landing: Landing,
    pub(crate) count: Count,
}

/// A step without the network.
#[derive(Debug, Clone)]
pub(crate) enum Local {
    /// `into = from`; equally long.
    Copy { from: Span, into: Span },
    /// `into = into ∘ from`; equally long.
    Reduce { from: Span, into: Span },
    /// The reduction of `span` is complete and `slot` holds its contributors: divide, if it is an average.
    Finish { span: Span, slot: usize },
    /// Every counter of `into` takes the value of `from`.
    Count { from: usize, into: Range<usize> },
}

/// Sends and receives that progress together, then local steps in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Round {
    pub(crate) sends: Vec<Send>,
    pub(crate) recvs: Vec<Recv>,
    pub(crate) after: Vec<Local>,
}

/// Everything one rank does for one operation.
#[derive(Debug, Clone)]
pub(crate) struct Schedule {
    pub(crate) algorithm: Algorithm,
    pub(crate) before: Vec<Local>,
    pub(crate) rounds: Vec<Round>,
    /// Bytes of private memory.
    pub(crate) scratch: usize,
    /// How many counters there are; each begins with this rank's own contribution (0 or 1).
    pub(crate) slots: usize,
    /// The counter that holds the contributors at the end; `None` where this rank does not learn them.
    pub(crate) result: Option<usize>,
}

impl Schedule {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        Self {
            algorithm,
            before: Vec::new(),
            rounds: Vec::new(),
            scratch: 0,
            slots: 1,
            result: None,
        }
    }
}

/// `(rank + by) mod world`.
pub(crate) fn up(rank: u32, by: u32, world: u32) -> u32 {
    let world = u64::from(world.max(1));
    u32::try_from((u64::from(rank) + u64::from(by)) % world).unwrap_or(0)
}

/// `(rank - by) mod world`.
pub(crate) fn down(rank: u32, by: u32, world: u32) -> u32 {
    let world = world.max(1);
    up(rank, world - by % world, world)
}

/// The number of doublings that reach every rank.
pub(crate) fn doublings(world: u32) -> u32 {
    world.max(1).next_power_of_two().trailing_zeros()
}

/// Where each of `parts` consecutive parts of the given lengths begins and ends.
pub(crate) fn parts_of(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut at = 0usize;
    lengths
        .iter()
        .map(|&n| {
            let start = at;
            at = at.saturating_add(n);
            start..at
        })
        .collect()
}

/// `bytes` in `world` nearly equal parts of whole elements.
pub(crate) fn even_parts(bytes: usize, element: usize, world: u32) -> Vec<Range<usize>> {
    let element = element.max(1);
    let world = world.max(1) as usize;
    let (base, extra) = ((bytes / element) / world, (bytes / element) % world);
    let lengths: Vec<usize> = (0..world)
        .map(|i| (base + usize::from(i < extra)) * element)
        .collect();
    parts_of(&lengths)
}

/// The part of that index; empty if there is none.
pub(crate) fn part(parts: &[Range<usize>], index: u32) -> Range<usize> {
    parts.get(index as usize).cloned().unwrap_or(0..0)
}

/// True if the steps after a round leave alone what the next one sends, so that it may begin before they have run.
pub(crate) fn may_begin_early(after: &[Local], sends: &[Send], averages: bool) -> bool {
    let apart = |span: &Span| sends.iter().all(|send| !send.from.overlaps(span));
    let mut steps = after.iter();
    steps.all(|step| match step {
        Local::Finish { span, .. } => !averages || apart(span),
        Local::Copy { into, .. } | Local::Reduce { into, .. } => apart(into),
        Local::Count { .. } => false,
    })
}

/// How many bytes of a send of the next round are there already, when of each receive of this round so many have landed: a ring
/// passes on what it reduces while the rest still comes, and no link rests between two rounds.
pub(crate) fn ready_early<'a>(send: &Send, receives: impl Iterator<Item = (&'a Recv, usize)>) -> usize {
    let from = &send.from;
    let mut ready = from.len();
    for (recv, landed) in receives {
        let into = &recv.into;
        let missing = Span::new(
            into.buffer,
            into.range.start.saturating_add(landed)..into.range.end,
        );
        if missing.overlaps(from) {
            ready = ready.min(missing.range.start.saturating_sub(from.range.start));
        }
    }
    ready
}

/// The schedule of an all-gather (`short` is `In`) or a reduce-scatter (`short` is `Out`) in which input and output are one memory: what
/// was `In` and `Out` is `Out`, and the shorter of the two is range `own` of the longer. Messages and their order stay, so that ranks in
/// place and others go together; copies from a range to itself go.
pub(crate) fn in_place(mut s: Schedule, short: Buffer, own: &Range<usize>) -> Schedule {
    let place = |span: &mut Span| {
        if span.buffer == short {
            span.range.start += own.start;
            span.range.end += own.start;
        }
        if span.buffer != Buffer::Scratch {
            span.buffer = Buffer::Out;
        }
    };
    let local = |steps: &mut Vec<Local>| {
        for step in &mut *steps {
            match step {
                Local::Copy { from, into } | Local::Reduce { from, into } => {
                    place(from);
                    place(into);
                }
                Local::Finish { span, .. } => place(span),
                Local::Count { .. } => {}
            }
        }
        steps.retain(|step| !matches!(step, Local::Copy { from, into } if from == into));
    };
    local(&mut s.before);
    for round in &mut s.rounds {
        round.sends.iter_mut().for_each(|send| place(&mut send.from));
        for recv in &mut round.recvs {
            place(&mut recv.into);
            if let Landing::ReduceWith(with) = &mut recv.landing {
                place(with);
                if *with == recv.into {
                    recv.landing = Landing::Reduce;
                }
            }
        }
        local(&mut round.after);
    }
    s
}

/// All-reduce of `bytes` bytes in place in `Out`. `one_host`: all ranks share memory. `shares`: by rank, where links carry unequal amounts;
/// else empty.
pub(crate) fn all_reduce(
    rank: u32,
    world: u32,
    bytes: usize,
    element: usize,
    one_host: bool,
    shares: &[u32],
) -> Schedule {
    match all_reduce_algorithm(world, bytes, one_host) {
        Algorithm::Ring if !shares.is_empty() => uneven::all_reduce(rank, shares, bytes, element),
        algorithm => all_reduce_by(algorithm, rank, world, bytes, element),
    }
}

/// The same by an algorithm that was chosen.
fn all_reduce_by(algorithm: Algorithm, rank: u32, world: u32, bytes: usize, element: usize) -> Schedule {
    match algorithm {
        Algorithm::Local => {
            let mut s = Schedule::new(Algorithm::Local);
            let span = Span::new(Buffer::Out, 0..bytes);
            s.before.push(Local::Finish { span, slot: 0 });
            s.result = Some(0);
            s
        }
        Algorithm::Direct => linear::all_reduce_direct(rank, world, bytes),
        Algorithm::Tree => tree::all_reduce_tree(rank, world, bytes),
        Algorithm::Exchange => exchange::all_reduce_exchange(rank, bytes),
        Algorithm::Cross => exchange::all_reduce_cross(rank, world, bytes, element),
        _ => ring::all_reduce_ring(rank, world, bytes, element),
    }
}

/// The all-reduce of two ranks that read each other's memory in place: a half each, and then the other one's.
pub(crate) fn swap_in_place(rank: u32, bytes: usize, element: usize) -> Schedule {
    exchange::all_reduce_cross(rank, 2, bytes, element)
}

/// A function of what all ranks agree on: world size, bytes, and whether all share memory (INV-3).
pub(crate) fn all_reduce_algorithm(world: u32, bytes: usize, one_host: bool) -> Algorithm {
    if world <= 1 {
        Algorithm::Local
    } else if world == 2 {
        Algorithm::Exchange
    } else if world <= DIRECT_MAX_WORLD && bytes.saturating_mul(world as usize - 1) <= DIRECT_MAX_BYTES {
        Algorithm::Direct
    } else if world > 4 && bytes <= TREE_MAX_BYTES {
        Algorithm::Tree
    } else if one_host || (world <= DIRECT_MAX_WORLD && bytes <= BLOCK_BYTES) {
        Algorithm::Cross
    } else {
        Algorithm::Ring
    }
}

#[cfg(test)]
mod simulator;
