//! Configuration of a manager.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ftcore::{Credentials, Error, Result, Store, split_address};

/// How the number of contributing replicas behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorldSizeMode {
    /// Every healthy replica contributes.
    #[default]
    Dynamic,
    /// At most `min_replicas` contribute; further members stand by: they follow along with the state, and their work does not count.
    FixedWithSpares,
}

/// How the state gets to a member that heals. A spare, which is outside the group, always fetches it over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HealOver {
    /// HTTP or HTTPS: from several sources at once, with the chunks that are here already left out.
    #[default]
    Http,
    /// The process group of the new epoch: from one source, whole, by point-to-point messages. For hosts that reach each other over the group's
    /// network only, or faster there.
    Group,
}

impl HealOver {
    /// In errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "HTTP",
            Self::Group => "the process group",
        }
    }
}

impl fmt::Display for HealOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "http",
            Self::Group => "group",
        })
    }
}

impl FromStr for HealOver {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "http" => Ok(Self::Http),
            "group" => Ok(Self::Group),
            _ => Err(Error::invalid(format!(
                "a state travels over 'http' or 'group', not '{text}'"
            ))),
        }
    }
}

/// How one rank of one replica takes part.
///
/// ```
/// use std::time::Duration;
///
/// use oxccl_manager::ManagerConfig;
///
/// let config = ManagerConfig {
///     timeout: Duration::from_secs(20),
///     min_replicas: 2, // below that no step commits
///     ..ManagerConfig::new("replica0", "http://127.0.0.1:29510")
/// };
/// assert_eq!(config.group_world_size, 1); // one process is the whole replica
/// ```
#[derive(Clone)]
pub struct ManagerConfig {
    /// The replica's name, the same in each of its incarnations; the id is `name:random`.
    pub name: String,
    /// The lighthouse's URL, or those of all lighthouses that share the job, separated by commas; needed on group rank 0.
    pub lighthouse: Option<String>,
    /// This process's rank inside the replica.
    pub group_rank: u32,
    /// The number of ranks inside the replica.
    pub group_world_size: u32,
    /// Where the ranks of the replica meet, and agree from which source they heal; needed if there are several, for the whole run. It may outlive them and
    /// serve their next incarnation, as an elastic launcher's does.
    pub replica_store: Option<Arc<dyn Store>>,
    /// Where this rank listens, `host:port` or `[v6]:port`. The port is the manager server's (group rank 0), 0 picks a free one; the store and the
    /// checkpoint server listen on free ports of the same host.
    pub bind: String,
    /// The host name or address that other machines reach this one by; `None`: the bind host, or if that is a wildcard the address from which this
    /// machine reaches the lighthouse, else the one towards the outside.
    pub advertise_host: Option<String>,
    /// A step commits only in a quorum of at least this many members. It counts members, not contributors: one that healed into
    /// the step holds its state, although its values do not count yet.
    pub min_replicas: u32,
    /// How the number of contributors behaves.
    pub world_size_mode: WorldSizeMode,
    /// Let replicas at step 0 take their state from one of them, so that all start equal.
    pub init_sync: bool,
    /// The replica gives up, with the error of the last attempt, once more attempts in a row than this did not commit. `None`: it goes
    /// on for as long as its caller's deadlines allow.
    pub max_retries: Option<u32>,
    /// How this replica's state gets to members that heal, and to this one. The same on all replicas: one that heals from a replica with
    /// another setting refuses, and names both.
    pub heal_over: HealOver,
    /// The largest state that this replica takes over from another one, in bytes. `None`: the memory of this machine, swap included.
    pub max_state_bytes: Option<u64>,
    /// For one collective, one connect of the group, one transfer of state.
    pub timeout: Duration,
    /// For reaching the servers at start.
    pub connect_timeout: Duration,
    /// Between heartbeats to the lighthouse.
    pub heartbeat_interval: Duration,
    /// A rank whose training thread neither waits in a call nor shows progress ([`Replica::progress`](crate::Replica::progress)) for
    /// this long takes its replica out of the quorum, so that the others go on. Nothing is expected before it first asks for one. Longer than
    /// `timeout`.
    pub progress_timeout: Duration,
    /// The job's credentials, or those of this replica alone: for all that it serves and calls. `None`: those of `OXCCL_CREDENTIALS`, if it is set.
    pub credentials: Option<Arc<Credentials>>,
    /// The folder in which this replica's events are written to `events-NAME.jsonl`, a line of JSON each (docs/observability.md). `None`: that of
    /// `OXCCL_EVENT_LOG`, if it is set. What cannot be written there is left out: the log neither holds up nor fails the training.
    pub event_log: Option<PathBuf>,
    /// Without credentials, listen where other machines reach it (or `OXCCL_INSECURE=1`).
    pub insecure: bool,
}

impl ManagerConfig {
    /// A replica of one rank on this host with the usual values.
    pub fn new(name: impl Into<String>, lighthouse: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            lighthouse: Some(lighthouse.into()),
            group_rank: 0,
            group_world_size: 1,
            replica_store: None,
            bind: "127.0.0.1:0".into(),
            advertise_host: None,
            min_replicas: 1,
            world_size_mode: WorldSizeMode::Dynamic,
            init_sync: true,
            max_retries: None,
            heal_over: HealOver::default(),
            max_state_bytes: None,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(20),
            heartbeat_interval: Duration::from_millis(100),
            progress_timeout: Duration::from_secs(120),
            credentials: None,
            event_log: None,
            insecure: false,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let bad = |text: String| Err(Error::invalid(text));
        if self.name.is_empty() || self.name.contains(':') || self.name.chars().any(char::is_whitespace) {
            return bad(format!(
                "replica name '{}' must be non-empty and free of ':' and spaces",
                self.name
            ));
        }
        if self.group_world_size == 0 || self.group_rank >= self.group_world_size {
            return bad(format!(
                "group_rank {} does not exist in a replica of {} ranks",
                self.group_rank, self.group_world_size
            ));
        }
        if self.group_rank == 0 && self.lighthouse.is_none() {
            return bad("group rank 0 needs the lighthouse's URL".into());
        }
        if self.group_world_size > 1 && self.replica_store.is_none() {
            return bad(format!(
                "{} ranks need a replica_store to meet in",
                self.group_world_size
            ));
        }
        split_address(&self.bind).map_err(|e| Error::invalid(format!("bind: {}", e.message())))?;
        if self.min_replicas == 0 {
            return bad("min_replicas must be at least 1".into());
        }
        if self.progress_timeout <= self.timeout {
            // A rank that waits for a peer in a collective would be taken for one that hangs.
            return bad(format!(
                "progress_timeout ({:?}) must be longer than timeout ({:?})",
                self.progress_timeout, self.timeout
            ));
        }
        Ok(())
    }
}
