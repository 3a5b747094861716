//! One rank's way through a step: ask, offer a snapshot, connect the group, heal, reduce, vote.
//!
//! [`Rank`] decides what comes next and keeps what must survive the attempt (step, lineage, epoch, attempts); the caller that
//! drives it carries the work out and says how it went. Three kinds of failure are kept apart:
//!
//! - *Mine*: the call, the configuration or the state of this rank is wrong (`InvalidArgument`, `Unsupported`). No other
//!   epoch would change that, so the rank's run ends ([`Next::End`]).
//! - *A peer's*: what another replica sent makes no sense. The caller that talks to a peer gives such an error another kind
//!   ([`blame_peer`]), so that it costs this attempt only.
//! - *The world's*: a member died, a connection broke, a deadline passed. The attempt is lost, and the same step is done
//!   again in the next quorum ([`Next::Lost`]).

use ftcore::{Epoch, Error, ErrorKind, Step};

use crate::assignment::QuorumResult;
use crate::commit::VoteKey;
use crate::gather::RankRequest;
use crate::lineage::Lineage;
use crate::member::Joining;

/// So often a replica that is far behind fetches the state outside the group. If it is not within one step of the members then, the state
/// is too large for their pace: it becomes a member, and they wait for it once.
pub const MAX_TRIES_OUTSIDE: u32 = 3;

/// What stays the same for the whole run.
#[derive(Debug, Clone, Default)]
pub struct RankRules {
    /// A step commits only in a quorum of at least this many members. It counts members, not contributors: a replica that
    /// healed into the step holds its state, although it does not contribute to it.
    pub min_replicas: u32,
    /// At most this many contribute; further members stand by. `None`: all that can.
    pub max_contributors: Option<u32>,
    /// At step 0, all replicas take the state of one.
    pub init_sync: bool,
    /// The run of this rank ends once more attempts than this in a row did not commit. `None`: it never does.
    pub max_retries: Option<u32>,
}

/// What the driver does next.
#[derive(Debug, Clone)]
pub enum Next {
    /// Make a snapshot of the state, since a replica heals from here, or (`publish` is false) withdraw the last one. Then
    /// [`Rank::offered`].
    Offer {
        /// True if a replica heals from this replica.
        publish: bool,
        /// Spares still fetch what was offered before: it is not withdrawn.
        keep: bool,
    },
    /// Connect the group for the answer's epoch. Then [`Rank::configured`].
    Configure,
    /// Fetch and load the state. Then [`Rank::healed`].
    Heal,
    /// This replica is a spare: fetch and load the state, outside of any group. Then [`Rank::fetched`].
    Fetch,
    /// Begin again with [`Rank::start`]: a spare has fetched, or could not.
    Ask,
    /// The reductions of the step may begin. Then [`Rank::vote`].
    Ready,
    /// This attempt will not commit: abort the group, report the error, and vote, which will be a no. The other ranks of
    /// the replica may be in the step already and wait for this one's vote; all of them ask for the next epoch together.
    Lost(Error),
    /// The run of this rank ends here, and its replica's with it.
    End(Error),
}

/// What one rank knows of its own progress.
#[derive(Debug, Clone)]
pub struct Rank {
    rules: RankRules,
    step: Step,
    lineage: Lineage,
    /// The step into which the state was fetched from a peer.
    healed_into: Option<Step>,
    /// The replica was to take a state over at the very step of this rank's, and this rank did not: the other ranks may hold another
    /// source's by now.
    is_left_behind: bool,
    /// This rank was told to heal, and has not yet.
    is_to_heal: bool,
    epoch: Option<Epoch>,
    members: String,
    /// Votes taken so far for the present (epoch, step).
    attempt: i64,
    commit_failures: i64,
    batches: i64,
    /// The attempt had a reduction: something of the contributors is in its result.
    reduced: bool,
    shrink_only: bool,
    answer: Option<QuorumResult>,
    /// The group is still to be connected for the answer's epoch.
    connects: bool,
    /// What is still to be done about a snapshot: publish it, or keep the last one.
    offer: Option<(bool, bool)>,
    in_step: bool,
    /// All that the quorum asks of this rank is done.
    ready: bool,
    lost: Option<Error>,
    questions: i64,
    /// Fetches as a spare since it committed last.
    tries_outside: u32,
    joins_at_once: bool,
    is_last: bool,
}

