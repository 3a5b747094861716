//! Every replica that the lighthouse knows of, and the figures that its rules look at.
//!
//! All changes go through [`Roster::update`], which keeps the counters, the index of the calls and the index of the
//! time-outs in step with the entries: an event costs O(log n), and a rule reads a counter. Time-outs are indexed
//! lazily: a sign of life only moves an entry's time, and the index is corrected when its old time comes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{AddAssign, Bound, SubAssign};
use std::time::{Duration, Instant};

use ftcore::Epoch;

use super::{Order, Ticket};
use crate::member::{Id, Member, prefix_of};

/// An open call for a quorum.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) member: Member,
    pub(super) ticket: Ticket,
    pub(super) since: Instant,
}

/// A replica that sends heartbeats and has not asked for a quorum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coming {
    pub(super) first: Instant,
    pub(super) last: Instant,
    /// Others still wait for it: not forever, it may be a stranger.
    pub(super) counts: bool,
}

/// What is known of one replica id. An entry without content is removed.
#[derive(Debug, Clone, Default)]
pub(super) struct Entry {
    pub(super) waiting: Option<Waiting>,
    /// The last sign of life, if it counts as healthy.
    pub(super) seen: Option<Instant>,
    /// Its open event stream.
    pub(super) stream: Option<u64>,
    /// A member of the last quorum.
    pub(super) member: bool,
    /// A member of the last quorum of which there is evidence that it is gone: a stray heartbeat does not revive it.
    pub(super) departed: bool,
    /// Gone says the record, and this lighthouse has no evidence of its own: heartbeats that reach it are newer than that, and it is on its way.
    pub(super) gone_before: bool,
    /// A member of the last quorum that left.
    pub(super) left: bool,
    /// A member of the last quorum that its own servers gave up: only its next call for a quorum says that it is back.
    pub(super) failed: bool,
    /// What an operator has told it to do before it leaves.
    pub(super) order: Option<Order>,
    /// Set for one that sends heartbeats and has not asked yet.
    pub(super) coming: Option<Coming>,
    /// It waits with a state that is not behind the recorded one.
    pub(super) current: bool,
    /// It waits, and a member of the recorded quorum has its name.
    pub(super) named: bool,
    /// It is far behind, and fetches the state of a quorum outside of it, or waits for one to fetch from. It is no candidate, and
    /// no replica's majority.
    pub(super) spare: bool,
    /// It waits, far behind: a spare unless the others cannot go on without it.
    pub(super) far: bool,
    /// It waits, and was in the newest quorum that a replica has told of.
    pub(super) newest: bool,
    /// It is silent, as far as was read: what has come over its connections is read before it is judged.
    pub(super) unread: bool,
    /// Where the entry stands in the index of the time-outs; never later than its time-out.
    due: Option<Instant>,
}

impl Entry {
    /// It waits for a quorum and is healthy.
    pub(super) fn is_asking(&self) -> bool {
        self.waiting.is_some() && self.seen.is_some() && !self.spare
    }

    /// A healthy member of the last quorum that is not waiting: at work in it.
    pub(super) fn is_busy(&self) -> bool {
        self.member && self.seen.is_some() && self.waiting.is_none() && !self.spare
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_none()
            && self.seen.is_none()
            && self.stream.is_none()
            && self.coming.is_none()
            && !self.member
    }

    /// What it adds to the counters.
    pub(super) fn tally(&self) -> Tally {
        let of = usize::from;
        let asking = self.waiting.as_ref().filter(|_| self.is_asking());
        let spare = self.spare && self.seen.is_some();
        Tally {
            healthy: of(self.seen.is_some() && !self.spare),
            waiting: of(self.waiting.is_some()),
            asking: of(asking.is_some()),
            members: of(self.member),
            present: of(self.member && self.seen.is_some()),
            members_asking: of(self.member && asking.is_some()),
            busy: of(self.is_busy()),
            shrinking: of(self.member && asking.is_some_and(|w| w.member.shrink_only)),
            reporting: of(asking.is_some_and(|w| w.member.last_quorum_id > Epoch(0))),
            departed: of(self.departed && self.coming.is_none()),
            left: of(self.left),
            announced: of(self.coming.is_some()),
            coming: of(self.coming.is_some_and(|c| c.counts)),
            current: of(self.current && asking.is_some()),
            members_current: of(self.current && self.member && asking.is_some()),
            named: of(self.named && asking.is_some()),
            newest: of(self.newest && asking.is_some()),
            ending: of(asking.is_some_and(|w| w.member.is_last)),
            taken_in: of(self.far && asking.is_some()),
            named_taken_in: of(self.far && self.named && asking.is_some()),
            current_taken_in: of(self.far && self.current && asking.is_some()),
            members_taken_in: of(self.far && self.member && asking.is_some()),
            spares_asking: of(spare && self.waiting.is_some()),
            fetching: of(spare && self.waiting.is_none()),
        }
    }
}

