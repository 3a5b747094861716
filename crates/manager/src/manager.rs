//! The manager: servers of this replica, the client, and the step protocol.
//!
//! What comes next in a step, and what survives a failed attempt, is decided by [`protocol::rank::Rank`]; here it is carried
//! out. Per step: quorum (over the manager server and the lighthouse; `quorum`, ahead of the caller's call if it began it) → publish a snapshot if a replica heals from here →
//! configure the group if the epoch is new → heal if this replica is behind, or send the snapshot over the group → all-reduces → vote. A pushed abort for the
//! current epoch ends the pending all-reduces at once; whatever failed, the next `start_quorum` gets a new epoch.
//!
//! Over 800 lines because the calls of `Replica` share one state, and stand together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use checkpoint::{Distrusted, HttpTransport, Kept, Snapshot, TransportOptions};
use coordination::{
    Cancel, CommitVote, ManagerClient, ManagerServer, ManagerServerConfig, PushEvent, QuorumRequest,
    QuorumResult, WatchGuard, is_refused,
};
use ftcore::{
    Collective, DType, Epoch, Error, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp,
    Result, Step, SubmitOptions, TcpStoreServer, Tensor, Traffic, deadline_in, join_address, split_address,
    time_left,
};

use identity::{Party, Role};

use crate::config::{HealOver, ManagerConfig, WorldSizeMode};
use crate::counted::counted;
use crate::ends::{Ends, NO_EPOCH};
use crate::event_log::{self, EventLog};
use crate::heal;
use crate::killed::end_process;
use crate::meeting;
use crate::names::{only_here, random_id, told_host};
use crate::observed::{Attempt, Observed};
use crate::quorum::{Ahead, GONE, Interrupter, Search};
use crate::reporter::Reporter;
use crate::spans::Spans;
use protocol::Lineage;
use protocol::commit::VoteKey;
use protocol::rank::{Next, Rank, RankRules};
use replica::{Healed, ManagedWork, Members, Participation, Pending, Replica, State};

/// How long telling the other ranks, or the lighthouse, that this one ends may take.
const TELL: Duration = Duration::from_secs(5);

/// The longest time between two messages of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// The servers of a replica; they live on group rank 0.
struct Servers {
    manager: ManagerServer,
    store: Arc<TcpStoreServer>,
}

/// One rank of one replica. See [`Replica`] for the protocol.
///
/// ```no_run
/// # extern crate replica as oxccl_replica;
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use backend_gloo::GlooGroup;
/// use ftcore::{GroupOptions, ReduceOp, Tensor, deadline_in};
/// use oxccl_manager::{Manager, ManagerConfig};
/// use oxccl_replica::Replica as _;
///
/// let group = Arc::new(GlooGroup::new("gradients", GroupOptions::default())?);
/// let mut manager = Manager::new(group, ManagerConfig::new("replica0", "http://127.0.0.1:29510"))?;
/// let mut weights = vec![0.0_f32; 8]; // the state: what a replica that comes back takes over
/// for _ in 0..100 {
///     let deadline = deadline_in(Duration::from_secs(60));
///     manager.start_quorum(&mut weights, deadline)?;
///     let gradients = Tensor::from_vec(vec![1.0_f32; 8]);
///     let mean = manager.all_reduce(vec![gradients], ReduceOp::Avg);
///     if manager.should_commit(deadline)? {
///         let mean = mean.take()?.into_tensor()?;
///         weights.iter_mut().zip(mean.as_slice::<f32>()?).for_each(|(w, g)| *w -= 0.1 * g);
///     } // else: a replica died; nothing was applied, and the same step is done again
/// }
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct Manager {
    config: ManagerConfig,
    replica_id: String,
    /// This process in its job, with credentials.
    party: Option<Arc<Party>>,
    group: Arc<dyn ProcessGroup>,
    client: Arc<ManagerClient>,
    transport: Arc<HttpTransport>,
    search: Search,
    /// The quorum that [`Replica::begin_quorum`] asked for.
    ahead: Ahead,
    /// What came in a heal that failed.
    kept: Kept,
    /// Sources that sent wrong bytes over the group in a heal that failed.
    distrusted: Distrusted,
    /// The state that this attempt offers to members over the group.
    offered: Option<Arc<Snapshot>>,
    reporter: Reporter,
    servers: Option<Servers>,
    _watch: WatchGuard,
    ends: Arc<Ends>,
    rank: Rank,
    shrink_only: AtomicBool,
    /// Grows whenever the training thread shows that it moves.
    progress: Arc<AtomicU64>,
    _progress: WatchGuard,
    pending: Pending,
    observed: Arc<Observed>,
    /// When the present attempt began.
    begun: Instant,
}

