//! The one task that owns a manager server's state ([`protocol::replica`]): calls come in as messages, and what the state
//! wants is carried out before the next message is looked at. Quorum calls to the lighthouse run beside it and come back
//! as messages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ftcore::{Error, ErrorKind, Result};
use protocol::quorum::Ticket;
use protocol::replica::{ReplicaAction, ReplicaEvent, ReplicaRules, ReplicaState};
use protocol::{AbortEpoch, QuorumResult, Told};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use crate::clock;

use super::counts::Counts;
use super::uplink::{TELL_FIRST, Uplink};

pub(crate) enum Message {
    /// A rank asks for a quorum: the event, with the place for its answer.
    Quorum {
        event: ReplicaEvent,
        ticket: Ticket,
        reply: oneshot::Sender<Result<QuorumResult>>,
    },
    /// A rank votes, or gives up.
    Vote {
        event: ReplicaEvent,
        ticket: Ticket,
        reply: oneshot::Sender<Result<bool>>,
    },
    /// Anything that needs no answer.
    Event(ReplicaEvent),
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
    killed: watch::Receiver<Option<String>>,
    pub(crate) uplink: Uplink,
    pub(crate) counts: Arc<Counts>,
    pub(crate) world_size: u32,
}

impl Manager {
    /// A number for a call or a stream.
    pub(crate) fn ticket(&self) -> Ticket {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Never blocks; a message after the end of the task is lost, like its answer.
    pub(crate) fn send(&self, message: Message) {
        let _ = self.messages.send(message);
    }

    /// Never blocks.
    pub(crate) fn tell(&self, event: ReplicaEvent) {
        self.send(Message::Event(event));
    }

    /// The last abort, and the ones to come.
    pub(crate) fn aborts(&self) -> watch::Receiver<Option<AbortEpoch>> {
        self.aborted.clone()
    }

    /// Why the processes of this replica end, once they shall.
    pub(crate) fn kills(&self) -> watch::Receiver<Option<String>> {
        self.killed.clone()
    }

    /// The ranks that a quorum, and a vote, wait for.
    pub(crate) async fn missing(&self) -> (Vec<u32>, Vec<u32>) {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Missing { reply });
        answer.await.unwrap_or_default()
    }
}

struct Actor {
    state: ReplicaState,
    uplink: Uplink,
    /// To send the lighthouse's answers back to this task.
    messages: mpsc::WeakUnboundedSender<Message>,
    quorums: HashMap<Ticket, oneshot::Sender<Result<QuorumResult>>>,
    votes: HashMap<Ticket, oneshot::Sender<Result<bool>>>,
    /// The running call to the lighthouse.
    asking: HashMap<u64, AbortHandle>,
    /// Gone once the server closes, which ends the streams of those who watch.
    aborted: Option<watch::Sender<Option<AbortEpoch>>>,
    killed: watch::Sender<Option<String>>,
    /// Closed once the lighthouse was told why the replica cannot go on.
    telling: Option<watch::Receiver<()>>,
}

/// Starts the task on the present runtime.
pub(crate) fn start(uplink: Uplink, rules: ReplicaRules) -> Manager {
    let (messages, mut inbox) = mpsc::unbounded_channel();
    let (aborted, last_abort) = watch::channel(None);
    let (kill, killed) = watch::channel(None);
    let world_size = rules.world_size;
    let mut actor = Actor {
        state: ReplicaState::new(rules),
        uplink: uplink.clone(),
        messages: messages.downgrade(),
        quorums: HashMap::new(),
        votes: HashMap::new(),
        asking: HashMap::new(),
        aborted: Some(aborted),
        killed: kill,
        telling: None,
    };
    tokio::spawn(async move {
        loop {
            let due = actor.state.next_deadline();
            let tick = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // What has arrived counts before time-outs do.
                biased;
                message = inbox.recv() => match message {
                    Some(message) => actor.take(message),
                    None => return,
                },
                () = tick => actor.apply(ReplicaEvent::Tick),
            }
        }
    });
    Manager {
        messages,
        next: Arc::new(AtomicU64::new(1)),
        aborted: last_abort,
        killed,
        uplink,
        counts: Arc::default(),
        world_size,
    }
}

