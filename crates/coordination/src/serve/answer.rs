//! What answers the requests of a port, and what an answer is made of. gRPC calls that come by the thousand take a short way here: no router, and
//! nothing on the heap that they do not need.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, HeaderValue, Request, Response, header};
use axum::{BoxError, Router};
use hyper::body::{Frame, SizeHint};
use prost::Message;
use tonic::Status;
use tonic::codegen::Service as _;

use super::activity::Incoming;
use super::line::Line;

/// A request's body, bounded in time and memory.
pub(crate) type Asked = Incoming<hyper::body::Incoming>;

/// Whether the message behind it is compressed, and its length in bytes.
const HEAD: usize = 5;

/// Answers the requests of a port.
pub(crate) trait Answers: Send + Sync + 'static {
    /// Answers one that came over `line`.
    fn answer(
        self: Arc<Self>,
        request: Request<Asked>,
        line: Arc<Line>,
    ) -> impl Future<Output = Response<Answer>> + Send;
}

/// Its handlers find the [`Line`] among the request's extensions.
impl Answers for Router {
    async fn answer(self: Arc<Self>, mut request: Request<Asked>, line: Arc<Line>) -> Response<Answer> {
        request.extensions_mut().insert(line);
        let answered: Result<_, Infallible> = Router::clone(&self).call(request.map(Body::new)).await;
        match answered {
            Ok(answer) => answer.map(Answer::Page),
            Err(never) => match never {},
        }
    }
}

/// An answer's body.
pub(crate) enum Answer {
    /// gRPC's: a message with its head, and the trailers.
    Message(Option<Bytes>, Option<HeaderMap>),
    /// Any other.
    Page(Body),
}

impl Default for Answer {
    fn default() -> Self {
        Self::Message(None, None)
    }
}

/// The answer that is this message, which has its head.
pub(crate) fn message(framed: Bytes) -> Response<Answer> {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let mut response = Response::new(Answer::Message(Some(framed), Some(trailers)));
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// The one message of a call. Errors: it is damaged, longer than `limit` or missing, as tonic's services say it.
pub(crate) async fn asked<M, B>(mut body: Incoming<B>, limit: usize) -> Result<M, Status>
where
    M: Message + Default,
    B: HttpBody<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    // As a rule the first part is the whole.
    let (mut first, mut parts) = (Bytes::new(), Vec::new());
    loop {
        let read: &[u8] = if parts.is_empty() { &first } else { &parts };
        if let Some((head, message)) = read.split_first_chunk::<HEAD>() {
            let [compressed, length @ ..] = *head;
            let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
            if compressed != 0 {
                return Err(Status::unimplemented("this server takes no compressed messages"));
            }
            if length > limit {
                return Err(Status::out_of_range(format!(
                    "a message of {length} bytes, and the limit is {limit}"
                )));
            }
            if let Some(message) = message.get(..length) {
                return M::decode(message).map_err(|e| Status::internal(e.to_string()));
            }
        }
        let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        let Some(frame) = frame else {
            return Err(Status::invalid_argument("the request is missing"));
        };
        let frame = frame.map_err(|e| Status::cancelled(e.to_string()))?;
        match frame.into_data() {
            Ok(data) if first.is_empty() => first = data,
            Ok(data) => {
                if parts.is_empty() {
                    parts.extend_from_slice(&first);
                }
                parts.extend_from_slice(&data);
            }
            Err(_) => {}
        }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut *self {
            Self::Page(body) => Pin::new(body).poll_frame(context),
            Self::Message(message, trailers) => Poll::Ready(
                message
                    .take()
                    .map(Frame::data)
                    .or_else(|| trailers.take().map(Frame::trailers))
                    .map(Ok),
            ),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Page(body) => body.is_end_stream(),
            Self::Message(message, trailers) => message.is_none() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Page(body) => body.size_hint(),
            Self::Message(..) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::activity::Activity;
    use super::super::limits::{ConnectionLimits, Port};
    use super::*;
    use crate::wire::torchft::LighthouseHeartbeatRequest as Beat;

    /// Parts of a body, as they come.
    struct Parts(Vec<Bytes>);

    impl HttpBody for Parts {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let next = (!self.0.is_empty()).then(|| self.0.remove(0));
            Poll::Ready(next.map(|part| Ok(Frame::data(part))))
        }
    }

    fn taken(bytes: &[u8], step: usize) -> Result<Beat, tonic::Code> {
        let parts = bytes.chunks(step).map(Bytes::copy_from_slice).collect();
        let port = Port::new(ConnectionLimits::manager());
        let open = Activity::new(port, "127.0.0.1:1".parse().unwrap()).begin();
        let mut taking = std::pin::pin!(asked(open.bounded(Parts(parts)), 20));
        match taking
            .as_mut()
            .poll(&mut Context::from_waker(std::task::Waker::noop()))
        {
            Poll::Ready(taken) => taken.map_err(|status| status.code()),
            Poll::Pending => panic!("it waits"),
        }
    }

    #[test]
    fn a_call_is_read_however_its_bytes_are_cut_and_a_damaged_one_is_refused() {
        let beat = Beat {
            replica_id: "replica:1".into(),
        };
        let encoded = beat.encode_to_vec();
        let framed = |compressed: u8, length: u32, message: &[u8]| {
            [&[compressed][..], &length.to_be_bytes(), message].concat()
        };
        let good = framed(0, encoded.len() as u32, &encoded);
        for step in 1..=good.len() {
            assert_eq!(taken(&good, step), Ok(beat.clone()), "{step} bytes at a time");
        }
        use tonic::Code::{Internal, InvalidArgument, OutOfRange, Unimplemented};
        for (bytes, code) in [
            (good[..good.len() - 1].to_vec(), InvalidArgument),
            (framed(1, encoded.len() as u32, &encoded), Unimplemented),
            (framed(0, 21, &[0; 21]), OutOfRange),
            (framed(0, u32::MAX, &encoded), OutOfRange),
            (framed(0, 3, &[0xff; 3]), Internal),
        ] {
            assert_eq!(taken(&bytes, 4), Err(code), "{bytes:?}");
        }
    }
}
