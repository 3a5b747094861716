//! Large payloads over several connections to one rank (the hint `connections`), for links that one connection does not fill.
//!
//! The frame's header goes over the first connection as always. Where a pair has rails beside that, a payload of at least [`FROM`] bytes
//! follows over these in pieces of [`STRIPE`] bytes: whichever rail takes bytes gets the next piece, and each piece says whose it is and
//! where it belongs, so they land in any order. Only pieces of exactly the expected place and length are taken, each once
//! (INV-10). A rail that ends within a piece, or all that end, are the end of the rank.

use std::io::IoSlice;

use ftcore::{Error, ErrorKind, Result};

use crate::buffers::Memory;
use crate::port::{Port, Wire};
use crate::rail::{Out, Rail, whole};
use crate::schedule::{Landing, Span};
use crate::transfer::{Receiving, Sending, write};
use crate::transport::tcp::{Link, Moved};
use crate::wire::{DataHeader, Frame, PieceHeader, STRIPE};

/// Payloads of at least this many bytes go over the rails.
pub(crate) const FROM: usize = 2 * STRIPE;

/// True if a payload of that many bytes goes over the rails of `port`. The same on both ends: they have agreed on the number.
pub(crate) fn is_striped(port: &Port, length: usize) -> bool {
    !port.rails.is_empty() && length >= FROM
}

/// Writes some of a send to the connections of a rank, of its payload no more than the first `ready` bytes.
pub(crate) fn send(port: &mut Port, sending: &mut Sending, memory: &Memory, ready: usize) -> Moved {
    let striped = is_striped(port, sending.send.from.len());
    let Wire::Socket(link) = &mut port.wire else {
        return Moved::Nothing;
    };
    let mut bytes = 0;
    if !striped || sending.done < DataHeader::BYTES {
        if link.write_closed.is_some() {
            return Moved::Closed;
        }
        if !link.writable {
            return Moved::Nothing;
        }
        sending.striped = striped;
        let moved = write(link, sending, memory, if striped { 0 } else { ready });
        match moved {
            Moved::Bytes(n) if striped && sending.done >= DataHeader::BYTES => bytes = n,
            _ => return moved,
        }
    }
    let Some(header) = DataHeader::decode(&sending.header) else {
        return Moved::Nothing; // it was encoded here
    };
    let mut closed = false;
    for rail in &mut port.rails {
        match rail.send(sending, &header, memory, ready) {
            Moved::Bytes(n) => bytes += n,
            Moved::Nothing => {}
            Moved::Closed => closed = true,
        }
    }
    let pending = port.rails.iter().filter_map(|r| r.out.as_ref());
    let gone = pending.map(|o| o.offset + o.done.saturating_sub(PieceHeader::BYTES));
    sending.done = DataHeader::BYTES + gone.min().unwrap_or(sending.given);
    match bytes {
        0 if closed => Moved::Closed,
        0 => Moved::Nothing,
        n => Moved::Bytes(n),
    }
}

/// Reads some of a payload off the rails; true if bytes moved.
///
/// Errors: `Protocol` for a piece that is not one of this payload or the next ones.
pub(crate) fn collect(
    port: &mut Port,
    receiving: &mut Receiving,
    memory: &mut Memory,
    frame: Frame,
    limit: usize,
    blocked: &mut Option<u32>,
    reduce: impl Fn(&mut [u8], &[u8]) -> Result<()>,
) -> Result<bool> {
    let (mut moved, mut broken, mut open) = (false, false, false);
    for rail in &mut port.rails {
        match rail.collect(receiving, memory, frame, limit, &reduce) {
            Ok(Moved::Bytes(_)) => moved = true,
            Ok(Moved::Nothing) => open |= rail.link.read_closed.is_none(),
            // Closed between two pieces it has brought all that it was given.
            Ok(Moved::Closed) => broken |= rail.link.broke || rail.is_within(),
            Err(error) => return Err(port.blame(error)),
        }
    }
    if receiving.is_finished() {
        port.rails.iter_mut().for_each(|r| r.buffer = Vec::new());
    } else if !moved && (broken || !open) {
        *blocked = Some(receiving.recv.peer);
    }
    Ok(moved)
}

