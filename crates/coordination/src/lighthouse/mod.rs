//! The lighthouse: one small service through which the replicas of a job, or of several, find each other.
//!
//! gRPC and HTTP share one port. Every call becomes a message to one task that owns the [`protocol::quorum`] state; that
//! task answers calls, pushes events over the replicas' open streams, and saves the job's record before it delivers a new
//! epoch.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use ftcore::{Credentials, Error, Result};
use identity::{Acceptor, Party, Role};

use crate::serve::{self, Closure, ConnectionLimits, Served, Service};
use persist::StateFile;
use protocol::quorum::{LighthouseState, QuorumRules, Start};

mod actor;
mod callers;
mod page;
mod persist;
mod reply;
mod service;

pub(crate) use service::operator_only;

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
    /// The jobs that it serves, each apart from the others: its own quorums, pages and record (`state_file` with the job's id behind), for peers that
    /// prove to be of it. Empty: the one of `OXCCL_CREDENTIALS`, else one job for all that connect.
    pub credentials: Vec<Arc<Credentials>>,
    /// Without credentials, listen where other machines reach it (or `OXCCL_INSECURE=1`).
    pub insecure: bool,
}

impl Default for LighthouseConfig {
    /// Port 29510 on loopback, one replica suffices, 60 s join and 5 s heartbeat time-out, 100 ms tick.
    fn default() -> Self {
        Self {
            bind: "127.0.0.1:29510".into(),
            advertise_host: None,
            min_replicas: 1,
            initial_replicas: None,
            join_timeout: Duration::from_secs(60),
            heartbeat_timeout: Duration::from_secs(5),
            quorum_tick: Duration::from_millis(100),
            state_file: None,
            limits: ConnectionLimits::lighthouse(),
            accept_rollback: false,
            credentials: Vec::new(),
            insecure: false,
        }
    }
}

/// A running lighthouse. Dropping it closes its port and all connections at once.
#[derive(Debug)]
pub struct LighthouseServer {
    service: Service,
    address: String,
    _state_files: ClosedWithServer,
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
        let parties = parties(&config.credentials)?;
        let closure = Closure::new(!parties.is_empty(), config.insecure);
        let listener = serve::listen("the lighthouse", &config.bind, closure)?;
        let address = serve::url(&listener, config.advertise_host.as_deref(), closure)?;
        let rules = QuorumRules {
            min_replicas: config.min_replicas,
            initial_replicas: config.initial_replicas,
            join_timeout: config.join_timeout,
            heartbeat_timeout: config.heartbeat_timeout,
        };
        let runtime = serve::runtime("ox-lighthouse", 2)?;
        let mut state_files = ClosedWithServer(Vec::new());
        let mut job = |state_file: Option<&Path>| -> Result<Router> {
            let (state_file, record) = match state_file {
                Some(path) => {
                    let (file, record) = StateFile::open(path)?;
                    let file = Arc::new(file);
                    state_files.0.push(Arc::clone(&file));
                    (Some(file), record)
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
            let state = LighthouseState::new(rules.clone(), start, Instant::now());
            let _guard = runtime.enter();
            // Of the ticks one may be late; of the heartbeats' time a part may be lost without a false alarm.
            let away_after = 2 * config.quorum_tick + config.heartbeat_timeout / 4;
            Ok(page::routes(actor::start(
                state,
                config.quorum_tick,
                away_after,
                config.heartbeat_timeout,
                state_file,
            )))
        };
        let served = if parties.is_empty() {
            Served::All(job(config.state_file.as_deref())?)
        } else {
            let mut jobs = HashMap::new();
            for party in &parties {
                let file = config.state_file.as_ref().map(|file| of_job(file, party.job()));
                jobs.insert(party.job().to_owned(), job(file.as_deref())?);
            }
            Served::Jobs(Acceptor::new(&parties, limits.handshakes()), jobs)
        };
        // Its replicas' streams never end by themselves: there is nothing to give time to.
        let service = Service::start(runtime, listener, served, limits, Duration::ZERO)?;
        tracing::info!(address, "the lighthouse listens");
        Ok(Self {
            service,
            address,
            _state_files: state_files,
        })
    }

    /// The URL that managers are given: `http://host:port`, `https://` with credentials.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Closes the port and all connections. Errors: `Timeout` if that takes longer; it goes on in the background.
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        // The file is free for the next lighthouse once nobody is served any more.
        let Self {
            service,
            _state_files,
            ..
        } = self;
        service.shutdown("the lighthouse", deadline)
    }
}

/// This process as the lighthouse of each job.
fn parties(credentials: &[Arc<Credentials>]) -> Result<Vec<Arc<Party>>> {
    let of_environment = match credentials {
        [] => identity::credentials(None)?,
        _ => None,
    };
    let mut parties: Vec<Arc<Party>> = Vec::new();
    for one in credentials.iter().chain(&of_environment) {
        if parties.iter().any(|p| p.job() == one.job()) {
            return Err(Error::invalid(format!(
                "two credentials are of a job {}: {} is the second",
                one.job(),
                one.folder().display()
            )));
        }
        parties.push(Party::new(one, Role::Lighthouse)?);
    }
    Ok(parties)
}

/// The record of one of several jobs.
fn of_job(file: &Path, job: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{job}"));
    name.into()
}

/// Closes the files when the server ends: what runs on in the background saves nothing more.
#[derive(Debug)]
struct ClosedWithServer(Vec<Arc<StateFile>>);

impl Drop for ClosedWithServer {
    fn drop(&mut self) {
        for file in &self.0 {
            file.close();
        }
    }
}
