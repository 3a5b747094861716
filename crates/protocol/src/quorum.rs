//! Who takes part in the next epoch: the lighthouse's logic, without IO and without a clock.
//!
//! [`LighthouseState::apply`] takes one [`Event`] and the present time and gives back [`Action`]s; the same events give
//! the same actions. A replica takes part only through a live call (its ticket), counts as healthy only while there is
//! evidence of its life, and no path, fast ones included, forms a quorum below `min_replicas` or without a strict
//! majority of the healthy (INV-7).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind};

use crate::member::{AbortEpoch, MAX_ID_BYTES, Member, Quorum, name_of};

mod events;

pub use events::{Action, Event, QuorumRules, Status, Ticket};

/// How many ids are remembered as healthy at most; a join beyond that is refused.
const MAX_KNOWN: usize = 65_536;
/// How many replaced lives are remembered, so that a late call of one cannot displace its successor.
const MAX_REPLACED: usize = 1024;
/// A reported quorum id beyond this is refused: no honest clock in milliseconds comes near.
const MAX_REPORTED_ID: i64 = 1 << 60;
/// Texts of peers that are kept or passed on are cut to this many bytes.
const MAX_REASON_BYTES: usize = 1024;

#[derive(Debug)]
struct Waiting {
    member: Member,
    ticket: Ticket,
    since: Instant,
}

/// The lighthouse's state.
#[derive(Debug)]
pub struct LighthouseState {
    rules: QuorumRules,
    quorum_id: i64,
    previous: Option<Arc<Quorum>>,
    /// The abort of the present epoch, for members that reattach after the push.
    aborted: Option<AbortEpoch>,
    /// Previous members of which there is evidence that they are gone: a stray heartbeat does not revive them.
    departed: BTreeSet<String>,
    /// Previous members that said good-bye.
    left: BTreeSet<String>,
    waiting: BTreeMap<String, Waiting>,
    /// Last sign of life of the ids that count.
    known: BTreeMap<String, Instant>,
    attached: BTreeMap<String, u64>,
    /// Streams that were open while the lighthouse was away. Their other ends may have given them up meanwhile: until then their end is no
    /// evidence, and the heartbeats decide.
    doubted: Option<(Instant, BTreeSet<u64>)>,
    /// Lives that a newer life of the same name replaced: old id -> new id, oldest first.
    replaced: VecDeque<(String, String)>,
    reason: String,
}

impl LighthouseState {
    /// A lighthouse that starts now.
    ///
    /// `seed` is the larger of the wall clock in milliseconds and the persisted id: every id is above it (L01).
    /// `previous_ids` are the persisted members of the last quorum; they count as healthy for one heartbeat time-out,
    /// so that the first to come back after a restart does not go on alone.
    pub fn new(rules: QuorumRules, seed: i64, previous_ids: Vec<String>, now: Instant) -> Self {
        Self {
            rules,
            quorum_id: seed.max(0),
            previous: None,
            aborted: None,
            departed: BTreeSet::new(),
            left: BTreeSet::new(),
            waiting: BTreeMap::new(),
            known: previous_ids.into_iter().map(|id| (id, now)).collect(),
            attached: BTreeMap::new(),
            doubted: None,
            replaced: VecDeque::new(),
            reason: String::new(),
        }
    }

