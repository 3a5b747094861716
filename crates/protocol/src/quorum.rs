//! Who takes part in the next epoch: the lighthouse's logic, without IO and without a clock.
//!
//! [`LighthouseState::apply`] takes one [`Event`] and the present time and gives back [`Action`]s; the same events give
//! the same actions. A replica takes part only through a live call (its ticket), counts as healthy only while there is
//! evidence of its life, and no path, fast ones included, forms a quorum below `min_replicas` or without a strict
//! majority of the healthy (INV-7).
//!
//! **How long a quorum waits for late replicas.** It forms at once when every healthy replica asks, or when every
//! healthy member of the last quorum does. Otherwise it waits up to `join_timeout`, counted from the latest moment at
//! which those who ask became able to form a quorum: how long a replica had to wait for others before that does not
//! shorten the time that a late one has.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind};

use crate::member::{AbortEpoch, MAX_ID_BYTES, Member, Quorum, listed};
use roster::{Entry, Id, Roster, Waiting, later};
use verdict::Verdict;

mod events;
mod roster;
mod verdict;

pub use events::{Action, Event, QuorumRules, Status, Ticket};

/// How many ids are remembered as healthy at most; a join beyond that is refused.
const MAX_KNOWN: usize = 65_536;
/// How many replaced lives are remembered, so that a late call of one cannot displace its successor.
const MAX_REPLACED: usize = 1024;
/// A reported quorum id beyond this is refused: no honest clock in milliseconds comes near.
const MAX_REPORTED_ID: i64 = 1 << 60;
/// Texts of peers that are kept or passed on are cut to this many bytes.
const MAX_REASON_BYTES: usize = 1024;

/// The lighthouse's state.
#[derive(Debug, Clone)]
pub struct LighthouseState {
    rules: QuorumRules,
    quorum_id: i64,
    previous: Option<Arc<Quorum>>,
    /// The abort of the present epoch, for members that reattach after the push.
    aborted: Option<AbortEpoch>,
    roster: Roster,
    /// Since when those who ask could form a quorum.
    able_since: Option<Instant>,
    /// Streams that were open while the lighthouse was away. Their other ends may have given them up meanwhile: until then their end is no
    /// evidence, and the heartbeats decide.
    doubted: Option<(Instant, BTreeSet<u64>)>,
    replaced: Replaced,
}

/// Incarnations that a newer one of the same name replaced.
#[derive(Debug, Clone, Default)]
struct Replaced {
    by: BTreeMap<Id, Id>,
    oldest_first: VecDeque<Id>,
}

impl Replaced {
    fn remember(&mut self, old: Id, new: Id) {
        if self.by.insert(old.clone(), new).is_none() {
            self.oldest_first.push_back(old);
        }
        if self.oldest_first.len() > MAX_REPLACED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.by.remove(&oldest);
        }
    }
}

impl LighthouseState {
    /// A lighthouse that starts now.
    ///
    /// `seed` is the larger of the wall clock in milliseconds and the persisted id: every id is above it (L01).
    /// `previous_ids` are the persisted members of the last quorum; they count as healthy for one heartbeat time-out,
    /// so that the first to come back after a restart does not go on alone.
    pub fn new(rules: QuorumRules, seed: i64, previous_ids: Vec<String>, now: Instant) -> Self {
        let mut roster = Roster::new(rules.heartbeat_timeout);
        for id in previous_ids {
            roster.update(&id, |entry| entry.seen = Some(now));
        }
        Self {
            rules,
            quorum_id: seed.max(0),
            previous: None,
            aborted: None,
            roster,
            able_since: None,
            doubted: None,
            replaced: Replaced::default(),
        }
    }

    /// Takes in one event.
    pub fn apply(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.take(event, now, &mut actions);
        self.decide(now, &mut actions);
        actions
    }

