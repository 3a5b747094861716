//! A training thread that hangs takes its replica out in time, and an answer that was lost is heard again at once.

use super::*;

/// What a rank shows of its progress may be so old, and what says that it is out so late.
const NOTICED_AFTER: Duration = Duration::from_secs(2);
/// Its next tries come within this time.
const AGAIN_AFTER: Duration = Duration::from_secs(3);
/// So often a replica that is out is looked at.
const LOOK: Duration = Duration::from_secs(2);

impl World {
    /// Something waits for a training thread that hangs. If that is what it does next, no call of it is open any more.
    pub(super) fn waits_for_hung(&mut self, who: Who, what: &Happening) {
        let now = self.now;
        let Some(process) = self.process(who) else { return };
        let call = process.trainer.call;
        let is_next = match what {
            Happening::Quorum(ticket, answer) => {
                let is_late = answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout);
                call == Some(*ticket) && !is_late
            }
            Happening::Decision(ticket, answer) => {
                let is_late = answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout);
                call == Some(*ticket) && !is_late
            }
            _ => call.is_none(),
        };
        if process.stuck_since.is_some() || !is_next || process.trainer.leaves {
            return;
        }
        process.stuck_since = Some(now);
        if self.scenario.foreign {
            return;
        }
        let late = if self.scenario.disorder > 0 {
            NOTICED_AFTER * 2
        } else {
            Duration::ZERO
        };
        self.at(
            now + PROGRESS_TIMEOUT + NOTICED_AFTER + late,
            Owner::World,
            Happening::IsOut(who, now),
        );
    }

    /// The thread of `who` hangs since then.
    pub(super) fn is_out(&mut self, who: Who, since: Duration) {
        let now = self.now;
        if self.process(who).is_none_or(|p| p.stuck_since != Some(since)) {
            return;
        }
        self.at(now + LOOK, Owner::World, Happening::IsOut(who, since));
        let recently = |until: Duration| !until.is_zero() && until.saturating_add(NOTICED_AFTER * 2) > now;
        let server = Who { rank: 0, ..who };
        // What it showed before is heard once it goes on.
        let was_stopped = |p: &mut Process| {
            let until = p.stopped_until;
            until > since && until + PROGRESS_TIMEOUT + NOTICED_AFTER * 2 > now
        };
        let is_stopped =
            self.process(server).is_none_or(was_stopped) || self.process(who).is_none_or(was_stopped);
        let is_cut = recently(self.cut_until[who.slot]);
        let (Some(lighthouse), Some(replica)) = (&self.lighthouse, &self.replicas[who.slot]) else {
            return;
        };
        // The members in the record are healthy for one heartbeat time-out.
        let is_away = recently(lighthouse.stopped_until)
            || recently(lighthouse.discounts_until)
            || now < lighthouse.heard.started + HEARTBEAT_TIMEOUT + NOTICED_AFTER * 2;
        if is_stopped || is_cut || is_away {
            return;
        }
        let status = lighthouse.state.status(self.instant());
        if status.healthy.iter().any(|(id, _)| *id == replica.id) {
            self.violate(format!(
                "the training thread of {who:?} hangs since {since:?}, and its replica counts as healthy still"
            ));
        }
    }

    /// The answer to `who` was lost, and it asks again.
    pub(super) fn will_hear_again(&mut self, who: Who) {
        let Some(question) = self.trainer(who).map(|t| t.question()) else {
            return;
        };
        self.at(
            self.now + AGAIN_AFTER,
            Owner::World,
            Happening::HasHeard(who, question),
        );
    }

    pub(super) fn has_heard(&mut self, who: Who, question: i64) {
        let now = self.now;
        let recently = |until: Duration| !until.is_zero() && until.saturating_add(AGAIN_AFTER) > now;
        let server = Who { rank: 0, ..who };
        let was_away = |p: &mut Process| recently(p.stopped_until) || recently(p.hung_until);
        if self.process(server).is_none_or(was_away) || self.process(who).is_none_or(was_away) {
            return;
        }
        let Some(replica) = &self.replicas[who.slot] else {
            return;
        };
        let epoch = replica.server.last_quorum().0;
        let Some(process) = &replica.processes[who.rank as usize] else {
            return;
        };
        if !process.trainer.still_asks(question) {
            return;
        }
        let in_step = |p: &Process| p.trainer.is_in_step(epoch);
        if self
            .replicas
            .iter()
            .flatten()
            .flat_map(|r| r.processes.iter().flatten())
            .any(in_step)
        {
            self.violate(format!(
                "{who:?} still asks for quorum {epoch}, which was given to its replica {AGAIN_AFTER:?} ago, and others wait for it"
            ));
        }
    }
}
