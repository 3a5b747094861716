//! The lighthouse's gRPC services: each call becomes a message to the actor, if this lighthouse leads; guards tell it when a call or a stream
//! ends in any other way than by its answer.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{self, request::Parts};
use ftcore::{Epoch, Error};
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

use super::actor::{Lighthouse, Message, Pushes, gone};
use super::frontend::{Frontend, Standings};
use super::page;
use super::reply::{Caller, Reply};
use crate::serve::answer::{Answer, Answers, Asked, asked, message};
use crate::serve::members::{by_the_operator, in_the_name_of, speaks_for};
use crate::serve::{Line, Report};
use crate::wire::{
    MAX_MESSAGE_BYTES, answer_by, bounded, elsewhere, epoch_of, grpc_timeout, order_of, oxccl, status_of,
    torchft,
};
use protocol::quorum::{Event, Ticket, cut};
use protocol::{MAX_ID_BYTES, Member};

const QUORUM: &str = "/torchft.LighthouseService/Quorum";
const HEARTBEAT: &str = "/torchft.LighthouseService/Heartbeat";
/// The longest address or lineage, in bytes.
const MAX_TEXT: usize = 4096;
/// The longest `data` of a member, in bytes: quorums repeat it for every member.
const MAX_DATA: usize = 16 * 1024;

/// Withdraws the call when its handler goes away without an answer, for whatever reason.
struct OpenCall {
    lighthouse: Lighthouse,
    ticket: Ticket,
    is_answered: bool,
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        if !self.is_answered {
            self.lighthouse.send(Message::Event {
                event: Event::Withdraw { ticket: self.ticket },
                done: None,
            });
        }
    }
}

fn check(member: &Member) -> Result<(), Status> {
    bounded("replica_id", &member.replica_id, MAX_ID_BYTES)?;
    bounded("address", &member.address, MAX_TEXT)?;
    bounded("store_address", &member.store_address, MAX_TEXT)?;
    bounded("lineage", &member.lineage, MAX_TEXT)?;
    bounded("incarnation", &member.incarnation, MAX_ID_BYTES)?;
    bounded("data", &member.data, MAX_DATA)
}

/// Lets requests pass that come in the name of the replica `id`. Errors: `InvalidArgument` for one that is too long to be kept; `PermissionDenied`.
fn named_by<T>(request: &Request<T>, id: &str) -> Result<(), Status> {
    bounded("replica_id", id, MAX_ID_BYTES)?;
    in_the_name_of(request.extensions(), id)
}

/// Lets the operator's requests pass: with credentials, those that come with the operator's certificate. Errors: `PermissionDenied` that names the
/// caller.
pub(crate) fn operator_only<T>(request: &Request<T>) -> Result<(), Status> {
    by_the_operator(request.extensions())
}

impl Lighthouse {
    /// Remembers over which connection a replica calls.
    fn note_caller(&self, line: &Arc<Line>, replica_id: &str) {
        if !line.is_new(self.task(), replica_id) {
            return;
        }
        let (lighthouse, number) = (self.clone(), line.number());
        self.send(Message::Calling {
            line: number,
            connection: Arc::downgrade(line),
            replica_id: replica_id.to_string(),
        });
        line.tell(move |report| {
            lighthouse.send(match report {
                Report::Read => Message::Read { line: number },
                Report::Ended { by_peer } => Message::Ended {
                    line: number,
                    by_peer,
                },
            });
        });
    }

    /// Takes in a heartbeat. The answer says that it has come, which is when it counts.
    fn beat(&self, line: &Arc<Line>, replica_id: String) -> Result<(), Status> {
        bounded("replica_id", &replica_id, MAX_ID_BYTES)?;
        speaks_for(line.peer(), &replica_id)?;
        self.note_caller(line, &replica_id);
        self.send(Message::Event {
            event: Event::Heartbeat { replica_id },
            done: None,
        });
        Ok(())
    }

