//! A TCP connection on which every read and write ends by an instant, and the bell that wakes a thread blocked on one. What goes over it is
//! sealed and opened here where the job encrypts its connections.
//!
//! The socket is non-blocking; waiting is `poll(2)`, whose time-outs are exact and which can watch the bell as well. A
//! deadline that passed is `io::ErrorKind::TimedOut` without an OS code, so that it differs from the kernel's ETIMEDOUT. A call under tokens
//! ([`Watched`]) polls in turns and looks at them in between: the connection is as it was, whatever has come of the call so far.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::forked::Parents;
use crate::identity::hello::{NO_RANK, Topic};
use crate::identity::records::{Opener, Sealer};
use crate::{Cancel, Epoch, Error, deadline_in, time_left};

const BUFFER: usize = 16 * 1024;
/// What must move in one window of [`TimeLimit::Pace`].
const PACE: usize = 64 * 1024;

/// What the hello of a store's connections is for: clients have no rank.
pub(super) fn hello_topic() -> Topic {
    Topic::new("store", Epoch(0), NO_RANK, NO_RANK)
}

/// How long a read or write may wait.
#[derive(Debug, Clone, Copy)]
pub(super) enum TimeLimit {
    /// Until this instant.
    Until(Instant),
    /// Until less than [`PACE`] has moved in this time, from the last [`Link::pace`] on.
    Pace(Duration),
    /// As long as the connection lives; the user of this must be able to shut the socket down.
    Forever,
}

/// True for the error of a [`TimeLimit`] that ran out, false for time-outs of the kernel's.
pub(super) fn is_late(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::TimedOut && e.raw_os_error().is_none()
}

/// Polls until something is ready; false once the deadline has passed.
fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(time_left);
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(fds, timeout.as_ref()) {
            Ok(0) if left.is_some_and(|left| left.is_zero()) => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(e.into()),
        }
    }
}

/// The tokens that end a call, and when they are looked at again.
#[derive(Debug, Clone, Default)]
pub(super) struct Watched {
    tokens: Arc<[Cancel]>,
    look: Option<Instant>,
}

impl Watched {
    /// These, and `token`; those that are settled end nothing any more.
    pub(super) fn and(&self, token: &Cancel) -> Self {
        let live = self.tokens.iter().filter(|token| !token.is_settled());
        Self {
            tokens: live.chain([token]).cloned().collect(),
            look: None,
        }
    }

    /// How long to wait before [`look`](Self::look): until `deadline` at the latest.
    pub(super) fn turn(&mut self, deadline: Option<Instant>) -> Option<Instant> {
        if self.tokens.is_empty() {
            return deadline;
        }
        let look = *self.look.get_or_insert_with(|| deadline_in(Cancel::TURN));
        Some(deadline.map_or(look, |deadline| deadline.min(look)))
    }

    /// Errors: the reason of the first token that is cancelled.
    pub(super) fn look(&mut self) -> io::Result<()> {
        self.look = None;
        let mut live = self.tokens.iter().filter(|token| !token.is_settled());
        match live.find_map(Cancel::reason) {
            Some(reason) => Err(io::Error::other(Cancelled(reason))),
            None => Ok(()),
        }
    }

    /// As [`poll_until`], in turns.
    fn poll(&mut self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let turn = self.turn(deadline);
            if poll_until(fds, turn)? {
                return Ok(true);
            }
            self.look()?;
            if turn == deadline {
                return Ok(false);
            }
        }
    }
}

/// What ended a call whose token was cancelled.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Cancelled(Error);

/// The reason of a token, if that is what ended the call.
pub(super) fn reason_of(e: &io::Error) -> Option<&Error> {
    Some(&e.get_ref()?.downcast_ref::<Cancelled>()?.0)
}

/// Wakes the thread that watches it in [`Link::watch`]. Ringing twice is as ringing once.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn ring(&self) {
        // Fails only when the counter is full, that is, when it rings already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn silence(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What [`Link::watch`] saw.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    /// There is something to read (perhaps the end of the stream).
    pub(super) input: bool,
    /// The peer closed its side, or the connection broke.
    pub(super) gone: bool,
}

