//! Rings: every rank sends to the next and receives from the one before, all links busy in every round.

use std::ops::Range;

use super::{
    Algorithm, Buffer, Count, Landing, Local, Recv, Round, Schedule, Send, Span, down, even_parts, part, up,
};

/// Reduce-scatter, then all-gather, in place in `Out`: 2 (world - 1) rounds of bytes / world each.
pub(super) fn all_reduce_ring(rank: u32, world: u32, bytes: usize, element: usize) -> Schedule {
    let parts = even_parts(bytes, element, world);
    let mut s = Schedule::new(Algorithm::Ring);
    s.slots = world as usize;
    s.result = Some(0);
    let (next, previous) = (up(rank, 1, world), down(rank, 1, world));
    let out = |index: u32| Span::new(Buffer::Out, part(&parts, index));
    for k in 0..world.saturating_sub(1) {
        let (sent, received) = (down(rank, k, world), down(rank, k + 1, world));
        s.rounds.push(Round {
            sends: vec![Send {
                peer: next,
                from: out(sent),
                slot: Some(sent as usize),
            }],
            recvs: vec![Recv {
                peer: previous,
                into: out(received),
                landing: Landing::Reduce,
                count: Count::Add(received as usize),
            }],
            after: Vec::new(),
        });
    }
    // The part after this rank's own is complete here: divide it once, before the others copy it.
    let own = up(rank, 1, world);
    if let Some(last) = s.rounds.last_mut() {
        last.after.push(Local::Finish {
            span: out(own),
            slot: own as usize,
        });
    }
    for k in 0..world.saturating_sub(1) {
        let (sent, received) = (down(own, k, world), down(own, k + 1, world));
        s.rounds.push(Round {
            sends: vec![Send {
                peer: next,
                from: out(sent),
                slot: Some(sent as usize),
            }],
            recvs: vec![Recv {
                peer: previous,
                into: out(received),
                landing: Landing::Copy,
                count: Count::Set(received as usize),
            }],
            after: Vec::new(),
        });
    }
    s
}

/// `Out` becomes the reduction of part `rank` of every rank's `In`, which is left as it is.
pub(crate) fn reduce_scatter(rank: u32, world: u32, parts: &[Range<usize>]) -> Schedule {
    let own = part(parts, rank);
    let whole = Span::new(Buffer::Out, 0..own.len());
    if world <= 1 {
        let mut s = Schedule::new(Algorithm::Local);
        s.before.push(Local::Copy {
            from: Span::new(Buffer::In, own),
            into: whole.clone(),
        });
        s.before.push(Local::Finish { span: whole, slot: 0 });
        s.result = Some(0);
        return s;
    }
    let mut s = Schedule::new(Algorithm::Ring);
    s.slots = world as usize;
    s.result = Some(rank as usize);
    // Partial sums travel through two halves of the scratch in turn: one is sent while the other fills.
    let half = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    // Two ranks have no partial sums to pass on.
    s.scratch = if world > 2 { half * 2 } else { 0 };
    let scratch = |k: u32, len: usize| {
        let start = if k.is_multiple_of(2) { 0 } else { half };
        Span::new(Buffer::Scratch, start..start + len)
    };
    for k in 0..world - 1 {
        let (sent, received) = (down(rank, k + 1, world), down(rank, k + 2, world));
        let outgoing = part(parts, sent);
        let from = match k.checked_sub(1) {
            None => Span::new(Buffer::In, outgoing),
            Some(before) => scratch(before, outgoing.len()),
        };
        let incoming = part(parts, received);
        let into = if k + 2 == world {
            whole.clone()
        } else {
            scratch(k, incoming.len())
        };
        s.rounds.push(Round {
            sends: vec![Send {
                peer: up(rank, 1, world),
                from,
                slot: Some(sent as usize),
            }],
            recvs: vec![Recv {
                peer: down(rank, 1, world),
                into,
                landing: Landing::ReduceWith(Span::new(Buffer::In, incoming)),
                count: Count::Add(received as usize),
            }],
            after: Vec::new(),
        });
    }
    if let Some(last) = s.rounds.last_mut() {
        last.after.push(Local::Finish {
            span: whole,
            slot: rank as usize,
        });
    }
    s
}

/// Part r of `Out` becomes rank r's `In`.
pub(crate) fn all_gather(rank: u32, world: u32, parts: &[Range<usize>]) -> Schedule {
    let mut s = Schedule::new(if world <= 1 {
        Algorithm::Local
    } else {
        Algorithm::Ring
    });
    let own = part(parts, rank);
    s.before.push(Local::Copy {
        from: Span::new(Buffer::In, 0..own.len()),
        into: Span::new(Buffer::Out, own),
    });
    for k in 0..world.saturating_sub(1) {
        let out = |index: u32| Span::new(Buffer::Out, part(parts, index));
        s.rounds.push(Round {
            sends: vec![Send {
                peer: up(rank, 1, world),
                // What is sent first stands in the input, too, and that is in the cache if anything is.
                from: if k == 0 {
                    Span::new(Buffer::In, 0..part(parts, rank).len())
                } else {
                    out(down(rank, k, world))
                },
                slot: None,
            }],
            recvs: vec![Recv {
                peer: down(rank, 1, world),
                into: out(down(rank, k + 1, world)),
                landing: Landing::Copy,
                count: Count::Ignore,
            }],
            after: Vec::new(),
        });
    }
    s
}
