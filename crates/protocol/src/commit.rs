//! Does this replica commit the step? The AND over its ranks' votes, without IO.
//!
//! A vote belongs to one key (epoch, step, attempt) and to one live call. Only votes of the same key meet; a vote whose
//! caller went away never happened; a decided key stays decided (L02, INV-6).

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use ftcore::{Epoch, Error, ErrorKind, Step};

use crate::quorum::Ticket;

/// How many decisions are remembered for late and repeated calls.
const MAX_DECIDED: usize = 64;

/// What a vote is about. Ordered: a rank only ever moves forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct VoteKey {
    /// The epoch; 0 from clients that do not tell it.
    pub quorum_id: Epoch,
    /// The step.
    pub step: Step,
    /// The number of the try at this step and epoch, as the ranks count it.
    pub attempt: i64,
}

impl fmt::Display for VoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, attempt {}", self.step, self.attempt)?;
        if self.quorum_id != Epoch(0) {
            write!(f, ", epoch {}", self.quorum_id)?;
        }
        Ok(())
    }
}

/// What the server shall answer.
#[derive(Debug, Clone)]
pub enum CommitAction {
    /// The decision for these calls.
    Decide {
        /// The calls.
        tickets: Vec<Ticket>,
        /// True: all ranks voted for it.
        commit: bool,
    },
    /// An error for this call.
    Reject {
        /// The call.
        ticket: Ticket,
        /// Why.
        error: Error,
    },
}

#[derive(Debug)]
struct Vote {
    key: VoteKey,
    vote: bool,
    ticket: Ticket,
}

#[derive(Debug)]
struct Decided {
    key: VoteKey,
    commit: bool,
}

/// The votes of one replica.
#[derive(Debug)]
pub struct CommitState {
    world_size: u32,
    open: BTreeMap<u32, Vote>,
    decided: VecDeque<Decided>,
}

impl CommitState {
    /// No votes yet, `world_size` ranks.
    pub fn new(world_size: u32) -> Self {
        Self {
            world_size,
            open: BTreeMap::new(),
            decided: VecDeque::new(),
        }
    }

    /// A rank votes. A key without epoch and attempt (an older client's) gets the attempt from here: a decision has
    /// taken a live vote of every rank, so the number of decisions at this step is the number of each rank's past
    /// attempts.
    pub fn vote(&mut self, rank: u32, mut key: VoteKey, vote: bool, ticket: Ticket) -> Vec<CommitAction> {
        let mut actions = Vec::new();
        if rank >= self.world_size {
            let error = Error::invalid(format!(
                "rank {rank} votes; the replica has {} ranks",
                self.world_size
            ));
            return vec![CommitAction::Reject { ticket, error }];
        }
        if key.quorum_id == Epoch(0) && key.attempt == 0 {
            let past = self
                .decided
                .iter()
                .filter(|d| d.key.quorum_id == Epoch(0) && d.key.step == key.step)
                .count();
            key.attempt = i64::try_from(past).unwrap_or(i64::MAX);
        } else if let Some(d) = self.decided.iter().find(|d| d.key == key) {
            // A repeated call. It learns what was decided, unless it takes back the vote that the decision rests on.
            if d.commit && !vote {
                let text = format!("rank {rank} votes against {key}, which was committed with its vote");
                return vec![CommitAction::Reject {
                    ticket,
                    error: Error::new(ErrorKind::Mismatch, text),
                }];
            }
            return vec![CommitAction::Decide {
                tickets: vec![ticket],
                commit: d.commit,
            }];
        }
        if let Some(old) = self.open.remove(&rank) {
            let text = format!("a newer call of rank {rank} replaced its vote on {}", old.key);
            actions.push(CommitAction::Reject {
                ticket: old.ticket,
                error: Error::new(ErrorKind::Aborted, text),
            });
        }
        // Ranks only move forward, so of two keys the older one can never be decided any more.
        let newest = self.open.iter().map(|(r, v)| (v.key, *r)).max();
        if let Some((other, by)) = newest.filter(|(other, _)| *other > key) {
            actions.push(CommitAction::Reject {
                ticket,
                error: behind(rank, key, by, other),
            });
            return actions;
        }
        let stale: Vec<u32> = self
            .open
            .iter()
            .filter(|(_, v)| v.key < key)
            .map(|(r, _)| *r)
            .collect();
        for r in stale {
            if let Some(v) = self.open.remove(&r) {
                actions.push(CommitAction::Reject {
                    ticket: v.ticket,
                    error: behind(r, v.key, rank, key),
                });
            }
        }
        self.open.insert(rank, Vote { key, vote, ticket });
        if self.open.len() == usize::try_from(self.world_size).unwrap_or(usize::MAX) {
            let votes = std::mem::take(&mut self.open);
            let commit = votes.values().all(|v| v.vote);
            if self.decided.len() == MAX_DECIDED {
                self.decided.pop_front();
            }
            self.decided.push_back(Decided { key, commit });
            actions.push(CommitAction::Decide {
                tickets: votes.values().map(|v| v.ticket).collect(),
                commit,
            });
        }
        actions
    }

