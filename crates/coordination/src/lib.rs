//! Who takes part in the next step, and did this one commit: lighthouse and manager servers on torchft's wire.
//!
//! A rank asks its replica's [`ManagerServer`] through a [`ManagerClient`]; the manager server asks the
//! [`LighthouseServer`] once for all its ranks; the answer comes back the same way, as a place in the quorum
//! ([`QuorumResult`]). Deaths and errors travel the other way without being asked for: every manager server keeps a
//! stream to the lighthouse open, its break is evidence of a death, and the lighthouse pushes it to the members.
//!
//! All decisions are pure functions of events and times, in the crate `protocol`; the servers around them only carry
//! messages.

mod channel;
mod client;
mod clock;
mod etcd;
mod exposition;
mod lighthouse;
mod lighthouses;
mod manager;
mod serve;
#[cfg(test)]
mod simulation;
mod unchanged;
mod wire;

pub use client::{Cancel, CommitVote, LighthouseClient, ManagerClient, PushEvent, QuorumRequest, WatchGuard};
pub use lighthouse::{
    EtcdConfig, HealthyReplica, LighthouseConfig, LighthouseServer, LighthouseStatus, OrderedReplica,
    ParticipantStatus, RecentReplica, SpareStatus, TimelineEvent, WaitingReplica, Why,
};
pub use manager::{ManagerServer, ManagerServerConfig, RankCounts, Timed};
pub use protocol::quorum::{Order, OrderKind};
pub use protocol::{AbortEpoch, MAX_ID_BYTES, Member, Quorum, QuorumResult};
pub use serve::ConnectionLimits;
pub use wire::is_refused;
