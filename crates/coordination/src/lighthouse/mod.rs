//! The lighthouse: one small service through which the replicas of a job, or of several, find each other.
//!
//! gRPC and HTTP share one port. Every call becomes a message to one task that owns the [`protocol::quorum`] state; that
//! task answers calls, pushes events over the replicas' open streams, and saves the job's record before it delivers a new
//! epoch (`journal`: on disk, or in etcd). With etcd several lighthouses share a job: one leads it and has that task (`election`, `term`), the
//! others refuse and name it (`frontend`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use ftcore::{Credentials, Error, Result};
use identity::{Acceptor, Party};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::channel::{Way, wait_for};
use crate::clock::{self, deadline_in, time_left};
use crate::etcd::Etcd;
use crate::serve::{self, Closure, ConnectionLimits, Served, Service};
use disk::StateFile;
use election::{Begin, Election};
use frontend::{Frontend, Role};
use journal::Journal;
use protocol::quorum::{LighthouseState, QuorumRules, Record, Start};
use term::Leader;

mod actor;
mod callers;
mod disk;
mod election;
mod frontend;
pub(crate) mod journal;
mod live;
mod metrics;
mod page;
mod rates;
mod reply;
pub(crate) mod saved;
mod service;
mod status;
mod term;
mod why;

use service::Pages;
pub(crate) use service::operator_only;

pub use status::{
    HealthyReplica, LighthouseStatus, OrderedReplica, ParticipantStatus, RecentReplica, SpareStatus,
    TimelineEvent, WaitingReplica,
};
pub use why::Why;

/// How a lighthouse behaves.
///
/// ```
/// use std::time::Duration;
///
/// use oxccl_coordination::LighthouseConfig;
///
/// let config = LighthouseConfig {
///     min_replicas: 2,
///     heartbeat_timeout: Duration::from_secs(2),
///     state_file: Some("/var/lib/oxccl/job.json".into()),
///     ..LighthouseConfig::default()
/// };
/// assert_eq!(config.bind, "127.0.0.1:29510");
/// ```
#[derive(Debug, Clone)]
pub struct LighthouseConfig {
    /// Where to listen, `host:port`; port 0 takes a free one.
    pub bind: String,
    /// The host in [`LighthouseServer::address`]; by default the bound address, or this machine's towards the outside.
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
    /// Keeps the record in etcd instead. Several lighthouses may share a job so: one leads, and another one goes on where it stopped.
    pub etcd: Option<EtcdConfig>,
    /// What its clients' connections may take. Its `silence` is not used: the heartbeat time-out is.
    pub limits: ConnectionLimits,
    /// The operator's word, for the first quorum: it may go back to an earlier step than the recorded one, and needs no majority of the
    /// recorded members. With etcd it holds when this lighthouse leads for the first time.
    pub accept_rollback: bool,
    /// The jobs that it serves, each apart from the others: its own quorums, pages and record (`state_file` with the job's id behind), for peers that
    /// prove to be of it. Empty: the one of `OXCCL_CREDENTIALS`, else one job for all that connect.
    pub credentials: Vec<Arc<Credentials>>,
    /// Without credentials, listen where other machines reach it (or `OXCCL_INSECURE=1`).
    pub insecure: bool,
}

/// Where a job's lighthouses meet.
#[derive(Debug, Clone)]
pub struct EtcdConfig {
    /// The client ports of the cluster's members, `host:port`; one of them is enough, more outlive its end.
    pub members: Vec<String>,
    /// The job's name; with credentials, that of the credentials stands for it. 1 to 128 letters, digits, `-`, `_` and `.`. Its keys are `/oxccl/NAME/leader` and `/oxccl/NAME/record`.
    pub job: String,
}

impl EtcdConfig {
    fn validate(&self) -> Result<()> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.job.is_empty() || self.job.len() > 128 || !self.job.chars().all(plain) {
            return Err(Error::invalid(format!(
                "job name '{}' has 1 to 128 letters, digits, '-', '_' and '.'",
                self.job
            )));
        }
        Ok(())
    }
}

/// How long etcd may take to answer at the start.
const REACH_ETCD: Duration = Duration::from_secs(5);
/// How long a lighthouse that ends may take to give up its lead.
const RESIGN: Duration = Duration::from_millis(1500);

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
            etcd: None,
            limits: ConnectionLimits::lighthouse(),
            accept_rollback: false,
            credentials: Vec::new(),
            insecure: false,
        }
    }
}

