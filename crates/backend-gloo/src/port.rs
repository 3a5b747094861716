//! One other rank as a collective sees it: the way its data goes in and out, and the header that waits there.
//!
//! A frame is a header of 64 bytes and its payload. Over a socket a rank that runs ahead waits with one header read and the rest in
//! TCP; in shared memory everything waits in the ring. Frames in a ring begin on a line of their own.

use std::sync::Arc;
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};

use crate::rail::Rail;
use crate::transport::shm::{COLLECTIVES, Neighbour, Reader, Ringer, Rings, Writer};
use crate::transport::tcp::{Counters, Link, Moved};
use crate::wire::DataHeader;

/// Bytes that are read of a socket in the hope that a whole small frame is among them.
const INBOX: usize = 16 * 1024;

/// The way to a rank.
#[derive(Debug)]
pub(crate) enum Wire {
    /// A TCP connection.
    Socket(Link),
    /// Rings in shared memory.
    Memory(Memory),
}

/// Rings to and from a rank of this host.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) writer: Writer,
    pub(crate) reader: Reader,
    bell: Ringer<COLLECTIVES>,
    pub(crate) tensors: Neighbour,
    counters: Arc<Counters>,
    /// Written or taken since the peer's bell was last rung.
    pub(crate) stirred: bool,
    /// The peer is gone or has left, and how: what is in the ring is all there will be.
    pub(crate) closed: Option<String>,
}

impl Memory {
    pub(crate) fn new(rings: Rings<COLLECTIVES>, tensors: Neighbour, counters: Arc<Counters>) -> Self {
        Self {
            writer: rings.writer,
            reader: rings.reader,
            bell: rings.bell,
            tensors,
            counters,
            stirred: false,
            closed: None,
        }
    }

    /// Shows the peer what was written.
    pub(crate) fn publish(&mut self) {
        self.writer.publish();
        self.stirred = true;
    }

    /// Gives the room of what was taken back.
    pub(crate) fn release(&mut self) {
        self.reader.release();
        self.stirred = true;
    }

    /// Wakes the peer if it waits and something was written or taken.
    pub(crate) fn ring(&mut self) {
        if std::mem::take(&mut self.stirred) {
            self.bell.ring();
        }
    }

    /// A frame with that many bytes of payload has gone out.
    pub(crate) fn count_sent(&self, payload: usize) {
        self.counters.add_sent_local(DataHeader::BYTES + payload);
    }

    /// A frame with that many bytes of payload has come in.
    pub(crate) fn count_received(&self, payload: usize) {
        self.counters.add_received_local(DataHeader::BYTES + payload);
    }
}

/// Another rank's data.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) rank: u32,
    pub(crate) address: String,
    pub(crate) wire: Wire,
    /// The connections for large payloads; none where the first one carries them too.
    pub(crate) rails: Vec<Rail>,
    /// What was read of a socket and not yet taken: a header and what came with it. Begins at `from`, ends at `to`.
    inbox: Vec<u8>,
    from: usize,
    to: usize,
    /// Where a receive that reduces collects a piece; kept, since new memory costs page faults.
    pub(crate) spare: Vec<u8>,
    /// A header that was read and not yet taken by a receive.
    pub(crate) header: Option<DataHeader>,
    /// A receive has taken its header and reads the payload.
    pub(crate) in_payload: bool,
    /// Since when it is needed and closed, without a word on the control connection, and how often the engine's thread had
    /// looked there by then.
    pub(crate) suspect: Option<(Instant, u64)>,
}

impl Port {
    pub(crate) fn new(rank: u32, address: String, wire: Wire) -> Self {
        Self {
            rank,
            address,
            inbox: match wire {
                Wire::Socket(_) => vec![0; INBOX],
                Wire::Memory(_) => Vec::new(),
            },
            wire,
            rails: Vec::new(),
            from: 0,
            to: 0,
            spare: Vec::new(),
            header: None,
            in_payload: false,
            suspect: None,
        }
    }

    /// An error about this peer.
    pub(crate) fn error(&self, kind: ErrorKind, text: impl Into<String>) -> Error {
        self.blame(Error::new(kind, text))
    }

    /// Names this peer in an error that came out of its wire.
    pub(crate) fn blame(&self, error: Error) -> Error {
        error.with_peer(self.rank).with_peer_address(self.address.clone())
    }

    /// How it showed that nothing more comes or goes, if it did.
    pub(crate) fn closed(&self) -> Option<&str> {
        match &self.wire {
            Wire::Socket(link) => {
                let mut links = std::iter::once(link).chain(self.rails.iter().map(|r| &r.link));
                links.find_map(|l| l.read_closed.as_deref().or(l.write_closed.as_deref()))
            }
            Wire::Memory(memory) => memory.closed.as_deref(),
        }
    }

    /// Nothing more will come in.
    pub(crate) fn read_closed(&self) -> bool {
        match &self.wire {
            Wire::Socket(link) => link.read_closed.is_some(),
            Wire::Memory(memory) => memory.closed.is_some(),
        }
    }

    /// True if bytes that arrive now on a socket would be read.
    pub(crate) fn wants_read(&self) -> bool {
        self.in_payload || self.header.is_none()
    }

