//! The one task that owns the lighthouse's state.
//!
//! Calls come in as messages in the order of their arrival; what the state answers is carried out before the next
//! message is looked at. The queue is unbounded so that a guard can report from a drop; it stays short, because every
//! call has at most one message in it and waits for its answer.
//!
//! The state's clock is the time at which a message came, and ticks come through the same queue: what waits in the queue of a busy lighthouse is taken
//! in before a time-out that ended after it came. So no member is found silent whose heartbeat is here already.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use ftcore::{Epoch, Error, ErrorKind, Result};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::callers::Callers;
use super::journal::Journal;
use super::rates::{Rates, Throughput};
use super::reply::{Caller, Reply, Shelf};
use crate::serve::Line;
use protocol::quorum::{Action, Event, LighthouseState, Order, Status, Ticket};
use protocol::{AbortEpoch, Member, Quorum};

use crate::clock;

/// What a stream tells: of each kind the last, which is the one that counts for a slow reader.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pushes {
    pub(crate) abort: Option<AbortEpoch>,
    pub(crate) order: Option<Order>,
}

pub(crate) type Pushed = watch::Receiver<Pushes>;

pub(crate) enum Message {
    /// Something happened; `done` is told once it is taken in.
    Event {
        event: Event,
        done: Option<oneshot::Sender<()>>,
    },
    /// A call for a quorum.
    Join {
        member: Box<Member>,
        caller: Caller,
        /// It does not know whether its last call was answered.
        unanswered: bool,
        ticket: Ticket,
        reply: oneshot::Sender<Result<Reply>>,
    },
    /// A replica opens its event stream.
    Attach {
        replica_id: String,
        stream: u64,
        last_quorum_id: Epoch,
        reply: oneshot::Sender<Result<Pushed>>,
    },
    /// An operator wants something of a replica.
    Operate {
        replica: String,
        order: Order,
        ticket: Ticket,
        reply: oneshot::Sender<Result<Vec<String>>>,
    },
    /// A replica calls over this connection for the first time.
    Calling {
        line: u64,
        connection: Weak<Line>,
        replica_id: String,
    },
    /// All that had come over this connection, when that was asked for, is in the queue before this.
    Read { line: u64 },
    /// A connection over which replicas called has ended, by its peer or by this server.
    Ended { line: u64, by_peer: bool },
    /// A look at the state.
    Status {
        reply: oneshot::Sender<(Status, Counters, Vec<Throughput>)>,
    },
    /// Why is there no new quorum?
    Reason { reply: oneshot::Sender<String> },
}

/// What happened since the start, for the metrics.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) joins: u64,
    pub(crate) withdrawn: u64,
    pub(crate) rejected: u64,
    pub(crate) quorums: u64,
    pub(crate) epochs: u64,
    pub(crate) pushes: u64,
    pub(crate) heartbeats: u64,
}

/// The way to the task; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Lighthouse {
    messages: mpsc::UnboundedSender<(Instant, Message)>,
    /// Which task of this process it is: a later one has a greater number.
    task: u64,
    next: Arc<AtomicU64>,
    pub(crate) watched: Arc<Watched>,
}

/// Whether a dashboard is open, and a bell for when there is something to see.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    is_on: AtomicBool,
    bell: Notify,
}

impl Watched {
    pub(crate) fn set(&self, on: bool) {
        self.is_on.store(on, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn ring(&self) {
        if self.is_on() {
            self.bell.notify_one();
        }
    }

    /// Something happened since the last call.
    pub(crate) async fn changed(&self) {
        self.bell.notified().await;
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

impl Lighthouse {
    /// The way to a task, and what the task reads.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<(Instant, Message)>) {
        let (messages, inbox) = mpsc::unbounded_channel();
        let lighthouse = Self {
            messages,
            task: NEXT.fetch_add(1, Ordering::Relaxed),
            next: Arc::new(AtomicU64::new(1)),
            watched: Arc::default(),
        };
        (lighthouse, inbox)
    }

    /// See [`Line::is_new`].
    pub(super) fn task(&self) -> u64 {
        self.task
    }

    /// A number for a call or a stream.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Never blocks; a message after the end of the task is lost, like its answer.
    pub(crate) fn send(&self, message: Message) {
        let _ = self.messages.send((clock::now(), message));
    }

    /// Tells the task and waits until it has taken the event in. Errors: `Unavailable` if the task has ended.
    pub(crate) async fn tell(&self, event: Event) -> Result<()> {
        let (done, taken) = oneshot::channel();
        self.send(Message::Event {
            event,
            done: Some(done),
        });
        taken.await.map_err(|_| gone())
    }

    /// Why there is no new quorum.
    pub(crate) async fn reason(&self) -> String {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Reason { reply });
        answer.await.unwrap_or_else(|_| gone().message().to_string())
    }

    /// A look at the state; `None` while the lighthouse shuts down.
    pub(crate) async fn status(&self) -> Option<(Status, Counters, Vec<Throughput>)> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Status { reply });
        answer.await.ok()
    }
}

