//! How long an operation of a group takes: every rank's rounds, as the backend's own schedules have them, over the links.
//!
//! A message is a first and a last moment: of its bytes being there to be sent, of leaving its host, of arriving. What a round passes on leaves as
//! it comes in, so a chain of hops costs the delay of each and the slowest rate once. A host's line, a pair of hosts and a rank's memory each
//! carry one message after the other.
//!
//! In a group whose hosts are all alike every host does the same at the same time, shifted: the walk then follows the ranks of the first
//! host only, and takes what arrives there from what it sends. Arithmetic of reductions costs nothing here.

use std::collections::BTreeMap;

use backend_gloo::{Exchange, Messages};
use ftcore::{Error, ErrorKind, Result};

use crate::links::Links;
use crate::units::{Bytes, Seconds};

/// So many messages are walked at most: seconds of a core, and about a gigabyte of schedules.
const MAX_MESSAGES: u64 = 6_000_000;

/// Ranks of one host reduce block by block; more than so many bytes are as many times the same.
const ONE_HOST_BYTES: u64 = 64 << 20;

/// What a group does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// An average of so many bytes of elements of four bytes.
    AllReduce(Bytes),
    /// Every rank gives so many bytes to all.
    AllGather(Bytes),
    /// Every rank gives so many bytes to each.
    AllToAll(Bytes),
}

/// What an operation costs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// From the moment when all ranks call it until the last one has its result.
    pub time: Seconds,
    /// What it adds behind one like it that is under way: what it occupies the busiest line for, or what it waits for besides its first round. Groups
    /// send the first round of the operations that wait ahead of their turn, but over several connections, which know one operation at a time.
    pub next: Seconds,
    /// The payload that leaves the first host of the group.
    pub sent: Bytes,
}

impl Cost {
    /// One behind the other.
    #[must_use]
    pub(crate) fn then(self, other: Self) -> Self {
        Self {
            time: self.time + other.time,
            next: self.next + other.next,
            sent: self.sent + other.sent,
        }
    }
}

/// Ranks that work together, by their ranks in the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The host of each rank of the group.
    hosts: Vec<usize>,
}

impl Group {
    /// All ranks of the job.
    pub fn all(links: &Links) -> Self {
        Self::of_hosts(links, &(0..links.hosts().len()).collect::<Vec<_>>())
    }

    /// All ranks of these hosts.
    pub fn of_hosts(links: &Links, hosts: &[usize]) -> Self {
        let ranks = |host: usize| links.hosts().get(host).map_or(0, |h| h.ranks as usize);
        Self {
            hosts: hosts
                .iter()
                .flat_map(|h| std::iter::repeat_n(*h, ranks(*h)))
                .collect(),
        }
    }

    /// One rank of each of these hosts.
    pub fn one_of_each(hosts: &[usize]) -> Self {
        Self {
            hosts: hosts.to_vec(),
        }
    }

    /// The number of ranks.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// True if there is no rank.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// By rank: the lowest rank of its host.
    fn lowest(&self) -> Vec<u32> {
        let mut first: BTreeMap<usize, u32> = BTreeMap::new();
        let ranks = self.hosts.iter().zip(0u32..);
        ranks
            .map(|(host, rank)| *first.entry(*host).or_insert(rank))
            .collect()
    }

    /// How an all-reduce of so many bytes goes in it, in a word.
    pub fn algorithm(&self, bytes: Bytes) -> &'static str {
        Messages::new(&self.lowest()).algorithm(whole(bytes))
    }

    /// How many ranks each host has, if all have as many and stand one behind the other.
    fn per_host(&self) -> Option<usize> {
        let first = self.hosts.first()?;
        let per = self.hosts.iter().take_while(|h| *h == first).count();
        let mut seen = std::collections::BTreeSet::new();
        let blocks = self.hosts.chunks(per);
        let whole = |b: &[usize]| b.len() == per && b.windows(2).all(|w| w.first() == w.last());
        blocks
            .into_iter()
            .all(|b| whole(b) && b.first().is_some_and(|h| seen.insert(*h)))
            .then_some(per)
    }
}

/// The times of operations over given links.
#[derive(Debug, Clone, Copy)]
pub struct Costs<'a> {
    links: &'a Links,
    /// Walk all ranks, also where one host would do.
    in_full: bool,
}

/// A first and a last moment, in seconds.
type Span = (f64, f64);

/// What carries one message after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Line {
    Out(usize),
    In(usize),
    Pair(usize, usize),
    Memory(u32),
}

impl<'a> Costs<'a> {
    /// Over these links.
    pub fn new(links: &'a Links) -> Self {
        Self {
            links,
            in_full: false,
        }
    }

    /// The same without the short way for groups whose hosts are alike: what that is compared with.
    pub fn in_full(links: &'a Links) -> Self {
        Self { links, in_full: true }
    }

