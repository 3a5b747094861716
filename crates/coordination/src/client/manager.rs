//! A rank's client of its replica's manager server.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use identity::{Party, Role, name_of};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::Code;
use tonic::transport::Channel;

use super::{Connection, tool};
use crate::channel::{Backoff, Way, call, wait_for};
use crate::clock::deadline_in;
use crate::manager::RankCounts;
use crate::wire::oxccl::oxccl_manager_client::OxcclManagerClient;
use crate::wire::torchft::manager_service_client::ManagerServiceClient;
use crate::wire::{MAX_MESSAGE_BYTES, MAX_QUORUM_BYTES, epoch_of, joining_code, oxccl, torchft};
use protocol::{Joining, QuorumResult};

/// What a rank says when it asks for a quorum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuorumRequest {
    /// The rank in its replica.
    pub group_rank: u32,
    /// The step of its state; the same on all ranks of the replica.
    pub step: Step,
    /// Where others fetch this rank's state from; opaque here.
    pub checkpoint_metadata: String,
    /// Ask for a quorum without newcomers.
    pub shrink_only: bool,
    /// At step 0, all replicas take the state of one; the same on all ranks of the replica.
    pub init_sync: bool,
    /// Steps in a row that did not commit; more than 0 asks for a new epoch.
    pub commit_failures: i64,
    /// Names the history of its state; empty if not told.
    pub lineage: String,
    /// The quorum that the rank's group is configured for; 0 if none.
    pub last_quorum_id: Epoch,
    /// It fetched its state from a peer at this very step, and has not committed since.
    pub healed: bool,
    /// How many batches led to its state, over all replicas that contributed.
    pub batches_committed: i64,
    /// Counts the rank's questions. The same one asked again, because its answer was lost, keeps its number; 0 if not told.
    pub question: i64,
    /// What the replica does if it is far behind; the same on all ranks of the replica.
    pub joining: Joining,
    /// The run ends with this step.
    pub is_last: bool,
}

/// A rank's vote on whether the replica commits the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommitVote {
    /// The rank in its replica.
    pub group_rank: u32,
    /// The step voted on.
    pub step: Step,
    /// The epoch in which it was computed.
    pub quorum_id: Epoch,
    /// Counts the tries at this step and epoch, alike on all ranks.
    pub attempt: i64,
    /// True: this rank finished everything.
    pub vote: bool,
}

/// What a watcher is told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PushEvent {
    /// The epoch is over: abort what is pending in it and ask for the next quorum. May come more than once, before the
    /// answer that names the epoch, and for older epochs.
    AbortEpoch {
        /// Which epoch.
        quorum_id: Epoch,
        /// Why.
        reason: String,
        /// Replica ids that are gone; empty after a mere report.
        departed: Vec<String>,
    },
    /// An operator ends this replica: the process shall end.
    Kill {
        /// Why.
        reason: String,
    },
}

/// What is called for each event, on the client's thread: it should be short, and must not call the client.
type Callback = Arc<dyn Fn(PushEvent) + Send + Sync>;

/// Keeps a watch going. Dropping it ends the watch; a callback that is running finishes.
#[derive(Debug)]
pub struct WatchGuard {
    task: AbortHandle,
    _connection: Arc<Connection>,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Ends a call from another thread. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cancel(Arc<watch::Sender<bool>>);

impl Default for Cancel {
    fn default() -> Self {
        Self(Arc::new(watch::channel(false).0))
    }
}

impl Cancel {
    /// Ends the call that has this, now or when it is made.
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    /// True after [`cancel`](Self::cancel).
    pub fn is_cancelled(&self) -> bool {
        *self.0.borrow()
    }

    /// Ready after [`cancel`](Self::cancel).
    async fn cancelled(self) {
        let mut told = self.0.subscribe();
        drop(told.wait_for(|told| *told).await);
    }
}

/// A client of a manager server; cheap to clone.
#[derive(Debug, Clone)]
pub struct ManagerClient {
    connection: Arc<Connection>,
    /// The rank that last asked or watches through this client, for the text of a report.
    rank: Arc<AtomicI64>,
    counts: Arc<Mutex<Option<RankCounts>>>,
}

impl ManagerClient {
    /// Connects to `url` (`http://host:port`), trying again until `deadline`; with the credentials that `OXCCL_CREDENTIALS` names, if it does, to
    /// `https://host:port`, as the operator or the replica whose they are. Errors: `InvalidArgument`, `Unavailable`.
    pub fn connect(url: &str, deadline: Instant) -> Result<Self> {
        Self::connect_as(tool()?, None, url, deadline)
    }