struct Actor {
    state: LighthouseState,
    journal: Journal,
    /// Why this lighthouse may answer no more.
    over: Option<Error>,
    /// The epoch that was delivered last.
    delivered: Epoch,
    /// The newest epoch that was not, because it could not be recorded.
    put_off: Option<Epoch>,
    /// By ticket: what the caller holds and wants, and the way to it.
    calls: HashMap<Ticket, (Caller, oneshot::Sender<Result<Reply>>)>,
    shelf: Shelf,
    watched: Arc<Watched>,
    /// Empty unless it is watched.
    rates: Rates,
    /// By replica id: the present stream and its sending side.
    streams: HashMap<String, (u64, watch::Sender<Pushes>)>,
    operators: HashMap<Ticket, oneshot::Sender<Result<Vec<String>>>>,
    counters: Counters,
    /// When the last message came: the state's clock.
    now: Instant,
    /// A longer time without a message, of which every tick is one, is an absence of this lighthouse itself.
    away_after: Duration,
    heartbeat_timeout: Duration,
    callers: Callers,
    /// Until then the end of a connection says nothing: its peer may have given it up while the lighthouse was away.
    discounted_until: Option<Instant>,
}

/// Starts the task on the present runtime. Who was not heard while the task itself did not run for longer than `away_after` is not blamed.
///
/// The task ends, with the reason, once the journal says that this lighthouse may deliver nothing more: its open calls and streams end with it.
pub(crate) fn start(
    state: LighthouseState,
    tick: Duration,
    away_after: Duration,
    heartbeat_timeout: Duration,
    journal: Journal,
) -> (Lighthouse, JoinHandle<Error>) {
    let (lighthouse, mut inbox) = Lighthouse::new();
    let mut actor = Actor {
        state,
        journal,
        over: None,
        delivered: Epoch(0),
        put_off: None,
        calls: HashMap::new(),
        shelf: Shelf::default(),
        watched: Arc::clone(&lighthouse.watched),
        rates: Rates::default(),
        streams: HashMap::new(),
        operators: HashMap::new(),
        counters: Counters::default(),
        now: clock::now(),
        away_after,
        heartbeat_timeout,
        callers: Callers::default(),
        discounted_until: None,
    };
    let task = tokio::spawn(async move {
        while let Some((came, message)) = inbox.recv().await {
            actor.take(came, message).await;
            if let Some(why) = actor.over.take() {
                return why;
            }
        }
        gone()
    });
    let clock = lighthouse.messages.downgrade();
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let tick = Message::Event {
                event: Event::Tick,
                done: None,
            };
            let Some(messages) = clock.upgrade() else { return };
            if messages.send((clock::now(), tick)).is_err() {
                return;
            }
        }
    });
    (lighthouse, task)
}