/// Waits until the socket has a connection to accept or the bell rings; `deadline` is for a pause without accepting.
pub(super) fn watch_listener(listener: impl AsFd, bell: &Bell, deadline: Option<Instant>) -> io::Result<()> {
    match deadline {
        Some(_) => poll_until(&mut [PollFd::new(bell, PollFlags::IN)], deadline),
        None => {
            let mut fds = [
                PollFd::new(&listener, PollFlags::IN),
                PollFd::new(bell, PollFlags::IN),
            ];
            poll_until(&mut fds, None)
        }
    }
    .map(drop)
}

/// Finds out about a peer whose machine vanished, so that it does not keep its place at a server for ever, and no client waits for ever for a
/// server that is not there any more. Best effort.
fn keep_alive(socket: &TcpStream) {
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_keepidle(socket, Duration::from_secs(60));
    let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(15));
    let _ = sockopt::set_tcp_keepcnt(socket, 4);
}

/// A connection with a read buffer.
#[derive(Debug)]
pub(super) struct Link {
    stream: Arc<Parents<TcpStream>>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    pub(super) limit: TimeLimit,
    /// Of the call that uses the connection.
    pub(super) watched: Watched,
    /// The window of [`TimeLimit::Pace`] ends then, and so much has moved in it.
    window: Option<Instant>,
    moved: usize,
    /// Of an encrypted connection.
    records: Option<Box<(Sealer, Opener)>>,
}