/// A group that cannot be aborted, or not be used again, would keep the replica in the first epoch that breaks.
fn outlives_an_epoch(group: &dyn ProcessGroup) -> Result<()> {
    let needed = [
        (Feature::Abort, "aborted"),
        (Feature::Reconfigure, "configured again"),
    ];
    let Some((_, lacks)) = needed
        .into_iter()
        .find(|(feature, _)| !group.capabilities().has(*feature))
    else {
        return Ok(());
    };
    Err(Error::unsupported(format!(
        "a manager needs a group that can be {lacks}, which one of {} cannot in this process; run it in a child process: \
         `oxccl::backend::fault_tolerant_group` does, or `isolate::wrap`",
        group.info().backend
    )))
}

impl Manager {
    /// Starts the replica's servers (on group rank 0), reaches the lighthouse and gets ready for the first quorum.
    ///
    /// `group` is configured by the manager from then on. Errors: `InvalidArgument` for the configuration, `Unsupported` for a group that cannot
    /// be aborted or configured again, or over which no state can travel with [`HealOver::Group`], `Unavailable` if the lighthouse cannot be reached within `connect_timeout`, `Conflict` if an address is in
    /// use.
    pub fn new(group: Arc<dyn ProcessGroup>, config: ManagerConfig) -> Result<Self> {
        config.validate()?;
        outlives_an_epoch(&*group)?;
        if config.heal_over == HealOver::Group {
            checkpoint::check_group(&*group).map_err(|e| {
                let text = format!("ManagerConfig::heal_over is the group: {}", e.message());
                Error::unsupported(text)
            })?;
        }
        let group = counted(group, config.timeout);
        let deadline = deadline_in(config.connect_timeout);
        let credentials = identity::credentials(config.credentials.as_ref())?;
        let party = match &credentials {
            Some(credentials) => Some(Party::new(credentials, Role::Replica(config.name.clone()))?),
            None => None,
        };
        let (servers, replica_id, manager_address, client) = match (&config.lighthouse, config.group_rank) {
            (Some(lighthouse), 0) => {
                if let Some(meet) = &config.replica_store {
                    meeting::Servers::withdraw(&**meet, deadline)?;
                }
                let replica_id = format!("{}:{}", config.name, random_id()?);
                let (host, _) = split_address(&config.bind)?;
                let at = join_address(host, 0);
                let store = match (&credentials, config.insecure) {
                    (None, false) => TcpStoreServer::bind(&at)?,
                    (credentials, _) => TcpStoreServer::bind_with(&at, credentials.clone())?,
                };
                let store_host = told_host(config.advertise_host.as_deref(), host, lighthouse);
                if let Some(text) = only_here(&store_host, lighthouse) {
                    tracing::warn!("{text}");
                }
                let manager = ManagerServer::start(ManagerServerConfig {
                    replica_id: replica_id.clone(),
                    lighthouse: lighthouse.clone(),
                    bind: config.bind.clone(),
                    advertise_host: Some(store_host.clone()),
                    store_address: join_address(&store_host, store.port()),
                    world_size: config.group_world_size,
                    heartbeat_interval: config.heartbeat_interval,
                    progress_timeout: config.progress_timeout,
                    connect_timeout: config.connect_timeout,
                    credentials: credentials.clone(),
                    insecure: config.insecure,
                    ..ManagerServerConfig::default()
                })?;
                let address = manager.address();
                let told = meeting::Servers { address, replica_id };
                if let Some(meet) = &config.replica_store {
                    told.publish(&**meet, deadline)?;
                }
                let meeting::Servers { address, replica_id } = told;
                let client = ManagerClient::connect_as(party.clone(), Some(&replica_id), &address, deadline)?;
                let store = Arc::new(store);
                (Some(Servers { manager, store }), replica_id, address, client)
            }
            _ => {
                let meet = config
                    .replica_store
                    .as_ref()
                    .ok_or_else(|| Error::invalid("no replica_store to meet in"))?;
                let (client, found) = meeting::Servers::find(&**meet, party.as_ref(), deadline)?;
                (None, found.replica_id, found.address, client)
            }
        };
        let client = Arc::new(client);
        // The port in `bind` is the manager server's.
        let (host, _) = split_address(&config.bind)?;
        let towards = config.lighthouse.as_ref().unwrap_or(&manager_address);
        let transport = HttpTransport::start_with(
            &join_address(host, 0),
            Some(&told_host(config.advertise_host.as_deref(), host, towards)),
            TransportOptions {
                party: party.clone(),
                insecure: config.insecure,
                ..TransportOptions::default()
            },
        )?;
        let transport = Arc::new(transport);
        let folder = event_log::folder(config.event_log.as_ref());
        let log = EventLog::open(folder, &config.name, &replica_id, config.group_rank)?;
        let observed = Observed::new(log, Spans::new(&replica_id, config.group_rank));
        observed.started(config.group_world_size);
        let reporter = Reporter::start(client.clone(), observed.clone())?;
        let ends = Ends::new(group.clone(), credentials);
        let watch = {
            let (ends, observed) = (ends.clone(), observed.clone());
            let hosts_others = servers.is_some() && config.group_world_size > 1;
            let hear = move |event: PushEvent| match event {
                PushEvent::Kill { reason } => end_process(&reason, hosts_others),
                event => {
                    observed.heard(&event);
                    ends.hear(event);
                }
            };
            client.watch(config.group_rank, Arc::new(hear))
        };
        let rank = Rank::new(RankRules {
            min_replicas: config.min_replicas,
            max_contributors: match config.world_size_mode {
                WorldSizeMode::Dynamic => None,
                WorldSizeMode::FixedWithSpares => Some(config.min_replicas),
            },
            init_sync: config.init_sync,
            max_retries: config.max_retries,
        });
        let search = Search {
            client: client.clone(),
            group: group.clone(),
            ends: ends.clone(),
            transport: transport.clone(),
            store: servers.as_ref().map(|servers| servers.store.clone()),
            replica_id: replica_id.clone(),
            group_rank: config.group_rank,
            timeout: config.timeout,
            heal_over: config.heal_over,
            observed: observed.clone(),
            waits: Interrupter::default(),
        };
        let progress = Arc::new(AtomicU64::new(1));
        // Often enough that several messages may be lost, and rarely enough to cost nothing.
        let every = (config.progress_timeout / 6).min(PROGRESS_EVERY);
        let told = client.progress(config.group_rank, progress.clone(), every);
        Ok(Self {
            config,
            replica_id,
            party,
            group,
            client,
            transport,
            search,
            ahead: Ahead::None,
            kept: Kept::default(),
            distrusted: Distrusted::default(),
            offered: None,
            reporter,
            servers,
            _watch: watch,
            ends,
            rank,
            shrink_only: AtomicBool::new(false),
            progress,
            _progress: told,
            pending: Pending::default(),
            observed,
            begun: Instant::now(),
        })
    }