/// A running lighthouse. Dropping it closes its port and all connections at once.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::deadline_in;
/// use oxccl_coordination::{LighthouseConfig, LighthouseServer};
///
/// let lighthouse = LighthouseServer::start(LighthouseConfig {
///     bind: "127.0.0.1:0".into(),
///     ..LighthouseConfig::default()
/// })?;
/// println!("replicas connect to {}", lighthouse.address()); // a browser does, too
/// lighthouse.shutdown(deadline_in(Duration::from_secs(5)))?;
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug)]
pub struct LighthouseServer {
    service: Service,
    address: String,
    /// One for each job.
    keeps: Vec<Keeps>,
}

/// What a lighthouse keeps for as long as it serves a job.
#[derive(Debug)]
enum Keeps {
    /// It is the only one of the job: it always leads.
    Alone {
        _role: watch::Sender<Role>,
        _state_file: ClosedWithServer,
    },
    /// It takes part in the job's election. Told to end, it gives up its lead first.
    Elected {
        stop: watch::Sender<bool>,
        /// Behind a lock, so that the server may be shared.
        ended: Mutex<mpsc::Receiver<()>>,
    },
}

impl LighthouseServer {
    /// Starts it. Errors: `InvalidArgument` for the configuration, `Conflict` if the address is in use or the state file belongs to another
    /// lighthouse, `Corrupt` or `Io` for the state file, `Unavailable` if etcd does not answer.
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
        let mut limits = config.limits.clone();
        limits.silence = config.heartbeat_timeout;
        if let Some(initial) = config.initial_replicas.filter(|i| *i < config.min_replicas) {
            return Err(Error::invalid(format!(
                "initial_replicas is {initial}, and no quorum has fewer than min_replicas = {} members",
                config.min_replicas
            )));
        }
        if let Some(etcd) = &config.etcd {
            etcd.validate()?;
            if config.state_file.is_some() {
                return Err(Error::invalid(
                    "the record lies in a state file or in etcd, not in both; choose one",
                ));
            }
        }
        let parties = parties(&config.credentials)?;
        let closure = Closure::new(!parties.is_empty(), config.insecure);
        let listener = serve::listen("the lighthouse", &config.bind, closure)?;
        let address = serve::url(&listener, config.advertise_host.as_deref(), closure)?;
        let runtime = serve::runtime("ox-lighthouse", 2)?;
        let own = Leader {
            address: address.clone(),
            incarnation: incarnation(),
        };
        let mut keeps = Vec::new();
        let mut job = |party: Option<&Arc<Party>>| -> Result<Arc<Pages>> {
            let (kept, role) = enter(&runtime, &config, party, own.clone())?;
            keeps.push(kept);
            Ok(Arc::new(Pages::new(Frontend::new(role, &own.incarnation))))
        };
        let served = if parties.is_empty() {
            job(None).map(Served::All)
        } else {
            let jobs = parties
                .iter()
                .map(|party| Ok((party.job().to_owned(), job(Some(party))?)));
            let jobs = jobs.collect::<Result<HashMap<_, _>>>();
            jobs.map(|jobs| Served::Jobs(Acceptor::new(&parties, limits.handshakes()), jobs))
        };
        let served = match served {
            Ok(served) => served,
            Err(error) => {
                // A look-up of a name of etcd's may hang for longer than a caller waits.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        // Its replicas' streams never end by themselves: there is nothing to give time to.
        let service = Service::start(runtime, listener, served, limits, Duration::ZERO)?;
        tracing::info!(address, "the lighthouse listens");
        Ok(Self {
            service,
            address,
            keeps,
        })
    }

    /// The URL that managers are given: `http://host:port`, `https://` with credentials.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Gives up the lead, if it is shared, and closes the port and all connections. Errors: `Timeout` if that takes longer; it goes on in the
    /// background.
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        // The file is free for the next lighthouse once no call is served any more.
        let Self { service, keeps, .. } = self;
        let elected = keeps.iter().filter_map(|kept| match kept {
            Keeps::Elected { stop, ended } => Some((stop, ended)),
            Keeps::Alone { .. } => None,
        });
        let elected: Vec<_> = elected.collect();
        for (stop, _) in &elected {
            stop.send_replace(true);
        }
        let until = deadline_in(RESIGN).min(deadline);
        for (_, ended) in elected {
            // If etcd does not answer, the lease ends by itself.
            let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = ended.recv_timeout(time_left(until));
        }
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
        parties.push(Party::new(one, identity::Role::Lighthouse)?);
    }
    Ok(parties)
}

/// The record of one of several jobs.
fn of_job(file: &Path, job: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{job}"));
    name.into()
}

