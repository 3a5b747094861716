//! One non-blocking stream connection (TCP, or a Unix socket within a host): reads and writes that say "would block" or "closed" instead of failing, the readiness
//! remembered between polls, and the bytes counted.

use std::io::IoSlice;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use ftcore::{Error, Result, Traffic};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::shm;

/// Bytes moved by a group over all its configurations.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn add_sent(&self, n: usize) {
        self.sent.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_received(&self, n: usize) {
        self.received.fetch_add(n as u64, Ordering::Relaxed);
    }
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
    stream: OwnedFd,
    counters: std::sync::Arc<Counters>,
    /// A read may give something: true until one did not, and again when poll says so.
    pub(crate) readable: bool,
    /// Likewise for writes.
    pub(crate) writable: bool,
    /// The peer sends no more: how that showed.
    pub(crate) read_closed: Option<String>,
    /// The peer takes no more: how that showed.
    pub(crate) write_closed: Option<String>,
}

impl Link {
    /// Takes over a connected stream: non-blocking, no delay.
    pub(crate) fn new(stream: TcpStream, counters: std::sync::Arc<Counters>) -> Result<Self> {
        stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true))
            .map_err(|e| Error::io("setting up a connection", e))?;
        Ok(Self::over(stream.into(), counters))
    }

    /// Takes over a connected stream to a rank of this host: non-blocking.
    pub(crate) fn local(stream: UnixStream, counters: std::sync::Arc<Counters>) -> Result<Self> {
        stream
            .set_nonblocking(true)
            .map_err(|e| Error::io("setting up a connection", e))?;
        Ok(Self::over(stream.into(), counters))
    }

    fn over(stream: OwnedFd, counters: std::sync::Arc<Counters>) -> Self {
        Self {
            stream,
            counters,
            readable: true,
            writable: true,
            read_closed: None,
            write_closed: None,
        }
    }

    /// As [`read`](Self::read), on a local connection, with the handles that came along.
    pub(crate) fn read_handles(&mut self, buffer: &mut [u8], handles: &mut Vec<OwnedFd>) -> Moved {
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
                Err(e) => {
                    self.read_closed = Some(format!("the connection broke ({e})"));
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
                    return Moved::Closed;
                }
            }
        }
    }

    /// Writes some of `slices`.
    pub(crate) fn write(&mut self, slices: &[IoSlice<'_>]) -> Moved {
        if self.write_closed.is_some() {
            return Moved::Closed;
        }
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

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
