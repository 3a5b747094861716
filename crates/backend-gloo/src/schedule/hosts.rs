//! Which ranks share memory, and how a schedule for a few ranks is laid into a larger one.
//!
//! Every rank says when it connects which is the lowest rank of those with which it shares memory (itself included); ranks that say
//! the same are taken for one host. Every rank hears the same from all ranks, so all ranks agree on the hosts, and with them
//! on algorithm and order (INV-3), even where shared memory failed between some pair.

use super::{Buffer, Count, Landing, Local, Recv, Round, Send, Span};

/// The hosts of a world and their ranks; the same on every rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Hosts {
    /// The ranks of each host, ascending; hosts in the order of their lowest ranks.
    members: Vec<Vec<u32>>,
    /// By rank: its share of large sums; empty where all have the same.
    shares: Vec<u32>,
}

/// A rank's place in its host.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnHost<'a> {
    /// Which host.
    pub(super) host: u32,
    /// Which of its ranks.
    pub(super) place: u32,
    /// All of them.
    pub(super) mates: &'a [u32],
}

impl Hosts {
    /// By rank: the lowest rank with which it shares memory.
    pub(crate) fn new(lowest: &[u32]) -> Self {
        let mut names: Vec<u32> = Vec::new();
        let mut members: Vec<Vec<u32>> = Vec::new();
        for (name, rank) in lowest.iter().zip(0u32..) {
            let known = names.iter().position(|n| n == name);
            match known.and_then(|at| members.get_mut(at)) {
                Some(of) => of.push(rank),
                None => {
                    names.push(*name);
                    members.push(vec![rank]);
                }
            }
        }
        Self {
            members,
            shares: Vec::new(),
        }
    }

    /// Large sums are shared so from now on; see [`rates`](super::rates).
    pub(crate) fn share(&mut self, shares: Vec<u32>) {
        self.shares = shares;
    }

    /// By rank: its share of large sums; empty where all have the same.
    pub(crate) fn shares(&self) -> &[u32] {
        &self.shares
    }

    /// True if no rank shares memory with another one.
    pub(crate) fn are_single(&self) -> bool {
        self.members.iter().all(|m| m.len() == 1)
    }

    /// True if there are several hosts, and several ranks on one of them: it pays to go within hosts first.
    pub(crate) fn is_layered(&self) -> bool {
        self.members.len() > 1 && self.members.iter().any(|m| m.len() > 1)
    }

    /// True if all ranks are on one host.
    pub(crate) fn is_one(&self) -> bool {
        self.members.len() == 1
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.members.len()).unwrap_or(u32::MAX)
    }

    /// The ranks of a host.
    pub(super) fn of(&self, host: u32) -> &[u32] {
        self.members.get(host as usize).map_or(&[], Vec::as_slice)
    }

    /// How many ranks the smallest host has, at least one.
    pub(super) fn least(&self) -> u32 {
        let least = self.members.iter().map(Vec::len).min().unwrap_or(1);
        u32::try_from(least.max(1)).unwrap_or(1)
    }

    /// How many ranks the largest host has.
    pub(super) fn most(&self) -> u32 {
        let most = self.members.iter().map(Vec::len).max().unwrap_or(1);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// Where `rank` is.
    pub(super) fn on_host(&self, rank: u32) -> OnHost<'_> {
        for (mates, host) in self.members.iter().zip(0u32..) {
            if let Some((_, place)) = mates.iter().zip(0u32..).find(|(mate, _)| **mate == rank) {
                return OnHost { host, place, mates };
            }
        }
        OnHost {
            host: 0,
            place: 0,
            mates: &[],
        }
    }
}

impl<'a> OnHost<'a> {
    /// The other ranks of the host with their places, each rank beginning with the one behind it.
    pub(super) fn others(&self) -> impl Iterator<Item = (u32, u32)> + use<'a> {
        let world = u32::try_from(self.mates.len()).unwrap_or(u32::MAX);
        let (mates, own) = (self.mates, self.place);
        (1..world).filter_map(move |k| {
            let place = super::up(own, k, world);
            mates.get(place as usize).map(|rank| (*rank, place))
        })
    }
}

/// Lays the rounds of a schedule for a few ranks into that of all.
pub(super) struct Inset<'a> {
    /// Who plays each of its ranks.
    pub(super) ranks: &'a [u32],
    /// Where its `Out` begins in that of the whole.
    pub(super) out: usize,
    /// Where its counters begin.
    pub(super) slots: usize,
}

impl Inset<'_> {
    fn rank(&self, rank: u32) -> u32 {
        // A rank that is not there has no connection: the executor says so.
        self.ranks.get(rank as usize).copied().unwrap_or(u32::MAX)
    }

    fn span(&self, span: Span) -> Span {
        match span.buffer {
            Buffer::Out => Span::new(
                Buffer::Out,
                span.range.start + self.out..span.range.end + self.out,
            ),
            Buffer::In | Buffer::Scratch => span,
        }
    }

    pub(super) fn local(&self, step: Local) -> Local {
        match step {
            Local::Copy { from, into } => Local::Copy {
                from: self.span(from),
                into: self.span(into),
            },
            Local::Reduce { from, into } => Local::Reduce {
                from: self.span(from),
                into: self.span(into),
            },
            Local::Finish { span, slot } => Local::Finish {
                span: self.span(span),
                slot: slot + self.slots,
            },
            Local::Count { from, into } => Local::Count {
                from: from + self.slots,
                into: into.start + self.slots..into.end + self.slots,
            },
        }
    }

    pub(super) fn round(&self, round: Round) -> Round {
        let send = |s: Send| Send {
            peer: self.rank(s.peer),
            from: self.span(s.from),
            slot: s.slot.map(|slot| slot + self.slots),
        };
        let recv = |r: Recv| Recv {
            peer: self.rank(r.peer),
            into: self.span(r.into),
            landing: match r.landing {
                Landing::ReduceWith(with) => Landing::ReduceWith(self.span(with)),
                other => other,
            },
            count: match r.count {
                Count::Ignore => Count::Ignore,
                Count::Add(slot) => Count::Add(slot + self.slots),
                Count::Set(slot) => Count::Set(slot + self.slots),
            },
        };
        Round {
            sends: round.sends.into_iter().map(send).collect(),
            recvs: round.recvs.into_iter().map(recv).collect(),
            after: round.after.into_iter().map(|step| self.local(step)).collect(),
        }
    }
}
