//! Which of a job's lighthouses leads: one loop per lighthouse, for as long as it runs.
//!
//! Who leads is what etcd's leader key says. A lighthouse that does not lead follows the one that does, over an open stream, and takes its place
//!
//! - at once, when that stream has ended and then either nothing listens at the leader's address or another process answers there: the kernel
//!   of the leader's host says that its process has ended. A stream must have been open: an address that this lighthouse has never reached proves
//!   nothing by refusing.
//! - when the key is gone: the leader has resigned, or its lease has ended because it hangs or is cut off from etcd.
//!
//! Both ways are one transaction that replaces the key only if it still has the revision that was looked at. A wrong suspicion
//! costs a change of the leader, never two histories: the writes and answers of the former one are fenced by that revision ([`Term`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};
use protocol::quorum::Record;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::actor::Lighthouse;
use super::frontend::Role;
use super::journal::Journal;
use super::term::{Keys, Leader, TTL, Term};
use crate::channel::{Backoff, Way, endpoint};
use crate::clock::deadline_in;
use crate::etcd::{Entry, Etcd, Expected, Put};
use crate::wire::oxccl::FollowRequest;
use crate::wire::oxccl::oxccl_lighthouse_client::OxcclLighthouseClient;

/// How often a lighthouse that follows looks at the leader key.
const LOOK: Duration = Duration::from_millis(200);
/// After the end of the stream, before the leader is asked what that means.
const AGAIN: Duration = Duration::from_millis(20);
/// How long one look at etcd may take before its failure is in the log.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// How long connecting to the leader may take.
const CONNECT: Duration = Duration::from_secs(1);

/// Starts the task that answers, with the record of the job and the way to save it.
pub(super) type Begin = Box<dyn FnMut(Option<Record>, Journal) -> (Lighthouse, JoinHandle<Error>) + Send>;

/// This lighthouse's part in the election.
pub(super) struct Election {
    etcd: Arc<Etcd>,
    keys: Keys,
    own: Leader,
    /// How the leading one is called.
    way: Way,
    role: watch::Sender<Role>,
    /// How often a failure in a row has been in the log.
    failing: bool,
}

/// Whom the key names, and the key's revision.
struct Seen {
    leader: Leader,
    revision: i64,
}

impl Election {
    pub(super) fn new(etcd: Arc<Etcd>, job: &str, own: Leader, way: Way, role: watch::Sender<Role>) -> Self {
        Self {
            etcd,
            keys: Keys::of(job),
            own,
            way,
            role,
            failing: false,
        }
    }

    /// Looks at the leader key once. Errors: `Unavailable` if etcd does not answer by `deadline`, `Corrupt` if the key is not ours.
    pub(super) async fn look(&self, deadline: Instant) -> Result<()> {
        self.seen(deadline).await.map(drop)
    }

    /// Follows and leads until `stop`; then it gives up the lead, if it has it.
    pub(super) async fn run(mut self, mut begin: Begin, mut stop: watch::Receiver<bool>) {
        loop {
            let term = tokio::select! {
                term = self.win() => term,
                _ = stop.wait_for(|s| *s) => return,
            };
            let (term, record) = match term {
                Ok(won) => won,
                Err(error) => {
                    // Said once, and again when it is over: etcd may be away for hours.
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::error!(%error, "this lighthouse cannot lead; it goes on trying");
                    }
                    self.role.send_replace(Role::Follows { leader: None });
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
            };
            let term = Arc::new(term);
            let step = record.as_ref().map(|r| r.step.0);
            tracing::info!(
                term = term.token(),
                recorded_step = step,
                "this lighthouse leads the job"
            );
            let (lighthouse, mut task) = begin(record, Journal::Etcd(term.clone()));
            self.role.send_replace(Role::Leads(lighthouse));
            let why = tokio::select! {
                why = term.keep() => Some(why),
                ended = &mut task => Some(ended.unwrap_or_else(|e| {
                    Error::new(ErrorKind::Internal, format!("the task of the lighthouse ended: {e}"))
                })),
                _ = stop.wait_for(|s| *s) => None,
            };
            // First of all no call is answered any more.
            task.abort();
            self.role.send_replace(Role::Follows { leader: None });
            match &why {
                Some(error) => tracing::warn!(term = term.token(), %error, "this lighthouse leads no more"),
                None => tracing::info!(term = term.token(), "this lighthouse gives up the lead"),
            }
            if let Err(error) = term.resign(deadline_in(Duration::from_secs(1))).await {
                tracing::debug!(%error, "the lease is left to its end");
            }
            if why.is_none() {
                return;
            }
        }
    }