/// How many entries are what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) healthy: usize,
    /// With an open call.
    pub(super) waiting: usize,
    /// Healthy, with an open call.
    pub(super) asking: usize,
    /// Members of the last quorum.
    pub(super) members: usize,
    /// Those of them that are healthy.
    pub(super) present: usize,
    pub(super) members_asking: usize,
    /// Members of the last quorum that are healthy and have not asked.
    pub(super) busy: usize,
    /// Members of the last quorum that ask for one without newcomers.
    pub(super) shrinking: usize,
    /// Asking, with an earlier quorum.
    pub(super) reporting: usize,
    /// Members of the last quorum that are known to be gone, and give no sign of life since.
    pub(super) departed: usize,
    /// Members of the last quorum that left.
    pub(super) left: usize,
    /// Not asking yet, but sending heartbeats.
    pub(super) announced: usize,
    /// Of these, those that a first quorum waits for.
    pub(super) coming: usize,
    /// Asking, with a state that is not behind the recorded one.
    pub(super) current: usize,
    pub(super) members_current: usize,
    /// Asking under a recorded name.
    pub(super) named: usize,
    /// Asking, out of the newest quorum that a replica has told of.
    pub(super) newest: usize,
    /// Asking for the last step of their run.
    pub(super) ending: usize,
    /// Asking, and far behind: the others cannot go on without them.
    pub(super) taken_in: usize,
    pub(super) members_taken_in: usize,
    pub(super) named_taken_in: usize,
    pub(super) current_taken_in: usize,
    /// Spares that wait for a quorum to fetch from.
    pub(super) spares_asking: usize,
    /// Spares that fetch.
    pub(super) fetching: usize,
}

impl Tally {
    fn each(&mut self, other: &Self, change: fn(&mut usize, usize)) {
        for (own, other) in [
            (&mut self.healthy, other.healthy),
            (&mut self.waiting, other.waiting),
            (&mut self.asking, other.asking),
            (&mut self.members, other.members),
            (&mut self.present, other.present),
            (&mut self.members_asking, other.members_asking),
            (&mut self.busy, other.busy),
            (&mut self.shrinking, other.shrinking),
            (&mut self.reporting, other.reporting),
            (&mut self.departed, other.departed),
            (&mut self.left, other.left),
            (&mut self.announced, other.announced),
            (&mut self.coming, other.coming),
            (&mut self.current, other.current),
            (&mut self.members_current, other.members_current),
            (&mut self.named, other.named),
            (&mut self.newest, other.newest),
            (&mut self.ending, other.ending),
            (&mut self.taken_in, other.taken_in),
            (&mut self.members_taken_in, other.members_taken_in),
            (&mut self.named_taken_in, other.named_taken_in),
            (&mut self.current_taken_in, other.current_taken_in),
            (&mut self.spares_asking, other.spares_asking),
            (&mut self.fetching, other.fetching),
        ] {
            change(own, other);
        }
    }
}

impl AddAssign<&Self> for Tally {
    fn add_assign(&mut self, other: &Self) {
        self.each(other, |own, other| *own += other);
    }
}

impl SubAssign<&Self> for Tally {
    fn sub_assign(&mut self, other: &Self) {
        self.each(other, |own, other| *own = own.saturating_sub(other));
    }
}

/// The entries with their indexes.
#[derive(Debug, Clone)]
pub(super) struct Roster {
    heartbeat_timeout: Duration,
    join_timeout: Duration,
    entries: BTreeMap<Id, Entry>,
    tickets: BTreeMap<Ticket, Id>,
    due: BTreeSet<(Instant, Id)>,
    tally: Tally,
}

