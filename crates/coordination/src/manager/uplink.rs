//! The manager server's side of the talk with the lighthouse: the attach stream, heartbeats, quorum calls, reports.
//!
//! The open stream stands for the replica's incarnation, with HTTP/2's pings both ways; heartbeats are sent only while there is none.
//! The channel reconnects by itself; the stream is opened again with growing pauses. Of several lighthouses the leading one is looked for. A
//! lighthouse that knows only torchft's services serves for everything but the pushes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result};
use tokio::sync::watch;
use tonic::Code;
use tonic::Request;
use tonic::transport::Channel;

use super::actor::Manager;
use crate::channel::{Backoff, background_deadline};
use crate::clock::{deadline_in, time_left};
use crate::lighthouses::{Lighthouses, Search};
use crate::unchanged::Held;
use crate::wire::oxccl::oxccl_lighthouse_client::OxcclLighthouseClient;
use crate::wire::torchft::lighthouse_service_client::LighthouseServiceClient;
use crate::wire::{MAX_MESSAGE_BYTES, MAX_QUORUM_BYTES, is_elsewhere, order_of, oxccl, torchft};
use protocol::gather::RankRequest;
use protocol::replica::ReplicaEvent;
use protocol::{Member, Told};

/// How long a replica that cannot go on has to tell why, before its stream ends and its ranks are answered.
pub(crate) const TELL_FIRST: Duration = Duration::from_millis(500);

/// For so long a leave that did not arrive is sent again. Longer would hold up every end of a run whose lighthouse has ended before.
const SAY_AGAIN: Duration = Duration::from_secs(1);

