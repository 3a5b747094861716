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
//! shorten the time that a late one has. A quorum without a member of the last one (the first of a job, as a rule) waits
//! in the same way for replicas that send heartbeats and have not asked yet, each for at most `join_timeout` from its first
//! heartbeat; they never count as healthy (L25).
//!
//! **Which state the job goes on from** ([`Record`]). A replica that is ahead of the recorded state takes part only if
//! its lineage shows that it descends from it, or, if it tells none, as a recorded member; one at the recorded step with
//! another history heals. A quorum of replicas that are all behind the recorded step needs a strict majority of the
//! recorded members' names, or the operator's word. Once all members have left, the record binds nobody.
//!
//! **After a restart** the first quorum needs a strict majority of the recorded members, without those known to be gone.
//! Without a record it needs one of the largest quorum that the replicas with the newest quorum id tell of. The rest may
//! have died with the lighthouse: `heartbeat_timeout` + `join_timeout` after the first replica asked, or by the operator's
//! word, the job goes on without that majority. A member that comes later and has committed meanwhile is refused.
//!
//! **Which quorum id is believed**: one that this job can have seen. With a record that is at most the newest id; without,
//! at most the clock and a day, because ids are seeded by clocks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind};

use crate::member::{AbortEpoch, MAX_ID_BYTES, Member, Quorum, listed};
use record::Job;
use roster::{Coming, Entry, Id, Roster, Waiting, later};
use verdict::Verdict;

mod events;
mod fields;
mod record;
mod roster;
mod verdict;

pub use events::{Action, Event, QuorumRules, Start, Status, Ticket};
pub use record::Record;

