//! The manager: servers of this replica, the client, and the step protocol.
//!
//! Per step: quorum (over the manager server and the lighthouse) → configure the group if the epoch is new → publish a
//! snapshot if somebody heals from here, or heal → all-reduces → vote. A pushed abort for the current epoch ends the
//! pending all-reduces at once; whatever failed, the next `start_quorum` gets a new epoch.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::{HttpTransport, Snapshot, StateDict};
use coordination::{
    CommitVote, ManagerClient, ManagerServer, ManagerServerConfig, PushEvent, QuorumRequest, QuorumResult,
    WatchGuard, is_refused,
};
use ftcore::lifecycle::configure_watched;
use ftcore::store::epoch_prefix;
use ftcore::{
    Collective, Configuration, Epoch, Error, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp, Result,
    Store, SubmitOptions, TcpStore, TcpStoreServer, Tensor, Traffic, deadline_in, join_address,
    split_address, time_left,
};

use crate::config::{ManagerConfig, WorldSizeMode};
use crate::counted::counted;
use crate::pending::{ManagedWork, Pending};
use crate::replica::{Healed, Participation, Replica, State};
use crate::reporter::Reporter;
use protocol::Lineage;

/// Keys under which group rank 0 tells the other ranks of its replica where its servers are.
const KEY_MANAGER: &str = "oxccl/manager_address";
const KEY_REPLICA_ID: &str = "oxccl/replica_id";

/// How long telling the other ranks that this one ends may take.
const TELL: Duration = Duration::from_secs(5);
/// For so long nothing listens where rank 0 of this replica did: it will not again, since its next life listens elsewhere.
const GONE: Duration = Duration::from_secs(1);

/// No quorum yet.
const NO_EPOCH: i64 = -1;

/// The servers of a replica; they live on group rank 0.
struct Servers {
    manager: ManagerServer,
    store: TcpStoreServer,
}

/// One rank of one replica. See [`Replica`] for the protocol.
pub struct Manager {
    config: ManagerConfig,
    replica_id: String,
    group: Arc<dyn ProcessGroup>,
    client: Arc<ManagerClient>,
    transport: HttpTransport,
    reporter: Reporter,
    servers: Option<Servers>,
    _watch: WatchGuard,
    /// The epoch that pushed aborts are compared with.
    live_epoch: Arc<AtomicI64>,
    /// The newest epoch that was aborted from elsewhere, and why; ids only grow, so that one is enough.
    aborted: Arc<Mutex<Option<(i64, String)>>>,
    step: i64,
    lineage: Lineage,
    members: Vec<String>,
    epoch: i64,
    /// Votes taken so far for the current (epoch, step).
    attempt: i64,
    commit_failures: i64,
    contributes: bool,
    pending: Pending,
    in_step: bool,
}

