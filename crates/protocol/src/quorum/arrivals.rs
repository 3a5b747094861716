//! A replica comes: its heartbeats, its call for a quorum, its event stream. What it says of itself is checked here, once.

use std::time::Instant;

use ftcore::{Epoch, Error, ErrorKind, Step};

use super::roster::{Coming, Entry, Waiting};
use super::{Action, Fate, LighthouseState, Ticket, cut, fields, spares};
use crate::member::Member;

/// How many ids are remembered as healthy at most; a join beyond that is refused.
const MAX_KNOWN: usize = 65_536;
/// How many replicas that have not asked are remembered for their heartbeats.
pub(super) const MAX_ANNOUNCED: usize = 4096;
/// How far clocks of lighthouses may be apart, in milliseconds: one day.
const MAX_CLOCK_SKEW_MS: i64 = 24 * 60 * 60 * 1000;

impl LighthouseState {
    pub(super) fn heartbeat(&mut self, id: &str, now: Instant) {
        let entry = self.roster.get(id);
        let counts =
            entry.is_some_and(|e| e.seen.is_some() || e.waiting.is_some() || (e.member && !e.departed));
        if counts {
            self.roster.update(id, |entry| entry.seen = Some(now));
        } else if !entry.is_some_and(|e| e.member && !e.gone_before)
            && fields::check_id(id).is_ok()
            && !self.replaced.by.contains_key(id)
            && !self.evicted.contains(id)
        {
            self.announce(id, now);
        }
    }

    /// A replica that has not asked yet is on its way.
    fn announce(&mut self, id: &str, now: Instant) {
        let is_known = self.roster.get(id).is_some_and(|e| e.coming.is_some());
        if is_known || self.roster.tally().announced < MAX_ANNOUNCED {
            let first = Coming {
                first: now,
                last: now,
                counts: true,
            };
            self.roster
                .update(id, |entry| entry.coming.get_or_insert(first).last = now);
        }
    }

