//! The side of a supervised process: what it is told, and what it reports.
//!
//! `oxccl launch` (or another user of the crate `oxccl-launch`) starts the ranks of a run. A rank finds its place in the environment
//! ([`ReplicaEnv`]) and reports through an [`EventSender`], which writes one JSON line per [`ReplicaEvent`] to the Unix
//! socket named in `OXCCL_EVENTS`. Standard output is not used: vendor libraries print there.

mod env;
mod events;
#[cfg(all(feature = "backend", feature = "manager"))]
mod join;
mod line;
mod sender;

pub use env::{
    ENV_EVENTS, ENV_INCARNATION, ENV_LIGHTHOUSE, ENV_RANK, ENV_RANKS, ENV_REPLICA, ENV_REPLICA_STORE,
    ENV_REPLICAS, ReplicaEnv, announce_lighthouse,
};
pub use events::{
    Commit, EventKind, Final, LighthouseReady, MAX_LINE, MAX_TEXT, Message, ReplicaEvent, ReplicaState,
    now_us,
};
pub use line::{LineReader, TooLong};
pub use sender::EventSender;
