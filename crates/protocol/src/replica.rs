//! The manager server's logic: one quorum request and one vote out of those of a replica's ranks, and whether all of them are there.
//!
//! **Liveness is per rank and means progress.** A replica goes on as a whole, so its servers answer for all its ranks, not
//! for the threads that happen to run them:
//!
//! - A rank that is *gone* (its process ended, or its watch stream broke and did not come back within
//!   [`ReplicaRules::grace`]) ends the replica: every call is told so, and the lighthouse at once.
//! - A rank *without progress* for [`ReplicaRules::progress_timeout`] takes the replica out of the quorum, so that the
//!   others do not wait for it. It is not ended: should the rank move again, the replica asks again.
//!
//! A rank that waits in a call makes no progress and needs none. One that waits in a collective does so for that one's
//! time-out at most, which is shorter than the one for progress. Nothing is expected of a rank before it first asks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind};

use crate::assignment::QuorumResult;
use crate::commit::{CommitAction, CommitState, VoteKey};
use crate::gather::{GatherAction, GatherState, RankRequest};
use crate::member::{AbortEpoch, Quorum};
use crate::quorum::{Order, OrderKind, Ticket};
use crate::told::Told;

/// What stays the same for the life of the server.
#[derive(Debug, Clone)]
pub struct ReplicaRules {
    /// This replica.
    pub replica_id: String,
    /// Its number of ranks.
    pub world_size: u32,
    /// A rank that neither waits in a call nor shows progress for this long takes the replica out of the quorum.
    pub progress_timeout: Duration,
    /// A rank whose watch stream broke is gone after this time.
    pub grace: Duration,
}

/// Something that happened.
#[derive(Debug, Clone)]
pub enum ReplicaEvent {
    /// A rank asks for a quorum.
    Ask {
        /// Which.
        rank: u32,
        /// What it asks.
        request: RankRequest,
        /// Where others fetch its state.
        metadata: String,
        /// Until when it waits.
        deadline: Instant,
        /// The call.
        ticket: Ticket,
    },
    /// A rank votes.
    Vote {
        /// Which.
        rank: u32,
        /// On what.
        key: VoteKey,
        /// Yes or no.
        vote: bool,
        /// The call.
        ticket: Ticket,
    },
    /// A rank cannot go on, for a reason that no other epoch would change.
    GiveUp {
        /// Which.
        rank: u32,
        /// The reason.
        why: String,
        /// The call.
        ticket: Ticket,
    },
    /// The operator ends the replica.
    Killed {
        /// What the operator says.
        why: String,
    },
    /// A call is over.
    Withdraw {
        /// Which.
        ticket: Ticket,
    },
    /// The lighthouse answered the replica's call.
    Answered {
        /// Which.
        call: u64,
        /// What it said.
        answer: Result<Arc<Quorum>, Error>,
    },
    /// The lighthouse answered the replica's call with the places of its ranks.
    Placed {
        /// Which call.
        call: u64,
        /// By rank.
        parts: Arc<[QuorumResult]>,
    },
    /// An epoch is over, says the lighthouse.
    Aborted(AbortEpoch),
    /// An operator wants something of this replica, says the lighthouse.
    Ordered(Order),
    /// An epoch failed, says a rank. The other ranks need not wait for the way over the lighthouse.
    Reported {
        /// Which rank.
        rank: u32,
        /// Which epoch.
        quorum_id: Epoch,
        /// Why.
        reason: String,
    },
    /// A rank opened its watch stream.
    Watched {
        /// Which.
        rank: u32,
        /// Names the stream; a later one of the same rank replaces it.
        watch: u64,
    },
    /// A watch stream broke.
    Unwatched {
        /// Whose.
        rank: u32,
        /// Which.
        watch: u64,
    },
    /// The process of a rank ended: there is proof.
    Ended {
        /// Which.
        rank: u32,
        /// Its watch stream at that time.
        watch: u64,
    },
    /// A rank says that its training thread moved.
    Progress {
        /// Which.
        rank: u32,
    },
    /// A rank leaves in good order: nothing is expected of it any more.
    Left {
        /// Which.
        rank: u32,
    },
    /// The server closes: ranks that wait, or ask later, are told `why`.
    Close {
        /// The reason.
        why: Error,
    },
    /// Time passed.
    Tick,
}

