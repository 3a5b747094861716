//! Connections to lower ranks: made, greeted, and tried again until the deadline if they break.

use std::io::IoSlice;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ftcore::identity::hello::{Handshake, Reason, Refused};
use ftcore::{Error, ErrorKind, Result, deadline_in, descriptors, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::card::Card;
use super::{Common, Rendezvous, topic};
use crate::options::Transport;
use crate::transport::lines;
use crate::transport::tcp::{Link, Moved, Stream, unpaced};
use crate::wire::{Hello, Purpose};

/// Between two attempts to reach a rank.
const RETRY: Duration = Duration::from_millis(30);
/// Attempts to get shared memory from a rank of this host, before it is reached over TCP.
const LOCAL_ATTEMPTS: u32 = 3;

/// One attempt to connect one purpose to a lower rank.
pub(super) enum Dial {
    Waiting {
        retry_at: Instant,
    },
    Connecting(OwnedFd),
    /// With credentials: both ends prove the job's secret before anything else is said.
    Proving {
        link: Link,
        hello: Box<Handshake>,
    },
    Greeting {
        link: Link,
        sent: usize,
        buffer: Box<[u8; Hello::BYTES]>,
        have: usize,
        /// What the rank handed over.
        handles: Vec<OwnedFd>,
    },
    Done,
}

/// One purpose to one lower rank.
pub(super) struct Dialed {
    pub(super) rank: u32,
    pub(super) purpose: Purpose,
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

    /// True if `rank` is to be reached through shared memory.
    fn is_local(&self, rank: u32, card: &Card) -> bool {
        let reachable = self.local.is_some() && card.memory.is_some() && self.is_this_host(card);
        let failures = self.refused.get(rank as usize).copied().unwrap_or(0);
        reachable
            && match self.settings.transport {
                Transport::Tcp => false,
                Transport::Shm => true,
                Transport::Auto => failures < LOCAL_ATTEMPTS,
                Transport::Mixed => {
                    failures < LOCAL_ATTEMPTS && (rank + self.configuration.rank).is_multiple_of(2)
                }
            }
    }

    /// True if this purpose is the way to its rank.
    pub(super) fn is_wanted(&self, dialed: &Dialed) -> bool {
        match self.cards.get(dialed.rank as usize) {
            Some(Some(card)) => (dialed.purpose == Purpose::Local) == self.is_local(dialed.rank, card),
            // Its address is being asked for again.
            _ => !matches!(dialed.state, Dial::Waiting { .. }),
        }
    }

    /// One step of one attempt; true if another step may follow at once.
    fn dial_one(&mut self, index: usize) -> Result<bool> {
        let Some(dialed) = self.dialed.get_mut(index) else {
            return Ok(false);
        };
        let (rank, purpose) = (dialed.rank, dialed.purpose);
        let Some(Some(card)) = self.cards.get(rank as usize) else {
            return Ok(false);
        };
        let local = self.is_local(rank, card);
        if self.settings.transport == Transport::Shm && !local {
            let text =
                "transport=shm was asked for, but that rank is on another host or offers no shared memory";
            return Err(self.named(Error::new(ErrorKind::Unsupported, text).with_peer(rank)));
        }
        if (purpose == Purpose::Local) != local {
            return Ok(false);
        }
        let card = card.clone();
        let address = self.address_of(&card);
        let within_host = self.is_this_host(&card);
        if !within_host && address.ip().is_loopback() && card.host != "unknown" {
            // What is asked of all ranks was seen to here.
            let text = match self.settings.is_open() {
                true => "is on another host and tells a loopback address: that is what its host's name, or the interface it was told to use, \
                         stands for there; set the option net_name, or host (OXCCL_GLOO_HOST), on that rank to an address that others can reach"
                    .to_owned(),
                false => format!(
                    "is on another host and listens on loopback only, as it has no credentials; set {} or, on a network that only the job \
                     can reach, {}=1 on all hosts",
                    ftcore::Credentials::VARIABLE,
                    ftcore::identity::INSECURE
                ),
            };
            return Err(self.named(Error::new(ErrorKind::Unavailable, text).with_peer(rank)));
        }
        let Some(dialed) = self.dialed.get_mut(index) else {
            return Ok(false);
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
            Dial::Waiting { .. } if purpose == Purpose::Local => {
                match begin_local(card.memory.as_deref().unwrap_or_default()) {
                    Ok(stream) => {
                        let link = Link::local(stream, self.counters.clone())?;
                        (self.begin_hello(link, rank)?, true)
                    }
                    Err(error) if descriptors::is_limit(&error) && !descriptors::raise() => {
                        return Err(self.named(descriptors::reached("connecting")));
                    }
                    Err(error) => {
                        tracing::debug!(rank, %error, "no way to its shared memory; trying again");
                        self.refuse(rank);
                        (again(), false)
                    }
                }
            }
            Dial::Waiting { .. } => match begin(address, within_host) {
                Ok(fd) => (Dial::Connecting(fd), true),
                Err(error) if descriptors::is_limit(&error) && !descriptors::raise() => {
                    return Err(self.named(descriptors::reached("connecting")));
                }
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
                    (self.begin_hello(link, rank)?, true)
                }
                Some(Err(error)) => {
                    tracing::debug!(rank, %address, %error, "connecting failed; trying again");
                    self.forget(rank);
                    (again(), false)
                }
            },
            Dial::Proving { mut link, mut hello } => match hello.advance(&mut Stream(&mut link)) {
                Ok(true) => {
                    let records = hello.into_records();
                    let records =
                        records.map_err(|e| self.named(Error::new(ErrorKind::Protocol, e.to_string())))?;
                    // Shared memory, and what is said about it, stays within the host.
                    if let Some(records) = records.filter(|_| purpose != Purpose::Local) {
                        link.encrypt(records);
                    }
                    (greeting(link), true)
                }
                Ok(false) => (Dial::Proving { link, hello }, false),
                Err(error) => {
                    match Refused::of(&error) {
                        // The port is another's by now: it is asked for again.
                        None => {}
                        Some(refused) if refused.reason() == Reason::OtherTopic => {}
                        Some(refused) => return Err(self.distrusts(rank, purpose, &card, refused)),
                    }
                    tracing::debug!(rank, %address, %error, "the hello came to nothing; trying again");
                    if purpose == Purpose::Local {
                        self.refuse(rank);
                    }
                    self.forget(rank);
                    (again(), false)
                }
            },
            Dial::Greeting {
                mut link,
                mut sent,
                mut buffer,
                mut have,
                mut handles,
            } => {
                let line = match purpose {
                    Purpose::Local => self.offer(rank, &card),
                    _ => 0,
                };
                let greeting = self.hello(purpose, card.nonce, line).encode();
                let rest = greeting.get(sent..).unwrap_or(&[]);
                let mut moved = Moved::Nothing;
                if rest.is_empty() {
                    if let Some(room) = buffer.get_mut(have..).filter(|r| !r.is_empty()) {
                        moved = if purpose == Purpose::Local {
                            link.read_handles(room, &mut handles)
                        } else {
                            link.read(room)
                        };
                        if let Moved::Bytes(n) = moved {
                            have += n;
                        }
                    }
                } else {
                    moved = match &self.local {
                        Some((_, region)) if purpose == Purpose::Local => {
                            // All of it goes at once into a fresh socket, the handles with it.
                            link.write_handles(rest, &region.handles())
                        }
                        _ => link.write(&[IoSlice::new(rest)]),
                    };
                    if let Moved::Bytes(n) = moved {
                        sent += n;
                    }
                }
                let seen = buffer.get(..have).unwrap_or_default();
                if let Some(refused) = Refused::seen_without_credentials(seen) {
                    return Err(self.distrusts(rank, purpose, &card, &refused));
                }
                if have == Hello::BYTES {
                    self.answered(rank, purpose, link, &buffer, handles)?;
                    (Dial::Done, false)
                } else if moved == Moved::Closed && link.starved {
                    return Err(self.named(descriptors::reached("taking shared memory")));
                } else if moved == Moved::Closed {
                    tracing::debug!(rank, %address, "the rank closed the connection; trying again");
                    if purpose == Purpose::Local {
                        self.refuse(rank);
                    }
                    self.forget(rank);
                    (again(), false)
                } else {
                    let state = Dial::Greeting {
                        link,
                        sent,
                        buffer,
                        have,
                        handles,
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

    /// The number of a line to the process of `rank` that this one knows, or 0. The same until the rank has answered or failed.
    fn offer(&mut self, rank: u32, card: &Card) -> u64 {
        let Some(slot) = self.lines.get_mut(rank as usize) else {
            return 0;
        };
        if slot.is_none() && card.process != self.card.process {
            *slot = lines::to(card.process);
        }
        slot.as_ref().map_or(0, |line| line.id())
    }

    /// What is said first on a connection to `rank`.
    fn begin_hello(&self, link: Link, rank: u32) -> Result<Dial> {
        let Some(credentials) = &self.settings.credentials else {
            return Ok(greeting(link));
        };
        let topic = topic(self.configuration, self.configuration.rank, rank);
        let hello = Box::new(Handshake::call(credentials.clone(), topic)?);
        Ok(Dial::Proving { link, hello })
    }

    /// One of the two has no credentials, or those of another job.
    fn distrusts(&self, rank: u32, purpose: Purpose, card: &Card, refused: &Refused) -> Error {
        let address = match purpose {
            Purpose::Local => "shared memory".to_string(),
            _ => self.address_of(card).to_string(),
        };
        let text = format!("that rank and this one do not trust each other: {refused}");
        self.named(
            Error::new(ErrorKind::Protocol, text)
                .with_peer(rank)
                .with_peer_address(address),
        )
    }

    /// Its address may have changed: ask the store again.
    fn forget(&mut self, rank: u32) {
        if let Some(slot) = self.cards.get_mut(rank as usize) {
            *slot = None;
        }
        if let Some(slot) = self.lines.get_mut(rank as usize) {
            *slot = None;
        }
    }

    /// The way through shared memory failed once more.
    fn refuse(&mut self, rank: u32) {
        if let Some(failures) = self.refused.get_mut(rank as usize) {
            *failures = failures.saturating_add(1);
        }
        self.forget(rank);
    }

    fn answered(
        &mut self,
        rank: u32,
        purpose: Purpose,
        link: Link,
        buffer: &[u8; Hello::BYTES],
        handles: Vec<OwnedFd>,
    ) -> Result<()> {
        let address = match self.cards.get(rank as usize) {
            _ if purpose == Purpose::Local => "shared memory".to_string(),
            Some(Some(card)) => self.address_of(card).to_string(),
            _ => String::new(),
        };
        let protocol = |text: String| {
            self.named(
                Error::new(ErrorKind::Protocol, text)
                    .with_peer(rank)
                    .with_peer_address(address.clone()),
            )
        };
        let hello = Hello::decode(buffer)
            .ok_or_else(|| protocol("answered with something that is not this protocol".into()))?;
        self.compare(&hello, &address)?;
        if hello.rank != rank || hello.purpose != purpose || hello.epoch != self.configuration.epoch {
            return Err(protocol(format!(
                "answered as rank {} of epoch {}; expected rank {rank} of epoch {}",
                hello.rank, hello.epoch, self.configuration.epoch
            )));
        }
        let memory = match &self.local {
            Some((_, region)) if purpose == Purpose::Local => {
                let own = self.configuration.rank;
                let opened = region.open(own, rank, hello.process, handles);
                let opened = opened.map_err(|e| self.named(e))?;
                let offered = self.lines.get(rank as usize).cloned().flatten();
                let line = match (hello.line, offered) {
                    (0, None) if hello.process == self.card.process => Common::Needless,
                    (0, _) => return Err(protocol("answered without a line of its process".into())),
                    (id, Some(line)) if line.id() == id => Common::Known(line),
                    (id, _) => Common::New {
                        process: hello.process,
                        id,
                    },
                };
                Some((opened, line))
            }
            _ => None,
        };
        if let Some(found) = self.found.get_mut(rank as usize) {
            found.take(purpose, link, memory, address);
        }
        Ok(())
    }

    fn address_of(&self, card: &Card) -> SocketAddr {
        match card.local {
            Some(local) if self.is_this_host(card) => local,
            _ => card.remote,
        }
    }

    fn is_this_host(&self, card: &Card) -> bool {
        ftcore::host_address::is_here(&card.host)
    }
}

/// A connection on which nothing was said yet.
pub(super) fn greeting(link: Link) -> Dial {
    Dial::Greeting {
        link,
        sent: 0,
        buffer: Box::new([0; Hello::BYTES]),
        have: 0,
        handles: Vec::new(),
    }
}

/// Connects to a Unix socket of this host: done at once, or refused.
fn begin_local(name: &str) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(UnixStream::from(fd))
}

/// Begins a non-blocking connection.
fn begin(address: SocketAddr, within_host: bool) -> std::io::Result<OwnedFd> {
    let family = if address.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    if within_host {
        unpaced(&fd);
    }
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