    /// Takes in one event.
    pub fn apply(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Event::Away { time } = event {
            self.away(time, now);
        }
        self.expire(now, &mut actions);
        match event {
            Event::Heartbeat { replica_id } => self.heartbeat(&replica_id, now),
            Event::Join { member, ticket } => self.join(member, ticket, now, &mut actions),
            Event::Withdraw { ticket } => self.waiting.retain(|_, w| w.ticket != ticket),
            Event::Attached {
                replica_id,
                stream,
                last_quorum_id,
            } => {
                self.attach(replica_id, stream, last_quorum_id, now, &mut actions);
            }
            Event::Detached { replica_id, stream } => {
                if self.attached.get(&replica_id) == Some(&stream) {
                    self.attached.remove(&replica_id);
                    if !self.is_doubted(stream, now) {
                        self.depart(&replica_id, "its stream broke", &mut actions);
                    }
                }
            }
            Event::Leave { replica_id, reason } => {
                self.attached.remove(&replica_id);
                if self.is_previous(&replica_id) {
                    self.left.insert(replica_id.clone());
                }
                // No push: who says good-bye has done its part of the step, and others may still be finishing theirs.
                self.remove(&replica_id, &format!("it left: {}", cut(&reason)), &mut actions);
            }
            Event::Report {
                replica_id,
                quorum_id,
                reason,
            } => {
                self.report(&replica_id, quorum_id, &reason, &mut actions);
            }
            Event::Tick | Event::Away { .. } => {}
        }
        self.decide(now, &mut actions);
        actions
    }

    /// What a dashboard shows.
    pub fn status(&self, now: Instant) -> Status {
        let age = |t: Instant| now.saturating_duration_since(t);
        Status {
            quorum_id: self.quorum_id,
            participants: self
                .previous
                .as_ref()
                .map(|q| q.participants.clone())
                .unwrap_or_default(),
            healthy: self.known.iter().map(|(id, t)| (id.clone(), age(*t))).collect(),
            waiting: self
                .waiting
                .iter()
                .map(|(id, w)| (id.clone(), age(w.since)))
                .collect(),
            attached: self.attached.keys().cloned().collect(),
            reason: self.reason.clone(),
            aborted: self.aborted.as_ref().map(|a| a.reason.clone()),
        }
    }

    /// The present id.
    pub fn quorum_id(&self) -> i64 {
        self.quorum_id
    }

