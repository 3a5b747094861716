//! Turns the quorum requests of a replica's ranks into one request of the replica, without IO.
//!
//! The lighthouse is asked only while a live call of every rank waits; if one goes away, so does the replica's request
//! (L24). No rank speaks for the others: their wishes are combined, and if their steps or histories differ, the replica as a
//! whole holds no step and heals (L08).

use std::collections::BTreeMap;

use ftcore::{Epoch, Error, ErrorKind, Step};

use crate::member::Joining;
use crate::quorum::Ticket;
use crate::told::Told;

/// What one rank asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankRequest {
    /// The step of its state.
    pub step: Step,
    /// No newcomers, please.
    pub shrink_only: bool,
    /// At step 0, take the state of one replica.
    pub init_sync: bool,
    /// Steps in a row that did not commit.
    pub commit_failures: i64,
    /// The history of its state; empty if not told.
    pub lineage: String,
    /// The quorum that it is configured for; 0 if none or not told.
    pub last_quorum_id: Epoch,
    /// It fetched its state from a peer at this very step, and has not committed since.
    pub healed: bool,
    /// How many batches led to its state, over all replicas that contributed.
    pub batches_committed: i64,
    /// Counts the questions of this rank. The same one asked again, because its answer was lost, keeps its number; 0 if not told.
    pub question: i64,
    /// What the replica does if it is far behind.
    pub joining: Joining,
    /// The run ends with this step.
    pub is_last: bool,
    /// The rank needs no ids of all members: its own part of a large quorum is enough.
    pub own_part: bool,
    /// Of the replica: its last call was given up before the answer came, which others may have.
    pub unanswered: bool,
}

/// What the server shall do.
#[derive(Debug, Clone)]
pub enum GatherAction {
    /// Ask the lighthouse on behalf of the replica.
    Ask {
        /// Names the request; the answer comes back under it.
        call: u64,
        /// All ranks' requests in one.
        request: RankRequest,
    },
    /// Give up that request.
    Cancel {
        /// Which.
        call: u64,
    },
    /// Answer this rank's call.
    Deliver {
        /// The call.
        ticket: Ticket,
        /// The rank.
        rank: u32,
        /// Its wish, which its answer depends on.
        init_sync: bool,
        /// The quorum.
        told: Told,
    },
    /// Answer this call with an error.
    Reject {
        /// The call.
        ticket: Ticket,
        /// Why.
        error: Error,
    },
}

/// The open requests of one replica.
#[derive(Debug)]
pub struct GatherState {
    world_size: u32,
    open: BTreeMap<u32, (RankRequest, Ticket)>,
    asking: Option<u64>,
    /// The last call was given up.
    unanswered: bool,
    calls: u64,
    /// The last quorum that was given to the ranks, and which question of each it answered.
    given: Option<(Told, BTreeMap<u32, i64>)>,
}

impl GatherState {
    /// No requests yet, `world_size` ranks.
    pub fn new(world_size: u32) -> Self {
        Self {
            world_size,
            open: BTreeMap::new(),
            asking: None,
            unanswered: false,
            calls: 0,
            given: None,
        }
    }

    /// A rank asks.
    pub fn ask(&mut self, rank: u32, request: RankRequest, ticket: Ticket) -> Vec<GatherAction> {
        if rank >= self.world_size {
            let text = format!(
                "rank {rank} asks for a quorum; the replica has {} ranks",
                self.world_size
            );
            return vec![GatherAction::Reject {
                ticket,
                error: Error::invalid(text),
            }];
        }
        // The answer was lost, and the other ranks are in the step already: this one gets the same.
        let given = self.given.as_ref().filter(|(_, answered)| {
            request.question != 0 && self.open.is_empty() && answered.get(&rank) == Some(&request.question)
        });
        if let Some((told, _)) = given {
            return vec![GatherAction::Deliver {
                ticket,
                rank,
                init_sync: request.init_sync,
                told: told.clone(),
            }];
        }
        let mut actions: Vec<GatherAction> = self.cancel().into_iter().collect();
        if let Some((_, old)) = self.open.remove(&rank) {
            let error = Error::new(
                ErrorKind::Aborted,
                format!("a newer call of rank {rank} replaced this one"),
            );
            actions.push(GatherAction::Reject { ticket: old, error });
        }
        let clash = self
            .open
            .iter()
            .find_map(|(other, (r, _))| disagreement(*other, r, rank, &request));
        self.open.insert(rank, (request, ticket));
        if let Some(text) = clash {
            actions.extend(self.reject_all(&Error::new(ErrorKind::Mismatch, text)));
        } else if self.open.len() == usize::try_from(self.world_size).unwrap_or(usize::MAX) {
            self.calls += 1;
            self.asking = Some(self.calls);
            actions.push(GatherAction::Ask {
                call: self.calls,
                request: self.combined(),
            });
        }
        actions
    }

