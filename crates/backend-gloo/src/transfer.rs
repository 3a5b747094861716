//! Moves the bytes of one send or receive as far as its way allows: into a ring, out of a ring straight into the reduction, off a
//! socket by way of a private piece.

use std::io::IoSlice;

use ftcore::{DType, Error, ErrorKind, ReduceOp, Result, copy_bytes};

use crate::buffers::Memory;
use crate::kernels;
use crate::port::{Memory as Rings, Port};
use crate::rail;
use crate::schedule::{Landing, Recv, Send, Span};
use crate::transport::shm::{Lent, place_of};
use crate::transport::tcp::{Link, Moved};
use crate::wire::DataHeader;

/// Receives that reduce collect this many bytes off a socket before they run the kernel.
pub(crate) const PIECE: usize = 256 * 1024;
/// A call hands at most this much of a large send to a socket, so that what it copies is still in a cache when it is received.
const WRITE: usize = 192 * 1024;
/// What goes into a ring, or out of it, before the peer is shown.
pub(crate) const CHUNK: usize = 32 * 1024;
/// And so much of it before this rank looks elsewhere, also while the peer keeps up: it may be told to stop.
const PASS: usize = 1024 * 1024;
/// Payloads from this size on are read where they lie, if the peer can: less is copied sooner than it is agreed upon.
const LEND_FROM: usize = 16 * 1024;
/// What is read there before this rank looks elsewhere.
const LENT_CHUNK: usize = 256 * 1024;
/// The bytes that say where.
const PLACE: usize = 8;
/// Results of at least this many bytes are written past the caches: with the inputs, and on every rank of the host, they are
/// more than these hold.
pub(crate) const STREAM_FROM: usize = kernels::STREAM_FROM / 2;

/// A send in progress.
pub(crate) struct Sending {
    pub(crate) send: Send,
    pub(crate) header: [u8; DataHeader::BYTES],
    /// Its payload may stay where it is, if the peer can read it there.
    pub(crate) may_lend: bool,
    /// The peer reads it there.
    lent: Option<Lent>,
    /// Of header and payload; over several connections up to the first byte that is not out. What is lent is out once it is back.
    pub(crate) done: usize,
    /// Its payload goes over several connections.
    pub(crate) striped: bool,
    /// Bytes of payload that these were given.
    pub(crate) given: usize,
}