/// What the server shall do, in this order.
#[derive(Debug, Clone)]
pub enum ReplicaAction {
    /// Ask the lighthouse for a quorum on behalf of the replica; the answer comes back as [`ReplicaEvent::Answered`].
    Ask {
        /// Names the request.
        call: u64,
        /// All ranks' requests in one.
        request: RankRequest,
        /// Until when: when the first rank's time is up, so is the replica's.
        deadline: Instant,
    },
    /// Give up that request.
    Cancel {
        /// Which.
        call: u64,
    },
    /// Answer a rank's quorum call.
    Quorum {
        /// The call.
        ticket: Ticket,
        /// The answer.
        answer: Result<QuorumResult, Error>,
    },
    /// Answer a rank's vote.
    Decide {
        /// The call.
        ticket: Ticket,
        /// The answer.
        answer: Result<bool, Error>,
    },
    /// Tell the ranks that watch.
    Push(AbortEpoch),
    /// Tell the lighthouse that this replica cannot go on, or not now. Answers that follow wait for that, a little.
    Fail {
        /// Why, naming the rank.
        reason: String,
    },
    /// End the processes of all ranks, those that watch, for this reason.
    Kill(String),
    /// End the streams of those that watch: nothing more will come.
    EndWatches,
}

/// What is known of one rank.
#[derive(Debug, Default)]
struct Presence {
    watch: Option<u64>,
    /// Since when a stream that it had is gone.
    unwatched: Option<Instant>,
    /// Its last sign of progress; nothing before it first asks.
    progress: Option<Instant>,
}

/// The state of a manager server.
#[derive(Debug)]
pub struct ReplicaState {
    rules: ReplicaRules,
    gather: GatherState,
    commit: CommitState,
    quorums: BTreeMap<Ticket, (u32, Instant)>,
    votes: BTreeMap<Ticket, u32>,
    /// Set once the replica has ended: why.
    over: Option<Error>,
    metadata: BTreeMap<u32, String>,
    aborted: Option<AbortEpoch>,
    /// The id of the newest quorum that was given to a rank, and its number of members.
    last_quorum: (Epoch, u64),
    ranks: BTreeMap<u32, Presence>,
    /// The replica is to leave after its next step; and whether the quorum that was given last said so to its ranks. All of them are told
    /// with the same quorum, so that they leave after the same step.
    drains: bool,
    told_to_drain: bool,
    /// The ranks without progress for which the lighthouse was told.
    stalled: BTreeSet<u32>,
}

impl ReplicaState {
    /// No calls yet.
    pub fn new(rules: ReplicaRules) -> Self {
        Self {
            gather: GatherState::new(rules.world_size),
            commit: CommitState::new(rules.world_size),
            rules,
            quorums: BTreeMap::new(),
            votes: BTreeMap::new(),
            over: None,
            metadata: BTreeMap::new(),
            aborted: None,
            last_quorum: (Epoch(0), 0),
            ranks: BTreeMap::new(),
            drains: false,
            told_to_drain: false,
            stalled: BTreeSet::new(),
        }
    }

    /// The id of the newest quorum that was given to a rank, and its number of members; 0 if none.
    pub fn last_quorum(&self) -> (Epoch, u64) {
        self.last_quorum
    }

    /// True while this replica cannot go on, for good or for now. Its server then shows no sign of life to the lighthouse, which
    /// would have others wait for it.
    pub fn is_out(&self) -> bool {
        self.over.is_some() || !self.stalled.is_empty()
    }

    /// Where `rank` offers its state, as it said with its last request.
    pub fn metadata(&self, rank: u32) -> Option<&str> {
        self.metadata.get(&rank).map(String::as_str)
    }

    /// The ranks that a quorum, and a vote, wait for.
    pub fn missing(&self) -> (Vec<u32>, Vec<u32>) {
        let voted: BTreeSet<u32> = self.commit.open().into_iter().map(|(rank, _)| rank).collect();
        let absent = (0..self.rules.world_size).filter(|r| !voted.contains(r));
        (self.gather.missing(), absent.collect())
    }