/// The phases of a replica's incarnation, as the background tasks see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// No quorum was asked for yet: a replica that loads must not hold up others, so it sends no heartbeats.
    Quiet,
    Active,
    /// It leaves: no heartbeat and no new stream may follow, or it would seem alive again.
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
    lighthouses: Lighthouses,
    own: Member,
    heartbeat_interval: Duration,
    retries: u32,
    /// The quorum that the replica was last given; 0 if none.
    last_quorum_id: AtomicU64,
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
    /// For the replica `own`. A quorum call that fails is tried again up to `retries` times.
    pub(crate) fn new(
        lighthouses: Lighthouses,
        own: Member,
        heartbeat_interval: Duration,
        retries: u32,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                lighthouses,
                own,
                heartbeat_interval,
                retries,
                last_quorum_id: AtomicU64::new(0),
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
    pub(crate) fn set_last_quorum(&self, id: Epoch, world_size: u64) {
        self.inner.last_quorum_id.store(id.0, Ordering::Relaxed);
        self.inner.last_world_size.store(world_size, Ordering::Relaxed);
    }

    /// Whether the replica can go on.
    pub(crate) fn set_out(&self, out: bool) {
        self.inner
            .out
            .send_if_modified(|o| std::mem::replace(o, out) != out);
    }

    fn last_quorum(&self) -> Epoch {
        Epoch(self.inner.last_quorum_id.load(Ordering::Relaxed))
    }

    /// Whether the stream to the lighthouse is open.
    #[cfg(test)]
    pub(crate) fn is_attached(&self) -> bool {
        *self.inner.attached.borrow()
    }

    /// Ends the background tasks.
    pub(crate) fn stop(&self) {
        self.inner.phase.send_replace(Phase::Over);
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
                biased;
                _ = phase.wait_for(|p| *p == Phase::Over) => {}
                () = attach(&uplink, &manager) => {}
            }
        });
    }

    /// Asks the lighthouse for a quorum with this replica in it. Tries again as configured; the error says how often.
    pub(crate) async fn quorum(&self, request: RankRequest, deadline: Instant) -> Result<Told> {
        let inner = &self.inner;
        let init_sync = request.init_sync;
        let part = request.own_part.then_some(torchft::PartRequest { init_sync });
        let member = Member {
            step: request.step,
            shrink_only: request.shrink_only,
            commit_failures: request.commit_failures,
            lineage: request.lineage,
            last_quorum_id: request.last_quorum_id,
            last_world_size: inner.last_world_size.load(Ordering::Relaxed),
            healed: request.healed,
            batches_committed: request.batches_committed,
            joining: request.joining,
            is_last: request.is_last,
            ..inner.own.clone()
        };
        let mut backoff = Backoff::new();
        let mut tries = 0;
        let unanswered = AtomicBool::new(request.unanswered);
        loop {
            tries += 1;
            let message = torchft::LighthouseQuorumRequest {
                requester: Some(member.clone().into()),
                held_list: self.held().list(init_sync),
                part,
                unanswered: false,
            };
            let ask = |channel, mut request: Request<torchft::LighthouseQuorumRequest>| {
                // Whatever became of an earlier call, its answer did not come.
                request.get_mut().unanswered = unanswered.swap(true, Ordering::Relaxed);
                async move { torchft(channel).quorum(request).await }
            };
            let answer = inner
                .lighthouses
                .call("lighthouse.quorum", deadline, message, ask)
                .await;
            let error = match answer {
                Ok(response) => return self.check(response, init_sync),
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
    fn check(&self, response: torchft::LighthouseQuorumResponse, init_sync: bool) -> Result<Told> {
        let told = self.held().take_in(response, init_sync)?;
        if let Told::Members(quorum) = &told
            && !quorum.contains(self.replica_id())
            && !quorum.has_spare(self.replica_id())
        {
            let text = format!(
                "the lighthouse sent quorum {} without {}",
                quorum.quorum_id,
                self.replica_id()
            );
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(told)
    }

    /// Tells the lighthouse that the epoch failed here. A lighthouse without that service is not an error.
    pub(crate) async fn report(
        &self,
        quorum_id: Epoch,
        reason: String,
        suspects: Vec<String>,
        deadline: Instant,
    ) -> Result<()> {
        let message = oxccl::ReportRequest {
            replica_id: self.replica_id().to_string(),
            quorum_id: quorum_id.signed(),
            reason,
            suspects,
        };
        let report = |channel, request| async move { ours(channel).report(request).await };
        let lighthouses = &self.inner.lighthouses;
        unless_unsupported(
            lighthouses
                .call("lighthouse.report", deadline, message, report)
                .await,
        )
    }

    /// Tells the lighthouse that this replica is out of the quorum, so that the others do not wait for it.
    pub(crate) async fn fail(&self, reason: String) {
        let message = oxccl::LeaveRequest {
            replica_id: self.replica_id().to_string(),
            reason,
            failed: true,
        };
        let leave = |channel, request| async move { ours(channel).leave(request).await };
        let lighthouses = &self.inner.lighthouses;
        let answer = lighthouses.call("lighthouse.leave", background_deadline(), message, leave);
        if let Err(error) = answer.await {
            tracing::warn!(%error, "the lighthouse did not hear that this replica cannot go on");
        }
    }

    /// Tells the lighthouse that it leaves, and ends the background tasks. A replica that is waited for, or is to learn that the run is over, depends on it, so it is said
    /// again where a connection broke.
    pub(crate) async fn leave(&self, deadline: Instant) -> Result<()> {
        // The stream stays open until that has arrived: its break would look like a death.
        self.inner.phase.send_replace(Phase::Leaving);
        let message = oxccl::LeaveRequest {
            replica_id: self.replica_id().to_string(),
            reason: "the replica ends in order".to_string(),
            failed: false,
        };
        let lighthouses = &self.inner.lighthouses;
        let (mut backoff, until) = (Backoff::new(), deadline_in(SAY_AGAIN).min(deadline));
        let answer = loop {
            let leave = |channel, request| async move { ours(channel).leave(request).await };
            let answer = lighthouses
                .call("lighthouse.leave", deadline, message.clone(), leave)
                .await;
            let pause = backoff.next();
            let again = answer.as_ref().is_err_and(Error::is_retryable) && time_left(until) > pause;
            if !again {
                break answer;
            }
            tokio::time::sleep(pause).await;
        };
        self.stop();
        unless_unsupported(answer)
    }
}

fn torchft(channel: Channel) -> LighthouseServiceClient<Channel> {
    LighthouseServiceClient::new(channel).max_decoding_message_size(MAX_QUORUM_BYTES)
}

fn ours(channel: Channel) -> OxcclLighthouseClient<Channel> {
    OxcclLighthouseClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
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
    let limit = (inner.heartbeat_interval * 10).max(Duration::from_secs(1));
    let mut failing = false;
    loop {
        tokio::select! {
            biased;
            _ = phase.wait_for(|p| *p >= Phase::Leaving) => return,
            // The lighthouse counts the stream; its end is worth a heartbeat at once.
            () = async {
                drop(attached.wait_for(|a| !*a).await);
                drop(out.wait_for(|out| !*out).await);
                beats.tick().await;
            } => {}
        }
        let message = torchft::LighthouseHeartbeatRequest {
            replica_id: uplink.replica_id().to_string(),
        };
        let beat = |channel, request| async move { torchft(channel).heartbeat(request).await };
        let answer = inner
            .lighthouses
            .call("lighthouse.heartbeat", deadline_in(limit), message, beat)
            .await;
        match &answer {
            Ok(_) if failing => tracing::info!(
                url = inner.lighthouses.list(),
                "heartbeats reach the lighthouse again"
            ),
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

/// Ready once the replica cannot go on, and has had time to say why: the end of its stream alone would tell less. Not if it goes on within that time: its
/// next quorum would lose it again.
async fn went_out(out: &mut watch::Receiver<bool>) {
    loop {
        drop(out.wait_for(|out| *out).await);
        let again = tokio::time::timeout(TELL_FIRST, out.wait_for(|out| !*out));
        if !again.await.is_ok_and(|again| again.is_ok()) {
            return;
        }
    }
}

async fn attach(uplink: &Uplink, manager: &Manager) {
    let inner = &uplink.inner;
    let mut search = Search::new(inner.lighthouses.count());
    let mut out = inner.out.subscribe();
    while *inner.phase.borrow() < Phase::Leaving {
        drop(out.wait_for(|out| !*out).await);
        let request = oxccl::AttachRequest {
            replica_id: uplink.replica_id().to_string(),
            address: inner.own.address.clone(),
            last_quorum_id: uplink.last_quorum().signed(),
        };
        let lighthouse = match inner.lighthouses.current() {
            Ok(lighthouse) => lighthouse,
            Err(error) => return tracing::error!(%error, "no stream to the lighthouse"),
        };
        // Whether another one is to be asked: not if this one has answered with a refusal, nor if the stream was ended here.
        let gone = match ours(lighthouse.channel.clone()).attach(request).await {
            Ok(response) => {
                search.reset();
                let mut events = response.into_inner();
                let open = Open::new(&inner.attached);
                let (gone, end) = loop {
                    let event = tokio::select! {
                        biased;
                        event = events.message() => event,
                        () = went_out(&mut out) => break (false, "this replica cannot go on".to_string()),
                    };
                    match event {
                        Ok(Some(event)) => match event.event {
                            Some(oxccl::lighthouse_event::Event::AbortEpoch(abort)) => {
                                manager.tell(ReplicaEvent::Aborted(abort.into()));
                            }
                            Some(oxccl::lighthouse_event::Event::Order(order)) => {
                                if let Some(order) = order_of(order) {
                                    tracing::warn!(
                                        replica = uplink.replica_id(),
                                        order = ?order.kind,
                                        reason = order.reason,
                                        "an operator's order"
                                    );
                                    manager.tell(ReplicaEvent::Ordered(order));
                                }
                            }
                            None => {}
                        },
                        Ok(None) => break (true, "the lighthouse ended it".to_string()),
                        Err(status) => break (true, status.message().to_string()),
                    }
                };
                drop(open);
                tracing::info!(
                    url = lighthouse.url,
                    end,
                    "the stream to the lighthouse broke; opening it again"
                );
                gone
            }
            Err(status) if status.code() == Code::Unimplemented => {
                tracing::warn!(
                    url = lighthouse.url,
                    "this lighthouse pushes no events; deaths are noticed by time-outs"
                );
                return;
            }
            Err(status) => {
                tracing::debug!(url = lighthouse.url, %status, "no stream to the lighthouse yet");
                is_elsewhere(&status)
            }
        };
        if gone {
            inner.lighthouses.go_on(&lighthouse);
        }
        tokio::time::sleep(search.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_goes_on_before_its_stream_was_ended_keeps_it() {
        let (tell, mut out) = watch::channel(false);
        let moves = async {
            for out in [true, false, true, false] {
                tokio::time::sleep(TELL_FIRST / 2).await;
                tell.send_replace(out);
            }
        };
        let limit = TELL_FIRST * 10;
        let (ended, ()) = tokio::join!(tokio::time::timeout(limit, went_out(&mut out)), moves);
        assert!(ended.is_err(), "it moved in time");
        tell.send_replace(true);
        let since = tokio::time::Instant::now();
        went_out(&mut out).await;
        assert_eq!(since.elapsed(), TELL_FIRST);
    }
}
