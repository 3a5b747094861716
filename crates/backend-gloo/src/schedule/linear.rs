//! Schedules in which ranks talk to each other directly: barriers, gather, scatter, all-to-all and the small all-reduce.

use std::ops::Range;

use super::{
    Algorithm, Buffer, Count, FLAT_MAX_WORLD, Landing, Local, Recv, Round, Schedule, Send, Span, doublings,
    down, part, up,
};

pub(super) fn header_to(peer: u32) -> Send {
    Send {
        peer,
        from: Span::empty(),
        slot: None,
    }
}

pub(super) fn header_from(peer: u32) -> Recv {
    Recv {
        peer,
        into: Span::empty(),
        landing: Landing::Copy,
        count: Count::Ignore,
    }
}

/// How far on in the circle of ranks those are to whom a rank speaks in round `round` of a barrier. Few ranks speak to all at once: with
/// several ranks on a core every round costs a switch, and over a network its latency.
pub(crate) fn barrier_reach(round: u32, world: u32) -> Range<u32> {
    match world <= FLAT_MAX_WORLD {
        true => 1..world,
        false => 1 << round..(1 << round) + 1,
    }
}

/// The number of rounds of a barrier.
pub(crate) fn barrier_rounds(world: u32) -> u32 {
    match world {
        0 | 1 => 0,
        2..=FLAT_MAX_WORLD => 1,
        _ => doublings(world),
    }
}

/// After these rounds every rank knows that every other one has entered.
fn dissemination(rank: u32, world: u32) -> Vec<Round> {
    (0..doublings(world))
        .map(|k| Round {
            sends: vec![header_to(up(rank, 1 << k, world))],
            recvs: vec![header_from(down(rank, 1 << k, world))],
            after: Vec::new(),
        })
        .collect()
}

/// Every rank waits for every other.
pub(crate) fn barrier(rank: u32, world: u32) -> Schedule {
    let mut s = Schedule::new(Algorithm::Dissemination);
    s.rounds = (0..barrier_rounds(world))
        .map(|round| Round {
            sends: barrier_reach(round, world)
                .map(|k| header_to(up(rank, k, world)))
                .collect(),
            recvs: barrier_reach(round, world)
                .map(|k| header_from(down(rank, k, world)))
                .collect(),
            after: Vec::new(),
        })
        .collect();
    s
}

/// Every rank reports to rank 0, which knows who is missing, and waits for its word.
pub(crate) fn monitored_barrier(rank: u32, world: u32) -> Schedule {
    let mut s = Schedule::new(Algorithm::Star);
    let (mut report, mut release) = (Round::default(), Round::default());
    if rank == 0 {
        report.recvs = (1..world).map(header_from).collect();
        release.sends = (1..world).map(header_to).collect();
    } else {
        report.sends = vec![header_to(0)];
        release.recvs = vec![header_from(0)];
    }
    if world > 1 {
        s.rounds = vec![report, release];
    }
    s
}

/// The root's `Out` takes part r from rank r's `In`. `parts` is empty on ranks other than the root; `bytes` is the
/// length of this rank's part.
pub(crate) fn gather(rank: u32, world: u32, root: u32, parts: &[Range<usize>], bytes: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Linear);
    s.rounds = dissemination(rank, world);
    let mut round = Round::default();
    if rank == root {
        s.before.push(Local::Copy {
            from: Span::new(Buffer::In, 0..bytes),
            into: Span::new(Buffer::Out, part(parts, rank)),
        });
        round.recvs = (0..world)
            .filter(|&peer| peer != root)
            .map(|peer| Recv {
                peer,
                into: Span::new(Buffer::Out, part(parts, peer)),
                landing: Landing::Copy,
                count: Count::Ignore,
            })
            .collect();
    } else {
        round.sends.push(Send {
            peer: root,
            from: Span::new(Buffer::In, 0..bytes),
            slot: None,
        });
    }
    if world > 1 {
        s.rounds.push(round);
    }
    s
}

/// Rank r's `Out` takes part r of the root's `In`. `parts` is empty on ranks other than the root; `bytes` is the length
/// of this rank's part.
pub(crate) fn scatter(rank: u32, world: u32, root: u32, parts: &[Range<usize>], bytes: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Linear);
    s.rounds = dissemination(rank, world);
    let mut round = Round::default();
    let out = Span::new(Buffer::Out, 0..bytes);
    if rank == root {
        s.before.push(Local::Copy {
            from: Span::new(Buffer::In, part(parts, rank)),
            into: out,
        });
        round.sends = (0..world)
            .filter(|&peer| peer != root)
            .map(|peer| Send {
                peer,
                from: Span::new(Buffer::In, part(parts, peer)),
                slot: None,
            })
            .collect();
    } else {
        round.recvs.push(Recv {
            peer: root,
            into: out,
            landing: Landing::Copy,
            count: Count::Ignore,
        });
    }
    if world > 1 {
        s.rounds.push(round);
    }
    s
}

/// Part r of `Out` takes part `rank` of rank r's `In`; in round k with the ranks k before and after.
pub(crate) fn all_to_all(rank: u32, world: u32, input: &[Range<usize>], output: &[Range<usize>]) -> Schedule {
    let mut s = Schedule::new(Algorithm::Pairwise);
    s.before.push(Local::Copy {
        from: Span::new(Buffer::In, part(input, rank)),
        into: Span::new(Buffer::Out, part(output, rank)),
    });
    for k in 1..world {
        let (to, from) = (up(rank, k, world), down(rank, k, world));
        s.rounds.push(Round {
            sends: vec![Send {
                peer: to,
                from: Span::new(Buffer::In, part(input, to)),
                slot: None,
            }],
            recvs: vec![Recv {
                peer: from,
                into: Span::new(Buffer::Out, part(output, from)),
                landing: Landing::Copy,
                count: Count::Ignore,
            }],
            after: Vec::new(),
        });
    }
    s
}

/// Every rank sends everything to all ranks and reduces in rank order, in place in `Out`: one round.
pub(super) fn all_reduce_direct(rank: u32, world: u32, bytes: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Direct);
    let out = || Span::new(Buffer::Out, 0..bytes);
    // The others' vectors stand in the scratch in rank order; slot 0 is what is sent, slot 1 the sum.
    let place = |peer: u32| {
        if peer == rank {
            return out();
        }
        let index = peer as usize - usize::from(peer > rank);
        Span::new(Buffer::Scratch, index * bytes..(index + 1) * bytes)
    };
    s.scratch = (world as usize - 1) * bytes;
    s.slots = 2;
    s.result = Some(1);
    let mut round = Round::default();
    for k in 1..world {
        let (to, from) = (up(rank, k, world), down(rank, k, world));
        round.sends.push(Send {
            peer: to,
            from: out(),
            slot: Some(0),
        });
        round.recvs.push(Recv {
            peer: from,
            into: place(from),
            landing: Landing::Copy,
            count: Count::Add(1),
        });
    }
    // Always x0 ∘ x1 ∘ x2 …, on every rank: bitwise equal results.
    for peer in 1..world {
        round.after.push(Local::Reduce {
            from: place(peer),
            into: place(0),
        });
    }
    if rank != 0 {
        round.after.push(Local::Copy {
            from: place(0),
            into: out(),
        });
    }
    round.after.push(Local::Finish { span: out(), slot: 1 });
    s.rounds.push(round);
    s
}
