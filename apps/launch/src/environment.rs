//! Which process of a replica is started, and how it is told so through its environment.

use std::net::SocketAddr;
use std::process::Command;

use oxccl::launch::{
    ENV_INCARNATION, ENV_LIGHTHOUSE, ENV_RANK, ENV_RANKS, ENV_REPLICA, ENV_REPLICA_STORE, ENV_REPLICAS,
};

/// Which process is to be started; given to the closure of [`Supervisor::start`](crate::Supervisor::start).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaLaunch {
    /// The replica's index in the job.
    pub replica: u32,
    /// How many replicas the job has.
    pub replicas: u32,
    /// The rank inside the replica.
    pub rank: u32,
    /// How many ranks the replica has.
    pub ranks: u32,
    /// Which incarnation of the replica this is, from 0.
    pub incarnation: u32,
    /// The lighthouse's address.
    pub lighthouse: String,
}

/// Tells `command` which rank it is: in our variables, and in torchrun's for programs that know those (`Place::from_env` among them).
/// `local_rank` counts the processes of this machine over all replicas: the usual device index. The ranks meet in `store`, as clients of it: to
/// torch it is the store of an agent, with keys for each attempt.
pub(super) fn tell(command: &mut Command, launch: &ReplicaLaunch, local_rank: u32, store: SocketAddr) {
    command
        .env(ENV_LIGHTHOUSE, &launch.lighthouse)
        .env(ENV_REPLICA, launch.replica.to_string())
        .env(ENV_REPLICAS, launch.replicas.to_string())
        .env(ENV_INCARNATION, launch.incarnation.to_string())
        .env(ENV_RANK, launch.rank.to_string())
        .env(ENV_RANKS, launch.ranks.to_string())
        .env(ENV_REPLICA_STORE, store.to_string())
        .env("RANK", launch.rank.to_string())
        .env("WORLD_SIZE", launch.ranks.to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        // Of a torchrun around this command: it would not fit the local rank.
        .env_remove("LOCAL_WORLD_SIZE")
        .env("MASTER_ADDR", store.ip().to_string())
        .env("MASTER_PORT", store.port().to_string())
        .env("TORCHELASTIC_USE_AGENT_STORE", "True")
        .env("TORCHELASTIC_RESTART_COUNT", launch.incarnation.to_string());
}