    /// What `operation` costs in `group`.
    ///
    /// Errors: `Unsupported` for a group that is too large to walk and whose hosts are not alike.
    pub fn of(&self, group: &Group, operation: Operation) -> Result<Cost> {
        let world = group.len();
        if world <= 1 {
            return Ok(Cost::default());
        }
        let all = Messages::new(&group.lowest());
        let distinct = distinct(&group.hosts);
        if let (Operation::AllReduce(bytes), [_]) = (operation, distinct.as_slice())
            && bytes.0 > ONE_HOST_BYTES
        {
            let part = self.of(group, Operation::AllReduce(Bytes(ONE_HOST_BYTES)))?;
            let times = bytes.0 as f64 / ONE_HOST_BYTES as f64;
            return Ok(Cost {
                time: part.time * times,
                next: part.next * times,
                sent: Bytes(0),
            });
        }
        let is_alike = !self.in_full && self.links.is_uniform(&distinct);
        let one_host = group.per_host().filter(|per| is_alike && *per < world);
        let of = |rank: u32| match operation {
            Operation::AllReduce(bytes) => all.all_reduce(rank, whole(bytes), 4),
            Operation::AllGather(bytes) => all.all_gather(rank, whole(bytes)),
            Operation::AllToAll(bytes) => all.all_to_all(rank, whole(bytes)),
        };
        if let Some(per) = one_host {
            let schedules: Vec<_> = (0..per).zip(0u32..).map(|(_, rank)| of(rank)).collect();
            // A tree has a root, so its hosts are not alike whatever the links are.
            if is_symmetric(&schedules, world) {
                return self.cost(group, &schedules);
            }
        }
        let first = of(0);
        let messages = first.iter().map(|r| r.sends.len().max(1) as u64).sum::<u64>();
        if messages.saturating_mul(world as u64) > MAX_MESSAGES {
            let text = format!(
                "{world} ranks whose hosts are not alike make {messages} messages each, more than this walks: \
                 describe them as equal hosts, or as fewer"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let rest = (1..u32::try_from(world).unwrap_or(u32::MAX)).map(of);
        let schedules: Vec<_> = std::iter::once(first).chain(rest).collect();
        self.cost(group, &schedules)
    }

    fn cost(&self, group: &Group, schedules: &[Vec<Exchange>]) -> Result<Cost> {
        let alone = self.walk(group, schedules, false)?;
        let in_turn = self.links.connections() > 1 && distinct(&group.hosts).len() > 1;
        let next = match in_turn {
            true => alone.ends,
            false => self.walk(group, schedules, true)?.ends.max(alone.busiest),
        };
        Ok(Cost {
            time: alone.ends,
            next,
            sent: alone.leaves,
        })
    }

    /// Follows the ranks that have schedules: all of the group, or those of the first host. `ahead`: what the first round sends has arrived.
    fn walk(&self, group: &Group, schedules: &[Vec<Exchange>], ahead: bool) -> Result<Walked> {
        let (world, walked) = (group.len(), schedules.len());
        let host = |rank: usize| group.hosts.get(rank).copied().unwrap_or_default();
        // A rank far away does as the one at its place that is followed.
        let shift = |from: usize, to: usize| (to + world - from) % world;
        let local = self.links.local();
        let mut free: BTreeMap<Line, f64> = BTreeMap::new();
        let mut occupied: BTreeMap<Line, f64> = BTreeMap::new();
        let mut leaves = Bytes(0);
        // By rank: when the round before has ended, the one before that, and what arrived in it.
        let mut ended = vec![[0.0f64; 2]; walked];
        let mut arrived: Vec<Span> = vec![(0.0, 0.0); walked];
        let rounds = schedules.iter().map(Vec::len).max().unwrap_or(0);
        for k in 0..rounds {
            let mut under_way: BTreeMap<(usize, usize), Span> = BTreeMap::new();
            let mut sent = vec![0.0f64; walked];
            for (rank, schedule) in schedules.iter().enumerate() {
                let Some(round) = schedule.get(k) else { continue };
                let [before, earlier] = ended.get(rank).copied().unwrap_or_default();
                let came = arrived.get(rank).copied().unwrap_or_default();
                for message in &round.sends {
                    let there = match (round.early, message.passes_on) {
                        (true, true) => (came.0.max(earlier), came.1.max(earlier)),
                        (true, false) => (earlier, earlier),
                        (false, _) => (before, before),
                    };
                    let peer = message.peer as usize;
                    let (a, b) = (host(rank), host(peer));
                    let bytes = Bytes(message.bytes as u64);
                    let (lines, delay) = if a == b {
                        let memory = Line::Memory(u32::try_from(rank).unwrap_or(u32::MAX));
                        (vec![(memory, local.rate)], local.delay)
                    } else {
                        // Hosts that are alike are told apart by how far away they are.
                        let pair = Line::Pair(a, if walked < world { peer / walked } else { b });
                        let own = (Line::Out(a), self.links.of_host(a));
                        leaves = leaves + Bytes(if a == host(0) { bytes.0 } else { 0 });
                        (
                            vec![own, (pair, self.links.of_pair(a, b))],
                            self.links.between(a, b).delay,
                        )
                    };
                    let mut gone = there;
                    let is_there = ahead && k == 0;
                    for (line, rate) in lines.into_iter().filter(|_| !is_there) {
                        gone = pass(&mut free, &mut occupied, line, gone, rate.time(bytes).get());
                    }
                    if let Some(sent) = sent.get_mut(rank) {
                        *sent = sent.max(gone.1);
                    }
                    let delay = if is_there { 0.0 } else { delay.get() };
                    let arrives = (gone.0 + delay, gone.1 + delay);
                    under_way.insert((rank, shift(rank, peer)), arrives);
                }
            }
            // What a host takes in, in the order in which it begins to come.
            let mut incoming = Vec::new();
            for (rank, schedule) in schedules.iter().enumerate() {
                let receives = schedule.get(k).map_or(&[][..], |round| &round.receives);
                for message in receives {
                    let peer = message.peer as usize;
                    let key = (peer % walked, shift(peer, rank));
                    let span = under_way.get(&key).copied().ok_or_else(|| {
                        let text = format!("round {k}: rank {rank} awaits what rank {peer} does not send");
                        Error::new(ErrorKind::Internal, text)
                    })?;
                    incoming.push((span, rank, peer, message.bytes as u64));
                }
            }
            incoming.sort_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.1.cmp(&b.1)));
            let mut came: Vec<Option<Span>> = vec![None; walked];
            for (span, rank, peer, bytes) in incoming {
                let (a, b) = (host(peer), host(rank));
                let landed = if a == b || ahead && k == 0 {
                    span
                } else {
                    let time = self.links.of_host(b).time(Bytes(bytes)).get();
                    pass(&mut free, &mut occupied, Line::In(b), span, time)
                };
                if let Some(all) = came.get_mut(rank) {
                    let (first, last) = all.unwrap_or(landed);
                    *all = Some((first.max(landed.0), last.max(landed.1)));
                }
            }
            for (((ended, arrived), came), sent) in ended.iter_mut().zip(&mut arrived).zip(came).zip(sent) {
                let [before, _] = *ended;
                *arrived = came.unwrap_or((before, before));
                *ended = [before.max(sent).max(arrived.1), before];
            }
        }
        Ok(Walked {
            ends: Seconds::new(ended.iter().map(|[last, _]| *last).fold(0.0, f64::max))?,
            busiest: Seconds::new(occupied.values().copied().fold(0.0, f64::max))?,
            leaves,
        })
    }
}