/// Begins to serve the job of this party, or the only one: as its only lighthouse, or as one of those that etcd elects.
///
/// Errors: those of the state file, and of [`elected`].
fn enter(
    runtime: &Runtime,
    config: &LighthouseConfig,
    party: Option<&Arc<Party>>,
    own: Leader,
) -> Result<(Keeps, watch::Receiver<Role>)> {
    let mut terms = Terms::of(config);
    let job = party.map(|party| party.job());
    if let Some(etcd) = &config.etcd {
        let way = Way::new(party.cloned(), Some(identity::Role::Lighthouse));
        let job = job.unwrap_or(&etcd.job);
        return elected(runtime, &etcd.members, job, (own, way), terms);
    }
    let path = config.state_file.as_ref();
    let path = path.map(|file| job.map_or_else(|| file.clone(), |job| of_job(file, job)));
    let (file, record) = path.as_deref().map(StateFile::open).transpose()?.unzip();
    let file = file.map(Arc::new);
    let journal = file.clone().map_or(Journal::Nowhere, Journal::Disk);
    let _guard = runtime.enter();
    let (sender, role) = alone(&mut terms, record.flatten(), journal);
    let keeps = Keeps::Alone {
        _role: sender,
        _state_file: ClosedWithServer(file),
    };
    Ok((keeps, role))
}

/// Leads from now on, on the present runtime.
fn alone(
    terms: &mut Terms,
    record: Option<Record>,
    journal: Journal,
) -> (watch::Sender<Role>, watch::Receiver<Role>) {
    // It ends with the runtime: its journal never refuses.
    let (lighthouse, _) = terms.begin(record, journal);
    watch::channel(Role::Leads(lighthouse))
}

/// The only lighthouse of a job, without a port: it ends when the sender is dropped.
#[cfg(test)]
pub(crate) fn simulated(
    config: &LighthouseConfig,
    record: Option<Record>,
    journal: Journal,
) -> (Arc<Pages>, impl Send + Sync + use<>) {
    let (sender, role) = alone(&mut Terms::of(config), record, journal);
    (Arc::new(Pages::new(Frontend::new(role, &incarnation()))), sender)
}

/// A name for this run of the process.
fn incarnation() -> String {
    format!("{}-{}", std::process::id(), clock::wall().as_nanos())
}

/// Looks at etcd once, and takes part in the election from then on. Errors: `Unavailable` if etcd does not answer, `InvalidArgument` for its
/// addresses.
fn elected(
    runtime: &Runtime,
    members: &[String],
    job: &str,
    (own, way): (Leader, Way),
    mut terms: Terms,
) -> Result<(Keeps, watch::Receiver<Role>)> {
    let etcd = Arc::new(Etcd::new(members, runtime.handle())?);
    let (sender, role) = watch::channel(Role::Follows { leader: None });
    let deadline = deadline_in(REACH_ETCD);
    let election = Election::new(etcd, job, own, way, sender);
    let election = wait_for(runtime.handle(), "etcd", deadline, async move {
        election.look(deadline).await.map(|()| election)
    })?;
    let (stop, stopped) = watch::channel(false);
    let (end, ended) = mpsc::sync_channel(1);
    let begin: Begin = Box::new(move |record, journal| terms.begin(record, journal));
    runtime.spawn(async move {
        election.run(begin, stopped).await;
        let _ = end.send(());
    });
    let ended = Mutex::new(ended);
    Ok((Keeps::Elected { stop, ended }, role))
}

/// What each term of this lighthouse begins with.
struct Terms {
    rules: QuorumRules,
    quorum_tick: Duration,
    /// For the first one.
    accept_rollback: bool,
}

impl Terms {
    fn of(config: &LighthouseConfig) -> Self {
        Self {
            rules: QuorumRules {
                min_replicas: config.min_replicas,
                initial_replicas: config.initial_replicas,
                join_timeout: config.join_timeout,
                heartbeat_timeout: config.heartbeat_timeout,
            },
            quorum_tick: config.quorum_tick,
            accept_rollback: config.accept_rollback,
        }
    }

    /// Starts the task that answers, on the present runtime, with the job as `record` has it.
    fn begin(&mut self, record: Option<Record>, journal: Journal) -> (actor::Lighthouse, JoinHandle<Error>) {
        let start = Start {
            clock_ms: i64::try_from(clock::wall().as_millis()).unwrap_or(0),
            record,
            accept_rollback: std::mem::take(&mut self.accept_rollback),
        };
        let heartbeat_timeout = self.rules.heartbeat_timeout;
        let state = LighthouseState::new(self.rules.clone(), start, clock::now());
        // Of the ticks one may be late; of the heartbeats' time a part may be lost without a false alarm.
        let away_after = 2 * self.quorum_tick + heartbeat_timeout / 4;
        actor::start(state, self.quorum_tick, away_after, heartbeat_timeout, journal)
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
