//! Where ranks of one host share memory and hosts are connected by a network: within the host first, then between hosts, then
//! within the host again, so that every byte crosses the network as seldom as if each host were one rank.
//!
//! What crosses is spread over *rails*: rail j leads through rank j of every host, and there are as many as the smallest host has
//! ranks, so all of those drive the link at once. What else a rank contributes goes through the rail that its place falls on. Small
//! messages take one rail: fewer of them then, and nothing to gain from a second.
//!
//! A rank of a rail hears from its whole host before it speaks to another one, and the rails between hosts are rings, exchanges or
//! trees by which every rank on them hears of all ranks: so none finishes before all have entered (L15).

use std::ops::Range;

use super::hosts::{Hosts, Inset, OnHost};
use super::linear::{header_from, header_to};
use super::{
    Algorithm, Buffer, Count, Landing, Local, Recv, Round, Schedule, Send, Span, all_reduce_algorithm,
    all_reduce_by, doublings, down, even_parts, part, tree, up,
};

/// Up to this many bytes, all-reduces between hosts take one rail.
pub(crate) const ONE_RAIL_MAX_BYTES: usize = 16 * 1024;

/// All-reduce of `bytes` bytes in place in `Out`: reduce-scatter within the host, all-reduce of each part between hosts, all-gather
/// within the host.
pub(crate) fn all_reduce(rank: u32, hosts: &Hosts, bytes: usize, element: usize) -> Schedule {
    let on_host = hosts.on_host(rank);
    let rails = if bytes <= ONE_RAIL_MAX_BYTES {
        1
    } else {
        hosts.least()
    };
    let parts = even_parts(bytes, element, rails);
    let on_rail = on_host.place < rails;
    let out = |place: u32| Span::new(Buffer::Out, part(&parts, place));
    let own = part(&parts, on_host.place);
    // One algorithm for all rails, by the longest part: they all have the same rounds then.
    let algorithm = all_reduce_algorithm(hosts.count(), part(&parts, 0).len(), false);
    let between = all_reduce_by(algorithm, on_host.host, hosts.count(), own.len(), element);

    let mut s = Schedule::new(Algorithm::Layered);
    // Slot 0 is this rank's own contribution, slot 1 its host's, the others are those of the rail.
    const HOST: usize = 1;
    let inset = Inset {
        ranks: &rail(hosts, on_host.place),
        out: own.start,
        slots: HOST + 1,
    };
    let total = between.result.unwrap_or(0) + inset.slots;
    s.slots = inset.slots + between.slots;
    s.result = Some(total);

    let mut scatter = Round::default();
    for (peer, place) in on_host.others() {
        if place < rails {
            scatter.sends.push(Send {
                peer,
                from: out(place),
                slot: Some(0),
            });
        }
        if on_rail {
            scatter.recvs.push(Recv {
                peer,
                into: out(on_host.place),
                landing: match scatter.recvs.is_empty() {
                    true => Landing::Reduce,
                    false => Landing::ReduceNext,
                },
                count: Count::Add(HOST),
            });
        }
    }
    if on_rail {
        s.scratch = between.scratch;
        scatter.after.push(Local::Count {
            from: HOST,
            into: inset.slots..s.slots,
        });
        let before = between.before.into_iter().map(|step| inset.local(step));
        scatter.after.extend(before);
    }
    s.rounds.push(scatter);
    for round in between.rounds {
        s.rounds.push(match on_rail {
            true => inset.round(round),
            false => Round::default(),
        });
    }
    let mut gather = Round::default();
    for (peer, place) in on_host.others() {
        if on_rail {
            gather.sends.push(Send {
                peer,
                from: out(on_host.place),
                slot: Some(total),
            });
        }
        if place < rails {
            gather.recvs.push(Recv {
                peer,
                into: out(place),
                landing: Landing::Copy,
                count: if on_rail { Count::Ignore } else { Count::Set(total) },
            });
        }
    }
    s.rounds.push(gather);
    s
}

/// The ranks of rail `place`, by host; empty if a host has fewer ranks.
fn rail(hosts: &Hosts, place: u32) -> Vec<u32> {
    let of = |host| hosts.of(host).get(place as usize).copied();
    (0..hosts.count())
        .map(of)
        .collect::<Option<_>>()
        .unwrap_or_default()
}

/// Who speaks for each host when `root` gives or takes: the root itself, and the lowest rank of every other host.
fn leaders(hosts: &Hosts, root: u32) -> Vec<u32> {
    let own = hosts.on_host(root).host;
    let of = |host| match host == own {
        true => root,
        false => hosts.of(host).first().copied().unwrap_or(root),
    };
    (0..hosts.count()).map(of).collect()
}

