//! The manager server's side of the talk with the lighthouse: the attach stream, heartbeats, quorum calls, reports.
//!
//! The open stream stands for the replica's life, with HTTP/2's pings both ways; heartbeats are sent only while there is none.
//! The channel reconnects by itself; the stream is opened again with growing pauses. A lighthouse that knows only
//! torchft's services serves for everything but the pushes.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, time_left};
use tokio::sync::watch;
use tonic::Code;
use tonic::transport::Channel;

use super::ManagerServerConfig;
use super::actor::Manager;
use crate::channel::{Backoff, background_deadline, call};
use crate::unchanged::Held;
use crate::wire::oxccl::oxccl_lighthouse_client::OxcclLighthouseClient;
use crate::wire::torchft::lighthouse_service_client::LighthouseServiceClient;
use crate::wire::{MAX_MESSAGE_BYTES, MAX_QUORUM_BYTES, oxccl, torchft};
use protocol::gather::RankRequest;
use protocol::replica::ReplicaEvent;
use protocol::{Member, Quorum};

/// How long a replica that cannot go on has to tell why, before its stream ends and its ranks are answered.
pub(crate) const TELL_FIRST: Duration = Duration::from_millis(500);

/// The phases of a replica's life, as the background tasks see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// No quorum was asked for yet: a replica that loads must not hold up others, so it sends no heartbeats.
    Quiet,
    Active,
    /// It says goodbye: no heartbeat and no new stream may follow, or it would seem alive again.
    Leaving,
    /// The open stream ends as well.
    Over,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Uplink {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    url: String,
    channel: Channel,
    own: Member,
    heartbeat_interval: Duration,
    retries: u32,
    /// The quorum that the replica was last given; 0 if none.
    last_quorum_id: AtomicI64,
    phase: watch::Sender<Phase>,
    last_world_size: AtomicU64,
    /// Whether the stream to the lighthouse is open.
    attached: watch::Sender<bool>,
    /// The replica cannot go on, for good or for now: no sign of life goes out that would have others wait for it.
    out: watch::Sender<bool>,
    /// The lighthouse's last answer.
    held: Mutex<Held>,
}

impl Uplink {
    pub(crate) fn new(channel: Channel, config: &ManagerServerConfig, address: String, life: String) -> Self {
        let own = Member {
            replica_id: config.replica_id.clone(),
            address,
            store_address: config.store_address.clone(),
            world_size: u64::from(config.world_size),
            life,
            ..Member::default()
        };
        Self {
            inner: Arc::new(Inner {
                url: config.lighthouse.clone(),
                channel,
                own,
                heartbeat_interval: config.heartbeat_interval,
                retries: config.quorum_retries,
                last_quorum_id: AtomicI64::new(0),
                phase: watch::channel(Phase::Quiet).0,
                last_world_size: AtomicU64::new(0),
                attached: watch::channel(false).0,
                out: watch::channel(false).0,
                held: Mutex::default(),
            }),
        }
    }

    pub(crate) fn replica_id(&self) -> &str {
        &self.inner.own.replica_id
    }

    /// The quorum that the replica was last given, and its number of members.
    pub(crate) fn set_last_quorum(&self, id: i64, world_size: u64) {
        self.inner.last_quorum_id.store(id, Ordering::Relaxed);
        self.inner.last_world_size.store(world_size, Ordering::Relaxed);
    }

    /// Whether the replica can go on.
    pub(crate) fn set_out(&self, out: bool) {
        self.inner
            .out
            .send_if_modified(|o| std::mem::replace(o, out) != out);
    }

    fn last_quorum(&self) -> i64 {
        self.inner.last_quorum_id.load(Ordering::Relaxed)
    }

    /// Ends the background tasks.
    pub(crate) fn stop(&self) {
        self.inner.phase.send_replace(Phase::Over);
    }

    fn torchft(&self) -> LighthouseServiceClient<Channel> {
        LighthouseServiceClient::new(self.inner.channel.clone()).max_decoding_message_size(MAX_QUORUM_BYTES)
    }

