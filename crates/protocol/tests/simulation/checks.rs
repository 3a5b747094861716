//! What must hold, looked at after every event.

use std::collections::BTreeMap;

use protocol::rank::Rank;

use crate::groups::{Share, Who};

/// What was seen so far.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// The value of each state, and how many batches led to it: by group rank, step and history. Two of them would be two states that heal nobody (INV-6).
    values: BTreeMap<(u32, i64, String), (u64, i64)>,
    /// The members of each epoch: an epoch is one set of members (INV-7, L01).
    epochs: BTreeMap<i64, Vec<String>>,
    /// Replicas do not tell how many batches led to their state.
    pub(crate) foreign: bool,
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