    /// This incarnation's id: `name:random`.
    pub fn replica_id(&self) -> &str {
        &self.replica_id
    }

    /// For another thread, to end what a call here waits for: as at a Ctrl-C.
    pub fn interrupter(&self) -> Interrupter {
        self.search.waits.clone()
    }

    /// Sets step, lineage and [`batches_committed`](Replica::batches_committed) of a state that was loaded from a disk checkpoint before
    /// the first quorum.
    ///
    /// Errors: `InvalidState` once a quorum was asked for, also if it did not come about.
    pub fn restore(&mut self, step: Step, lineage: Lineage, batches_committed: i64) -> Result<()> {
        self.rank.restore(step, lineage, batches_committed)
    }

    /// From the next quorum on, asks for one that may lose members and gains none (`true`), or for any (`false`, as at the start).
    /// A quorum shrinks if one of its former members asks so; replicas that are new to it wait until none does. What a newcomer asks here
    /// counts once it is a member.
    pub fn set_shrink_only(&self, on: bool) {
        self.shrink_only.store(on, Ordering::Relaxed);
    }

    /// The identity of the current state, for a disk checkpoint.
    pub fn lineage(&self) -> &Lineage {
        self.rank.lineage()
    }

    /// The newest epoch of the group.
    fn epoch(&self) -> Epoch {
        self.rank.epoch().unwrap_or(NO_EPOCH)
    }