/// What a walk came to.
struct Walked {
    ends: Seconds,
    busiest: Seconds,
    leaves: Bytes,
}

/// Sends over `line`, behind what it carries already.
fn pass(
    free: &mut BTreeMap<Line, f64>,
    occupied: &mut BTreeMap<Line, f64>,
    line: Line,
    there: Span,
    takes: f64,
) -> Span {
    *occupied.entry(line).or_default() += takes;
    let free = free.entry(line).or_default();
    let starts = there.0.max(*free);
    let ends = (starts + takes).max(there.1);
    *free = ends;
    (starts, ends)
}

fn whole(bytes: Bytes) -> usize {
    usize::try_from(bytes.0).unwrap_or(usize::MAX)
}

fn distinct(hosts: &[usize]) -> Vec<usize> {
    let mut all = hosts.to_vec();
    all.sort_unstable();
    all.dedup();
    all
}

/// True if what the first host awaits from others is what it sends to others, shifted.
fn is_symmetric(schedules: &[Vec<Exchange>], world: usize) -> bool {
    let walked = schedules.len();
    let rounds = schedules.iter().map(Vec::len).max().unwrap_or(0);
    (0..rounds).all(|k| {
        let mut sent = Vec::new();
        let mut awaited = Vec::new();
        for (rank, schedule) in schedules.iter().enumerate() {
            let Some(round) = schedule.get(k) else { continue };
            // Parts of one operation may differ by an element, and by no more.
            let about = |bytes: usize| bytes.div_ceil(64);
            for m in &round.sends {
                sent.push((rank, (m.peer as usize + world - rank) % world, about(m.bytes)));
            }
            for m in &round.receives {
                let peer = m.peer as usize;
                awaited.push((peer % walked, (rank + world - peer) % world, about(m.bytes)));
            }
        }
        sent.sort_unstable();
        awaited.sort_unstable();
        let alike = |(a, b): (&(usize, usize, usize), &(usize, usize, usize))| {
            (a.0, a.1) == (b.0, b.1) && a.2.abs_diff(b.2) <= 1
        };
        sent.len() == awaited.len() && sent.iter().zip(&awaited).all(alike)
    })
}