impl Rail {
    /// Goes on with the piece that is on its way, or takes the next one.
    fn send(&mut self, sending: &mut Sending, header: &DataHeader, memory: &Memory, ready: usize) -> Moved {
        if self.link.write_closed.is_some() {
            return Moved::Closed;
        }
        if !self.link.writable {
            return Moved::Nothing;
        }
        if self.out.is_none() {
            let length = sending.send.from.len();
            let next = sending.given + STRIPE.min(length - sending.given.min(length));
            if sending.given >= length || next > whole(ready, length) {
                return Moved::Nothing;
            }
            let piece = PieceHeader {
                epoch: header.epoch,
                seq: header.seq,
                round: header.round,
                offset: sending.given as u64,
                length: u32::try_from(next - sending.given).unwrap_or(0),
            };
            self.out = Some(Out {
                header: piece.encode(),
                offset: sending.given,
                length: next - sending.given,
                done: 0,
            });
            sending.given = next;
        }
        let Some(out) = &mut self.out else {
            return Moved::Nothing;
        };
        let from = &sending.send.from;
        let begin = from.range.start + out.offset;
        let span = Span::new(from.buffer, begin..begin + out.length);
        let mut slices = Vec::with_capacity(4);
        let rest = out.header.get(out.done..).unwrap_or(&[]);
        if !rest.is_empty() {
            slices.push(IoSlice::new(rest));
        }
        let gone = out.done.saturating_sub(PieceHeader::BYTES);
        memory.slices(&span, gone, &mut slices);
        let moved = self.link.write(&slices);
        if let Moved::Bytes(n) = moved {
            out.done += n;
            if out.done >= PieceHeader::BYTES + out.length {
                self.out = None;
            }
        }
        moved
    }

    /// Reads towards one piece, and lets it land.
    fn collect(
        &mut self,
        receiving: &mut Receiving,
        memory: &mut Memory,
        frame: Frame,
        limit: usize,
        reduce: impl Fn(&mut [u8], &[u8]) -> Result<()>,
    ) -> Result<Moved> {
        let mut moved = Moved::Nothing;
        loop {
            let Some(piece) = self.piece else {
                let rest = self.head.get_mut(self.have..).unwrap_or(&mut []);
                match look(&mut self.link, rest) {
                    Moved::Bytes(n) => self.have += n,
                    Moved::Closed if moved == Moved::Nothing => return Ok(Moved::Closed),
                    _ => return Ok(moved),
                }
                moved = Moved::Bytes(1);
                if self.have == PieceHeader::BYTES {
                    let piece = PieceHeader::decode(&self.head).ok_or_else(|| {
                        strange("sent something that is not a piece of a collective's data")
                    })?;
                    (self.piece, self.have, self.taken) = (Some(piece), 0, 0);
                }
                continue;
            };
            if piece.frame() != frame {
                // A rank that runs ahead waits here.
                let ahead = (piece.seq, piece.round) > (frame.seq, frame.round) && piece.epoch == frame.epoch;
                return match ahead {
                    true => Ok(moved),
                    false => Err(strange("sent a piece of data that was not asked for")),
                };
            }
            let (offset, length) = receiving.place_of(&piece)?;
            let copies = receiving.recv.landing == Landing::Copy;
            if self.taken < length {
                let target = if copies {
                    let target = memory.slice_mut(&receiving.recv.into, offset + self.taken)?;
                    let most = target.len().min(length - self.taken);
                    target.get_mut(..most).unwrap_or(&mut [])
                } else {
                    self.buffer.resize(length, 0);
                    self.buffer.get_mut(self.taken..).unwrap_or(&mut [])
                };
                match look(&mut self.link, target) {
                    Moved::Bytes(n) => self.taken += n,
                    Moved::Closed if moved == Moved::Nothing => return Ok(Moved::Closed),
                    _ => return Ok(moved),
                }
                moved = Moved::Bytes(1);
            }
            if self.taken < length {
                continue;
            }
            if !copies {
                if offset + length > limit {
                    return Ok(moved);
                }
                let with = match &receiving.recv.landing {
                    Landing::ReduceWith(with) => Some(with),
                    _ => None,
                };
                memory.land(&receiving.recv.into, offset, with, &mut self.buffer, reduce)?;
            }
            receiving.landed(offset, length);
            self.piece = None;
            return Ok(Moved::Bytes(1));
        }
    }
}

/// Reads if there may be something.
fn look(link: &mut Link, target: &mut [u8]) -> Moved {
    // Closed counts whether or not it was found readable, as with the first connection.
    if target.is_empty() || (!link.readable && link.read_closed.is_none()) {
        return Moved::Nothing;
    }
    link.read(target)
}

fn strange(text: &str) -> Error {
    Error::new(ErrorKind::Protocol, text)
}

