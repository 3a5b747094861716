//! Talks to a lighthouse directly, without a manager server: for tools, tests and programs that keep time themselves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, join_address, split_url};
use identity::Party;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::MissedTickBehavior;
use tonic::transport::Channel;

use super::{Thread, tool};
use crate::channel::{Way, chain, wait_for};
use crate::clock::deadline_in;
use crate::lighthouse::LighthouseStatus;
use crate::lighthouses::{Lighthouses, Search};
use crate::wire::oxccl::oxccl_lighthouse_client::OxcclLighthouseClient;
use crate::wire::torchft::lighthouse_service_client::LighthouseServiceClient;
use crate::wire::{MAX_MESSAGE_BYTES, MAX_QUORUM_BYTES, oxccl, torchft, without_credentials};
use protocol::quorum::Order;
use protocol::{Member, Quorum};

/// How often a waiting call says that its replica is alive.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// No status is longer, in bytes.
const MAX_STATUS_BYTES: u64 = 64 << 20;

/// A client of a lighthouse, or of several of which one leads.
#[derive(Debug, Clone)]
pub struct LighthouseClient {
    lighthouses: Arc<Lighthouses>,
    thread: Arc<Thread>,
}

fn torchft(channel: Channel) -> LighthouseServiceClient<Channel> {
    LighthouseServiceClient::new(channel).max_decoding_message_size(MAX_QUORUM_BYTES)
}