    fn ours(&self) -> OxcclLighthouseClient<Channel> {
        OxcclLighthouseClient::new(self.inner.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Starts the heartbeats, once.
    pub(crate) fn begin_heartbeats(&self) {
        let first = self.inner.phase.send_if_modified(|p| {
            let quiet = *p == Phase::Quiet;
            if quiet {
                *p = Phase::Active;
            }
            quiet
        });
        if first {
            tokio::spawn(heartbeats(self.clone()));
        }
    }

    /// Keeps the stream to the lighthouse open until [`Uplink::stop`].
    pub(crate) fn keep_attached(&self, manager: Manager) {
        let uplink = self.clone();
        tokio::spawn(async move {
            let mut phase = uplink.inner.phase.subscribe();
            tokio::select! {
                () = attach(&uplink, &manager) => {}
                _ = phase.wait_for(|p| *p == Phase::Over) => {}
            }
        });
    }

    /// Asks the lighthouse for a quorum with this replica in it. Tries again as configured; the error says how often.
    pub(crate) async fn quorum(&self, request: RankRequest, deadline: Instant) -> Result<Quorum> {
        let inner = &self.inner;
        let member = Member {
            step: request.step,
            shrink_only: request.shrink_only,
            commit_failures: request.commit_failures,
            lineage: request.lineage,
            last_quorum_id: request.last_quorum_id.max(0),
            last_world_size: inner.last_world_size.load(Ordering::Relaxed),
            healed: request.healed,
            joining: request.joining,
            is_last: request.is_last,
            ..inner.own.clone()
        };
        let mut backoff = Backoff::new();
        let mut tries = 0;
        loop {
            tries += 1;
            let message = torchft::LighthouseQuorumRequest {
                requester: Some(member.clone().into()),
                held_list: self.held().list(),
            };
            let mut client = self.torchft();
            let answer = call(
                "lighthouse.quorum",
                &inner.url,
                deadline,
                message,
                |r| async move { client.quorum(r).await },
            )
            .await;
            let error = match answer {
                Ok(response) => return self.check(response),
                Err(error) => error,
            };
            let pause = backoff.next();
            let again = error.is_retryable() && tries <= inner.retries && time_left(deadline) > pause;
            if !again {
                let tries = if tries == 1 {
                    String::new()
                } else {
                    format!(" ({tries} tries)")
                };
                return Err(Error::new(error.kind(), format!("{error}{tries}")).with_source(error));
            }
            tracing::warn!(%error, tries, "the lighthouse gave no quorum; trying again");
            tokio::time::sleep(pause).await;
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.inner.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The quorum of an answer, made whole.
    fn check(&self, response: torchft::LighthouseQuorumResponse) -> Result<Quorum> {
        let quorum = self.held().take_in(response)?;
        if !quorum.contains(self.replica_id()) && !quorum.has_spare(self.replica_id()) {
            let text = format!(
                "the lighthouse sent quorum {} without {}",
                quorum.quorum_id,
                self.replica_id()
            );
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(quorum)
    }

    /// Tells the lighthouse that the epoch failed here. A lighthouse without that service is not an error.
    pub(crate) async fn report(
        &self,
        quorum_id: i64,
        reason: String,
        suspects: Vec<String>,
        deadline: Instant,
    ) -> Result<()> {
        let message = oxccl::ReportRequest {
            replica_id: self.replica_id().to_string(),
            quorum_id,
            reason,
            suspects,
        };
        let mut client = self.ours();
        let answer = call(
            "lighthouse.report",
            &self.inner.url,
            deadline,
            message,
            |r| async move { client.report(r).await },
        );
        unless_unsupported(answer.await)
    }

    /// Tells the lighthouse that this replica is out of the quorum, so that the others do not wait for it.
    pub(crate) async fn fail(&self, reason: String) {
        let message = oxccl::LeaveRequest {
            replica_id: self.replica_id().to_string(),
            reason,
            failed: true,
        };
        let mut client = self.ours();
        let deadline = background_deadline();
        let answer = call(
            "lighthouse.leave",
            &self.inner.url,
            deadline,
            message,
            |r| async move { client.leave(r).await },
        );
        if let Err(error) = answer.await {
            tracing::warn!(%error, "the lighthouse did not hear that this replica cannot go on");
        }
    }

    /// Says goodbye and ends the background tasks.
    pub(crate) async fn leave(&self, deadline: Instant) -> Result<()> {
        // The stream stays open until the goodbye has arrived: its break would look like a death.
        self.inner.phase.send_replace(Phase::Leaving);
        let message = oxccl::LeaveRequest {
            replica_id: self.replica_id().to_string(),
            reason: "the replica ends in order".to_string(),
            failed: false,
        };
        let mut client = self.ours();
        let answer = call(
            "lighthouse.leave",
            &self.inner.url,
            deadline,
            message,
            |r| async move { client.leave(r).await },
        );
        let answer = answer.await;
        self.stop();
        unless_unsupported(answer)
    }
}

fn unless_unsupported<T>(answer: Result<T>) -> Result<()> {
    match answer {
        Err(e) if e.kind() != ErrorKind::Unsupported => Err(e),
        _ => Ok(()),
    }
}

async fn heartbeats(uplink: Uplink) {
    let inner = &uplink.inner;
    let mut phase = inner.phase.subscribe();
    let (mut attached, mut out) = (inner.attached.subscribe(), inner.out.subscribe());
    let mut beats = tokio::time::interval(inner.heartbeat_interval);
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let patience = (inner.heartbeat_interval * 10).max(Duration::from_secs(1));
    let mut failing = false;
    loop {
        tokio::select! {
            // The lighthouse counts the stream; its end is worth a heartbeat at once.
            () = async {
                drop(attached.wait_for(|a| !*a).await);
                drop(out.wait_for(|out| !*out).await);
                beats.tick().await;
            } => {}
            _ = phase.wait_for(|p| *p >= Phase::Leaving) => return,
        }
        let message = torchft::LighthouseHeartbeatRequest {
            replica_id: uplink.replica_id().to_string(),
        };
        let mut client = uplink.torchft();
        let answer = call(
            "lighthouse.heartbeat",
            &inner.url,
            deadline_in(patience),
            message,
            |r| async move { client.heartbeat(r).await },
        )
        .await;
        match &answer {
            Ok(_) if failing => tracing::info!(url = inner.url, "heartbeats reach the lighthouse again"),
            Err(error) if !failing => tracing::warn!(%error, "a heartbeat did not reach the lighthouse"),
            _ => {}
        }
        failing = answer.is_err();
    }
}

/// The stream is open until this is dropped.
struct Open<'a>(&'a watch::Sender<bool>);

impl<'a> Open<'a> {
    fn new(attached: &'a watch::Sender<bool>) -> Self {
        attached.send_replace(true);
        Self(attached)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

/// Ready once the replica cannot go on, and has had time to say why: the end of its stream alone would tell less.
async fn went_out(out: &mut watch::Receiver<bool>) {
    drop(out.wait_for(|out| *out).await);
    tokio::time::sleep(TELL_FIRST).await;
}

async fn attach(uplink: &Uplink, manager: &Manager) {
    let inner = &uplink.inner;
    let mut backoff = Backoff::new();
    let mut out = inner.out.subscribe();
    while *inner.phase.borrow() < Phase::Leaving {
        drop(out.wait_for(|out| !*out).await);
        let request = oxccl::AttachRequest {
            replica_id: uplink.replica_id().to_string(),
            address: inner.own.address.clone(),
            last_quorum_id: uplink.last_quorum(),
        };
        match uplink.ours().attach(request).await {
            Ok(response) => {
                backoff.reset();
                let mut events = response.into_inner();
                let open = Open::new(&inner.attached);
                let end = loop {
                    let event = tokio::select! {
                        event = events.message() => event,
                        () = went_out(&mut out) => break "this replica cannot go on".to_string(),
                    };
                    match event {
                        Ok(Some(event)) => {
                            if let Some(oxccl::lighthouse_event::Event::AbortEpoch(abort)) = event.event {
                                manager.tell(ReplicaEvent::Aborted(abort.into()));
                            }
                        }
                        Ok(None) => break "the lighthouse ended it".to_string(),
                        Err(status) => break status.message().to_string(),
                    }
                };
                drop(open);
                tracing::info!(
                    url = inner.url,
                    end,
                    "the stream to the lighthouse broke; opening it again"
                );
            }
            Err(status) if status.code() == Code::Unimplemented => {
                tracing::warn!(
                    url = inner.url,
                    "this lighthouse pushes no events; deaths are noticed by time-outs"
                );
                return;
            }
            Err(status) => tracing::debug!(url = inner.url, %status, "no stream to the lighthouse yet"),
        }
        tokio::time::sleep(backoff.next()).await;
    }
}