    /// Asks for a quorum and waits for it, until the caller goes away or its time is over.
    async fn ask(
        &self,
        timeout: Option<Duration>,
        line: &Arc<Line>,
        message: torchft::LighthouseQuorumRequest,
    ) -> Result<Reply, Status> {
        let caller = Caller::of(&message);
        let unanswered = message.unanswered;
        let member = Member::from(
            message
                .requester
                .ok_or_else(|| Status::invalid_argument("the requester is missing"))?,
        );
        check(&member)?;
        speaks_for(line.peer(), &member.replica_id)?;
        let id = member.replica_id.clone();
        self.note_caller(line, &id);
        let (reply, answer) = oneshot::channel();
        let ticket = self.number();
        let mut open = OpenCall {
            lighthouse: self.clone(),
            ticket,
            is_answered: false,
        };
        self.send(Message::Join {
            member: Box::new(member),
            caller,
            unanswered,
            ticket,
            reply,
        });
        let answer = match timeout {
            None => answer.await,
            Some(timeout) => match tokio::time::timeout_at(answer_by(timeout).into(), answer).await {
                Ok(answer) => answer,
                Err(_) => {
                    let text = format!(
                        "no quorum for {id} within {:.1} s: {}",
                        timeout.as_secs_f64(),
                        self.reason().await
                    );
                    return Err(status_of(&Error::timeout(text)));
                }
            },
        };
        open.is_answered = answer.is_ok();
        match answer {
            Ok(answer) => answer.map_err(|e| status_of(&e)),
            Err(_) => Err(elsewhere(&gone())),
        }
    }
}

/// The lighthouse's port: the two calls that each replica makes in every step, before all others.
pub(crate) struct Pages {
    frontend: Frontend,
    others: Arc<Router>,
}

impl Pages {
    pub(crate) fn new(frontend: Frontend) -> Self {
        Self {
            others: Arc::new(page::routes(frontend.clone())),
            frontend,
        }
    }

    /// The call `Quorum` from its first byte to its answer, which is sent as it was encoded for all members.
    async fn quorum(&self, head: &Parts, body: Asked, line: &Arc<Line>) -> Result<Reply, Status> {
        let message = asked(body, MAX_MESSAGE_BYTES).await?;
        let timeout = grpc_timeout(&head.headers)?;
        self.frontend.answering()?.ask(timeout, line, message).await
    }

    async fn heartbeat(&self, body: Asked, line: &Arc<Line>) -> Result<(), Status> {
        let message: torchft::LighthouseHeartbeatRequest = asked(body, MAX_MESSAGE_BYTES).await?;
        self.frontend.answering()?.beat(line, message.replica_id)
    }
}

/// A message without content, with its head.
const EMPTY: Bytes = Bytes::from_static(&[0; 5]);

impl Answers for Pages {
    async fn answer(
        self: Arc<Self>,
        request: http::Request<Asked>,
        line: Arc<Line>,
    ) -> http::Response<Answer> {
        let is_call = request.method() == http::Method::POST;
        match request.uri().path() {
            QUORUM if is_call => {
                let (head, body) = request.into_parts();
                let reply = self.quorum(&head, body, &line).await;
                reply.map_or_else(|status| status.into_http(), |reply| message(reply.framed()))
            }
            HEARTBEAT if is_call => {
                let taken = self.heartbeat(request.into_body(), &line).await;
                taken.map_or_else(|status| status.into_http(), |()| message(EMPTY))
            }
            _ => Arc::clone(&self.others).answer(request, line).await,
        }
    }
}

