//! Starting and watching the processes of a run on one machine.
//!
//! A [`Supervisor`] starts the lighthouse (or is told where one is) and the replicas of this machine as child processes, one for
//! each rank, restarts the ones that die (a replica as a whole), and hands everything that happens to the driver as one stream of [`SupervisorEvent`]s:
//! starts, exits, and what the replicas report about themselves. A replica finds its place in the environment
//! ([`ReplicaEnv`]) and reports through an [`EventSender`], which writes one JSON line per [`ReplicaEvent`] to the Unix
//! socket named in `OXCCL_EVENTS`. Standard output is not used: vendor libraries print there.
//!
//! No child outlives its supervisor: Linux kills the children when the thread that started them ends, however it ended.

mod bound;
mod child;
mod control;
mod env;
mod events;
mod line;
mod listener;
mod outcome;
mod output;
mod queue;
mod sender;
mod slot;
mod supervisor;

pub use bound::BoundChild;
pub use env::{
    ENV_EVENTS, ENV_INCARNATION, ENV_LIGHTHOUSE, ENV_RANK, ENV_RANKS, ENV_REPLICA, ENV_REPLICA_STORE,
    ENV_REPLICAS, ReplicaEnv, announce_lighthouse,
};
pub use events::{
    Commit, EventKind, Final, MAX_LINE, MAX_TEXT, ReplicaEvent, ReplicaState, SupervisorEvent, now_us,
};
pub use line::{LineReader, TooLong};
pub use outcome::{ExitSummary, Outcome, ReplicaOutcome, StopReason};
pub use output::{OutputLine, OutputSink};
pub use queue::SupervisorEvents;
pub use sender::EventSender;
pub use supervisor::{
    GiveUp, LighthouseCommand, LighthouseLaunch, LighthouseSource, ProcessSignal, ReplicaLaunch,
    RestartPolicy, Supervisor, SupervisorConfig, check_lighthouse,
};
