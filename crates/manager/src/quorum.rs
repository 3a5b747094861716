//! The way to a quorum: asks for it until there is one, and connects the group for its epoch, on the caller's thread or beside it.
//!
//! Beside it ([`Ahead`]) nothing touches the training state. Where the quorum wants a snapshot of it, or that it is taken over, the search
//! ends with that step, and the training thread does it when it next calls.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::HttpTransport;
use coordination::{Cancel, ManagerClient, QuorumRequest, QuorumResult, is_refused};
use ftcore::store::epoch_prefix;
use ftcore::{
    Configuration, Error, ErrorKind, ProcessGroup, Result, Step, Store, TcpStoreServer, deadline_in,
    time_left,
};
use protocol::rank::{Next, Rank};

use crate::config::HealOver;
use crate::ends::{Ends, NO_EPOCH};
use crate::heal::replica;
use crate::observed::Observed;

/// For so long nothing listens where rank 0 of this replica did: it will not again, since its next incarnation listens elsewhere.
pub(crate) const GONE: Duration = Duration::from_secs(1);

/// How much longer than its deadline a search may take to end.
const GRACE: Duration = Duration::from_secs(2);

/// Ends what a manager's calls wait for, from another thread ([`Manager::interrupter`](crate::Manager::interrupter)).
#[derive(Clone, Default)]
pub struct Interrupter(Arc<Mutex<Cancel>>);

impl Interrupter {
    /// Ends the wait for a quorum, and connecting the group for it, with an error of the call that waits, whose step is then left without a vote. Later
    /// calls are not concerned. What the group does, its own `abort` ends; a transfer of state goes on to its deadline before the call ends, and a vote
    /// goes on.
    pub fn interrupt(&self) {
        std::mem::take(&mut *self.lock()).cancel();
    }

