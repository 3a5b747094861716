//! The manager server's gRPC services: each call becomes a message to the actor, and a guard tells it when the caller
//! goes away.

use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use ftcore::{Error, Step};
use identity::name_of;
use tokio::sync::oneshot;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::actor::{Manager, Message, gone};
use super::counts::count;
use super::presence::Watched;
use crate::channel::background_deadline;
use crate::clock::deadline_in;
use crate::exposition;
use crate::lighthouse::operator_only;
use crate::serve::members::{caller, in_the_name_of};
use crate::serve::unknown;
use crate::wire::{
    MAX_MESSAGE_BYTES, answer_by, bounded, epoch_of, grpc_timeout, joining, oxccl, rank, status_of, torchft,
};
use protocol::commit::VoteKey;
use protocol::gather::RankRequest;
use protocol::quorum::{Ticket, cut};
use protocol::replica::ReplicaEvent;

/// The longest checkpoint address of a rank, in bytes.
const MAX_METADATA: usize = 64 * 1024;
/// For how long a rank's watch stream may be gone before the rank counts as gone. A client that reconnects takes a second at most.
pub(crate) const GRACE: Duration = Duration::from_secs(3);
/// The longest lineage, in bytes.
const MAX_TEXT: usize = 4096;

/// Both services in one router.
pub(crate) fn routes(manager: Manager) -> Router {
    let torchft = torchft::manager_service_server::ManagerServiceServer::new(manager.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let ours = oxccl::oxccl_manager_server::OxcclManagerServer::new(manager.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    Routes::new(torchft)
        .add_service(ours)
        .into_axum_router()
        .route("/metrics", get(move || metrics(manager.clone())))
        .fallback(unknown)
}

/// What this server and the ranks of its replica have counted.
async fn metrics(manager: Manager) -> impl IntoResponse {
    let replica = name_of(manager.uplink.replica_id());
    (
        [(header::CONTENT_TYPE, exposition::CONTENT_TYPE)],
        manager.counts.text(replica, manager.world_size),
    )
}

/// Lets the ranks of this replica pass. Errors: `PermissionDenied` that names replica and caller.
fn own_ranks_only<T>(manager: &Manager, request: &Request<T>) -> Result<(), Status> {
    in_the_name_of(request.extensions(), manager.uplink.replica_id())
}

/// Withdraws the call when its handler goes away, for whatever reason.
struct OpenCall<'a> {
    manager: &'a Manager,
    ticket: Ticket,
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        self.manager.tell(ReplicaEvent::Withdraw { ticket: self.ticket });
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
        own_ranks_only(self, &request)?;
        let timeout = grpc_timeout(request.metadata().as_ref())?.ok_or_else(|| {
            Status::invalid_argument("missing timeout: a quorum call needs the grpc-timeout header")
        })?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        bounded("checkpoint_metadata", &r.checkpoint_metadata, MAX_METADATA)?;
        bounded("lineage", &r.lineage, MAX_TEXT)?;
        tracing::debug!(rank, step = r.step, question = r.question, "quorum call");
        count(&self.counts.quorum_calls);
        let (reply, answer) = oneshot::channel();
        let (ticket, deadline) = (self.ticket(), answer_by(timeout));
        let _open = OpenCall {
            manager: self,
            ticket,
        };
        let event = ReplicaEvent::Ask {
            rank,
            request: RankRequest {
                step: Step(r.step),
                shrink_only: r.shrink_only,
                init_sync: r.init_sync,
                commit_failures: r.commit_failures,
                lineage: r.lineage,
                last_quorum_id: epoch_of(r.last_quorum_id),
                healed: r.healed,
                question: r.question,
                batches_committed: r.batches_committed,
                joining: joining(r.joining),
                is_last: r.is_last,
                own_part: r.own_part,
                unanswered: false,
            },
            metadata: r.checkpoint_metadata,
            deadline,
            ticket,
        };
        self.send(Message::Quorum { event, ticket, reply });
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
        own_ranks_only(self, &request)?;
        let timeout = grpc_timeout(request.metadata().as_ref())?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        count(&self.counts.votes);
        if let Some(counts) = r.counts {
            self.counts.tell(rank, self.world_size, counts.into());
        }
        let key = VoteKey {
            quorum_id: epoch_of(r.quorum_id),
            step: Step(r.step),
            attempt: r.attempt,
        };
        let (reply, answer) = oneshot::channel();
        let ticket = self.ticket();
        let _open = OpenCall {
            manager: self,
            ticket,
        };
        let event = if r.gives_up.is_empty() {
            let vote = r.should_commit;
            ReplicaEvent::Vote {
                rank,
                key,
                vote,
                ticket,
            }
        } else {
            let why = cut(&r.gives_up).to_string();
            ReplicaEvent::GiveUp { rank, why, ticket }
        };
        self.send(Message::Vote { event, ticket, reply });
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
        request: Request<torchft::KillRequest>,
    ) -> Result<Response<torchft::KillResponse>, Status> {
        if caller(request.extensions()).is_none() {
            return Err(Status::permission_denied(
                "this server ends no process for callers that do not prove who they are",
            ));
        }
        operator_only(&request)?;
        let why = cut(&request.get_ref().msg).to_string();
        tracing::warn!(why, "the operator ends this replica");
        self.tell(ReplicaEvent::Killed { why });
        Ok(Response::new(torchft::KillResponse {}))
    }
}

