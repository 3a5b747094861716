//! Which rank sends how many bytes to which other one, round by round: the schedules that groups carry out, for a program that foresees how long
//! an operation takes.
//!
//! Nothing is sent, and no group is needed. Local steps (reductions, copies) are left out.

use crate::schedule::{self, Algorithm, Hosts, Schedule, layered, may_begin_early, ready_early, shared};

/// A message of one rank in one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The rank at its other end.
    pub peer: u32,
    /// Its payload; 0 for one that says only that the rank is there. Each has a header besides.
    pub bytes: usize,
    /// Of a send: what it carries arrives in the round before, so it goes out as it comes in, piece by piece. False for a receive.
    pub passes_on: bool,
}

/// What one rank does at the same time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exchange {
    /// What goes out.
    pub sends: Vec<Message>,
    /// What comes in.
    pub receives: Vec<Message>,
    /// Its sends may begin before the round before it has ended, each as far as its bytes are there.
    pub early: bool,
}

/// The messages of a group's operations.
#[derive(Debug, Clone)]
pub struct Messages {
    hosts: Hosts,
    world: u32,
}

impl Messages {
    /// A group with one rank for each item: the lowest rank of its host. Ranks of one host share memory.
    pub fn new(lowest: &[u32]) -> Self {
        Self {
            hosts: Hosts::new(lowest),
            world: u32::try_from(lowest.len()).unwrap_or(u32::MAX),
        }
    }

    fn one_host(&self) -> bool {
        self.world > 1 && self.hosts.is_one()
    }

    /// What `rank` sends and receives in an all-reduce that averages `bytes` bytes, in elements of `element` bytes. All ranks have as many rounds.
    pub fn all_reduce(&self, rank: u32, bytes: usize, element: usize) -> Vec<Exchange> {
        of_rounds(&match self.hosts.is_layered() {
            true => layered::all_reduce(rank, &self.hosts, bytes, element),
            false => schedule::all_reduce(rank, self.world, bytes, element, self.one_host(), &[]),
        })
    }

    /// How an all-reduce of `bytes` bytes goes, in a word.
    pub fn algorithm(&self, bytes: usize) -> &'static str {
        if self.hosts.is_layered() {
            return "within hosts, then between them";
        }
        match schedule::all_reduce_algorithm(self.world, bytes, self.one_host()) {
            Algorithm::Local => "one rank",
            Algorithm::Exchange => "exchange of two",
            Algorithm::Direct => "all to all",
            Algorithm::Cross => "part by part, all to all",
            Algorithm::Tree => "tree",
            _ => "ring",
        }
    }

    /// As [`all_reduce`](Self::all_reduce): an all-gather in which every rank gives `bytes` bytes.
    pub fn all_gather(&self, rank: u32, bytes: usize) -> Vec<Exchange> {
        let parts = schedule::parts_of(&vec![bytes; self.world as usize]);
        of_rounds(&match (self.hosts.is_layered(), self.one_host()) {
            (true, _) => layered::all_gather(rank, &self.hosts, &parts),
            (_, true) => shared::all_gather(rank, self.world, &parts),
            _ => schedule::all_gather(rank, self.world, &parts),
        })
    }

    /// As [`all_reduce`](Self::all_reduce): an all-to-all in which every rank gives `bytes` bytes to every rank.
    pub fn all_to_all(&self, rank: u32, bytes: usize) -> Vec<Exchange> {
        let parts = schedule::parts_of(&vec![bytes; self.world as usize]);
        of_rounds(&match self.one_host() {
            true => shared::all_to_all(rank, self.world, &parts, &parts),
            false => schedule::all_to_all(rank, self.world, &parts, &parts),
        })
    }
}

fn of_rounds(s: &Schedule) -> Vec<Exchange> {
    let mut before: Option<&schedule::Round> = None;
    let mut rounds = Vec::with_capacity(s.rounds.len());
    for round in &s.rounds {
        let nothing_yet = || before.iter().flat_map(|b| b.recvs.iter().map(|r| (r, 0)));
        let sends = round.sends.iter().map(|send| Message {
            peer: send.peer,
            bytes: send.from.len(),
            passes_on: ready_early(send, nothing_yet()) < send.from.len(),
        });
        let receives = round.recvs.iter().map(|recv| Message {
            peer: recv.peer,
            bytes: recv.into.len(),
            passes_on: false,
        });
        rounds.push(Exchange {
            sends: sends.collect(),
            receives: receives.collect(),
            early: before.is_some_and(|b| may_begin_early(&b.after, &round.sends, true)),
        });
        before = Some(round);
    }
    rounds
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// By (round, from, to): the bytes that leave, and those that are awaited.
    fn both_ends(world: u32, of: impl Fn(u32) -> Vec<Exchange>) -> [BTreeMap<(usize, u32, u32), usize>; 2] {
        let [mut sent, mut awaited] = [BTreeMap::new(), BTreeMap::new()];
        for rank in 0..world {
            for (k, round) in of(rank).iter().enumerate() {
                sent.extend(round.sends.iter().map(|m| ((k, rank, m.peer), m.bytes)));
                awaited.extend(round.receives.iter().map(|m| ((k, m.peer, rank), m.bytes)));
            }
        }
        [sent, awaited]
    }

    #[test]
    fn what_one_rank_sends_another_awaits_in_the_same_round() {
        for lowest in [&[0, 1][..], &[0, 1, 2, 3, 4], &[0, 0, 2, 2, 4, 4], &[0, 0, 0]] {
            let (messages, world) = (Messages::new(lowest), lowest.len() as u32);
            for bytes in [0, 4, 4_000, 1 << 20, 8 << 20] {
                let [sent, awaited] = both_ends(world, |r| messages.all_reduce(r, bytes, 4));
                assert_eq!(sent, awaited, "{lowest:?}, {bytes} bytes");
                let [sent, awaited] = both_ends(world, |r| messages.all_gather(r, bytes));
                assert_eq!(sent, awaited, "{lowest:?}, {bytes} bytes");
                let [sent, awaited] = both_ends(world, |r| messages.all_to_all(r, bytes));
                assert_eq!(sent, awaited, "{lowest:?}, {bytes} bytes");
            }
        }
    }

    #[test]
    fn a_ring_passes_on_what_arrives_and_sends_each_part_twice() {
        let rounds = Messages::new(&[0, 1, 2, 3, 4]).all_reduce(2, 8_000_000, 4);
        let sent: usize = rounds.iter().flat_map(|r| &r.sends).map(|m| m.bytes).sum();
        assert_eq!((rounds.len(), sent), (8, 2 * 4 * 8_000_000 / 5));
        assert!(!rounds[0].sends[0].passes_on && !rounds[0].early);
        // An average is divided in the middle: the second half begins behind that.
        assert!(rounds[1..].iter().all(|r| r.sends[0].passes_on));
        assert_eq!(rounds.iter().filter(|r| r.early).count(), 6);
    }
}
