//! One non-blocking stream connection (TCP, or a Unix socket within a host): reads and writes that say "would block" or "closed" instead of failing, the readiness
//! remembered between polls, and the bytes counted. All bytes of TCP pass here, so here they are sealed and opened where the job encrypts them.

use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ftcore::forked::Parents;
use ftcore::identity::records::{NotAuthentic, Opener, Sealer};
use ftcore::{Error, ErrorKind, Result, Traffic, descriptors};
use rustix::io::Errno;
use rustix::net::sockopt::{set_tcp_congestion, tcp_congestion};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::shm;
use crate::raw;

/// Bytes moved by a group over all its configurations.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
    /// What collectives sent and received through rings in shared memory. Written by the driver of the collectives alone, of which there is one at a
    /// time: it adds without locking the bus, which would wait until the other rank has seen what was written before.
    sent_local: AtomicU64,
    received_local: AtomicU64,
}

impl Counters {
    pub(crate) fn traffic(&self) -> Traffic {
        let both = |one: &AtomicU64, other: &AtomicU64| {
            one.load(Ordering::Relaxed)
                .wrapping_add(other.load(Ordering::Relaxed))
        };
        Traffic {
            sent: both(&self.sent, &self.sent_local),
            received: both(&self.received, &self.received_local),
        }
    }

    pub(crate) fn add_sent(&self, n: usize) {
        self.sent.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_received(&self, n: usize) {
        self.received.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Counts bytes that the driver of the collectives has put into a ring.
    pub(crate) fn add_sent_local(&self, n: usize) {
        add_alone(&self.sent_local, n);
    }

    /// Counts bytes that it has taken out of one.
    pub(crate) fn add_received_local(&self, n: usize) {
        add_alone(&self.received_local, n);
    }

    /// Bytes sent by other ways than through the rings of the collectives.
    pub(crate) fn sent_elsewhere(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

fn add_alone(count: &AtomicU64, n: usize) {
    let sum = count.load(Ordering::Relaxed).wrapping_add(n as u64);
    count.store(sum, Ordering::Relaxed);
}

/// What came of a read or a write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// That many bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// The connection is closed in this direction; `Link::closed` says how.
    Closed,
}

/// A connection to one peer.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Arc<Parents<OwnedFd>>,
    counters: Arc<Counters>,
    /// A read may give something: true until one did not, and again when poll says so.
    pub(crate) readable: bool,
    /// Likewise for writes.
    pub(crate) writable: bool,
    /// The peer sends no more: how that showed.
    pub(crate) read_closed: Option<String>,
    /// The peer takes no more: how that showed.
    pub(crate) write_closed: Option<String>,
    /// It failed, rather than being closed in good order: what was under way may be lost.
    pub(crate) broke: bool,
    /// This process has no room for handles that came.
    pub(crate) starved: bool,
    /// What came in is not what the peer sent.
    forged: bool,
    /// Something came that this rank does not want any more.
    overtaken: bool,
    /// Of an encrypted connection: what the reader, and what the writer needs.
    opener: Option<Box<Opener>>,
    sealer: Option<Box<Sealer>>,
}

/// Reads of what a peer still says, at most, at a time.
const UNREAD: usize = 64;
/// An encrypted link writes so much at once, as records of their own.
const AT_ONCE: usize = 256 * 1024;

impl Link {
    /// Takes over a connected stream: non-blocking, no delay.
    pub(crate) fn new(stream: TcpStream, counters: Arc<Counters>) -> Result<Self> {
        stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true))
            .map_err(|e| Error::io("setting up a connection", e))?;
        Ok(Self::over(stream.into(), counters))
    }

    /// Takes over a connected stream to a rank of this host: non-blocking.
    pub(crate) fn local(stream: UnixStream, counters: Arc<Counters>) -> Result<Self> {
        stream
            .set_nonblocking(true)
            .map_err(|e| Error::io("setting up a connection", e))?;
        Ok(Self::over(stream.into(), counters))
    }