impl Link {
    pub(super) fn new(stream: TcpStream, limit: TimeLimit) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        keep_alive(&stream);
        let buffer = vec![0; BUFFER].into_boxed_slice();
        Ok(Self {
            stream: Arc::new(stream.into()),
            buffer,
            start: 0,
            end: 0,
            limit,
            watched: Watched::default(),
            window: None,
            moved: 0,
            records: None,
        })
    }

    /// A connection that is being made to `address`; nothing may be read or written before it [is made](Self::made).
    pub(super) fn begin(address: &SocketAddr, limit: TimeLimit) -> io::Result<Self> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        match connect(&socket, address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Self::new(socket.into(), limit),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits for the first of `links` of which it is known whether it is [made](Self::made): its index. `None` at the deadline. Errors: a token
    /// was cancelled.
    pub(super) fn first_known<'a>(
        links: impl Iterator<Item = &'a Self>,
        deadline: Instant,
        watched: &mut Watched,
    ) -> io::Result<Option<usize>> {
        let mut fds: Vec<_> = links
            .map(|link| PollFd::new(&*link.stream, PollFlags::OUT))
            .collect();
        watched.poll(&mut fds, Some(deadline))?;
        Ok(fds.iter().position(|fd| !fd.revents().is_empty()))
    }

    /// Whether a connection of which that is known is made. Errors: why it cannot be.
    pub(super) fn made(&self) -> io::Result<()> {
        sockopt::socket_error(&*self.stream)??;
        // Without a listener, a connect within one host can meet itself on the same port.
        if self.stream.local_addr()? == self.stream.peer_addr()? {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Ok(())
    }

    /// From now on the connection is encrypted: the hello has made the keys. What came in behind the hello is records.
    pub(super) fn encrypt(&mut self, (sealer, mut opener): (Sealer, Opener)) {
        opener.came(self.buffered());
        self.skip(self.buffer.len());
        self.records = Some(Box::new((sealer, opener)));
    }

    /// From now on, something must move in every `window`.
    pub(super) fn pace(&mut self, window: Duration) {
        self.limit = TimeLimit::Pace(window);
        self.window = None;
        self.moved = 0;
    }

    fn deadline(&mut self) -> Option<Instant> {
        match self.limit {
            TimeLimit::Until(deadline) => Some(deadline),
            TimeLimit::Pace(window) => Some(*self.window.get_or_insert_with(|| crate::deadline_in(window))),
            TimeLimit::Forever => None,
        }
    }

    fn count(&mut self, n: usize) {
        self.moved += n;
        if self.moved >= PACE {
            self.window = None;
            self.moved = 0;
        }
    }

    /// The socket, for shutting it down from elsewhere.
    pub(super) fn socket(&self) -> &Arc<Parents<TcpStream>> {
        &self.stream
    }

    /// What was received and not read yet.
    pub(super) fn buffered(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Takes back bytes seen in `buffered`.
    pub(super) fn skip(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
    }

    /// Waits for input; false at the end of the stream.
    pub(super) fn fill(&mut self) -> io::Result<bool> {
        if self.start < self.end {
            return Ok(true);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let filled = self.receive_text(&mut buffer);
        self.buffer = buffer;
        self.start = 0;
        self.end = 0;
        self.end = filled?;
        Ok(self.end > 0)
    }

    /// Reads past the buffer; 0 at the end of the stream.
    fn receive_text(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(mut records) = self.records.take() else {
            return self.receive(into);
        };
        let (_, opener) = &mut *records;
        let opened = opener.open_from(|room| self.receive(room));
        let taken = opened.and_then(|_| Ok(opener.take(into)?));
        self.records = Some(records);
        taken
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.once(PollFlags::IN, |mut stream| stream.read(into))
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.once(PollFlags::OUT, |mut stream| stream.write(bytes))
    }

    /// Reads or writes, once the socket is ready for that.
    fn once(
        &mut self,
        ready: PollFlags,
        mut step: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let deadline = self.deadline();
        let stream = self.stream.clone();
        loop {
            match step(&stream) {
                Ok(n) => {
                    self.count(n);
                    return Ok(n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let mut socket = [PollFd::new(&**stream, ready)];
                    if !self.watched.poll(&mut socket, deadline)? {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Waits until the bell rings, input arrives (watched only if `input`) or the peer is gone.
    pub(super) fn watch(&self, bell: &Bell, input: bool) -> io::Result<Seen> {
        if input && self.holds_records() {
            return Ok(Seen {
                input: true,
                gone: false,
            });
        }
        let mut flags = PollFlags::RDHUP;
        if input {
            flags |= PollFlags::IN;
        }
        let mut fds = [
            PollFd::new(&*self.stream, flags),
            PollFd::new(bell, PollFlags::IN),
        ];
        poll_until(&mut fds, None)?;
        let [socket, _] = &fds;
        let seen = socket.revents();
        Ok(Seen {
            input: seen.contains(PollFlags::IN),
            gone: seen.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
        })
    }

    /// Bytes came in that are not in the buffer yet.
    fn holds_records(&self) -> bool {
        self.records.as_ref().is_some_and(|records| !records.1.is_empty())
    }

    /// True if the connection is open and silent, as an idle one between two calls must be.
    pub(super) fn is_quiet(&self) -> bool {
        let mut fds = [PollFd::new(&*self.stream, PollFlags::IN | PollFlags::RDHUP)];
        self.start == self.end
            && !self.holds_records()
            && poll_until(&mut fds, Some(Instant::now())).is_ok_and(|ready| !ready)
    }

    /// Ends the connection in both directions; a thread blocked on it wakes.
    pub(super) fn shut(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Read for Link {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end && into.len() >= BUFFER {
            return self.receive_text(into);
        }
        if !self.fill()? {
            return Ok(0);
        }
        let n = self.buffered().len().min(into.len());
        if let (Some(to), Some(from)) = (into.get_mut(..n), self.buffered().get(..n)) {
            to.copy_from_slice(from);
        }
        self.skip(n);
        Ok(n)
    }
}

impl Write for Link {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(mut records) = self.records.take() else {
            return self.send(bytes);
        };
        let (sealer, _) = &mut *records;
        let written = sealer.write(bytes, |record| self.send(record));
        self.records = Some(records);
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
