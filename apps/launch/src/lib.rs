//! Starting and watching the processes of a run on one machine.
//!
//! A [`Supervisor`] starts the lighthouse (or is told where one is) and the replicas of this machine as child processes, one for
//! each rank, restarts the ones that die (a replica as a whole), and hands everything that happens to the driver as one stream of [`SupervisorEvent`]s:
//! starts, exits, and what the replicas report about themselves ([`oxccl::launch`] is their side).
//!
//! No child outlives its supervisor: Linux kills the children when the thread that started them ends, however it ended. What a child has started
//! itself is not told: it ends with its child where the supervisor sees to that, and may go on where the supervisor was killed.

mod bound;
mod child;
mod control;
mod earlier;
mod environment;
mod events;
mod listener;
mod outcome;
mod output;
mod queue;
mod slot;
mod supervisor;

pub use bound::BoundChild;
pub use environment::ReplicaLaunch;
pub use events::SupervisorEvent;
pub use outcome::{ExitSummary, Outcome, ReplicaOutcome, StopReason};
pub use output::{OutputLine, OutputSink};
pub use queue::SupervisorEvents;
pub use supervisor::{
    GiveUp, LighthouseCommand, LighthouseLaunch, LighthouseSource, ProcessSignal, RestartPolicy, Supervisor,
    SupervisorConfig, ending_signals,
};