    fn take(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        if let Event::Away { time } = event {
            self.away(time, now);
        }
        self.expire(now, actions);
        match event {
            Event::Heartbeat { replica_id } => self.heartbeat(&replica_id, now),
            Event::Join { member, ticket } => self.join(member, ticket, now, actions),
            Event::Withdraw { ticket } => {
                if let Some(id) = self.roster.caller(ticket) {
                    self.roster.update(&id, |entry| entry.waiting = None);
                }
            }
            Event::Attached {
                replica_id,
                stream,
                last_quorum_id,
            } => {
                self.attach(replica_id, stream, last_quorum_id, now, actions);
            }
            Event::Detached { replica_id, stream } => {
                let present = self.roster.get(&replica_id).and_then(|e| e.stream);
                if present == Some(stream) {
                    self.roster.update(&replica_id, |entry| {
                        entry.stream = None;
                        entry.seen = entry.seen.map(|_| now);
                    });
                    if !self.is_doubted(stream, now) {
                        self.depart(&replica_id, "its stream broke", actions);
                    }
                }
            }
            Event::Leave { replica_id, reason } => {
                self.roster.update(&replica_id, |entry| {
                    entry.stream = None;
                    entry.left = entry.member;
                });
                // No push: a replica that leaves has done its part of the step, and others may still be finishing theirs.
                self.remove(&replica_id, &format!("it left: {}", cut(&reason)), actions);
            }
            Event::Report {
                replica_id,
                quorum_id,
                reason,
            } => {
                self.report(&replica_id, quorum_id, &reason, actions);
            }
            Event::Tick | Event::Away { .. } => {}
        }
    }

    /// What a dashboard shows.
    pub fn status(&self, now: Instant) -> Status {
        let age = |t: Instant| now.saturating_duration_since(t);
        let seen = |(id, e): (&Id, &Entry)| e.seen.map(|t| (id.to_string(), age(t)));
        let waits = |(id, e): (&Id, &Entry)| e.waiting.as_ref().map(|w| (id.to_string(), age(w.since)));
        let attached = |(id, e): (&Id, &Entry)| e.stream.map(|_| id.to_string());
        Status {
            quorum_id: self.quorum_id,
            participants: self
                .previous
                .as_ref()
                .map(|q| q.participants.clone())
                .unwrap_or_default(),
            healthy: self.roster.iter().filter_map(seen).collect(),
            waiting: self.roster.iter().filter_map(waits).collect(),
            attached: self.roster.iter().filter_map(attached).collect(),
            reason: self.reason(now),
            aborted: self.aborted.as_ref().map(|a| a.reason.clone()),
        }
    }

    /// The present id.
    pub fn quorum_id(&self) -> i64 {
        self.quorum_id
    }