impl Actor {
    async fn take(&mut self, came: Instant, message: Message) {
        self.tell_time(came).await;
        match message {
            Message::Event { event, done } => {
                match &event {
                    Event::Withdraw { ticket } if self.calls.remove(ticket).is_some() => {
                        self.counters.withdrawn += 1
                    }
                    Event::Detached { replica_id, stream } => self.forget_stream(replica_id, *stream),
                    Event::Heartbeat { .. } => self.counters.heartbeats += 1,
                    _ => {}
                }
                if matches!(event, Event::Tick) {
                    for replica_id in self.callers.gone(self.now) {
                        self.apply(Event::Disconnected { replica_id }).await;
                    }
                    // What could not be saved before is, as soon as there is room.
                    let _ = self.journal.written();
                }
                self.apply(event).await;
                if let Some(done) = done.filter(|_| self.over.is_none()) {
                    let _ = done.send(());
                }
            }
            Message::Join {
                member,
                caller,
                unanswered,
                ticket,
                reply,
            } => {
                // The caller may be gone already, and its withdrawal with it.
                if !reply.is_closed() {
                    self.counters.joins += 1;
                    if self.watched.is_on() {
                        self.rates.asks(&member.replica_id, member.step, self.now);
                    } else if !self.rates.is_empty() {
                        self.rates.clear();
                    }
                    self.calls.insert(ticket, (caller, reply));
                    if unanswered {
                        let replica_id = member.replica_id.clone();
                        self.apply(Event::Unanswered { replica_id }).await;
                    }
                    self.apply(Event::Join {
                        member: *member,
                        ticket,
                    })
                    .await;
                }
            }
            Message::Attach {
                replica_id,
                stream,
                last_quorum_id,
                reply,
            } => {
                let (sender, receiver) = watch::channel(Pushes::default());
                let former = self.streams.insert(replica_id.clone(), (stream, sender));
                let refused = self
                    .act(Event::Attached {
                        replica_id: replica_id.clone(),
                        stream,
                        last_quorum_id,
                    })
                    .await;
                match refused {
                    // Its caller is told so by the end of this task.
                    _ if self.over.is_some() => {}
                    Some(error) => {
                        self.forget_stream(&replica_id, stream);
                        if let Some(former) = former {
                            self.streams.insert(replica_id, former);
                        }
                        let _ = reply.send(Err(error));
                    }
                    None => {
                        tracing::debug!(replica_id, "attached");
                        let _ = reply.send(Ok(receiver));
                    }
                }
            }
            Message::Operate {
                replica,
                order,
                ticket,
                reply,
            } => {
                self.operators.insert(ticket, reply);
                self.apply(Event::Operate {
                    replica,
                    order,
                    ticket,
                })
                .await;
            }
            Message::Calling {
                line,
                connection,
                replica_id,
            } => {
                self.state.set_connected(&replica_id, true);
                self.callers.call(line, connection, replica_id);
            }
            Message::Read { line } => self.is_read(line).await,
            Message::Ended { line, by_peer } => {
                let discounted = self.discounted_until.is_some_and(|until| self.now < until);
                for id in self.callers.ended(line, by_peer && !discounted, self.now) {
                    self.state.set_connected(&id, false);
                }
                self.is_read(line).await;
            }
            Message::Status { reply } => {
                let rates = self.rates.list(self.now);
                let _ = reply.send((self.state.status(self.now), self.counters, rates));
            }
            Message::Reason { reply } => {
                let _ = reply.send(self.state.reason(self.now));
            }
        }
        for id in self.state.take_unread() {
            if !self.callers.read(&id) {
                let replica_id = id.to_string();
                self.apply(Event::Read { replica_id }).await;
            }
        }
    }

    /// What had come over the connection is taken in: the silence of those that call over it can be judged.
    async fn is_read(&mut self, line: u64) {
        for replica_id in self.callers.is_read(line) {
            self.apply(Event::Read { replica_id }).await;
        }
    }

    fn forget_stream(&mut self, replica_id: &str, stream: u64) {
        if self.streams.get(replica_id).is_some_and(|(s, _)| *s == stream) {
            self.streams.remove(replica_id);
        }
    }

    /// Takes in when the next message came, and the absence that it ends, if there was one.
    async fn tell_time(&mut self, came: Instant) {
        // Two threads that send at the same time may be in the queue in the other order.
        let time = came.saturating_duration_since(self.now);
        self.now = self.now.max(came);
        if time > self.away_after {
            tracing::warn!(
                ?time,
                "this lighthouse did not run for a while; no member is blamed for heartbeats that it did not receive"
            );
            self.callers.forgive();
            self.discounted_until = self.now.checked_add(self.heartbeat_timeout);
            self.apply(Event::Away { time }).await;
        }
    }

    async fn apply(&mut self, event: Event) {
        let _ = self.act(event).await;
    }

