//! A ring of bytes with one writer and one reader in two processes.
//!
//! Positions only grow; a position modulo the capacity is the place. The writer's position and the reader's stand on cache
//! lines of their own, written by one side and read by the other. Neither side ever reads its own position back, and what it
//! reads of the other's must lie between the last one seen and its own.

use std::sync::atomic::Ordering;

use ftcore::{Error, ErrorKind, Result, copy_bytes};

use super::map::{Mapping, PAGE};

/// Bytes that fit. A multiple of every element size and of [`ALIGN`], so no element lies across the end.
pub(crate) const CAPACITY: usize = 256 * 1024;
/// Frames begin at multiples of this.
pub(crate) const ALIGN: usize = 64;

/// Where the positions stand: far enough apart that a prefetched neighbour line is not the other one's.
const WRITTEN: usize = 0;
const TAKEN: usize = 256;
/// Where the bytes begin.
const BYTES: usize = PAGE;
/// Bytes of a ring with its positions.
pub(super) const RING: usize = PAGE + CAPACITY;

fn corrupt(what: &str) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!("its {what} position in shared memory is impossible"),
    )
}

fn place(position: u64) -> usize {
    // Less than the capacity, which fits.
    (position % CAPACITY as u64) as usize
}

/// Bytes between two positions that are known to be at most a capacity apart.
fn between(low: u64, high: u64) -> usize {
    high.saturating_sub(low).min(CAPACITY as u64) as usize
}

/// The end that writes.
#[derive(Debug)]
pub(crate) struct Writer {
    ring: Mapping,
    at: u64,
    /// The reader's position when it was last looked at.
    taken: u64,
}

impl Writer {
    pub(super) fn new(ring: Mapping) -> Self {
        Self {
            ring,
            at: 0,
            taken: 0,
        }
    }

    /// Free bytes; looks at the reader's position only if fewer than `want` are known to be free.
    pub(crate) fn room(&mut self, want: usize) -> Result<usize> {
        let known = CAPACITY - between(self.taken, self.at);
        if known >= want {
            return Ok(known);
        }
        let taken = self.ring.word64::<TAKEN>().load(Ordering::Acquire);
        if taken < self.taken || taken > self.at {
            return Err(corrupt("reading"));
        }
        self.taken = taken;
        Ok(CAPACITY - between(taken, self.at))
    }

    /// Up to `most` bytes to fill, contiguous. The caller has asked for [`room`](Self::room).
    pub(crate) fn space(&mut self, most: usize) -> &mut [u8] {
        let free = CAPACITY - between(self.taken, self.at);
        let at = place(self.at);
        let len = most.min(free).min(CAPACITY - at);
        self.ring.write(BYTES + at, len)
    }

    /// Copies `bytes` (no more than there is room for) behind what was written before.
    pub(crate) fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = self.space(bytes.len());
            let len = space.len();
            let Some((head, tail)) = bytes.split_at_checked(len).filter(|(h, _)| !h.is_empty()) else {
                return;
            };
            copy_bytes(space, head);
            self.advance(len);
            bytes = tail;
        }
    }

    /// Where the next byte goes.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// True if the reader has given back all before `position`.
    pub(crate) fn is_back(&mut self, position: u64) -> Result<bool> {
        if self.taken < position {
            // More than is free: looks at the reader's position.
            self.room(CAPACITY + 1)?;
        }
        Ok(self.taken >= position)
    }

    /// Ends a frame: the next one begins on a line of its own.
    pub(crate) fn pad(&mut self) {
        self.at = self.at.next_multiple_of(ALIGN as u64);
    }

    /// `n` bytes of [`space`](Self::space) are filled.
    pub(crate) fn advance(&mut self, n: usize) {
        self.at += n as u64;
    }

    /// Back by `n` bytes, as only a damaged writer does.
    #[cfg(test)]
    pub(super) fn rewind(&mut self, n: u64) {
        self.at = self.at.saturating_sub(n);
    }

    /// Lets the reader see everything up to here.
    pub(crate) fn publish(&self) {
        self.ring.word64::<WRITTEN>().store(self.at, Ordering::Release);
    }
}

/// The end that reads.
#[derive(Debug)]
pub(crate) struct Reader {
    ring: Mapping,
    at: u64,
    /// The writer's position when it was last looked at.
    written: u64,
}

impl Reader {
    pub(super) fn new(ring: Mapping) -> Self {
        Self {
            ring,
            at: 0,
            written: 0,
        }
    }

    /// Bytes that can be read; looks at the writer's position only if fewer than `want` are known.
    pub(crate) fn available(&mut self, want: usize) -> Result<usize> {
        let known = between(self.at, self.written);
        if known >= want {
            return Ok(known);
        }
        let written = self.ring.word64::<WRITTEN>().load(Ordering::Acquire);
        if written < self.written || written.saturating_sub(self.at) > CAPACITY as u64 {
            return Err(corrupt("writing"));
        }
        self.written = written;
        Ok(between(self.at, written))
    }

    /// The contiguous bytes `skip` behind the reader's position, `most` at most.
    pub(crate) fn data(&self, skip: usize, most: usize) -> &[u8] {
        let have = between(self.at, self.written).saturating_sub(skip);
        let at = place(self.at + skip as u64);
        let len = most.min(have).min(CAPACITY - at);
        self.ring.read(BYTES + at, len)
    }

    /// Copies the next `N` bytes, if they are all there. Does not take them.
    pub(crate) fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        let mut out = [0; N];
        let mut done = 0;
        while let Some(rest) = out.get_mut(done..).filter(|r| !r.is_empty()) {
            let data = self.data(done, rest.len());
            let len = data.len();
            rest.get_mut(..len)
                .filter(|r| !r.is_empty())?
                .copy_from_slice(data);
            done += len;
        }
        Some(out)
    }

    /// Takes the padding of a frame.
    pub(crate) fn pad(&mut self) {
        self.at = self.at.next_multiple_of(ALIGN as u64);
    }

    /// Takes `n` bytes; the writer may use their room after [`release`](Self::release).
    pub(crate) fn take(&mut self, n: usize) {
        self.at += n as u64;
    }

    /// Gives the room of what was taken back to the writer, in whole lines: so there is always room for the padding of a
    /// frame whose last byte fits.
    pub(crate) fn release(&self) {
        let lines = self.at - self.at % ALIGN as u64;
        self.ring.word64::<TAKEN>().store(lines, Ordering::Release);
    }
}
