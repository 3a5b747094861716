//! The one task that owns the state of a manager server: gathering, votes, checkpoint addresses, the last abort.
//!
//! Calls come in as messages; quorum calls to the lighthouse run beside it and come back as messages.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::uplink::Uplink;
use protocol::QuorumResult;
use protocol::assignment::assign;
use protocol::commit::{CommitAction, CommitState, VoteKey};
use protocol::gather::{GatherAction, GatherState, RankRequest};
use protocol::quorum::Ticket;
use protocol::{AbortEpoch, Quorum};

pub(crate) enum Message {
    /// A rank asks for a quorum.
    Quorum {
        rank: u32,
        request: RankRequest,
        metadata: String,
        deadline: Instant,
        ticket: Ticket,
        reply: oneshot::Sender<Result<QuorumResult>>,
    },
    /// A rank votes.
    Vote {
        rank: u32,
        key: VoteKey,
        vote: bool,
        ticket: Ticket,
        reply: oneshot::Sender<Result<bool>>,
    },
    /// A rank cannot go on, for a reason that no other epoch would change.
    GiveUp {
        rank: u32,
        why: String,
        reply: oneshot::Sender<Result<bool>>,
    },
    /// The server closes: whoever waits, or asks later, is told `why`.
    Close { why: Error },
    /// A call is over.
    Withdraw { ticket: Ticket },
    /// The lighthouse answered the replica's call.
    Answered { call: u64, answer: Result<Quorum> },
    /// An epoch is over: from the lighthouse, or from a rank of this replica.
    Aborted(AbortEpoch),
    /// Where does this rank offer its checkpoint?
    Metadata {
        rank: u32,
        reply: oneshot::Sender<Option<String>>,
    },
    /// Who has not asked for a quorum, and who has not voted?
    Missing {
        reply: oneshot::Sender<(Vec<u32>, Vec<u32>)>,
    },
}

/// The way to the task; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Manager {
    messages: mpsc::UnboundedSender<Message>,
    next: Arc<AtomicU64>,
    aborted: watch::Receiver<Option<AbortEpoch>>,
    pub(crate) uplink: Uplink,
}

impl Manager {
    /// A number for a call.
    pub(crate) fn ticket(&self) -> Ticket {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Never blocks; a message after the end of the task is lost, like its answer.
    pub(crate) fn send(&self, message: Message) {
        let _ = self.messages.send(message);
    }

    /// The last abort, and the ones to come.
    pub(crate) fn aborts(&self) -> watch::Receiver<Option<AbortEpoch>> {
        self.aborted.clone()
    }

    /// The ranks that a quorum, and a vote, wait for.
    pub(crate) async fn missing(&self) -> (Vec<u32>, Vec<u32>) {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Missing { reply });
        answer.await.unwrap_or_default()
    }
}

struct Actor {
    world_size: u32,
    uplink: Uplink,
    /// To send the lighthouse's answers back to this task.
    messages: mpsc::WeakUnboundedSender<Message>,
    gather: GatherState,
    commit: CommitState,
    quorum_calls: HashMap<Ticket, (Instant, oneshot::Sender<Result<QuorumResult>>)>,
    vote_calls: HashMap<Ticket, oneshot::Sender<Result<bool>>>,
    /// Set once a rank has given up or the server closes.
    over: Option<Error>,
    /// The running call to the lighthouse.
    asking: HashMap<u64, AbortHandle>,
    metadata: BTreeMap<u32, String>,
    /// Gone once the server closes, which ends the streams of those who watch.
    aborted: Option<watch::Sender<Option<AbortEpoch>>>,
}

/// Starts the task on the present runtime.
pub(crate) fn start(uplink: Uplink, world_size: u32) -> Manager {
    let (messages, mut inbox) = mpsc::unbounded_channel();
    let (aborted, last_abort) = watch::channel(None);
    let mut actor = Actor {
        world_size,
        uplink: uplink.clone(),
        messages: messages.downgrade(),
        gather: GatherState::new(world_size),
        commit: CommitState::new(world_size),
        quorum_calls: HashMap::new(),
        vote_calls: HashMap::new(),
        over: None,
        asking: HashMap::new(),
        metadata: BTreeMap::new(),
        aborted: Some(aborted),
    };
    tokio::spawn(async move {
        while let Some(message) = inbox.recv().await {
            actor.take(message);
        }
    });
    Manager {
        messages,
        next: Arc::new(AtomicU64::new(1)),
        aborted: last_abort,
        uplink,
    }
}