fn ours(channel: Channel) -> OxcclLighthouseClient<Channel> {
    OxcclLighthouseClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

impl LighthouseClient {
    /// Connects to `url` (`http://host:port`, or the URLs of all the job's lighthouses, separated by commas), trying again until `deadline`; with the
    /// credentials that `OXCCL_CREDENTIALS` names, if it does, to `https://host:port`, as the operator or the replica whose they are.
    /// Errors: `InvalidArgument`, `Unavailable`.
    pub fn connect(url: &str, deadline: Instant) -> Result<Self> {
        Self::connect_as(tool()?, url, deadline)
    }

    /// Like [`LighthouseClient::connect`], as this party, whatever the environment says.
    pub fn connect_as(party: Option<Arc<Party>>, url: &str, deadline: Instant) -> Result<Self> {
        let thread = Thread::start()?;
        let lighthouses = Lighthouses::reach(&thread.handle, party, url, deadline)?;
        Ok(Self {
            lighthouses: Arc::new(lighthouses),
            thread: Arc::new(thread),
        })
    }

    /// Asks for a quorum with `member` in it and waits for it; heartbeats are sent meanwhile.
    ///
    /// Errors: `Timeout` saying whom the lighthouse waits for, `Conflict` if a newer incarnation replaced this one,
    /// `Unavailable`, `InvalidArgument`.
    pub fn quorum(&self, member: &Member, deadline: Instant) -> Result<Quorum> {
        let (lighthouses, member) = (self.lighthouses.clone(), member.clone());
        wait_for(&self.thread.handle, "lighthouse.quorum", deadline, async move {
            let beat = torchft::LighthouseHeartbeatRequest {
                replica_id: member.replica_id.clone(),
            };
            let message = torchft::LighthouseQuorumRequest {
                requester: Some(member.into()),
                held_list: 0,
                unanswered: false,
                part: None,
            };
            let alive = async {
                let mut ticks = tokio::time::interval(HEARTBEAT);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                loop {
                    ticks.tick().await;
                    // Its failure shows in the call itself.
                    let _ = lighthouses
                        .call(
                            "lighthouse.heartbeat",
                            deadline_in(HEARTBEAT * 4),
                            beat.clone(),
                            |c, r| async { torchft(c).heartbeat(r).await },
                        )
                        .await;
                }
            };
            let ask = lighthouses.call("lighthouse.quorum", deadline, message, |c, r| async {
                torchft(c).quorum(r).await
            });
            let response = tokio::select! {
                answer = ask => answer?,
                () = alive => return Err(Error::new(ErrorKind::Internal, "the heartbeats ended")),
            };
            let none = || Error::new(ErrorKind::Protocol, "the lighthouse answered without a quorum");
            response.quorum.map(Into::into).ok_or_else(none)
        })
    }

    /// Says that `replica_id` is alive. It counts only for replicas that asked for a quorum.
    pub fn heartbeat(&self, replica_id: &str, deadline: Instant) -> Result<()> {
        let lighthouses = self.lighthouses.clone();
        let message = torchft::LighthouseHeartbeatRequest {
            replica_id: replica_id.to_string(),
        };
        wait_for(
            &self.thread.handle,
            "lighthouse.heartbeat",
            deadline,
            async move {
                let beat = |c, r| async { torchft(c).heartbeat(r).await };
                let answer = lighthouses.call("lighthouse.heartbeat", deadline, message, beat);
                answer.await.map(|_| ())
            },
        )
    }

    /// Says that `replica_id` goes, and why. Errors: `Unsupported` from a lighthouse without that service.
    pub fn leave(&self, replica_id: &str, reason: &str, deadline: Instant) -> Result<()> {
        self.out(replica_id, reason, false, deadline)
    }

    /// Says that `replica_id` cannot go on, and why: it is out at once, and the members of its epoch are told. Errors: as of
    /// [`LighthouseClient::leave`].
    pub fn failed(&self, replica_id: &str, reason: &str, deadline: Instant) -> Result<()> {
        self.out(replica_id, reason, true, deadline)
    }

    fn out(&self, replica_id: &str, reason: &str, failed: bool, deadline: Instant) -> Result<()> {
        let lighthouses = self.lighthouses.clone();
        let message = oxccl::LeaveRequest {
            replica_id: replica_id.to_string(),
            reason: reason.to_string(),
            failed,
        };
        wait_for(&self.thread.handle, "lighthouse.leave", deadline, async move {
            let leave = |c, r| async { ours(c).leave(r).await };
            let answer = lighthouses.call("lighthouse.leave", deadline, message, leave);
            answer.await.map(|_| ())
        })
    }

    /// Gives a replica an operator's order. `replica` is its id, or the name that all its incarnations share. The ids of the replicas that
    /// were told; what they do takes its time.
    ///
    /// Errors: `NotFound`, naming the replicas that there are; `Unsupported` for one that cannot be told, and from a lighthouse without
    /// that service.
    pub fn operate(&self, replica: &str, order: Order, deadline: Instant) -> Result<Vec<String>> {
        let lighthouses = self.lighthouses.clone();
        let message = oxccl::OperateRequest {
            replica: replica.to_string(),
            order: Some(order.into()),
        };
        wait_for(&self.thread.handle, "lighthouse.operate", deadline, async move {
            let operate = |c, r| async { ours(c).operate(r).await };
            let answer = lighthouses.call("lighthouse.operate", deadline, message, operate);
            answer.await.map(|told| told.replica_ids)
        })
    }

    /// What the lighthouse's page shows; of several lighthouses the leading one's, or the last one's if none leads. Errors: `Unavailable`,
    /// `Timeout`, `InvalidArgument` for a server that asks for credentials, `Protocol` for another server's answer.
    pub fn status(&self, deadline: Instant) -> Result<LighthouseStatus> {
        let lighthouses = self.lighthouses.clone();
        wait_for(&self.thread.handle, "lighthouse.status", deadline, async move {
            let mut search = Search::new(lighthouses.count());
            loop {
                let asked = lighthouses.current()?;
                let status = status_of(lighthouses.way(), &asked.url, deadline).await;
                let elsewhere = match &status {
                    Ok(status) => !status.leads,
                    Err(error) => error.kind() == ErrorKind::Unavailable,
                };
                // Each is asked once.
                if !elsewhere || !search.next().is_zero() {
                    return status;
                }
                lighthouses.go_on(&asked);
            }
        })
    }
}

async fn status_of(way: &Way, url: &str, deadline: Instant) -> Result<LighthouseStatus> {
    let late = |_| {
        Error::timeout("no status in time")
            .with_op("lighthouse.status")
            .with_peer_address(url)
    };
    let body = tokio::time::timeout_at(deadline.into(), get(way, url, "/status"))
        .await
        .map_err(late)??;
    serde_json::from_slice(&body)
        .map_err(|e| Error::new(ErrorKind::Protocol, format!("the status of {url}: {e}")).with_source(e))
}

/// The body of a page, over a connection of its own.
async fn get(way: &Way, url: &str, path: &str) -> Result<Vec<u8>> {
    let (host, port) = split_url(url)?;
    let mut stream = way
        .open(host, port)
        .await
        .map_err(|e| Error::new(ErrorKind::Unavailable, format!("{url}: {}", chain(&*e))))?;
    let unreachable =
        |e: std::io::Error| Error::new(ErrorKind::Unavailable, format!("{url}: {e}")).with_source(e);
    let host = join_address(host, port);
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(unreachable)?;
    let mut answer = Vec::new();
    stream
        .take(MAX_STATUS_BYTES)
        .read_to_end(&mut answer)
        .await
        .map_err(unreachable)?;
    let bad = || {
        Error::new(
            ErrorKind::Protocol,
            format!("{url}{path} did not answer as a lighthouse does"),
        )
    };
    // What a server with TLS says to a request without.
    if answer.starts_with(b"HTTP/1.1 403") {
        return Err(Error::invalid(format!(
            "'{url}': that server asks for credentials; {}",
            without_credentials()
        )));
    }
    if !answer.starts_with(b"HTTP/1.1 200") {
        return Err(bad());
    }
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n").ok_or_else(bad)?;
    Ok(answer.split_off(head + 4))
}
