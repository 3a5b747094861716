//! The manager server: one per replica, between its ranks and the lighthouse.
//!
//! Ranks ask it for a quorum and vote on it; it asks the lighthouse once for all of them. It keeps a stream to the
//! lighthouse open, whose break tells the lighthouse of this process's death at once, and passes on what comes down
//! that stream to the ranks that watch.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use ftcore::{Credentials, Error, ErrorKind, Result};
use identity::{Acceptor, Party, Role, name_of};

use crate::channel::wait_for;
use crate::clock::{self, deadline_in};
use crate::lighthouses::Lighthouses;
use crate::serve::{self, Closure, ConnectionLimits, Served, Service};
use protocol::Member;

mod actor;
mod counts;
mod presence;
mod service;
pub(crate) mod uplink;

use actor::Manager;
pub use counts::{RankCounts, Timed};
use protocol::replica::{ReplicaEvent, ReplicaRules};
use uplink::Uplink;

/// What the answers that are on their way to the other ranks may still take in a shut-down.
const GRACE: Duration = Duration::from_secs(1);

/// How a manager server behaves.
#[derive(Debug, Clone)]
pub struct ManagerServerConfig {
    /// The replica: `name:uuid`, another uuid in every incarnation.
    pub replica_id: String,
    /// The lighthouse's URL, `http://host:port`. Of several lighthouses that share the job all, separated by commas; the leading one is found.
    pub lighthouse: String,
    /// Where to listen, `host:port`; port 0 takes a free one.
    pub bind: String,
    /// The host in [`ManagerServer::address`]; by default the bound address, or this machine's towards the outside.
    pub advertise_host: Option<String>,
    /// The replica's key-value store, `host:port`; told to the other replicas.
    pub store_address: String,
    /// The number of ranks in the replica.
    pub world_size: u32,
    /// How often the lighthouse gets a heartbeat, from the first quorum call on.
    pub heartbeat_interval: Duration,
    /// How long the lighthouse may take to be reached at the start.
    pub connect_timeout: Duration,
    /// A rank that neither waits in a call nor shows progress ([`ManagerClient::progress`](crate::ManagerClient::progress)) for this long
    /// takes the replica out of the quorum.
    pub progress_timeout: Duration,
    /// How often a quorum call to the lighthouse is tried again before the ranks are told of its failure.
    pub quorum_retries: u32,
    /// What its clients' connections may take.
    pub limits: ConnectionLimits,
    /// As whom it serves and calls: the replica that `replica_id` names, towards the members of the same job. `None`: those of `OXCCL_CREDENTIALS`, if
    /// it is set.
    pub credentials: Option<Arc<Credentials>>,
    /// Without credentials, listen where other machines reach it (or `OXCCL_INSECURE=1`).
    pub insecure: bool,
}

impl Default for ManagerServerConfig {
    /// Loopback on a free port, one rank, 100 ms heartbeats, 10 s to connect, two minutes for progress, no retries. The ids and
    /// addresses are empty: set them.
    fn default() -> Self {
        Self {
            replica_id: String::new(),
            lighthouse: String::new(),
            bind: "127.0.0.1:0".into(),
            advertise_host: None,
            store_address: String::new(),
            world_size: 1,
            heartbeat_interval: Duration::from_millis(100),
            connect_timeout: Duration::from_secs(10),
            progress_timeout: Duration::from_secs(120),
            quorum_retries: 0,
            limits: ConnectionLimits::manager(),
            credentials: None,
            insecure: false,
        }
    }
}

/// Starts the tasks of a manager server on the present runtime; others reach its routes at `address`.
pub(crate) fn begin(
    config: &ManagerServerConfig,
    lighthouses: Lighthouses,
    address: String,
) -> (Manager, Router) {
    let incarnation = format!("{}-{}", std::process::id(), clock::wall().as_nanos());
    let own = Member {
        replica_id: config.replica_id.clone(),
        address,
        store_address: config.store_address.clone(),
        world_size: u64::from(config.world_size),
        incarnation,
        ..Member::default()
    };
    let uplink = Uplink::new(lighthouses, own, config.heartbeat_interval, config.quorum_retries);
    let rules = ReplicaRules {
        replica_id: config.replica_id.clone(),
        world_size: config.world_size,
        progress_timeout: config.progress_timeout,
        grace: service::GRACE,
    };
    let manager = actor::start(uplink.clone(), rules);
    uplink.keep_attached(manager.clone());
    let routes = service::routes(manager.clone());
    (manager, routes)
}

