//! The end of an epoch at a rank: the notice of it, what is in hand, and how a process parts from its group.

use std::time::Duration;

use ftcore::Epoch;

use crate::groups::Who;
use crate::trainer::{Doing, Done};
use crate::world::{Happening, World};

/// How a process parts from its group.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Leave {
    /// Its connections close, so many milliseconds from now: what it had sent comes first.
    Closes { after: u64 },
    /// It ends what the others have in hand.
    Aborts,
}

impl World {
    /// The lighthouse's notice that an epoch is over, as the manager takes it.
    pub(crate) fn pushed(&mut self, who: Who, epoch: Epoch, reason: String) {
        let Some(t) = self.trainer(who) else { return };
        t.ends.hear(epoch, reason);
        if t.group != Some(epoch) {
            return;
        }
        // What connects still has nothing in hand, and the rendezvous ends.
        if t.doing == Doing::Connecting {
            self.aborts(who);
        } else {
            self.settle(who);
        }
    }

    /// If the epoch is over, what is in hand ends in time.
    pub(crate) fn settle(&mut self, who: Who) {
        let now = self.now;
        let Some(t) = self.trainer(who) else { return };
        let is_in_hand = t.doing == Doing::Reducing && t.arrives.is_none_or(|at| at > now);
        let Some(grace) = t.group.and_then(|epoch| t.ends.settle(epoch, is_in_hand)) else {
            return;
        };
        let op = t.op;
        self.later(grace, who, Happening::Settles(op));
    }

    /// The time of what was in hand is over.
    pub(crate) fn time_is_over(&mut self, who: Who, op: u64) {
        let now = self.now;
        let Some(t) = self.trainer(who) else { return };
        let is_in_hand = t.doing == Doing::Reducing && t.arrives.is_none_or(|at| at > now);
        if t.op == op && is_in_hand {
            self.aborts(who);
        }
    }

    fn aborts(&mut self, who: Who) {
        let Some(t) = self.trainer(who) else { return };
        let Some(epoch) = t.group else { return };
        let why = t.ends.why_over(epoch).unwrap_or_default().to_string();
        t.broken.get_or_insert_with(|| why.clone());
        let op = t.op;
        self.leave_group(epoch, who, Leave::Aborts);
        // The call ends; its thread may hang all the same.
        self.later(Duration::ZERO, who, Happening::Done(op, Done::Lost(epoch, why)));
    }

    /// The others of the group hear that `who` left it.
    pub(crate) fn leave_group(&mut self, epoch: Epoch, who: Who, leave: Leave) {
        let (now, keeps_work) = (self.now, self.scenario.keeps_work);
        for other in self.groups.leave(epoch, who) {
            let (op, arrives) = self.trainer(other).map_or((0, None), |t| (t.op, t.arrives));
            let (after, data) = match leave {
                Leave::Closes { after } => (after, arrives.filter(|_| keeps_work)),
                Leave::Aborts => (0, None),
            };
            // Over one connection, what was sent before its end comes before its end.
            let data = data.map_or(Duration::ZERO, |at| at.saturating_sub(now));
            let delay = self.random.millis(after, after + 4).max(data);
            self.later(
                delay,
                other,
                Happening::Done(op, Done::Lost(epoch, format!("{who:?} is gone"))),
            );
        }
    }
}
