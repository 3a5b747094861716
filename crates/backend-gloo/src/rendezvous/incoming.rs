//! Connections that come in: what they are read and written by until they have said who they are, and what they are then.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ftcore::identity::records::{Opener, Sealer};
use ftcore::identity::strangers::{Caller, Greeted};
use ftcore::{Error, ErrorKind, Result, descriptors};

use super::{Common, Rendezvous};
use crate::options::Transport;
use crate::transport::lines;
use crate::transport::shm::HANDLES;
use crate::transport::tcp::{self, Counters, Link, Moved, Stream, moved};
use crate::wire::{Hello, Purpose};

/// A connection that came in and has not been recognised yet.
pub(super) struct Incoming {
    link: Link,
    /// It came over the Unix socket.
    local: bool,
    /// What it handed over.
    handles: Vec<OwnedFd>,
}

impl Incoming {
    fn new(link: Link, local: bool) -> Self {
        Self {
            link,
            local,
            handles: Vec::new(),
        }
    }

    /// The next one over TCP, and where it comes from. `control`: how its connections to other hosts are controlled.
    fn over_tcp(
        listener: &TcpListener,
        control: Option<&str>,
        counters: &Arc<Counters>,
    ) -> io::Result<(Result<Self>, String)> {
        let (stream, from) = listener.accept()?;
        if let Some(control) = control {
            tcp::pace_from_elsewhere(&stream, control);
        }
        let link = Link::new(stream, counters.clone());
        Ok((link.map(|link| Self::new(link, false)), from.to_string()))
    }

    /// The next one over the Unix socket.
    fn over_unix(listener: &UnixListener, counters: &Arc<Counters>) -> io::Result<(Result<Self>, String)> {
        let (stream, _) = listener.accept()?;
        let link = Link::local(stream, counters.clone());
        Ok((link.map(|link| Self::new(link, true)), "shared memory".to_owned()))
    }
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.local {
            return Stream(&mut self.link).read(into);
        }
        let done = self.link.read_handles(into, &mut self.handles);
        match self.link.starved {
            true => Err(rustix::io::Errno::MFILE.into()),
            false => moved(done, self.link.read_closed.as_deref()),
        }
    }
}

impl Write for Incoming {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Stream(&mut self.link).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Caller for Incoming {
    fn encrypt(&mut self, records: (Sealer, Opener)) {
        // Shared memory, and what is said about it, stays within the host.
        if !self.local {
            self.link.encrypt(records);
        }
    }
}

impl Rendezvous<'_> {
    /// Takes what has come in, and those that have said who they are by now.
    pub(super) fn greet(&mut self) -> Result<()> {
        let (control, counters) = (self.control.as_deref(), &self.counters);
        let over_tcp = || Incoming::over_tcp(&self.listener, control, counters);
        let mut taken = self.strangers.accept(over_tcp);
        if let Some((listener, _)) = &self.local {
            let over_unix = || Incoming::over_unix(listener, counters);
            taken = taken.and(self.strangers.accept(over_unix));
        }
        self.go_on_after(taken, 1, "accepting a connection")?;
        loop {
            match self.strangers.greeted() {
                Ok(Some(greeted)) => self.recognise(greeted)?,
                Ok(None) => return Ok(()),
                Err(error) => self.go_on_after(Err(error), HANDLES, "taking shared memory")?,
            }
        }
    }

    /// What the system refuses is transient (a connection that was reset while it waited), unless this process has no room for the `needed` descriptors
    /// of another one.
    fn go_on_after(&self, done: io::Result<()>, needed: usize, what: &str) -> Result<()> {
        match done {
            Err(error) if descriptors::is_limit(&error) && !descriptors::raise_for(needed) => {
                Err(self.named(descriptors::reached(what)))
            }
            Err(error) => {
                tracing::debug!(%error, "{what} failed");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// A connection has said who it is: takes it, drops it, or finds that the ranks do not fit together.
    fn recognise(&mut self, greeted: Greeted<Incoming, { Hello::BYTES }>) -> Result<()> {
        let Greeted {
            caller,
            from,
            proved,
            said,
        } = greeted;
        let Incoming {
            mut link,
            local,
            handles,
        } = caller;
        let c = self.configuration;
        let drop_it = |why: &str| {
            self.strangers.drop(&from, &why);
            Ok(())
        };
        let Some(hello) = Hello::decode(&said) else {
            return drop_it("it does not speak this protocol");
        };
        if hello.nonce != self.card.nonce {
            return drop_it("it was meant for another listener");
        }
        if hello.epoch != c.epoch {
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
                Err(error) => return Err(self.named(error)),
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