/// A running manager server. Dropping it closes everything at once, which the lighthouse takes for the replica's death.
#[derive(Debug)]
pub struct ManagerServer {
    service: Service,
    manager: Manager,
    uplink: Uplink,
    address: String,
}

impl ManagerServer {
    /// Reaches the lighthouse and starts to listen.
    ///
    /// Errors: `InvalidArgument` for the configuration, `Unavailable` if the lighthouse cannot be reached within
    /// `connect_timeout`, `Conflict` if the address is in use.
    pub fn start(config: ManagerServerConfig) -> Result<Self> {
        protocol::quorum::check_id(&config.replica_id)?;
        if config.world_size == 0 {
            return Err(Error::invalid("world_size is 0; a replica has at least one rank"));
        }
        if config.heartbeat_interval.is_zero() || config.progress_timeout.is_zero() {
            return Err(Error::invalid(
                "heartbeat_interval and progress_timeout are longer than zero",
            ));
        }
        config.limits.validate()?;
        let party = identity::credentials(config.credentials.as_ref())?
            .map(|c| Party::new(&c, Role::Replica(name_of(&config.replica_id).to_owned())))
            .transpose()?;
        let closure = Closure::new(party.is_some(), config.insecure);
        let listener = serve::listen("the manager server", &config.bind, closure)?;
        let address = serve::url(&listener, config.advertise_host.as_deref(), closure)?;
        let runtime = serve::runtime("ox-manager-srv", 2)?;
        let deadline = deadline_in(config.connect_timeout);
        let reached = Lighthouses::reach(runtime.handle(), party.clone(), &config.lighthouse, deadline);
        let lighthouses = match reached {
            Ok(lighthouses) => lighthouses,
            Err(error) => {
                // A look-up of its name may hang for longer than a caller waits.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let (manager, routes) = {
            let _guard = runtime.enter();
            begin(&config, lighthouses, address.clone())
        };
        let uplink = manager.uplink.clone();
        let served = match party {
            None => Served::All(Arc::new(routes)),
            Some(party) => {
                let jobs = HashMap::from([(party.job().to_owned(), Arc::new(routes))]);
                Served::Jobs(Acceptor::new(&[party], config.limits.handshakes()), jobs)
            }
        };
        let service = Service::start(runtime, listener, served, config.limits, GRACE)?;
        tracing::info!(
            replica = config.replica_id,
            address,
            lighthouse = config.lighthouse,
            "the manager server listens"
        );
        Ok(Self {
            service,
            manager,
            uplink,
            address,
        })
    }

    /// The URL that the replica's ranks and the other replicas are given: `http://host:port`, `https://` with credentials.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Tells the lighthouse that the replica goes, so that no replica waits for it; heartbeats end, and a rank of this replica that still waits
    /// is told with `Mismatch`. Errors: `Timeout` or `Unavailable` if the lighthouse could not be told.
    pub fn leave(&self, deadline: Instant) -> Result<()> {
        let Some(handle) = self.service.handle() else {
            return Ok(());
        };
        let text = "rank 0 of this replica has left, and its servers with it: leave as well";
        let why = Error::new(ErrorKind::Mismatch, text);
        self.manager.tell(ReplicaEvent::Close { why });
        let uplink = self.uplink.clone();
        wait_for(
            &handle,
            "leave",
            deadline,
            async move { uplink.leave(deadline).await },
        )
    }

    /// Closes the port and, once the ranks have their answers, all connections. Errors: `Timeout` if that takes longer; it goes on in the
    /// background.
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        self.uplink.stop();
        self.manager.tell(ReplicaEvent::Close { why: actor::gone() });
        self.service.shutdown("the manager server", deadline)
    }
}