    /// Like [`ManagerClient::connect`], as this party, whatever the environment says. With credentials, the server must be that of the replica of
    /// `replica_id`, if that is given.
    pub fn connect_as(
        party: Option<Arc<Party>>,
        replica_id: Option<&str>,
        url: &str,
        deadline: Instant,
    ) -> Result<Self> {
        let hint = "does group rank 0 of this replica run?";
        let expected = replica_id.map(|id| Role::Replica(name_of(id).to_owned()));
        let way = Way::new(party, expected);
        let connection = Connection::open(url, way, ("manager server", hint), deadline)?;
        Ok(Self {
            connection,
            rank: Arc::default(),
            counts: Arc::default(),
        })
    }

    /// On the present runtime, and connected with the first call.
    #[cfg(test)]
    pub(crate) fn lazily(url: &str, way: &Way) -> Result<Self> {
        Ok(Self {
            connection: Connection::lazily(url, way)?,
            rank: Arc::default(),
            counts: Arc::default(),
        })
    }

    /// What the manager server shows of this rank under `/metrics`, from the next vote on.
    pub fn set_counts(&self, counts: RankCounts) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = Some(counts);
    }

    fn torchft(&self) -> ManagerServiceClient<Channel> {
        // The ids of all members may be in an answer.
        ManagerServiceClient::new(self.connection.channel.clone()).max_decoding_message_size(MAX_QUORUM_BYTES)
    }

