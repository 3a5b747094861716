//! A quorum forms: who is in it, under which id, what is recorded, and who is told or turned away.

use std::sync::Arc;
use std::time::Instant;

use ftcore::{Epoch, Error, ErrorKind, Step};

use super::record::Job;
use super::roster::{Entry, Waiting};
use super::verdict::Verdict;
use super::{Action, LighthouseState, spares};
use crate::member::{AbortEpoch, Id, Member, Quorum, listed};

impl LighthouseState {
    /// Once all members of the last quorum have left, the run is over: a replica of an earlier quorum, which they went on
    /// without, would go on alone to another end.
    pub(super) fn turn_away_stragglers(&mut self, actions: &mut Vec<Action>) {
        if !self.is_over() || self.roster.tally().reporting == 0 {
            return;
        }
        let Some(last) = self.job.as_ref().map(|job| job.epoch) else {
            return;
        };
        let of_before = |w: &Waiting| (Epoch(1)..last).contains(&w.member.last_quorum_id);
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
                "the run is over: after quorum {} it went on without replica {id}, and all members of quorum {} have left ({}). \
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

    /// Members that lost the vote of the run's last step, which others have committed and left after: they do it again if they are enough. If they are
    /// too few, those that left do not come back; who may still start again has the join time-out.
    fn turn_away_the_last(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let tally = self.roster.tally();
        let (asking, left, busy) = (tally.members_asking, tally.left, tally.busy);
        let too_few = self.candidates() < self.rules.min_replicas;
        let Some((epoch, step)) = self.job.as_ref().filter(|j| j.closes).map(|j| (j.epoch, j.step)) else {
            return;
        };
        if asking == 0 || left == 0 || busy > 0 || !too_few {
            return;
        }
        let is_last = |e: &Entry| {
            let waits = e.waiting.as_ref().map(|w| now.saturating_duration_since(w.since));
            e.member && waits.is_some_and(|waits| waits >= self.rules.join_timeout)
        };
        let last: Vec<Id> = self
            .roster
            .iter()
            .filter(|(_, e)| is_last(e))
            .map(|(id, _)| id.clone())
            .collect();
        for id in last {
            let waiting = self.roster.update(&id, |entry| {
                entry.seen = None;
                entry.waiting.take()
            });
            let Some(w) = waiting else { continue };
            let text = format!(
                "the run is over: {left} members of quorum {epoch} have committed its last step ({step}) and left, and the {asking} that remain are \
                 fewer than min_replicas ({}), so it cannot be done again. Replica {id} holds the state of step {}; a closing round adds nothing to it",
                self.rules.min_replicas, w.member.step
            );
            actions.push(Action::Reject {
                ticket: w.ticket,
                error: Error::new(ErrorKind::Conflict, text),
            });
        }
    }

    pub(super) fn decide(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.sort_spares(now);
        self.turn_away_stragglers(actions);
        self.turn_away_the_last(now, actions);
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
        let fetching = self.roster.tally().fetching as u64;
        let is_over = self.is_over();
        let of_note = self
            .roster
            .iter()
            .filter(|(_, e)| e.member || e.waiting.is_some());
        let ids: Vec<(Id, bool)> = of_note
            .map(|(id, e)| (id.clone(), self.is_candidate(e)))
            .collect();
        let (mut tickets, mut spare_tickets) = (Vec::with_capacity(ids.len()), Vec::new());
        let mut participants = Vec::with_capacity(ids.len());
        let mut spares = Vec::new();
        for (id, takes_part) in ids {
            let waits = self.roster.get(&id).is_some_and(|e| !e.member && !e.is_asking());
            let spare = self.roster.get(&id).is_some_and(|e| e.spare && e.seen.is_some());
            if waits && !spare {
                continue;
            }
            let waiting = self.roster.update(&id, |entry| {
                (entry.member, entry.departed, entry.gone_before) = (takes_part, false, false);
                (entry.left, entry.failed) = (false, false);
                entry.waiting.take_if(|_| takes_part || spare)
            });
            if let Some(w) = waiting {
                let (list, calls) = match spare {
                    true => (&mut spares, &mut spare_tickets),
                    false => (&mut participants, &mut tickets),
                };
                calls.push(w.ticket);
                list.push(w.member);
            }
        }
        // One with another history at the recorded step heals, if a member has the recorded state.
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
        tickets.append(&mut spare_tickets);
        self.spares_asked_for = None;
        self.frontier = participants.iter().map(|m| m.step).max();
        let is_new = self.needs_new_id(&participants);
        if is_new {
            let reported = participants
                .iter()
                .map(|m| m.last_quorum_id)
                .max()
                .unwrap_or_default();
            self.quorum_id = self.quorum_id.max(reported) + 1;
        }
        // Nothing of a run that is over counts for the next.
        let former = self.job.take().filter(|_| !is_over);
        self.job = Some(Job::next(former, self.quorum_id, &participants));
        self.look_again(actions);
        let quorum = Arc::new(Quorum {
            quorum_id: self.quorum_id,
            participants,
            spares,
            fetching,
        });
        self.tell_left_out(&quorum, actions);
        self.recent.timeline.formed(&quorum, self.previous.as_deref());
        self.previous = Some(quorum.clone());
        self.aborted = None;
        self.recent.formed();
        self.accept_rollback = false;
        // A run ends once: its end is known also if this lighthouse dies with the leaves.
        if is_new || self.job.as_ref().is_some_and(|job| job.closes) {
            self.unsaved = false;
            actions.extend(self.record().map(Action::Save));
        }
        actions.push(Action::Deliver { tickets, quorum });
    }

    /// The record has changed: who still waits must descend from it as if it asked now, and may be behind it now.
    fn look_again(&mut self, actions: &mut Vec<Action>) {
        if self.roster.tally().waiting == 0 {
            return;
        }
        self.turn_away_strangers(actions);
        let (Some(job), frontier) = (&self.job, self.frontier) else {
            return;
        };
        self.roster.update_all(|id, entry| {
            let step = entry.waiting.as_ref().map_or(Step(0), |w| w.member.step);
            (entry.current, entry.named) = (step >= job.step, job.names(id));
            // The others went on while it was kept out.
            let is_far = |w: &Waiting| spares::is_far_behind(&w.member, frontier);
            if entry.waiting.as_ref().is_some_and(is_far) {
                (entry.spare, entry.far) = (true, true);
            }
        });
    }

    /// Of those who still wait and are ahead of the record. One of this job that was left behind waits on, with nothing.
    fn turn_away_strangers(&mut self, actions: &mut Vec<Action>) {
        let ahead = self.roster.iter().filter_map(|(id, e)| {
            let w = e.waiting.as_ref()?;
            self.job.as_ref().filter(|job| w.member.step > job.step)?;
            Some((id.clone(), w.member.clone()))
        });
        for (id, mut member) in ahead.collect::<Vec<_>>() {
            let checked = self.check_state(&mut member);
            let waiting = self.roster.update(&id, |entry| match &mut entry.waiting {
                Some(waiting) if checked.is_ok() => {
                    waiting.member = member;
                    None
                }
                waiting => {
                    entry.seen = None;
                    waiting.take()
                }
            });
            if let (Some(waiting), Err(error)) = (waiting, checked) {
                let ticket = waiting.ticket;
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
                && a.incarnation == b.incarnation
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
                .any(|m| m.last_quorum_id != Epoch(0) && m.last_quorum_id != self.quorum_id)
    }
}
