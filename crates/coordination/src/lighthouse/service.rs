//! The lighthouse's gRPC services: each call becomes a message to the actor; guards tell it when a call or a stream ends
//! in any other way than by its answer.

use std::pin::Pin;
use std::task::{Context, Poll};

use ftcore::Error;
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

use super::actor::{Lighthouse, Message, gone};
use crate::wire::{answer_by, bounded, grpc_timeout, oxccl, status_of, torchft};
use protocol::quorum::{Event, Ticket, cut};
use protocol::{AbortEpoch, MAX_ID_BYTES, Member};

/// The longest address or lineage, in bytes.
const MAX_TEXT: usize = 4096;
/// The longest `data` of a member, in bytes: quorums repeat it for every member.
const MAX_DATA: usize = 16 * 1024;

/// Withdraws the call when its handler goes away, for whatever reason.
struct OpenCall {
    lighthouse: Lighthouse,
    ticket: Ticket,
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.lighthouse.send(Message::Event {
            event: Event::Withdraw { ticket: self.ticket },
            done: None,
        });
    }
}

fn check(member: &Member) -> Result<(), Status> {
    bounded("replica_id", &member.replica_id, MAX_ID_BYTES)?;
    bounded("address", &member.address, MAX_TEXT)?;
    bounded("store_address", &member.store_address, MAX_TEXT)?;
    bounded("lineage", &member.lineage, MAX_TEXT)?;
    bounded("life", &member.life, MAX_ID_BYTES)?;
    bounded("data", &member.data, MAX_DATA)
}

#[tonic::async_trait]
impl torchft::lighthouse_service_server::LighthouseService for Lighthouse {
    async fn quorum(
        &self,
        request: Request<torchft::LighthouseQuorumRequest>,
    ) -> Result<Response<torchft::LighthouseQuorumResponse>, Status> {
        let timeout = grpc_timeout(request.metadata())?;
        let requester = request
            .into_inner()
            .requester
            .ok_or_else(|| Status::invalid_argument("the requester is missing"))?;
        let member = Member::from(requester);
        check(&member)?;
        let id = member.replica_id.clone();
        let (reply, answer) = oneshot::channel();
        let ticket = self.number();
        let _open = OpenCall {
            lighthouse: self.clone(),
            ticket,
        };
        self.send(Message::Join {
            member: Box::new(member),
            ticket,
            reply,
        });
        let answer = match timeout {
            None => answer.await,
            Some(timeout) => tokio::time::timeout_at(answer_by(timeout).into(), answer)
                .await
                .map_err(|_| {
                    let text = format!(
                        "no quorum for {id} within {:.1} s: {}",
                        timeout.as_secs_f64(),
                        self.reason()
                    );
                    status_of(&Error::timeout(text))
                })?,
        };
        let quorum = answer
            .unwrap_or_else(|_| Err(gone()))
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(torchft::LighthouseQuorumResponse {
            quorum: Some(quorum),
            unchanged: None,
            list: 0,
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<torchft::LighthouseHeartbeatRequest>,
    ) -> Result<Response<torchft::LighthouseHeartbeatResponse>, Status> {
        let replica_id = request.into_inner().replica_id;
        bounded("replica_id", &replica_id, MAX_ID_BYTES)?;
        self.tell(Event::Heartbeat { replica_id }).await;
        Ok(Response::new(torchft::LighthouseHeartbeatResponse {}))
    }
}

/// A replica's event stream. Its end, however it comes, is told to the actor.
pub(crate) struct Attached {
    events: WatchStream<Option<AbortEpoch>>,
    lighthouse: Lighthouse,
    replica_id: String,
    stream: u64,
}

impl Drop for Attached {
    fn drop(&mut self) {
        let event = Event::Detached {
            replica_id: std::mem::take(&mut self.replica_id),
            stream: self.stream,
        };
        self.lighthouse.send(Message::Event { event, done: None });
    }
}

impl Stream for Attached {
    type Item = Result<oxccl::LighthouseEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match Pin::new(&mut self.events).poll_next(context) {
                Poll::Ready(Some(Some(event))) => {
                    let event = oxccl::lighthouse_event::Event::AbortEpoch(event.into());
                    return Poll::Ready(Some(Ok(oxccl::LighthouseEvent { event: Some(event) })));
                }
                Poll::Ready(Some(None)) => {}
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

#[tonic::async_trait]
impl oxccl::oxccl_lighthouse_server::OxcclLighthouse for Lighthouse {
    type AttachStream = Attached;

    async fn attach(
        &self,
        request: Request<oxccl::AttachRequest>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let oxccl::AttachRequest {
            replica_id,
            last_quorum_id,
            ..
        } = request.into_inner();
        let stream = self.number();
        let (reply, answer) = oneshot::channel();
        // Made first: if this handler is dropped, the actor must learn it after it learnt of the stream.
        let (_, none) = tokio::sync::watch::channel(None);
        let mut attached = Attached {
            events: WatchStream::from_changes(none),
            lighthouse: self.clone(),
            replica_id: replica_id.clone(),
            stream,
        };
        self.send(Message::Attach {
            replica_id,
            stream,
            last_quorum_id,
            reply,
        });
        let events = answer
            .await
            .unwrap_or_else(|_| Err(gone()))
            .map_err(|e| status_of(&e))?;
        attached.events = WatchStream::new(events);
        Ok(Response::new(attached))
    }

    async fn leave(
        &self,
        request: Request<oxccl::LeaveRequest>,
    ) -> Result<Response<oxccl::LeaveResponse>, Status> {
        let oxccl::LeaveRequest { replica_id, reason } = request.into_inner();
        tracing::info!(replica_id = cut(&replica_id), reason = cut(&reason), "leaves");
        self.tell(Event::Leave { replica_id, reason }).await;
        Ok(Response::new(oxccl::LeaveResponse {}))
    }

    async fn report(
        &self,
        request: Request<oxccl::ReportRequest>,
    ) -> Result<Response<oxccl::ReportResponse>, Status> {
        let oxccl::ReportRequest {
            replica_id,
            quorum_id,
            reason,
            suspects,
        } = request.into_inner();
        let named: Vec<&str> = suspects.iter().take(16).map(|s| cut(s)).collect();
        tracing::info!(replica_id = cut(&replica_id), quorum_id, reason = cut(&reason), suspects = ?named, "report");
        self.tell(Event::Report {
            replica_id,
            quorum_id,
            reason,
        })
        .await;
        Ok(Response::new(oxccl::ReportResponse {}))
    }
}