#[tonic::async_trait]
impl oxccl::oxccl_manager_server::OxcclManager for Manager {
    type WatchStream = Watched;

    async fn watch(
        &self,
        request: Request<oxccl::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        own_ranks_only(self, &request)?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        let own = i64::from(std::process::id());
        let same = ftcore::process_space().is_some_and(|space| space == r.process_space);
        let here = r.process != own && same;
        let process = Some(r.process).filter(|_| here);
        Ok(Response::new(Watched::begin(self, rank, process, GRACE)))
    }

    async fn progress(
        &self,
        request: Request<oxccl::ManagerProgressRequest>,
    ) -> Result<Response<oxccl::ManagerProgressResponse>, Status> {
        own_ranks_only(self, &request)?;
        let rank = rank("group_rank", request.into_inner().group_rank)?;
        self.tell(ReplicaEvent::Progress { rank });
        Ok(Response::new(oxccl::ManagerProgressResponse {}))
    }

    async fn leave(
        &self,
        request: Request<oxccl::ManagerLeaveRequest>,
    ) -> Result<Response<oxccl::LeaveResponse>, Status> {
        own_ranks_only(self, &request)?;
        let rank = rank("group_rank", request.into_inner().group_rank)?;
        self.tell(ReplicaEvent::Left { rank });
        Ok(Response::new(oxccl::LeaveResponse {}))
    }

    async fn report(
        &self,
        request: Request<oxccl::ManagerReportRequest>,
    ) -> Result<Response<oxccl::ReportResponse>, Status> {
        own_ranks_only(self, &request)?;
        let timeout = grpc_timeout(request.metadata().as_ref())?;
        let r = request.into_inner();
        let rank = rank("group_rank", r.group_rank)?;
        let reason = format!("rank {rank}: {}", cut(&r.reason));
        count(&self.counts.reports);
        self.tell(ReplicaEvent::Reported {
            rank,
            quorum_id: epoch_of(r.quorum_id),
            reason: cut(&r.reason).to_string(),
        });
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
            .report(epoch_of(r.quorum_id), reason, suspects, deadline)
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(oxccl::ReportResponse {}))
    }
}

/// What a torchft client sends and what it does not: none of the fields from 100 on, none of our services.
#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::wire::torchft::manager_service_client::ManagerServiceClient;
    use crate::{LighthouseConfig, LighthouseServer, ManagerServer, ManagerServerConfig};

    fn servers() -> (LighthouseServer, ManagerServer) {
        let lighthouse = LighthouseServer::start(LighthouseConfig {
            bind: "127.0.0.1:0".into(),
            ..LighthouseConfig::default()
        });
        let lighthouse = lighthouse.unwrap();
        let manager = ManagerServer::start(ManagerServerConfig {
            replica_id: "a:1".into(),
            lighthouse: lighthouse.address(),
            store_address: "127.0.0.1:1".into(),
            ..ManagerServerConfig::default()
        });
        (lighthouse, manager.unwrap())
    }

    /// Runs `test` with a bare client of a manager server.
    fn with_client<F: Future<Output = ()>>(
        test: impl FnOnce(ManagerServiceClient<tonic::transport::Channel>) -> F,
    ) {
        let (_lighthouse, manager) = servers();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime
            .block_on(async { test(ManagerServiceClient::connect(manager.address()).await.unwrap()).await });
    }

    #[test]
    fn a_quorum_call_without_a_timeout_is_refused_and_with_one_it_is_answered() {
        with_client(|mut client| async move {
            let message = torchft::ManagerQuorumRequest {
                step: 3,
                init_sync: true,
                ..Default::default()
            };
            let status = client.quorum(Request::new(message.clone())).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains("missing timeout"), "{status}");
            let mut first = 0;
            for _ in 0..3 {
                let mut request = Request::new(message.clone());
                request.set_timeout(Duration::from_secs(30));
                let answer = client.quorum(request).await.unwrap().into_inner();
                assert_eq!(
                    (answer.replica_world_size, answer.max_step, answer.heal),
                    (1, 3, false)
                );
                assert!(
                    first == 0 || first == answer.quorum_id,
                    "it tells no last quorum, and keeps its group"
                );
                first = answer.quorum_id;
            }
        });
    }

    #[test]
    fn votes_without_epoch_and_attempt_are_counted_here() {
        with_client(|mut client| async move {
            for vote in [true, false, true, true] {
                let message = torchft::ShouldCommitRequest {
                    should_commit: vote,
                    step: 1,
                    ..Default::default()
                };
                assert_eq!(
                    client
                        .should_commit(message)
                        .await
                        .unwrap()
                        .into_inner()
                        .should_commit,
                    vote
                );
            }
        });
    }

    #[test]
    fn l38_nobody_is_killed_over_the_network() {
        with_client(|mut client| async move {
            let status = client
                .kill(torchft::KillRequest { msg: "die".into() })
                .await
                .unwrap_err();
            assert_eq!(status.code(), Code::PermissionDenied);
            let status = client
                .checkpoint_metadata(torchft::CheckpointMetadataRequest { rank: 0 })
                .await
                .unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "it still answers");
            assert!(status.message().contains("rank not found"), "{status}");
            let bad = torchft::CheckpointMetadataRequest { rank: -1 };
            assert_eq!(
                client.checkpoint_metadata(bad).await.unwrap_err().code(),
                Code::InvalidArgument
            );
        });
    }
}