    /// Reads towards the next header, if none waits.
    ///
    /// Errors: also what is wrong with bytes that came in before.
    pub(crate) fn fill(&mut self) -> Result<()> {
        if let Wire::Socket(link) = &self.wire {
            link.authentic()?;
            self.rails.iter().try_for_each(|rail| rail.link.authentic())?;
        }
        if self.header.is_some() || self.in_payload {
            return Ok(());
        }
        match &mut self.wire {
            Wire::Memory(memory) => {
                let found = memory.reader.available(DataHeader::BYTES);
                let found = found.map_err(|e| e.with_peer(self.rank))?;
                let Some(bytes) = memory.reader.peek().filter(|_| found >= DataHeader::BYTES) else {
                    return Ok(());
                };
                memory.reader.take(DataHeader::BYTES);
                self.header = Some(decoded(&bytes)?);
            }
            Wire::Socket(link) => loop {
                let waiting = self.inbox.get(self.from..self.to).unwrap_or(&[]);
                if let Some((bytes, _)) = waiting.split_first_chunk() {
                    self.header = Some(decoded(bytes)?);
                    self.from += DataHeader::BYTES;
                    break;
                }
                if !link.readable {
                    break;
                }
                self.inbox.copy_within(self.from..self.to, 0);
                (self.from, self.to) = (0, self.to - self.from);
                let Some(rest) = self.inbox.get_mut(self.to..) else {
                    break;
                };
                match link.read(rest) {
                    Moved::Bytes(n) => self.to += n,
                    Moved::Nothing | Moved::Closed => break,
                }
            },
        }
        Ok(())
    }

    /// Reads payload of a socket into `target`, which is not empty.
    pub(crate) fn read(&mut self, target: &mut [u8]) -> Moved {
        let Wire::Socket(link) = &mut self.wire else {
            return Moved::Nothing;
        };
        let waiting = self.inbox.get(self.from..self.to).unwrap_or(&[]);
        let len = waiting.len().min(target.len());
        if let (Some(target), Some(waiting)) = (target.get_mut(..len), waiting.get(..len))
            && len > 0
        {
            target.copy_from_slice(waiting);
            self.from += len;
            return Moved::Bytes(len);
        }
        // Closed counts whether or not it was found readable: a closed socket is not watched, so this would not be told again.
        if !link.readable && link.read_closed.is_none() {
            return Moved::Nothing;
        }
        link.read(target)
    }

    /// The connection of that number: the first one, or a rail.
    pub(crate) fn link_mut(&mut self, number: usize) -> Option<&mut Link> {
        match (number.checked_sub(1), &mut self.wire) {
            (None, Wire::Socket(link)) => Some(link),
            (None, Wire::Memory(_)) => None,
            (Some(rail), _) => self.rails.get_mut(rail).map(|r| &mut r.link),
        }
    }

    /// All its connections.
    pub(crate) fn into_links(self) -> impl Iterator<Item = Link> {
        let first = match self.wire {
            Wire::Socket(link) => Some(link),
            Wire::Memory(_) => None,
        };
        first.into_iter().chain(self.rails.into_iter().map(|r| r.link))
    }

    /// True if a read would give something, or might.
    pub(crate) fn is_readable(&self) -> bool {
        // A part of a header gives nothing: its rest has to be waited for.
        let enough = if self.in_payload { 1 } else { DataHeader::BYTES };
        match &self.wire {
            Wire::Socket(link) => link.readable || self.to - self.from >= enough,
            Wire::Memory(_) => false,
        }
    }

    /// Wakes the peer if it shares memory, waits, and something was written or taken.
    pub(crate) fn ring(&mut self) {
        if let Wire::Memory(memory) = &mut self.wire {
            memory.ring();
        }
    }
}

/// A header that was read; an error if it is none.
pub(crate) fn decoded(bytes: &[u8; DataHeader::BYTES]) -> Result<DataHeader> {
    DataHeader::decode(bytes).ok_or_else(|| {
        Error::new(
            ErrorKind::Protocol,
            "sent something that is not a frame of a collective",
        )
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use ftcore::{Epoch, Fingerprint};

    use super::*;

    #[test]
    fn the_rest_of_a_header_that_came_in_two_parts_is_waited_for() {
        let (mut peer, own) = UnixStream::pair().unwrap();
        let link = Link::local(own, Arc::new(Counters::default())).unwrap();
        let mut port = Port::new(1, "here".to_owned(), Wire::Socket(link));
        let header = DataHeader {
            epoch: Epoch(3),
            seq: 4,
            round: 5,
            algorithm: 6,
            contributors: 1,
            length: 8,
            fingerprint: Fingerprint::decode(&[9; 24]),
            lent: false,
        };
        let bytes = header.encode();
        let (first, rest) = bytes.split_at(20);
        peer.write_all(first).unwrap();
        port.fill().unwrap();
        // Who believed that there is more would never ask the socket again.
        assert!(port.header.is_none() && port.wants_read() && !port.is_readable());
        peer.write_all(rest).unwrap();
        peer.write_all(&[7]).unwrap();
        port.link_mut(0).unwrap().readable = true;
        port.fill().unwrap();
        assert_eq!(port.header.take(), Some(header));
        port.link_mut(0).unwrap().readable = false;
        port.in_payload = true;
        assert!(port.is_readable(), "a byte of the payload came with the header");
    }
}