    fn check(&self, id: &str, last_quorum_id: Epoch, now: Instant) -> Result<(), Error> {
        fields::check_id(id)?;
        let (started, clock_ms) = self.started;
        let ran = now.saturating_duration_since(started).as_millis();
        let clock = clock_ms.saturating_add(i64::try_from(ran).unwrap_or(i64::MAX));
        let possible = Epoch(clock.saturating_add(MAX_CLOCK_SKEW_MS).max(0).cast_unsigned());
        if last_quorum_id > self.quorum_id.max(possible) {
            return Err(Error::invalid(format!(
                "replica {id} reports the impossible quorum id {}: no lighthouse whose clock agrees with this one's within a day has given \
                 it out",
                last_quorum_id.signed()
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
        self.evicted.check(id)?;
        if let Some(new) = self.replaced.by.get(id) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!("replica {id} was replaced by {new}, a newer incarnation of the same name"),
            ));
        }
        let counted = self.roster.len().saturating_sub(self.roster.tally().announced);
        if counted >= MAX_KNOWN && self.roster.get(id).is_none_or(|e| e.coming.is_some()) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("{MAX_KNOWN} replicas are known already"),
            ));
        }
        Ok(())
    }

    pub(super) fn join(
        &mut self,
        mut member: Member,
        ticket: Ticket,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let id = member.replica_id.clone();
        self.unsaved |= self.evicted.started_again(&member);
        let checked = fields::check(&member).and_then(|()| self.check(&id, member.last_quorum_id, now));
        if let Err(error) = checked.and_then(|()| self.check_state(&mut member)) {
            self.recent.note(cut(&id), Fate::Refused, cut(error.message()));
            actions.push(Action::Reject { ticket, error });
            return;
        }
        // One whose connection broke is not known as a spare any more; it says that it took its state from others.
        let fetched =
            |e: Option<&Entry>| e.is_some_and(|e| e.spare) || member.healed && e.is_none_or(|e| !e.member);
        if self.is_over() && fetched(self.roster.get(&id)) {
            let text = format!(
                "the run is over: its members left while replica {id} fetched their state, which is not what the run ended with"
            );
            let error = Error::new(ErrorKind::Conflict, text);
            self.recent.note(&id, Fate::Refused, error.message());
            actions.push(Action::Reject { ticket, error });
            return;
        }
        self.recent.is_back(&id);
        self.drop_older_incarnations(&id, actions);
        self.first_asked.get_or_insert(now);
        self.hear(&member);
        let newest = self
            .told
            .is_some_and(|(newest, _)| newest == member.last_quorum_id);
        let (current, named) = match &self.job {
            Some(job) => (member.step >= job.step, job.names(&id)),
            None => (true, false),
        };
        let spare = spares::is_far_behind(&member, self.frontier);
        let waiting = Waiting {
            member,
            ticket,
            since: now,
        };
        let older = self.roster.update(&id, |entry| {
            (entry.departed, entry.left, entry.failed, entry.coming) = (false, false, false, None);
            entry.gone_before = false;
            (entry.current, entry.named, entry.newest) = (current, named, newest);
            (entry.seen, entry.spare, entry.far) = (Some(now), spare, spare);
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

    /// One that went on in an epoch which the others had left holds nothing that counts.
    pub(super) fn check_state(&mut self, member: &mut Member) -> Result<(), Error> {
        if self.is_over() {
            return Ok(());
        }
        let Some(job) = &mut self.job else {
            return Ok(());
        };
        match job.refuses(member) {
            None => Ok(()),
            Some(_) if job.left_behind(member) => {
                // Behind the record also where that stands at step 0: there a state without a lineage would be as good as the others'.
                let step = (job.step - 1).min(Step(0));
                (member.step, member.batches_committed, member.healed) = (step, 0, false);
                member.lineage.clear();
                Ok(())
            }
            Some(text) => Err(Error::new(ErrorKind::Conflict, text)),
        }
    }

    /// Without a record, the replicas tell what the last quorum was.
    fn hear(&mut self, member: &Member) {
        if self.job.is_some() || member.last_quorum_id == Epoch(0) {
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
    fn drop_older_incarnations(&mut self, id: &str, actions: &mut Vec<Action>) {
        let mut older = self.roster.incarnations(id);
        older.retain(|o| o.as_ref() != id && !self.replaced.by.contains_key(o));
        for old in older {
            self.roster.update(&old, |entry| entry.stream = None);
            self.depart(
                &old,
                &format!("{id}, a newer incarnation of the same name, came"),
                actions,
            );
            self.replaced.remember(old, id.into());
        }
    }

    pub(super) fn attach(
        &mut self,
        id: String,
        stream: u64,
        last: Epoch,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        if let Err(error) = self.check(&id, last, now) {
            actions.push(Action::Refuse { stream, error });
            return;
        }
        let (member, order) = self.roster.update(&id, |entry| {
            entry.stream = Some(stream);
            // A member of the last quorum is worth waiting for; one that is still loading must not hold up others (one that was started
            // again under its id knows no quorum), and a stranger that has been in some other quorum no more. Nor is one that has left,
            // whose stream broke while it left.
            if (entry.member && !entry.failed && !entry.left && last > Epoch(0))
                || entry.waiting.is_some()
                || entry.seen.is_some()
            {
                (entry.departed, entry.gone_before) = (false, false);
                (entry.seen, entry.coming) = (Some(now), None);
            }
            (entry.member, entry.order.clone())
        });
        if let Some(order) = order {
            actions.push(Action::Order {
                to: id.clone(),
                order,
            });
        }
        if last > Epoch(0) && self.job.is_none() && !self.is_known(&id) {
            self.announce(&id, now);
        }
        if let Some(event) = self.aborted.clone().filter(|_| member) {
            actions.push(Action::Push { to: vec![id], event });
        }
    }
}