    /// The caller went away.
    pub fn withdraw(&mut self, ticket: Ticket) -> Vec<GatherAction> {
        let before = self.open.len();
        self.open.retain(|_, (_, t)| *t != ticket);
        if self.open.len() == before {
            Vec::new()
        } else {
            self.cancel().into_iter().collect()
        }
    }

    /// The lighthouse answered, or could not: all ranks learn it at once (L28).
    pub fn answered(&mut self, call: u64, answer: Result<Told, Error>) -> Vec<GatherAction> {
        if self.asking != Some(call) {
            return Vec::new();
        }
        self.asking = None;
        self.unanswered = answer.is_err();
        match answer {
            Ok(told) => {
                let open = std::mem::take(&mut self.open);
                let answered = open.iter().map(|(rank, (r, _))| (*rank, r.question)).collect();
                self.given = Some((told.clone(), answered));
                open.into_iter()
                    .map(|(rank, (request, ticket))| GatherAction::Deliver {
                        ticket,
                        rank,
                        init_sync: request.init_sync,
                        told: told.clone(),
                    })
                    .collect()
            }
            Err(error) => self.reject_all(&error),
        }
    }

    /// A rank that waits for a quorum, if one does.
    pub fn asks(&self) -> Option<u32> {
        self.open.keys().next().copied()
    }

    /// The ranks that have not asked.
    pub fn missing(&self) -> Vec<u32> {
        (0..self.world_size)
            .filter(|r| !self.open.contains_key(r))
            .collect()
    }

    fn cancel(&mut self) -> Option<GatherAction> {
        let call = self.asking.take()?;
        self.unanswered = true;
        Some(GatherAction::Cancel { call })
    }

    fn reject_all(&mut self, error: &Error) -> Vec<GatherAction> {
        std::mem::take(&mut self.open)
            .into_values()
            .map(|(_, ticket)| GatherAction::Reject {
                ticket,
                error: error.clone(),
            })
            .collect()
    }

    fn combined(&self) -> RankRequest {
        let mut all = self.open.values().map(|(r, _)| r);
        let mut request = all.next().cloned().unwrap_or_default();
        request.unanswered = self.unanswered;
        let mut is_torn = false;
        for r in all {
            request.shrink_only |= r.shrink_only;
            request.healed |= r.healed;
            request.is_last |= r.is_last;
            request.own_part &= r.own_part;
            request.joining = match (request.joining, r.joining) {
                (Joining::Untold, _) | (_, Joining::Untold) => Joining::Untold,
                (one, other) => one.max(other),
            };
            request.commit_failures = request.commit_failures.max(r.commit_failures);
            // A rank without a reduction of its own counts none.
            request.batches_committed = request.batches_committed.max(r.batches_committed);
            if request.last_quorum_id != r.last_quorum_id {
                // Some ranks did not get through the last configuration: only a new epoch brings them together.
                request.commit_failures = request.commit_failures.max(1);
                request.last_quorum_id = request.last_quorum_id.max(r.last_quorum_id);
            }
            is_torn |= request.step != r.step || request.lineage != r.lineage;
        }
        if is_torn {
            // A rank has not applied, or not fetched, what the others have. The replica as a whole holds no step: it comes as one that has
            // nothing, and heals on all its ranks.
            request.step = Step(0);
            request.lineage.clear();
            request.healed = false;
            request.batches_committed = 0;
            request.commit_failures = request.commit_failures.max(1);
        }
        request
    }
}