    /// Carries out what the state wants; gives back the refusal of an attach.
    ///
    /// Nothing is answered that this lighthouse may not say: a quorum's record is saved before it is delivered, and every other answer comes
    /// after a look at whether it still leads. A save is such a look too. The pushes tell of evidence, and cost at most an attempt.
    async fn act(&mut self, event: Event) -> Option<Error> {
        let mut refused = None;
        let (mut confirmed, mut saves) = (false, false);
        if self.over.is_some() {
            return None;
        }
        for action in self.state.apply(event, self.now) {
            let allowed = match &action {
                Action::Save(record) => self.journal.save(record).await.map(|()| confirmed = true),
                Action::Push { .. } => Ok(()),
                _ if confirmed => Ok(()),
                _ => self.journal.confirm().await.map(|()| confirmed = true),
            };
            if let Err(error) = allowed {
                self.over = Some(error);
                return None;
            }
            match action {
                Action::Save(_) => saves = true,
                Action::Deliver { tickets, quorum } => match self.journal.written() {
                    Ok(()) => self.deliver(&tickets, &quorum),
                    Err(error) => self.put_off(&tickets, &quorum, &error),
                },
                Action::Reject { ticket, error } => {
                    self.counters.rejected += 1;
                    self.watched.ring();
                    if let Some((_, reply)) = self.calls.remove(&ticket) {
                        let _ = reply.send(Err(error));
                    }
                }
                // No member has it, and the ids of a lighthouse that starts without a record may be lower.
                Action::Push { event, .. } if self.put_off == Some(event.quorum_id) => {}
                Action::Push { to, event } => {
                    tracing::info!(
                        epoch = %event.quorum_id,
                        reason = event.reason,
                        told = to.len(),
                        "epoch aborted"
                    );
                    self.watched.ring();
                    for id in to {
                        if let Some((_, sender)) = self.streams.get(&id) {
                            self.counters.pushes += 1;
                            sender.send_modify(|told| told.abort = Some(event.clone()));
                        }
                    }
                }
                Action::Order { to, order } => {
                    if let Some((_, sender)) = self.streams.get(&to) {
                        self.counters.pushes += 1;
                        sender.send_modify(|told| told.order = Some(order));
                    }
                }
                Action::Operated { ticket, outcome } => {
                    // An eviction is to hold after a restart, too.
                    let recorded = if saves { self.journal.written() } else { Ok(()) };
                    let outcome = outcome.and_then(|told| match recorded {
                        Ok(()) => Ok(told),
                        Err(error) => Err(unrecorded(&told, error)),
                    });
                    if let Some(reply) = self.operators.remove(&ticket) {
                        let _ = reply.send(outcome);
                    }
                }
                Action::Refuse { error, .. } => refused = Some(error),
            }
        }
        refused
    }

    /// A quorum that is not recorded is told to no member, and neither is its end; its members ask again.
    fn put_off(&mut self, tickets: &[Ticket], quorum: &Quorum, error: &Error) {
        if quorum.quorum_id != self.delivered {
            self.put_off = Some(quorum.quorum_id);
        }
        for ticket in tickets {
            if let Some((_, reply)) = self.calls.remove(ticket) {
                let _ = reply.send(Err(error.clone()));
            }
        }
    }

    fn deliver(&mut self, tickets: &[Ticket], quorum: &Arc<Quorum>) {
        self.counters.quorums += 1;
        if self.watched.is_on() {
            self.rates.tells(quorum, self.now);
        }
        if quorum.quorum_id != self.delivered {
            self.counters.epochs += 1;
            self.watched.ring();
            (self.delivered, self.put_off) = (quorum.quorum_id, None);
            tracing::info!(
                epoch = %quorum.quorum_id,
                size = quorum.participants.len(),
                members = named(quorum),
                "quorum"
            );
        }
        let mut replies = self.shelf.replies(quorum, SystemTime::now());
        for (nth, ticket) in tickets.iter().enumerate() {
            if let Some((caller, reply)) = self.calls.remove(ticket) {
                let _ = reply.send(replies.to(nth, caller));
            }
        }
    }
}

/// The error of an eviction that the disk did not take.
fn unrecorded(evicted: &[String], error: Error) -> Error {
    let text = format!(
        "{} is out now, but a lighthouse that starts again would not know: {}",
        evicted.join(", "),
        error.message()
    );
    Error::new(ErrorKind::Unavailable, text).with_source(error)
}

/// The most ids in a line of the log.
const MAX_NAMED: usize = 16;

/// The members for the log.
fn named(quorum: &Quorum) -> String {
    let first: Vec<&str> = quorum.ids().take(MAX_NAMED).collect();
    match quorum.participants.len().saturating_sub(MAX_NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// The error of a call whose lighthouse is shutting down, or leads no more.
pub(crate) fn gone() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "the lighthouse shuts down or leads no more",
    )
}

#[cfg(test)]
pub(crate) mod tests;