impl Sending {
    pub(crate) fn new(send: Send, header: [u8; DataHeader::BYTES]) -> Self {
        Self {
            send,
            header,
            may_lend: false,
            lent: None,
            done: 0,
            striped: false,
            given: 0,
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        !self.wants(self.send.from.len())
    }

    /// True if something can go out when the first `ready` bytes are there.
    pub(crate) fn wants(&self, ready: usize) -> bool {
        let ready = if self.striped {
            rail::whole(ready, self.send.from.len())
        } else {
            ready
        };
        self.done < DataHeader::BYTES + ready
    }
}

/// A receive in progress.
pub(crate) struct Receiving {
    pub(crate) recv: Recv,
    /// The header is here and fits.
    pub(crate) open: bool,
    /// Bytes of payload that have landed.
    pub(crate) done: usize,
    /// The payload stays in the sender's memory;
    pub(crate) lent: bool,
    /// there.
    place: Option<u64>,
    /// Where it is copied to, if it cannot be mapped.
    copied: Vec<u8>,
    /// Bytes that wait for the kernel.
    pub(crate) piece: Vec<u8>,
    pub(crate) filled: usize,
    /// Over several connections: which pieces have landed; `done` goes up to the first that has not. Empty otherwise.
    pub(crate) pieces: Vec<bool>,
}

impl Receiving {
    pub(crate) fn new(recv: Recv) -> Self {
        Self {
            recv,
            open: false,
            done: 0,
            lent: false,
            place: None,
            copied: Vec::new(),
            piece: Vec::new(),
            filled: 0,
            pieces: Vec::new(),
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.open && self.done >= self.recv.into.len()
    }
}

/// `into = from`, past the caches if it is part of something large.
pub(crate) fn copy(large: bool, into: &mut [u8], from: &[u8]) {
    if large {
        kernels::copy_stream(into, from);
    } else {
        copy_bytes(into, from);
    }
}

pub(crate) fn no_reduction() -> Error {
    Error::new(ErrorKind::Internal, "a schedule without a reduction asks for one")
}

/// Writes some of a send to a socket, of its payload no more than the first `ready` bytes.
pub(crate) fn write(link: &mut Link, sending: &mut Sending, memory: &Memory, ready: usize) -> Moved {
    let mut slices = Vec::with_capacity(4);
    let header = sending.header.get(sending.done..).unwrap_or(&[]);
    if !header.is_empty() {
        slices.push(IoSlice::new(header));
    }
    let from = &sending.send.from;
    let (start, gone) = (from.range.start, sending.done.saturating_sub(DataHeader::BYTES));
    let most = if from.len() >= STREAM_FROM {
        gone + WRITE
    } else {
        from.len()
    };
    let so_far = Span::new(from.buffer, start..start + ready.min(from.len()).min(most));
    memory.slices(&so_far, gone, &mut slices);
    let moved = link.write(&slices);
    if let Moved::Bytes(n) = moved {
        sending.done += n;
    }
    moved
}

/// Puts some of a send into a ring; true if bytes moved.
pub(crate) fn put(ring: &mut Rings, sending: &mut Sending, memory: &Memory) -> Result<bool> {
    if let Some(lent) = sending.lent.take() {
        if !ring.writer.is_back(lent.until)? {
            sending.lent = Some(lent);
            return Ok(false);
        }
        lent.returned();
        sending.done = DataHeader::BYTES + sending.send.from.len();
        ring.count_sent(sending.send.from.len());
        return Ok(true);
    }
    let mut moved = false;
    if sending.done == 0 {
        if let Some(place) = place_to_lend(sending, memory) {
            return lend(ring, sending, place);
        }
        if ring.writer.room(DataHeader::BYTES)? < DataHeader::BYTES {
            return Ok(false);
        }
        ring.writer.put(&sending.header);
        sending.done = DataHeader::BYTES;
        moved = true;
    }
    let until = sending.done.saturating_add(PASS);
    while !sending.is_finished() && sending.done < until {
        let room = ring.writer.room(CHUNK)?.min(CHUNK);
        let slice = memory.slice(&sending.send.from, sending.done - DataHeader::BYTES);
        let slice = slice
            .map(|s| s.get(..s.len().min(room)).unwrap_or(s))
            .unwrap_or(&[]);
        if slice.is_empty() {
            break;
        }
        ring.writer.put(slice);
        sending.done += slice.len();
        moved = true;
        if !sending.is_finished() {
            ring.publish();
            ring.ring();
        }
    }
    if sending.is_finished() {
        ring.writer.pad();
        ring.count_sent(sending.send.from.len());
    }
    if moved {
        ring.publish();
    }
    Ok(moved)
}

/// Where the payload lies, if the peer can read it there and that pays.
fn place_to_lend(sending: &Sending, memory: &Memory) -> Option<u64> {
    let from = &sending.send.from;
    if !sending.may_lend || from.len() < LEND_FROM {
        return None;
    }
    let whole = memory.slice(from, 0).filter(|slice| slice.len() == from.len())?;
    place_of(whole)
}

/// Tells the peer where the payload lies; true if there was room for it.
fn lend(ring: &mut Rings, sending: &mut Sending, place: u64) -> Result<bool> {
    const FRAME: usize = DataHeader::BYTES + PLACE;
    if ring.writer.room(FRAME)? < FRAME {
        return Ok(false);
    }
    DataHeader::lend(&mut sending.header);
    ring.writer.put(&sending.header);
    ring.writer.put(&place.to_le_bytes());
    ring.writer.pad();
    // Before the peer sees it.
    sending.lent = Some(ring.tensors.lend(ring.writer.position()));
    sending.done = DataHeader::BYTES;
    ring.publish();
    Ok(true)
}

/// As [`land`], out of the sender's memory.
fn read_lent(
    ring: &mut Rings,
    receiving: &mut Receiving,
    memory: &mut Memory,
    dtype: DType,
    op: Option<ReduceOp>,
    limit: usize,
) -> Result<bool> {
    let total = receiving.recv.into.len();
    let place = match receiving.place {
        Some(place) => place,
        None => {
            let here = ring.reader.available(PLACE)? >= PLACE;
            let Some(bytes) = ring.reader.peek::<PLACE>().filter(|_| here) else {
                return Ok(false);
            };
            let place = u64::from_le_bytes(bytes);
            if !place.is_multiple_of(dtype.size() as u64) {
                let text = format!("lends {dtype} at {place} of its memory, which is not aligned for it");
                return Err(Error::new(ErrorKind::Protocol, text));
            }
            *receiving.place.insert(place)
        }
    };
    let done = receiving.done;
    let len = total.min(limit).saturating_sub(done).min(LENT_CHUNK);
    if len == 0 {
        return Ok(false);
    }
    let from = place.saturating_add(done as u64);
    let mut piece = std::mem::take(&mut receiving.copied);
    let data = ring.tensors.read(from, len, &mut piece)?;
    apply(receiving, memory, dtype, op, data)?;
    receiving.copied = piece;
    if done + len == total {
        // Then what was read is no result. Why it gave up is on its way here, or its end is.
        if ring.tensors.gave_up() {
            return Ok(false);
        }
        ring.reader.take(PLACE);
        ring.reader.pad();
        ring.count_received(total);
        ring.release();
        ring.ring();
    }
    receiving.done += len;
    Ok(true)
}

/// Lets `data`, the next bytes of a payload, land.
fn apply(
    receiving: &mut Receiving,
    memory: &mut Memory,
    dtype: DType,
    op: Option<ReduceOp>,
    data: &[u8],
) -> Result<()> {
    let op = || op.ok_or_else(no_reduction);
    let (into, done) = (&receiving.recv.into, receiving.done);
    match &receiving.recv.landing {
        Landing::Copy | Landing::Past => {
            // What does not fit into the cache goes past it, unless it is about to be sent on.
            let large = into.len() >= STREAM_FROM || receiving.recv.landing == Landing::Past;
            memory.fold(into, done, data, |into, data| {
                copy(large, into, data);
                Ok(())
            })
        }
        Landing::Reduce | Landing::ReduceNext | Landing::Exchange => {
            memory.fold(into, done, data, |into, data| {
                kernels::reduce(dtype, op()?, into, data)
            })
        }
        Landing::ReduceWith(with) => {
            let apart = memory.fold_with(into, with, done, data, |into, wire, own| {
                kernels::reduce_into(dtype, op()?, into, wire, own)
            })?;
            if apart {
                return Ok(());
            }
            receiving.piece.clear();
            receiving.piece.extend_from_slice(data);
            memory.land(into, done, Some(with), &mut receiving.piece, |a, b| {
                kernels::reduce(dtype, op()?, a, b)
            })
        }
    }
}

/// Takes what a ring has for a receive, up to `limit`; true if bytes moved.
pub(crate) fn land(
    ring: &mut Rings,
    receiving: &mut Receiving,
    memory: &mut Memory,
    dtype: DType,
    op: Option<ReduceOp>,
    limit: usize,
) -> Result<bool> {
    if receiving.lent {
        return read_lent(ring, receiving, memory, dtype, op, limit);
    }
    let total = receiving.recv.into.len();
    let element = dtype.size();
    let mut moved = false;
    let until = receiving.done.saturating_add(PASS);
    while !receiving.is_finished() && receiving.done < until {
        let most = total.min(limit).saturating_sub(receiving.done).min(CHUNK);
        let have = ring.reader.available(most)?.min(most);
        // Whole elements: the writer may have been cut short in one.
        let data = ring.reader.data(0, have - have % element.max(1));
        if data.is_empty() {
            break;
        }
        let len = data.len();
        apply(receiving, memory, dtype, op, data)?;
        receiving.done += len;
        ring.reader.take(len);
        moved = true;
        if receiving.is_finished() {
            ring.reader.pad();
            ring.count_received(total);
        }
        ring.release();
        if !receiving.is_finished() {
            ring.ring();
        }
    }
    Ok(moved)
}

/// Reads some of a receive from a socket; true if bytes moved.
pub(crate) fn collect(
    port: &mut Port,
    receiving: &mut Receiving,
    memory: &mut Memory,
    limit: usize,
    blocked: &mut Option<u32>,
    reduce: impl Fn(&mut [u8], &[u8]) -> Result<()>,
) -> Result<bool> {
    let rank = receiving.recv.peer;
    let mut closed = |moved: Moved| {
        if moved == Moved::Closed {
            *blocked = Some(rank);
        }
        Ok(false)
    };
    if matches!(receiving.recv.landing, Landing::Copy | Landing::Past) {
        let target = memory.slice_mut(&receiving.recv.into, receiving.done)?;
        return match port.read(target) {
            Moved::Bytes(n) => {
                receiving.done += n;
                Ok(true)
            }
            other => closed(other),
        };
    }
    let want = (receiving.recv.into.len() - receiving.done).min(PIECE);
    let mut moved = false;
    if receiving.filled < want {
        if receiving.piece.is_empty() {
            receiving.piece = std::mem::take(&mut port.spare);
        }
        if receiving.piece.len() < want {
            receiving.piece.resize(want, 0);
        }
        let rest = receiving.piece.get_mut(receiving.filled..want).unwrap_or(&mut []);
        match port.read(rest) {
            Moved::Bytes(n) => receiving.filled += n,
            other => return closed(other),
        }
        moved = true;
    }
    if receiving.filled < want || receiving.done + want > limit {
        return Ok(moved);
    }
    let into = &receiving.recv.into;
    let with = match &receiving.recv.landing {
        Landing::ReduceWith(with) => Some(with),
        _ => None,
    };
    let piece = receiving.piece.get_mut(..want).unwrap_or(&mut []);
    memory.land(into, receiving.done, with, piece, reduce)?;
    receiving.done += want;
    receiving.filled = 0;
    if receiving.is_finished() {
        port.spare = std::mem::take(&mut receiving.piece);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use ftcore::{Tensor, deadline_in, time_left};

    use super::*;
    use crate::buffers::Map;
    use crate::schedule::{Buffer, Count};
    use crate::transport::shm::{Reader, Region, Writer};
    use crate::transport::tcp::Counters;

    const WHOLE: usize = 64 * PASS;

    /// What `ours` of [`WHOLE`] bytes has done by its first return, while `theirs` does the other side's part at once, again and again.
    fn in_one_pass(
        theirs: impl Fn(&mut Writer, &mut Reader) + Sync,
        ours: impl FnOnce(&mut Rings, &mut Memory, Span) -> usize,
    ) -> usize {
        let (a, b) = (Region::new(2).unwrap(), Region::new(2).unwrap());
        let handles =
            |of: &Region| Vec::<OwnedFd>::from(of.handles().map(|fd| fd.try_clone_to_owned().unwrap()));
        let at_a = a.open(0, 1, 1, handles(&b)).unwrap();
        let mut at_b = b.open(1, 0, 1, handles(&a)).unwrap().collectives;
        let mut rings = Rings::new(at_a.collectives, at_a.tensors, Arc::new(Counters::default()));
        let mut map = Map::default();
        map.push(0, 0..WHOLE);
        let mut memory = Memory::new(vec![Tensor::zeros(DType::U8, WHOLE)], map.clone(), map);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (theirs, done) = (&theirs, &done);
            scope.spawn(move || {
                let until = deadline_in(Duration::from_secs(60));
                while !done.load(Ordering::Acquire) && !time_left(until).is_zero() {
                    theirs(&mut at_b.writer, &mut at_b.reader);
                }
            });
            let moved = ours(&mut rings, &mut memory, Span::new(Buffer::Out, 0..WHOLE));
            done.store(true, Ordering::Release);
            moved
        })
    }

