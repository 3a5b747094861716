//! Binomial trees, laid over the dissemination pattern.
//!
//! In round k of a dissemination every rank sends to the one 2^k further on. A binomial broadcast uses a part of just
//! those edges, so the remaining ones carry a header only: the same number of rounds, and at the end every rank knows
//! that every other one took part in the same operation.

use super::{
    Algorithm, Buffer, Count, Landing, Local, Recv, Round, Schedule, Send, Span, doublings, down, up,
};

/// Every rank's `Out` becomes the root's.
pub(crate) fn broadcast(rank: u32, world: u32, root: u32, bytes: usize) -> Schedule {
    let mut s = Schedule::new(if world <= 1 {
        Algorithm::Local
    } else {
        Algorithm::Tree
    });
    s.rounds = broadcast_rounds(rank, world, root, bytes, None);
    s
}

pub(super) fn broadcast_rounds(
    rank: u32,
    world: u32,
    root: u32,
    bytes: usize,
    slot: Option<usize>,
) -> Vec<Round> {
    let place = down(rank, root, world);
    let data = || Span::new(Buffer::Out, 0..bytes);
    (0..doublings(world))
        .map(|k| {
            let step = 1u32 << k;
            let sends = place < step && place + step < world;
            let receives = place >= step && place < step * 2;
            Round {
                sends: vec![Send {
                    peer: up(rank, step, world),
                    from: if sends { data() } else { Span::empty() },
                    slot: slot.filter(|_| sends),
                }],
                recvs: vec![Recv {
                    peer: down(rank, step, world),
                    into: if receives { data() } else { Span::empty() },
                    landing: Landing::Copy,
                    count: slot.filter(|_| receives).map_or(Count::Ignore, Count::Set),
                }],
                after: Vec::new(),
            }
        })
        .collect()
}

/// The root's `Out` becomes the reduction of every rank's data: the root's `Out`, the others' `In` (left as it is).
pub(crate) fn reduce(rank: u32, world: u32, root: u32, bytes: usize) -> Schedule {
    let mut s = Schedule::new(if world <= 1 {
        Algorithm::Local
    } else {
        Algorithm::Tree
    });
    let own = if rank == root { Buffer::Out } else { Buffer::In };
    let sum = if rank == root {
        Buffer::Out
    } else {
        Buffer::Scratch
    };
    s.rounds = reduce_rounds(rank, world, root, bytes, own, sum);
    s.scratch = if rank == root { 0 } else { bytes };
    if rank == root {
        s.result = Some(0);
        let finish = Local::Finish {
            span: Span::new(Buffer::Out, 0..bytes),
            slot: 0,
        };
        match s.rounds.last_mut() {
            Some(last) => last.after.push(finish),
            None => s.before.push(finish),
        }
    }
    s
}

/// `own` holds this rank's values, `sum` takes the sum; if they differ, `own` is only read.
pub(super) fn reduce_rounds(
    rank: u32,
    world: u32,
    root: u32,
    bytes: usize,
    own: Buffer,
    sum: Buffer,
) -> Vec<Round> {
    let place = down(rank, root, world);
    let mut have_sum = own == sum;
    (0..doublings(world))
        .rev()
        .map(|k| {
            let step = 1u32 << k;
            let sends = place >= step && place < step * 2;
            let receives = place < step && place + step < world;
            let from = Span::new(if have_sum { sum } else { own }, 0..bytes);
            let landing = if have_sum || !receives {
                Landing::Reduce
            } else {
                Landing::ReduceWith(Span::new(own, 0..bytes))
            };
            have_sum |= receives;
            Round {
                sends: vec![Send {
                    peer: down(rank, step, world),
                    from: if sends { from } else { Span::empty() },
                    slot: Some(0).filter(|_| sends),
                }],
                recvs: vec![Recv {
                    peer: up(rank, step, world),
                    into: if receives {
                        Span::new(sum, 0..bytes)
                    } else {
                        Span::empty()
                    },
                    landing,
                    count: if receives { Count::Add(0) } else { Count::Ignore },
                }],
                after: Vec::new(),
            }
        })
        .collect()
}

/// To rank 0 and back, in place in `Out`: 2 log₂(world) rounds.
pub(super) fn all_reduce_tree(rank: u32, world: u32, bytes: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Tree);
    s.rounds = reduce_rounds(rank, world, 0, bytes, Buffer::Out, Buffer::Out);
    if rank == 0
        && let Some(last) = s.rounds.last_mut()
    {
        last.after.push(Local::Finish {
            span: Span::new(Buffer::Out, 0..bytes),
            slot: 0,
        });
    }
    s.rounds.extend(broadcast_rounds(rank, world, 0, bytes, Some(0)));
    s.result = Some(0);
    s
}
