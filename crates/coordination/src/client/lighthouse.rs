//! Talks to a lighthouse directly, without a manager server: for tools, tests and programs that keep time themselves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, join_address, split_url};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::MissedTickBehavior;
use tonic::transport::Channel;

use super::Connection;
use crate::channel::{call, wait_for};
use crate::lighthouse::LighthouseStatus;
use crate::wire::oxccl::oxccl_lighthouse_client::OxcclLighthouseClient;
use crate::wire::torchft::lighthouse_service_client::LighthouseServiceClient;
use crate::wire::{MAX_MESSAGE_BYTES, MAX_QUORUM_BYTES, oxccl, torchft};
use protocol::quorum::Order;
use protocol::{Member, Quorum};

/// How often a waiting call says that its replica is alive.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// No status is longer, in bytes.
const MAX_STATUS_BYTES: u64 = 64 << 20;

/// A client of a lighthouse.
#[derive(Debug, Clone)]
pub struct LighthouseClient {
    connection: Arc<Connection>,
}

impl LighthouseClient {
    /// Connects to `url` (`http://host:port`), trying again until `deadline`. Errors: `InvalidArgument`, `Unavailable`.
    pub fn connect(url: &str, deadline: Instant) -> Result<Self> {
        let hint = "is the lighthouse running? start it with `oxccl lighthouse`";
        Ok(Self {
            connection: Connection::open(url, "lighthouse", hint, deadline)?,
        })
    }

    fn torchft(&self) -> LighthouseServiceClient<Channel> {
        LighthouseServiceClient::new(self.connection.channel.clone())
            .max_decoding_message_size(MAX_QUORUM_BYTES)
    }

    fn ours(&self) -> OxcclLighthouseClient<Channel> {
        OxcclLighthouseClient::new(self.connection.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Asks for a quorum with `member` in it and waits for it; heartbeats are sent meanwhile.
    ///
    /// Errors: `Timeout` saying whom the lighthouse waits for, `Conflict` if a newer life replaced this one,
    /// `Unavailable`, `InvalidArgument`.
    pub fn quorum(&self, member: &Member, deadline: Instant) -> Result<Quorum> {
        let (mut client, mut beats, url) = (self.torchft(), self.torchft(), self.connection.url.clone());
        let member = member.clone();
        wait_for(
            &self.connection.handle()?,
            "lighthouse.quorum",
            deadline,
            async move {
                let beat = torchft::LighthouseHeartbeatRequest {
                    replica_id: member.replica_id.clone(),
                };
                let message = torchft::LighthouseQuorumRequest {
                    requester: Some(member.into()),
                    held_list: 0,
                };
                let alive = async {
                    let mut ticks = tokio::time::interval(HEARTBEAT);
                    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    loop {
                        ticks.tick().await;
                        // Its failure shows in the call itself.
                        let _ = call(
                            "lighthouse.heartbeat",
                            &url,
                            deadline_in(HEARTBEAT * 4),
                            beat.clone(),
                            |r| async { beats.heartbeat(r).await },
                        )
                        .await;
                    }
                };
                let ask = call("lighthouse.quorum", &url, deadline, message, |r| async move {
                    client.quorum(r).await
                });
                let response = tokio::select! {
                    answer = ask => answer?,
                    () = alive => return Err(Error::new(ErrorKind::Internal, "the heartbeats ended")),
                };
                let none = || Error::new(ErrorKind::Protocol, "the lighthouse answered without a quorum");
                response.quorum.map(Into::into).ok_or_else(none)
            },
        )
    }

    /// Says that `replica_id` is alive. It counts only for replicas that asked for a quorum.
    pub fn heartbeat(&self, replica_id: &str, deadline: Instant) -> Result<()> {
        let (mut client, url) = (self.torchft(), self.connection.url.clone());
        let message = torchft::LighthouseHeartbeatRequest {
            replica_id: replica_id.to_string(),
        };
        wait_for(
            &self.connection.handle()?,
            "lighthouse.heartbeat",
            deadline,
            async move {
                call("lighthouse.heartbeat", &url, deadline, message, |r| async move {
                    client.heartbeat(r).await
                })
                .await
                .map(|_| ())
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
        let (mut client, url) = (self.ours(), self.connection.url.clone());
        let message = oxccl::LeaveRequest {
            replica_id: replica_id.to_string(),
            reason: reason.to_string(),
            failed,
        };
        wait_for(
            &self.connection.handle()?,
            "lighthouse.leave",
            deadline,
            async move {
                call("lighthouse.leave", &url, deadline, message, |r| async move {
                    client.leave(r).await
                })
                .await
                .map(|_| ())
            },
        )
    }

    /// Gives a replica an operator's order. `replica` is its id, or the name that all its incarnations share. The ids of the replicas that
    /// were told; what they do takes its time.
    ///
    /// Errors: `NotFound`, naming the replicas that there are; `Unsupported` for one that cannot be told, and from a lighthouse without
    /// that service.
    pub fn operate(&self, replica: &str, order: Order, deadline: Instant) -> Result<Vec<String>> {
        let (mut client, url) = (self.ours(), self.connection.url.clone());
        let message = oxccl::OperateRequest {
            replica: replica.to_string(),
            order: Some(order.into()),
        };
        wait_for(
            &self.connection.handle()?,
            "lighthouse.operate",
            deadline,
            async move {
                call("lighthouse.operate", &url, deadline, message, |r| async move {
                    client.operate(r).await
                })
                .await
                .map(|told| told.replica_ids)
            },
        )
    }

    /// What the lighthouse's page shows. Errors: `Unavailable`, `Timeout`, `Protocol` for another server's answer.
    pub fn status(&self, deadline: Instant) -> Result<LighthouseStatus> {
        let url = self.connection.url.clone();
        wait_for(
            &self.connection.handle()?,
            "lighthouse.status",
            deadline,
            async move {
                let late = |_| {
                    Error::timeout("no status in time")
                        .with_op("lighthouse.status")
                        .with_peer_address(&url)
                };
                let body = tokio::time::timeout_at(deadline.into(), get(&url, "/status"))
                    .await
                    .map_err(late)??;
                serde_json::from_slice(&body).map_err(|e| {
                    Error::new(ErrorKind::Protocol, format!("the status of {url}: {e}")).with_source(e)
                })
            },
        )
    }
}

/// The body of a page, over a connection of its own.
async fn get(url: &str, path: &str) -> Result<Vec<u8>> {
    let (host, port) = split_url(url)?;
    let unreachable =
        |e: std::io::Error| Error::new(ErrorKind::Unavailable, format!("{url}: {e}")).with_source(e);
    let mut stream = tokio::net::TcpStream::connect((host, port))
        .await
        .map_err(unreachable)?;
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
    if !answer.starts_with(b"HTTP/1.1 200") {
        return Err(bad());
    }
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n").ok_or_else(bad)?;
    Ok(answer.split_off(head + 4))
}
