//! What the lighthouse remembers of its job, in memory and on disk: the last epoch, its members, and the state that they went on from.
//!
//! A lineage is a hash chain over (epoch, step), so the lighthouse can compute the lineage of every state that the recorded epoch can
//! lead to. A replica that comes with a larger step is *checked* against it: "the largest step wins" holds only for states that
//! descend from the record.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ftcore::{Epoch, Step};

use crate::Lineage;
use crate::member::{Id, Member, prefix_of};

/// How far ahead of the record a state is checked at most, in commits.
const MAX_CHECKED: i64 = 1_000_000;
/// Of a chain one in so many lineages is kept, so that checking it again costs little.
const KEPT_EACH: i64 = 1024;
/// Epochs that have ended and are remembered, for members that went on in them.
const ENDED: usize = 64;

/// What outlives a restart of the lighthouse. Saved before the quorum that it describes is delivered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// The last epoch; without members, no more than an id that all later ones exceed.
    pub quorum_id: Epoch,
    /// The step that its members began it with.
    pub step: Step,
    /// The lineage of their state at `step`; `None` if they told none, or an older version saved the record.
    pub lineage: Option<String>,
    /// The ids of its members. None: there was no epoch yet.
    pub members: Vec<String>,
    /// Those of them that are known to be gone since, for whatever reason.
    pub departed: Vec<String>,
    /// Those of `departed` that left in order. Once all did, the run is over.
    pub left: Vec<String>,
    /// It is the quorum of the run's last step: those of its members that are up to date said so.
    pub closes: bool,
    /// Replicas that the operator evicted, the oldest first. They are refused until they are started again.
    pub evicted: Vec<Eviction>,
}

/// A replica that was evicted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Eviction {
    /// Its id.
    pub replica_id: String,
    /// The process that it was then.
    pub incarnation: String,
    /// Why, in the operator's words.
    pub reason: String,
}

/// The part of an id that a replica keeps over restarts.
fn name_of(id: &str) -> &str {
    prefix_of(id).unwrap_or(id)
}

/// An epoch that others have followed.
#[derive(Debug, Clone)]
struct Ended {
    epoch: Epoch,
    /// The step that the others went on from.
    step: Step,
    /// Their lineage then, and the other that it may have been: see [`Job::initial`].
    lineages: [Option<Lineage>; 2],
}

/// The lineages that commits of one epoch lead to.
#[derive(Debug, Clone)]
struct Chain {
    /// Where it begins.
    first: (Step, Lineage),
    /// At some steps beyond that.
    known: BTreeMap<Step, Lineage>,
    /// The lineage that was asked for last: that of the next step, as a rule.
    last: Option<(Step, Lineage)>,
}

impl Chain {
    fn of(step: Step, lineage: Lineage) -> Self {
        Self {
            first: (step, lineage),
            known: BTreeMap::new(),
            last: None,
        }
    }

    fn lineage(&self) -> &Lineage {
        &self.first.1
    }

    /// The lineage after commits of `epoch` up to `step`, if that can be checked.
    fn at(&mut self, epoch: Epoch, step: Step) -> Option<Lineage> {
        if !(0..=MAX_CHECKED).contains(&(step - self.first.0)) {
            return None;
        }
        if let Some((_, lineage)) = self.last.as_ref().filter(|(at, _)| *at == step) {
            return Some(lineage.clone());
        }
        let known = self.known.range(..=step).next_back();
        let (at, lineage) = known.unwrap_or((&self.first.0, &self.first.1));
        let (mut at, mut lineage) = (*at, lineage.clone());
        while at < step {
            lineage = lineage.after(epoch, at);
            at += 1;
            if at.0 % KEPT_EACH == 0 {
                self.known.insert(at, lineage.clone());
            }
        }
        self.last = Some((step, lineage.clone()));
        Some(lineage)
    }

    /// True if the state of `member` is on it.
    fn leads_to(&mut self, epoch: Epoch, member: &Member) -> bool {
        let lineage = self.at(epoch, member.step);
        lineage.is_some_and(|l| l.as_str() == member.lineage)
    }
}

/// The last epoch and the states that descend from it.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) epoch: Epoch,
    pub(super) step: Step,
    /// It ends the run.
    pub(super) closes: bool,
    /// From `step` on; `None` if its members told no lineage.
    chain: Option<Chain>,
    /// The other chain that it may be: at step 0 the members may have begun with an initial sync, or without. Kept as the first one is: who is refused
    /// has both computed, and may ask again at once.
    initial: Option<Chain>,
    names: BTreeSet<Id>,
    /// Earlier epochs, the oldest first.
    ended: VecDeque<Ended>,
}