impl Rank {
    /// A rank at step 0, without a history.
    pub fn new(rules: RankRules) -> Self {
        Self {
            rules,
            step: Step(0),
            lineage: Lineage::default(),
            healed_into: None,
            is_left_behind: false,
            is_to_heal: false,
            epoch: None,
            members: String::new(),
            attempt: 0,
            commit_failures: 0,
            batches: 0,
            reduced: false,
            shrink_only: false,
            answer: None,
            connects: false,
            offer: None,
            in_step: false,
            ready: false,
            lost: None,
            questions: 0,
            tries_outside: 0,
            joins_at_once: false,
            is_last: false,
        }
    }

    /// The step that the state is of.
    pub fn step(&self) -> Step {
        self.step
    }

    /// The history of the state.
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// The newest epoch that this rank was told to connect for; `None` before the first.
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Attempts in a row that did not commit.
    pub fn commit_failures(&self) -> i64 {
        self.commit_failures
    }

    /// How many batches led to the state: one for each contributor of each committed step that had a reduction.
    pub fn batches_committed(&self) -> i64 {
        self.batches
    }

    /// From the next attempt on, ask for quorums that lose members and gain none, or for any.
    pub fn set_shrink_only(&mut self, on: bool) {
        self.shrink_only = on;
    }

    /// True between the quorum and the vote.
    pub fn in_step(&self) -> bool {
        self.in_step
    }

    /// The present quorum as this rank sees it.
    pub fn answer(&self) -> Option<&QuorumResult> {
        self.answer.as_ref()
    }

    /// The place among the contributors of this attempt, and their number. No place: the values of this replica do not count.
    ///
    /// Both follow from the quorum alone. Whether the epoch came up for this rank makes no difference: the other ranks of the replica may be in the
    /// step, and what they compute together waits for all of them.
    pub fn contribution(&self) -> (Option<u32>, u32) {
        let Some(answer) = &self.answer else {
            return (None, 0);
        };
        let most = self.rules.max_contributors.unwrap_or(u32::MAX);
        let place = answer.contributor_rank.filter(|&r| r < most && !answer.heal);
        (place, answer.contributor_world_size.min(most))
    }

