//! The lighthouse: one small service per job through which replicas find each other.
//!
//! gRPC and HTTP share one port. Every call becomes a message to one task that owns the [`protocol::quorum`] state; that
//! task answers calls, pushes events over the replicas' open streams, and persists a quorum's id before it delivers it.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ftcore::{Error, Result};

use crate::serve::{self, ConnectionLimits, Service};
use protocol::quorum::{LighthouseState, QuorumRules};

mod actor;
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
    /// A replica without a heartbeat for this long is dead.
    pub heartbeat_timeout: Duration,
    /// How often time-outs are looked at; everything else happens at once.
    pub quorum_tick: Duration,
    /// Keeps the quorum id and the members over restarts. Without it, ids continue from the clock.
    pub state_file: Option<PathBuf>,
    /// What its clients' connections may take.
    pub limits: ConnectionLimits,
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
        }
    }
}

/// A running lighthouse. Dropping it closes its port and all connections at once.
#[derive(Debug)]
pub struct LighthouseServer {
    service: Service,
    address: String,
}

impl LighthouseServer {
    /// Starts it. Errors: `InvalidArgument` for the configuration, `Conflict` if the address is in use, `Corrupt` or `Io`
    /// for the state file.
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
        let saved = match &config.state_file {
            Some(path) => persist::load(path)?,
            None => persist::Saved::default(),
        };
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_millis());
        let seed = i64::try_from(clock).unwrap_or(0).max(saved.quorum_id);
        let listener = serve::listen("the lighthouse", &config.bind)?;
        let address = serve::url(&listener, config.advertise_host.as_deref())?;
        let rules = QuorumRules {
            min_replicas: config.min_replicas,
            initial_replicas: config.initial_replicas,
            join_timeout: config.join_timeout,
            heartbeat_timeout: config.heartbeat_timeout,
        };
        let state = LighthouseState::new(rules, seed, saved.members, Instant::now());
        let runtime = serve::runtime("ox-lighthouse", 2)?;
        let lighthouse = {
            let _guard = runtime.enter();
            // Of the ticks one may be late; of the heartbeats' time a part may be lost without a false alarm.
            let away_after = 2 * config.quorum_tick + config.heartbeat_timeout / 4;
            actor::start(state, config.quorum_tick, away_after, config.state_file)
        };
        // Its replicas' streams never end by themselves: there is nothing to give time to.
        let service = Service::start(
            runtime,
            listener,
            page::routes(lighthouse),
            config.limits,
            Duration::ZERO,
        )?;
        tracing::info!(address, "the lighthouse listens");
        Ok(Self { service, address })
    }

    /// The URL that managers are given: `http://host:port`.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Closes the port and all connections. Errors: `Timeout` if that takes longer; it goes on in the background.
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        self.service.shutdown("the lighthouse", deadline)
    }
}