    /// This rank ends with `error`. The other ranks of its replica would wait for its next call: they are told.
    fn give_up(&self, error: &Error, deadline: Instant) {
        self.observed.ended(self.rank.step(), Some(error));
        if self.config.group_world_size == 1 {
            return;
        }
        let vote = self.vote_on(self.rank.key(), false);
        let deadline = deadline.min(deadline_in(TELL));
        if let Err(e) = self.client.give_up(&vote, &error.to_string(), deadline) {
            tracing::warn!(error = %e, "the other ranks of this replica were not told that this one gives up");
        }
    }

    fn vote_on(&self, key: VoteKey, vote: bool) -> CommitVote {
        CommitVote {
            group_rank: self.config.group_rank,
            step: key.step,
            quorum_id: key.quorum_id,
            attempt: key.attempt,
            vote,
        }
    }

    /// What this rank asks at the beginning of an attempt.
    fn question(&mut self) -> QuorumRequest {
        let broken = self.search.broken(&self.rank).is_some();
        self.rank
            .set_shrink_only(self.shrink_only.load(Ordering::Relaxed));
        let request = self.rank.start(broken);
        QuorumRequest {
            group_rank: self.config.group_rank,
            step: request.step,
            checkpoint_metadata: self.transport.metadata(),
            shrink_only: request.shrink_only,
            init_sync: request.init_sync,
            commit_failures: request.commit_failures,
            lineage: request.lineage,
            last_quorum_id: request.last_quorum_id,
            healed: request.healed,
            batches_committed: request.batches_committed,
            question: request.question,
            joining: request.joining,
            is_last: request.is_last,
        }
    }

