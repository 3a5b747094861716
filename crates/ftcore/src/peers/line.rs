//! One control connection: the socket, and what seals and opens its bytes where the job encrypts them.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};

use crate::forked::Parents;
use crate::identity::records::{Opener, Sealer};
use crate::identity::strangers::Caller;
use crate::{Error, descriptors};

/// What the system did not let this rank do.
pub(super) fn refused_here(what: &str, error: io::Error) -> Error {
    descriptors::named(Error::io(what, error))
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection. Reads and writes are those of its socket, blocking or not.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) stream: Parents<TcpStream>,
    sealer: Option<Box<Sealer>>,
    opener: Option<Box<Opener>>,
    /// A record went out in part: nothing that is sent behind it could be read.
    broken: bool,
}

impl From<TcpStream> for Line {
    fn from(stream: TcpStream) -> Self {
        Self {
            stream: stream.into(),
            sealer: None,
            opener: None,
            broken: false,
        }
    }
}

impl Line {
    /// A second hand on the connection, for the one that reads; this one writes from now on.
    pub(crate) fn reader(&mut self) -> io::Result<Self> {
        let mut reader = Self::from(descriptors::with_room(|| self.stream.try_clone())?);
        reader.opener = self.opener.take();
        Ok(reader)
    }

    /// What can be read now, without taking it; 0 at the end. On an encrypted connection, of one record. Never blocks.
    pub(crate) fn peek(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(opener) = &mut self.opener else {
            let (n, _) = recv(&*self.stream, into, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
            return Ok(n);
        };
        opener.open_from(|room| {
            let (n, _) = recv(&*self.stream, room, RecvFlags::DONTWAIT)?;
            Ok(n)
        })?;
        let n = opener.text().len().min(into.len());
        if let (Some(into), Some(from)) = (into.get_mut(..n), opener.text().get(..n)) {
            into.copy_from_slice(from);
        }
        Ok(n)
    }
}

impl Line {
    /// True if the peer says nothing more. What it has said may be left to be read, and is all there.
    pub(crate) fn is_over(&self) -> bool {
        let mut socket = [PollFd::new(&*self.stream, PollFlags::RDHUP)];
        matches!(poll(&mut socket, Some(&Timespec::default())), Ok(1..))
    }

    /// True if the peer has ended it, and nothing is left to be read.
    pub(crate) fn has_ended(&mut self) -> bool {
        match self.peek(&mut [0]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

impl Caller for Line {
    fn encrypt(&mut self, (sealer, opener): (Sealer, Opener)) {
        (self.sealer, self.opener) = (Some(Box::new(sealer)), Some(Box::new(opener)));
    }
}

impl Read for Line {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(opener) = &mut self.opener else {
            return self.stream.read(into);
        };
        opener.open_from(|room| self.stream.read(room))?;
        Ok(opener.take(into)?)
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(sealer) = &mut self.sealer else {
            return self.stream.write(bytes);
        };
        if self.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.broken = true;
        let written = sealer.write(bytes, |record| {
            self.stream.write_all(record)?;
            Ok(record.len())
        })?;
        self.broken = false;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
