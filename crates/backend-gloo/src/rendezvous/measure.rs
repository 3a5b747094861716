//! What the links between ranks carry, measured once all are connected: the option `links=measured`.
//!
//! One rank after the other has its turn, in which it sends to all others and all others send to it, as much as goes, for ten round trips and a
//! little: long enough for connections to find their rate, which is taken from the second half up to the end of what was sent. If all sent to all at once, the links of slow ranks would
//! hide what those of fast ones carry. In the end every rank tells all others what it has seen, and all compute the same shares from the same numbers
//! (INV-3). The bytes go over the connections of collectives, before the first of those.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ftcore::{Error, Result, time_left};
use rustix::event::{PollFd, PollFlags};

use super::{Rendezvous, wait_for};
use crate::options::Links;
use crate::schedule::rates::{Rates, Seen, WHOLE};
use crate::schedule::{DIRECT_MAX_WORLD, Hosts};
use crate::transport::tcp::{Link, Moved};

/// A turn takes so long, and so many round trips of the farthest rank more, but no longer than the limit.
const TURN: Duration = Duration::from_millis(100);
const ROUND_TRIPS: u32 = 10;
const TURN_LIMIT: Duration = Duration::from_secs(1);
/// Bytes that are handed to a connection, and taken from one, at once.
const CHUNK: usize = 64 * 1024;
/// Reads of one connection before the others have their turn.
const READS: usize = 16;
/// The longest sleep: control connections are looked at in between.
const SLICE: Duration = Duration::from_millis(20);
/// A rank whose connections end has so long to say why.
const GRACE: Duration = Duration::from_millis(500);

/// What only fills the link; a connection's messages stand between.
const FILL: u8 = 0;
/// No more of this turn on this connection.
const END: u8 = 1;
/// From the rank whose turn it is: are you there?
const ASK: u8 = 2;
const ANSWER: u8 = 3;
/// From the rank whose turn it is, with milliseconds (u32): send for so long.
const BEGIN: u8 = 4;
/// To the rank whose turn it is: its ends have arrived.
const DONE: u8 = 5;
/// To the rank that is next.
const NEXT: u8 = 6;
/// What a rank has seen: for each rank two numbers (u64).
const REPORT: u8 = 7;

/// One connection, and what must go out over it.
struct Way {
    link: Link,
    out: Vec<u8>,
    written: usize,
    /// The beginning of a message.
    partial: Vec<u8>,
    /// What fills the link goes out until then, and then an end.
    until: Option<Instant>,
}

/// What came in from a rank in a turn.
#[derive(Default)]
struct Flow {
    bytes: u64,
    first: Option<Instant>,
    /// When the second half began, and how much was there.
    half: Option<(Instant, u64)>,
    ends: usize,
    /// When the last of the ends came.
    end: Option<Instant>,
}

impl Flow {
    fn arrived(&mut self, bytes: usize, now: Instant, turn: Option<Duration>) {
        self.bytes += bytes as u64;
        let first = *self.first.get_or_insert(now);
        let second = turn.is_some_and(|turn| now.saturating_duration_since(first) >= turn / 2);
        if second && self.half.is_none() {
            self.half = Some((now, self.bytes));
        }
    }

    fn ended(&mut self, now: Instant) {
        self.ends += 1;
        self.end = Some(now);
    }

    /// Bytes a second. Up to the end, however late that comes: where packets were lost, nothing arrives for a while, and then all that was held
    /// back at once.
    fn rate(&self, turn: Duration) -> u64 {
        let window = match (self.half, self.end) {
            (Some((from, before)), Some(to)) if self.bytes > before => {
                Some((self.bytes - before, to.saturating_duration_since(from)))
            }
            _ => None,
        };
        // Too little came for two halves.
        let (bytes, time) = window.unwrap_or((self.bytes, turn));
        (bytes as f64 / time.as_secs_f64().max(1e-4)) as u64
    }
}

/// What is said with another rank.
struct Talk {
    rank: u32,
    ways: Vec<Way>,
    flow: Flow,
    /// How long its turn is, once it has begun.
    begun: Option<Duration>,
    /// This rank sends in its turn.
    sends: bool,
    answered: bool,
    done: bool,
    /// It has had its turn before this rank.
    next: bool,
    report: Option<Seen>,
    /// Its connections have ended.
    closed: Option<Instant>,
}

impl Talk {
    fn say(&mut self, kind: u8, text: &[u8]) {
        if let Some(way) = self.ways.first_mut() {
            way.out.push(kind);
            way.out.extend_from_slice(text);
        }
    }

    fn fill_until(&mut self, until: Instant) {
        self.ways.iter_mut().for_each(|way| way.until = Some(until));
    }

    /// All that came in its turn or in this rank's has come.
    fn has_ended(&self) -> bool {
        self.flow.ends >= self.ways.len()
    }

