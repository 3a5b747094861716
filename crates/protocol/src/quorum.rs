//! Who takes part in the next epoch: the lighthouse's logic, without IO and without a clock.
//!
//! [`LighthouseState::apply`] takes one [`Event`] and the present time and gives back [`Action`]s; the same events give
//! the same actions. A replica takes part only through a live call (its ticket), counts as healthy only while there is
//! evidence of its incarnation, and no path, fast ones included, forms a quorum below `min_replicas` or without a strict
//! majority of the healthy (INV-7).
//!
//! **How long a quorum waits for late replicas.** It forms at once when every healthy replica asks, or when every
//! healthy member of the last quorum does. Otherwise it waits up to `join_timeout`, counted from the latest moment at
//! which those who ask became able to form a quorum: how long a replica had to wait for others before that does not
//! shorten the time that a late one has. A quorum without a member of the last one (the first of a job, as a rule) waits
//! in the same way for replicas that send heartbeats and have not asked yet, each for at most `join_timeout` from its first
//! heartbeat; they never count as healthy (L25).
//!
//! **Which state the job goes on from** ([`Record`]). A replica that is ahead of the recorded state takes part only if
//! its lineage shows that it descends from it, or, if it tells none, as a recorded member; one at the recorded step with
//! another history heals, and so does a member of an earlier epoch that committed the step it was in when the others went
//! on without it. A quorum of replicas that are all behind the recorded step needs a strict majority of the recorded
//! members' names, or the operator's word. Once all members have left, the record binds no replica.
//!
//! **After a restart** the first quorum needs a strict majority of the recorded members, without those known to be gone.
//! Without a record it needs one of the largest quorum that the replicas with the newest quorum id tell of. The rest may
//! have died with the lighthouse: `heartbeat_timeout` + `join_timeout` after the first replica asked, or by the operator's
//! word, the job goes on without that majority. A member that comes later and has committed meanwhile is refused. One that
//! is recorded as gone and sends heartbeats all the same is on its way, as a replica that has not asked yet: they reach this
//! lighthouse, so they are newer than the record.
//!
//! **Which quorum id is believed**: one that this job can have seen. With a record that is at most the newest id; without,
//! at most the clock and a day, because ids are seeded by clocks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Step};

use crate::member::{AbortEpoch, Id, Quorum};
use record::Job;
use roster::{Entry, Roster, later};

mod arrivals;
mod events;
mod fields;
mod forming;
mod operator;
mod recent;
mod record;
mod roster;
mod spares;
mod timeline;
mod verdict;

pub use events::{Action, Event, QuorumRules, Start, Status, Ticket};
pub use fields::{check_id, cut};
pub use operator::{Order, OrderKind};
pub use recent::{Departure, Fate};
pub use record::{Eviction, Record};
pub use timeline::{Happening, Listed, Moment, Totals};

/// How many replaced incarnations are remembered, so that a late call of one cannot displace its successor.
const MAX_REPLACED: usize = 1024;

