//! The lighthouse: one small service per job through which replicas find each other.
//!
//! gRPC and HTTP share one port. Every call becomes a message to one task that owns the [`protocol::quorum`] state; that
//! task answers calls, pushes events over the replicas' open streams, and saves the job's record before it delivers a new
//! epoch.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ftcore::{Error, Result};

use crate::serve::{self, ConnectionLimits, Service};
use persist::StateFile;
use protocol::quorum::{LighthouseState, QuorumRules, Start};

mod actor;
mod callers;
mod page;
mod persist;
mod reply;
mod service;

pub use page::{HealthyReplica, LighthouseStatus, ParticipantStatus, WaitingReplica};

/// How a lighthouse behaves.
#[derive(Debug, Clone)]
pub struct LighthouseConfig {
    /// Where to listen, `host:port`; port 0 takes a free one.
    pub bind: String,
    /// The host in [`LighthouseServer::address`]; by default the bound address, or this machine's name.
    pub advertise_host: Option<String>,
    /// The least number of replicas in a quorum.
    pub min_replicas: usize,
    /// The first quorum of the job waits for this many, however long that takes.
    pub initial_replicas: Option<usize>,
    /// How long a quorum waits for healthy replicas that have not asked yet.
    pub join_timeout: Duration,
    /// A replica is dead when its connection answers no ping for this long, or, if it has no event stream, when no heartbeat comes.
    pub heartbeat_timeout: Duration,
    /// How often time-outs are looked at; everything else happens at once.
    pub quorum_tick: Duration,
    /// Keeps the job's record over restarts: epoch, step, lineage, members. Its folder is made if there is none; one file serves one
    /// lighthouse at a time. Without it (the default here; the `oxccl lighthouse` command has one), ids continue from the clock, and a
    /// restarted lighthouse believes what the replicas tell of their last quorum.
    pub state_file: Option<PathBuf>,
    /// What its clients' connections may take. Its `silence` is not used: the heartbeat time-out is.
    pub limits: ConnectionLimits,
    /// The operator's word, for the first quorum: it may go back to an earlier step than the recorded one, and needs no majority of the
    /// recorded members.
    pub accept_rollback: bool,
}

impl Default for LighthouseConfig {
    /// Port 29510 on all addresses, one replica suffices, 60 s join and 5 s heartbeat time-out, 100 ms tick.
    fn default() -> Self {
        Self {
            bind: "0.0.0.0:29510".into(),
            advertise_host: None,
            min_replicas: 1,
            initial_replicas: None,
            join_timeout: Duration::from_secs(60),
            heartbeat_timeout: Duration::from_secs(5),
            quorum_tick: Duration::from_millis(100),
            state_file: None,
            limits: ConnectionLimits::lighthouse(),
            accept_rollback: false,
        }
    }
}

/// A running lighthouse. Dropping it closes its port and all connections at once.
#[derive(Debug)]
pub struct LighthouseServer {
    service: Service,
    address: String,
    _state_file: ClosedWithServer,
}

impl LighthouseServer {
    /// Starts it. Errors: `InvalidArgument` for the configuration, `Conflict` if the address is in use or the state file belongs to another
    /// lighthouse, `Corrupt` or `Io` for the state file.
    pub fn start(config: LighthouseConfig) -> Result<Self> {
        if config.min_replicas == 0 {
            return Err(Error::invalid(
                "min_replicas is 0; a quorum has at least one member",
            ));
        }
        if config.quorum_tick.is_zero() || config.heartbeat_timeout.is_zero() {
            return Err(Error::invalid(
                "quorum_tick and heartbeat_timeout are longer than zero",
            ));
        }
        config.limits.validate()?;
        let mut limits = config.limits;
        limits.silence = config.heartbeat_timeout;
        if let Some(initial) = config.initial_replicas.filter(|i| *i < config.min_replicas) {
            return Err(Error::invalid(format!(
                "initial_replicas is {initial}, and no quorum has fewer than min_replicas = {} members",
                config.min_replicas
            )));
        }
        let (state_file, record) = match &config.state_file {
            Some(path) => {
                let (file, record) = StateFile::open(path)?;
                (Some(Arc::new(file)), record)
            }
            None => (None, None),
        };
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_millis());
        let start = Start {
            clock_ms: i64::try_from(clock).unwrap_or(0),
            record,
            accept_rollback: config.accept_rollback,
        };
        let listener = serve::listen("the lighthouse", &config.bind)?;
        let address = serve::url(&listener, config.advertise_host.as_deref())?;
        let rules = QuorumRules {
            min_replicas: config.min_replicas,
            initial_replicas: config.initial_replicas,
            join_timeout: config.join_timeout,
            heartbeat_timeout: config.heartbeat_timeout,
        };
        let state = LighthouseState::new(rules, start, Instant::now());
        let runtime = serve::runtime("ox-lighthouse", 2)?;
        let lighthouse = {
            let _guard = runtime.enter();
            // Of the ticks one may be late; of the heartbeats' time a part may be lost without a false alarm.
            let away_after = 2 * config.quorum_tick + config.heartbeat_timeout / 4;
            actor::start(
                state,
                config.quorum_tick,
                away_after,
                config.heartbeat_timeout,
                state_file.clone(),
            )
        };
        // Its replicas' streams never end by themselves: there is nothing to give time to.
        let service = Service::start(
            runtime,
            listener,
            page::routes(lighthouse),
            limits,
            Duration::ZERO,
        )?;
        tracing::info!(address, "the lighthouse listens");
        Ok(Self {
            service,
            address,
            _state_file: ClosedWithServer(state_file),
        })
    }

    /// The URL that managers are given: `http://host:port`.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Closes the port and all connections. Errors: `Timeout` if that takes longer; it goes on in the background.
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        // The file is free for the next lighthouse once nobody is served any more.
        let Self {
            service, _state_file, ..
        } = self;
        service.shutdown("the lighthouse", deadline)
    }
}

/// Closes the file when the server ends: what runs on in the background saves nothing more.
#[derive(Debug)]
struct ClosedWithServer(Option<Arc<StateFile>>);

impl Drop for ClosedWithServer {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            file.close();
        }
    }
}
