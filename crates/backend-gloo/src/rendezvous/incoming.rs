//! Connections that come in: taken, asked who they are, recognised or dropped. None of them can hold up the others.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ftcore::identity::TurnedAway;
use ftcore::identity::hello::{self, Handshake, NO_RANK, Reason, Refused};
use ftcore::{Error, ErrorKind, Result, deadline_in};

use super::{Common, Rendezvous};
use crate::limits;
use crate::options::Transport;
use crate::transport::lines;
use crate::transport::tcp::{self, Link, Moved, Stream};
use crate::wire::{Hello, Purpose};

/// A connection that has not said who it is by then is dropped.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that have not said who they are, beside those that the other ranks make; beyond it the oldest is dropped: a rank says at once who
/// it is.
const MAX_STRANGERS: usize = 256;
/// So many are taken before those that are there get a turn.
const AT_ONCE: usize = 64;

static TURNED_AWAY: TurnedAway = TurnedAway::new();

/// A connection that came in and has not been recognised yet.
pub(super) struct Stranger {
    pub(super) link: Link,
    from: String,
    /// It came over the Unix socket.
    local: bool,
    /// With credentials, until both ends have proved the job's secret.
    hello: Option<Box<Handshake>>,
    /// The rank as which it then proved itself.
    proved: Option<u32>,
    /// What it handed over.
    handles: Vec<OwnedFd>,
    buffer: [u8; Hello::BYTES],
    have: usize,
    pub(super) until: Instant,
}

/// What is wrong with a stranger.
enum Verdict {
    /// It is no rank, or gone.
    Drop(String),
    /// One of the two ends has no credentials, or those of another job.
    Refuse(String),
}

impl Stranger {
    /// With credentials, moves the hello on.
    fn prove(&mut self) -> Option<Verdict> {
        let mut hello = self.hello.take()?;
        match hello.advance(&mut Stream(&mut self.link)) {
            Ok(true) => {
                self.proved = Some(hello.topic().from());
                match hello.into_records() {
                    // Shared memory, and what is said about it, stays within the host.
                    Ok(Some(records)) if !self.local => self.link.encrypt(records),
                    Ok(_) => {}
                    Err(error) => return Some(Verdict::Drop(error.to_string())),
                }
                None
            }
            Ok(false) => {
                self.hello = Some(hello);
                None
            }
            Err(error) => Some(match Refused::of(&error) {
                Some(refused) => Verdict::Refuse(refused.to_string()),
                None => Verdict::Drop(format!("the hello came to nothing: {error}")),
            }),
        }
    }
}

