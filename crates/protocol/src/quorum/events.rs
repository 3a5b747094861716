//! What goes into the quorum logic and what comes out of it: rules, events, actions, and its state as others see it.

use std::sync::Arc;
use std::time::Duration;

use ftcore::{Epoch, Error};

use super::{Departure, Moment, Order, Record, Totals};
use crate::member::{AbortEpoch, Member, Quorum};

/// Names one live call. Unique in the life of the server.
pub type Ticket = u64;

/// When a quorum may form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuorumRules {
    /// The least number of members.
    pub min_replicas: usize,
    /// The first quorum of a job waits for this many, however long that takes. Not applied when a waiting replica
    /// reports an earlier quorum: then the lighthouse restarted and the job goes on.
    pub initial_replicas: Option<usize>,
    /// How long a quorum waits for healthy replicas that have not asked yet.
    pub join_timeout: Duration,
    /// A replica without a stream and without a heartbeat for this long is dead.
    pub heartbeat_timeout: Duration,
}

/// What a lighthouse starts with.
#[derive(Debug, Clone, Default)]
pub struct Start {
    /// The wall clock in milliseconds since 1970. Ids go on above it and above the record's.
    pub clock_ms: i64,
    /// What the lighthouse before it saved.
    pub record: Option<Record>,
    /// The operator's word that the first quorum may go back to an earlier step, and that it needs no majority of the recorded members.
    pub accept_rollback: bool,
}

/// Something that happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// A replica says it is alive. One that has not asked yet counts for nothing but the wait of a first quorum (L25).
    Heartbeat {
        /// Who.
        replica_id: String,
    },
    /// A replica asks for a quorum; its call stays open under `ticket`.
    Join {
        /// Who asks.
        member: Member,
        /// The call.
        ticket: Ticket,
    },
    /// The replica asks again: it is not known whether its last call was answered. Before [`Join`](Self::Join).
    Unanswered {
        /// Who.
        replica_id: String,
    },
    /// The call is over (cut, cancelled, or its deadline passed): it no longer takes part (L24).
    Withdraw {
        /// The call.
        ticket: Ticket,
    },
    /// The replica opened its event stream. While it stands, the replica needs no heartbeats.
    Attached {
        /// Who.
        replica_id: String,
        /// Names the stream; a later stream of the same id replaces it.
        stream: u64,
        /// The quorum that the replica is configured for, 0 if none. It counts as healthy if it was in the recorded one.
        last_quorum_id: Epoch,
    },
    /// A stream broke. If it is the replica's present one, the replica is gone at once.
    Detached {
        /// Who.
        replica_id: String,
        /// Which stream.
        stream: u64,
    },
    /// All connections over which a replica without a stream called have ended, as those of a process that was killed do. It is gone at once.
    Disconnected {
        /// Who.
        replica_id: String,
    },
    /// The replica leaves.
    Leave {
        /// Who.
        replica_id: String,
        /// Why, in its own words.
        reason: String,
    },
    /// The replica's own servers say that it cannot go on: it is out at once, like one whose stream broke, until it asks again.
    Failed {
        /// Who.
        replica_id: String,
        /// Why, in the words of its servers.
        reason: String,
    },
    /// A member says that its epoch failed: all members are told, none is removed.
    Report {
        /// Who.
        replica_id: String,
        /// The epoch it speaks of; other than the present one is ignored.
        quorum_id: Epoch,
        /// What happened.
        reason: String,
    },
    /// An operator tells a replica to do something.
    Operate {
        /// Its id, or the name that its incarnations share.
        replica: String,
        /// What.
        order: Order,
        /// The operator's call.
        ticket: Ticket,
    },
    /// All that had come over the connections of a replica is taken in, or they have ended: its silence can be judged.
    Read {
        /// Who.
        replica_id: String,
    },
    /// Time passed.
    Tick,
    /// The lighthouse itself did not run for so long: its process was stopped, or its machine. What it did not hear in that time
    /// says nothing about any other.
    Away {
        /// How long, until now.
        time: Duration,
    },
}

/// What the server shall do, in this order.
#[derive(Debug, Clone)]
pub enum Action {
    /// Save the record. Before the quorum that it describes is delivered.
    Save(Record),
    /// Answer these calls with the quorum.
    Deliver {
        /// The calls of the members, in their order, then those of the spares.
        tickets: Vec<Ticket>,
        /// The quorum.
        quorum: Arc<Quorum>,
    },
    /// Answer this call with an error.
    Reject {
        /// The call.
        ticket: Ticket,
        /// Why.
        error: Error,
    },
    /// Send the event over these replicas' streams.
    Push {
        /// Replica ids; those without a stream are left out.
        to: Vec<String>,
        /// The event.
        event: AbortEpoch,
    },
    /// Send the order over this replica's stream, if it has one.
    Order {
        /// A replica id.
        to: String,
        /// The order.
        order: Order,
    },
    /// Answer the operator's call.
    Operated {
        /// The call.
        ticket: Ticket,
        /// The ids of the replicas that were told, or why none was.
        outcome: Result<Vec<String>, Error>,
    },
    /// End this stream with an error: the replica may not attach.
    Refuse {
        /// The stream.
        stream: u64,
        /// Why.
        error: Error,
    },
}

/// What a dashboard shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// When a quorum may form.
    pub rules: QuorumRules,
    /// What the rules say of a new quorum, in one word: see [`LighthouseState::reason`](super::LighthouseState::reason) for people.
    pub verdict: &'static str,
    /// How long ago the last quorum was delivered, if one was.
    pub formed: Option<Duration>,
    /// How long one quorum lasted until the next, of late.
    pub pace: Option<Duration>,
    /// What became of replicas that have not asked again since, oldest first.
    pub recent: Vec<Departure>,
    /// What happened of late, oldest first.
    pub timeline: Vec<Moment>,
    /// How much happened in all.
    pub totals: Totals,
    /// The present epoch; the seed before the first quorum.
    pub quorum_id: Epoch,
    /// The members of the present quorum.
    pub participants: Vec<Member>,
    /// The healthy ids with the age of their last sign of life.
    pub healthy: Vec<(String, Duration)>,
    /// The ids whose calls are waiting, with how long they have.
    pub waiting: Vec<(String, Duration)>,
    /// The ids with an open event stream.
    pub attached: Vec<String>,
    /// The ids far behind that are no members, and whether each fetches the state now; the others wait for a quorum to fetch from.
    pub spares: Vec<(String, bool)>,
    /// The ids that an operator told to leave after their step, with what was said.
    pub draining: Vec<(String, String)>,
    /// The ids that an operator put out of the job and that were not started again, with what was said.
    pub evicted: Vec<(String, String)>,
    /// Why there is no new quorum.
    pub reason: String,
    /// Why the present epoch was aborted, if it was.
    pub aborted: Option<String>,
}
