//! What the supervisor hands to the driver.

use oxccl::launch::ReplicaEvent;
use serde::Serialize;

use super::outcome::{ExitSummary, Outcome};

/// What the supervisor hands to the driver.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "from", rename_all = "snake_case")]
pub enum SupervisorEvent {
    /// A lighthouse that this supervisor started listens. Sent again after it was restarted.
    LighthouseUp {
        /// Its address, `http://host:port`.
        url: String,
        /// When (see [`oxccl::launch::now_us`]).
        t_us: u64,
    },
    /// The lighthouse's process ended although it should not have.
    LighthouseExited {
        /// How it ended.
        exit: ExitSummary,
        /// The end of its output.
        tail: String,
        /// Milliseconds until it is started again at the same address; `None` if the run is given up.
        restart_in_ms: Option<u64>,
        /// When.
        t_us: u64,
    },
    /// A process of a replica was started.
    Spawned {
        /// The replica's index in the job.
        replica: u32,
        /// The rank inside the replica.
        rank: u32,
        /// Which incarnation of it.
        incarnation: u32,
        /// Its process id.
        pid: u32,
        /// When.
        t_us: u64,
    },
    /// A process of a replica ended. The last one of an incarnation tells what follows.
    Exited {
        /// The replica's index in the job.
        replica: u32,
        /// The rank inside the replica.
        rank: u32,
        /// Which incarnation of it.
        incarnation: u32,
        /// The exit code, if it ended by itself.
        status: Option<i32>,
        /// The signal that ended it, if one did.
        signal: Option<i32>,
        /// The end of its output, unless it exited with 0.
        tail: String,
        /// Milliseconds until the replica's next incarnation; `None` if there is none, or other ranks of this incarnation still run.
        restart_in_ms: Option<u64>,
        /// The rank whose failure brought the others' end about. It need not be the one whose end was seen first. `None` if none failed, or other
        /// ranks of this incarnation still run.
        cause: Option<u32>,
        /// When.
        t_us: u64,
    },
    /// A replica reported something.
    Replica(ReplicaEvent),
    /// All processes are gone. The last event.
    Finished(Outcome),
}

impl SupervisorEvent {
    /// The replica that this is about, if it is about one.
    pub fn replica(&self) -> Option<u32> {
        match self {
            Self::Spawned { replica, .. } | Self::Exited { replica, .. } => Some(*replica),
            Self::Replica(event) => Some(event.replica),
            Self::LighthouseUp { .. } | Self::LighthouseExited { .. } | Self::Finished(_) => None,
        }
    }
}