    /// When a [`ReplicaEvent::Tick`] is due, if nothing else happens before.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.over.is_some() {
            return None;
        }
        let waiting = self.waiting();
        let times = self.ranks.iter().flat_map(|(rank, p)| {
            let gone = p.unwatched.and_then(|t| t.checked_add(self.rules.grace));
            let idle = !waiting.contains(rank) && !self.stalled.contains(rank);
            let stuck = p.progress.filter(|_| idle);
            let stuck = stuck.and_then(|t| t.checked_add(self.rules.progress_timeout));
            gone.into_iter().chain(stuck)
        });
        times.min()
    }

    /// Takes in one event.
    pub fn apply(&mut self, event: ReplicaEvent, now: Instant) -> Vec<ReplicaAction> {
        let mut actions = Vec::new();
        match event {
            ReplicaEvent::Ask {
                rank,
                request,
                metadata,
                deadline,
                ticket,
            } => {
                if let Some(error) = self.over.clone() {
                    actions.push(ReplicaAction::Quorum {
                        ticket,
                        answer: Err(error),
                    });
                } else {
                    if rank < self.rules.world_size {
                        self.metadata.insert(rank, metadata);
                        // From its first question on, progress is expected of a rank.
                        self.ranks.entry(rank).or_default().progress.get_or_insert(now);
                        self.moved(rank, now);
                    }
                    self.quorums.insert(ticket, (rank, deadline));
                    let gathered = self.gather.ask(rank, request, ticket);
                    self.gathered(gathered, now, &mut actions);
                }
            }
            ReplicaEvent::Vote {
                rank,
                key,
                vote,
                ticket,
            } => {
                if let Some(error) = self.over.clone() {
                    actions.push(ReplicaAction::Decide {
                        ticket,
                        answer: Err(error),
                    });
                } else {
                    self.moved(rank, now);
                    self.votes.insert(ticket, rank);
                    let voted = self.commit.vote(rank, key, vote, ticket);
                    self.voted(voted, now, &mut actions);
                }
            }
            ReplicaEvent::GiveUp { rank, why, ticket } => {
                let answer = if rank < self.rules.world_size {
                    let text = format!("rank {rank} of this replica cannot go on: {why}");
                    self.fail(Error::unsupported(text), &mut actions);
                    Ok(false)
                } else {
                    Err(Error::invalid(format!(
                        "rank {rank} gives up; the replica has {} ranks",
                        self.rules.world_size
                    )))
                };
                actions.push(ReplicaAction::Decide { ticket, answer });
            }
            ReplicaEvent::Killed { why } => {
                let text = format!("the operator ended this replica: {why}");
                self.fail(Error::unsupported(text), &mut actions);
            }
            ReplicaEvent::Close { why } => {
                self.end(why, &mut actions);
                actions.push(ReplicaAction::EndWatches);
            }
            ReplicaEvent::Withdraw { ticket } => {
                if let Some(rank) = self.votes.remove(&ticket) {
                    self.commit.withdraw(ticket);
                    self.moved(rank, now);
                }
                if let Some((rank, _)) = self.quorums.remove(&ticket) {
                    self.moved(rank, now);
                    let gathered = self.gather.withdraw(ticket);
                    self.gathered(gathered, now, &mut actions);
                }
            }
            ReplicaEvent::Answered { call, answer } => {
                self.answered(call, answer.map(Told::Members), now, &mut actions);
            }
            ReplicaEvent::Placed { call, parts } => {
                self.answered(call, Ok(Told::Parts(parts)), now, &mut actions);
            }
            ReplicaEvent::Aborted(event) => self.abort(event, &mut actions),
            ReplicaEvent::Ordered(order) => self.obey(&order, &mut actions),
            ReplicaEvent::Reported {
                rank,
                quorum_id,
                reason,
            } => {
                if quorum_id == self.last_quorum.0 {
                    let event = AbortEpoch {
                        quorum_id,
                        reason: format!("{} reported: rank {rank}: {reason}", self.rules.replica_id),
                        departed: Vec::new(),
                    };
                    self.abort(event, &mut actions);
                }
            }
            ReplicaEvent::Watched { rank, watch } if rank < self.rules.world_size => {
                let presence = self.ranks.entry(rank).or_default();
                presence.watch = Some(watch);
                presence.unwatched = None;
            }
            ReplicaEvent::Unwatched { rank, watch } => {
                let presence = self.ranks.get_mut(&rank).filter(|p| p.watch == Some(watch));
                if let Some(presence) = presence {
                    presence.watch = None;
                    presence.unwatched = Some(now);
                }
            }
            ReplicaEvent::Ended { rank, watch } => {
                // A later stream of the rank is a sign of life after that proof.
                let newer = |p: &Presence| p.watch.is_some_and(|w| w != watch);
                if self.ranks.get(&rank).is_some_and(|p| !newer(p)) {
                    self.gone(rank, "its process ended", &mut actions);
                }
            }
            ReplicaEvent::Progress { rank } => {
                if self.ranks.get(&rank).is_some_and(|p| p.progress.is_some()) {
                    self.moved(rank, now);
                }
            }
            ReplicaEvent::Left { rank } => {
                self.ranks.remove(&rank);
            }
            ReplicaEvent::Watched { .. } | ReplicaEvent::Tick => {}
        }
        self.end_hopeless_votes(now, &mut actions);
        self.look(now, &mut actions);
        actions
    }

    /// A rank that asks for a quorum has left the step, so votes on it cannot be decided: who waits for it is told at once.
    fn end_hopeless_votes(&mut self, now: Instant, actions: &mut Vec<ReplicaAction>) {
        let Some(rank) = self.gather.asks().filter(|_| !self.votes.is_empty()) else {
            return;
        };
        let text =
            format!("rank {rank} of this replica asks for the next quorum and will not vote on this step");
        let rejected = self.commit.reject_open(&Error::new(ErrorKind::Aborted, text));
        self.voted(rejected, now, actions);
    }

    /// The ranks that wait in a call.
    fn waiting(&self) -> BTreeSet<u32> {
        let asking = self.quorums.values().map(|(rank, _)| *rank);
        asking.chain(self.votes.values().copied()).collect()
    }

    fn moved(&mut self, rank: u32, now: Instant) {
        if let Some(p) = self.ranks.get_mut(&rank).and_then(|p| p.progress.as_mut()) {
            *p = now;
        }
        self.stalled.remove(&rank);
    }

    /// Finds the ranks that are gone or do not move.
    fn look(&mut self, now: Instant, actions: &mut Vec<ReplicaAction>) {
        if self.over.is_some() {
            return;
        }
        let since = |t: Option<Instant>| t.map_or(Duration::ZERO, |t| now.saturating_duration_since(t));
        let gone = self
            .ranks
            .iter()
            .find(|(_, p)| p.unwatched.is_some() && since(p.unwatched) >= self.rules.grace)
            .map(|(rank, _)| *rank);
        if let Some(rank) = gone {
            let how = format!(
                "its connection broke and did not come back within {:?}",
                self.rules.grace
            );
            self.gone(rank, &how, actions);
            return;
        }
        let waiting = self.waiting();
        let limit = self.rules.progress_timeout;
        let stuck: Vec<u32> = self
            .ranks
            .iter()
            .filter(|(rank, p)| {
                p.progress.is_some()
                    && since(p.progress) >= limit
                    && !waiting.contains(rank)
                    && !self.stalled.contains(rank)
            })
            .map(|(rank, _)| *rank)
            .collect();
        for rank in stuck {
            self.stalled.insert(rank);
            let reason = format!("rank {rank} made no progress for {limit:?}");
            actions.push(ReplicaAction::Fail { reason });
        }
    }

    fn gone(&mut self, rank: u32, how: &str, actions: &mut Vec<ReplicaAction>) {
        let text = format!(
            "rank {rank} of this replica is gone: {how}; start the replica again: it goes on as a whole"
        );
        self.fail(Error::new(ErrorKind::PeerLost, text).with_peer(rank), actions);
    }

    /// The replica ends because of one of its ranks, and the lighthouse learns it at once.
    fn fail(&mut self, why: Error, actions: &mut Vec<ReplicaAction>) {
        if self.over.is_none() {
            // Before the answers: a rank that gets one may end its process, and the server with it.
            let reason = why.message().to_string();
            actions.push(ReplicaAction::Fail { reason });
            self.end(why, actions);
        }
    }

    fn obey(&mut self, order: &Order, actions: &mut Vec<ReplicaAction>) {
        match order.kind {
            OrderKind::Drain => self.drains = true,
            OrderKind::Evict => {
                // The lighthouse knows.
                let text = format!(
                    "replica {} takes no part in this job: {}. Start it again",
                    self.rules.replica_id,
                    order.told()
                );
                self.end(Error::new(ErrorKind::Conflict, text), actions);
                // The lighthouse tells the others of the epoch; here a rank may be in it as well.
                let event = AbortEpoch {
                    quorum_id: self.last_quorum.0,
                    reason: order.told(),
                    departed: vec![self.rules.replica_id.clone()],
                };
                self.abort(event, actions);
            }
            OrderKind::Kill => actions.push(ReplicaAction::Kill(order.told())),
        }
    }

    /// The replica ends here: ranks that wait, or ask later, learn why.
    fn end(&mut self, why: Error, actions: &mut Vec<ReplicaAction>) {
        let error = self.over.get_or_insert(why).clone();
        for ticket in std::mem::take(&mut self.votes).into_keys() {
            self.commit.withdraw(ticket);
            let answer = Err(error.clone());
            actions.push(ReplicaAction::Decide { ticket, answer });
        }
        for ticket in std::mem::take(&mut self.quorums).into_keys() {
            // The lighthouse must not count the replica in either.
            for action in self.gather.withdraw(ticket) {
                if let GatherAction::Cancel { call } = action {
                    actions.push(ReplicaAction::Cancel { call });
                }
            }
            let answer = Err(error.clone());
            actions.push(ReplicaAction::Quorum { ticket, answer });
        }
    }

    fn answered(
        &mut self,
        call: u64,
        answer: Result<Told, Error>,
        now: Instant,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let gathered = self.gather.answered(call, answer);
        if gathered.iter().any(|a| matches!(a, GatherAction::Deliver { .. })) {
            self.told_to_drain = self.drains;
        }
        self.gathered(gathered, now, actions);
    }

    fn gathered(&mut self, gathered: Vec<GatherAction>, now: Instant, actions: &mut Vec<ReplicaAction>) {
        for action in gathered {
            match action {
                GatherAction::Ask { call, request } => {
                    let deadline = self.quorums.values().map(|(_, deadline)| *deadline).min();
                    actions.push(ReplicaAction::Ask {
                        call,
                        request,
                        deadline: deadline.unwrap_or(now),
                    });
                }
                GatherAction::Cancel { call } => actions.push(ReplicaAction::Cancel { call }),
                GatherAction::Deliver {
                    ticket,
                    rank,
                    init_sync,
                    told,
                } => {
                    let id = self.rules.replica_id.as_str();
                    // A spare is in no quorum.
                    if let Some(quorum) = told.membership(id) {
                        self.last_quorum = quorum;
                    }
                    let mut answer = told.place(id, rank, init_sync);
                    self.moved(rank, now);
                    if let Ok(answer) = &mut answer {
                        answer.draining = self.told_to_drain;
                    }
                    self.answer(ticket, answer, actions);
                }
                GatherAction::Reject { ticket, error } => {
                    if let Some((rank, _)) = self.quorums.get(&ticket) {
                        self.moved(*rank, now);
                    }
                    self.answer(ticket, Err(error), actions);
                }
            }
        }
    }

    fn answer(
        &mut self,
        ticket: Ticket,
        answer: Result<QuorumResult, Error>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if self.quorums.remove(&ticket).is_some() {
            actions.push(ReplicaAction::Quorum { ticket, answer });
        }
    }

    fn voted(&mut self, voted: Vec<CommitAction>, now: Instant, actions: &mut Vec<ReplicaAction>) {
        for action in voted {
            let (tickets, answer) = match action {
                CommitAction::Decide { tickets, commit } => (tickets, Ok(commit)),
                CommitAction::Reject { ticket, error } => (vec![ticket], Err(error)),
            };
            for ticket in tickets {
                if let Some(rank) = self.votes.remove(&ticket) {
                    self.moved(rank, now);
                    let answer = answer.clone();
                    actions.push(ReplicaAction::Decide { ticket, answer });
                }
            }
        }
    }

    /// Passes an abort on to those that watch, unless it says nothing new.
    fn abort(&mut self, event: AbortEpoch, actions: &mut Vec<ReplicaAction>) {
        match &mut self.aborted {
            Some(known) if known.quorum_id > event.quorum_id => return,
            Some(known) if known.quorum_id == event.quorum_id => {
                let before = known.departed.len();
                for id in event.departed {
                    if !known.departed.contains(&id) {
                        known.departed.push(id);
                    }
                }
                if known.departed.len() == before {
                    return;
                }
                known.reason = event.reason;
            }
            newest => *newest = Some(event),
        }
        actions.extend(self.aborted.clone().map(ReplicaAction::Push));
    }
}

#[cfg(test)]
mod tests;