/// Why two ranks of one replica cannot ask together.
fn disagreement(a: u32, ra: &RankRequest, b: u32, rb: &RankRequest) -> Option<String> {
    (ra.init_sync != rb.init_sync).then(|| {
        format!(
            "rank {a} asks with init_sync = {}, rank {b} of the same replica with {}",
            ra.init_sync, rb.init_sync
        )
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::member::Quorum;

    fn at(step: i64) -> RankRequest {
        RankRequest {
            step: Step(step),
            ..RankRequest::default()
        }
    }

    fn asked(actions: &[GatherAction]) -> Option<(u64, RankRequest)> {
        actions.iter().find_map(|a| match a {
            GatherAction::Ask { call, request } => Some((*call, request.clone())),
            _ => None,
        })
    }

    #[test]
    fn the_lighthouse_is_asked_once_all_ranks_wait_and_all_get_the_answer() {
        let mut s = GatherState::new(2);
        assert!(s.ask(1, at(4), 11).is_empty());
        assert_eq!(s.missing(), vec![0]);
        let (call, request) = asked(&s.ask(0, at(4), 10)).unwrap();
        assert_eq!(request.step, Step(4));
        let quorum = Told::Members(Arc::new(Quorum::default()));
        let tickets: Vec<_> = s
            .answered(call, Ok(quorum))
            .into_iter()
            .map(|a| match a {
                GatherAction::Deliver { ticket, rank, .. } => (rank, ticket),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(tickets, vec![(0, 10), (1, 11)]);
    }

    #[test]
    fn l08_wishes_of_all_ranks_count_not_only_the_last_ones() {
        let mut s = GatherState::new(3);
        s.ask(
            0,
            RankRequest {
                shrink_only: true,
                last_quorum_id: Epoch(9),
                ..at(4)
            },
            1,
        );
        s.ask(
            1,
            RankRequest {
                commit_failures: 2,
                last_quorum_id: Epoch(9),
                ..at(4)
            },
            2,
        );
        let (_, request) = asked(&s.ask(
            2,
            RankRequest {
                last_quorum_id: Epoch(9),
                ..at(4)
            },
            3,
        ))
        .unwrap();
        let expected = RankRequest {
            shrink_only: true,
            commit_failures: 2,
            last_quorum_id: Epoch(9),
            ..at(4)
        };
        assert_eq!(request, expected);
    }

    #[test]
    fn l08_a_replica_whose_ranks_hold_different_states_comes_as_one_that_has_none() {
        let of = |step, lineage: &str| RankRequest {
            lineage: lineage.into(),
            ..at(step)
        };
        for (a, b, torn) in [
            (of(4, "a"), of(5, "b"), true),
            (of(4, "a"), of(4, "b"), true),
            (of(0, "a"), of(0, ""), true),
            (of(4, "a"), of(4, "a"), false),
        ] {
            let mut s = GatherState::new(2);
            s.ask(0, a.clone(), 1);
            let (_, request) = asked(&s.ask(1, b.clone(), 2)).unwrap();
            let expected = if torn { (0, "", 1) } else { (4, "a", 0) };
            let got = (request.step.0, request.lineage.as_str(), request.commit_failures);
            assert_eq!(got, expected, "{a:?} {b:?}");
        }
    }

    #[test]
    fn a_rank_whose_answer_was_lost_gets_it_again_while_the_others_are_in_the_step() {
        let question = |question| RankRequest { question, ..at(4) };
        let mut s = GatherState::new(2);
        s.ask(0, question(7), 1);
        let (call, _) = asked(&s.ask(1, question(3), 2)).unwrap();
        let quorum = Quorum {
            quorum_id: Epoch(9),
            ..Quorum::default()
        };
        s.answered(call, Ok(Told::Members(Arc::new(quorum))));
        let again = s.ask(0, question(7), 4);
        let [
            GatherAction::Deliver {
                ticket: 4,
                rank: 0,
                told,
                ..
            },
        ] = &again[..]
        else {
            panic!("{again:?}")
        };
        assert!(matches!(told, Told::Members(quorum) if quorum.quorum_id == Epoch(9)));
        assert!(
            s.ask(0, question(8), 5).is_empty(),
            "the next question waits for the others"
        );
        assert!(
            asked(&s.ask(1, question(3), 6)).is_some(),
            "rank 0 has left that quorum, so it is not given again"
        );
    }

    #[test]
    fn that_a_call_was_not_answered_is_told_with_the_next_one_and_with_no_later_one() {
        let given = || Ok(Told::Members(Arc::new(Quorum::default())));
        let mut s = GatherState::new(1);
        let call = |actions: Vec<GatherAction>| {
            let (call, request) = asked(&actions).unwrap();
            (call, request.unanswered)
        };
        let (first, unanswered) = call(s.ask(0, at(4), 1));
        assert!(!unanswered);
        // The rank went away, and comes again.
        s.withdraw(1);
        let (second, unanswered) = call(s.ask(0, at(4), 2));
        assert!(unanswered);
        assert!(s.answered(first, given()).is_empty());
        s.answered(second, Err(Error::timeout("no answer")));
        let (third, unanswered) = call(s.ask(0, at(4), 3));
        assert!(unanswered);
        s.answered(third, given());
        assert!(!call(s.ask(0, at(5), 4)).1);
    }

    #[test]
    fn ranks_that_were_configured_differently_are_all_told() {
        let mut s = GatherState::new(2);
        s.ask(0, at(4), 1);
        let other = RankRequest {
            init_sync: true,
            ..at(4)
        };
        let actions = s.ask(1, other, 2);
        let told = |a: &GatherAction| matches!(a, GatherAction::Reject { error, .. } if error.kind() == ErrorKind::Mismatch);
        assert!(actions.len() == 2 && actions.iter().all(told), "{actions:?}");
        assert_eq!(s.missing(), vec![0, 1]);
    }

    #[test]
    fn ranks_of_different_epochs_ask_for_a_new_one() {
        let mut s = GatherState::new(2);
        s.ask(
            0,
            RankRequest {
                last_quorum_id: Epoch(9),
                ..at(4)
            },
            1,
        );
        let (_, request) = asked(&s.ask(
            1,
            RankRequest {
                last_quorum_id: Epoch(7),
                ..at(4)
            },
            2,
        ))
        .unwrap();
        assert_eq!((request.last_quorum_id, request.commit_failures), (Epoch(9), 1));
    }

    #[test]
    fn l24_a_rank_that_goes_away_takes_the_replicas_request_with_it() {
        let mut s = GatherState::new(2);
        s.ask(0, at(4), 1);
        let (call, _) = asked(&s.ask(1, at(4), 2)).unwrap();
        let actions = s.withdraw(1);
        assert!(
            matches!(actions[..], [GatherAction::Cancel { call: c }] if c == call),
            "{actions:?}"
        );
        assert!(
            s.answered(call, Ok(Told::Members(Arc::default()))).is_empty(),
            "too late"
        );
        let (again, _) = asked(&s.ask(0, at(4), 3)).unwrap();
        assert_ne!(again, call);
    }

    #[test]
    fn l28_a_failed_request_is_told_to_all_ranks() {
        let mut s = GatherState::new(2);
        s.ask(0, at(4), 1);
        let (call, _) = asked(&s.ask(1, at(4), 2)).unwrap();
        let actions = s.answered(call, Err(Error::new(ErrorKind::Unavailable, "no lighthouse")));
        let ok = |a: &GatherAction| matches!(a, GatherAction::Reject { error, .. } if error.is_retryable());
        assert!(actions.len() == 2 && actions.iter().all(ok), "{actions:?}");
    }

    #[test]
    fn a_newer_call_of_a_rank_replaces_its_older_one_and_asks_again() {
        let mut s = GatherState::new(1);
        let (first, _) = asked(&s.ask(0, at(4), 1)).unwrap();
        let actions = s.ask(0, at(5), 2);
        assert!(
            matches!(actions[0], GatherAction::Cancel { call } if call == first),
            "{actions:?}"
        );
        assert!(
            matches!(actions[1], GatherAction::Reject { ticket: 1, .. }),
            "{actions:?}"
        );
        assert_eq!(asked(&actions).unwrap().1.step, Step(5));
        assert!(matches!(
            s.ask(1, at(5), 3)[..],
            [GatherAction::Reject { ticket: 3, .. }]
        ));
    }
}