impl Actor {
    fn take(&mut self, message: Message) {
        match message {
            Message::Quorum { event, ticket, reply } => {
                // The caller may be gone already, and its withdrawal with it.
                if !reply.is_closed() {
                    self.quorums.insert(ticket, reply);
                    self.apply(event);
                }
            }
            Message::Vote { event, ticket, reply } => {
                if !reply.is_closed() {
                    self.votes.insert(ticket, reply);
                    self.apply(event);
                }
            }
            Message::Event(event) => {
                if let ReplicaEvent::Withdraw { ticket } = &event {
                    self.quorums.remove(ticket);
                    self.votes.remove(ticket);
                }
                self.apply(event);
            }
            Message::Metadata { rank, reply } => {
                let _ = reply.send(self.state.metadata(rank).map(str::to_string));
            }
            Message::Missing { reply } => {
                let _ = reply.send(self.state.missing());
            }
        }
    }

    fn apply(&mut self, event: ReplicaEvent) {
        let actions = self.state.apply(event, clock::now());
        let (last, size) = self.state.last_quorum();
        self.uplink.set_last_quorum(last, size);
        self.uplink.set_out(self.state.is_out());
        for action in actions {
            match action {
                ReplicaAction::Ask {
                    call,
                    request,
                    deadline,
                } => {
                    self.uplink.begin_heartbeats();
                    let (uplink, messages) = (self.uplink.clone(), self.messages.clone());
                    let task = tokio::spawn(async move {
                        let event = match uplink.quorum(request, deadline).await {
                            Ok(Told::Members(quorum)) => {
                                let answer = Ok(quorum);
                                ReplicaEvent::Answered { call, answer }
                            }
                            Ok(Told::Parts(parts)) => ReplicaEvent::Placed { call, parts },
                            Err(error) => {
                                let answer = Err(error);
                                ReplicaEvent::Answered { call, answer }
                            }
                        };
                        if let Some(messages) = messages.upgrade() {
                            let _ = messages.send(Message::Event(event));
                        }
                    });
                    // One call at a time: an earlier one was answered or cancelled.
                    self.asking.clear();
                    self.asking.insert(call, task.abort_handle());
                }
                ReplicaAction::Cancel { call } => {
                    // Dropping the call withdraws it at the lighthouse.
                    if let Some(task) = self.asking.remove(&call) {
                        task.abort();
                    }
                }
                ReplicaAction::Quorum { ticket, answer } => {
                    if let Some(reply) = self.quorums.remove(&ticket) {
                        self.reply(reply, answer);
                    }
                }
                ReplicaAction::Decide { ticket, answer } => {
                    if let Some(reply) = self.votes.remove(&ticket) {
                        self.reply(reply, answer);
                    }
                }
                ReplicaAction::Push(event) => {
                    tracing::info!(
                        epoch = %event.quorum_id,
                        reason = event.reason,
                        "the epoch is over"
                    );
                    if let Some(aborted) = &self.aborted {
                        aborted.send_replace(Some(event));
                    }
                }
                ReplicaAction::Fail { reason } => {
                    tracing::warn!(
                        replica = self.uplink.replica_id(),
                        reason,
                        "this replica cannot go on"
                    );
                    let uplink = self.uplink.clone();
                    let (told, telling) = watch::channel(());
                    self.telling = Some(telling);
                    tokio::spawn(async move {
                        uplink.fail(reason).await;
                        drop(told);
                    });
                }
                ReplicaAction::Kill(reason) => {
                    self.killed.send_replace(Some(reason));
                }
                ReplicaAction::EndWatches => self.aborted = None,
            }
        }
    }

    /// Answers a rank, but first lets the lighthouse hear why the replica cannot go on: the rank may end its process at the answer, and
    /// this server with it.
    fn reply<T: Send + 'static>(&self, reply: oneshot::Sender<T>, answer: T) {
        match self
            .telling
            .clone()
            .filter(|telling| telling.has_changed().is_ok())
        {
            None => drop(reply.send(answer)),
            Some(mut telling) => {
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(TELL_FIRST, telling.changed()).await;
                    let _ = reply.send(answer);
                });
            }
        }
    }
}

/// The error of a call whose server is shutting down.
pub(crate) fn gone() -> Error {
    Error::new(ErrorKind::Unavailable, "the manager server is shutting down")
}
