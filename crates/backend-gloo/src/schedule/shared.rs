//! Between ranks that share memory, for more than a few bytes: every rank with every other at once, in pieces that stay in the cache. Between
//! few ranks on different hosts, sums go so, too, in one piece.
//!
//! A ring passes on what a neighbour brought; here nothing is carried by others, so there are no partial sums to keep, and with more
//! ranks than cores a round costs switches, so few rounds are better than many short ones.

use std::ops::Range;

use super::{
    Algorithm, Buffer, Count, DIRECT_MAX_BYTES, Landing, Local, Recv, Round, Schedule, Send, Span,
    even_parts, part, tree, up,
};

/// All-gathers go by this many bytes of a part: what was just sent is still in the second-level cache when its copy is made.
const PIECE_BYTES: usize = 512 * 1024;
/// Outputs from this length on are written past the caches.
const PAST_FROM: usize = 16 << 20;

/// Piece `index` of a range; empty behind its end.
fn piece(range: &Range<usize>, index: usize, bytes: usize) -> Range<usize> {
    let start = range
        .end
        .min(range.start.saturating_add(index.saturating_mul(bytes)));
    start..range.end.min(start.saturating_add(bytes))
}

/// How many pieces the longest part has, at least one.
fn pieces(parts: &[Range<usize>], bytes: usize) -> usize {
    let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    longest.div_ceil(bytes.max(1)).max(1)
}

/// The other ranks, each rank beginning with the one behind it.
fn others(rank: u32, world: u32) -> impl Iterator<Item = u32> {
    (1..world).map(move |k| up(rank, k, world))
}

/// Part r of `Out` becomes rank r's `In`.
pub(crate) fn all_gather(rank: u32, world: u32, parts: &[Range<usize>]) -> Schedule {
    let mut s = Schedule::new(Algorithm::Cross);
    let total = parts.last().map_or(0, |p| p.end);
    let landing = || match total >= PAST_FROM {
        true => Landing::Past,
        false => Landing::Copy,
    };
    let own = part(parts, rank);
    for index in 0..pieces(parts, PIECE_BYTES) {
        let mut round = Round::default();
        // The first frame says that this rank is here, so there is always one.
        let goes = |range: &Range<usize>| index == 0 || !range.is_empty();
        let from = Span::new(Buffer::In, piece(&(0..own.len()), index, PIECE_BYTES));
        for peer in others(rank, world) {
            if goes(&from.range) {
                round.sends.push(Send {
                    peer,
                    from: from.clone(),
                    slot: None,
                });
            }
            let into = piece(&part(parts, peer), index, PIECE_BYTES);
            if goes(&into) {
                round.recvs.push(Recv {
                    peer,
                    into: Span::new(Buffer::Out, into),
                    landing: landing(),
                    count: Count::Ignore,
                });
            }
        }
        if from.len() > 0 {
            round.after.push(Local::Copy {
                from,
                into: Span::new(Buffer::Out, piece(&own, index, PIECE_BYTES)),
            });
        }
        s.rounds.push(round);
    }
    s
}

/// `Out` becomes the reduction of part `rank` of every rank's `In`, which is left as it is.
///
/// It goes by `block` bytes; in one piece over sockets, whose receives keep pace with each other anyway, and where every round may cost the
/// latency of a line.
pub(crate) fn reduce_scatter(rank: u32, world: u32, parts: &[Range<usize>], block: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Cross);
    // Slot 0 is this rank's own contribution, slot 1 the sum.
    s.slots = 2;
    s.result = Some(1);
    // A sum of several comes back to the same bytes while they are in the cache; one of two is written once, past it.
    let bytes = match world {
        2 => usize::MAX,
        _ => (block / world.max(1) as usize).next_multiple_of(64),
    };
    let own = part(parts, rank);
    for index in 0..pieces(parts, bytes) {
        let mut round = Round::default();
        let goes = |range: &Range<usize>| index == 0 || !range.is_empty();
        let with = piece(&own, index, bytes);
        let into = Span::new(Buffer::Out, piece(&(0..own.len()), index, bytes));
        for peer in others(rank, world) {
            let theirs = piece(&part(parts, peer), index, bytes);
            if goes(&theirs) {
                round.sends.push(Send {
                    peer,
                    from: Span::new(Buffer::In, theirs),
                    slot: Some(0),
                });
            }
            if goes(&with) {
                round.recvs.push(Recv {
                    peer,
                    into: into.clone(),
                    landing: match round.recvs.is_empty() {
                        true => Landing::ReduceWith(Span::new(Buffer::In, with.clone())),
                        false => Landing::ReduceNext,
                    },
                    count: if index == 0 { Count::Add(1) } else { Count::Ignore },
                });
            }
        }
        round.after.push(Local::Finish { span: into, slot: 1 });
        s.rounds.push(round);
    }
    s
}

