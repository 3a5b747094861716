//! What must hold, looked at whenever a rank is told something or commits.

use std::collections::BTreeMap;

use ftcore::{Epoch, Step};
use protocol::QuorumResult;
use protocol::rank::Rank;

#[derive(Debug, Default)]
pub(super) struct Checks {
    /// By group rank, step and history: the value of the state.
    values: BTreeMap<(u32, Step, String), u64>,
    /// The members of each epoch.
    epochs: BTreeMap<Epoch, Vec<String>>,
    /// By epoch and step: what the ranks of a replica decided.
    decisions: BTreeMap<(String, Epoch, Step, i64), bool>,
}

impl Checks {
    /// A replica's place in a quorum, as one of its ranks is told it.
    pub(super) fn told(
        &mut self,
        replica: &str,
        rank: &Rank,
        answer: &QuorumResult,
        min_replicas: usize,
    ) -> Result<(), String> {
        let epoch = answer.quorum_id;
        if rank.epoch().is_some_and(|newest| epoch < newest) {
            return Err(format!(
                "INV-7: {replica} is told epoch {epoch} after {:?}",
                rank.epoch()
            ));
        }
        let members = &answer.replica_ids;
        let is_in = members.iter().any(|id| id == replica);
        if members.len() < min_replicas || is_in == answer.spare {
            return Err(format!(
                "INV-7: {replica} is told that {members:?} are epoch {epoch}: {answer:?}"
            ));
        }
        let known = self.epochs.entry(epoch).or_insert_with(|| members.clone());
        if known != members {
            return Err(format!("INV-7: epoch {epoch} is {known:?} and {members:?}"));
        }
        Ok(())
    }

    /// A rank stands at a step of a history with this value.
    pub(super) fn state(
        &mut self,
        who: &str,
        group_rank: u32,
        rank: &Rank,
        value: u64,
    ) -> Result<(), String> {
        let (step, lineage) = (rank.step(), rank.lineage().as_str().to_string());
        if lineage.is_empty() {
            return Ok(());
        }
        let first = *self.values.entry((group_rank, step, lineage)).or_insert(value);
        if first == value {
            return Ok(());
        }
        Err(format!(
            "INV-5, INV-6: {who} holds {value:x} at step {step}, another replica {first:x}"
        ))
    }

    /// The ranks of a replica hear the same of a vote.
    pub(super) fn decided(
        &mut self,
        replica: &str,
        (epoch, step, attempt): (Epoch, Step, i64),
        commit: bool,
    ) -> Result<(), String> {
        let key = (replica.to_string(), epoch, step, attempt);
        let first = *self.decisions.entry(key).or_insert(commit);
        if first == commit {
            return Ok(());
        }
        Err(format!(
            "INV-6: the ranks of {replica} hear {first} and {commit} of step {step} in epoch {epoch}"
        ))
    }
}
