//! Connections that come in: taken, asked who they are, recognised or dropped. None of them can hold up the others.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in};

use super::Rendezvous;
use crate::options::Transport;
use crate::transport::tcp::{self, Link, Moved};
use crate::wire::{Hello, Lane};

/// A connection that has not said who it is by then is dropped.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that have not said who they are; beyond it new ones are dropped.
const MAX_STRANGERS: usize = 256;

/// A connection that came in and has not been recognised yet.
pub(super) struct Stranger {
    pub(super) link: Link,
    from: String,
    /// It came over the Unix socket.
    local: bool,
    /// What it handed over.
    handles: Vec<OwnedFd>,
    buffer: [u8; Hello::BYTES],
    have: usize,
    pub(super) until: Instant,
}

impl Rendezvous<'_> {
    /// Takes what has come in.
    pub(super) fn accept(&mut self) {
        loop {
            let next = self.listener.accept().map(|(stream, from)| {
                if let Some(control) = &self.control {
                    tcp::pace_from_elsewhere(&stream, control);
                }
                let link = Link::new(stream, self.counters.clone());
                (link, from.to_string(), false)
            });
            if !self.greet(next) {
                break;
            }
        }
        loop {
            let Some((listener, _)) = &self.near else { return };
            let next = listener.accept().map(|(stream, _)| {
                let link = Link::local(stream, self.counters.clone());
                (link, "shared memory".to_string(), true)
            });
            if !self.greet(next) {
                return;
            }
        }
    }

    /// Takes one connection, if there is one. True if there may be more.
    fn greet(&mut self, next: std::io::Result<(Result<Link>, String, bool)>) -> bool {
        match next {
            Ok((_, from, _)) if self.strangers.len() >= MAX_STRANGERS => {
                tracing::warn!(%from, "too many unrecognised connections; this one is dropped");
            }
            Ok((Ok(link), from, local)) => self.strangers.push(Stranger {
                link,
                from,
                local,
                handles: Vec::new(),
                buffer: [0; Hello::BYTES],
                have: 0,
                until: deadline_in(GREETING),
            }),
            Ok((Err(error), from, _)) => tracing::warn!(%from, %error, "a connection was dropped"),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return false,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => {
                // Transient (a connection that was reset while it waited, no descriptors left): try again later.
                tracing::debug!(%error, "accepting a connection failed");
                return false;
            }
        }
        true
    }

    /// Reads towards the greetings of all strangers.
    pub(super) fn greet_strangers(&mut self) -> Result<()> {
        let now = Instant::now();
        let mut index = 0;
        while let Some(stranger) = self.strangers.get_mut(index) {
            let mut verdict = None;
            while stranger.have < Hello::BYTES {
                let Some(rest) = stranger.buffer.get_mut(stranger.have..) else {
                    break;
                };
                let moved = if stranger.local {
                    stranger.link.read_handles(rest, &mut stranger.handles)
                } else {
                    stranger.link.read(rest)
                };
                match moved {
                    Moved::Bytes(n) => stranger.have += n,
                    Moved::Nothing => break,
                    Moved::Closed => {
                        verdict = Some("it closed before it said who it is");
                        break;
                    }
                }
            }
            if verdict.is_none() && stranger.have < Hello::BYTES {
                if now < stranger.until {
                    index += 1;
                    continue;
                }
                verdict = Some("it did not say who it is in time");
            }
            let stranger = self.strangers.swap_remove(index);
            if let Some(why) = verdict {
                tracing::warn!(from = %stranger.from, why, "a connection was dropped");
                continue;
            }
            self.recognise(stranger)?;
        }
        Ok(())
    }

    /// A connection has said who it is: takes it, drops it, or finds that the ranks do not fit together.
    fn recognise(&mut self, stranger: Stranger) -> Result<()> {
        let Stranger {
            mut link,
            from,
            local,
            handles,
            buffer,
            ..
        } = stranger;
        let c = self.configuration;
        let drop_it = |why: &str| {
            tracing::warn!(%from, why, "a connection was dropped");
            Ok(())
        };
        let Some(hello) = Hello::decode(&buffer) else {
            return drop_it("it does not speak this protocol");
        };
        if hello.nonce != self.card.nonce {
            return drop_it("it was meant for another listener");
        }
        if hello.epoch != c.epoch.0 {
            return drop_it("it is of another epoch");
        }
        if (hello.lane == Lane::Local) != local {
            return drop_it("it came in at the wrong socket");
        }
        // From here on it is one of ours. The answer lets it see a mismatch, too.
        let answer = self.hello(hello.lane, hello.nonce).encode();
        let own = match self.near.as_ref().filter(|_| local) {
            Some((_, region)) => region.handles().to_vec(),
            None => Vec::new(),
        };
        if link.write_handles(&answer, &own) != Moved::Bytes(Hello::BYTES) {
            return drop_it("it does not take the answer");
        }
        self.compare(&hello, &from)?;
        if let Lane::Rail(number) = hello.lane
            && number >= self.settings.rails()
        {
            return drop_it("it is a connection too many");
        }
        if hello.rank <= c.rank || hello.rank >= c.world_size {
            return drop_it("its rank does not connect to this one");
        }
        if !local && self.settings.transport == Transport::Shm {
            let text = "transport=shm was asked for here, but it came over TCP";
            return Err(self.named(
                Error::new(ErrorKind::Unsupported, text)
                    .with_peer(hello.rank)
                    .with_peer_address(from),
            ));
        }
        let memory = match self.near.as_ref().filter(|_| local) {
            Some((_, region)) => match region.open(c.rank, hello.rank, handles) {
                Ok(shared) => Some(shared),
                Err(error) => {
                    let error = error.with_peer(hello.rank);
                    return Err(self.named(error));
                }
            },
            None => None,
        };
        if let Some(found) = self.found.get_mut(hello.rank as usize) {
            // A second connection of a lane replaces the first: its rank did not see the answer and tried again.
            found.take(hello.lane, link, memory, from);
        }
        Ok(())
    }
}