    /// Meets the other members of a step that reduces nothing. A group that has no barrier goes on without.
    fn barrier(&mut self) {
        if !self.group.capabilities().ops.contains(OpKind::Barrier) {
            return;
        }
        let options = SubmitOptions {
            deadline: Some(deadline_in(self.config.timeout)),
            contribute: true,
            stream: None,
        };
        match self.group.run(Collective::Barrier, options) {
            Ok(work) => {
                self.observed.submitted(0);
                let (reporter, epoch) = (self.reporter.clone(), self.epoch());
                self.pending
                    .track_barrier(&work, move |error| reporter.send(epoch, &error));
                self.ends.settle();
            }
            Err(rejected) => self.report_error(rejected.error),
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
            tracing::warn!(%error, step = %vote.step, "no answer to the vote; casting it again");
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// Begins an attempt: what was left of an earlier one ends.
    fn begin_attempt(&mut self) {
        self.progress();
        self.begun = Instant::now();
        self.abandon_quorum();
        // An abandoned step must not leave its reductions running into the next one. Nor may the other members wait for reductions of it that will not
        // come: they hear of an error, and so of this.
        let is_told = || self.pending.error().is_some() && self.pending.drain(Instant::now()).is_ok();
        if self.rank.in_step() && !is_told() {
            let text = "the step was abandoned";
            self.group.abort(text);
            self.report_error(Error::new(ErrorKind::Aborted, text));
            self.rank.abandon();
        }
        self.pending = Pending::default();
        self.offered = None;
        self.ends.begin(self.pending.clone());
    }

    /// Waits for the search ahead, if one is under way.
    fn wait_ahead(&mut self) {
        if !matches!(self.ahead, Ahead::Running { .. }) {
            return;
        }
        self.ahead.wait(&mut self.rank);
        if let Ahead::Found(found) = &self.ahead
            && let Ok((answer, Next::Lost(e))) = &**found
        {
            let (epoch, e) = (answer.quorum_id, e.clone());
            self.lost(epoch, &e);
        }
    }

    /// The epoch did not come up: its vote will be no.
    fn lost(&mut self, epoch: Epoch, error: &Error) {
        self.group.abort(&error.to_string());
        if self.pending.fail(error.clone()) {
            tracing::warn!(%error, %epoch, "this epoch did not come up; it will not commit");
            self.reporter.send(self.epoch(), error);
        }
    }

    fn participation(&self, answer: QuorumResult, healed: Option<Healed>) -> Participation {
        let (place, contributors) = self.rank.contribution();
        let contributor_rank = place.filter(|_| self.rank.in_step());
        Participation {
            epoch: answer.quorum_id,
            step: self.rank.step(),
            replica_rank: answer.replica_rank,
            replica_world_size: answer.replica_world_size,
            contributes: contributor_rank.is_some(),
            contributor_rank,
            contributors,
            // Without the state of the step nothing of it is this replica's.
            closes: answer.closes && answer.max_step == self.rank.step(),
            healed,
            members: Members::of(answer.replica_world_size, answer.replica_ids),
        }
    }

    /// Sends the state to the members that take it over the group: from now on, beside the step.
    fn serve(&mut self, answer: &QuorumResult) {
        let snapshot = self.offered.take();
        let Some(snapshot) = snapshot.filter(|_| self.config.heal_over == HealOver::Group) else {
            return;
        };
        let to = answer.serves_replica_ranks.clone();
        if to.is_empty() {
            return;
        }
        // Longer than a replica takes to heal: it ends the epoch if it cannot.
        let deadline = deadline_in(self.config.timeout.saturating_mul(2));
        if let Err(e) = checkpoint::serve_over_group(self.group.clone(), snapshot, to, deadline) {
            self.lost(answer.quorum_id, &e);
        }
    }

    /// What `next` wants, until the step can begin or the attempt is lost. The recovery of this replica, if there was one.
    fn come_up(
        &mut self,
        (answer, mut next): (&QuorumResult, Next),
        state: &mut dyn State,
        deadline: Instant,
        cancel: &Cancel,
    ) -> (Next, Option<Healed>) {
        let limit = || deadline_in(self.config.timeout).min(deadline);
        let mut recovery = None;
        loop {
            // Each part has a limit of its own, and all of them together may take longer than a rank may be without progress.
            self.progress();
            next = match next {
                Next::Offer { publish: true, .. } => {
                    let heal_over = self.config.heal_over;
                    let offered =
                        heal::publish(&self.transport, heal_over, self.rank.lineage(), answer, state);
                    self.rank
                        .offered(offered.map(|snapshot| self.offered = Some(snapshot)))
                }
                Next::Offer { publish: false, keep } => {
                    if !keep {
                        self.transport.retire();
                    }
                    self.rank.offered(Ok(()))
                }
                Next::Configure => self.search.connect(&mut self.rank, answer, deadline, cancel),
                Next::Heal | Next::Fetch => {
                    let (ends, epoch) = (&self.ends, answer.quorum_id);
                    let is_over = || {
                        let text = |why| format!("the epoch was over before the state was here: {why}");
                        let why = ends.why_over(epoch);
                        why.map_or(Ok(()), |why| Err(Error::new(ErrorKind::Aborted, text(why))))
                    };
                    let over_group = heal::OverGroup {
                        group: &*self.group,
                        distrusted: &self.distrusted,
                        watch: &is_over,
                    };
                    let travels = self.config.heal_over == HealOver::Group && !answer.spare;
                    let progress = || self.progress();
                    let me = heal::Behind {
                        replica_id: &self.replica_id,
                        group_rank: self.config.group_rank,
                        step: self.rank.step(),
                        lineage: self.rank.lineage(),
                        ranks_store: self
                            .config
                            .replica_store
                            .as_ref()
                            .filter(|_| self.config.group_world_size > 1),
                        kept: &self.kept,
                        party: self.party.as_ref(),
                        max_state_bytes: self.config.max_state_bytes,
                        over_group: travels.then_some(over_group),
                        progress: &progress,
                    };
                    let begun = Instant::now();
                    let outcome = heal::heal(&me, answer, state, limit());
                    let seen = outcome.as_ref().map(|(healed, _)| healed);
                    self.observed.healed(answer, begun.elapsed(), seen);
                    let outcome = outcome.map(|(healed, lineage)| {
                        recovery = Some(healed);
                        lineage
                    });
                    if answer.spare {
                        if let Err(error) = &outcome {
                            tracing::warn!(%error, step = %answer.max_step, "as a spare this replica got no state; asking again");
                        }
                        self.rank.fetched(outcome)
                    } else {
                        self.rank.healed(outcome)
                    }
                }
                Next::Ready => {
                    if recovery.is_some() {
                        self.distrusted.clear();
                    }
                    self.serve(answer);
                    return (next, recovery);
                }
                Next::Ask | Next::Lost(_) | Next::End(_) => return (next, recovery),
            };
        }
    }
}

impl Replica for Manager {
    fn start_quorum(&mut self, state: &mut dyn State, deadline: Instant) -> Result<Participation> {
        // One for the whole call: also where it comes between two of its waits, an interruption ends it.
        let cancel = self.search.waits.token();
        self.progress();
        self.wait_ahead();
        let mut found = match std::mem::take(&mut self.ahead) {
            Ahead::Found(found) => Some(*found),
            Ahead::None | Ahead::Running { .. } => {
                self.begin_attempt();
                None
            }
        };
        // A spare fetches and asks again, until it is a member; the others go on meanwhile.
        let (mut answer, mut next, mut healed) = (QuorumResult::default(), Next::Ask, None::<Healed>);
        while matches!(next, Next::Ask) {
            self.progress();
            (answer, next) = match found.take() {
                Some(found) => found?,
                None => {
                    let question = self.question();
                    self.search.ask(&mut self.rank, &question, deadline, &cancel)?
                }
            };
            let recovery;
            (next, recovery) = self.come_up((&answer, next), state, deadline, &cancel);
            healed = match (recovery, healed) {
                (Some(now), Some(before)) => Some(Healed {
                    took: before.took + now.took,
                    ..now
                }),
                (now, before) => now.or(before),
            };
        }
        match next {
            Next::Lost(e) => {
                self.lost(answer.quorum_id, &e);
                if cancel.is_cancelled() {
                    // There is no vote.
                    self.rank.abandon();
                    return Err(e.with_op("quorum"));
                }
            }
            Next::End(e) => {
                self.group.abort(&e.to_string());
                self.reporter.send(answer.quorum_id, &e);
                self.give_up(&e, deadline);
                return Err(e);
            }
            // The next attempt tells the others that this step was left.
            _ if cancel.is_cancelled() => {
                return Err(Error::new(ErrorKind::Aborted, "the call was interrupted").with_op("quorum"));
            }
            Next::Ready | Next::Offer { .. } | Next::Configure | Next::Heal | Next::Fetch | Next::Ask => {}
        }
        Ok(self.participation(answer, healed))
    }

    fn begin_quorum(&mut self, deadline: Instant) -> Result<bool> {
        self.begin_attempt();
        let question = self.question();
        let ahead = Ahead::start(self.search.clone(), self.rank.clone(), question, deadline);
        let is_begun = ahead.is_some();
        self.ahead = ahead.unwrap_or_default();
        Ok(is_begun)
    }

    fn await_quorum(&mut self) -> Result<Participation> {
        self.progress();
        self.wait_ahead();
        match &self.ahead {
            Ahead::Found(found) => match &**found {
                Ok((answer, _)) => Ok(self.participation(answer.clone(), None)),
                Err(e) => Err(e.clone()),
            },
            Ahead::None | Ahead::Running { .. } => Err(Error::new(
                ErrorKind::InvalidState,
                "no quorum was asked for ahead: call begin_quorum first",
            )),
        }
    }

    fn abandon_quorum(&mut self) {
        self.ahead.cancel();
        self.wait_ahead();
        if let Ahead::Found(found) = &self.ahead
            && let Ok((_, Next::Lost(_))) = &**found
        {
            self.rank.abandon();
        }
        self.ahead = Ahead::None;
    }

    fn alloc(&self, dtype: DType, count: usize) -> Tensor {
        let group = self.group.alloc(dtype, count);
        group.unwrap_or_else(|_| Tensor::zeros(dtype, count))
    }

    fn all_reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        self.progress();
        self.wait_ahead();
        if let Ahead::Found(found) = &self.ahead
            && let Err(e) = &**found
        {
            return ManagedWork::failed(e.clone().with_op("all_reduce"), tensors);
        }
        if !self.rank.in_step() {
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
            contribute: self.rank.contribution().0.is_some(),
            stream: None,
        };
        let bytes = tensors.iter().map(Tensor::byte_len).sum();
        match self.group.run(Collective::AllReduce { tensors, op }, options) {
            Ok(work) => {
                self.observed.submitted(bytes);
                let (reporter, epoch) = (self.reporter.clone(), self.epoch());
                self.pending
                    .track(&work, move |error| reporter.send(epoch, &error));
                self.ends.settle();
                ManagedWork::submitted(work)
            }
            Err(rejected) => {
                self.report_error(rejected.error.clone());
                ManagedWork::failed(rejected.error, rejected.op.into_tensors())
            }
        }
    }

    fn should_commit(&mut self, deadline: Instant) -> Result<bool> {
        self.progress();
        // Without it there is nothing to vote on, as the rank says.
        self.wait_ahead();
        if self.rank.needs_barrier(self.pending.is_used()) {
            self.barrier();
        }
        if self.rank.in_step()
            && let Err(e) = self.pending.drain(deadline)
        {
            self.report_error(e);
            self.group.abort("a reduction did not finish in time");
        }
        let vote = match self
            .rank
            .vote(self.pending.error(), self.pending.least_contributors())
        {
            Ok(vote) => vote,
            Err(e) if e.kind() == ErrorKind::InvalidState => return Err(e),
            Err(e) => {
                self.give_up(&e, deadline);
                return Err(e);
            }
        };
        if let Some(e) = &vote.against {
            self.report_error(e.clone());
        }
        let cast = self.vote_on(vote.key, vote.against.is_none());
        let attempt = Attempt {
            epoch: cast.quorum_id,
            step: cast.step,
            begun: self.begun,
        };
        self.ahead = Ahead::None;
        let counts = self.observed.counts(cast.step, self.group.traffic());
        self.client.set_counts(counts);
        let begun = Instant::now();
        let decision = self.vote(&cast, deadline);
        self.observed.voted(begun.elapsed());
        let goes_on = self.rank.decided(decision.as_ref().ok().copied());
        self.progress();
        if matches!(decision, Ok(true)) {
            let contributors = self.pending.least_contributors().unwrap_or(0);
            self.observed.committed(attempt, contributors);
        } else {
            let error = vote.against.as_ref().or(decision.as_ref().err());
            self.observed.discarded(attempt, error);
            tracing::warn!(
                step = %cast.step,
                epoch = %cast.quorum_id,
                error = error.map(ToString::to_string),
                "the step did not commit"
            );
        }
        if let Err(e) = goes_on {
            let e = match vote.against.or(decision.err()) {
                Some(last) => {
                    Error::new(e.kind(), format!("{}; the last one: {last}", e.message())).with_source(last)
                }
                None => e,
            };
            self.group.abort(&e.to_string());
            self.give_up(&e, deadline);
            return Err(e);
        }
        decision
    }

    fn current_step(&self) -> Step {
        self.rank.step()
    }

    fn batches_committed(&self) -> i64 {
        self.rank.batches_committed()
    }

    fn draining(&self) -> bool {
        self.rank.answer().is_some_and(|answer| answer.draining)
    }

    fn set_last(&mut self, is_last: bool) {
        self.rank.set_last(is_last);
    }

    fn set_joins_at_once(&mut self, at_once: bool) {
        self.rank.set_joins_at_once(at_once);
    }

    fn set_healed(&mut self) {
        self.rank.set_healed();
    }

    fn progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    fn report_error(&mut self, error: Error) {
        if self.pending.fail(error.clone()) {
            self.reporter.send(self.epoch(), &error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.pending.error()
    }

    fn traffic(&self) -> Traffic {
        self.group.traffic()
    }

    fn leave(&mut self, deadline: Instant) -> Result<()> {
        self.observed.ended(self.rank.step(), None);
        self.abandon_quorum();
        self.ends.set_live(NO_EPOCH);
        let ended = self.group.shutdown(deadline);
        // The lighthouse hears of the leave all the same, also if the group took all the time.
        let deadline = match ended {
            Ok(()) => deadline,
            Err(_) => deadline.max(deadline_in(TELL)),
        };
        if self.servers.is_none()
            && let Err(error) = self.client.leave(self.config.group_rank, deadline)
        {
            // Rank 0 and its server may have left before.
            tracing::debug!(%error, "the manager server did not hear that this rank leaves");
        }
        if let Some(servers) = self.servers.take() {
            // A lighthouse that is gone already need not be told of the leave.
            if let Err(error) = servers.manager.leave(deadline) {
                tracing::warn!(%error, "the lighthouse was not told that this replica leaves; it notices the end of the connection");
            }
            // The other ranks may not have read the answer to their last vote yet.
            if let Err(error) = servers.manager.shutdown(deadline) {
                tracing::warn!(%error, "some rank of this replica may not have its last answer");
            }
            servers.store.shutdown();
        }
        ended
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.ahead.cancel();
        self.group.abort("the manager was dropped");
        if let Some(servers) = self.servers.take() {
            servers.store.shutdown();
        }
    }
}

#[cfg(test)]
mod tests;