impl Rendezvous<'_> {
    /// Takes what has come in.
    pub(super) fn accept(&mut self) -> Result<()> {
        for _ in 0..AT_ONCE {
            let next = self.listener.accept().map(|(stream, from)| {
                if let Some(control) = &self.control {
                    tcp::pace_from_elsewhere(&stream, control);
                }
                let link = Link::new(stream, self.counters.clone());
                (link, from.to_string(), false)
            });
            if !self.greet(next)? {
                break;
            }
        }
        for _ in 0..AT_ONCE {
            let Some((listener, _)) = &self.local else {
                return Ok(());
            };
            let next = listener.accept().map(|(stream, _)| {
                let link = Link::local(stream, self.counters.clone());
                (link, "shared memory".to_string(), true)
            });
            if !self.greet(next)? {
                break;
            }
        }
        Ok(())
    }

    /// Takes one connection, if there is one. True if there may be more.
    ///
    /// Errors: only that this process has no room for it.
    fn greet(&mut self, next: std::io::Result<(Result<Link>, String, bool)>) -> Result<bool> {
        match next {
            Ok((Ok(link), from, local)) => {
                if self.strangers.len() >= self.most_strangers() {
                    self.drop_oldest_stranger();
                }
                let credentials = self.settings.credentials.clone();
                let topic = self.topic(NO_RANK, self.configuration.rank);
                let hello = credentials.map(|c| Handshake::listen(c, topic).map(Box::new));
                match hello.transpose() {
                    Ok(hello) => self.strangers.push(Stranger {
                        link,
                        from,
                        local,
                        hello,
                        proved: None,
                        handles: Vec::new(),
                        buffer: [0; Hello::BYTES],
                        have: 0,
                        until: deadline_in(GREETING),
                    }),
                    Err(error) => TURNED_AWAY.say("gloo", &from, &error),
                }
            }
            Ok((Err(error), from, _)) => TURNED_AWAY.say("gloo", &from, &error),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if limits::is_limit(&error) && !limits::raise() => {
                return Err(self.named(limits::reached("accepting a connection")));
            }
            Err(error) => {
                // Transient (a connection that was reset while it waited): try again later.
                tracing::debug!(%error, "accepting a connection failed");
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Every other rank may come at once, with all its connections.
    fn most_strangers(&self) -> usize {
        let purposes = 3 + self.settings.rails() as usize;
        MAX_STRANGERS.saturating_add(purposes.saturating_mul(self.configuration.world_size as usize))
    }

    fn drop_oldest_stranger(&mut self) {
        let oldest = self.strangers.iter().enumerate().min_by_key(|(_, s)| s.until);
        if let Some(index) = oldest.map(|(index, _)| index) {
            let stranger = self.strangers.swap_remove(index);
            let why = "there are too many that have not said who they are, and it is the oldest";
            TURNED_AWAY.say("gloo", &stranger.from, &why);
        }
    }

    /// Reads towards the greetings of all strangers.
    pub(super) fn greet_strangers(&mut self) -> Result<()> {
        let now = Instant::now();
        let mut index = 0;
        while let Some(stranger) = self.strangers.get_mut(index) {
            let mut verdict = stranger.prove();
            while stranger.hello.is_none() && verdict.is_none() && stranger.have < Hello::BYTES {
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
                    Moved::Closed if stranger.link.starved && !limits::raise() => {
                        return Err(self.named(limits::reached("taking shared memory")));
                    }
                    Moved::Closed => {
                        verdict = Some(Verdict::Drop("it closed before it said who it is".into()))
                    }
                }
            }
            let seen = stranger.buffer.get(..stranger.have).unwrap_or_default();
            if stranger.proved.is_none() && hello::may_be_hello(seen) {
                let _ = std::io::Write::write(
                    &mut Stream(&mut stranger.link),
                    &hello::refusal(Reason::NoCredentials),
                );
                verdict = Some(Verdict::Refuse(Refused::no_credentials().to_string()));
            }
            if verdict.is_none() && stranger.have < Hello::BYTES {
                if now < stranger.until {
                    index += 1;
                    continue;
                }
                verdict = Some(Verdict::Drop("it did not say who it is in time".into()));
            }
            let mut stranger = self.strangers.swap_remove(index);
            match verdict {
                None => self.recognise(stranger)?,
                Some(Verdict::Drop(why)) => TURNED_AWAY.say("gloo", &stranger.from, &why),
                Some(Verdict::Refuse(why)) => {
                    Stream(&mut stranger.link).drain();
                    TURNED_AWAY.say("gloo", &stranger.from, &why);
                    self.turned_away = Some(format!("from {}: {why}", stranger.from));
                }
            }
        }
        Ok(())
    }

    /// A connection has said who it is: takes it, drops it, or finds that the ranks do not fit together.
    fn recognise(&mut self, stranger: Stranger) -> Result<()> {
        let Stranger {
            mut link,
            from,
            local,
            proved,
            handles,
            buffer,
            ..
        } = stranger;
        let c = self.configuration;
        let drop_it = |why: &str| {
            TURNED_AWAY.say("gloo", &from, &why);
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
        if proved.is_some_and(|rank| rank != hello.rank) {
            return drop_it("it proved itself as another rank");
        }
        if (hello.purpose == Purpose::Local) != local {
            return drop_it("it came in at the wrong socket");
        }
        // From here on it is one of ours. The answer lets it see a mismatch, too.
        let line = match local {
            true if hello.process == self.card.process => Common::Needless,
            true => match lines::known(hello.process, hello.line) {
                Some(line) => Common::Known(line),
                None => Common::New {
                    process: hello.process,
                    id: lines::new_id(),
                },
            },
            false => Common::Needless,
        };
        let answer = self.hello(hello.purpose, hello.nonce, line.id()).encode();
        let own = match self.local.as_ref().filter(|_| local) {
            Some((_, region)) => region.handles().to_vec(),
            None => Vec::new(),
        };
        let said = match local {
            true => link.write_handles(&answer, &own),
            false => link.write(&[IoSlice::new(&answer)]),
        };
        if said != Moved::Bytes(Hello::BYTES) {
            return drop_it("it does not take the answer");
        }
        self.compare(&hello, &from)?;
        if let Purpose::Rail(number) = hello.purpose
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
        let memory = match self.local.as_ref().filter(|_| local) {
            Some((_, region)) => match region.open(c.rank, hello.rank, hello.process, handles) {
                Ok(shared) => Some((shared, line)),
                Err(error) => {
                    let error = error.with_peer(hello.rank);
                    return Err(self.named(error));
                }
            },
            None => None,
        };
        if let Some(found) = self.found.get_mut(hello.rank as usize) {
            // A second connection of a purpose replaces the first: its rank did not see the answer and tried again.
            found.take(hello.purpose, link, memory, from);
        }
        Ok(())
    }
}
