//! How a rank ends an attempt: what it reports, its vote, and what follows from the decision.

use super::*;
use ftcore::Epoch;

impl World {
    /// The rank says that its epoch failed.
    pub(super) fn reports(&mut self, who: Who, reason: String) {
        let Some(epoch) = self.trainer(who).and_then(|t| t.group) else {
            return;
        };
        let rank = who.rank;
        let quorum_id = epoch;
        self.server_hears(
            who,
            ReplicaEvent::Reported {
                rank,
                quorum_id,
                reason: reason.clone(),
            },
        );
        self.report_to_lighthouse(who, quorum_id, reason);
    }

    pub(super) fn vote(&mut self, who: Who) {
        let ticket = self.number();
        let Some(t) = self.trainer(who) else { return };
        t.moved += 1;
        t.doing = Doing::Nothing;
        match t.rank.vote(t.error.clone(), t.least) {
            Err(e) => self.violate(format!("{who:?} cannot vote: {e}")),
            Ok(vote) => {
                t.vote = Some(vote);
                self.cast(who, ticket);
            }
        }
    }

    fn cast(&mut self, who: Who, ticket: Ticket) {
        let Some(t) = self.trainer(who) else { return };
        t.call = Some(ticket);
        let Some(vote) = t.vote.clone() else { return };
        self.server_hears(who, Self::vote_event(&vote, who.rank, ticket));
        let late = Error::timeout("no decision");
        self.later(CALL * 6, who, Happening::Decision(ticket, Err(late)));
    }

    pub(crate) fn decided(&mut self, who: Who, ticket: Ticket, decision: Result<bool, Error>) {
        let again = self.number();
        let Some(t) = self.trainer(who).filter(|t| t.call == Some(ticket)) else {
            return;
        };
        t.call = None;
        t.moved += 1;
        match &decision {
            // The answer is lost, not the vote: it is cast again.
            Err(e) if e.kind() == ErrorKind::Unavailable => {
                self.server_hears(who, ReplicaEvent::Withdraw { ticket });
                return self.cast(who, again);
            }
            Err(e) if e.kind() == ErrorKind::PeerLost => {
                self.later(Duration::ZERO, who, Happening::Exit);
                return;
            }
            Err(_) => self.server_hears(who, ReplicaEvent::Withdraw { ticket }),
            Ok(_) => {}
        }
        let Some(t) = self.trainer(who) else { return };
        let commit = decision.as_ref().ok().copied();
        if let Err(e) = t.rank.decided(commit) {
            let (rank, why) = (who.rank, e.to_string());
            self.note(|| format!("{who:?} gives up: {why}"));
            self.server_hears(who, ReplicaEvent::GiveUp { rank, why, ticket });
            return self.later(Duration::from_millis(5), who, Happening::Exit);
        }
        if commit == Some(true) {
            t.taken = None;
            t.of = t.rank.epoch().unwrap_or(Epoch(0));
            let result = t.result.take();
            match t.program.committed(result) {
                Ok(()) => {}
                // The program does not look at the error, and calls again.
                Err(Wrong::Torn) => return self.calls(who),
                Err(Wrong::Broken(text)) => return self.violate(format!("{who:?}: {text}")),
            }
            let (rank, value) = (t.rank.clone(), t.program.common());
            let checked = self.checks.state(who, &rank, value);
            self.check(checked);
            let step = rank.step();
            let together = self
                .checks
                .committed(who, rank.epoch().unwrap_or(Epoch(0)), step - 1, &rank);
            self.check(together);
            self.note(|| format!("{who:?} committed step {}", step - 1));
            self.committed(who);
            let Some(t) = self.trainer(who) else { return };
            let turn = t.program.turn(step);
            if rank.answer().is_some_and(|a| a.draining) && !matches!(turn, Ok(Turn::Leave) | Err(_)) {
                return self.leaves(who);
            }
            return self.goes_on(who, turn);
        }
        t.program.lost();
        let (epoch, step) = (t.rank.epoch().unwrap_or(Epoch(0)), t.rank.step());
        if self.scenario.keeps_work {
            let kept = self.checks.work_is_kept(who, epoch, step);
            self.check(kept);
        }
        let Some(t) = self.trainer(who) else { return };
        let failures = u32::try_from(t.rank.commit_failures()).unwrap_or(0);
        self.note(|| format!("{who:?} did not commit: {decision:?}"));
        let pause = match failures.checked_sub(3) {
            Some(doublings) => Duration::from_millis(10 << doublings.min(6)),
            None => Duration::ZERO,
        };
        self.later(pause, who, Happening::Attempt);
    }
}
