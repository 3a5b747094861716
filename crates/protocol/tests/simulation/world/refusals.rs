//! When the run of a replica may end: it is refused for good, or finds that its ranks differ and no replica is there to heal from. Any other replica heals.

use super::*;

impl World {
    /// `who` was told a `Conflict`: an operator's word, a newer incarnation, the end of the run; or its state is one that the lighthouse knows nothing of.
    pub(crate) fn may_be_refused(&self, who: Who) -> bool {
        // torchft's managers do not tell where their state is from, and ids that come twice do not say it.
        let says_nothing = self.scenario.foreign || self.scenario.counts_back;
        // Members that were drained may have been the last ones.
        let is_over = |r: &Record| r.closes || r.left.len() == r.members.len();
        let is_known = |t: &Trainer| t.comes_from().iter().all(|e| self.checks.is_remembered(*e));
        says_nothing
            || self.operated[who.slot]
            || who.incarnation < self.incarnations[who.slot]
            || self.first_end.is_some()
            || self.record.as_ref().is_some_and(is_over)
            || !self.trainers(who.slot).all(is_known)
    }

    /// The ranks of the replica of `who` hold no state together: one of them has none that is whole, or another one, or has ended.
    pub(crate) fn has_none(&self, who: Who) -> bool {
        let all: Vec<&Trainer> = self.trainers(who.slot).collect();
        let is_alike = |t: &&Trainer| !t.program.is_torn() && t.is_one_with(all[0]);
        all.len() < self.scenario.ranks as usize || !all.iter().all(is_alike)
    }
}