    /// Why there is no new quorum.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    fn is_previous(&self, id: &str) -> bool {
        self.previous.as_ref().is_some_and(|q| q.contains(id))
    }

    fn heartbeat(&mut self, id: &str, now: Instant) {
        if let Some(seen) = self.known.get_mut(id) {
            *seen = now;
        } else if self.waiting.contains_key(id) || (self.is_previous(id) && !self.departed.contains(id)) {
            self.known.insert(id.to_string(), now);
        }
    }

    /// The life that replaced `id`, if one did.
    fn successor(&self, id: &str) -> Option<&str> {
        self.replaced
            .iter()
            .find(|(old, _)| old == id)
            .map(|(_, new)| new.as_str())
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
        if let Some(new) = self.successor(id) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!("replica {id} was replaced by {new}, a newer life of the same name"),
            ));
        }
        if self.known.len() >= MAX_KNOWN && !self.known.contains_key(id) {
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
        self.departed.remove(&id);
        self.left.remove(&id);
        self.known.insert(id.clone(), now);
        if let Some(old) = self.waiting.insert(
            id.clone(),
            Waiting {
                member,
                ticket,
                since: now,
            },
        ) {
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

    /// Two lives of one name cannot both be alive: the one that comes later is the replica, the other is dead.
    fn drop_older_lives(&mut self, id: &str, actions: &mut Vec<Action>) {
        let Some(name) = name_of(id) else { return };
        let mut older: BTreeSet<String> = self
            .known
            .keys()
            .chain(self.attached.keys())
            .chain(self.waiting.keys())
            .cloned()
            .collect();
        older.extend(self.previous.iter().flat_map(|q| q.ids()).map(str::to_string));
        older.retain(|o| o != id && name_of(o) == Some(name) && self.successor(o).is_none());
        for old in older {
            self.attached.remove(&old);
            self.depart(
                &old,
                &format!("{id}, a newer life of the same name, came"),
                actions,
            );
            if self.replaced.len() == MAX_REPLACED {
                self.replaced.pop_front();
            }
            self.replaced.push_back((old, id.to_string()));
        }
    }

    fn attach(&mut self, id: String, stream: u64, last: i64, now: Instant, actions: &mut Vec<Action>) {
        if let Err(error) = self.check(&id, last) {
            actions.push(Action::Refuse { stream, error });
            return;
        }
        // A replica that is in a quorum is worth waiting for; one that is still loading must not hold up others.
        if last > 0 || self.is_previous(&id) {
            self.departed.remove(&id);
            self.known.insert(id.clone(), now);
        }
        if let Some(event) = self.aborted.clone().filter(|_| self.is_previous(&id)) {
            actions.push(Action::Push {
                to: vec![id.clone()],
                event,
            });
        }
        self.attached.insert(id, stream);
    }

    /// There is evidence that `id` is gone: it is out of everything, and its epoch is over.
    fn depart(&mut self, id: &str, why: &str, actions: &mut Vec<Action>) {
        if self.remove(id, why, actions) {
            self.abort(&format!("{id} is gone: {why}"), Some(id), actions);
        }
    }

    /// Takes `id` out of everything. True if it was a member of the present quorum until now.
    fn remove(&mut self, id: &str, why: &str, actions: &mut Vec<Action>) -> bool {
        self.known.remove(id);
        if let Some(w) = self.waiting.remove(id) {
            let error = Error::new(
                ErrorKind::Unavailable,
                format!("replica {id} no longer takes part: {why}"),
            );
            actions.push(Action::Reject {
                ticket: w.ticket,
                error,
            });
        }
        self.is_previous(id) && self.departed.insert(id.to_string())
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
            .filter(|id| self.attached.contains_key(*id))
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

    /// Nobody is older by the time in which this lighthouse could not hear them.
    fn away(&mut self, time: Duration, now: Instant) {
        let waits = self.waiting.values_mut().map(|w| &mut w.since);
        for seen in self.known.values_mut().chain(waits) {
            *seen = seen.checked_add(time).map_or(now, |later| later.min(now));
        }
        let until = now.checked_add(self.rules.heartbeat_timeout).unwrap_or(now);
        self.doubted = Some((until, self.attached.values().copied().collect()));
    }

    /// True for a stream of before the lighthouse was away, for as long as a heartbeat may take.
    fn is_doubted(&self, stream: u64, now: Instant) -> bool {
        let doubted = self.doubted.as_ref().filter(|(until, _)| now < *until);
        doubted.is_some_and(|(_, streams)| streams.contains(&stream))
    }

    fn expire(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let timeout = self.rules.heartbeat_timeout;
        let late: Vec<String> = self
            .known
            .iter()
            .filter(|(_, seen)| now.saturating_duration_since(**seen) >= timeout)
            .map(|(id, _)| id.clone())
            .collect();
        for id in late {
            self.known.remove(&id);
            // Its call, if one is open, waits on: the heartbeats may only be late, and then it counts again.
            if self.is_previous(&id) && !self.departed.contains(&id) {
                let why = format!("{id} is gone: no heartbeat for {timeout:?}");
                self.abort(&why, Some(&id), actions);
            }
        }
    }

    /// The ids of the quorum that may form now, or why none may.
    fn compute(&self, now: Instant) -> Result<Vec<String>, String> {
        let rules = &self.rules;
        let asking: BTreeMap<&String, &Waiting> = self
            .waiting
            .iter()
            .filter(|(id, _)| self.known.contains_key(*id))
            .collect();
        if asking.is_empty() {
            return Err("no replica is asking for a quorum".into());
        }
        let shrink_only = asking.values().any(|w| w.member.shrink_only) && self.previous.is_some();
        let candidates: Vec<String> = asking
            .keys()
            .filter(|id| !shrink_only || self.is_previous(id))
            .map(|id| (*id).clone())
            .collect();
        // Under shrink_only the newcomers that wait are shut out on purpose, so nobody waits for them; but they are
        // healthy, and the majority rule counts them.
        let missing: Vec<&str> = self
            .known
            .keys()
            .filter(|id| !asking.contains_key(id))
            .map(String::as_str)
            .collect();
        let (n, healthy) = (candidates.len(), self.known.len());
        let note = if shrink_only {
            ", without newcomers (shrink_only)"
        } else {
            ""
        };
        let lacking = if missing.is_empty() {
            String::new()
        } else {
            format!("; not asking: {}", missing.join(", "))
        };
        if n < rules.min_replicas.max(1) {
            return Err(format!(
                "{n} of {healthy} healthy replicas ask{note}, min_replicas is {}{lacking}",
                rules.min_replicas
            ));
        }
        if n * 2 <= healthy {
            return Err(format!(
                "{n} of {healthy} healthy replicas ask{note}, no strict majority{lacking}"
            ));
        }
        let goes_on = self.previous.is_some() || asking.values().any(|w| w.member.last_quorum_id > 0);
        if let Some(initial) = rules.initial_replicas.filter(|initial| !goes_on && n < *initial) {
            return Err(format!(
                "the first quorum waits for {initial} replicas, {n} ask: {}",
                candidates.join(", ")
            ));
        }
        // Of the previous members: is one a candidate, and who is healthy but not asking?
        let overlaps = candidates.iter().any(|id| self.is_previous(id));
        let busy: Vec<&str> = missing
            .iter()
            .copied()
            .filter(|id| self.is_previous(id))
            .collect();
        if !overlaps && !busy.is_empty() {
            // Without a member of it in the new quorum, the old epoch could go on beside the new one (L26).
            return Err(format!(
                "{n} newcomers ask; waiting for a member of quorum {}: {}",
                self.quorum_id,
                busy.join(", ")
            ));
        }
        if missing.is_empty() || (overlaps && busy.is_empty()) {
            return Ok(candidates);
        }
        let waited = asking
            .values()
            .map(|w| now.saturating_duration_since(w.since))
            .max()
            .unwrap_or_default();
        if waited >= rules.join_timeout {
            return Ok(candidates);
        }
        Err(format!(
            "{n} of {healthy} healthy replicas ask; waiting up to {:?} for {}",
            rules.join_timeout,
            missing.join(", ")
        ))
    }

    /// Once all members of the last quorum have said good-bye, the run is over: a replica of an earlier quorum, which they went on
    /// without, would go on alone to another end.
    fn turn_away_stragglers(&mut self, actions: &mut Vec<Action>) {
        let Some(last) = self
            .previous
            .clone()
            .filter(|q| q.ids().all(|id| self.left.contains(id)))
        else {
            return;
        };
        let stragglers = self
            .waiting
            .extract_if(.., |_, w| (1..last.quorum_id).contains(&w.member.last_quorum_id));
        for (id, w) in stragglers {
            self.known.remove(&id);
            let text = format!(
                "the run is over: after quorum {} it went on without replica {id}, and all members of quorum {} have said good-bye ({}). \
                 The state of this replica is not what it ended with",
                w.member.last_quorum_id,
                last.quorum_id,
                last.ids().collect::<Vec<_>>().join(", ")
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
            match self.compute(now) {
                Ok(ids) => self.form(&ids, actions),
                Err(reason) => {
                    if reason != self.reason {
                        self.reason.clone_from(&reason);
                        actions.push(Action::Reason(reason));
                    }
                    return;
                }
            }
        }
    }

    fn form(&mut self, ids: &[String], actions: &mut Vec<Action>) {
        let mut tickets = Vec::with_capacity(ids.len());
        let mut participants = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(w) = self.waiting.remove(id) {
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
        self.departed.clear();
        self.left.clear();
        actions.push(Action::Deliver { tickets, quorum });
    }

    /// Previous members that were too slow for the new quorum learn that their epoch is over.
    fn tell_left_out(&self, quorum: &Quorum, actions: &mut Vec<Action>) {
        let Some(previous) = &self.previous else { return };
        let to: Vec<String> = previous
            .ids()
            .filter(|id| !quorum.contains(id) && self.attached.contains_key(*id))
            .map(str::to_string)
            .collect();
        if !to.is_empty() {
            let reason = format!(
                "quorum {} formed without {}, which did not ask",
                quorum.quorum_id,
                to.join(", ")
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
mod random_lives;
#[cfg(test)]
mod tests;