    fn has_written(&self) -> bool {
        self.ways
            .iter()
            .all(|way| way.until.is_none() && way.out.is_empty())
    }

    /// A message that has come whole.
    fn take(&mut self, message: &[u8], world: usize) {
        let [kind, text @ ..] = message else { return };
        match *kind {
            END => self.flow.ended(Instant::now()),
            ASK => self.say(ANSWER, &[]),
            ANSWER => self.answered = true,
            BEGIN => {
                let time = text.first_chunk().map_or(0, |t| u32::from_le_bytes(*t));
                self.begun = Some(Duration::from_millis(time.into()).min(TURN_LIMIT));
            }
            DONE => self.done = true,
            NEXT => self.next = true,
            _ => {
                let numbers = text.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n));
                let numbers: Vec<u64> = numbers.collect();
                let (own, their) = numbers.split_at_checked(world).unwrap_or_default();
                self.report = Some(Seen {
                    own_turn: own.to_vec(),
                    their_turn: their.to_vec(),
                });
            }
        }
    }
}

/// How long the message of that kind is behind its kind; `None` if there is none.
fn length(kind: u8, world: usize) -> Option<usize> {
    match kind {
        END | ASK | ANSWER | DONE | NEXT => Some(0),
        BEGIN => Some(4),
        REPORT => Some(16 * world),
        _ => None,
    }
}

/// Where this rank's own turn stands.
#[derive(Debug, Clone, Copy)]
enum Own {
    Asked(Instant),
    Begun(Duration),
}

struct Probe {
    talks: Vec<Talk>,
    seen: Seen,
    /// Whose turn it is; behind the last one, reports are awaited.
    turn: u32,
    own: Option<Own>,
    chunk: Vec<u8>,
}

impl Rendezvous<'_> {
    /// The shares that suit the links; `None` where links are taken for even, some ranks share memory, or even shares are as good. Only once all ranks are ready.
    pub(super) fn measure(&mut self, hosts: &Hosts) -> Result<Option<Vec<u32>>> {
        let world = self.configuration.world_size;
        if self.settings.links == Links::Even {
            return Ok(None);
        }
        if !hosts.are_single() || !(3..=DIRECT_MAX_WORLD).contains(&world) {
            tracing::info!(
                world,
                "links=measured: nothing to choose where ranks share memory, and with 2 or more than {DIRECT_MAX_WORLD} ranks"
            );
            return Ok(None);
        }
        let own = self.configuration.rank;
        let way = |link| Way {
            link,
            out: Vec::new(),
            written: 0,
            partial: Vec::new(),
            until: None,
        };
        let (found, others) = (self.found.iter_mut().zip(0u32..), |rank: &u32| *rank != own);
        let talks = found.filter(|(_, rank)| others(rank)).map(|(found, rank)| {
            let mut links: Vec<Link> = found.rails.iter_mut().filter_map(Option::take).collect();
            if links.is_empty() {
                links.extend(found.data.take());
            }
            Talk {
                rank,
                ways: links.into_iter().map(way).collect(),
                flow: Flow::default(),
                begun: None,
                sends: false,
                answered: false,
                done: false,
                next: false,
                report: None,
                closed: None,
            }
        });
        let none = vec![0; world as usize];
        let mut probe = Probe {
            talks: talks.collect(),
            seen: Seen {
                own_turn: none.clone(),
                their_turn: none,
            },
            turn: 0,
            own: None,
            chunk: vec![0; CHUNK],
        };
        let outcome = self.run_probe(&mut probe);
        // Also if it failed: they end once this rank has said why.
        for talk in probe.talks {
            let Some(found) = self.found.get_mut(talk.rank as usize) else {
                continue;
            };
            let mut links = talk.ways.into_iter().map(|way| {
                let mut link = way.link;
                (link.readable, link.writable) = (true, true);
                link
            });
            match found.rails.is_empty() {
                true => found.data = links.next(),
                false => found.rails.iter_mut().for_each(|rail| *rail = links.next()),
            }
        }
        let rates = Rates::of(&outcome?);
        let shares = rates.shares();
        let of_ranks: Option<Vec<f64>> = shares.as_ref().map(|shares| {
            let share = |share: &u32| f64::from(*share) / f64::from(WHOLE);
            shares.iter().map(share).collect()
        });
        tracing::info!(?rates, shares = ?of_ranks, took = ?self.began.elapsed(), "links are measured");
        Ok(shares)
    }

    /// What every rank has seen.
    fn run_probe(&mut self, probe: &mut Probe) -> Result<Vec<Seen>> {
        let c = self.configuration;
        let mut looked: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if looked.is_none_or(|at| now.saturating_duration_since(at) >= SLICE) {
                looked = Some(now);
                c.cancel.check().map_err(|e| self.named(e))?;
                self.look_at_found()?;
            }
            probe.step(c.rank, c.world_size, now);
            let mut busy = false;
            for talk in &mut probe.talks {
                let reports = probe.turn >= c.world_size;
                let moved = talk.exchange(c.world_size as usize, reports, &mut probe.chunk, now);
                busy |= moved.map_err(|error| self.named(error.with_peer(talk.rank)))?;
                let needed = !reports || talk.report.is_none();
                if needed
                    && talk
                        .closed
                        .is_some_and(|at| now.saturating_duration_since(at) > GRACE)
                {
                    let address = self.found.get(talk.rank as usize).map(|f| f.address.clone());
                    return Err(self.gone(talk.rank, address.unwrap_or_default()));
                }
            }
            if let Some(seen) = probe.reports(c.rank, c.world_size) {
                return Ok(seen);
            }
            if time_left(c.deadline).is_zero() {
                return Err(self.named(Error::timeout(probe.waits_for(c.rank, c.world_size))));
            }
            if !busy {
                let until = c.deadline.min(now + SLICE);
                probe.sleep(until).map_err(|e| self.named(e))?;
            }
        }
    }
}