    fn is_previous(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.member)
    }

    fn heartbeat(&mut self, id: &str, now: Instant) {
        let Some(entry) = self.roster.get(id) else { return };
        if entry.seen.is_some() || entry.waiting.is_some() || (entry.member && !entry.departed) {
            self.roster.update(id, |entry| entry.seen = Some(now));
        }
    }

    fn check(&self, id: &str, last_quorum_id: i64) -> Result<(), Error> {
        if id.is_empty() || id.len() > MAX_ID_BYTES {
            return Err(Error::invalid(format!(
                "a replica_id has 1 to {MAX_ID_BYTES} bytes, this one has {}",
                id.len()
            )));
        }
        if last_quorum_id < 0 || last_quorum_id > self.quorum_id.max(MAX_REPORTED_ID) {
            return Err(Error::invalid(format!(
                "replica {id} reports the impossible quorum id {last_quorum_id}"
            )));
        }
        if let Some(new) = self.replaced.by.get(id) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!("replica {id} was replaced by {new}, a newer life of the same name"),
            ));
        }
        if self.roster.len() >= MAX_KNOWN && self.roster.get(id).is_none() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("{MAX_KNOWN} replicas are known already"),
            ));
        }
        Ok(())
    }

    fn join(&mut self, member: Member, ticket: Ticket, now: Instant, actions: &mut Vec<Action>) {
        let id = member.replica_id.clone();
        if let Err(error) = self.check(&id, member.last_quorum_id) {
            actions.push(Action::Reject { ticket, error });
            return;
        }
        self.drop_older_lives(&id, actions);
        let waiting = Waiting {
            member,
            ticket,
            since: now,
        };
        let older = self.roster.update(&id, |entry| {
            (entry.departed, entry.left) = (false, false);
            entry.seen = Some(now);
            entry.waiting.replace(waiting)
        });
        if let Some(old) = older {
            let error = Error::new(
                ErrorKind::Aborted,
                format!("a newer call of replica {id} replaced this one"),
            );
            actions.push(Action::Reject {
                ticket: old.ticket,
                error,
            });
        }
    }

    /// Two incarnations of one name cannot both be alive: the one that comes later is the replica, the other is dead.
    fn drop_older_lives(&mut self, id: &str, actions: &mut Vec<Action>) {
        let mut older = self.roster.lives(id);
        older.retain(|o| o.as_ref() != id && !self.replaced.by.contains_key(o));
        for old in older {
            self.roster.update(&old, |entry| entry.stream = None);
            self.depart(
                &old,
                &format!("{id}, a newer life of the same name, came"),
                actions,
            );
            self.replaced.remember(old, id.into());
        }
    }

    fn attach(&mut self, id: String, stream: u64, last: i64, now: Instant, actions: &mut Vec<Action>) {
        if let Err(error) = self.check(&id, last) {
            actions.push(Action::Refuse { stream, error });
            return;
        }
        let member = self.roster.update(&id, |entry| {
            entry.stream = Some(stream);
            // A replica that is in a quorum is worth waiting for; one that is still loading must not hold up others.
            if last > 0 || entry.member {
                entry.departed = false;
                entry.seen = Some(now);
            }
            entry.member
        });
        if let Some(event) = self.aborted.clone().filter(|_| member) {
            actions.push(Action::Push { to: vec![id], event });
        }
    }

    /// There is evidence that `id` is gone: it is out of everything, and its epoch is over.
    fn depart(&mut self, id: &str, why: &str, actions: &mut Vec<Action>) {
        if self.remove(id, why, actions) {
            self.abort(&format!("{id} is gone: {why}"), Some(id), actions);
        }
    }

    /// Takes `id` out of everything but the streams. True if it was a member of the present quorum until now.
    fn remove(&mut self, id: &str, why: &str, actions: &mut Vec<Action>) -> bool {
        let (waiting, departs) = self.roster.update(id, |entry| {
            entry.seen = None;
            let departs = entry.member && !entry.departed;
            entry.departed |= departs;
            (entry.waiting.take(), departs)
        });
        if let Some(w) = waiting {
            let error = Error::new(
                ErrorKind::Unavailable,
                format!("replica {id} no longer takes part: {why}"),
            );
            actions.push(Action::Reject {
                ticket: w.ticket,
                error,
            });
        }
        departs
    }

    fn report(&mut self, id: &str, quorum_id: i64, reason: &str, actions: &mut Vec<Action>) {
        // The first report ends the epoch; more of them say nothing new. Strangers have no say.
        if quorum_id == self.quorum_id && self.is_previous(id) && self.aborted.is_none() {
            self.abort(&format!("{id} reported: {}", cut(reason)), None, actions);
        }
    }

    fn abort(&mut self, reason: &str, departed: Option<&str>, actions: &mut Vec<Action>) {
        let Some(previous) = &self.previous else { return };
        let event = AbortEpoch {
            quorum_id: previous.quorum_id,
            reason: reason.to_string(),
            departed: departed.iter().map(|d| (*d).to_string()).collect(),
        };
        let to: Vec<String> = previous
            .ids()
            .filter(|id| self.is_attached(id))
            .map(str::to_string)
            .collect();
        match &mut self.aborted {
            Some(first) => {
                for id in &event.departed {
                    if !first.departed.contains(id) {
                        first.departed.push(id.clone());
                    }
                }
            }
            none => *none = Some(event.clone()),
        }
        actions.push(Action::Push { to, event });
    }

    fn is_attached(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.stream.is_some())
    }

    /// Nobody is older by the time in which this lighthouse could not hear them.
    fn away(&mut self, time: Duration, now: Instant) {
        self.roster.forgive(time, now);
        self.able_since = self.able_since.map(|since| later(since, time, now));
        let until = now.checked_add(self.rules.heartbeat_timeout).unwrap_or(now);
        let streams = self.roster.iter().filter_map(|(_, e)| e.stream);
        self.doubted = Some((until, streams.collect()));
    }

    /// True for a stream of before the lighthouse was away, for as long as a heartbeat may take.
    fn is_doubted(&self, stream: u64, now: Instant) -> bool {
        let doubted = self.doubted.as_ref().filter(|(until, _)| now < *until);
        doubted.is_some_and(|(_, streams)| streams.contains(&stream))
    }

    fn expire(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for id in self.roster.expire(now) {
            // Its call, if one is open, waits on: the heartbeats may only be late, and then it counts again.
            if self.roster.get(&id).is_some_and(|e| e.member && !e.departed) {
                let why = format!(
                    "{id} is gone: no heartbeat for {:?}",
                    self.rules.heartbeat_timeout
                );
                self.abort(&why, Some(&id), actions);
            }
        }
    }

    /// Once all members of the last quorum have left, the run is over: a replica of an earlier quorum, which they went on
    /// without, would go on alone to another end.
    fn turn_away_stragglers(&mut self, actions: &mut Vec<Action>) {
        let tally = self.roster.tally();
        if tally.left < tally.members || tally.reporting == 0 {
            return;
        }
        let Some(last) = self.previous.clone() else { return };
        let of_before = |w: &Waiting| (1..last.quorum_id).contains(&w.member.last_quorum_id);
        let stragglers: Vec<Id> = self
            .roster
            .iter()
            .filter(|(_, e)| e.waiting.as_ref().is_some_and(of_before))
            .map(|(id, _)| id.clone())
            .collect();
        for id in stragglers {
            let waiting = self.roster.update(&id, |entry| {
                entry.seen = None;
                entry.waiting.take()
            });
            let Some(w) = waiting else { continue };
            let text = format!(
                "the run is over: after quorum {} it went on without replica {id}, and all members of quorum {} have said good-bye ({}). \
                 The state of this replica is not what it ended with",
                w.member.last_quorum_id,
                last.quorum_id,
                listed(last.ids())
            );
            actions.push(Action::Reject {
                ticket: w.ticket,
                error: Error::new(ErrorKind::Conflict, text),
            });
        }
    }

    fn decide(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.turn_away_stragglers(actions);
        loop {
            let verdict = self.judge(now);
            self.able_since = match verdict {
                Verdict::Wait => Some(self.able_since.unwrap_or(now)),
                _ => None,
            };
            match verdict {
                Verdict::Form => self.form(actions),
                // Without any time to wait, it forms at once.
                Verdict::Wait if self.rules.join_timeout.is_zero() => {}
                _ => return,
            }
        }
    }

    fn form(&mut self, actions: &mut Vec<Action>) {
        let of_note = self.roster.iter().filter(|(_, e)| e.member || e.is_asking());
        let ids: Vec<(Id, bool)> = of_note
            .map(|(id, e)| (id.clone(), self.is_candidate(e)))
            .collect();
        let mut tickets = Vec::with_capacity(ids.len());
        let mut participants = Vec::with_capacity(ids.len());
        for (id, takes_part) in ids {
            let waiting = self.roster.update(&id, |entry| {
                (entry.member, entry.departed, entry.left) = (takes_part, false, false);
                entry.waiting.take_if(|_| takes_part)
            });
            if let Some(w) = waiting {
                tickets.push(w.ticket);
                participants.push(w.member);
            }
        }
        if self.needs_new_id(&participants) {
            let reported = participants.iter().map(|m| m.last_quorum_id).max().unwrap_or(0);
            self.quorum_id = self.quorum_id.max(reported).saturating_add(1);
        }
        let quorum = Arc::new(Quorum {
            quorum_id: self.quorum_id,
            participants,
        });
        self.tell_left_out(&quorum, actions);
        self.previous = Some(quorum.clone());
        self.aborted = None;
        actions.push(Action::Deliver { tickets, quorum });
    }

    /// Previous members that were too slow for the new quorum learn that their epoch is over.
    fn tell_left_out(&self, quorum: &Quorum, actions: &mut Vec<Action>) {
        let Some(previous) = &self.previous else { return };
        // Those of the new quorum are its members already.
        let to: Vec<String> = previous
            .ids()
            .filter(|id| {
                self.roster
                    .get(id)
                    .is_some_and(|e| !e.member && e.stream.is_some())
            })
            .map(str::to_string)
            .collect();
        if !to.is_empty() {
            let reason = format!(
                "quorum {} formed without {}, which did not ask",
                quorum.quorum_id,
                listed(to.iter().map(String::as_str))
            );
            let event = AbortEpoch {
                quorum_id: previous.quorum_id,
                reason,
                departed: Vec::new(),
            };
            actions.push(Action::Push { to, event });
        }
    }

    /// True unless the members can go on with the groups that they have.
    fn needs_new_id(&self, participants: &[Member]) -> bool {
        let Some(previous) = &self.previous else {
            return true;
        };
        let same = |a: &Member, b: &Member| {
            a.replica_id == b.replica_id
                && a.address == b.address
                && a.store_address == b.store_address
                && a.life == b.life
        };
        self.aborted.is_some()
            || previous.participants.len() != participants.len()
            || !previous
                .participants
                .iter()
                .zip(participants)
                .all(|(a, b)| same(a, b))
            || participants.iter().any(|m| m.commit_failures > 0)
            || participants
                .iter()
                .any(|m| m.last_quorum_id != 0 && m.last_quorum_id != self.quorum_id)
    }
}

/// At most [`MAX_REASON_BYTES`] of a peer's text.
pub fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod absences;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod random_lives;
#[cfg(test)]
mod tests;
