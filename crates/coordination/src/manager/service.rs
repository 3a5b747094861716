//! The manager server's gRPC services: each call becomes a message to the actor, and a guard tells it when the caller
//! goes away.

use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use ftcore::{Error, deadline_in};
use tokio::sync::oneshot;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::actor::{Manager, Message, gone};
use crate::channel::background_deadline;
use crate::commit::VoteKey;
use crate::gather::RankRequest;
use crate::member::AbortEpoch;
use crate::quorum::{Ticket, cut};
use crate::serve::unknown;
use crate::wire::{MAX_MESSAGE_BYTES, answer_by, bounded, grpc_timeout, oxccl, rank, status_of, torchft};

/// The longest checkpoint address of a rank, in bytes.
const MAX_METADATA: usize = 64 * 1024;
/// The longest lineage, in bytes.
const MAX_TEXT: usize = 4096;

/// Both services in one router.
pub(crate) fn routes(manager: Manager) -> Router {
    let torchft = torchft::manager_service_server::ManagerServiceServer::new(manager.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let ours = oxccl::oxccl_manager_server::OxcclManagerServer::new(manager)
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    Routes::new(torchft)
        .add_service(ours)
        .into_axum_router()
        .fallback(unknown)
}

/// Withdraws the call when its handler goes away, for whatever reason.
struct OpenCall<'a> {
    manager: &'a Manager,
    ticket: Ticket,
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        self.manager.send(Message::Withdraw { ticket: self.ticket });
    }
}

fn list(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(16).map(ToString::to_string).collect();
    shown.join(", ") + if ranks.len() > 16 { ", …" } else { "" }
}

#[tonic::async_trait]
impl torchft::manager_service_server::ManagerService for Manager {
    async fn quorum(
        &self,
        request: Request<torchft::ManagerQuorumRequest>,
    ) -> Result<Response<torchft::ManagerQuorumResponse>, Status> {
        let timeout = grpc_timeout(request.metadata())?.ok_or_else(|| {
            Status::invalid_argument("missing timeout: a quorum call needs the grpc-timeout header")
        })?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        bounded("checkpoint_metadata", &r.checkpoint_metadata, MAX_METADATA)?;
        bounded("lineage", &r.lineage, MAX_TEXT)?;
        tracing::debug!(rank, step = r.step, attempt = r.attempt, "quorum call");
        let (reply, answer) = oneshot::channel();
        let (ticket, deadline) = (self.ticket(), answer_by(timeout));
        let _open = OpenCall {
            manager: self,
            ticket,
        };
        self.send(Message::Quorum {
            rank,
            request: RankRequest {
                step: r.step,
                shrink_only: r.shrink_only,
                init_sync: r.init_sync,
                commit_failures: r.commit_failures,
                lineage: r.lineage,
                last_quorum_id: r.last_quorum_id,
            },
            metadata: r.checkpoint_metadata,
            deadline,
            ticket,
            reply,
        });
        let Ok(answer) = tokio::time::timeout_at(deadline.into(), answer).await else {
            let (missing, _) = self.missing().await;
            let why = if missing.is_empty() {
                "all ranks ask; the lighthouse has not answered".to_string()
            } else {
                format!("rank {} of this replica did not ask", list(&missing))
            };
            let text = format!(
                "no quorum for rank {rank} within {:.1} s: {why}",
                timeout.as_secs_f64()
            );
            return Err(status_of(&Error::timeout(text)));
        };
        answer
            .unwrap_or_else(|_| Err(gone()))
            .map(|r| Response::new(r.into()))
            .map_err(|e| status_of(&e))
    }

    async fn checkpoint_metadata(
        &self,
        request: Request<torchft::CheckpointMetadataRequest>,
    ) -> Result<Response<torchft::CheckpointMetadataResponse>, Status> {
        let rank = rank("rank", request.into_inner().rank)?;
        let (reply, answer) = oneshot::channel();
        self.send(Message::Metadata { rank, reply });
        match answer.await.map_err(|_| status_of(&gone()))? {
            Some(checkpoint_metadata) => Ok(Response::new(torchft::CheckpointMetadataResponse {
                checkpoint_metadata,
            })),
            None => Err(Status::invalid_argument(format!(
                "rank not found: rank {rank} has not asked for a quorum"
            ))),
        }
    }

    async fn should_commit(
        &self,
        request: Request<torchft::ShouldCommitRequest>,
    ) -> Result<Response<torchft::ShouldCommitResponse>, Status> {
        let timeout = grpc_timeout(request.metadata())?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        let key = VoteKey {
            quorum_id: r.quorum_id,
            step: r.step,
            attempt: r.attempt,
        };
        let (reply, answer) = oneshot::channel();
        let ticket = self.ticket();
        let _open = OpenCall {
            manager: self,
            ticket,
        };
        self.send(Message::Vote {
            rank,
            key,
            vote: r.should_commit,
            ticket,
            reply,
        });
        // Without a time-out the call lasts as long as its caller.
        let deadline = answer_by(timeout.unwrap_or(Duration::MAX));
        let Ok(answer) = tokio::time::timeout_at(deadline.into(), answer).await else {
            let (_, missing) = self.missing().await;
            let text = format!(
                "no decision on {key} for rank {rank}: rank {} did not vote",
                list(&missing)
            );
            return Err(status_of(&Error::timeout(text)));
        };
        answer
            .unwrap_or_else(|_| Err(gone()))
            .map(|should_commit| Response::new(torchft::ShouldCommitResponse { should_commit }))
            .map_err(|e| status_of(&e))
    }

    async fn kill(
        &self,
        _: Request<torchft::KillRequest>,
    ) -> Result<Response<torchft::KillResponse>, Status> {
        Err(Status::permission_denied(
            "this server ends no process over the network",
        ))
    }
}

fn event(abort: AbortEpoch) -> oxccl::ManagerEvent {
    oxccl::ManagerEvent {
        event: Some(oxccl::manager_event::Event::AbortEpoch(abort.into())),
    }
}

#[tonic::async_trait]
impl oxccl::oxccl_manager_server::OxcclManager for Manager {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<oxccl::ManagerEvent, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<oxccl::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        rank("group_rank", request.into_inner().group_rank)?;
        // Begins with the last abort, so that none is lost while a watcher reconnects.
        let events = WatchStream::new(self.aborts()).filter_map(|abort| abort.map(|a| Ok(event(a))));
        Ok(Response::new(Box::pin(events)))
    }

    async fn report(
        &self,
        request: Request<oxccl::ManagerReportRequest>,
    ) -> Result<Response<oxccl::ReportResponse>, Status> {
        let timeout = grpc_timeout(request.metadata())?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        let reason = format!("rank {rank}: {}", cut(&r.reason));
        // The other ranks of this replica need not wait for the way over the lighthouse.
        if r.quorum_id == self.uplink.last_quorum() {
            let reason = format!("{} reported: {reason}", self.uplink.replica_id());
            self.send(Message::Aborted(AbortEpoch {
                quorum_id: r.quorum_id,
                reason,
                departed: Vec::new(),
            }));
        }
        let deadline = timeout
            .map_or_else(background_deadline, answer_by)
            .min(deadline_in(Duration::from_secs(30)));
        let suspects = r
            .suspects
            .into_iter()
            .take(16)
            .map(|s| cut(&s).to_string())
            .collect();
        self.uplink
            .report(r.quorum_id, reason, suspects, deadline)
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(oxccl::ReportResponse {}))
    }
}