    fn ours(&self) -> OxcclManagerClient<Channel> {
        OxcclManagerClient::new(self.connection.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Asks for the next quorum and waits for it, together with the other ranks of the replica.
    ///
    /// Errors: `Timeout` naming what was missing, `Unavailable` if the lighthouse failed (told at once; ask again),
    /// `Mismatch` if the ranks of the replica disagree on step or history, `Conflict` if a newer life of the replica
    /// took over, `Aborted` if a newer call of this rank replaced this one.
    pub fn quorum(&self, request: &QuorumRequest, deadline: Instant) -> Result<QuorumResult> {
        self.quorum_unless(request, deadline, &Cancel::default())
    }

    /// Like [`quorum`](Self::quorum), until it is cancelled: that is `Aborted` at once, and the server takes the question back.
    pub fn quorum_unless(
        &self,
        request: &QuorumRequest,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<QuorumResult> {
        let asked = self.ask(request, deadline, cancel);
        wait_for(self.connection.handle(), "quorum", deadline, asked)
    }

    /// As [`quorum_unless`](Self::quorum_unless), on a runtime.
    pub(crate) fn ask(
        &self,
        request: &QuorumRequest,
        deadline: Instant,
        cancel: &Cancel,
    ) -> impl Future<Output = Result<QuorumResult>> + Send + use<> {
        self.rank.store(i64::from(request.group_rank), Ordering::Relaxed);
        let (mut client, url) = (self.torchft(), self.connection.url.clone());
        let message = torchft::ManagerQuorumRequest {
            group_rank: i64::from(request.group_rank),
            step: request.step.0,
            checkpoint_metadata: request.checkpoint_metadata.clone(),
            shrink_only: request.shrink_only,
            init_sync: request.init_sync,
            commit_failures: request.commit_failures,
            lineage: request.lineage.clone(),
            last_quorum_id: request.last_quorum_id.signed(),
            healed: request.healed,
            question: request.question,
            batches_committed: request.batches_committed,
            joining: joining_code(request.joining),
            is_last: request.is_last,
            own_part: true,
        };
        let cancelled = cancel.clone().cancelled();
        async move {
            let answer = call("quorum", &url, deadline, message, |r| async move {
                client.quorum(r).await
            });
            tokio::select! {
                biased;
                answer = answer => answer?.try_into(),
                () = cancelled => Err(Error::new(ErrorKind::Aborted, "the question was taken back").with_op("quorum")),
            }
        }
    }

    /// Votes, and waits until all ranks of the replica have: true if all votes were.
    ///
    /// The same vote may be cast again if the answer was lost. Errors: `Mismatch` if another rank already votes on a
    /// later step or attempt; `Timeout` naming the ranks that did not vote; the step is not committed then.
    pub fn should_commit(&self, vote: &CommitVote, deadline: Instant) -> Result<bool> {
        self.vote(vote, String::new(), deadline)
    }

    /// Says, in the place of a vote, that this rank cannot go on because of `why`, which no other epoch would change. From then on every
    /// call of the replica's ranks, those that are waiting too, ends with `Unsupported` and that text: a replica goes on as a whole
    /// or not at all, and no rank waits for one that will not come.
    pub fn give_up(&self, vote: &CommitVote, why: &str, deadline: Instant) -> Result<()> {
        // Long enough for any error text, and far below what a message may have.
        let mut why: String = why.chars().take(4096).collect();
        if why.is_empty() {
            why.push_str("no reason given");
        }
        let vote = CommitVote { vote: false, ..*vote };
        self.vote(&vote, why, deadline).map(|_| ())
    }

    fn vote(&self, vote: &CommitVote, gives_up: String, deadline: Instant) -> Result<bool> {
        let cast = self.cast(vote, gives_up, deadline);
        wait_for(self.connection.handle(), "should_commit", deadline, cast)
    }

    /// Votes, on a runtime; or gives up, if there is a reason.
    pub(crate) fn cast(
        &self,
        vote: &CommitVote,
        gives_up: String,
        deadline: Instant,
    ) -> impl Future<Output = Result<bool>> + Send + use<> {
        let (mut client, url) = (self.torchft(), self.connection.url.clone());
        let message = torchft::ShouldCommitRequest {
            should_commit: vote.vote,
            group_rank: i64::from(vote.group_rank),
            step: vote.step.0,
            quorum_id: vote.quorum_id.signed(),
            attempt: vote.attempt,
            gives_up,
            counts: self
                .counts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .map(Into::into),
        };
        async move {
            let answer = call("should_commit", &url, deadline, message, |r| async move {
                client.should_commit(r).await
            });
            answer.await.map(|r| r.should_commit)
        }
    }

    /// What the rank `group_rank` of that replica said with its last quorum request.
    ///
    /// Errors: `InvalidArgument` if it has not asked for a quorum yet.
    pub fn checkpoint_metadata(&self, group_rank: u32, deadline: Instant) -> Result<String> {
        let (mut client, url) = (self.torchft(), self.connection.url.clone());
        let message = torchft::CheckpointMetadataRequest {
            rank: i64::from(group_rank),
        };
        wait_for(
            self.connection.handle(),
            "checkpoint_metadata",
            deadline,
            async move {
                call("checkpoint_metadata", &url, deadline, message, |r| async move {
                    client.checkpoint_metadata(r).await
                })
                .await
                .map(|r| r.checkpoint_metadata)
            },
        )
    }

    /// Tells the lighthouse, over the manager server, that the epoch failed: all its members are told to abort it.
    pub fn report(&self, quorum_id: Epoch, reason: &str, deadline: Instant) -> Result<()> {
        self.report_suspects(quorum_id, reason, &[], deadline)
    }

    /// Like [`ManagerClient::report`], naming the replica ids that are believed to be at fault. They are logged, not
    /// removed.
    pub fn report_suspects(
        &self,
        quorum_id: Epoch,
        reason: &str,
        suspects: &[String],
        deadline: Instant,
    ) -> Result<()> {
        let (mut client, url) = (self.ours(), self.connection.url.clone());
        let message = oxccl::ManagerReportRequest {
            group_rank: self.rank.load(Ordering::Relaxed),
            quorum_id: quorum_id.signed(),
            reason: reason.to_string(),
            suspects: suspects.to_vec(),
        };
        wait_for(self.connection.handle(), "report", deadline, async move {
            call("report", &url, deadline, message, |r| async move {
                client.report(r).await
            })
            .await
            .map(|_| ())
        })
    }

    /// Ends the replica, its ranks with an error that gives `why`. For the operator, with credentials; refused to all others.
    pub fn kill(&self, why: &str, deadline: Instant) -> Result<()> {
        let (mut client, url) = (self.torchft(), self.connection.url.clone());
        let message = torchft::KillRequest { msg: why.to_string() };
        wait_for(self.connection.handle(), "kill", deadline, async move {
            call("kill", &url, deadline, message, |r| async move {
                client.kill(r).await
            })
            .await
            .map(|_| ())
        })
    }

    /// Says that `group_rank` leaves in good order, so that its end is no death.
    pub fn leave(&self, group_rank: u32, deadline: Instant) -> Result<()> {
        let (mut client, url) = (self.ours(), self.connection.url.clone());
        let message = oxccl::ManagerLeaveRequest {
            group_rank: i64::from(group_rank),
        };
        wait_for(self.connection.handle(), "leave", deadline, async move {
            call("leave", &url, deadline, message, |r| async move {
                client.leave(r).await
            })
            .await
            .map(|_| ())
        })
    }

    /// Tells the manager server, at most once each `every`, that the training thread moves: whenever `stamp` has another value than
    /// before. Until the guard is dropped.
    pub fn progress(&self, group_rank: u32, stamp: Arc<AtomicU64>, every: Duration) -> WatchGuard {
        let (client, url) = (self.ours(), self.connection.url.clone());
        let every = every.max(Duration::from_millis(1));
        let told = progress(client, url, group_rank, stamp, every);
        WatchGuard {
            task: self.connection.handle().spawn(told).abort_handle(),
            _connection: self.connection.clone(),
        }
    }

    /// Calls `callback` for every event, until the guard is dropped. The stream is opened again when it breaks; the last
    /// event is repeated then, so that none is lost.
    pub fn watch(&self, group_rank: u32, callback: Callback) -> WatchGuard {
        self.rank.store(i64::from(group_rank), Ordering::Relaxed);
        let client = self.ours();
        let url = self.connection.url.clone();
        let watched = watch(client, url, group_rank, callback);
        WatchGuard {
            task: self.connection.handle().spawn(watched).abort_handle(),
            _connection: self.connection.clone(),
        }
    }
}

/// Tells the server of progress, at most once each `every`.
async fn progress(
    mut client: OxcclManagerClient<Channel>,
    url: String,
    group_rank: u32,
    stamp: Arc<AtomicU64>,
    every: Duration,
) {
    let mut told = 0;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let now = stamp.load(Ordering::Relaxed);
        if now == told {
            continue;
        }
        let message = oxccl::ManagerProgressRequest {
            group_rank: i64::from(group_rank),
        };
        let deadline = deadline_in(every.max(Duration::from_secs(1)));
        let answer = call("progress", &url, deadline, message, |r| async {
            client.progress(r).await
        })
        .await;
        match answer {
            Ok(_) => told = now,
            Err(error) => tracing::debug!(%error, "the manager server did not hear of progress"),
        }
    }
}

async fn watch(mut client: OxcclManagerClient<Channel>, url: String, group_rank: u32, callback: Callback) {
    let mut backoff = Backoff::new();
    loop {
        match client
            .watch(oxccl::WatchRequest {
                group_rank: i64::from(group_rank),
                process: i64::from(std::process::id()),
                process_space: ftcore::process_space().unwrap_or_default(),
            })
            .await
        {
            Ok(response) => {
                backoff.reset();
                let mut events = response.into_inner();
                while let Ok(Some(event)) = events.message().await {
                    let event = match event.event {
                        Some(oxccl::manager_event::Event::AbortEpoch(a)) => PushEvent::AbortEpoch {
                            quorum_id: epoch_of(a.quorum_id),
                            reason: a.reason,
                            departed: a.departed,
                        },
                        Some(oxccl::manager_event::Event::Kill(k)) => PushEvent::Kill { reason: k.reason },
                        None => continue,
                    };
                    // The caller's panic must not end the watch silently.
                    if catch_unwind(AssertUnwindSafe(|| callback(event))).is_err() {
                        tracing::error!(url, "a watch callback panicked");
                    }
                }
                tracing::debug!(url, "the watch broke; opening it again");
            }
            Err(status) if status.code() == Code::Unimplemented => {
                tracing::warn!(url, kind = ?ErrorKind::Unsupported, "this manager server pushes no events");
                return;
            }
            Err(status) => tracing::debug!(url, %status, "no watch yet"),
        }
        tokio::time::sleep(backoff.next()).await;
    }
}