    /// Two hands on one connection: one to read with, one to write with.
    pub(crate) fn split(mut self) -> (Self, Self) {
        let mut other = Self::hand(self.stream.clone(), self.counters.clone());
        other.sealer = self.sealer.take();
        (self, other)
    }

    /// The socket alone, unless another hand holds it.
    pub(crate) fn into_socket(self) -> Option<Parents<OwnedFd>> {
        Arc::into_inner(self.stream)
    }

    fn over(stream: OwnedFd, counters: Arc<Counters>) -> Self {
        Self::hand(Arc::new(stream.into()), counters)
    }

    fn hand(stream: Arc<Parents<OwnedFd>>, counters: Arc<Counters>) -> Self {
        Self {
            stream,
            counters,
            readable: true,
            writable: true,
            read_closed: None,
            write_closed: None,
            broke: false,
            starved: false,
            forged: false,
            overtaken: false,
            opener: None,
            sealer: None,
        }
    }

    /// From now on the connection is encrypted: the hello has made the keys.
    pub(crate) fn encrypt(&mut self, (sealer, opener): (Sealer, Opener)) {
        (self.sealer, self.opener) = (Some(Box::new(sealer)), Some(Box::new(opener)));
    }

    /// # Errors
    /// `Protocol` once something came in on an encrypted connection that its peer did not send, or not next.
    pub(crate) fn authentic(&self) -> Result<()> {
        match self.forged {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Protocol, NotAuthentic.to_string())),
        }
    }

    /// As [`read`](Self::read), on a local connection, with the handles that came along.
    pub(crate) fn read_handles(&mut self, buffer: &mut [u8], handles: &mut Vec<OwnedFd>) -> Moved {
        let mut raised = false;
        loop {
            match shm::receive(&self.stream, buffer, handles) {
                Ok(0) => {
                    self.read_closed = Some("closed the connection".to_string());
                    return Moved::Closed;
                }
                Ok(n) => {
                    self.counters.add_received(n);
                    return Moved::Bytes(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return Moved::Nothing;
                }
                // They are still there, and come once: a peer that handed them over counts this rank as connected.
                Err(Errno::MFILE) if !raised && descriptors::raise_for(shm::HANDLES) => raised = true,
                Err(e) => {
                    self.read_closed = Some(format!("the connection broke ({e})"));
                    (self.broke, self.starved) = (true, e == Errno::MFILE);
                    return Moved::Closed;
                }
            }
        }
    }

    /// Writes `bytes` on a local connection, the handles with the first of them.
    pub(crate) fn write_handles(&mut self, bytes: &[u8], handles: &[BorrowedFd<'_>]) -> Moved {
        loop {
            match shm::send(&self.stream, bytes, handles) {
                Ok(0) | Err(Errno::AGAIN) => {
                    self.writable = false;
                    return Moved::Nothing;
                }
                Ok(n) => {
                    self.counters.add_sent(n);
                    return Moved::Bytes(n);
                }
                Err(Errno::INTR) => {}
                Err(e) => {
                    self.write_closed = Some(format!("the connection broke ({e})"));
                    return Moved::Closed;
                }
            }
        }
    }

    /// Reads into `buffer`, which must not be empty.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> Moved {
        if self.read_closed.is_some() {
            return Moved::Closed;
        }
        let Some(mut opener) = self.opener.take() else {
            return self.receive(buffer);
        };
        let moved = loop {
            match opener.take(buffer) {
                Ok(0) => {}
                Ok(n) => {
                    // There may be more, of which poll does not know.
                    self.readable = true;
                    break Moved::Bytes(n);
                }
                Err(e) => break self.is_forged(e),
            }
            match self.receive(opener.room()) {
                Moved::Bytes(n) => opener.received(n),
                other => break other,
            }
        };
        self.opener = Some(opener);
        moved
    }

    /// What can be read without taking it: on an encrypted connection, of one record. It may be cut to the length of `buffer`, which must not be empty.
    pub(crate) fn peek(&mut self, buffer: &mut [u8]) -> Moved {
        if self.read_closed.is_some() {
            return Moved::Closed;
        }
        let Some(mut opener) = self.opener.take() else {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            return match recv(&self.stream, &mut *buffer, flags) {
                Err(Errno::AGAIN | Errno::INTR) => Moved::Nothing,
                Ok((n, _)) if n > 0 => Moved::Bytes(n),
                _ => Moved::Closed,
            };
        };
        let moved = loop {
            match opener.open() {
                Ok(false) => {}
                Ok(true) => {
                    let text = opener.text();
                    let n = text.len().min(buffer.len());
                    if let (Some(into), Some(from)) = (buffer.get_mut(..n), text.get(..n)) {
                        into.copy_from_slice(from);
                    }
                    break Moved::Bytes(n);
                }
                Err(e) => break self.is_forged(e),
            }
            match self.receive(opener.room()) {
                Moved::Bytes(n) => opener.received(n),
                other => break other,
            }
        };
        self.opener = Some(opener);
        moved
    }

    fn is_forged(&mut self, error: NotAuthentic) -> Moved {
        self.read_closed = Some(error.to_string());
        (self.broke, self.forged) = (true, true);
        Moved::Closed
    }

    /// Reads what is on the wire.
    fn receive(&mut self, buffer: &mut [u8]) -> Moved {
        loop {
            match recv(&self.stream, &mut *buffer, RecvFlags::empty()) {
                Ok((0, _)) => {
                    self.read_closed = Some("closed the connection".to_string());
                    return Moved::Closed;
                }
                Ok((n, _)) => {
                    self.counters.add_received(n);
                    return Moved::Bytes(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return Moved::Nothing;
                }
                Err(e) => {
                    self.read_closed = Some(format!("the connection broke ({e})"));
                    self.broke = true;
                    return Moved::Closed;
                }
            }
        }
    }

    /// How much of what was written could be lost if the connection were closed now. What comes in is read and dropped: a socket that is closed with
    /// something unread breaks, and so does one for which something comes after.
    ///
    /// That can be told of a peer that sends: then all counts that it has not acknowledged. Of another one only what was not sent once, as it may take
    /// its time to acknowledge the rest.
    pub(crate) fn at_risk(&mut self) -> usize {
        let mut sink = [0; 4096];
        for _ in 0..UNREAD {
            match self.read_closed.is_none().then(|| self.receive(&mut sink)) {
                Some(Moved::Bytes(_)) => self.overtaken = true,
                _ => break,
            }
        }
        if self.read_closed.is_some() || self.write_closed.is_some() {
            return 0;
        }
        match self.overtaken {
            true => raw::unacknowledged(&self.stream),
            false => raw::unsent(&self.stream),
        }
    }

    /// Writes some of `slices`. Of an encrypted connection: what is not written yet must be handed over again with the next call, since it may be in
    /// a record that is out in part.
    pub(crate) fn write(&mut self, slices: &[IoSlice<'_>]) -> Moved {
        if self.write_closed.is_some() {
            return Moved::Closed;
        }
        let Some(mut sealer) = self.sealer.take() else {
            return self.send(slices);
        };
        let mut done = 0;
        let moved = loop {
            if done >= AT_ONCE {
                break Moved::Bytes(done);
            }
            if let Err(error) = sealer.seal(slices, done) {
                self.write_closed = Some(error.to_string());
                break Moved::Closed;
            }
            if sealer.pending().is_empty() {
                break Moved::Bytes(done);
            }
            match self.send(&[IoSlice::new(sealer.pending())]) {
                // Counted by whole records, so that what the peer can have read is never more than what counts as written.
                Moved::Bytes(n) => done += sealer.sent(n),
                Moved::Nothing if done > 0 => break Moved::Bytes(done),
                other => break other,
            }
        };
        self.sealer = Some(sealer);
        moved
    }

    /// Writes to the wire.
    fn send(&mut self, slices: &[IoSlice<'_>]) -> Moved {
        loop {
            // NOSIGNAL: a library must not rely on its program to ignore SIGPIPE.
            match sendmsg(
                &self.stream,
                slices,
                &mut SendAncillaryBuffer::default(),
                SendFlags::NOSIGNAL,
            ) {
                Ok(0) | Err(Errno::AGAIN) => {
                    self.writable = false;
                    return Moved::Nothing;
                }
                Ok(n) => {
                    self.counters.add_sent(n);
                    return Moved::Bytes(n);
                }
                Err(Errno::INTR) => {}
                Err(e) => {
                    self.write_closed = Some(format!("the connection broke ({e})"));
                    return Moved::Closed;
                }
            }
        }
    }
}

/// A link as a stream that says `WouldBlock`, for the hello of the credentials.
pub(crate) struct Stream<'a>(pub(crate) &'a mut Link);

/// As the standard library says it. `closed`: how the end showed.
pub(crate) fn moved(moved: Moved, closed: Option<&str>) -> io::Result<usize> {
    match moved {
        Moved::Bytes(n) => Ok(n),
        Moved::Nothing => Err(io::ErrorKind::WouldBlock.into()),
        Moved::Closed => Err(io::Error::new(
            io::ErrorKind::ConnectionReset,
            closed.unwrap_or("closed the connection").to_string(),
        )),
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let done = self.0.read(into);
        moved(done, self.0.read_closed.as_deref())
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let done = self.0.write(&[IoSlice::new(bytes)]);
        moved(done, self.0.write_closed.as_deref())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a socket that connects within the host is told beforehand, and one that listens.
///
/// Nothing is lost there and nothing is shared with other traffic, so there is nothing to control. BBR, where it is the default, paces
/// by timers, also on loopback, and halves the speed; that it once did sticks to a connection. Reno is in every kernel and does
/// not pace. Where it may not be chosen, all goes on as usual.
pub(crate) fn unpaced<S: AsFd>(socket: &S) {
    let _ = set_tcp_congestion(socket, "reno");
}

/// How connections that come in at `listener` are controlled; from now on they are unpaced.
pub(crate) fn listen_unpaced(listener: &TcpListener) -> Option<String> {
    let before = tcp_congestion(listener).ok();
    unpaced(listener);
    before
}

/// A connection that came in so from another host is controlled as all others.
pub(crate) fn pace_from_elsewhere(stream: &TcpStream, control: &str) {
    let within = match (stream.local_addr(), stream.peer_addr()) {
        (Ok(own), Ok(peer)) => own.ip() == peer.ip(),
        _ => false,
    };
    if !within && let Err(error) = set_tcp_congestion(stream, control) {
        tracing::debug!(%error, control, "the congestion control could not be set");
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_within_the_host_are_not_paced_and_others_are_as_they_would_be() {
        let plain = TcpListener::bind("127.0.0.1:0").unwrap();
        let usual = tcp_congestion(&plain).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(listen_unpaced(&listener), Some(usual.clone()));
        let _dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        pace_from_elsewhere(&accepted, &usual);
        assert_eq!(tcp_congestion(&accepted).unwrap(), "reno");
        // 127.0.0.2 to 127.0.0.1: two addresses, as between hosts.
        let elsewhere = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        let from: std::net::SocketAddr = "127.0.0.2:0".parse().unwrap();
        rustix::net::bind(&elsewhere, &from).unwrap();
        rustix::net::connect(&elsewhere, &listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        pace_from_elsewhere(&accepted, &usual);
        assert_eq!(tcp_congestion(&accepted).unwrap(), usual);
    }
}
