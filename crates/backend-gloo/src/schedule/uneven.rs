//! Between ranks whose links carry unequal amounts: every part of the sum goes to its owner and from there to all, and ranks own
//! as much as suits their links, some nothing.
//!
//! A rank that owns nothing only sends while sums form and only receives while they are handed out. So it goes by segments, and the sums of
//! one are handed out while the next one's parts go to their owners: links are busy both ways, and lines may be long.
//!
//! The order of reduction is the ring's, whichever rank owns an element: the bits of results do not depend on shares.

use std::ops::Range;

use super::rates::WHOLE;
use super::{
    Algorithm, BLOCK_BYTES, Buffer, Count, Landing, Local, Recv, Round, Schedule, Send, Span, even_parts,
    part, up,
};

/// An operation goes by so many segments, if they are not too short or long then.
const SEGMENTS: usize = 32;
/// The shortest ones: at 1 Gbit/s the latency of a line of 8 ms, at 100 Mbit/s of 80 ms.
pub(crate) const SEGMENT_MIN_BYTES: usize = 1 << 20;

/// `range` cut into shares of whole elements, in the order of ranks.
fn by_shares(range: &Range<usize>, element: usize, shares: &[u32]) -> Vec<Range<usize>> {
    let count = range.len() / element;
    // 2^16 shares of less than 2^47 elements.
    let end = |shares: u64| range.start + (count as u64 * shares / u64::from(WHOLE)) as usize * element;
    let mut sum = 0u64;
    let mut at = range.start;
    let parts = shares.iter().map(|share| {
        sum += u64::from(*share);
        let start = at;
        at = end(sum).min(range.end);
        start..at
    });
    parts.collect()
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// In place in `Out`. `shares` make [`WHOLE`] and are the same on all ranks.
pub(super) fn all_reduce(rank: u32, shares: &[u32], bytes: usize, element: usize) -> Schedule {
    let segment = (bytes / SEGMENTS).clamp(SEGMENT_MIN_BYTES, BLOCK_BYTES);
    by_segments(rank, shares, bytes, element, segment)
}

/// The same by segments of that many bytes.
pub(super) fn by_segments(
    rank: u32,
    shares: &[u32],
    bytes: usize,
    element: usize,
    segment: usize,
) -> Schedule {
    let world = u32::try_from(shares.len()).unwrap_or(0);
    let element = element.max(1);
    let mut s = Schedule::new(Algorithm::Uneven);
    // Slot 0 is this rank's own contribution, slot 1 the sum, counted in the first segment.
    s.slots = 2;
    s.result = Some(1);
    let orders = even_parts(bytes, element, world);
    let segment = (segment - segment % element).max(element);
    let mut handed_out = None;
    for begin in (0..bytes.max(1)).step_by(segment) {
        let parts = by_shares(&(begin..bytes.min(begin + segment)), element, shares);
        let first = begin == 0;
        let own = part(&parts, rank);
        let (mut scatter, mut gather) = (Round::default(), Round::default());
        for k in 1..world {
            let peer = up(rank, k, world);
            let theirs = part(&parts, peer);
            // With the first frames all ranks hear of all others, owners or not.
            if first || !theirs.is_empty() {
                scatter.sends.push(Send {
                    peer,
                    from: Span::new(Buffer::Out, theirs.clone()),
                    slot: first.then_some(0),
                });
            }
            if first || !own.is_empty() {
                let place = (k as usize - 1) * own.len();
                scatter.recvs.push(Recv {
                    peer,
                    into: Span::new(Buffer::Scratch, place..place + own.len()),
                    landing: Landing::Copy,
                    count: if first { Count::Add(1) } else { Count::Ignore },
                });
            }
            if !own.is_empty() {
                gather.sends.push(Send {
                    peer,
                    from: Span::new(Buffer::Out, own.clone()),
                    slot: None,
                });
            }
            if !theirs.is_empty() {
                gather.recvs.push(Recv {
                    peer,
                    into: Span::new(Buffer::Out, theirs),
                    landing: Landing::Copy,
                    count: Count::Ignore,
                });
            }
        }
        s.scratch = s.scratch.max((world as usize - 1) * own.len());
        for (order, number) in orders.iter().zip(0u32..) {
            let range = overlap(&own, order);
            if !range.is_empty() {
                scatter.after.extend(sum(rank, world, &own, &range, number));
            }
        }
        scatter.after.push(Local::Finish {
            span: Span::new(Buffer::Out, own),
            slot: 1,
        });
        s.rounds.push(scatter);
        s.rounds.extend(handed_out.replace(gather));
    }
    s.rounds.extend(handed_out);
    s
}

/// The steps that make the sum of `range` of this rank's `own` part, the others' in the scratch, from rank `first` on round the ring.
fn sum(rank: u32, world: u32, own: &Range<usize>, range: &Range<usize>, first: u32) -> Vec<Local> {
    let out = || Span::new(Buffer::Out, range.clone());
    let place = |of: u32| {
        if of == rank {
            return out();
        }
        let index = up(of, world - rank, world) as usize - 1;
        let start = index * own.len() + (range.start - own.start);
        Span::new(Buffer::Scratch, start..start + range.len())
    };
    let mut steps: Vec<Local> = (1..world)
        .map(|k| Local::Reduce {
            from: place(up(first, k, world)),
            into: place(first),
        })
        .collect();
    if first != rank {
        steps.push(Local::Copy {
            from: place(first),
            into: out(),
        });
    }
    steps
}