/// The lighthouse's state.
#[derive(Debug, Clone)]
pub struct LighthouseState {
    rules: QuorumRules,
    quorum_id: Epoch,
    previous: Option<Arc<Quorum>>,
    /// The highest step of a member of the last quorum; nothing before the first one of this lighthouse.
    frontier: Option<Step>,
    /// Since when members cannot go on without the spares that wait.
    spares_asked_for: Option<Instant>,
    /// The abort of the present epoch, for members that reattach after the push.
    aborted: Option<AbortEpoch>,
    roster: Roster,
    /// The recorded epoch: the present one, or the one before a restart.
    job: Option<Job>,
    accept_rollback: bool,
    /// Departures since the record was saved last.
    unsaved: bool,
    /// When this lighthouse started, and the wall clock then.
    started: (Instant, i64),
    /// When a replica asked for the first time since the start.
    first_asked: Option<Instant>,
    /// Without a record: the newest quorum id that a replica has told, and the largest size told with it.
    told: Option<(Epoch, u64)>,
    /// Since when those who ask could form a quorum.
    able_since: Option<Instant>,
    /// Streams that were open while the lighthouse was away. Their other ends may have given them up meanwhile: until then their end is no
    /// evidence, and the heartbeats decide.
    discounted: Option<(Instant, BTreeSet<u64>)>,
    replaced: Replaced,
    evicted: operator::Evicted,
    /// Ids with connections that can be read to the end; and those of them whose time-out has come since the server asked last.
    connected: BTreeSet<String>,
    unread: Vec<Id>,
    recent: recent::Recent,
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
    /// The recorded members that are not known to be gone count as healthy for one heartbeat time-out, so that the first to
    /// come back after a restart does not go on alone.
    pub fn new(rules: QuorumRules, start: Start, now: Instant) -> Self {
        let mut roster = Roster::new(rules.heartbeat_timeout, rules.join_timeout);
        let record = start.record;
        for id in record.iter().flat_map(|r| &r.members) {
            roster.update(id, |entry| (entry.member, entry.seen) = (true, Some(now)));
        }
        for id in record.iter().flat_map(|r| r.departed.iter().chain(&r.left)) {
            roster.update(id, |entry| {
                (entry.departed, entry.gone_before) = (entry.member, entry.member);
                entry.seen = None;
            });
        }
        for id in record.iter().flat_map(|r| &r.left) {
            roster.update(id, |entry| {
                entry.left = entry.member;
                entry.gone_before = false;
            });
        }
        let clock_ms = start.clock_ms.max(0);
        let clock = Epoch(clock_ms.cast_unsigned());
        Self {
            rules,
            quorum_id: record.as_ref().map_or(Epoch(0), |r| r.quorum_id).max(clock),
            previous: None,
            frontier: None,
            spares_asked_for: None,
            aborted: None,
            roster,
            // There may have been no quorum yet, only an eviction.
            job: record.as_ref().filter(|r| !r.members.is_empty()).map(Job::of),
            accept_rollback: start.accept_rollback,
            unsaved: false,
            started: (now, clock_ms),
            first_asked: None,
            told: None,
            able_since: None,
            discounted: None,
            replaced: Replaced::default(),
            evicted: operator::Evicted::of(record.map(|r| r.evicted).unwrap_or_default()),
            connected: BTreeSet::new(),
            unread: Vec::new(),
            recent: recent::Recent::default(),
        }
    }

    /// The record as it is now, if there is anything to record: a job, or an eviction before its first quorum.
    pub fn record(&self) -> Option<Record> {
        let Some(job) = &self.job else {
            let before = Record {
                quorum_id: self.quorum_id,
                evicted: self.evicted.recorded(),
                ..Record::default()
            };
            return Some(before).filter(|r| !r.evicted.is_empty());
        };
        let ids = |which: fn(&Entry) -> bool| {
            let ids = self.roster.iter().filter(|(_, e)| which(e));
            ids.map(|(id, _)| id.to_string()).collect()
        };
        Some(Record {
            quorum_id: job.epoch,
            step: job.step,
            lineage: job.lineage().map(|l| l.as_str().to_string()),
            members: ids(|e| e.member),
            departed: ids(|e| e.departed),
            left: ids(|e| e.left),
            closes: job.closes,
            evicted: self.evicted.recorded(),
        })
    }