/// The place of its host's leader, and how many ranks the host has.
fn led(on_host: &OnHost<'_>, leaders: &[u32]) -> (u32, u32) {
    let leader = leaders.get(on_host.host as usize).copied();
    let mut places = on_host.mates.iter().zip(0u32..);
    let place = places.find(|(mate, _)| Some(**mate) == leader);
    let world = u32::try_from(on_host.mates.len()).unwrap_or(u32::MAX);
    (place.map_or(0, |(_, place)| place), world)
}

/// Rounds within the host, and as many empty ones as the largest host needs more.
fn within(rounds: Vec<Round>, on_host: &OnHost<'_>, hosts: &Hosts) -> Vec<Round> {
    let inset = Inset {
        ranks: on_host.mates,
        out: 0,
        slots: 0,
    };
    let mut rounds: Vec<Round> = rounds.into_iter().map(|round| inset.round(round)).collect();
    rounds.resize_with(doublings(hosts.most()) as usize, Round::default);
    rounds
}

/// A header from every rank to its leader, or the other way round.
fn report(rank: u32, on_host: &OnHost<'_>, leaders: &[u32], to_leader: bool) -> Round {
    let leader = leaders.get(on_host.host as usize).copied().unwrap_or(rank);
    let mut round = Round::default();
    let others = || on_host.others().map(|(peer, _)| peer);
    match (rank == leader, to_leader) {
        (true, true) => round.recvs = others().map(header_from).collect(),
        (true, false) => round.sends = others().map(header_to).collect(),
        (false, true) => round.sends = vec![header_to(leader)],
        (false, false) => round.recvs = vec![header_from(leader)],
    }
    round
}

/// Every rank's `Out` becomes the root's: a tree over the hosts, then one in each.
pub(crate) fn broadcast(rank: u32, hosts: &Hosts, root: u32, bytes: usize) -> Schedule {
    let on_host = hosts.on_host(rank);
    let leaders = leaders(hosts, root);
    let mut s = Schedule::new(Algorithm::Layered);
    // Before a leader speaks to another host it has heard from its own.
    s.rounds.push(report(rank, &on_host, &leaders, true));
    let inset = Inset {
        ranks: &leaders,
        out: 0,
        slots: 0,
    };
    let root_host = hosts.on_host(root).host;
    for round in tree::broadcast_rounds(on_host.host, hosts.count(), root_host, bytes, None) {
        s.rounds.push(match leaders.contains(&rank) {
            true => inset.round(round),
            false => Round::default(),
        });
    }
    let (leader, world) = led(&on_host, &leaders);
    let rounds = tree::broadcast_rounds(on_host.place, world, leader, bytes, None);
    s.rounds.extend(within(rounds, &on_host, hosts));
    s
}

/// The root's `Out` becomes the reduction of every rank's data (the root's `Out`, the others' `In`): a tree in each host, then one
/// over the hosts.
pub(crate) fn reduce(rank: u32, hosts: &Hosts, root: u32, bytes: usize) -> Schedule {
    let on_host = hosts.on_host(rank);
    let leaders = leaders(hosts, root);
    let (own, sum) = match rank == root {
        true => (Buffer::Out, Buffer::Out),
        false => (Buffer::In, Buffer::Scratch),
    };
    let mut s = Schedule::new(Algorithm::Layered);
    s.scratch = if rank == root { 0 } else { bytes };
    let (leader, world) = led(&on_host, &leaders);
    let rounds = tree::reduce_rounds(on_host.place, world, leader, bytes, own, sum);
    s.rounds = within(rounds, &on_host, hosts);
    // The sum of a host of several ranks stands in `sum`, that of a single one is its own values.
    let own = if world > 1 { sum } else { own };
    let inset = Inset {
        ranks: &leaders,
        out: 0,
        slots: 0,
    };
    let root_host = hosts.on_host(root).host;
    for round in tree::reduce_rounds(on_host.host, hosts.count(), root_host, bytes, own, sum) {
        s.rounds.push(match leaders.contains(&rank) {
            true => inset.round(round),
            false => Round::default(),
        });
    }
    if rank == root {
        s.result = Some(0);
        if let Some(last) = s.rounds.last_mut() {
            last.after.push(Local::Finish {
                span: Span::new(Buffer::Out, 0..bytes),
                slot: 0,
            });
        }
    }
    s.rounds.push(report(rank, &on_host, &leaders, false));
    s
}