impl Actor {
    fn take(&mut self, message: Message) {
        match message {
            Message::Quorum {
                rank,
                request,
                metadata,
                deadline,
                ticket,
                reply,
            } => {
                // The caller may be gone already, and its withdrawal with it.
                if let Some(error) = &self.over {
                    let _ = reply.send(Err(error.clone()));
                } else if !reply.is_closed() {
                    if rank < self.world_size {
                        self.metadata.insert(rank, metadata);
                    }
                    self.quorum_calls.insert(ticket, (deadline, reply));
                    let actions = self.gather.ask(rank, request, ticket);
                    self.gathered(actions);
                }
            }
            Message::Vote {
                rank,
                key,
                vote,
                ticket,
                reply,
            } => {
                if let Some(error) = &self.over {
                    let _ = reply.send(Err(error.clone()));
                } else if !reply.is_closed() {
                    self.vote_calls.insert(ticket, reply);
                    let actions = self.commit.vote(rank, key, vote, ticket);
                    self.voted(actions);
                }
            }
            Message::GiveUp { rank, why, reply } if rank < self.world_size => {
                self.give_up(rank, &why);
                let _ = reply.send(Ok(false));
            }
            Message::GiveUp { rank, reply, .. } => {
                let text = format!("rank {rank} gives up; the replica has {} ranks", self.world_size);
                let _ = reply.send(Err(Error::invalid(text)));
            }
            Message::Close { why } => {
                self.end(why);
                self.aborted = None;
            }
            Message::Withdraw { ticket } => {
                self.vote_calls.remove(&ticket);
                self.commit.withdraw(ticket);
                self.quorum_calls.remove(&ticket);
                let actions = self.gather.withdraw(ticket);
                self.gathered(actions);
            }
            Message::Answered { call, answer } => {
                if self.asking.remove(&call).is_some() {
                    let actions = self.gather.answered(call, answer.map(Arc::new));
                    self.gathered(actions);
                }
            }
            Message::Aborted(event) => self.abort(event),
            Message::Metadata { rank, reply } => {
                let _ = reply.send(self.metadata.get(&rank).cloned());
            }
            Message::Missing { reply } => {
                let voted = self.commit.open();
                let absent = (0..self.world_size)
                    .filter(|r| !voted.iter().any(|(v, _)| v == r))
                    .collect();
                let _ = reply.send((self.gather.missing(), absent));
            }
        }
    }

    fn give_up(&mut self, rank: u32, why: &str) {
        self.end(Error::unsupported(format!(
            "rank {rank} of this replica cannot go on: {why}"
        )));
    }

    /// The replica ends here: whoever waits, or asks later, learns why.
    fn end(&mut self, why: Error) {
        let error = self.over.get_or_insert(why).clone();
        let votes: Vec<Ticket> = self.vote_calls.keys().copied().collect();
        for ticket in votes {
            self.commit.withdraw(ticket);
            self.answer_vote(ticket, Err(error.clone()));
        }
        let quorums: Vec<Ticket> = self.quorum_calls.keys().copied().collect();
        for ticket in quorums {
            // The lighthouse must not count the replica in either.
            let actions = self.gather.withdraw(ticket);
            self.gathered(actions);
            self.answer(ticket, Err(error.clone()));
        }
    }

    fn gathered(&mut self, actions: Vec<GatherAction>) {
        for action in actions {
            match action {
                GatherAction::Ask { call, request } => self.ask(call, request),
                GatherAction::Cancel { call } => {
                    // Dropping the call withdraws it at the lighthouse.
                    if let Some(task) = self.asking.remove(&call) {
                        task.abort();
                    }
                }
                GatherAction::Deliver {
                    ticket,
                    rank,
                    init_sync,
                    quorum,
                } => {
                    self.uplink.set_last_quorum(quorum.quorum_id);
                    let result = assign(self.uplink.replica_id(), rank, &quorum, init_sync);
                    self.answer(ticket, result);
                }
                GatherAction::Reject { ticket, error } => self.answer(ticket, Err(error)),
            }
        }
    }

    fn answer(&mut self, ticket: Ticket, result: Result<QuorumResult>) {
        if let Some((_, reply)) = self.quorum_calls.remove(&ticket) {
            let _ = reply.send(result);
        }
    }

    fn ask(&mut self, call: u64, request: RankRequest) {
        self.uplink.begin_heartbeats();
        // When the first rank's time is up, so is the replica's.
        let Some(deadline) = self.quorum_calls.values().map(|(d, _)| *d).min() else {
            return;
        };
        let (uplink, messages) = (self.uplink.clone(), self.messages.clone());
        let task = tokio::spawn(async move {
            let answer = uplink.quorum(request, deadline).await;
            if let Some(messages) = messages.upgrade() {
                let _ = messages.send(Message::Answered { call, answer });
            }
        });
        self.asking.insert(call, task.abort_handle());
    }

    fn voted(&mut self, actions: Vec<CommitAction>) {
        for action in actions {
            match action {
                CommitAction::Decide { tickets, commit } => {
                    for ticket in tickets {
                        self.answer_vote(ticket, Ok(commit));
                    }
                }
                CommitAction::Reject { ticket, error } => self.answer_vote(ticket, Err(error)),
            }
        }
    }

    fn answer_vote(&mut self, ticket: Ticket, result: Result<bool>) {
        if let Some(reply) = self.vote_calls.remove(&ticket) {
            let _ = reply.send(result);
        }
    }

    /// Passes an abort on to the watchers, unless it says nothing new.
    fn abort(&mut self, event: AbortEpoch) {
        let Some(aborted) = &self.aborted else { return };
        aborted.send_if_modified(|last| match last {
            Some(known) if known.quorum_id > event.quorum_id => false,
            Some(known) if known.quorum_id == event.quorum_id => {
                let news: Vec<String> = event
                    .departed
                    .iter()
                    .filter(|d| !known.departed.contains(d))
                    .cloned()
                    .collect();
                if news.is_empty() {
                    return false;
                }
                known.departed.extend(news);
                known.reason.clone_from(&event.reason);
                true
            }
            other => {
                tracing::info!(
                    epoch = event.quorum_id,
                    reason = event.reason,
                    "the epoch is over"
                );
                *other = Some(event);
                true
            }
        });
    }
}

/// The error of a call whose server is shutting down.
pub(crate) fn gone() -> Error {
    Error::new(ErrorKind::Unavailable, "the manager server is shutting down")
}