/// A replica's event stream. Its end, however it comes, is told to the actor.
pub(crate) struct Attached {
    events: WatchStream<Pushes>,
    /// What was told so far, and what is to be told next.
    told: Pushes,
    next: VecDeque<oxccl::lighthouse_event::Event>,
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
            if let Some(event) = self.next.pop_front() {
                return Poll::Ready(Some(Ok(oxccl::LighthouseEvent { event: Some(event) })));
            }
            match Pin::new(&mut self.events).poll_next(context) {
                Poll::Ready(Some(now)) => {
                    let before = std::mem::replace(&mut self.told, now.clone());
                    let abort = now.abort.filter(|a| before.abort.as_ref() != Some(a));
                    let order = now.order.filter(|o| before.order.as_ref() != Some(o));
                    let abort = abort.map(|a| oxccl::lighthouse_event::Event::AbortEpoch(a.into()));
                    let order = order.map(|o| oxccl::lighthouse_event::Event::Order(o.into()));
                    self.next.extend(abort.into_iter().chain(order));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

#[tonic::async_trait]
impl oxccl::oxccl_lighthouse_server::OxcclLighthouse for Frontend {
    type AttachStream = Attached;
    type FollowStream = Standings;

    async fn attach(
        &self,
        request: Request<oxccl::AttachRequest>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        named_by(&request, &request.get_ref().replica_id)?;
        let oxccl::AttachRequest {
            replica_id,
            last_quorum_id,
            ..
        } = request.into_inner();
        let lighthouse = self.answering()?;
        let stream = lighthouse.number();
        let (reply, answer) = oneshot::channel();
        // Made first: if this handler is dropped, the actor must learn it after it learnt of the stream.
        let (_, none) = tokio::sync::watch::channel(Pushes::default());
        let mut attached = Attached {
            events: WatchStream::from_changes(none),
            told: Pushes::default(),
            next: VecDeque::new(),
            lighthouse: lighthouse.clone(),
            replica_id: replica_id.clone(),
            stream,
        };
        lighthouse.send(Message::Attach {
            replica_id,
            stream,
            last_quorum_id: Epoch::of_signed(last_quorum_id),
            reply,
        });
        let events = match answer.await {
            Ok(events) => events.map_err(|e| status_of(&e))?,
            Err(_) => return Err(elsewhere(&gone())),
        };
        attached.events = WatchStream::new(events);
        Ok(Response::new(attached))
    }

    async fn leave(
        &self,
        request: Request<oxccl::LeaveRequest>,
    ) -> Result<Response<oxccl::LeaveResponse>, Status> {
        named_by(&request, &request.get_ref().replica_id)?;
        let oxccl::LeaveRequest {
            replica_id,
            reason,
            failed,
        } = request.into_inner();
        tracing::info!(
            replica_id = cut(&replica_id),
            reason = cut(&reason),
            failed,
            "leaves"
        );
        let event = if failed {
            Event::Failed { replica_id, reason }
        } else {
            Event::Leave { replica_id, reason }
        };
        let told = self.answering()?.tell(event).await;
        told.map_err(|e| elsewhere(&e))?;
        Ok(Response::new(oxccl::LeaveResponse {}))
    }

    async fn report(
        &self,
        request: Request<oxccl::ReportRequest>,
    ) -> Result<Response<oxccl::ReportResponse>, Status> {
        named_by(&request, &request.get_ref().replica_id)?;
        let oxccl::ReportRequest {
            replica_id,
            quorum_id,
            reason,
            suspects,
        } = request.into_inner();
        let named: Vec<&str> = suspects.iter().take(16).map(|s| cut(s)).collect();
        // The first of an epoch is in the line that says that the epoch is aborted; the others change nothing.
        tracing::debug!(replica_id = cut(&replica_id), quorum_id, reason = cut(&reason), suspects = ?named, "report");
        let event = Event::Report {
            replica_id,
            quorum_id: epoch_of(quorum_id),
            reason,
        };
        let told = self.answering()?.tell(event).await;
        told.map_err(|e| elsewhere(&e))?;
        Ok(Response::new(oxccl::ReportResponse {}))
    }

    async fn follow(&self, _: Request<oxccl::FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        Ok(Response::new(Frontend::follow(self)))
    }

    async fn operate(
        &self,
        request: Request<oxccl::OperateRequest>,
    ) -> Result<Response<oxccl::OperateResponse>, Status> {
        operator_only(&request)?;
        let oxccl::OperateRequest { replica, order } = request.into_inner();
        bounded("replica", &replica, MAX_ID_BYTES)?;
        let order = order.and_then(order_of).ok_or_else(|| {
            Status::unimplemented(
                "this lighthouse knows no such order: it can drain, evict and kill a replica",
            )
        })?;
        tracing::info!(replica, order = ?order.kind, reason = cut(&order.reason), "an operator's order");
        let (reply, answer) = oneshot::channel();
        let lighthouse = self.answering()?;
        let ticket = lighthouse.number();
        lighthouse.send(Message::Operate {
            replica,
            order,
            ticket,
            reply,
        });
        let replica_ids = answer
            .await
            .unwrap_or_else(|_| Err(gone()))
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(oxccl::OperateResponse { replica_ids }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::Journal;
    use super::super::{LighthouseConfig, simulated};
    use super::oxccl::oxccl_lighthouse_server::OxcclLighthouse as _;
    use super::*;

    /// What waits for the task: who calls, and what the others are.
    fn waiting(inbox: &mut Inbox) -> Vec<String> {
        let told = |message: Message| match message {
            Message::Calling { replica_id, .. } => format!("{replica_id} calls"),
            Message::Event { event, .. } => format!("{event:?}"),
            _ => "another".into(),
        };
        std::iter::from_fn(|| inbox.try_recv().ok())
            .map(|(_, message)| told(message))
            .collect()
    }

    type Inbox = tokio::sync::mpsc::UnboundedReceiver<(std::time::Instant, Message)>;

    #[test]
    fn a_lighthouse_that_leads_again_learns_who_calls_over_connections_that_were_there_before() {
        let line = Arc::new(Line::new(None));
        let (first, mut of_first) = Lighthouse::new();
        let (second, mut of_second) = Lighthouse::new();
        let beat = r#"Heartbeat { replica_id: "a" }"#;
        for (lighthouse, inbox) in [(&first, &mut of_first), (&second, &mut of_second)] {
            lighthouse.beat(&line, "a".into()).unwrap();
            assert_eq!(waiting(inbox), ["a calls", beat]);
            lighthouse.beat(&line, "a".into()).unwrap();
            assert_eq!(waiting(inbox), [beat]);
        }
    }

    #[test]
    fn an_id_that_is_too_long_to_be_kept_is_refused_by_every_call_that_has_one() {
        let runtime = crate::serve::runtime("ox-test", 1).unwrap();
        let _guard = runtime.enter();
        let (pages, _open) = simulated(&LighthouseConfig::default(), None, Journal::Nowhere);
        let asked = |length: usize| {
            let (frontend, replica_id) = (pages.frontend.clone(), "x".repeat(length));
            runtime.block_on(async move {
                let attach = oxccl::AttachRequest {
                    replica_id: replica_id.clone(),
                    ..oxccl::AttachRequest::default()
                };
                let report = oxccl::ReportRequest {
                    replica_id: replica_id.clone(),
                    ..oxccl::ReportRequest::default()
                };
                let leave = oxccl::LeaveRequest {
                    replica_id,
                    ..oxccl::LeaveRequest::default()
                };
                let attached = frontend.attach(Request::new(attach)).await.map(drop);
                let reported = frontend.report(Request::new(report)).await.map(drop);
                let left = frontend.leave(Request::new(leave)).await.map(drop);
                [attached, reported, left].map(|answer| answer.map_err(|status| status.code()))
            })
        };
        assert_eq!(asked(MAX_ID_BYTES), [Ok(()); 3]);
        assert_eq!(asked(MAX_ID_BYTES + 1), [Err(tonic::Code::InvalidArgument); 3]);
        let recent = runtime.block_on(async { pages.frontend.leading().unwrap().status().await });
        let recent = recent.unwrap().0.recent;
        assert!(
            recent.iter().all(|d| d.replica_id.len() == MAX_ID_BYTES),
            "{recent:?}"
        );
    }
}
