//! A death is known in time: where there is evidence (a stream that broke, a process that ended, the end of all connections of a replica without a
//! stream), no replica waits for a heartbeat time-out.

use super::*;

/// The evidence is there after this time at most; a message that says so may come [`LATE`] where messages do.
const KNOWN_AFTER: Duration = Duration::from_secs(1);
const LATE: Duration = Duration::from_secs(2);

/// A process that ended while the lighthouse was able to learn of it.
#[derive(Debug)]
pub(crate) struct Death {
    who: Who,
    id: String,
    at: Duration,
    /// The lighthouse of that time.
    incarnation: u64,
}

impl World {
    /// `who` ends now: by when is it known?
    pub(super) fn will_be_known(&mut self, who: Who) {
        let foreign = self.scenario.foreign;
        // One that has left is no loss: the others of its replica may come to that point later.
        if who.rank > 0 && self.trainer(who).is_some_and(|t| t.leaves) {
            return;
        }
        let (Some(lighthouse), Some(replica)) = (&self.lighthouse, &self.replicas[who.slot]) else {
            return;
        };
        if replica.incarnation != who.incarnation || (replica.stream.is_none() && !foreign) {
            return;
        }
        let death = Death {
            who,
            id: replica.id.clone(),
            at: self.now,
            incarnation: lighthouse.incarnation,
        };
        let late = if self.scenario.disorder > 0 {
            LATE
        } else {
            Duration::ZERO
        };
        self.at(
            self.now + KNOWN_AFTER + late,
            Owner::World,
            Happening::IsKnown(death),
        );
    }

    /// A replica whose process is gone for a while is not healthy, unless something kept the notice back.
    pub(super) fn is_known(&mut self, death: &Death) {
        let (now, who) = (self.now, death.who);
        // Also just before.
        let recently = |until: Duration| !until.is_zero() && until + KNOWN_AFTER + LATE > now;
        let server = Who { rank: 0, ..who };
        let is_stopped = self.process(server).is_some_and(|p| recently(p.stopped_until));
        let is_cut = recently(self.cut_until[who.slot]);
        let Some(lighthouse) = self
            .lighthouse
            .as_ref()
            .filter(|l| l.incarnation == death.incarnation)
        else {
            return;
        };
        let is_away = recently(lighthouse.stopped_until) || recently(lighthouse.discounts_until);
        // A call that was on its way came after the end of the stream. On one connection it comes before it.
        let is_late = lighthouse.heard.has_asked(&death.id, death.at);
        if is_stopped || is_cut || is_away || is_late {
            return;
        }
        let status = lighthouse.state.status(self.instant());
        if status.healthy.iter().any(|(id, _)| *id == death.id) {
            self.violate(format!(
                "{who:?} is gone since {KNOWN_AFTER:?} at least, and its replica counts as healthy still"
            ));
        }
    }
}