    /// Takes in one event.
    pub fn apply(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let ticks = matches!(event, Event::Tick);
        self.take(event, now, &mut actions);
        self.decide(now, &mut actions);
        self.recent.stamp(now);
        // Departures come in crowds: they are saved together, and the end of the run at once.
        if self.unsaved && (ticks || self.is_over()) {
            self.unsaved = false;
            actions.extend(self.record().map(Action::Save));
        }
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
            Event::Unanswered { replica_id } => self.unanswered(&replica_id, actions),
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
                    if !self.is_discounted(stream, now) {
                        self.depart(&replica_id, "its stream broke", actions);
                    }
                }
            }
            Event::Disconnected { replica_id } => {
                if !self.is_attached(&replica_id) {
                    self.depart(&replica_id, "its connections broke", actions);
                }
            }
            Event::Leave { replica_id, reason } => {
                self.roster.update(&replica_id, |entry| {
                    entry.stream = None;
                    entry.left = entry.member;
                });
                self.unsaved |= self.is_previous(&replica_id);
                // No push: a replica that leaves has done its part of the step, and others may still be finishing theirs.
                self.remove(&replica_id, &format!("it left: {}", cut(&reason)), actions);
                self.recent.note(&replica_id, Fate::Left, cut(&reason));
            }
            Event::Failed { replica_id, reason } => {
                // Its stream stays open: it may ask again, and others' deaths concern its ranks too.
                let why = format!("its servers say that it cannot go on: {}", cut(&reason));
                self.depart(&replica_id, &why, actions);
                self.roster
                    .update(&replica_id, |entry| entry.failed = entry.member);
            }
            Event::Report {
                replica_id,
                quorum_id,
                reason,
            } => {
                self.report(&replica_id, quorum_id, &reason, actions);
            }
            Event::Operate {
                replica,
                order,
                ticket,
            } => self.operate(&replica, order, ticket, actions),
            Event::Read { replica_id } => {
                if self.roster.judge(&replica_id, now) {
                    self.silent(&replica_id, actions);
                }
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
        let spare = |(id, e): (&Id, &Entry)| {
            (e.spare && e.seen.is_some()).then(|| (id.to_string(), e.waiting.is_none()))
        };
        let drains = |(id, e): (&Id, &Entry)| {
            let order = e.order.as_ref().filter(|order| order.kind == OrderKind::Drain);
            order.map(|order| (id.to_string(), order.reason.clone()))
        };
        // Another incarnation of it may take part.
        let out = |id: &str| {
            !self
                .roster
                .incarnations(id)
                .iter()
                .any(|other| other.as_ref() != id && self.is_known(other))
        };
        let (formed, pace) = self.recent.pace(now);
        Status {
            rules: self.rules.clone(),
            verdict: self.judge(now).name(),
            formed,
            pace,
            recent: self.recent.departures(now),
            timeline: self.recent.timeline.moments(now),
            totals: self.recent.timeline.totals(),
            quorum_id: self.quorum_id,
            participants: self
                .previous
                .as_ref()
                .map(|q| q.participants.clone())
                .unwrap_or_default(),
            healthy: self.roster.iter().filter_map(seen).collect(),
            waiting: self.roster.iter().filter_map(waits).collect(),
            attached: self.roster.iter().filter_map(attached).collect(),
            spares: self.roster.iter().filter_map(spare).collect(),
            draining: self.roster.iter().filter_map(drains).collect(),
            evicted: self.evicted.list().filter(|(id, _)| out(id)).collect(),
            reason: self.reason(now),
            aborted: self.aborted.as_ref().map(|a| a.reason.clone()),
        }
    }

    /// The present id.
    pub fn quorum_id(&self) -> Epoch {
        self.quorum_id
    }

    /// The epoch that members are in: the last one, or the one before a restart. The present id may be newer then, and no replica has it.
    fn present_epoch(&self) -> Option<Epoch> {
        self.job.as_ref().map(|job| job.epoch)
    }

    fn is_previous(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.member)
    }

    /// There is evidence that `id` is gone: it is out of everything, and its epoch is over.
    fn depart(&mut self, id: &str, why: &str, actions: &mut Vec<Action>) {
        if self.remove(id, why, actions) {
            self.abort(&format!("{id} is gone: {why}"), Some(id), actions);
        }
    }

    /// Takes `id` out of everything but the streams. True if it was a member of the present quorum until now.
    fn remove(&mut self, id: &str, why: &str, actions: &mut Vec<Action>) -> bool {
        let known = self
            .roster
            .get(id)
            .is_some_and(|e| e.seen.is_some() || e.member && !e.departed);
        if known {
            self.recent.note(id, Fate::Gone, why);
        }
        let (waiting, departs) = self.roster.update(id, |entry| {
            (entry.seen, entry.coming, entry.order) = (None, None, None);
            entry.gone_before = false;
            let departs = entry.member && !entry.departed;
            entry.departed |= departs;
            (entry.spare, entry.far) = (false, false);
            (entry.waiting.take(), departs)
        });
        self.unsaved |= departs;
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

    fn report(&mut self, id: &str, quorum_id: Epoch, reason: &str, actions: &mut Vec<Action>) {
        // The first report ends the epoch; more of them say nothing new. Strangers have no say.
        if self.present_epoch() == Some(quorum_id) && self.is_previous(id) && self.aborted.is_none() {
            self.abort(&format!("{id} reported: {}", cut(reason)), None, actions);
        }
    }

    /// The others may have the answer that this member lacks, and wait for it in a step, or in an epoch, that it knows nothing of. They would wait for
    /// as long as an operation may take. The next quorum is a new epoch.
    fn unanswered(&mut self, id: &str, actions: &mut Vec<Action>) {
        if self.is_previous(id) && self.aborted.is_none() {
            let reason = format!("{id} asks again: the answer to its last call may be lost");
            self.abort(&reason, None, actions);
        }
    }

    /// Ends the present epoch.
    fn abort(&mut self, reason: &str, departed: Option<&str>, actions: &mut Vec<Action>) {
        let Some(quorum_id) = self.present_epoch() else {
            return;
        };
        let event = AbortEpoch {
            quorum_id,
            reason: reason.to_string(),
            departed: departed.iter().map(|d| (*d).to_string()).collect(),
        };
        let members = self.roster.iter().filter(|(_, e)| e.member && e.stream.is_some());
        let to: Vec<String> = members.map(|(id, _)| id.to_string()).collect();
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
        if departed.is_none() {
            self.recent.timeline.aborted(event.quorum_id, reason);
        }
        actions.push(Action::Push { to, event });
    }

    fn is_known(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.seen.is_some())
    }

    fn is_attached(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.stream.is_some())
    }

    /// No replica is older by the time in which this lighthouse could not hear them.
    fn away(&mut self, time: Duration, now: Instant) {
        self.roster.forgive(time, now);
        for since in self.able_since.iter_mut().chain(&mut self.first_asked) {
            *since = later(*since, time, now);
        }
        let until = now.checked_add(self.rules.heartbeat_timeout).unwrap_or(now);
        let streams = self.roster.iter().filter_map(|(_, e)| e.stream);
        self.discounted = Some((until, streams.collect()));
    }

    /// True for a stream from before the lighthouse was away, for as long as a heartbeat may take.
    fn is_discounted(&self, stream: u64, now: Instant) -> bool {
        let discounted = self.discounted.as_ref().filter(|(until, _)| now < *until);
        discounted.is_some_and(|(_, streams)| streams.contains(&stream))
    }

    /// Whether `id` calls over connections that the server can read to the end. If so, its silence is judged only once that was done
    /// ([`take_unread`](Self::take_unread), [`Event::Read`]): on a busy server its heartbeats may wait in the socket.
    pub fn set_connected(&mut self, id: &str, is_connected: bool) {
        match is_connected {
            true => drop(self.connected.insert(id.to_string())),
            false => drop(self.connected.remove(id)),
        }
    }

    /// The ids whose connections are to be read to the end now. Each is followed by an [`Event::Read`].
    pub fn take_unread(&mut self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.unread)
    }

    fn expire(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let (late, unread) = self.roster.expire(now, |id| self.connected.contains(id));
        self.unread.extend(unread);
        for id in late {
            self.silent(&id, actions);
        }
    }

    /// No heartbeat of `id` came in time. Its call, if one is open, waits on: the heartbeats may only be late, and then it counts again.
    fn silent(&mut self, id: &str, actions: &mut Vec<Action>) {
        if self.roster.get(id).is_some_and(|e| e.member && !e.departed) {
            let why = format!(
                "{id} is gone: no heartbeat for {:?}",
                self.rules.heartbeat_timeout
            );
            self.recent.timeline.gone(
                id,
                &format!("no heartbeat for {:?}", self.rules.heartbeat_timeout),
            );
            self.abort(&why, Some(id), actions);
        }
    }
}

#[cfg(test)]
mod absences;
#[cfg(test)]
mod generations;
#[cfg(test)]
mod joins;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod random_runs;
#[cfg(test)]
mod tests;