/// What every rank of a world with rails knows for collectives with a part per rank.
struct Rails<'a> {
    hosts: &'a Hosts,
    on_host: OnHost<'a>,
    /// How many.
    rails: u32,
    /// How many ranks of a host share one at most.
    depth: u32,
    parts: &'a [Range<usize>],
}

impl<'a> Rails<'a> {
    fn new(rank: u32, hosts: &'a Hosts, parts: &'a [Range<usize>]) -> Self {
        let rails = hosts.least();
        Self {
            hosts,
            on_host: hosts.on_host(rank),
            rails,
            depth: hosts.most().div_ceil(rails),
            parts,
        }
    }

    /// The part of the rank that is number `index` of those on rail `rail` of `host`, if there is one.
    fn part(&self, host: u32, rail: u32, index: u32) -> Option<Range<usize>> {
        let place = rail as usize + index as usize * self.rails as usize;
        let rank = self.hosts.of(host).get(place)?;
        Some(part(self.parts, *rank))
    }

    fn on_rail(&self) -> bool {
        self.on_host.place < self.rails
    }

    /// The rank of this rail on the host `by` further on, or before.
    fn next(&self, forward: bool) -> u32 {
        let (host, count) = (self.on_host.host, self.hosts.count());
        let host = if forward {
            up(host, 1, count)
        } else {
            down(host, 1, count)
        };
        let mates = self.hosts.of(host);
        mates
            .get(self.on_host.place as usize)
            .copied()
            .unwrap_or(u32::MAX)
    }
}

/// Part r of `Out` becomes rank r's `In`: rings between hosts, and what comes in by one is given to the host while the next part
/// comes.
pub(crate) fn all_gather(rank: u32, hosts: &Hosts, parts: &[Range<usize>]) -> Schedule {
    let rails = Rails::new(rank, hosts, parts);
    let (on_host, count, depth) = (rails.on_host, hosts.count(), rails.depth);
    let own = part(parts, rank);
    let own_in = || Span::new(Buffer::In, 0..own.len());
    let out = |range| Span::new(Buffer::Out, range);
    let mut s = Schedule::new(Algorithm::Layered);
    s.before.push(Local::Copy {
        from: own_in(),
        into: out(own.clone()),
    });
    // Every rank's own part to its host.
    let mut round = Round::default();
    for (peer, _) in on_host.others() {
        round.sends.push(plain_send(peer, own_in()));
        round.recvs.push(plain_recv(peer, out(part(parts, peer))));
    }
    s.rounds.push(round);
    // Step t of a ring, and what came in by the step before to the host. One round more for the last of it.
    let steps = (count - 1) * depth;
    for t in 0..=steps {
        let mut round = Round::default();
        if t < steps && rails.on_rail() {
            let (k, index) = (t / depth, t % depth);
            let (sent, received) = (down(on_host.host, k, count), down(on_host.host, k + 1, count));
            if let Some(range) = rails.part(sent, on_host.place, index) {
                round.sends.push(plain_send(rails.next(true), out(range)));
            }
            if let Some(range) = rails.part(received, on_host.place, index) {
                round.recvs.push(plain_recv(rails.next(false), out(range)));
            }
        }
        if let Some(before) = t.checked_sub(1) {
            let (k, index) = (before / depth, before % depth);
            let source = down(on_host.host, k + 1, count);
            for (peer, place) in on_host.others() {
                if rails.on_rail()
                    && let Some(range) = rails.part(source, on_host.place, index)
                {
                    round.sends.push(plain_send(peer, out(range)));
                }
                if place < rails.rails
                    && let Some(range) = rails.part(source, place, index)
                {
                    round.recvs.push(plain_recv(peer, out(range)));
                }
            }
        }
        s.rounds.push(round);
    }
    s
}

fn plain_send(peer: u32, from: Span) -> Send {
    Send {
        peer,
        from,
        slot: None,
    }
}

fn plain_recv(peer: u32, into: Span) -> Recv {
    Recv {
        peer,
        into,
        landing: Landing::Copy,
        count: Count::Ignore,
    }
}