/// How many ids are remembered as healthy at most; a join beyond that is refused.
const MAX_KNOWN: usize = 65_536;
/// How many replaced lives are remembered, so that a late call of one cannot displace its successor.
const MAX_REPLACED: usize = 1024;
/// How many replicas that have not asked are remembered for their heartbeats.
const MAX_HERALDED: usize = 4096;
/// How far clocks of lighthouses may be apart, in milliseconds: one day.
const MAX_CLOCK_SKEW_MS: i64 = 24 * 60 * 60 * 1000;
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
    /// The recorded epoch: the present one, or that of before a restart.
    job: Option<Job>,
    accept_rollback: bool,
    /// Departures since the record was saved last.
    unsaved: bool,
    /// When this lighthouse started, and the wall clock then.
    started: (Instant, i64),
    /// When a replica asked for the first time since the start.
    first_asked: Option<Instant>,
    /// Without a record: the newest quorum id that a replica has told, and the largest size told with it.
    told: Option<(i64, u64)>,
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
    /// The recorded members that are not known to be gone count as healthy for one heartbeat time-out, so that the first to
    /// come back after a restart does not go on alone.
    pub fn new(rules: QuorumRules, start: Start, now: Instant) -> Self {
        let mut roster = Roster::new(rules.heartbeat_timeout, rules.join_timeout);
        let record = start.record;
        for id in record.iter().flat_map(|r| &r.members) {
            roster.update(id, |entry| (entry.member, entry.seen) = (true, Some(now)));
        }
        for id in record.iter().flat_map(|r| r.departed.iter().chain(&r.left)) {
            roster.update(id, |entry| (entry.departed, entry.seen) = (entry.member, None));
        }
        for id in record.iter().flat_map(|r| &r.left) {
            roster.update(id, |entry| entry.left = entry.member);
        }
        let clock_ms = start.clock_ms.max(0);
        Self {
            rules,
            quorum_id: record.as_ref().map_or(0, |r| r.quorum_id).max(clock_ms),
            previous: None,
            aborted: None,
            roster,
            job: record.as_ref().map(Job::of),
            accept_rollback: start.accept_rollback,
            unsaved: false,
            started: (now, clock_ms),
            first_asked: None,
            told: None,
            able_since: None,
            doubted: None,
            replaced: Replaced::default(),
        }
    }

    /// The record as it is now, if there is a job.
    pub fn record(&self) -> Option<Record> {
        let job = self.job.as_ref()?;
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
        })
    }

    /// Takes in one event.
    pub fn apply(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let ticks = matches!(event, Event::Tick);
        self.take(event, now, &mut actions);
        self.decide(now, &mut actions);
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
            }
            Event::Failed { replica_id, reason } => {
                // Its stream stays open: it may ask again, and others' deaths concern its ranks too.
                let why = format!("its servers say that it cannot go on: {}", cut(&reason));
                self.depart(&replica_id, &why, actions);
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
        let entry = self.roster.get(id);
        let counts =
            entry.is_some_and(|e| e.seen.is_some() || e.waiting.is_some() || (e.member && !e.departed));
        if counts {
            self.roster.update(id, |entry| entry.seen = Some(now));
        } else if !entry.is_some_and(|e| e.member)
            && id.len() <= MAX_ID_BYTES
            && !self.replaced.by.contains_key(id)
        {
            self.herald(id, now);
        }
    }

    /// A replica that has not asked yet is on its way.
    fn herald(&mut self, id: &str, now: Instant) {
        let is_known = self.roster.get(id).is_some_and(|e| e.coming.is_some());
        if is_known || self.roster.tally().heralded < MAX_HERALDED {
            let first = Coming {
                first: now,
                last: now,
                counts: true,
            };
            self.roster
                .update(id, |entry| entry.coming.get_or_insert(first).last = now);
        }
    }

    /// All members of the last quorum have left.
    fn is_over(&self) -> bool {
        let tally = self.roster.tally();
        tally.members > 0 && tally.left == tally.members
    }

    fn check(&self, id: &str, last_quorum_id: i64, now: Instant) -> Result<(), Error> {
        if id.is_empty() || id.len() > MAX_ID_BYTES {
            return Err(Error::invalid(format!(
                "a replica_id has 1 to {MAX_ID_BYTES} bytes, this one has {}",
                id.len()
            )));
        }
        let (started, clock_ms) = self.started;
        let ran = now.saturating_duration_since(started).as_millis();
        let clock = clock_ms.saturating_add(i64::try_from(ran).unwrap_or(i64::MAX));
        let possible = self.quorum_id.max(clock.saturating_add(MAX_CLOCK_SKEW_MS));
        if !(0..=possible).contains(&last_quorum_id) {
            return Err(Error::invalid(format!(
                "replica {id} reports the impossible quorum id {last_quorum_id}: no lighthouse whose clock agrees with this one's within a \
                 day has given it out"
            )));
        }
        if self.job.is_some() && last_quorum_id > self.quorum_id {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "replica {id} reports quorum {last_quorum_id}, and the newest of this lighthouse is {}: it belongs to another job. Start it \
                     with the lighthouse of its job, or anew",
                    self.quorum_id
                ),
            ));
        }
        if let Some(new) = self.replaced.by.get(id) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!("replica {id} was replaced by {new}, a newer life of the same name"),
            ));
        }
        let counted = self.roster.len().saturating_sub(self.roster.tally().heralded);
        if counted >= MAX_KNOWN && self.roster.get(id).is_none_or(|e| e.coming.is_some()) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("{MAX_KNOWN} replicas are known already"),
            ));
        }
        Ok(())
    }

    fn join(&mut self, member: Member, ticket: Ticket, now: Instant, actions: &mut Vec<Action>) {
        let id = member.replica_id.clone();
        let checked = fields::check(&member).and_then(|()| self.check(&id, member.last_quorum_id, now));
        if let Err(error) = checked.and_then(|()| self.check_state(&member)) {
            actions.push(Action::Reject { ticket, error });
            return;
        }
        self.drop_older_lives(&id, actions);
        self.first_asked.get_or_insert(now);
        self.hear(&member);
        let newest = self
            .told
            .is_some_and(|(newest, _)| newest == member.last_quorum_id);
        let (current, named) = match &self.job {
            Some(job) => (member.step >= job.step, job.names(&id)),
            None => (true, false),
        };
        let waiting = Waiting {
            member,
            ticket,
            since: now,
        };
        let older = self.roster.update(&id, |entry| {
            (entry.departed, entry.left, entry.coming) = (false, false, None);
            (entry.current, entry.named, entry.newest) = (current, named, newest);
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

    fn check_state(&mut self, member: &Member) -> Result<(), Error> {
        let job = if self.is_over() { None } else { self.job.as_mut() };
        match job.and_then(|job| job.refuses(member)) {
            Some(text) => Err(Error::new(ErrorKind::Conflict, text)),
            None => Ok(()),
        }
    }

    /// Without a record, the replicas tell what the last quorum was.
    fn hear(&mut self, member: &Member) {
        if self.job.is_some() || member.last_quorum_id == 0 {
            return;
        }
        let (id, size) = (member.last_quorum_id, member.last_world_size);
        let (newest, largest) = self.told.unwrap_or_default();
        if id > newest {
            self.roster.update_all(|_, entry| {
                let last = entry.waiting.as_ref().map(|w| w.member.last_quorum_id);
                entry.newest = last == Some(id);
            });
        }
        if id >= newest {
            let largest = if id > newest { 0 } else { largest };
            self.told = Some((id, size.max(largest)));
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
        if let Err(error) = self.check(&id, last, now) {
            actions.push(Action::Refuse { stream, error });
            return;
        }
        let member = self.roster.update(&id, |entry| {
            entry.stream = Some(stream);
            // A member of the last quorum is worth waiting for; one that is still loading must not hold up others, and a stranger
            // that has been in some other quorum no more.
            if entry.member || entry.waiting.is_some() || entry.seen.is_some() {
                entry.departed = false;
                entry.seen = Some(now);
            }
            entry.member
        });
        if last > 0 && self.job.is_none() && !self.is_known(&id) {
            self.herald(&id, now);
        }
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
            (entry.seen, entry.coming) = (None, None);
            let departs = entry.member && !entry.departed;
            entry.departed |= departs;
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

    fn is_known(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.seen.is_some())
    }

    fn is_attached(&self, id: &str) -> bool {
        self.roster.get(id).is_some_and(|e| e.stream.is_some())
    }

    /// Nobody is older by the time in which this lighthouse could not hear them.
    fn away(&mut self, time: Duration, now: Instant) {
        self.roster.forgive(time, now);
        for since in self.able_since.iter_mut().chain(&mut self.first_asked) {
            *since = later(*since, time, now);
        }
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
        if !self.is_over() || self.roster.tally().reporting == 0 {
            return;
        }
        let Some(last) = self.job.as_ref().map(|job| job.epoch) else {
            return;
        };
        let of_before = |w: &Waiting| (1..last).contains(&w.member.last_quorum_id);
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
                last,
                self.listed(|e| e.member)
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
        // One with another history at the recorded step heals, if somebody has the recorded state.
        if let Some(job) = &self.job
            && participants.iter().all(|m| m.step <= job.step)
            && participants
                .iter()
                .any(|m| m.step == job.step && !job.diverged(m))
        {
            for member in participants.iter_mut().filter(|m| job.diverged(m)) {
                member.step -= 1;
            }
        }
        let is_new = self.needs_new_id(&participants);
        if is_new {
            let reported = participants.iter().map(|m| m.last_quorum_id).max().unwrap_or(0);
            self.quorum_id = self.quorum_id.max(reported).saturating_add(1);
        }
        let job = Job::next(self.job.take(), self.quorum_id, &participants);
        let left_over = self.roster.tally().waiting > 0;
        if left_over {
            self.roster.update_all(|id, entry| {
                let step = entry.waiting.as_ref().map_or(0, |w| w.member.step);
                (entry.current, entry.named) = (step >= job.step, job.names(id));
            });
        }
        self.job = Some(job);
        let quorum = Arc::new(Quorum {
            quorum_id: self.quorum_id,
            participants,
        });
        self.tell_left_out(&quorum, actions);
        self.previous = Some(quorum.clone());
        self.aborted = None;
        self.accept_rollback = false;
        if is_new {
            self.unsaved = false;
            actions.extend(self.record().map(Action::Save));
        }
        if left_over {
            self.turn_away_strangers(actions);
        }
        actions.push(Action::Deliver { tickets, quorum });
    }

    /// Who still waits, ahead of a record that has changed meanwhile, must descend from it as if it asked now.
    fn turn_away_strangers(&mut self, actions: &mut Vec<Action>) {
        let ahead = self.roster.iter().filter_map(|(id, e)| {
            let w = e.waiting.as_ref()?;
            self.job.as_ref().filter(|job| w.member.step > job.step)?;
            Some((id.clone(), w.member.clone()))
        });
        for (id, member) in ahead.collect::<Vec<_>>() {
            let Err(error) = self.check_state(&member) else {
                continue;
            };
            let waiting = self.roster.update(&id, |entry| {
                entry.seen = None;
                entry.waiting.take()
            });
            if let Some(ticket) = waiting.map(|w| w.ticket) {
                actions.push(Action::Reject { ticket, error });
            }
        }
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
mod generations;
#[cfg(test)]
mod joins;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod random_lives;
#[cfg(test)]
mod tests;
