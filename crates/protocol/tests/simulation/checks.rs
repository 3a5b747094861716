//! What must hold, looked at after every event.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ftcore::{Epoch, Step};
use oxccl_protocol::{Joining, Quorum, QuorumResult};

use oxccl_protocol::rank::Rank;

use crate::groups::{Share, Who};
use crate::trainer::{Offer, Taken};

/// Of so many sources a replica that heals is told, if there are as many.
const SOURCES: usize = 3;
/// The last epoch, and so many before it.
const REMEMBERED: usize = 1 + 64;

/// What was seen so far.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// The value of each state, and how many batches led to it: by group rank, step and history. Two of them would be two states of which no member heals (INV-6).
    values: BTreeMap<(u32, Step, String), (u64, i64)>,
    /// The history after each commit, by group rank, epoch and step: those that commit together go on as one.
    commits_of: BTreeMap<(u32, Epoch, Step), String>,
    /// The members of each epoch: an epoch is one set of members (INV-7, L01).
    epochs: BTreeMap<Epoch, Vec<String>>,
    /// Replicas do not tell how many batches led to their state.
    pub(crate) foreign: bool,
    /// A step was committed in two epochs, by replicas that do not tell which: some go on from either.
    is_split: bool,
    /// The lighthouse's ids begin again somewhere before the last one.
    pub(crate) counts_back: bool,
    /// How many hold the state of an epoch and step.
    holders: BTreeMap<(Epoch, Step), usize>,
    /// What was offered: group rank, step, and both parts of the state.
    offers: BTreeSet<(u32, Step, u64, u64)>,
    /// Whose state the ranks of a replica hold in a step of an epoch.
    together: BTreeMap<(usize, u64, Epoch, Step), Option<Taken>>,
    /// Whether the ranks of a replica computed in an attempt, by its epoch, step and number.
    computed: BTreeMap<(usize, u64, Epoch, Step, i64), bool>,
    /// The epochs whose commits this lighthouse can tell from those of strangers.
    remembered: BTreeSet<Epoch>,
    /// The step that the job has come to.
    furthest: Step,
    /// The highest step of the last quorum of this lighthouse.
    frontier: Option<Step>,
    /// Its members.
    last: Vec<String>,
    /// They all know what a spare is.
    knows_spares: bool,
    /// When each replica asked last, and at which step.
    asked: BTreeMap<String, (Duration, Step)>,
    /// Quorums with spares beside them.
    pub(crate) spares: u64,
    /// Steps that replicas have committed, over all of them.
    pub(crate) commits: u64,
    /// Processes that were killed right after a commit.
    pub(crate) deaths_at_commits: u64,
}

