//! What must hold, looked at whenever a rank is told something or commits.

use std::collections::{BTreeMap, BTreeSet};

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
    /// The epochs whose commits the lighthouse can tell from those of strangers, and the step that the job has come to.
    remembered: BTreeSet<Epoch>,
    furthest: Step,
    /// By replica and group rank: the state that it holds, and the epoch of its last commit or heal.
    states: BTreeMap<(String, u32), (Step, String, Epoch)>,
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
        if answer.max_step < self.furthest {
            // What its members had committed beyond that is given up.
            self.remembered.clear();
        }
        self.furthest = answer.max_step;
        self.remembered.insert(epoch);
        Ok(())
    }

    /// A lighthouse starts, with the record of this epoch.
    pub(super) fn lighthouse_starts(&mut self, recorded: Option<Epoch>) {
        self.remembered = recorded.into_iter().collect();
    }

    /// A replica is refused for good: one of its ranks comes from an epoch that the lighthouse knows nothing of.
    pub(super) fn may_be_refused(&self, replica: &str, newest: Option<Epoch>) -> bool {
        let states = self.of(replica).filter(|(step, ..)| *step > Step(0));
        let mut of = states.map(|(_, _, epoch)| *epoch).chain(newest);
        of.any(|epoch| !self.remembered.contains(&epoch))
    }

    /// The ranks of a replica hold no state together.
    pub(super) fn has_none(&self, replica: &str) -> bool {
        let mut states = self.of(replica).map(|(step, lineage, _)| (step, lineage));
        let first = states.next();
        states.any(|state| Some(state) != first)
    }

    fn of(&self, replica: &str) -> impl Iterator<Item = &(Step, String, Epoch)> {
        let all = (replica.to_string(), 0)..=(replica.to_string(), u32::MAX);
        self.states.range(all).map(|(_, state)| state)
    }

    /// A rank stands at a step of a history with this value.
    pub(super) fn state(
        &mut self,
        replica: &str,
        group_rank: u32,
        rank: &Rank,
        value: u64,
    ) -> Result<(), String> {
        let (step, lineage) = (rank.step(), rank.lineage().as_str().to_string());
        let held = self.states.entry((replica.to_string(), group_rank)).or_default();
        if (held.0, &held.1) != (step, &lineage) {
            *held = (step, lineage.clone(), rank.epoch().unwrap_or_default());
        }
        if lineage.is_empty() {
            return Ok(());
        }
        let first = *self.values.entry((group_rank, step, lineage)).or_insert(value);
        if first == value {
            return Ok(());
        }
        Err(format!(
            "INV-5, INV-6: rank {group_rank} of {replica} holds {value:x} at step {step}, another replica {first:x}"
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