impl Receiving {
    /// Where a piece of this payload belongs.
    fn place_of(&self, piece: &PieceHeader) -> Result<(usize, usize)> {
        let total = self.recv.into.len();
        let place = usize::try_from(piece.offset).ok().filter(|o| *o < total);
        let place = place.filter(|offset| {
            let length = STRIPE.min(total - offset);
            let index = offset / STRIPE;
            let missing = self.pieces.get(index).is_some_and(|landed| !landed);
            offset.is_multiple_of(STRIPE) && piece.length as usize == length && missing
        });
        let offset = place.ok_or_else(|| {
            strange(&format!(
                "sent {} bytes for offset {} of a payload of {total}, which is no piece that is missing",
                piece.length, piece.offset
            ))
        })?;
        Ok((offset, piece.length as usize))
    }

    /// A piece is where it belongs.
    fn landed(&mut self, offset: usize, length: usize) {
        if let Some(landed) = self.pieces.get_mut(offset / STRIPE) {
            *landed = true;
        }
        if offset == self.done {
            self.done += length;
            let total = self.recv.into.len();
            while self.pieces.get(self.done / STRIPE).is_some_and(|landed| *landed) && self.done < total {
                self.done = total.min(self.done + STRIPE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use ftcore::{Collective, Epoch, Tensor};

    use super::*;
    use crate::buffers::Map;
    use crate::schedule::{Buffer, Send};

    #[test]
    fn what_counts_as_gone_ends_before_the_first_byte_that_is_not() {
        let bytes = 12 * STRIPE + 100;
        let pair = || {
            let (near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            (Link::local(near, Default::default()).unwrap(), far)
        };
        let (first, mut frames) = pair();
        let (links, mut far): (Vec<_>, Vec<_>) = (0..3).map(|_| pair()).unzip();
        let mut port = Port::new(1, "test".into(), Wire::Socket(first));
        port.rails = links.into_iter().map(Rail::new).collect();
        let mut map = Map::default();
        map.push(0, 0..bytes);
        let memory = Memory::new(vec![Tensor::from_vec(vec![1u8; bytes])], Map::default(), map);
        let header = DataHeader {
            epoch: Epoch(1),
            seq: 2,
            round: 3,
            algorithm: 8,
            contributors: 1,
            length: bytes as u64,
            fingerprint: Collective::Barrier.fingerprint(),
            lent: false,
        };
        let send_of = Send {
            peer: 1,
            from: Span::new(Buffer::Out, 0..bytes),
            slot: None,
        };
        let mut sending = Sending::new(send_of, header.encode());
        let mut arrived = vec![Vec::new(); 3];
        let mut turn = 0;
        while !sending.is_finished() {
            while send(&mut port, &mut sending, &memory, bytes) != Moved::Nothing {}
            // One of them takes nothing for a while, so that its piece lags behind.
            for (n, (far, arrived)) in far.iter_mut().zip(&mut arrived).enumerate() {
                let lags = n == 1 && turn % 5 != 4;
                let mut some = vec![0; if lags { 0 } else { 100_000 }];
                let read = far.read(&mut some).unwrap_or(0);
                arrived.extend_from_slice(&some[..read]);
            }
            turn += 1;
            for rail in &mut port.rails {
                rail.link.writable = true;
            }
            // The sockets hold what was not read: all that is gone has left `memory`.
            let pending = port.rails.iter().filter_map(|r| r.out.as_ref());
            let first_missing = pending
                .map(|o| o.offset + o.done.saturating_sub(PieceHeader::BYTES))
                .chain([sending.given])
                .min();
            assert_eq!(sending.done - DataHeader::BYTES, first_missing.unwrap());
        }
        assert!(turn > 5, "the sockets took all at once");
        // Every byte of every piece, once.
        let mut seen = vec![0; bytes];
        for (far, mut arrived) in far.iter_mut().zip(arrived) {
            let mut rest = vec![0; bytes];
            while let Ok(n @ 1..) = far.read(&mut rest) {
                arrived.extend_from_slice(&rest[..n]);
            }
            let mut left = arrived.as_slice();
            while let Some((head, after)) = left.split_first_chunk() {
                let piece = PieceHeader::decode(head).unwrap();
                assert_eq!((piece.epoch, piece.seq, piece.round), (Epoch(1), 2, 3));
                let (data, after) = after.split_at(piece.length as usize);
                for (at, byte) in (piece.offset as usize..).zip(data) {
                    seen[at] += byte;
                }
                left = after;
            }
        }
        assert!(seen.iter().all(|times| *times == 1));
        let mut head = [0; DataHeader::BYTES];
        frames.read_exact(&mut head).unwrap();
        assert_eq!(DataHeader::decode(&head), Some(header));
    }
}
