//! Connections that come in: taken, asked who they are, recognised or dropped. None of them can hold up the others.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ftcore::{Result, deadline_in};

use super::Rendezvous;
use crate::transport::tcp::{Link, Moved};
use crate::wire::{Hello, Lane};

/// A connection that has not said who it is by then is dropped.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that have not said who they are; beyond it new ones are dropped.
const MAX_STRANGERS: usize = 256;

/// A connection that came in and has not been recognised yet.
pub(super) struct Stranger {
    pub(super) link: Link,
    from: SocketAddr,
    buffer: [u8; Hello::BYTES],
    have: usize,
    pub(super) until: Instant,
}

impl Rendezvous<'_> {
    /// Takes what has come in.
    pub(super) fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if self.strangers.len() >= MAX_STRANGERS {
                        tracing::warn!(%from, "too many unrecognised connections; this one is dropped");
                        continue;
                    }
                    match Link::new(stream, self.counters.clone()) {
                        Ok(link) => self.strangers.push(Stranger {
                            link,
                            from,
                            buffer: [0; Hello::BYTES],
                            have: 0,
                            until: deadline_in(GREETING),
                        }),
                        Err(error) => tracing::warn!(%from, %error, "a connection was dropped"),
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Transient (a connection that was reset while it waited, no descriptors left): try again later.
                    tracing::debug!(%error, "accepting a connection failed");
                    return;
                }
            }
        }
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
                match stranger.link.read(rest) {
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
        // From here on it is one of ours. The answer lets it see a mismatch, too.
        let answer = self.hello(hello.lane, hello.nonce).encode();
        if link.write(&[IoSlice::new(&answer)]) != Moved::Bytes(Hello::BYTES) {
            return drop_it("it does not take the answer");
        }
        self.compare(&hello, &from.to_string())?;
        if hello.rank <= c.rank || hello.rank >= c.world_size {
            return drop_it("its rank does not connect to this one");
        }
        if let Some(found) = self.found.get_mut(hello.rank as usize) {
            found.address = from.to_string();
            // A second connection of a lane replaces the first: its rank did not see the answer and tried again.
            match hello.lane {
                Lane::Data => found.data = Some(link),
                Lane::Control => found.control = Some(link),
            }
        }
        Ok(())
    }
}
