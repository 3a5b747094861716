//! The lighthouse: one small service per job through which replicas find each other.
//!
//! gRPC and HTTP share one port. Every call becomes a message to one task that owns the [`protocol::quorum`] state; that
//! task answers calls, pushes events over the replicas' open streams, and saves the job's record before it delivers a new
//! epoch (`journal`: on disk, or in etcd). With etcd several lighthouses share a job: one leads it and has that task (`election`, `term`), the
//! others refuse and name it (`frontend`).

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ftcore::{Error, Result, deadline_in, time_left};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::channel::wait_for;
use crate::etcd::Etcd;
use crate::serve::{self, ConnectionLimits, Service};
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
mod journal;
mod page;
mod reply;
mod saved;
mod service;
mod term;

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
    /// Keeps the record in etcd instead. Several lighthouses may share a job so: one leads, and another one goes on where it stopped.
    pub etcd: Option<EtcdConfig>,
    /// What its clients' connections may take. Its `silence` is not used: the heartbeat time-out is.
    pub limits: ConnectionLimits,
    /// The operator's word, for the first quorum: it may go back to an earlier step than the recorded one, and needs no majority of the
    /// recorded members. With etcd it holds when this lighthouse leads for the first time.
    pub accept_rollback: bool,
}

/// Where a job's lighthouses meet.
#[derive(Debug, Clone)]
pub struct EtcdConfig {
    /// The client ports of the cluster's members, `host:port`; one of them is enough, more outlive its end.
    pub members: Vec<String>,
    /// The job's name: 1 to 128 letters, digits, `-`, `_` and `.`. Its keys are `/oxccl/NAME/leader` and `/oxccl/NAME/record`.
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
            etcd: None,
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
    keeps: Keeps,
}

/// What a lighthouse keeps for as long as it runs.
#[derive(Debug)]
enum Keeps {
    /// It is the only one of its job: it always leads.
    Alone {
        _role: watch::Sender<Role>,
        _state_file: ClosedWithServer,
    },
    /// It takes part in the election. Told to end, it gives up its lead first.
    Elected {
        stop: watch::Sender<bool>,
        ended: mpsc::Receiver<()>,
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
        let file = config.state_file.as_deref().map(StateFile::open).transpose()?;
        let listener = serve::listen("the lighthouse", &config.bind)?;
        let address = serve::url(&listener, config.advertise_host.as_deref())?;
        let incarnation = incarnation();
        let runtime = serve::runtime("ox-lighthouse", 2)?;
        let mut terms = Terms::of(&config);
        let (keeps, role) = match &config.etcd {
            None => {
                let (file, record) = file.unzip();
                let file = file.map(Arc::new);
                let journal = file.clone().map_or(Journal::Nowhere, Journal::Disk);
                let _guard = runtime.enter();
                // It ends with the runtime: its journal never refuses.
                let (lighthouse, _) = terms.begin(record.flatten(), journal);
                let (sender, role) = watch::channel(Role::Leads(lighthouse));
                let keeps = Keeps::Alone {
                    _role: sender,
                    _state_file: ClosedWithServer(file),
                };
                (keeps, role)
            }
            Some(etcd) => {
                let own = Leader {
                    address: address.clone(),
                    incarnation: incarnation.clone(),
                };
                match elected(&runtime, etcd, own, terms) {
                    Ok(started) => started,
                    Err(error) => {
                        runtime.shutdown_background();
                        return Err(error);
                    }
                }
            }
        };
        // Its replicas' streams never end by themselves: there is nothing to give time to.
        let service = Service::start(
            runtime,
            listener,
            page::routes(Frontend::new(role, &incarnation)),
            limits,
            Duration::ZERO,
        )?;
        tracing::info!(address, "the lighthouse listens");
        Ok(Self {
            service,
            address,
            keeps,
        })
    }

    /// The URL that managers are given: `http://host:port`.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Gives up the lead, if it is shared, and closes the port and all connections. Errors: `Timeout` if that takes longer; it goes on in the
    /// background.
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        // The file is free for the next lighthouse once nobody is served any more.
        let Self { service, keeps, .. } = self;
        if let Keeps::Elected { stop, ended } = &keeps {
            stop.send_replace(true);
            // If etcd does not answer, the lease ends by itself.
            let _ = ended.recv_timeout(time_left(deadline).min(RESIGN));
        }
        service.shutdown("the lighthouse", deadline)
    }
}

/// A name for this run of the process.
fn incarnation() -> String {
    let clock = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    format!("{}-{clock}", std::process::id())
}

/// Looks at etcd once, and takes part in the election from then on. Errors: `Unavailable` if etcd does not answer, `InvalidArgument` for its
/// addresses.
fn elected(
    runtime: &Runtime,
    config: &EtcdConfig,
    own: Leader,
    mut terms: Terms,
) -> Result<(Keeps, watch::Receiver<Role>)> {
    let etcd = Arc::new(Etcd::new(&config.members, runtime.handle())?);
    let (sender, role) = watch::channel(Role::Follows { leader: None });
    let deadline = deadline_in(REACH_ETCD);
    let election = Election::new(etcd, &config.job, own, sender);
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
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_millis());
        let start = Start {
            clock_ms: i64::try_from(clock).unwrap_or(0),
            record,
            accept_rollback: std::mem::take(&mut self.accept_rollback),
        };
        let heartbeat_timeout = self.rules.heartbeat_timeout;
        let state = LighthouseState::new(self.rules.clone(), start, Instant::now());
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