impl Probe {
    /// Whatever can be done without waiting.
    fn step(&mut self, rank: u32, world: u32, now: Instant) {
        if self.turn == rank {
            self.own_turn(now);
        } else if let Some(talk) = self.talks.iter_mut().find(|talk| talk.rank == self.turn) {
            let Some(turn) = talk.begun else { return };
            if !talk.sends {
                talk.sends = true;
                talk.fill_until(now + turn);
            } else if talk.has_ended() && talk.has_written() {
                let rate = talk.flow.rate(turn);
                if let Some(seen) = self.seen.their_turn.get_mut(talk.rank as usize) {
                    *seen = rate;
                }
                (talk.flow, talk.begun) = (Flow::default(), None);
                talk.say(DONE, &[]);
                self.pass_on(world);
            }
        }
    }

    fn own_turn(&mut self, now: Instant) {
        let before = self.turn.checked_sub(1);
        match self.own {
            None => {
                let mut talks = self.talks.iter();
                let my_turn = before.is_none_or(|before| talks.any(|t| t.rank == before && t.next));
                if my_turn {
                    self.talks.iter_mut().for_each(|talk| talk.say(ASK, &[]));
                    self.own = Some(Own::Asked(now));
                }
            }
            Some(Own::Asked(at)) => {
                if self.talks.iter().all(|talk| talk.answered) {
                    let round_trip = now.saturating_duration_since(at);
                    let turn = (TURN + round_trip * ROUND_TRIPS).min(TURN_LIMIT);
                    let time = u32::try_from(turn.as_millis()).unwrap_or(u32::MAX);
                    for talk in &mut self.talks {
                        talk.begun = Some(turn);
                        talk.say(BEGIN, &time.to_le_bytes());
                        talk.fill_until(now + turn);
                    }
                    self.own = Some(Own::Begun(turn));
                }
            }
            Some(Own::Begun(turn)) => {
                let over = |talk: &Talk| talk.done && talk.has_ended() && talk.has_written();
                if self.talks.iter().all(over) {
                    for talk in &mut self.talks {
                        if let Some(seen) = self.seen.own_turn.get_mut(talk.rank as usize) {
                            *seen = talk.flow.rate(turn);
                        }
                        (talk.flow, talk.begun) = (Flow::default(), None);
                    }
                    let next = self.turn + 1;
                    if let Some(talk) = self.talks.iter_mut().find(|talk| talk.rank == next) {
                        talk.say(NEXT, &[]);
                    }
                    self.pass_on(u32::try_from(self.talks.len() + 1).unwrap_or(u32::MAX));
                }
            }
        }
    }

    /// The turn is over; after the last one this rank says what it has seen.
    fn pass_on(&mut self, world: u32) {
        self.turn += 1;
        if self.turn == world {
            let numbers = self.seen.own_turn.iter().chain(&self.seen.their_turn);
            let report: Vec<u8> = numbers.flat_map(|n| n.to_le_bytes()).collect();
            self.talks.iter_mut().for_each(|talk| talk.say(REPORT, &report));
        }
    }

    /// What all ranks have seen, once all have said so and all have been told.
    fn reports(&self, rank: u32, world: u32) -> Option<Vec<Seen>> {
        // The others' may all be here before this rank has noticed that the last turn is over.
        let said = self.turn >= world;
        let all = said && self.talks.iter().all(|t| t.report.is_some() && t.has_written());
        let mut seen: Vec<Seen> = match all {
            true => self.talks.iter().filter_map(|t| t.report.clone()).collect(),
            false => return None,
        };
        seen.insert(seen.len().min(rank as usize), self.seen.clone());
        Some(seen)
    }