/// `Out` becomes the reduction of part `rank` of every rank's `In`, which is left as it is: each part is reduced within every host by
/// the rail of its rank, then travels by that rail to the rank's host, growing on every one.
pub(crate) fn reduce_scatter(rank: u32, hosts: &Hosts, parts: &[Range<usize>]) -> Schedule {
    let rails = Rails::new(rank, hosts, parts);
    let (on_host, count, depth) = (rails.on_host, hosts.count(), rails.depth);
    let mut s = Schedule::new(Algorithm::Layered);
    // Slot 0 is this rank's own contribution, slot 1 its host's, slot 2 + h what is reduced for host h.
    const HOST: usize = 1;
    let slot = |host: u32| HOST + 1 + host as usize;
    s.slots = slot(count);
    s.result = Some(slot(on_host.host));
    // Where the sums stand; the own one where it belongs.
    let mut sums = Vec::new();
    for host in 0..count {
        for index in 0..depth {
            let range = rails.part(host, on_host.place, index).unwrap_or(0..0);
            let place = if host == on_host.host && index == 0 {
                Span::new(Buffer::Out, 0..range.len())
            } else {
                let start = s.scratch;
                s.scratch += range.len();
                Span::new(Buffer::Scratch, start..s.scratch)
            };
            sums.push(place);
        }
    }
    if !rails.on_rail() {
        s.scratch = 0;
    }
    let sum = |host: u32, index: u32| {
        let at = (host * depth + index) as usize;
        sums.get(at).cloned().unwrap_or_else(Span::empty)
    };
    let alone = on_host.mates.len() < 2;
    // What a ring takes in is reduced within this host two steps of the ring earlier.
    let target = |q: u32| down(on_host.host, q + 1, count);
    for t in 0..(count + 1) * depth {
        let (q, index) = (t / depth, t % depth);
        let mut round = Round::default();
        if q < count {
            let host = target(q);
            for (peer, place) in on_host.others() {
                if place < rails.rails
                    && let Some(range) = rails.part(host, place, index)
                {
                    round.sends.push(Send {
                        peer,
                        from: Span::new(Buffer::In, range),
                        slot: Some(0),
                    });
                }
                if rails.on_rail()
                    && let Some(range) = rails.part(host, on_host.place, index)
                {
                    round.recvs.push(Recv {
                        peer,
                        into: sum(host, index),
                        landing: match round.recvs.is_empty() {
                            true => Landing::ReduceWith(Span::new(Buffer::In, range)),
                            false => Landing::ReduceNext,
                        },
                        count: if t == 0 { Count::Add(HOST) } else { Count::Ignore },
                    });
                }
            }
        }
        if t == 0 {
            round.after.push(Local::Count {
                from: HOST,
                into: slot(0)..s.slots,
            });
        }
        if let Some(k) = q.checked_sub(2)
            && rails.on_rail()
        {
            let (sent, received) = (target(k), target(k + 1));
            if let Some(range) = rails.part(sent, on_host.place, index) {
                let first = alone && k == 0;
                round.sends.push(Send {
                    peer: rails.next(true),
                    from: match first {
                        true => Span::new(Buffer::In, range),
                        false => sum(sent, index),
                    },
                    slot: Some(slot(sent)),
                });
            }
            if let Some(range) = rails.part(received, on_host.place, index) {
                round.recvs.push(Recv {
                    peer: rails.next(false),
                    into: sum(received, index),
                    landing: match alone {
                        true => Landing::ReduceWith(Span::new(Buffer::In, range)),
                        false => Landing::Reduce,
                    },
                    count: if index == 0 {
                        Count::Add(slot(received))
                    } else {
                        Count::Ignore
                    },
                });
                if received == on_host.host {
                    round.after.push(Local::Finish {
                        span: sum(received, index),
                        slot: slot(received),
                    });
                }
            }
        }
        s.rounds.push(round);
    }
    s.rounds.push(deliver(&rails, &sum, slot(on_host.host)));
    s
}

/// The finished sums of a rail to those of its ranks that it does not lead through.
fn deliver(rails: &Rails<'_>, sum: &impl Fn(u32, u32) -> Span, slot: usize) -> Round {
    let on_host = rails.on_host;
    let mut round = Round::default();
    for (peer, place) in on_host.others() {
        if rails.on_rail() && place >= rails.rails && place % rails.rails == on_host.place {
            round.sends.push(Send {
                peer,
                from: sum(on_host.host, place / rails.rails),
                slot: Some(slot),
            });
        }
        if !rails.on_rail() && place == on_host.place % rails.rails {
            let own = rails.hosts.of(on_host.host).get(on_host.place as usize);
            let len = own.map_or(0, |rank| part(rails.parts, *rank).len());
            round.recvs.push(Recv {
                peer,
                into: Span::new(Buffer::Out, 0..len),
                landing: Landing::Copy,
                count: Count::Set(slot),
            });
        }
    }
    round
}
