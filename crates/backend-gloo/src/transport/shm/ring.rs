//! A ring of bytes with one writer and one reader in two processes.
//!
//! Positions only grow; a position modulo the capacity is the place. The writer's position and the reader's stand on cache
//! lines of their own, written by one side and read by the other. Neither side ever reads its own position back, and what it
//! reads of the other's must lie between the last one seen and its own.
//!
//! A frame may be shown a second time, on a line of its own beside the positions: where it ends, a digest of its header, and its payload if that is
//! short. A reader that knows what header must come looks at that line alone; one line that crosses from core to core is most of what a short message
//! takes. The line is used again by a later frame, so it is read as a sequence lock is, and what is not found there is in the ring.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use ftcore::{Error, ErrorKind, Result, copy_bytes};

use super::map::{Mapping, PAGE};

/// Bytes that fit. A multiple of every element size and of [`ALIGN`], so no element lies across the end.
pub(crate) const CAPACITY: usize = 256 * 1024;
/// Frames begin at multiples of this.
pub(crate) const ALIGN: usize = 64;

/// Where the positions stand: far enough apart that a prefetched neighbour line is not the other one's.
const WRITTEN: usize = 0;
const TAKEN: usize = 256;
/// Where the lines begin on which frames are shown, and how many there are.
const SHOWN: usize = 512;
const LINES: u64 = 8;
/// Bytes of payload that fit there.
pub(crate) const SHOWN_BYTES: usize = 48;
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

/// The line of the frame that begins at `position`: its end, the digest of its header, and the payload.
fn line(ring: &Mapping, position: u64) -> Option<(&AtomicU64, &AtomicU64, &[AtomicU64])> {
    let number = (position / ALIGN as u64) % LINES;
    let [end, digest, payload @ ..] = ring.words::<8>(SHOWN + ALIGN * number as usize)?;
    Some((end, digest, payload))
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

    /// Shows the frame from `from` up to here, which was [published](Self::publish), on its line, too.
    pub(crate) fn show(&self, from: u64, digest: u64, payload: &[u8]) {
        let Some((end, sum, words)) = line(&self.ring, from) else {
            return;
        };
        end.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        sum.store(digest, Ordering::Relaxed);
        if payload.len() <= SHOWN_BYTES {
            for (word, bytes) in words.iter().zip(payload.chunks(8)) {
                let mut whole = [0; 8];
                for (to, from) in whole.iter_mut().zip(bytes) {
                    *to = *from;
                }
                word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
            }
        }
        end.store(self.at, Ordering::Release);
    }
}

/// A payload of up to [`SHOWN_BYTES`], as it was shown.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Shown([u8; SHOWN_BYTES]);

impl Shown {
    /// Its first `len` bytes.
    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        self.0.get(..len).unwrap_or(&[])
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

    /// Looks whether the frame that begins here was shown with that digest, and ends after `length` bytes. Its payload, if it is short enough to be
    /// there. Takes nothing.
    pub(crate) fn shown(&mut self, digest: u64, length: usize) -> Option<Shown> {
        let until = (self.at + length as u64).next_multiple_of(ALIGN as u64);
        let (end, sum, words) = line(&self.ring, self.at)?;
        if end.load(Ordering::Acquire) != until {
            return None;
        }
        let same = sum.load(Ordering::Relaxed) == digest;
        let mut payload = Shown([0; SHOWN_BYTES]);
        for (bytes, word) in payload.0.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        fence(Ordering::Acquire);
        if !same || end.load(Ordering::Relaxed) != until {
            return None;
        }
        // Published before it was shown.
        self.written = self.written.max(until);
        Some(payload)
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