    /// Of a call that begins to wait.
    pub(crate) fn token(&self) -> Cancel {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Cancel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a search works with.
#[derive(Clone)]
pub(crate) struct Search {
    pub(crate) client: Arc<ManagerClient>,
    pub(crate) group: Arc<dyn ProcessGroup>,
    pub(crate) ends: Arc<Ends>,
    pub(crate) transport: Arc<HttpTransport>,
    /// The replica's store, on group rank 0.
    pub(crate) store: Option<Arc<TcpStoreServer>>,
    pub(crate) replica_id: String,
    pub(crate) group_rank: u32,
    /// For connecting the group.
    pub(crate) timeout: Duration,
    pub(crate) heal_over: HealOver,
    pub(crate) observed: Arc<Observed>,
    pub(crate) waits: Interrupter,
}

/// Under which key the replica of that rank says that its state travels over the group; absent: over HTTP.
fn over_group(prefix: &str, replica_rank: u32) -> String {
    format!("{prefix}/heal_over_group/{replica_rank}")
}

/// A quorum, and what it wants next.
pub(crate) type Joined = (QuorumResult, Next);

impl Search {
    /// Why the group cannot be used for another collective without a new epoch, if it cannot.
    pub(crate) fn broken(&self, rank: &Rank) -> Option<String> {
        self.group
            .error()
            .map(|e| e.to_string())
            .or_else(|| self.ends.why_over(rank.epoch().unwrap_or(NO_EPOCH)))
    }

    /// Asks, and takes the answer in.
    pub(crate) fn ask(
        &self,
        rank: &mut Rank,
        question: &QuorumRequest,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Joined> {
        // Epochs that keep failing at once (members that cannot reach each other) must not become a busy loop.
        if let Some(doublings) = u32::try_from(rank.commit_failures())
            .ok()
            .and_then(|n| n.checked_sub(3))
        {
            let pause = Duration::from_millis(10 << doublings.min(6));
            std::thread::park_timeout(pause.min(time_left(deadline)));
        }
        let asked = Instant::now();
        let answer = self.ask_until(question, deadline, cancel)?;
        self.observed.quorum(&answer, asked.elapsed());
        let before = rank.epoch();
        let broken = self.broken(rank);
        let next = rank.answered(answer.clone(), broken);
        if rank.epoch() != before {
            self.ends.set_live(rank.epoch().unwrap_or(NO_EPOCH));
        }
        Ok((answer, next))
    }

    /// Asks until there is an answer or the deadline passes; what can be retried is (L28).
    fn ask_until(
        &self,
        question: &QuorumRequest,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<QuorumResult> {
        let mut pause = Duration::from_millis(20);
        let mut refused = None;
        loop {
            match self.client.quorum_unless(question, deadline, cancel) {
                Ok(answer) => return Ok(answer),
                Err(e) if cancel.is_cancelled() => return Err(e),
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
                // A rank of this replica is gone, and the replica with it.
                Err(e) if e.kind() == ErrorKind::PeerLost => return Err(e.with_op("quorum")),
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

    /// Connects the group for the answer's epoch, and tells `rank` how that went.
    pub(crate) fn connect(
        &self,
        rank: &mut Rank,
        answer: &QuorumResult,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Next {
        let deadline = deadline_in(self.timeout).min(deadline);
        let is_new = rank.step() == Step(0) && rank.lineage().as_str().is_empty();
        let begun = Instant::now();
        let configured = self.configure(answer, is_new, deadline, cancel);
        self.observed
            .configured(answer.quorum_id, begun.elapsed(), &configured);
        // A push that came while the group was connecting had nothing to abort.
        let broken = if configured.is_ok() {
            self.broken(rank)
        } else {
            None
        };
        rank.configured(configured, broken)
    }

    /// `is_new`: nothing would be lost with this replica's state.
    fn configure(
        &self,
        answer: &QuorumResult,
        is_new: bool,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<()> {
        let epoch = answer.quorum_id;
        if let Some(store) = &self.store {
            store.begin_epoch(epoch);
        }
        // The store is a member's, and its address is what that member says.
        let store = self
            .ends
            .reach_store(answer.quorum_id, &answer.store_address, deadline, cancel)?;
        let store: Arc<dyn Store> = Arc::new(store);
        // Before the group connects a push has nothing to abort, and a member that is gone would be waited for until the deadline.
        let (ends, given_up, id) = (self.ends.clone(), cancel.clone(), answer.quorum_id);
        let in_vain = ftcore::Cancel::watching(move || ends.check(id, &given_up).err());
        let prefix = epoch_prefix(epoch, self.group_rank);
        if self.heal_over == HealOver::Group {
            // Before this rank connects, so that it is there for all that have connected.
            store.set(&over_group(&prefix, answer.replica_rank), b"1", deadline)?;
        }
        let configuration = Configuration {
            store: store.clone(),
            prefix: prefix.clone(),
            name: self.replica_id.clone(),
            epoch,
            rank: answer.replica_rank,
            world_size: answer.replica_world_size,
            deadline,
            cancel: in_vain,
        };
        self.group.configure(configuration)?;
        self.agree_on_transport(answer, is_new, (&*store, &prefix), deadline)
    }

    /// If this replica heals: whether its sources send the state as it expects it.
    fn agree_on_transport(
        &self,
        answer: &QuorumResult,
        is_new: bool,
        (store, prefix): (&dyn Store, &str),
        deadline: Instant,
    ) -> Result<()> {
        if !answer.heal {
            return Ok(());
        }
        for source in &answer.recover_sources {
            let told = store.check(&[&over_group(prefix, source.replica_rank)], deadline)?;
            let theirs = if told { HealOver::Group } else { HealOver::Http };
            if theirs != self.heal_over {
                // As with a state that does not fit: the one that joins is the odd one.
                let kind = if is_new {
                    ErrorKind::InvalidArgument
                } else {
                    ErrorKind::Mismatch
                };
                let text = format!(
                    "replica '{}' heals over {}, its source {} over {}: set the same ManagerConfig::heal_over on all replicas",
                    self.replica_id,
                    self.heal_over.name(),
                    replica(answer, source.replica_rank),
                    theirs.name()
                );
                return Err(Error::new(kind, text).with_op("heal"));
            }
        }
        Ok(())
    }

    /// As far as it goes without the state.
    fn without_state(
        &self,
        rank: &mut Rank,
        question: &QuorumRequest,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Joined> {
        let (answer, mut next) = self.ask(rank, question, deadline, cancel)?;
        loop {
            next = match next {
                Next::Offer { publish: true, .. } => match rank.connect_first() {
                    Next::Configure => Next::Configure,
                    offer => return Ok((answer, offer)),
                },
                Next::Offer { publish: false, keep } => {
                    if !keep {
                        self.transport.retire();
                    }
                    rank.offered(Ok(()))
                }
                Next::Configure => self.connect(rank, &answer, deadline, cancel),
                next => return Ok((answer, next)),
            };
        }
    }
}

/// What a search beside the training thread found, and the rank that went through it.
type Outcome = (Rank, Result<Joined>);

/// A quorum that was asked for ahead.
#[derive(Default)]
pub(crate) enum Ahead {
    /// None was.
    #[default]
    None,
    /// It is looked for.
    Running {
        /// Behind a lock, so that the manager may be shared.
        outcome: Mutex<Receiver<Outcome>>,
        /// Its own wait, and no other: one thread drives a manager.
        waits: Interrupter,
        deadline: Instant,
    },
    /// It was found, or was not; the manager's rank has gone through it.
    Found(Box<Result<Joined>>),
}

impl Ahead {
    /// Looks for a quorum on a thread of its own. `rank` has asked `question`. `None` if the system gives no thread.
    pub(crate) fn start(
        search: Search,
        mut rank: Rank,
        question: QuorumRequest,
        deadline: Instant,
    ) -> Option<Self> {
        let (tell, outcome) = sync_channel(1);
        let waits = search.waits.clone();
        let cancelled = waits.token();
        let look = move || {
            let found = search.without_state(&mut rank, &question, deadline, &cancelled);
            let _ = tell.send((rank, found));
        };
        let thread = std::thread::Builder::new().name("ox-quorum".into()).spawn(look);
        match thread {
            Ok(_) => Some(Self::Running {
                outcome: Mutex::new(outcome),
                waits,
                deadline,
            }),
            Err(error) => {
                tracing::warn!(%error, "no thread to ask for the quorum beside the training");
                None
            }
        }
    }

    /// Ends a search. Does not wait for it.
    pub(crate) fn cancel(&self) {
        if let Self::Running { waits, .. } = self {
            waits.interrupt();
        }
    }

    /// Waits for the end of a search, and puts what came of it into `rank`.
    pub(crate) fn wait(&mut self, rank: &mut Rank) {
        let Self::Running {
            outcome, deadline, ..
        } = self
        else {
            return;
        };
        let limit = deadline_in(Duration::ZERO)
            .max(*deadline)
            .checked_add(GRACE)
            .unwrap_or(*deadline);
        let outcome = outcome.get_mut().unwrap_or_else(PoisonError::into_inner);
        let found = match outcome.recv_timeout(time_left(limit)) {
            Ok((mut through, found)) => {
                through.keep_wishes(rank);
                *rank = through;
                found
            }
            Err(RecvTimeoutError::Timeout) => {
                self.cancel();
                Err(
                    Error::timeout("the quorum that was asked for ahead did not end in time")
                        .with_op("quorum"),
                )
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::new(
                ErrorKind::Internal,
                "the thread that asked for the quorum ended without a word",
            )),
        };
        *self = Self::Found(Box::new(found));
    }
}