    /// Ends the open votes, which cannot be decided any more, with `why`.
    pub fn reject_open(&mut self, why: &Error) -> Vec<CommitAction> {
        let open = std::mem::take(&mut self.open).into_values();
        open.map(|v| CommitAction::Reject {
            ticket: v.ticket,
            error: why.clone(),
        })
        .collect()
    }

    /// The caller went away: its vote never happened.
    pub fn withdraw(&mut self, ticket: Ticket) {
        self.open.retain(|_, v| v.ticket != ticket);
    }

    /// The ranks whose votes are open, and what they vote on.
    pub fn open(&self) -> Vec<(u32, VoteKey)> {
        self.open.iter().map(|(r, v)| (*r, v.key)).collect()
    }
}

fn behind(rank: u32, key: VoteKey, by: u32, other: VoteKey) -> Error {
    let text = format!("rank {rank} votes on {key}, but rank {by} already votes on {other}");
    Error::new(ErrorKind::Mismatch, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(quorum_id: u64, step: i64, attempt: i64) -> VoteKey {
        VoteKey {
            quorum_id: Epoch(quorum_id),
            step: Step(step),
            attempt,
        }
    }

    /// (ticket, decision) of all answers; a rejection is `None`.
    fn answers(actions: &[CommitAction]) -> Vec<(Ticket, Option<bool>)> {
        let mut all: Vec<_> = actions
            .iter()
            .flat_map(|a| match a {
                CommitAction::Decide { tickets, commit } => {
                    tickets.iter().map(|t| (*t, Some(*commit))).collect()
                }
                CommitAction::Reject { ticket, .. } => vec![(*ticket, None)],
            })
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn all_ranks_for_it_commits_and_one_against_it_does_not() {
        for (votes, commit) in [
            ([true, true], true),
            ([true, false], false),
            ([false, false], false),
        ] {
            let mut s = CommitState::new(2);
            assert_eq!(answers(&s.vote(0, key(7, 3, 0), votes[0], 10)), vec![]);
            assert_eq!(
                answers(&s.vote(1, key(7, 3, 0), votes[1], 11)),
                vec![(10, Some(commit)), (11, Some(commit))]
            );
        }
    }

    #[test]
    fn l02_a_vote_whose_caller_left_decides_nothing() {
        let mut s = CommitState::new(2);
        s.vote(0, key(0, 5, 0), true, 1);
        s.withdraw(1);
        assert_eq!(
            answers(&s.vote(1, key(0, 6, 0), true, 2)),
            vec![],
            "rank 1 alone decides nothing"
        );
        assert_eq!(
            answers(&s.vote(0, key(0, 6, 0), false, 3)),
            vec![(2, Some(false)), (3, Some(false))]
        );
    }

    #[test]
    fn l02_a_stale_vote_that_still_waits_is_rejected_when_another_rank_has_moved_on() {
        let mut s = CommitState::new(2);
        s.vote(0, key(7, 5, 0), true, 1);
        let actions = s.vote(1, key(7, 6, 0), true, 2);
        assert_eq!(answers(&actions), vec![(1, None)]);
        let CommitAction::Reject { error, .. } = &actions[0] else {
            panic!("{actions:?}")
        };
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(
            error.message().contains("step 5") && error.message().contains("step 6"),
            "{error}"
        );
        assert_eq!(
            answers(&s.vote(0, key(7, 5, 0), true, 3)),
            vec![(3, None)],
            "late: rejected as well"
        );
        assert_eq!(
            answers(&s.vote(0, key(7, 6, 0), true, 4)),
            vec![(2, Some(true)), (4, Some(true))]
        );
    }

    #[test]
    fn a_repeated_vote_on_a_decided_key_gets_that_decision_and_no_other() {
        let mut s = CommitState::new(2);
        s.vote(0, key(7, 5, 0), true, 1);
        s.vote(1, key(7, 5, 0), true, 2);
        assert_eq!(answers(&s.vote(0, key(7, 5, 0), true, 3)), vec![(3, Some(true))]);
        assert_eq!(
            answers(&s.vote(0, key(7, 5, 0), false, 4)),
            vec![(4, None)],
            "it cannot be taken back"
        );
        assert_eq!(
            answers(&s.vote(1, key(7, 5, 1), true, 5)),
            vec![],
            "another attempt needs all votes again"
        );
    }

    #[test]
    fn attempts_of_older_clients_are_counted_here() {
        let mut s = CommitState::new(2);
        s.vote(0, key(0, 1, 0), true, 1);
        assert_eq!(
            answers(&s.vote(1, key(0, 1, 0), false, 2)),
            vec![(1, Some(false)), (2, Some(false))]
        );
        assert_eq!(
            answers(&s.vote(0, key(0, 1, 0), true, 3)),
            vec![],
            "the second attempt, not the first's answer"
        );
        assert_eq!(
            answers(&s.vote(1, key(0, 1, 0), true, 4)),
            vec![(3, Some(true)), (4, Some(true))]
        );
    }

    #[test]
    fn a_rank_that_does_not_exist_and_a_superseded_call_are_rejected() {
        let mut s = CommitState::new(2);
        assert_eq!(answers(&s.vote(2, key(7, 1, 0), true, 1)), vec![(1, None)]);
        s.vote(0, key(7, 1, 0), true, 2);
        assert_eq!(answers(&s.vote(0, key(7, 1, 0), false, 3)), vec![(2, None)]);
        assert_eq!(
            answers(&s.vote(1, key(7, 1, 0), true, 4)),
            vec![(3, Some(false)), (4, Some(false))]
        );
    }

    proptest! {
        /// A commit rests on a live vote for exactly that key from every rank, whatever else happened.
        #[test]
        fn a_commit_has_the_live_vote_of_every_rank_for_the_same_key(
            events in prop::collection::vec((0u32..3, 1u64..3, 0i64..3, 0i64..2, any::<bool>(), 0u32..4), 1..80),
        ) {
            let mut s = CommitState::new(3);
            let mut live: BTreeMap<Ticket, (u32, VoteKey, bool)> = BTreeMap::new();
            let mut committed: BTreeMap<VoteKey, bool> = BTreeMap::new();
            for (ticket, (rank, quorum, step, attempt, vote, withdraw)) in events.into_iter().enumerate() {
                let ticket = ticket as Ticket;
                if withdraw == 0 {
                    let gone = live.iter().find(|(_, v)| v.0 == rank).map(|(t, _)| *t);
                    if let Some(t) = gone {
                        s.withdraw(t);
                        live.remove(&t);
                    }
                    continue;
                }
                let k = key(quorum, step, attempt);
                live.insert(ticket, (rank, k, vote));
                for action in s.vote(rank, k, vote, ticket) {
                    match action {
                        CommitAction::Reject { ticket, .. } => prop_assert!(live.remove(&ticket).is_some()),
                        CommitAction::Decide { tickets, commit } => {
                            let votes: Vec<_> = tickets.iter().map(|t| live.remove(t).expect("a live call")).collect();
                            let k = votes[0].1;
                            prop_assert!(votes.iter().all(|v| v.1 == k));
                            if let Some(before) = committed.get(&k) {
                                prop_assert_eq!(*before, commit);
                            } else {
                                let mut ranks: Vec<_> = votes.iter().map(|v| v.0).collect();
                                ranks.sort_unstable();
                                prop_assert_eq!(ranks, vec![0, 1, 2]);
                                prop_assert_eq!(commit, votes.iter().all(|v| v.2));
                                committed.insert(k, commit);
                            }
                        }
                    }
                }
            }
        }
    }
}