impl Manager {
    /// Starts the replica's servers (on group rank 0), reaches the lighthouse and gets ready for the first quorum.
    ///
    /// `group` is configured by the manager from then on. Errors: `InvalidArgument` for the configuration, `Unavailable`
    /// if the lighthouse cannot be reached within `connect_timeout`, `Conflict` if an address is in use.
    pub fn new(group: Arc<dyn ProcessGroup>, config: ManagerConfig) -> Result<Self> {
        config.validate()?;
        let group = counted(group, config.timeout);
        let deadline = deadline_in(config.connect_timeout);
        let (servers, replica_id, manager_address) = match (&config.lighthouse, config.group_rank) {
            (Some(lighthouse), 0) => {
                let replica_id = format!("{}:{}", config.name, random_id()?);
                let (host, _) = split_address(&config.bind)?;
                let store = TcpStoreServer::bind(&join_address(host, 0))?;
                let store_host = config
                    .advertise_host
                    .clone()
                    .unwrap_or_else(|| reachable_host(host));
                let manager = ManagerServer::start(ManagerServerConfig {
                    replica_id: replica_id.clone(),
                    lighthouse: lighthouse.clone(),
                    bind: config.bind.clone(),
                    advertise_host: Some(store_host.clone()),
                    store_address: join_address(&store_host, store.port()),
                    world_size: config.group_world_size,
                    heartbeat_interval: config.heartbeat_interval,
                    connect_timeout: config.connect_timeout,
                    ..ManagerServerConfig::default()
                })?;
                let address = manager.address();
                if let Some(meet) = &config.replica_store {
                    meet.set(KEY_MANAGER, address.as_bytes(), deadline)?;
                    meet.set(KEY_REPLICA_ID, replica_id.as_bytes(), deadline)?;
                }
                (Some(Servers { manager, store }), replica_id, address)
            }
            _ => {
                let meet = config
                    .replica_store
                    .as_ref()
                    .ok_or_else(|| Error::invalid("no replica_store to meet in"))?;
                let text = |bytes: Vec<u8>| {
                    String::from_utf8(bytes)
                        .map_err(|_| Error::new(ErrorKind::Protocol, "an address is not text"))
                };
                let address = text(meet.get(KEY_MANAGER, deadline)?)?;
                (None, text(meet.get(KEY_REPLICA_ID, deadline)?)?, address)
            }
        };
        let client = Arc::new(ManagerClient::connect(&manager_address, deadline)?);
        // The port in `bind` is the manager server's.
        let own = join_address(split_address(&config.bind)?.0, 0);
        let transport = HttpTransport::start(&own, config.advertise_host.as_deref())?;
        let reporter = Reporter::start(client.clone())?;
        let live_epoch = Arc::new(AtomicI64::new(NO_EPOCH));
        let aborted: Arc<Mutex<Option<(i64, String)>>> = Arc::default();
        let watch = {
            let (live, aborted, group) = (live_epoch.clone(), aborted.clone(), group.clone());
            client.watch(
                config.group_rank,
                Arc::new(move |event: PushEvent| {
                    let PushEvent::AbortEpoch {
                        quorum_id,
                        reason,
                        departed,
                    } = event
                    else {
                        return;
                    };
                    let who = if departed.is_empty() {
                        String::new()
                    } else {
                        format!(" (gone: {})", departed.join(", "))
                    };
                    let text = format!("epoch {quorum_id} was aborted: {reason}{who}");
                    tracing::info!("{text}");
                    // Kept even if it is not the live epoch: the push may overtake the answer that names the epoch.
                    {
                        let mut newest = aborted.lock().unwrap_or_else(PoisonError::into_inner);
                        // Of several reasons for one epoch the last tells most: who is gone, after who said so.
                        if newest.as_ref().is_none_or(|(epoch, _)| *epoch <= quorum_id) {
                            *newest = Some((quorum_id, text.clone()));
                        }
                    }
                    if live.load(Ordering::Acquire) == quorum_id {
                        group.abort(&text);
                    }
                }),
            )
        };
        Ok(Self {
            config,
            replica_id,
            group,
            client,
            transport,
            reporter,
            servers,
            _watch: watch,
            live_epoch,
            aborted,
            step: 0,
            lineage: Lineage::default(),
            members: Vec::new(),
            epoch: NO_EPOCH,
            attempt: 0,
            commit_failures: 0,
            contributes: false,
            pending: Pending::default(),
            in_step: false,
        })
    }

    /// This life's id: `name:random`.
    pub fn replica_id(&self) -> &str {
        &self.replica_id
    }