impl Checks {
    /// A rank stands at `step` with this history and value.
    pub(crate) fn state(&mut self, who: Who, rank: &Rank, value: u64) -> Result<(), String> {
        let (step, lineage) = (rank.step(), rank.lineage().as_str());
        // Before the first commit every replica has values of its own, unless an initial sync has named them.
        // Nor is a history one where an epoch comes twice.
        if lineage.is_empty() || self.counts_back {
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

    /// A rank has committed `step` in `epoch`: from the same state as all that do, or one of them would heal to what it holds already.
    pub(crate) fn committed(
        &mut self,
        who: Who,
        epoch: Epoch,
        step: Step,
        rank: &Rank,
    ) -> Result<(), String> {
        let lineage = rank.lineage().as_str();
        // torchft's managers tell no lineage. A step that one alone has committed is done again by the others, and if it comes back at the same
        // step, as they are then, no lighthouse can tell the two histories apart.
        if self.foreign {
            let range = (who.rank, Epoch(0), step)..=(who.rank, Epoch(u64::MAX), step);
            let of_step =
                |((_, e, s), l): (&(u32, Epoch, Step), &String)| *s == step && *e != epoch && l != lineage;
            self.is_split |= self.commits_of.range(range).any(of_step);
        }
        let is_split = self.is_split;
        let first = self
            .commits_of
            .entry((who.rank, epoch, step))
            .or_insert_with(|| lineage.to_string());
        if first == lineage || is_split {
            return Ok(());
        }
        Err(format!(
            "INV-6: {who:?} commits step {step} in epoch {epoch} to history {lineage}, another replica to {first}"
        ))
    }

    /// A rank did not commit `step`, which was reduced in `epoch`: what another replica needed for its commit was on its way to this one.
    pub(crate) fn work_is_kept(&self, who: Who, epoch: Epoch, step: Step) -> Result<(), String> {
        match self.commits_of.contains_key(&(who.rank, epoch, step)) {
            true => Err(format!(
                "{who:?} lost step {step} of epoch {epoch}, which another replica has committed"
            )),
            false => Ok(()),
        }
    }

    /// A quorum was given out.
    pub(crate) fn quorum(
        &mut self,
        epoch: Epoch,
        members: &[String],
        min_replicas: usize,
    ) -> Result<(), String> {
        if members.len() < min_replicas {
            return Err(format!(
                "INV-7: quorum {epoch} has {} members, min_replicas is {min_replicas}",
                members.len()
            ));
        }
        let newest = self.epochs.last_key_value().map_or(Epoch(0), |(e, _)| *e);
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
            .insert((who.rank, offer.step, offer.model.common(), offer.model.own()));
    }

    /// A rank took a state over: one that some replica offered as a whole.
    pub(crate) fn taken_over(&self, who: Who, step: Step, value: u64, local: u64) -> Result<(), String> {
        if self.offers.contains(&(who.rank, step, value, local)) {
            return Ok(());
        }
        Err(format!(
            "INV-5: {who:?} holds parts of several replicas' states of step {step}"
        ))
    }

    /// A rank computes in this step of this epoch: its state came from where the other ranks of its replica have theirs from.
    pub(crate) fn together(
        &mut self,
        who: Who,
        epoch: Epoch,
        step: Step,
        taken: Option<Taken>,
    ) -> Result<(), String> {
        let key = (who.slot, who.incarnation, epoch, step);
        let first = self.together.entry(key).or_insert_with(|| taken.clone());
        if *first == taken {
            return Ok(());
        }
        Err(format!(
            "INV-6: in step {step} of epoch {epoch} {who:?} holds {taken:?}, another rank of its replica {first:?}"
        ))
    }

    /// A rank computed gradients in an attempt, or did not. What the ranks of a replica compute they compute together, also where the epoch came
    /// up for some of them only: one that left it out would be waited for inside.
    pub(crate) fn computed(
        &mut self,
        who: Who,
        (epoch, step, attempt): (Epoch, Step, i64),
        computes: bool,
    ) -> Result<(), String> {
        let key = (who.slot, who.incarnation, epoch, step, attempt);
        if *self.computed.entry(key).or_insert(computes) == computes {
            return Ok(());
        }
        let (does, do_so) = if computes {
            ("computes", "do not")
        } else {
            ("does not compute", "do")
        };
        Err(format!(
            "{who:?} {does} in attempt {attempt} at step {step} of epoch {epoch}, other ranks of its replica {do_so}"
        ))
    }

    /// A replica asks the lighthouse.
    pub(crate) fn asks(&mut self, replica_id: &str, step: Step, now: Duration) {
        // A question that is asked again after its connection broke has waited all the while.
        self.asked.entry(replica_id.to_string()).or_insert((now, step)).1 = step;
    }

    /// Another lighthouse begins, with the record of this epoch.
    pub(crate) fn lighthouse_starts(&mut self, recorded: Option<Epoch>) {
        self.frontier = None;
        self.remembered = recorded.into_iter().collect();
        if self.counts_back {
            self.epochs.clear();
            self.commits_of.clear();
        }
    }

    /// A quorum was given out.
    pub(crate) fn goes_on(&mut self, quorum: &Quorum) {
        let step = quorum.participants.iter().map(|m| m.step).max();
        let step = step.unwrap_or_default();
        if step < self.furthest {
            // What its members had committed beyond that is given up.
            self.remembered.clear();
        }
        self.furthest = step;
        self.remembered.insert(quorum.quorum_id);
        while self.remembered.len() > REMEMBERED {
            self.remembered.pop_first();
        }
    }

    /// The state that was committed last in this epoch, or taken over, is one that the lighthouse knows.
    pub(crate) fn is_remembered(&self, epoch: Epoch) -> bool {
        epoch == Epoch(0) || self.remembered.contains(&epoch)
    }

    pub(crate) fn newest_epoch(&self) -> Option<Epoch> {
        self.epochs.last_key_value().map(|(epoch, _)| *epoch)
    }

    pub(crate) fn knows_epoch(&self, epoch: Epoch) -> bool {
        self.epochs.contains_key(&epoch)
    }

    pub(crate) fn was_in_last(&self, id: &str) -> bool {
        self.last.iter().any(|last| last == id)
    }

    /// A rank is to heal: it is told of all that hold the state, as far as it needs them.
    pub(crate) fn sources(&self, who: Who, answer: &QuorumResult) -> Result<(), String> {
        let number = answer.recover_sources.len();
        match self.holders.get(&(answer.quorum_id, answer.max_step)) {
            Some(&holders) if number != holders.min(SOURCES) => Err(format!(
                "{who:?} heals to step {} in quorum {}, and is told of {number} sources of {holders}",
                answer.max_step, answer.quorum_id
            )),
            _ => Ok(()),
        }
    }

    fn note_holders(&mut self, quorum: &Quorum) {
        let step = quorum
            .participants
            .iter()
            .map(|m| m.step)
            .max()
            .unwrap_or_default();
        let mut held: BTreeMap<&str, usize> = BTreeMap::new();
        for m in quorum.participants.iter().filter(|m| m.step == step) {
            *held.entry(&m.lineage).or_default() += 1;
        }
        let untold = held.remove("").unwrap_or(0);
        // Before the first commit only one replica, or those that took its state over, are told as sources.
        let number = match held.values().max() {
            None if step == Step(0) => 1,
            Some(most) if step == Step(0) => *most,
            most => most.copied().unwrap_or(0) + untold,
        };
        self.holders.insert((quorum.quorum_id, step), number);
    }

    /// Spares are no members, and members take no replica in, and wait for none, whose state is far behind and that did not ask so: docs/healing.md says
    /// when they do all the same.
    pub(crate) fn spares(
        &mut self,
        quorum: &Quorum,
        min_replicas: usize,
        now: Duration,
        limit: Duration,
    ) -> Result<(), String> {
        self.note_holders(quorum);
        let members = &quorum.participants;
        let frontier = std::mem::replace(&mut self.frontier, members.iter().map(|m| m.step).max());
        let last = std::mem::replace(&mut self.last, quorum.ids().map(str::to_string).collect());
        let knew = std::mem::replace(
            &mut self.knows_spares,
            members.iter().all(|m| m.joining != Joining::Untold),
        );
        self.spares += u64::from(!quorum.spares.is_empty());
        if let Some(both) = quorum.spares.iter().find(|m| quorum.contains(&m.replica_id)) {
            return Err(format!("{} is a member and a spare", both.replica_id));
        }
        let since: BTreeMap<_, _> = quorum
            .ids()
            .filter_map(|id| Some((id.to_string(), self.asked.remove(id)?)))
            .collect();
        let asked = |id: &str| since.get(id).map_or(Duration::ZERO, |(at, _)| *at);
        // In the last step of a run, and with members that do not know spares, all are waited for.
        let Some(frontier) = frontier.filter(|_| knew && members.iter().all(|m| !m.is_last)) else {
            return Ok(());
        };
        // Members of the last quorum that are not behind go on as soon as they are enough; what has no name in it is a newcomer.
        // One of another history at the recorded step is told as if it were behind it.
        let is_far = |m: &&oxccl_protocol::Member| {
            since.get(&m.replica_id).map_or(m.step, |(_, step)| *step) < frontier
        };
        let goes_on: Vec<_> = members
            .iter()
            .filter(|m| !is_far(m) && last.contains(&m.replica_id))
            .collect();
        let others = members.iter().filter(|m| !is_far(m)).count();
        let in_vain = goes_on.iter().any(|m| now >= asked(&m.replica_id) + limit);
        let far = members
            .iter()
            .find(|m| m.joining == Joining::Outside && is_far(m));
        match far.filter(|_| !goes_on.is_empty() && others >= min_replicas && !in_vain) {
            Some(m) => Err(format!(
                "quorum {}: {others} members wait for {}, which is at step {}; the last quorum was at {frontier}",
                quorum.quorum_id, m.replica_id, m.step
            )),
            None => Ok(()),
        }
    }

    /// The shares of a reduction: with `all`, every replica that held the state contributes; no work counts twice while there is any that is not a copy, and all is of the state that all contributors
    /// hold (INV-4).
    pub(crate) fn weights(&self, epoch: Epoch, shares: &[Share], all: bool) -> Result<(), String> {
        match shares.iter().filter(|s| s.is_barrier).count() {
            0 => {}
            n if n == shares.len() => return Ok(()),
            _ => {
                return Err(format!(
                    "in epoch {epoch} some members reduce and others do not: {shares:?}"
                ));
            }
        }
        if let Some(share) = shares.iter().find(|s| all && !s.healed && !s.contributes) {
            return Err(format!(
                "INV-4: in epoch {epoch} the work of a member that held the state does not count: {share:?} of {shares:?}"
            ));
        }
        let contributors = || shares.iter().filter(|s| s.contributes);
        if let Some(stale) = contributors().find(|s| s.of != s.state) {
            return Err(format!(
                "INV-4: in epoch {epoch} work of another state counts: {stale:?} of {shares:?}"
            ));
        }
        let first = contributors().next().map(|s| s.state);
        if contributors().any(|s| Some(s.state) != first) {
            return Err(format!(
                "INV-6: in epoch {epoch} replicas contribute to different states: {shares:?}"
            ));
        }
        let mut works: Vec<u64> = contributors().flat_map(|s| s.pieces.iter().copied()).collect();
        let own = shares.iter().any(|s| s.contributes && !s.copied);
        let number = works.len();
        works.sort_unstable();
        works.dedup();
        if own && works.len() != number {
            return Err(format!(
                "INV-4: in epoch {epoch} one replica's work counts more than once: {shares:?}"
            ));
        }
        if contributors().next().is_none() {
            return Err(format!(
                "INV-4: in epoch {epoch} no replica contributes: {shares:?}"
            ));
        }
        Ok(())
    }
}
