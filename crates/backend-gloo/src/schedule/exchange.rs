//! All-reduces in which ranks meet directly: two ranks that swap their vectors, and several that share memory.

use super::{
    Algorithm, BLOCK_BYTES, Buffer, Count, Landing, Local, Recv, Round, Schedule, Send, Span, even_parts,
    part, up,
};

/// Two ranks: each sends its whole vector and reduces the other's into it as it comes, in place in `Out`. As many bytes as any
/// other way for two, in one round, and what was sent last is still in the cache when it is reduced.
pub(super) fn all_reduce_exchange(rank: u32, bytes: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Exchange);
    let out = || Span::new(Buffer::Out, 0..bytes);
    s.slots = 2;
    s.result = Some(1);
    s.rounds.push(Round {
        sends: vec![Send {
            peer: 1 - rank.min(1),
            from: out(),
            slot: Some(0),
        }],
        recvs: vec![Recv {
            peer: 1 - rank.min(1),
            into: out(),
            // The kernels commute down to the bits: x0 ∘ x1 here and x1 ∘ x0 there are equal.
            landing: Landing::Exchange,
            count: Count::Add(1),
        }],
        after: vec![Local::Finish { span: out(), slot: 1 }],
    });
    s
}

/// Every rank sends part r to rank r, which reduces it and sends it back to all; block by block, in place in `Out`. Two rounds
/// where a ring has 2 (world - 1): with more ranks than cores every round costs switches.
pub(super) fn all_reduce_cross(rank: u32, world: u32, bytes: usize, element: usize) -> Schedule {
    let mut s = Schedule::new(Algorithm::Cross);
    // Slot 0 is this rank's own contribution, slot 1 the sum, counted in the first block.
    s.slots = 2;
    s.result = Some(1);
    let element = element.max(1);
    let block = (BLOCK_BYTES - BLOCK_BYTES % element).max(element);
    let mut begin = 0;
    loop {
        let end = bytes.min(begin + block);
        let parts: Vec<_> = even_parts(end - begin, element, world)
            .into_iter()
            .map(|p| begin + p.start..begin + p.end)
            .collect();
        let out = |index: u32| Span::new(Buffer::Out, part(&parts, index));
        let (mut scatter, mut gather) = (Round::default(), Round::default());
        for k in 1..world {
            let peer = up(rank, k, world);
            scatter.sends.push(Send {
                peer,
                from: out(peer),
                slot: Some(0),
            });
            scatter.recvs.push(Recv {
                peer,
                into: out(rank),
                landing: if k == 1 {
                    Landing::Reduce
                } else {
                    Landing::ReduceNext
                },
                count: if begin == 0 { Count::Add(1) } else { Count::Ignore },
            });
            gather.sends.push(Send {
                peer,
                from: out(rank),
                slot: None,
            });
            gather.recvs.push(Recv {
                peer,
                into: out(peer),
                landing: Landing::Copy,
                count: Count::Ignore,
            });
        }
        scatter.after.push(Local::Finish {
            span: out(rank),
            slot: 1,
        });
        s.rounds.extend([scatter, gather]);
        begin = end;
        if begin >= bytes {
            return s;
        }
    }
}