/// The root's `Out` becomes the reduction of every rank's data: the root's `Out`, the others' `In` (left as it is). Every rank
/// reduces a part, `block` by `block` bytes, and hands it to the root.
pub(crate) fn reduce(
    rank: u32,
    world: u32,
    root: u32,
    bytes: usize,
    element: usize,
    block: usize,
) -> Schedule {
    if world <= 2 || bytes <= DIRECT_MAX_BYTES {
        return tree::reduce(rank, world, root, bytes);
    }
    let mut s = Schedule::new(Algorithm::Cross);
    s.slots = 2;
    s.result = (rank == root).then_some(1);
    let source = if rank == root { Buffer::Out } else { Buffer::In };
    let element = element.max(1);
    let block = (block - block % element).max(element);
    for index in 0..bytes.div_ceil(block).max(1) {
        let range = piece(&(0..bytes), index, block);
        let parts: Vec<_> = even_parts(range.len(), element, world)
            .into_iter()
            .map(|p| range.start + p.start..range.start + p.end)
            .collect();
        let own = part(&parts, rank);
        let sum = if rank == root {
            Span::new(Buffer::Out, own.clone())
        } else {
            s.scratch = s.scratch.max(own.len());
            Span::new(Buffer::Scratch, 0..own.len())
        };
        let (mut scatter, mut gather) = (Round::default(), Round::default());
        for peer in others(rank, world) {
            scatter.sends.push(Send {
                peer,
                from: Span::new(source, part(&parts, peer)),
                slot: Some(0),
            });
            scatter.recvs.push(Recv {
                peer,
                into: sum.clone(),
                landing: match (scatter.recvs.is_empty(), rank == root) {
                    (true, true) => Landing::Reduce,
                    (true, false) => Landing::ReduceWith(Span::new(Buffer::In, own.clone())),
                    (false, _) => Landing::ReduceNext,
                },
                count: if index == 0 { Count::Add(1) } else { Count::Ignore },
            });
            if rank == root {
                gather.recvs.push(Recv {
                    peer,
                    into: Span::new(Buffer::Out, part(&parts, peer)),
                    landing: Landing::Copy,
                    count: Count::Ignore,
                });
            } else if peer == root {
                gather.sends.push(Send {
                    peer,
                    from: sum.clone(),
                    slot: None,
                });
            }
        }
        scatter.after.push(Local::Finish { span: sum, slot: 1 });
        s.rounds.extend([scatter, gather]);
    }
    s
}

/// Part r of `Out` takes part `rank` of rank r's `In`.
pub(crate) fn all_to_all(rank: u32, world: u32, input: &[Range<usize>], output: &[Range<usize>]) -> Schedule {
    let mut s = Schedule::new(Algorithm::Cross);
    s.before.push(Local::Copy {
        from: Span::new(Buffer::In, part(input, rank)),
        into: Span::new(Buffer::Out, part(output, rank)),
    });
    let mut round = Round::default();
    for peer in others(rank, world) {
        round.sends.push(Send {
            peer,
            from: Span::new(Buffer::In, part(input, peer)),
            slot: None,
        });
        round.recvs.push(Recv {
            peer,
            into: Span::new(Buffer::Out, part(output, peer)),
            landing: Landing::Copy,
            count: Count::Ignore,
        });
    }
    s.rounds.push(round);
    s
}