    /// Takes up a state that was loaded before the first quorum. Errors: `InvalidState` once one was asked for.
    pub fn restore(&mut self, step: Step, lineage: Lineage, batches_committed: i64) -> Result<(), Error> {
        if self.questions > 0 {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "restore comes before the first quorum, and one was asked for: start the replica again",
            ));
        }
        self.step = step;
        self.lineage = lineage;
        self.batches = batches_committed;
        Ok(())
    }

    /// What is here of the present step is a copy of another replica's work, as after healing into it.
    pub fn set_healed(&mut self) {
        self.healed_into = Some(self.step);
    }

    /// The step was left without a vote while its reductions were still running: the next quorum is a new epoch.
    pub fn abandon(&mut self) {
        self.commit_failures = self.commit_failures.max(1);
    }

    /// The run ends with the next step, or does not: a replica that is behind is a member of its quorum, since there is no later one.
    pub fn set_last(&mut self, is_last: bool) {
        self.is_last = is_last;
    }

    /// Far behind, it is a member at once, and the others wait for it.
    pub fn set_joins_at_once(&mut self, at_once: bool) {
        self.joins_at_once = at_once;
    }

    /// Takes over what `other`, a copy of this rank, was told to ask for since.
    pub fn keep_wishes(&mut self, other: &Self) {
        self.shrink_only = other.shrink_only;
        self.joins_at_once = other.joins_at_once;
        self.is_last = other.is_last;
    }

    /// Begins an attempt: what to ask, and to ask again as it is if the answer is lost. `broken`: the group cannot be used for another step as it is.
    pub fn start(&mut self, broken: bool) -> RankRequest {
        self.in_step = false;
        self.ready = false;
        self.offer = None;
        let missed = self.answer.take().filter(|_| self.is_to_heal);
        self.is_left_behind |=
            missed.is_some_and(|a| a.max_step == self.step && a.lineage == self.lineage.as_str());
        self.is_to_heal = false;
        self.lost = None;
        self.questions += 1;
        let holds_nothing = self.is_left_behind;
        RankRequest {
            step: if holds_nothing { Step(0) } else { self.step },
            shrink_only: self.shrink_only,
            init_sync: self.rules.init_sync,
            // A broken group needs a new epoch even if no vote was lost over it.
            commit_failures: self
                .commit_failures
                .max(i64::from(broken && self.epoch.is_some())),
            lineage: if holds_nothing {
                String::new()
            } else {
                self.lineage.as_str().to_string()
            },
            last_quorum_id: self.epoch.unwrap_or(Epoch(0)),
            healed: self.healed_into == Some(self.step) && !holds_nothing,
            // The count goes with the state: who heals from a replica takes its count over.
            batches_committed: if holds_nothing { 0 } else { self.batches },
            question: self.questions,
            joining: if self.joins_at_once || self.tries_outside >= MAX_TRIES_OUTSIDE {
                Joining::Now
            } else {
                Joining::Outside
            },
            is_last: self.is_last,
            own_part: true,
            unanswered: false,
        }
    }

    /// The quorum's answer. `broken`: why the group as it is cannot be used, if it cannot.
    pub fn answered(&mut self, answer: QuorumResult, broken: Option<String>) -> Next {
        self.is_to_heal = answer.heal;
        if answer.spare {
            // Nothing of the epoch is this rank's: no group, no vote.
            self.answer = Some(answer);
            return Next::Fetch;
        }
        let id = answer.quorum_id;
        // The id alone is not proof: a restarted lighthouse must not be able to make two worlds look like one (L01).
        let same = self.epoch == Some(id) && answer.digest_of_members() == self.members;
        let newest = self.epoch.unwrap_or(Epoch(0));
        let trouble = if id < newest {
            // Of an epoch that comes back, old bytes may still be on their way (INV-1). A lost vote makes the ids grow.
            Some(format!(
                "the lighthouse gave quorum {id} after quorum {newest}: it has forgotten this job, and is asked again until its ids are new"
            ))
        } else if self.epoch == Some(id) && !same {
            Some(format!(
                "epoch {id} ended before it was used again: its members are others now"
            ))
        } else if same {
            // It broke after the question was asked: an epoch is never configured twice (INV-1).
            broken.map(|why| format!("epoch {id} ended before it was used again: {why}"))
        } else {
            None
        };
        self.in_step = true;
        self.connects = !same;
        let publish = !answer.serves_replica_ranks.is_empty() || answer.serves_spares;
        let keep = answer.keeps_snapshot;
        // The source of an initial sync holds the initial state from now on, as those do that heal from it.
        let initial = self.step == Step(0) && answer.max_step == Step(0) && self.lineage.as_str().is_empty();
        if initial && !answer.heal {
            self.lineage = Lineage::from_peer(answer.lineage.clone());
        }
        if !same && trouble.is_none() {
            self.epoch = Some(id);
            self.attempt = 0;
            self.members = answer.digest_of_members();
        }
        self.answer = Some(answer);
        let own = self.lineage.as_str();
        let another = |a: &QuorumResult| !own.is_empty() && !a.lineage.is_empty() && a.lineage != own;
        if self
            .answer
            .as_ref()
            .is_some_and(|a| !a.heal && (a.max_step != self.step || another(a)))
        {
            // The ranks of this replica hold different steps or histories, so it asked as one that has none; and no other replica has any.
            let text = format!(
                "this rank stands at step {}, its replica at none, and no other replica is there to heal from: start the replica from a checkpoint",
                self.step
            );
            self.in_step = false;
            return Next::End(Error::new(ErrorKind::InvalidState, text));
        }
        match trouble {
            Some(text) => self.lose(Error::new(ErrorKind::Aborted, text)),
            // Snapshot first: a replica that heals needs it while this replica is still connecting.
            None => {
                self.offer = Some((publish, keep));
                Next::Offer { publish, keep }
            }
        }
    }

    /// In the place of [`Next::Offer`], while the state cannot be looked at: the group is connected first, and the snapshot comes after that.
    pub fn connect_first(&mut self) -> Next {
        if self.connects {
            Next::Configure
        } else {
            self.rest()
        }
    }

    /// The snapshot is offered, or was withdrawn.
    pub fn offered(&mut self, outcome: Result<(), Error>) -> Next {
        self.offer = None;
        match outcome {
            Err(e) => self.fail(e),
            Ok(()) if self.connects => Next::Configure,
            Ok(()) => self.rest(),
        }
    }

    /// The group is connected, or is not. `broken`: why it cannot be used although it is connected.
    pub fn configured(&mut self, outcome: Result<(), Error>, broken: Option<String>) -> Next {
        match (outcome, broken) {
            (Err(e), _) => self.fail(e),
            (Ok(()), Some(why)) => self.lose(Error::new(
                ErrorKind::Aborted,
                format!("the epoch was over while the group connected: {why}"),
            )),
            (Ok(()), None) => {
                self.connects = false;
                self.rest()
            }
        }
    }

    /// The state of the quorum's step was loaded, with its lineage, or it was not.
    pub fn healed(&mut self, outcome: Result<Lineage, Error>) -> Next {
        match (outcome, &self.answer) {
            (Ok(lineage), Some(answer)) => {
                // Only now: the step advances with the state, never before it (INV-5, L03).
                self.step = answer.max_step;
                self.lineage = lineage;
                self.batches = answer.batches_committed;
                self.healed_into = Some(self.step);
                self.ready = true;
                (self.is_to_heal, self.is_left_behind) = (false, false);
                Next::Ready
            }
            (Err(e), _) => self.fail(e),
            (Ok(_), None) => self.fail(Error::new(
                ErrorKind::InvalidState,
                "a state was loaded without a quorum",
            )),
        }
    }

    /// As a spare: the state of the quorum's step was loaded, with its lineage, or it was not. No member waits for this replica, so
    /// neither costs a vote. `InvalidState`: its own is written in part now, and of no step to ask with (INV-5).
    pub fn fetched(&mut self, outcome: Result<Lineage, Error>) -> Next {
        self.tries_outside += 1;
        match (outcome, &self.answer) {
            (Ok(lineage), Some(answer)) => {
                self.step = answer.max_step;
                self.lineage = lineage;
                self.batches = answer.batches_committed;
                self.healed_into = Some(self.step);
                (self.is_to_heal, self.is_left_behind) = (false, false);
                Next::Ask
            }
            (Err(e), _) if is_permanent(&e) || e.kind() == ErrorKind::InvalidState => Next::End(e),
            _ => Next::Ask,
        }
    }

    /// What is left to do once the group is connected.
    fn rest(&mut self) -> Next {
        if let Some((publish, keep)) = self.offer {
            return Next::Offer { publish, keep };
        }
        match &self.answer {
            Some(answer) if answer.heal => Next::Heal,
            _ => {
                self.ready = true;
                Next::Ready
            }
        }
    }

    fn lose(&mut self, error: Error) -> Next {
        self.lost = Some(error.clone());
        Next::Lost(error)
    }

    fn fail(&mut self, error: Error) -> Next {
        if is_permanent(&error) {
            self.in_step = false;
            return Next::End(error);
        }
        self.lose(error)
    }

    /// True if a step that `reduced` nothing needs a barrier of its members before the vote. A reduction shows that all members have come up, healed
    /// where they had to; without one the first to vote would go on, or leave at the end of the run, while others still heal from it.
    pub fn needs_barrier(&self, reduced: bool) -> bool {
        self.in_step && self.lost.is_none() && !reduced
    }

    /// All reductions of the step have ended: `error` is the first that failed, `least_contributors` the smallest number of
    /// contributors of those that did not. The vote to cast; its answer goes to [`decided`](Self::decided).
    ///
    /// Errors: the step's own, if it ends the run, and `InvalidState` without a quorum, or before all that it asks for is done.
    pub fn vote(&mut self, error: Option<Error>, least_contributors: Option<u32>) -> Result<RankVote, Error> {
        let Some(answer) = self.answer.as_ref().filter(|_| self.in_step) else {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "there is no quorum to vote on: call start_quorum first",
            ));
        };
        if !self.ready && self.lost.is_none() {
            // A peer may wait for this rank's snapshot, or the state may be that of an earlier step (INV-5).
            return Err(Error::new(
                ErrorKind::InvalidState,
                "the quorum was begun and not finished: call start_quorum with the state before the vote",
            ));
        }
        let members = answer.replica_world_size;
        let against = self.lost.clone().or(error).or_else(|| {
            let text = if members < self.rules.min_replicas {
                format!(
                    "{members} replicas take part; min_replicas is {}",
                    self.rules.min_replicas
                )
            } else if least_contributors == Some(0) {
                "no replica contributed to a reduction of this step".to_string()
            } else {
                return None;
            };
            Some(Error::new(ErrorKind::Unavailable, text))
        });
        self.in_step = false;
        self.reduced = least_contributors.is_some();
        if let Some(e) = against.as_ref().filter(|e| is_permanent(e)) {
            // A lost vote would be repeated until the time limit, with the same end.
            self.commit_failures += 1;
            return Err(e.clone());
        }
        let key = self.key();
        self.attempt += 1;
        Ok(RankVote { key, against })
    }

    /// What a vote of this rank is about at present: the step of the quorum, also if this rank could not heal to it, so that the votes
    /// of the replica's ranks meet.
    pub fn key(&self) -> VoteKey {
        VoteKey {
            quorum_id: self.epoch.unwrap_or(Epoch(0)),
            step: self.answer.as_ref().map_or(self.step, |a| a.max_step),
            attempt: self.attempt,
        }
    }

    /// What the replica decided: true if the step is committed. Without an answer (`None`) it is not, here.
    ///
    /// Errors: `InvalidState` once more attempts in a row than `max_retries` allows did not commit: the run of this rank ends, and its
    /// replica's with it.
    pub fn decided(&mut self, commit: Option<bool>) -> Result<(), Error> {
        if commit == Some(true) {
            if self.reduced {
                self.batches = self.batches.saturating_add(self.contribution().1.into());
            }
            self.lineage = self.lineage.after(self.epoch.unwrap_or(Epoch(0)), self.step);
            self.step += 1;
            self.attempt = 0;
            self.commit_failures = 0;
            // Only now: one that became a member and lost the step is not sent out for ever.
            self.tries_outside = 0;
            return Ok(());
        }
        self.commit_failures += 1;
        match self.rules.max_retries {
            Some(most) if self.commit_failures > i64::from(most) => {
                let text = format!(
                    "step {} did not commit in {} attempts in a row, and max_retries is {most}: this replica gives up. See the errors of the \
                     attempts, and start it again",
                    self.step, self.commit_failures
                );
                Err(Error::new(ErrorKind::InvalidState, text))
            }
            _ => Ok(()),
        }
    }
}

/// A vote to cast.
#[derive(Debug, Clone)]
pub struct RankVote {
    /// What it is about.
    pub key: VoteKey,
    /// Why it is a no; `None` for a yes.
    pub against: Option<Error>,
}

/// True for an error that the same step would meet again in every other epoch: the call itself is wrong, or nothing here
/// can do it.
pub fn is_permanent(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported)
}

/// An error met while talking to `peer` with what it sent: never this rank's own fault, so never one that ends its run.
pub fn blame_peer(error: Error, peer: &str) -> Error {
    if !is_permanent(&error) {
        return error;
    }
    let text = format!("replica {peer} sent what cannot be used: {}", error.message());
    Error::new(ErrorKind::Protocol, text).with_source(error)
}

#[cfg(test)]
mod tests;
