//! What one connection is doing: whether it has greeted, which requests are open, which answers are not read.
//!
//! [`Guarded`] watches its bytes below hyper, [`Activity::begin`] and the bodies its requests above. [`Activity::verdict`] says from
//! both whether the connection may stay.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::BoxError;
use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::answer::Answer;
use super::frames::Frames;
use super::limits::{COSTLY_FRAMES, MAX_UNFINISHED_EACH, Port};
use crate::clock;

/// One connection, as all who serve it see it.
#[derive(Debug)]
pub(super) struct Activity {
    port: Arc<Port>,
    peer: SocketAddr,
    since: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    greeted: bool,
    /// Requests whose answers are not given yet.
    open: usize,
    /// When the last of them ended.
    quiet_since: Instant,
    /// Answers of which a part is ready, and since when.
    unread: HashMap<u64, Instant>,
    next: u64,
    /// Bytes of requests that are not whole.
    unfinished: usize,
    /// Over HTTP/2, the last sign that the peer's process runs: bytes of it, or room for more of ours where there was none.
    heard: Option<Instant>,
    /// Since when a ping has been out that nothing has come after.
    pinged: Option<Instant>,
    /// The peer's side was full at the last write.
    full: bool,
    /// The peer closed the connection, or its kernel did.
    ended_by_peer: bool,
}

impl State {
    /// The peer's process runs.
    fn hear(&mut self, now: Instant) {
        self.heard = Some(now);
        self.pinged = None;
    }

    /// A peer that was full has room. Only over HTTP/2 is that compared with anything.
    fn has_room(&mut self) {
        if self.heard.is_some() {
            self.hear(clock::now());
        }
    }
}

/// What is to become of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It may stay; look again at this instant.
    Stays(Instant),
    /// Nothing is open: it is asked to go.
    Idle,
    /// It is closed, because of this.
    Goes(String),
}