impl Roster {
    pub(super) fn new(heartbeat_timeout: Duration, join_timeout: Duration) -> Self {
        Self {
            heartbeat_timeout,
            join_timeout,
            entries: BTreeMap::new(),
            tickets: BTreeMap::new(),
            due: BTreeSet::new(),
            tally: Tally::default(),
        }
    }

    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, id: &str) -> Option<&Entry> {
        self.entries.get(id)
    }

    /// The id whose call this is.
    pub(super) fn caller(&self, ticket: Ticket) -> Option<Id> {
        self.tickets.get(&ticket).cloned()
    }

    #[cfg(test)]
    pub(super) fn calls(&self) -> usize {
        self.tickets.len()
    }

    /// Changes every entry.
    pub(super) fn update_all(&mut self, change: impl Fn(&Id, &mut Entry)) {
        let ids: Vec<Id> = self.entries.keys().cloned().collect();
        for id in ids {
            self.update(&id, |entry| change(&id, entry));
        }
    }

    /// All entries in order of their ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Id, &Entry)> {
        self.entries.iter()
    }

    /// The ids with the name of `id`, which are incarnations of one replica; none if it has no name.
    pub(super) fn incarnations(&self, id: &str) -> Vec<Id> {
        let Some(prefix) = prefix_of(id) else {
            return Vec::new();
        };
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let incarnations = self.entries.range::<str, _>(from).map(|(id, _)| id);
        incarnations
            .take_while(|id| id.starts_with(prefix))
            .cloned()
            .collect()
    }

    /// Changes the entry of `id`, which is made if there is none and removed if it ends without content.
    pub(super) fn update<T>(&mut self, id: &str, change: impl FnOnce(&mut Entry) -> T) -> T {
        if let Some(entry) = self.entries.get_mut(id) {
            let (before, ticket) = (entry.tally(), entry.waiting.as_ref().map(|w| w.ticket));
            let told = change(entry);
            self.tally -= &before;
            if let Some(ticket) = ticket {
                self.tickets.remove(&ticket);
            }
            if entry.is_empty() {
                if let Some((id, entry)) = self.entries.remove_entry(id)
                    && let Some(due) = entry.due
                {
                    self.due.remove(&(due, id));
                }
            } else {
                self.index(id);
            }
            told
        } else {
            let mut entry = Entry::default();
            let told = change(&mut entry);
            if !entry.is_empty() {
                self.entries.insert(id.into(), entry);
                self.index(id);
            }
            told
        }
    }

    /// Adds an entry, as it is now, to the counters and indexes.
    fn index(&mut self, id: &str) {
        let Some((key, _)) = self.entries.get_key_value(id) else {
            return;
        };
        let key = key.clone();
        let Some(entry) = self.entries.get_mut(id) else {
            return;
        };
        self.tally += &entry.tally();
        if let Some(w) = &entry.waiting {
            self.tickets.insert(w.ticket, key.clone());
        }
        // A time-out beyond the clock's range never comes.
        let silent = entry
            .seen
            .filter(|_| !entry.unread)
            .and_then(|seen| seen.checked_add(self.heartbeat_timeout));
        let announced = entry.coming.and_then(|c| {
            let silent = c.last.checked_add(self.heartbeat_timeout);
            let over = c.first.checked_add(self.join_timeout).filter(|_| c.counts);
            silent.into_iter().chain(over).min()
        });
        let timeout = silent.into_iter().chain(announced).min();
        if let Some(timeout) = timeout.filter(|t| entry.due.is_none_or(|due| *t < due)) {
            if let Some(due) = entry.due.replace(timeout) {
                self.due.remove(&(due, key.clone()));
            }
            self.due.insert((timeout, key));
        }
    }

    /// Takes the entries whose time-out has come out of the healthy, and gives their ids in order. Those that are `connected` are not judged yet: they
    /// are the second part.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        connected: impl Fn(&str) -> bool,
    ) -> (BTreeSet<Id>, Vec<Id>) {
        let (timeout, join_timeout) = (self.heartbeat_timeout, self.join_timeout);
        let (mut late, mut unread) = (BTreeSet::new(), Vec::new());
        while self.due.first().is_some_and(|(due, _)| *due <= now) {
            let Some((_, id)) = self.due.pop_first() else {
                break;
            };
            let is_connected = connected(&id);
            let is_late = self.update(&id, |entry| {
                // Its present time-out, if it has one, takes the place of the one that came.
                entry.due = None;
                // An open stream is a sign of life for as long as it stands: its connection is pinged.
                if entry.stream.is_some() {
                    entry.seen = entry.seen.map(|_| now);
                }
                let is_over = |at: Instant, time: Duration| now.saturating_duration_since(at) >= time;
                entry.coming = entry
                    .coming
                    .filter(|c| !is_over(c.last, timeout))
                    .map(|c| Coming {
                        counts: c.counts && !is_over(c.first, join_timeout),
                        ..c
                    });
                entry.unread = is_connected && entry.seen.is_some_and(|seen| is_over(seen, timeout));
                let is_late = |seen: &mut Instant| !is_connected && is_over(*seen, timeout);
                (entry.unread, entry.seen.take_if(is_late).is_some())
            });
            match is_late {
                (true, _) => unread.push(id),
                (false, true) => drop(late.insert(id)),
                (false, false) => {}
            }
        }
        (late, unread)
    }

    /// All that has come over the connections of `id` is read: whether its time-out has come still, which takes it out of the healthy.
    pub(super) fn judge(&mut self, id: &str, now: Instant) -> bool {
        let timeout = self.heartbeat_timeout;
        let is_late = |seen: &mut Instant| now.saturating_duration_since(*seen) >= timeout;
        self.get(id).is_some_and(|entry| entry.unread)
            && self.update(id, |entry| {
                entry.unread = false;
                entry.seen.take_if(is_late).is_some()
            })
    }

    /// No replica is older by the time in which the lighthouse could not hear them.
    pub(super) fn forgive(&mut self, time: Duration, now: Instant) {
        for entry in self.entries.values_mut() {
            let waits = entry.waiting.iter_mut().map(|w| &mut w.since);
            let announced = entry.coming.iter_mut().flat_map(|c| [&mut c.first, &mut c.last]);
            for at in entry.seen.iter_mut().chain(waits).chain(announced) {
                *at = later(*at, time, now);
            }
        }
    }
}

/// `at`, moved on by `time`, but not beyond `now`.
pub(super) fn later(at: Instant, time: Duration, now: Instant) -> Instant {
    at.checked_add(time).map_or(now, |later| later.min(now))
}