    #[test]
    fn a_pass_ends_though_the_peer_keeps_up_so_that_this_rank_hears_what_it_is_told() {
        // They copy nothing, so they are ahead of the side that does.
        let write = |writer: &mut Writer, _: &mut Reader| {
            let room = writer.room(CHUNK).unwrap().min(CHUNK);
            writer.advance(room);
            writer.publish();
        };
        let landed = in_one_pass(write, |rings, memory, into| {
            let mut receiving = Receiving::new(Recv {
                peer: 1,
                into,
                landing: Landing::Copy,
                count: Count::Ignore,
            });
            receiving.open = true;
            while receiving.done == 0 {
                land(rings, &mut receiving, memory, DType::U8, None, WHOLE).unwrap();
            }
            receiving.done
        });
        assert!(landed <= PASS + CHUNK, "{landed} bytes");
        let read = |_: &mut Writer, reader: &mut Reader| {
            let here = reader.available(CHUNK).unwrap().min(CHUNK);
            reader.take(here);
            reader.release();
        };
        let written = in_one_pass(read, |rings, memory, from| {
            let mut sending = Sending::new(
                crate::schedule::Send {
                    peer: 1,
                    from,
                    slot: None,
                },
                [0; DataHeader::BYTES],
            );
            put(rings, &mut sending, memory).unwrap();
            sending.done
        });
        assert!(written <= PASS + CHUNK + DataHeader::BYTES, "{written} bytes");
    }
}