    fn waits_for(&self, rank: u32, world: u32) -> String {
        let awaited = |talk: &&Talk| match self.turn {
            turn if turn >= world => talk.report.is_none(),
            turn if turn == rank => match self.own {
                None => talk.rank + 1 == rank,
                Some(Own::Asked(_)) => !talk.answered,
                Some(Own::Begun(_)) => !talk.done || !talk.has_ended(),
            },
            turn => talk.rank == turn,
        };
        let ranks = self
            .talks
            .iter()
            .filter(awaited)
            .map(|talk| talk.rank.to_string());
        let ranks: Vec<String> = ranks.collect();
        format!(
            "measuring links, in turn {} of {world}: waiting for rank {}; it takes up to 2 s a rank",
            (self.turn + 1).min(world),
            ranks.join(", ")
        )
    }

    fn sleep(&self, until: Instant) -> Result<()> {
        let ways = self.talks.iter().filter(|talk| talk.closed.is_none());
        let ways = ways.flat_map(|talk| &talk.ways);
        let mut fds: Vec<PollFd<'_>> = ways
            .map(|way| {
                let writes = way.until.is_some() || !way.out.is_empty();
                let events = if writes {
                    PollFlags::OUT
                } else {
                    PollFlags::empty()
                };
                PollFd::from_borrowed_fd(way.link.as_fd(), PollFlags::IN | events)
            })
            .collect();
        wait_for(&mut fds, until)
    }
}

impl Talk {
    /// Writes and reads what goes. `reports`: only a report is still to come, and what is behind it is the engine's. True if bytes moved.
    fn exchange(&mut self, world: usize, reports: bool, chunk: &mut [u8], now: Instant) -> Result<bool> {
        let mut busy = false;
        for index in 0..self.ways.len() {
            let Some(way) = self.ways.get_mut(index) else {
                break;
            };
            match way.write(now) {
                Moved::Bytes(_) => busy = true,
                Moved::Nothing => {}
                Moved::Closed => self.closed = self.closed.or(Some(now)),
            }
            for _ in 0..READS {
                if reports && (index > 0 || self.report.is_some()) {
                    break;
                }
                let Some(way) = self.ways.get_mut(index) else {
                    break;
                };
                let most = match reports {
                    // The kind first; nothing else comes any more.
                    true => (1 + 16 * world).saturating_sub(way.partial.len()),
                    false => chunk.len(),
                };
                let Some(buffer) = chunk.get_mut(..most) else {
                    break;
                };
                match way.link.read(buffer) {
                    Moved::Bytes(n) => {
                        busy = true;
                        self.arrived(index, buffer.get(..n).unwrap_or_default(), world)?;
                    }
                    Moved::Nothing => break,
                    Moved::Closed => {
                        way.link.authentic()?;
                        self.closed = self.closed.or(Some(now));
                        break;
                    }
                }
            }
        }
        Ok(busy)
    }

    fn arrived(&mut self, index: usize, bytes: &[u8], world: usize) -> Result<()> {
        let mut rest = bytes;
        while let Some(first) = rest.first() {
            let Some(way) = self.ways.get_mut(index) else {
                break;
            };
            if way.partial.is_empty() && *first == FILL {
                let filled = rest.iter().position(|b| *b != FILL).unwrap_or(rest.len());
                rest = rest.get(filled..).unwrap_or_default();
                self.flow.arrived(filled, Instant::now(), self.begun);
                continue;
            }
            let kind = *way.partial.first().unwrap_or(first);
            let Some(length) = length(kind, world) else {
                let text = format!("sent something else than measuring takes ({kind:#04x})");
                return Err(Error::new(ftcore::ErrorKind::Protocol, text));
            };
            let missing = (1 + length).saturating_sub(way.partial.len()).min(rest.len());
            let (now, later) = rest.split_at(missing);
            way.partial.extend_from_slice(now);
            rest = later;
            if way.partial.len() == 1 + length {
                let message = std::mem::take(&mut way.partial);
                self.take(&message, world);
            }
        }
        Ok(())
    }
}

impl Way {
    fn write(&mut self, now: Instant) -> Moved {
        let mut moved = Moved::Nothing;
        for _ in 0..READS {
            if self.out.is_empty() {
                match self.until {
                    None => break,
                    Some(until) if now < until => self.out.resize(CHUNK, FILL),
                    Some(_) => {
                        self.until = None;
                        self.out.push(END);
                    }
                }
            }
            let rest = self.out.get(self.written..).unwrap_or_default();
            match self.link.write(&[IoSlice::new(rest)]) {
                Moved::Bytes(n) => {
                    moved = Moved::Bytes(n);
                    self.written += n;
                    if self.written >= self.out.len() {
                        self.out.clear();
                        self.written = 0;
                    }
                }
                Moved::Nothing => break,
                Moved::Closed => return Moved::Closed,
            }
        }
        moved
    }
}