    /// Sets the step and lineage of state that was loaded from a disk checkpoint before the first quorum.
    ///
    /// Errors: `InvalidState` once a quorum was asked for.
    pub fn restore(&mut self, step: i64, lineage: Lineage) -> Result<()> {
        if self.epoch != NO_EPOCH {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "restore comes before the first quorum",
            ));
        }
        self.step = step;
        self.lineage = lineage;
        Ok(())
    }

    /// The identity of the current state, for a disk checkpoint.
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// Why the epoch is over, once the lighthouse has said that it is.
    fn epoch_is_over(&self) -> Option<String> {
        over(&self.aborted, self.epoch)
    }

    /// Why the group cannot be used for another collective without a new epoch, if it cannot.
    fn broken(&self) -> Option<String> {
        self.group
            .error()
            .map(|e| e.to_string())
            .or_else(|| self.epoch_is_over())
    }

    /// This rank ends with `error`. The other ranks of its replica would wait for its next call: they are told.
    fn give_up(&self, error: &Error, deadline: Instant) {
        if self.config.group_world_size == 1 {
            return;
        }
        let vote = CommitVote {
            group_rank: self.config.group_rank,
            step: self.step,
            quorum_id: self.epoch,
            attempt: self.attempt,
            vote: false,
        };
        let deadline = deadline.min(deadline_in(TELL));
        if let Err(e) = self.client.give_up(&vote, &error.to_string(), deadline) {
            tracing::warn!(error = %e, "the other ranks of this replica were not told that this one gives up");
        }
    }

    fn ask(&self, deadline: Instant) -> Result<QuorumResult> {
        let broken = self.epoch != NO_EPOCH && self.broken().is_some();
        let request = QuorumRequest {
            group_rank: self.config.group_rank,
            step: self.step,
            checkpoint_metadata: self.transport.metadata(),
            shrink_only: false,
            init_sync: self.config.init_sync,
            // A broken group needs a new epoch even if no vote was lost over it.
            commit_failures: self.commit_failures.max(i64::from(broken)),
            lineage: self.lineage.as_str().to_string(),
            last_quorum_id: self.epoch.max(0),
        };
        self.client.quorum(&request, deadline)
    }

    /// Asks until there is an answer or the deadline passes; what can be retried is (L28).
    fn ask_until(&self, deadline: Instant) -> Result<QuorumResult> {
        // Epochs that keep failing at once (members that cannot reach each other) must not become a busy loop.
        if let Some(doublings) = u32::try_from(self.commit_failures)
            .ok()
            .and_then(|n| n.checked_sub(3))
        {
            let pause = Duration::from_millis(10 << doublings.min(6));
            std::thread::park_timeout(pause.min(time_left(deadline)));
        }
        let mut pause = Duration::from_millis(20);
        let mut refused = None;
        loop {
            match self.ask(deadline) {
                Ok(answer) => return Ok(answer),
                Err(e) if is_refused(&e) && refused.is_some_and(|since: Instant| since.elapsed() >= GONE) => {
                    let text = format!(
                        "rank 0 of this replica is gone, and its servers with it ({}); start this rank again, too: a replica goes on as a whole",
                        e.message()
                    );
                    return Err(Error::new(ErrorKind::PeerLost, text)
                        .with_peer(0)
                        .with_op("quorum")
                        .with_source(e));
                }
                Err(e) if e.is_retryable() && time_left(deadline) > pause => {
                    tracing::warn!(error = %e, "no quorum yet; asking again");
                    refused = is_refused(&e).then(|| refused.unwrap_or_else(Instant::now));
                    // There is nothing to wait on: the server is what is missing.
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                Err(e) => return Err(e.with_op("quorum")),
            }
        }
    }

    /// Casts the vote, again if the way to the server broke: the answer may be lost while the other ranks have theirs, and a rank that took
    /// that for a no would stand at another step than they. The server counts the same vote once.
    fn vote(&self, vote: &CommitVote, deadline: Instant) -> Result<bool> {
        let mut pause = Duration::from_millis(20);
        let mut refused: Option<Instant> = None;
        loop {
            let error = match self.client.should_commit(vote, deadline) {
                Err(e) if e.kind() == ErrorKind::Unavailable && time_left(deadline) > pause => e,
                answer => return answer,
            };
            refused = is_refused(&error).then(|| refused.unwrap_or_else(Instant::now));
            if refused.is_some_and(|since| since.elapsed() >= GONE) {
                return Err(error);
            }
            tracing::warn!(%error, step = vote.step, "no answer to the vote; casting it again");
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    fn configure(&mut self, answer: &QuorumResult, deadline: Instant) -> Result<()> {
        let epoch = u64::try_from(answer.quorum_id).map_err(|_| {
            Error::new(
                ErrorKind::Protocol,
                format!("quorum id {} is negative", answer.quorum_id),
            )
        })?;
        if let Some(servers) = &self.servers {
            servers.store.begin_epoch(epoch);
        }
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect(&answer.store_address, deadline)?);
        let configuration = Configuration {
            store,
            prefix: epoch_prefix(epoch, self.config.group_rank),
            name: self.replica_id.clone(),
            epoch: Epoch(epoch),
            rank: answer.replica_rank,
            world_size: answer.replica_world_size,
            deadline,
        };
        // Before the group connects a push has nothing to abort, and whoever is gone would be waited for until the deadline.
        let (aborted, epoch) = (&*self.aborted, self.epoch);
        configure_watched(&*self.group, configuration, &|| {
            let text = format!(
                "the epoch was over before the group connected: {}",
                over(aborted, epoch)?
            );
            Some(Error::new(ErrorKind::Aborted, text))
        })
    }

    fn publish(&self, answer: &QuorumResult, state: &dyn State) -> Result<()> {
        let mut dict = StateDict::new();
        state.save(&mut dict)?;
        dict.set_metadata("manager.lineage", self.lineage.as_str());
        self.transport
            .publish(Snapshot::new(answer.max_step, answer.quorum_id, &dict)?);
        Ok(())
    }

    fn heal(&mut self, answer: &QuorumResult, state: &mut dyn State, deadline: Instant) -> Result<Healed> {
        let begun = Instant::now();
        let source = ManagerClient::connect(&answer.recover_src_manager_address, deadline)?;
        loop {
            let url = source.checkpoint_metadata(self.config.group_rank, deadline)?;
            let (epoch, dict) = checkpoint::fetch(&[url], answer.max_step, deadline)?;
            if epoch != answer.quorum_id {
                // A snapshot of the same step from an earlier attempt: the newer one is being made right now.
                if time_left(deadline).is_zero() {
                    return Err(Error::timeout(format!(
                        "the source serves step {} of epoch {epoch}, not of epoch {}",
                        answer.max_step, answer.quorum_id
                    )));
                }
                std::thread::park_timeout(Duration::from_millis(5));
                continue;
            }
            state.load(&dict)?;
            // Only now: the step advances with the state, never before it (INV-5, L03).
            self.step = answer.max_step;
            let lineage = dict
                .metadata()
                .get("manager.lineage")
                .cloned()
                .unwrap_or_default();
            self.lineage = Lineage::from_peer(lineage);
            return Ok(Healed {
                source: answer.recover_src_replica_rank,
                bytes: dict.total_bytes(),
                took: begun.elapsed(),
            });
        }
    }

    fn follow(
        &mut self,
        answer: &QuorumResult,
        state: &mut dyn State,
        deadline: Instant,
    ) -> Result<Option<Healed>> {
        // The id alone is not proof: a restarted lighthouse must not be able to make two worlds look like one (L01).
        let same = answer.quorum_id == self.epoch && answer.replica_ids == self.members;
        if answer.quorum_id == self.epoch {
            let why = if same {
                self.broken()
            } else {
                Some("its members are others now".to_owned())
            };
            if let Some(why) = why {
                // It broke after the question was asked: an epoch is never configured twice (INV-1).
                let text = format!("epoch {} ended before it was used again: {why}", self.epoch);
                return Err(Error::new(ErrorKind::Aborted, text));
            }
        }
        if !same {
            self.epoch = answer.quorum_id;
            self.attempt = 0;
            self.members = answer.replica_ids.clone();
            self.live_epoch.store(answer.quorum_id, Ordering::Release);
        }
        // Snapshot first: whoever heals needs it while this replica is still connecting.
        if !answer.recover_dst_replica_ranks.is_empty() {
            self.publish(answer, state)?;
        } else {
            self.transport.retire();
        }
        if !same {
            let limit = deadline_in(self.config.timeout).min(deadline);
            self.configure(answer, limit)?;
            // A push that came while the group was connecting had nothing to abort.
            if let Some(why) = self.broken() {
                return Err(Error::new(
                    ErrorKind::Aborted,
                    format!("the epoch was over while the group connected: {why}"),
                ));
            }
        }
        if !answer.heal {
            return Ok(None);
        }
        let limit = deadline_in(self.config.timeout).min(deadline);
        self.heal(answer, state, limit).map(Some).map_err(|e| {
            let source = answer
                .recover_src_replica_rank
                .and_then(|r| answer.replica_ids.get(r as usize));
            let source = source.map_or(answer.recover_src_manager_address.as_str(), String::as_str);
            let text = format!(
                "replica '{}' cannot take over the state of replica '{source}': {e}",
                self.replica_id
            );
            Error::new(e.kind(), text).with_op("heal").with_source(e)
        })
    }
}

impl Replica for Manager {
    fn start_quorum(&mut self, state: &mut dyn State, deadline: Instant) -> Result<Participation> {
        // An abandoned step must not leave its reductions running into the next one.
        if self.in_step && self.pending.drain(Instant::now()).is_err() {
            self.group.abort("the step was abandoned");
            self.commit_failures = self.commit_failures.max(1);
        }
        self.pending = Pending::default();
        self.in_step = false;
        let answer = self.ask_until(deadline)?;
        self.in_step = true;
        let spare = self.config.world_size_mode == WorldSizeMode::FixedWithSpares
            && answer
                .max_replica_rank
                .is_none_or(|r| r >= self.config.min_replicas);
        let mut healed = None;
        self.contributes = match self.follow(&answer, state, deadline) {
            Ok(h) => {
                healed = h;
                healed.is_none() && !spare
            }
            Err(e) if is_permanent(&e) => {
                self.in_step = false;
                self.group.abort(&e.to_string());
                self.reporter.send(answer.quorum_id, &e);
                self.give_up(&e, deadline);
                return Err(e);
            }
            Err(e) => {
                // The other ranks of this replica may be in the step already and will vote on it. So this one votes as
                // well, with a no, and all of them ask for the next epoch together.
                tracing::warn!(error = %e, epoch = answer.quorum_id, "this epoch did not come up; it will not commit");
                self.group.abort(&e.to_string());
                self.report_error(e);
                false
            }
        };
        Ok(Participation {
            epoch: self.epoch,
            step: self.step,
            replica_rank: answer.replica_rank,
            replica_world_size: answer.replica_world_size,
            contributes: self.contributes,
            healed,
            members: answer.replica_ids,
        })
    }

    fn allreduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        if !self.in_step {
            let e = Error::new(
                ErrorKind::InvalidState,
                "there is no quorum: call start_quorum first",
            )
            .with_op("all_reduce");
            return ManagedWork::failed(e, tensors);
        }
        if let Some(e) = self.pending.error() {
            return ManagedWork::failed(e, tensors);
        }
        let options = SubmitOptions {
            deadline: Some(deadline_in(self.config.timeout)),
            contribute: self.contributes,
            stream: None,
        };
        match self.group.run(Collective::AllReduce { tensors, op }, options) {
            Ok(work) => {
                let (reporter, epoch) = (self.reporter.clone(), self.epoch);
                self.pending
                    .track(&work, move |error| reporter.send(epoch, &error));
                ManagedWork::submitted(work)
            }
            Err(rejected) => {
                self.report_error(rejected.error.clone());
                ManagedWork::failed(rejected.error, rejected.op.into_tensors())
            }
        }
    }

    fn should_commit(&mut self, deadline: Instant) -> Result<bool> {
        if !self.in_step {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "there is no quorum to vote on: call start_quorum first",
            ));
        }
        self.in_step = false;
        if let Err(e) = self.pending.drain(deadline) {
            self.report_error(e);
            self.group.abort("a reduction did not finish in time");
        }
        if let Some(n) = self
            .pending
            .least_contributors()
            .filter(|&n| n < self.config.min_replicas)
        {
            self.report_error(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{n} replicas contributed; min_replicas is {}",
                    self.config.min_replicas
                ),
            ));
        }
        let local = self.pending.error();
        if let Some(e) = local.as_ref().filter(|e| is_permanent(e)) {
            // A lost vote would be repeated until the time limit, with the same end.
            self.commit_failures += 1;
            self.give_up(e, deadline);
            return Err(e.clone());
        }
        let vote = CommitVote {
            group_rank: self.config.group_rank,
            step: self.step,
            quorum_id: self.epoch,
            attempt: self.attempt,
            vote: local.is_none(),
        };
        self.attempt += 1;
        let decision = self.vote(&vote, deadline);
        match &decision {
            Ok(true) => {
                self.lineage = self.lineage.after(self.epoch, self.step);
                self.step += 1;
                self.attempt = 0;
                self.commit_failures = 0;
            }
            other => {
                self.commit_failures += 1;
                tracing::warn!(
                    step = self.step,
                    epoch = self.epoch,
                    error = ?local.map(|e| e.to_string()).or_else(|| other.as_ref().err().map(ToString::to_string)),
                    "the step did not commit"
                );
            }
        }
        decision
    }

    fn current_step(&self) -> i64 {
        self.step
    }

    fn report_error(&mut self, error: Error) {
        if self.pending.fail(error.clone()) {
            self.reporter.send(self.epoch, &error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.pending.error()
    }

    fn traffic(&self) -> Traffic {
        self.group.traffic()
    }

    fn leave(&mut self, deadline: Instant) -> Result<()> {
        self.in_step = false;
        self.live_epoch.store(NO_EPOCH, Ordering::Release);
        self.group.shutdown(deadline)?;
        if let Some(servers) = self.servers.take() {
            // A lighthouse that is gone already needs no good-bye.
            if let Err(error) = servers.manager.leave(deadline) {
                tracing::warn!(%error, "the lighthouse did not hear the good-bye");
            }
            // The other ranks may not have read the answer to their last vote yet.
            if let Err(error) = servers.manager.shutdown(deadline) {
                tracing::warn!(%error, "some rank of this replica may not have its last answer");
            }
            servers.store.shutdown();
        }
        Ok(())
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.group.abort("the manager was dropped");
        if let Some(servers) = self.servers.take() {
            servers.store.shutdown();
        }
    }
}

/// Why `epoch` is over, once the lighthouse has said that it is.
fn over(aborted: &Mutex<Option<(i64, String)>>, epoch: i64) -> Option<String> {
    let aborted = aborted.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, why) = aborted.as_ref().filter(|(newest, _)| *newest >= epoch)?;
    Some(why.clone())
}

/// True for an error that the same step would meet again in every other epoch: the call itself is wrong, or nothing here can do it.
fn is_permanent(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported)
}

/// 128 random bits: two lives of one name never share an id.
fn random_id() -> Result<String> {
    use std::fmt::Write as _;
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("reading random bytes", e.into()))?;
    Ok(bytes.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}");
        text
    }))
}

/// What other machines call this one when it listens on `host`.
fn reachable_host(host: &str) -> String {
    match host {
        "0.0.0.0" | "::" => {
            let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
            if name.is_empty() { "127.0.0.1".into() } else { name }
        }
        fixed => fixed.to_string(),
    }
}