    async fn seen(&self, deadline: Instant) -> Result<Option<Seen>> {
        let entry: Option<Entry> = self.etcd.read(&self.keys.leader, deadline).await?;
        let seen = entry.map(|entry| {
            Ok(Seen {
                leader: Leader::decode(&entry, &self.keys.leader)?,
                revision: entry.revision,
            })
        });
        seen.transpose()
    }

    /// Follows until this lighthouse leads. Errors: what keeps it from that.
    async fn win(&mut self) -> Result<(Term, Option<Record>)> {
        let mut followed = None;
        loop {
            let seen = self.seen(deadline_in(TIME_LIMIT)).await?;
            if std::mem::take(&mut self.failing) {
                tracing::info!("etcd answers again");
            }
            let (revision, why) = match &seen {
                None => (0, "no lighthouse leads".to_string()),
                // A term of this run whose end etcd has not heard of.
                Some(seen) if seen.leader.incarnation == self.own.incarnation => {
                    (seen.revision, "it led before".to_string())
                }
                Some(seen) => {
                    let address = &seen.leader.address;
                    if followed.replace(seen.revision) != Some(seen.revision) {
                        tracing::info!(leader = address, term = seen.revision, "this lighthouse follows");
                    }
                    self.role.send_replace(Role::Follows {
                        leader: Some(address.clone()),
                    });
                    let gone = tokio::select! {
                        why = is_gone(&seen.leader, &self.way) => why,
                        changed = self.changed(seen.revision) => { changed?; None }
                    };
                    match gone {
                        Some(why) => (seen.revision, format!("{address} is gone: {why}")),
                        None => continue,
                    }
                }
            };
            tracing::info!(why, "this lighthouse tries to lead");
            if let Some(won) = self.replace(revision).await? {
                return Ok(won);
            }
        }
    }

    /// Ready once the leader key has another revision than `revision`.
    async fn changed(&self, revision: i64) -> Result<()> {
        loop {
            tokio::time::sleep(LOOK).await;
            let seen = self.seen(deadline_in(TIME_LIMIT)).await?;
            if seen.map(|s| s.revision) != Some(revision) {
                return Ok(());
            }
        }
    }

    /// Takes the lead if the leader key still has `revision` (0: is not there). `None`: another lighthouse was faster.
    async fn replace(&self, revision: i64) -> Result<Option<(Term, Option<Record>)>> {
        let lease = self.etcd.grant(TTL, deadline_in(TIME_LIMIT)).await?;
        let value = serde_json::to_vec(&self.own)
            .map_err(|e| Error::new(ErrorKind::Internal, e.to_string()).with_source(e))?;
        let expected = [Expected {
            key: &self.keys.leader,
            revision,
        }];
        let deadline = deadline_in(lease.ttl);
        let put = self
            .etcd
            .put(&self.keys.leader, value, Some(lease), &expected, deadline)
            .await?;
        match put {
            Put::Done(token) => {
                let begun = Term::begin(self.etcd.clone(), self.keys.clone(), lease, token).await;
                begun.map(Some)
            }
            Put::Refused(_) => {
                self.etcd.revoke(lease, deadline).await?;
                Ok(None)
            }
        }
    }
}

/// Follows `leader` until there is evidence that its process has ended, and says which.
async fn is_gone(leader: &Leader, way: &Way) -> Option<String> {
    let endpoint = match endpoint(&leader.address, way) {
        Ok(endpoint) => endpoint.connect_timeout(CONNECT),
        Err(error) => {
            tracing::warn!(%error, "the leader cannot be followed; its lease decides");
            return std::future::pending().await;
        }
    };
    let (mut was_open, mut backoff) = (false, Backoff::new());
    loop {
        let mut pause = None;
        match way.connect(&endpoint).await {
            Ok(channel) => {
                let mut client = OxcclLighthouseClient::new(channel);
                if let Ok(answer) = client.follow(FollowRequest {}).await {
                    let mut stream = answer.into_inner();
                    while let Ok(Some(standing)) = stream.message().await {
                        if standing.incarnation != leader.incarnation {
                            if was_open {
                                return Some("another process answers at its address".into());
                            }
                            break;
                        }
                        was_open = true;
                        if !standing.leads {
                            // It resigns, or has not begun: the key tells.
                            break;
                        }
                        backoff.reset();
                        pause = Some(AGAIN);
                    }
                }
            }
            Err(error) if was_open && is_refusal(&error) => {
                return Some("its connection has ended, and nothing listens at its address".into());
            }
            Err(_) => {}
        }
        tokio::time::sleep(pause.unwrap_or_else(|| backoff.next())).await;
    }
}

/// True if the host of the address said that nothing listens there.
fn is_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(e) = cause {
        let io = e.downcast_ref::<std::io::Error>();
        if io.is_some_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        cause = e.source();
    }
    false
}
