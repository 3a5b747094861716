//! One control connection: the socket, and what seals and opens its bytes where the job encrypts them.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;

use crate::forked::Parents;
use crate::identity::records::{Opener, Sealer};
use crate::identity::strangers::Caller;

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
        let mut reader = Self::from(self.stream.try_clone()?);
        reader.opener = self.opener.take();
        Ok(reader)
    }

    /// What can be read, without taking it; 0 at the end. On an encrypted connection, of one record.
    pub(crate) fn peek(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(opener) = &mut self.opener else {
            return self.stream.peek(into);
        };
        while !opener.open()? {
            match self.stream.read(opener.room())? {
                0 => return Ok(0),
                n => opener.received(n),
            }
        }
        let n = opener.text().len().min(into.len());
        if let (Some(into), Some(from)) = (into.get_mut(..n), opener.text().get(..n)) {
            into.copy_from_slice(from);
        }
        Ok(n)
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
        loop {
            match opener.take(into)? {
                0 => {}
                n => return Ok(n),
            }
            match self.stream.read(opener.room())? {
                0 => return Ok(0),
                n => opener.received(n),
            }
        }
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
        sealer.seal(&[IoSlice::new(bytes)], 0)?;
        let record = sealer.pending();
        self.stream.write_all(record)?;
        let out = record.len();
        self.broken = false;
        Ok(sealer.sent(out))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
