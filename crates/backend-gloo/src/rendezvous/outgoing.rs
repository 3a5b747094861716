//! Connections to lower ranks: made, greeted, and tried again until the deadline if they break.

use std::io::IoSlice;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::Rendezvous;
use crate::transport::tcp::{Link, Moved};
use crate::wire::{Hello, Lane};

/// Between two attempts to reach a rank.
const RETRY: Duration = Duration::from_millis(30);

/// One attempt to connect one lane to a lower rank.
pub(super) enum Dial {
    Waiting {
        retry_at: Instant,
    },
    Connecting(OwnedFd),
    Greeting {
        link: Link,
        sent: usize,
        buffer: Box<[u8; Hello::BYTES]>,
        have: usize,
    },
    Done,
}

/// One lane to one lower rank.
pub(super) struct Dialed {
    pub(super) rank: u32,
    pub(super) lane: Lane,
    pub(super) state: Dial,
}

impl Rendezvous<'_> {
    /// Moves all attempts on.
    pub(super) fn dial(&mut self) -> Result<()> {
        for index in 0..self.dialed.len() {
            while self.dial_one(index)? {}
        }
        Ok(())
    }

    /// One step of one attempt; true if another step may follow at once.
    fn dial_one(&mut self, index: usize) -> Result<bool> {
        let Some(dialed) = self.dialed.get_mut(index) else {
            return Ok(false);
        };
        let (rank, lane) = (dialed.rank, dialed.lane);
        let Some(Some(card)) = self.cards.get(rank as usize).cloned() else {
            return Ok(false);
        };
        let address = match card.local {
            Some(local) if card.host == self.card.host && card.host != "unknown" => local,
            _ => card.remote,
        };
        let again = || Dial::Waiting {
            retry_at: deadline_in(RETRY),
        };
        let state = std::mem::replace(&mut dialed.state, Dial::Done);
        let (state, more) = match state {
            Dial::Done => (Dial::Done, false),
            Dial::Waiting { retry_at } if !time_left(retry_at).is_zero() => {
                (Dial::Waiting { retry_at }, false)
            }
            Dial::Waiting { .. } => match begin(address) {
                Ok(fd) => (Dial::Connecting(fd), true),
                Err(error) => {
                    tracing::debug!(rank, %address, %error, "connecting failed; trying again");
                    self.forget(rank);
                    (again(), false)
                }
            },
            Dial::Connecting(fd) => match connected(&fd) {
                None => (Dial::Connecting(fd), false),
                Some(Ok(())) => {
                    let link = Link::new(TcpStream::from(fd), self.counters.clone())?;
                    let buffer = Box::new([0; Hello::BYTES]);
                    let state = Dial::Greeting {
                        link,
                        sent: 0,
                        buffer,
                        have: 0,
                    };
                    (state, true)
                }
                Some(Err(error)) => {
                    tracing::debug!(rank, %address, %error, "connecting failed; trying again");
                    self.forget(rank);
                    (again(), false)
                }
            },
            Dial::Greeting {
                mut link,
                mut sent,
                mut buffer,
                mut have,
            } => {
                let greeting = self.hello(lane, card.nonce).encode();
                let rest = greeting.get(sent..).unwrap_or(&[]);
                let mut moved = Moved::Nothing;
                if rest.is_empty() {
                    if let Some(room) = buffer.get_mut(have..).filter(|r| !r.is_empty()) {
                        moved = link.read(room);
                        if let Moved::Bytes(n) = moved {
                            have += n;
                        }
                    }
                } else {
                    moved = link.write(&[IoSlice::new(rest)]);
                    if let Moved::Bytes(n) = moved {
                        sent += n;
                    }
                }
                if have == Hello::BYTES {
                    self.answered(rank, lane, link, &buffer, address)?;
                    (Dial::Done, false)
                } else if moved == Moved::Closed {
                    tracing::debug!(rank, %address, "the rank closed the connection; trying again");
                    self.forget(rank);
                    (again(), false)
                } else {
                    let state = Dial::Greeting {
                        link,
                        sent,
                        buffer,
                        have,
                    };
                    (state, moved != Moved::Nothing)
                }
            }
        };
        if let Some(dialed) = self.dialed.get_mut(index) {
            dialed.state = state;
        }
        Ok(more)
    }

    /// Its address may have changed: ask the store again.
    fn forget(&mut self, rank: u32) {
        if let Some(slot) = self.cards.get_mut(rank as usize) {
            *slot = None;
        }
    }

    fn answered(
        &mut self,
        rank: u32,
        lane: Lane,
        link: Link,
        buffer: &[u8; Hello::BYTES],
        address: SocketAddr,
    ) -> Result<()> {
        let protocol = |text: String| {
            self.named(
                Error::new(ErrorKind::Protocol, text)
                    .with_peer(rank)
                    .with_peer_address(address.to_string()),
            )
        };
        let hello = Hello::decode(buffer)
            .ok_or_else(|| protocol("answered with something that is not this protocol".into()))?;
        self.compare(&hello, &address.to_string())?;
        if hello.rank != rank || hello.lane != lane || hello.epoch != self.configuration.epoch.0 {
            return Err(protocol(format!(
                "answered as rank {} of epoch {}; expected rank {rank} of epoch {}",
                hello.rank, hello.epoch, self.configuration.epoch
            )));
        }
        if let Some(found) = self.found.get_mut(rank as usize) {
            found.address = address.to_string();
            match lane {
                Lane::Data => found.data = Some(link),
                Lane::Control => found.control = Some(link),
            }
        }
        Ok(())
    }
}

/// Begins a non-blocking connection.
fn begin(address: SocketAddr) -> std::io::Result<OwnedFd> {
    let family = if address.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok(fd),
        Err(e) => Err(e.into()),
    }
}

/// `None` while the connection is being made.
fn connected(fd: &OwnedFd) -> Option<std::io::Result<()>> {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match poll(&mut fds, Some(&now)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => None,
        Ok(_) => Some(match rustix::net::sockopt::socket_error(fd) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) | Err(e) => Err(e.into()),
        }),
        Err(e) => Some(Err(e.into())),
    }
}
