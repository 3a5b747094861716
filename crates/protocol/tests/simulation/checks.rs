//! What must hold, looked at after every event.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use protocol::{Joining, Quorum};

use protocol::rank::Rank;

use crate::groups::{Share, Who};
use crate::trainer::Offer;

/// What was seen so far.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// The value of each state, and how many batches led to it: by group rank, step and history. Two of them would be two states that heal nobody (INV-6).
    values: BTreeMap<(u32, i64, String), (u64, i64)>,
    /// The members of each epoch: an epoch is one set of members (INV-7, L01).
    epochs: BTreeMap<i64, Vec<String>>,
    /// Replicas do not tell how many batches led to their state.
    pub(crate) foreign: bool,
    /// What was offered: group rank, step, and both parts of the state.
    offers: BTreeSet<(u32, i64, u64, u64)>,
    /// The highest step of the last quorum of this lighthouse.
    frontier: Option<i64>,
    /// Its members.
    last: Vec<String>,
    /// When each replica asked last.
    asked: BTreeMap<String, Duration>,
    /// Quorums with spares beside them.
    pub(crate) spares: u64,
    /// Steps that replicas have committed, over all of them.
    pub(crate) commits: u64,
}

impl Checks {
    /// A rank stands at `step` with this history and value.
    pub(crate) fn state(&mut self, who: Who, rank: &Rank, value: u64) -> Result<(), String> {
        let (step, lineage) = (rank.step(), rank.lineage().as_str());
        // Before the first commit every replica has values of its own, unless an initial sync has named them.
        if lineage.is_empty() {
            return Ok(());
        }
        let key = (who.rank, step, lineage.to_string());
        let batches = if self.foreign { 0 } else { rank.batches_committed() };
        let state = (value, batches);
        let first = *self.values.entry(key).or_insert(state);
        if first == state {
            return Ok(());
        }
        Err(format!(
            "INV-6: {who:?} holds {state:x?} (value, batches) at step {step} of history {lineage}, another replica {first:x?}"
        ))
    }

    /// A quorum was given out.
    pub(crate) fn quorum(
        &mut self,
        epoch: i64,
        members: &[String],
        min_replicas: usize,
    ) -> Result<(), String> {
        if members.len() < min_replicas {
            return Err(format!(
                "INV-7: quorum {epoch} has {} members, min_replicas is {min_replicas}",
                members.len()
            ));
        }
        let newest = self.epochs.last_key_value().map_or(0, |(e, _)| *e);
        match self.epochs.get(&epoch) {
            Some(known) if known != members => {
                Err(format!("INV-7: epoch {epoch} is {known:?} and {members:?}"))
            }
            None if epoch < newest => Err(format!("INV-7: epoch {epoch} after epoch {newest}")),
            _ => {
                self.epochs.insert(epoch, members.to_vec());
                Ok(())
            }
        }
    }

    /// A rank offers its state.
    pub(crate) fn offered(&mut self, who: Who, offer: &Offer) {
        self.offers
            .insert((who.rank, offer.step, offer.value, offer.local));
    }

    /// A rank took a state over: one that some replica offered as a whole.
    pub(crate) fn taken_over(&self, who: Who, step: i64, value: u64, local: u64) -> Result<(), String> {
        if self.offers.contains(&(who.rank, step, value, local)) {
            return Ok(());
        }
        Err(format!(
            "INV-5: {who:?} holds parts of several replicas' states of step {step}"
        ))
    }

    /// A replica asks the lighthouse.
    pub(crate) fn asks(&mut self, replica_id: &str, now: Duration) {
        self.asked.insert(replica_id.to_string(), now);
    }

    /// Another lighthouse begins.
    pub(crate) fn lighthouse_starts(&mut self) {
        self.frontier = None;
    }

    /// Spares are no members, and nobody waits for a replica far behind where the others can go on: one that asked more than
    /// `patience` ago may have been taken in when they could not.
    pub(crate) fn spares(
        &mut self,
        quorum: &Quorum,
        min_replicas: usize,
        now: Duration,
        patience: Duration,
    ) -> Result<(), String> {
        let frontier = self.frontier;
        self.frontier = quorum.participants.iter().map(|m| m.step).max();
        let last = std::mem::replace(&mut self.last, quorum.ids().map(str::to_string).collect());
        self.spares += u64::from(!quorum.spares.is_empty());
        if let Some(both) = quorum.spares.iter().find(|m| quorum.contains(&m.replica_id)) {
            return Err(format!("{} is a member and a spare", both.replica_id));
        }
        // Members that waited so long for others may have taken replicas far behind in.
        let asked = |id: &str| self.asked.get(id).copied().unwrap_or_default();
        if quorum.ids().any(|id| now >= asked(id) + patience) {
            return Ok(());
        }
        let is_far = |step: i64| frontier.is_some_and(|f| step < f);
        let far = quorum
            .participants
            .iter()
            .find(|m| m.joining == Joining::Outside && is_far(m.step));
        let others = quorum.participants.iter().filter(|m| !is_far(m.step)).count();
        let goes_on = |m: &protocol::Member| !is_far(m.step) && last.contains(&m.replica_id);
        match far.filter(|_| quorum.participants.iter().any(goes_on)) {
            Some(m) if others > quorum.participants.len() / 2 && others >= min_replicas => Err(format!(
                "quorum {}: {others} members wait for {}, which is at step {}; the last quorum was at {frontier:?}",
                quorum.quorum_id, m.replica_id, m.step
            )),
            _ => Ok(()),
        }
    }

    /// The shares of a reduction: no work counts twice while there is any that is not a copy (INV-4).
    pub(crate) fn weights(&self, epoch: i64, shares: &[Share]) -> Result<(), String> {
        let mut works: Vec<u64> = shares.iter().filter(|s| s.contributes).map(|s| s.work).collect();
        let own = shares.iter().any(|s| s.contributes && !s.copied);
        let number = works.len();
        works.sort_unstable();
        works.dedup();
        if own && works.len() != number {
            return Err(format!(
                "INV-4: in epoch {epoch} one replica's work counts more than once: {shares:?}"
            ));
        }
        if number == 0 {
            return Err(format!("INV-4: in epoch {epoch} nobody contributes: {shares:?}"));
        }
        Ok(())
    }
}
