//! The requests of one HTTP/2 connection run on the connection's own task: no task, and no way through the scheduler, for each of them; and what
//! the connection has read is with the server's logic before the connection does anything else ([`Line`](super::Line) builds on that).

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper::rt::Executor;

type Request = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where hyper puts new requests.
#[derive(Clone, Default)]
pub(super) struct Begun(Arc<Mutex<Vec<Request>>>);

impl<F> Executor<F> for Begun
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, request: F) {
        let mut begun = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        begun.push(Box::pin(request));
    }
}

/// All open requests of a connection: few, so each wake-up looks at all of them.
#[derive(Default)]
pub(super) struct Requests {
    begun: Begun,
    open: Vec<Request>,
}

impl Requests {
    pub(super) fn begun(&self) -> Begun {
        self.begun.clone()
    }

    /// Runs the connection and its requests for as long as they go on. Pending: what the connection has read is with its requests, and they have
    /// done what they can.
    pub(super) fn poll<C: Future>(
        &mut self,
        mut connection: Pin<&mut C>,
        context: &mut Context<'_>,
    ) -> Poll<C::Output> {
        self.open
            .retain_mut(|request| request.as_mut().poll(context).is_pending());
        loop {
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
            let new = std::mem::take(&mut *self.begun.0.lock().unwrap_or_else(PoisonError::into_inner));
            if new.is_empty() {
                return Poll::Pending;
            }
            for mut request in new {
                if request.as_mut().poll(context).is_pending() {
                    self.open.push(request);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::mpsc;
    use std::time::Duration;

    use axum::http::{Request, Response};

    use super::super::answer::{Answer, Answers, Asked};
    use super::super::{Closure, ConnectionLimits, Line, Report, Served, Service, listen, runtime};

    const TIME_LIMIT: Duration = Duration::from_secs(30);

    /// What happened, in its order.
    #[derive(Debug, PartialEq)]
    enum Seen {
        Request(String),
        Report(Report),
    }

    struct Recorder {
        seen: mpsc::Sender<Seen>,
        line: mpsc::Sender<std::sync::Arc<Line>>,
    }

    impl Answers for Recorder {
        async fn answer(
            self: std::sync::Arc<Self>,
            request: Request<Asked>,
            line: std::sync::Arc<Line>,
        ) -> Response<Answer> {
            let _ = self.seen.send(Seen::Request(request.uri().path().to_owned()));
            let seen = self.seen.clone();
            line.tell(move |report| drop(seen.send(Seen::Report(report))));
            let _ = self.line.send(line);
            Response::new(Answer::default())
        }
    }

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, stream][..], payload].concat()
    }

    /// A request for `path` as the only frame of its stream.
    fn request(stream: u8, path: &str) -> Vec<u8> {
        let length = u8::try_from(path.len()).unwrap();
        // POST, http, the path, the authority `x`.
        let block = [&[0x83, 0x86, 0x04, length][..], path.as_bytes(), &[0x01, 1, b'x']].concat();
        frame(1, 5, stream, &block)
    }

    #[test]
    fn a_connection_is_read_once_the_handlers_have_all_that_came_before_it_was_asked() {
        let runtime = runtime("ox-test", 1).unwrap();
        let listener = listen("a test", "127.0.0.1:0", Closure::Loopback).unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, happened) = mpsc::channel();
        let (line, lines) = mpsc::channel();
        let served = Served::All(std::sync::Arc::new(Recorder { seen, line }));
        let limits = ConnectionLimits::manager();
        let service = Service::start(runtime, listener, served, limits, Duration::ZERO).unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let greeting = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat();
        stream
            .write_all(&[greeting, request(1, "/first")].concat())
            .unwrap();
        let line = lines.recv_timeout(TIME_LIMIT).unwrap();
        assert_eq!(
            happened.recv_timeout(TIME_LIMIT),
            Ok(Seen::Request("/first".into()))
        );
        let mut number = 1;
        for round in 0..20 {
            // The one thread of the server is busy while a request comes, and while the connection is asked for.
            let (busy, is_busy) = mpsc::channel();
            let (free, until) = mpsc::channel::<()>();
            service.handle().unwrap().spawn(async move {
                busy.send(()).unwrap();
                let _ = until.recv_timeout(TIME_LIMIT);
            });
            is_busy.recv_timeout(TIME_LIMIT).unwrap();
            number += 2;
            stream.write_all(&request(number, "/later")).unwrap();
            line.read();
            drop(free);
            let later = happened.recv_timeout(TIME_LIMIT);
            assert_eq!(later, Ok(Seen::Request("/later".into())), "round {round}");
            assert_eq!(happened.recv_timeout(TIME_LIMIT), Ok(Seen::Report(Report::Read)));
        }
        drop(stream);
        let ended = happened.recv_timeout(TIME_LIMIT);
        assert_eq!(ended, Ok(Seen::Report(Report::Ended { by_peer: true })));
    }
}