impl Activity {
    pub(super) fn new(port: Arc<Port>, peer: SocketAddr) -> Arc<Self> {
        let now = clock::now();
        Arc::new(Self {
            port,
            peer,
            since: now,
            state: Mutex::new(State {
                greeted: false,
                open: 0,
                quiet_since: now,
                unread: HashMap::new(),
                next: 0,
                unfinished: 0,
                heard: None,
                pinged: None,
                full: false,
                ended_by_peer: false,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn say(&self, why: &str) {
        self.port.say(self.peer, why);
    }

    /// The time for a greeting.
    pub(super) fn greeting(&self) -> Duration {
        self.port.limits.greeting
    }

    /// How long a peer may say nothing.
    pub(super) fn silence(&self) -> Duration {
        self.port.limits.silence
    }

    /// How often a connection over which nothing comes is pinged: the answer has the rest of the time.
    pub(super) fn ping_interval(&self) -> Duration {
        self.silence() * 2 / 5
    }

    /// The peer has no room for what is to be sent.
    pub(super) fn is_full(&self) -> bool {
        self.state().full
    }

    pub(super) fn is_ended_by_peer(&self) -> bool {
        self.state().ended_by_peer
    }

    /// A request has come, until the guard is dropped. Over HTTP/1 its head is the greeting.
    pub(super) fn begin(self: &Arc<Self>) -> Open {
        let mut state = self.state();
        state.greeted = true;
        state.open += 1;
        state.next += 1;
        Open {
            id: state.next,
            activity: Arc::clone(self),
        }
    }

    /// What is to become of the connection, once all that has come over it is read.
    pub(super) fn verdict(&self, now: Instant) -> Verdict {
        let limits = &self.port.limits;
        // What a connection does between two looks shows at the second, so none is far off.
        let soon = now + (limits.unread / 2).min(limits.idle);
        let mut state = self.state();
        if !state.greeted {
            let until = self.since + limits.greeting;
            return if now < until {
                // Its silence counts from its greeting on, and it is not known here when that comes.
                Verdict::Stays(until.min(soon).min(now + self.ping_interval()))
            } else {
                Verdict::Goes(format!("it did not greet within {:?}", limits.greeting))
            };
        }
        let oldest = state.unread.values().min();
        if oldest.is_some_and(|since| *since + limits.unread <= now) {
            return Verdict::Goes(format!("it took nothing of an answer for {:?}", limits.unread));
        }
        let silent = match self.silent(&mut state, now) {
            Ok(look) => look.map_or(soon, |look| look.min(soon)),
            Err(why) => return Verdict::Goes(why),
        };
        let idle_at = state.quiet_since + limits.idle;
        if state.open > 0 {
            Verdict::Stays(silent)
        } else if now < idle_at {
            Verdict::Stays(idle_at.min(silent))
        } else {
            Verdict::Idle
        }
    }

    /// When to look next at whether the peer is silent, or that it is. Hyper pings it after the ping interval; the time for the answer is counted
    /// from the first look after that, because while this process did not run it pinged no peer.
    fn silent(&self, state: &mut State, now: Instant) -> Result<Option<Instant>, String> {
        let Some(heard) = state.heard else {
            return Ok(None);
        };
        let ping = heard + self.ping_interval();
        if now < ping {
            return Ok(Some(ping));
        }
        let pinged = *state.pinged.get_or_insert(now);
        let until = pinged + (self.silence() - self.ping_interval());
        if now < until {
            Ok(Some(until))
        } else {
            Err(format!(
                "nothing came over it for {:?}, nor an answer to a ping",
                now.saturating_duration_since(heard)
            ))
        }
    }
}

/// An open request.
#[derive(Debug)]
pub(super) struct Open {
    id: u64,
    activity: Arc<Activity>,
}

impl Open {
    /// The request's body, with a limit of time and memory.
    pub(super) fn bounded<B>(&self, body: B) -> Incoming<B> {
        Incoming {
            body,
            end: None,
            held: 0,
            activity: Arc::clone(&self.activity),
        }
    }

    /// The answer's body; the request ends with it.
    pub(super) fn answer(self, body: Answer) -> Outgoing {
        Outgoing { body, open: self }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.activity.state();
        state.unread.remove(&self.id);
        state.open = state.open.saturating_sub(1);
        state.quiet_since = clock::now();
    }
}

/// A request's body on its way in.
pub(crate) struct Incoming<B> {
    body: B,
    /// Its time ends; set once it is not whole when it is looked at.
    end: Option<Pin<Box<Sleep>>>,
    held: usize,
    activity: Arc<Activity>,
}

impl<B> HttpBody for Incoming<B>
where
    B: HttpBody<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Pending => {
                let limit = self.activity.port.limits.greeting;
                let end = self
                    .end
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
                if end.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                return Poll::Ready(Some(Err(
                    format!("the request was not whole within {limit:?}").into()
                )));
            }
            Poll::Ready(frame) => frame,
        };
        let n = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            _ => 0,
        };
        let fits = {
            let mut state = self.activity.state();
            state.unfinished += n;
            state.unfinished <= MAX_UNFINISHED_EACH
        };
        self.held += n;
        if !self.activity.port.hold(n) || !fits {
            let why = "its unfinished requests, or those of all connections, hold too many bytes";
            self.activity.say(why);
            return Poll::Ready(Some(Err(why.into())));
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> Drop for Incoming<B> {
    fn drop(&mut self) {
        self.activity.port.give_back(self.held);
        let mut state = self.activity.state();
        state.unfinished = state.unfinished.saturating_sub(self.held);
    }
}

/// An answer's body on its way out. Hyper asks for the next part once the peer has room for it.
pub(super) struct Outgoing {
    body: Answer,
    open: Open,
}

impl HttpBody for Outgoing {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        let mut state = self.open.activity.state();
        if matches!(&frame, Poll::Ready(Some(Ok(_)))) {
            state.unread.insert(self.open.id, clock::now());
        } else {
            state.unread.remove(&self.open.id);
        }
        drop(state);
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The connection's stream, read along.
pub(super) struct Guarded<S> {
    stream: S,
    frames: Frames,
    /// The peer's side was full at the last write.
    full: bool,
    /// It was full at the last flush.
    unflushed: bool,
    activity: Arc<Activity>,
}

impl<S> Guarded<S> {
    pub(super) fn new(stream: S, activity: Arc<Activity>) -> Self {
        Self {
            stream,
            frames: Frames::new(COSTLY_FRAMES, clock::now()),
            full: false,
            unflushed: false,
            activity,
        }
    }

    /// Takes in what became of a write. Where the peer's side was full, room is a sign of life, and elsewhere it is not: the kernel takes bytes
    /// for a stopped process, too.
    fn written(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Pending => {
                self.full = true;
                self.activity.state().full = true;
            }
            Poll::Ready(Ok(_)) => {
                if std::mem::take(&mut self.full) {
                    let mut state = self.activity.state();
                    state.full = false;
                    state.has_room();
                }
            }
            Poll::Ready(Err(_)) => self.activity.state().ended_by_peer = true,
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let room = buf.remaining();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(ended) = &read
            && (ended.is_err() || room > 0 && buf.filled().len() == before)
        {
            self.activity.state().ended_by_peer = true;
        }
        if !matches!(read, Poll::Ready(Ok(()))) {
            return read;
        }
        let greeted = self.frames.greeted();
        let new = buf.filled().get(before..).unwrap_or_default();
        if self.frames.read(new, clock::now()).is_err() {
            let why = "it floods the server with frames that ask for nothing";
            self.activity.say(why);
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        if self.frames.greeted() {
            let now = clock::now();
            let mut state = self.activity.state();
            state.hear(now);
            if !greeted {
                state.greeted = true;
                state.quiet_since = now;
            }
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.written(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.written(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // With TLS, what was written may go out only here. A plain stream has nothing to flush, and never waits.
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        match &flushed {
            Poll::Pending => self.unflushed = true,
            Poll::Ready(_) => {
                if std::mem::take(&mut self.unflushed) {
                    self.activity.state().has_room();
                }
            }
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// How long a connection that was asked to go may take.
pub(super) const GOING: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::super::limits::ConnectionLimits;
    use super::*;

    const SILENCE: Duration = Duration::from_secs(10);

    /// A connection with an open request, over which something came last at the given time.
    fn heard(at: Instant) -> (Arc<Activity>, Open) {
        let limits = ConnectionLimits {
            silence: SILENCE,
            ..ConnectionLimits::manager()
        };
        let activity = Activity::new(Port::new(limits), "127.0.0.1:1".parse().unwrap());
        let open = activity.begin();
        activity.state().hear(at);
        (activity, open)
    }

    #[test]
    fn a_peer_that_answers_no_ping_goes_after_the_silence() {
        let begun = Instant::now();
        let (activity, _open) = heard(begun);
        let ping = begun + activity.ping_interval();
        assert_eq!(activity.verdict(begun), Verdict::Stays(ping));
        assert_eq!(activity.verdict(ping), Verdict::Stays(begun + SILENCE));
        assert!(matches!(activity.verdict(begun + SILENCE), Verdict::Goes(_)));
        // Its answer is read before the verdict.
        activity.state().hear(begun + SILENCE);
        assert!(matches!(activity.verdict(begun + SILENCE), Verdict::Stays(_)));
    }

    #[test]
    fn a_peer_that_has_not_greeted_is_looked_at_again_before_its_silence_could_be_over() {
        let limits = ConnectionLimits {
            silence: SILENCE,
            greeting: SILENCE * 3,
            ..ConnectionLimits::manager()
        };
        let activity = Activity::new(Port::new(limits), "127.0.0.1:1".parse().unwrap());
        let now = Instant::now();
        let again = now + activity.ping_interval();
        assert_eq!(activity.verdict(now), Verdict::Stays(again));
    }

    #[test]
    fn a_peer_that_was_not_pinged_has_its_time_to_answer() {
        let begun = Instant::now();
        let (activity, _open) = heard(begun);
        // This process was stopped for a minute.
        let back = begun + SILENCE * 6;
        let until = back + (SILENCE - activity.ping_interval());
        assert_eq!(activity.verdict(back), Verdict::Stays(until));
        assert!(matches!(activity.verdict(until), Verdict::Goes(_)));
    }

    /// A body of pieces of 1 MiB without end.
    struct Endless;

    impl HttpBody for Endless {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            Poll::Ready(Some(Ok(Frame::data(vec![0; 1 << 20].into()))))
        }
    }

    /// How many of `most` pieces are taken.
    fn taken(body: &mut Incoming<Endless>, most: usize) -> usize {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut next = || Pin::new(&mut *body).poll_frame(&mut context);
        (0..most)
            .take_while(|_| matches!(next(), Poll::Ready(Some(Ok(_)))))
            .count()
    }

    #[test]
    fn unfinished_requests_hold_bounded_memory_of_a_connection_and_of_all_and_give_it_back() {
        let port = Port::new(ConnectionLimits::manager());
        let connection = || Activity::new(Arc::clone(&port), "127.0.0.1:1".parse().unwrap()).begin();
        let (own, all) = (
            MAX_UNFINISHED_EACH >> 20,
            super::super::limits::MAX_UNFINISHED >> 20,
        );
        let one = connection();
        let mut first = one.bounded(Endless);
        assert_eq!(taken(&mut first, 1000), own);
        // Another request on the same connection does not help.
        assert_eq!(taken(&mut one.bounded(Endless), 1000), 0);
        drop(first);
        assert_eq!(taken(&mut one.bounded(Endless), 1000), own);
        // Nor do many connections.
        let many: Vec<Open> = (0..all).map(|_| connection()).collect();
        let mut bodies: Vec<_> = many.iter().map(|open| open.bounded(Endless)).collect();
        let held: usize = bodies.iter_mut().map(|body| taken(body, own)).sum();
        assert_eq!(held, all);
        drop(bodies);
        assert_eq!(port.unfinished.load(std::sync::atomic::Ordering::Relaxed), 0);
    }

    #[test]
    fn over_http_1_silence_says_nothing() {
        let begun = Instant::now();
        let (activity, _open) = heard(begun);
        activity.state().heard = None;
        activity.state().has_room();
        assert!(matches!(activity.verdict(begun + SILENCE * 2), Verdict::Stays(_)));
    }
}