impl Job {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            epoch: record.quorum_id,
            step: record.step,
            closes: record.closes,
            chain: record
                .lineage
                .clone()
                .map(|l| Chain::of(record.step, Lineage::from_peer(l))),
            initial: begun_by(record.step, record.lineage.as_deref(), &record.members),
            names: record.members.iter().map(|id| name_of(id).into()).collect(),
            ended: VecDeque::new(),
        }
    }

    /// The job as `members` of `epoch` go on with it.
    pub(super) fn next(former: Option<Self>, epoch: Epoch, members: &[Member]) -> Self {
        let step = members.iter().map(|m| m.step).max().unwrap_or_default();
        let lineage = held_by_most(members, step);
        // One that is behind does not know what step it heals into.
        let closes = members.iter().filter(|m| m.step == step).all(|m| m.is_last);
        let ended = match former {
            Some(mut job) => {
                let goes_on = job.moves_to(step, lineage.as_ref());
                // In the same epoch the same members go on along the same chain.
                if goes_on && job.epoch == epoch {
                    job.closes = closes;
                    return job;
                }
                job.ended()
            }
            None => VecDeque::new(),
        };
        let ids: Vec<&str> = members.iter().map(|m| m.replica_id.as_str()).collect();
        Self {
            epoch,
            step,
            closes,
            initial: begun_by(step, lineage.as_ref().map(Lineage::as_str), &ids),
            chain: lineage.map(|l| Chain::of(step, l)),
            names: members.iter().map(|m| name_of(&m.replica_id).into()).collect(),
            ended,
        }
    }

    /// Moves on to `step`, if its chain leads to `lineage` there. A lighthouse that was started again knows only with what its epoch began.
    fn moves_to(&mut self, step: Step, lineage: Option<&Lineage>) -> bool {
        let Some(lineage) = lineage.filter(|l| self.lineage_at(step).as_ref() == Some(*l)) else {
            return false;
        };
        if let Some(chain) = &mut self.chain {
            chain.known = chain.known.split_off(&step);
            chain.first = (step, lineage.clone());
        }
        if step > Step(0) {
            // They have committed, and so told how they began.
            self.initial = None;
        }
        self.step = step;
        true
    }

    /// What is remembered once its epoch has ended.
    fn ended(self) -> VecDeque<Ended> {
        let mut ended = self.ended;
        ended.drain(..ended.len().saturating_sub(ENDED - 1));
        ended.push_back(Ended {
            epoch: self.epoch,
            step: self.step,
            lineages: [self.chain, self.initial].map(|chain| chain.map(|c| c.first.1)),
        });
        ended
    }

    /// True for a member of an earlier epoch that committed the step it was in when the others went on without it: its state is one of this job, and
    /// the job has not got it.
    pub(super) fn left_behind(&self, member: &Member) -> bool {
        // It may have been in a later one since, in which it could not heal.
        let is_it = |e: &&Ended| e.epoch <= member.last_quorum_id && member.step - 1 == e.step;
        self.ended.iter().filter(is_it).any(|began| {
            let mut chains = began.lineages.iter().flatten();
            chains.any(|l| l.after(began.epoch, began.step).as_str() == member.lineage)
        })
    }

    pub(super) fn lineage(&self) -> Option<&Lineage> {
        self.chain.as_ref().map(Chain::lineage)
    }

    /// How many lineages are kept, of the one chain that it may be and of the other.
    #[cfg(test)]
    pub(super) fn kept(&self) -> [Option<usize>; 2] {
        [&self.chain, &self.initial].map(|chain| chain.as_ref().map(|c| c.known.len()))
    }

    /// True for a recorded member, in whatever incarnation.
    pub(super) fn names(&self, id: &str) -> bool {
        self.names.contains(name_of(id))
    }

    /// The lineage of the state at `step`, if it is one that this epoch can lead to and that can be checked.
    fn lineage_at(&mut self, step: Step) -> Option<Lineage> {
        self.chain.as_mut()?.at(self.epoch, step)
    }

    /// Why the state of `member` is not one of this job; `None` if it is, or if the member would heal anyway.
    pub(super) fn refuses(&mut self, member: &Member) -> Option<String> {
        if member.step <= self.step {
            return None;
        }
        let why = match &mut self.chain {
            Some(chain) if !member.lineage.is_empty() => {
                if chain.leads_to(self.epoch, member) {
                    return None;
                }
                // The first to tell how the job began says so for all.
                if let Some(initial) = self.initial.take_if(|chain| chain.leads_to(self.epoch, member)) {
                    self.chain = Some(initial);
                    return None;
                }
                "it does not descend from"
            }
            _ if self.names.contains(name_of(&member.replica_id)) => return None,
            _ => "no lineage shows that it descends from",
        };
        Some(format!(
            "the state of replica {} is at step {}, and {why} the recorded state of this job (epoch {}, step {}): start the replica \
             without its state, so that it heals; if its state is the one to go on from, start the lighthouse with another state file",
            member.replica_id, member.step, self.epoch, self.step
        ))
    }

    /// True if `member` stands at the recorded step with a state of another history.
    pub(super) fn diverged(&self, member: &Member) -> bool {
        let lineage = self
            .lineage()
            .filter(|_| member.step == self.step && self.step > Step(0));
        lineage.is_some_and(|l| !member.lineage.is_empty() && l.as_str() != member.lineage)
    }
}

/// What an initial sync of these members names the state at step 0, if that may be what they begin with.
fn begun_by<T: AsRef<str>>(step: Step, lineage: Option<&str>, ids: &[T]) -> Option<Chain> {
    let untold = step == Step(0) && lineage == Some("");
    let first = ids.iter().map(AsRef::as_ref).min().filter(|_| untold);
    first.map(|id| Chain::of(step, Lineage::initial(id)))
}

/// The lineage that most members at `step` tell, the lowest id's in a tie; as the assignment chooses it.
fn held_by_most(members: &[Member], step: Step) -> Option<Lineage> {
    let told = || members.iter().filter(|m| m.step == step && !m.lineage.is_empty());
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    for m in told() {
        *count.entry(m.lineage.as_str()).or_default() += 1;
    }
    let most = count.values().max();
    let held = told().find(|m| count.get(m.lineage.as_str()) == most);
    match held {
        Some(m) => Some(Lineage::from_peer(m.lineage.as_str())),
        // Before the first commit there is no history to tell.
        None => (step == Step(0)).then(Lineage::default),
    }
}
