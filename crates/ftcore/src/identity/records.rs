//! The records of an encrypted connection: what its two ends seal what they send in, once the hello is said.
//!
//! A record is the length of its text (4 bytes), the text under AES-256-GCM and a tag of 16 bytes, which covers the length too. Each direction
//! has a key of its own and counts its records; the count is the nonce and does not travel. So a record that was changed, cut, left out,
//! repeated or put elsewhere on its way does not open. The keys are HKDF-SHA256 (RFC 5869) of the job's secret, salted with the random numbers of
//! both ends, over all that the hello said: service, epoch and ranks. After 2^20 records a direction goes on with a key made of the last
//! one (as RFC 8446 does, section 7.2), well below what one key of AES-GCM may seal. There is no IO here: [`Sealer`] and [`Opener`] move bytes
//! between buffers. The layout is in `docs/credentials-data-plane.md`.

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Range;

use ring::aead::{AES_256_GCM, Aad, Algorithm, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};

/// The most text in one record.
pub const MOST: usize = 64 * 1024;
/// What a record is longer than its text.
pub const OVERHEAD: usize = HEADER + TAG;
const HEADER: usize = 4;
const TAG: usize = 16;
/// Records under one key: 2^20 of 64 KiB are 2^32 blocks; RFC 8446, section 5.5, allows some 2^34.5.
const RECORDS: u64 = 1 << 20;
/// Room for what comes in: at first, and once a longer record comes.
const SMALL: usize = 16 * 1024;
const LARGE: usize = 2 * (MOST + OVERHEAD);

const KEY: &[u8] = b"oxccl record key 1";
const NEXT: &[u8] = b"oxccl record next 1";

/// A record that came in is not one that the peer sent next, or none can be made any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "an encrypted record of its connection does not open: it was changed, left out, repeated or put out of order on its way"
)]
pub struct NotAuthentic;

impl NotAuthentic {
    /// The one in an `io::Error`, if that came of it.
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<NotAuthentic> for io::Error {
    fn from(error: NotAuthentic) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// The key of one direction, and how many records it has sealed or opened.
struct Key {
    secret: Prk,
    key: LessSafeKey,
    count: u64,
    /// Records until the next key.
    renew: u64,
}

fn key_of(secret: &Prk) -> Result<LessSafeKey, NotAuthentic> {
    let algorithm: &'static Algorithm = &AES_256_GCM;
    let okm = secret.expand(&[KEY], algorithm).map_err(|_| NotAuthentic)?;
    Ok(LessSafeKey::new(UnboundKey::from(okm)))
}

impl Key {
    fn new(secret: Prk) -> Result<Self, NotAuthentic> {
        Ok(Self {
            key: key_of(&secret)?,
            secret,
            count: 0,
            renew: RECORDS,
        })
    }

    /// The nonce of the next record; the key is the one for it.
    fn next(&mut self) -> Result<Nonce, NotAuthentic> {
        if self.count > 0 && self.count.is_multiple_of(self.renew) {
            let okm = self
                .secret
                .expand(&[NEXT], HKDF_SHA256)
                .map_err(|_| NotAuthentic)?;
            let secret = Prk::from(okm);
            self.key = key_of(&secret)?;
            self.secret = secret;
        }
        let mut nonce = [0; NONCE_LEN];
        if let Some(end) = nonce.last_chunk_mut() {
            *end = self.count.to_be_bytes();
        }
        self.count = self.count.checked_add(1).ok_or(NotAuthentic)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// The keys of both directions: of what the caller sends, and of what the listener sends.
///
/// `salt` is the random numbers of both ends; `said` is all that the two have agreed about.
pub(super) fn keys(
    secret: &[u8; 32],
    salt: &[u8],
    said: &[&[u8]],
    label: [&[u8]; 2],
) -> Result<[Prk; 2], NotAuthentic> {
    let root = Salt::new(HKDF_SHA256, salt).extract(secret);
    let [caller, listener] = label.map(|label| {
        let mut info = vec![label];
        info.extend(said);
        root.expand(&info, HKDF_SHA256).map(Prk::from)
    });
    Ok([
        caller.map_err(|_| NotAuthentic)?,
        listener.map_err(|_| NotAuthentic)?,
    ])
}

/// Seals what one end sends.
pub struct Sealer {
    key: Key,
    /// The record that is on its way out; sent up to `at`.
    record: Vec<u8>,
    at: usize,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer")
            .field("records", &self.key.count)
            .finish_non_exhaustive()
    }
}

impl Sealer {
    pub(super) fn new(secret: Prk) -> Result<Self, NotAuthentic> {
        Ok(Self {
            key: Key::new(secret)?,
            record: Vec::new(),
            at: 0,
        })
    }

    /// What is to be sent of the record.
    pub fn pending(&self) -> &[u8] {
        self.record.get(self.at..).unwrap_or_default()
    }

    /// Makes a record of what `slices` hold behind the first `skip` bytes, of at most [`MOST`] bytes; of nothing, none. While one is still to be
    /// sent nothing happens: what is handed over must begin with the same bytes as before until [`sent`](Self::sent) says that they are out.
    ///
    /// # Errors
    /// The connection has sent 2^64 records.
    pub fn seal(&mut self, slices: &[IoSlice<'_>], skip: usize) -> Result<(), NotAuthentic> {
        if !self.pending().is_empty() {
            return Ok(());
        }
        self.record.clear();
        self.at = 0;
        self.record.extend([0; HEADER]);
        let (mut skip, mut room) = (skip, MOST);
        for slice in slices {
            let rest = slice.get(skip..).unwrap_or_default();
            skip = skip.saturating_sub(slice.len());
            let taken = rest.get(..room).unwrap_or(rest);
            self.record.extend_from_slice(taken);
            room -= taken.len();
        }
        let length = (self.record.len() - HEADER) as u32;
        if length == 0 {
            self.record.clear();
            return Ok(());
        }
        let sealed = length.to_le_bytes();
        let (Some(header), nonce) = (self.record.first_chunk_mut(), self.key.next()?) else {
            return Err(NotAuthentic);
        };
        *header = sealed;
        let text = self.record.get_mut(HEADER..).unwrap_or_default();
        let tag = self
            .key
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(sealed), text)
            .map_err(|_| NotAuthentic)?;
        self.record.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Has `send` write records until text of `bytes` is out with one: how many bytes of them.
    ///
    /// # Errors
    /// Those of [`seal`](Self::seal) and `send`; what `send` has left of a record goes out with the next call.
    pub fn write(
        &mut self,
        bytes: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            self.seal(&[IoSlice::new(bytes)], 0)?;
            if self.pending().is_empty() {
                return Ok(0);
            }
            match self.sent(send(self.pending())?) {
                0 => {}
                text => return Ok(text),
            }
        }
    }

    /// `n` bytes of [`pending`](Self::pending) were sent. Once that is all: how many bytes of text are out with it; before, 0.
    pub fn sent(&mut self, n: usize) -> usize {
        self.at = (self.at + n).min(self.record.len());
        match self.at == self.record.len() {
            true => self.record.len().saturating_sub(OVERHEAD),
            false => 0,
        }
    }
}

/// Opens what comes in.
pub struct Opener {
    key: Key,
    buffer: Vec<u8>,
    /// Of `buffer`: text of a record that was opened, and not taken yet.
    text: Range<usize>,
    /// Of `buffer`: what came in and was not opened yet.
    raw: Range<usize>,
    broken: bool,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener")
            .field("records", &self.key.count)
            .field("waiting", &self.raw.len())
            .finish_non_exhaustive()
    }
}

impl Opener {
    pub(super) fn new(secret: Prk) -> Result<Self, NotAuthentic> {
        Ok(Self {
            key: Key::new(secret)?,
            buffer: Vec::new(),
            text: 0..0,
            raw: 0..0,
            broken: false,
        })
    }

    /// The length of the next record, as far as that is known.
    fn wanted(&self) -> Result<usize, NotAuthentic> {
        let raw = self.buffer.get(self.raw.clone()).unwrap_or_default();
        let Some(header) = raw.first_chunk() else {
            return Ok(HEADER);
        };
        // Checked before memory is taken for it.
        match u32::from_le_bytes(*header) as usize {
            length @ 1..=MOST => Ok(length + OVERHEAD),
            _ => Err(NotAuthentic),
        }
    }

    /// True if nothing of a record is here, and no text that was not taken.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.raw.is_empty()
    }

    /// Where the next bytes that come in belong; never empty.
    pub fn room(&mut self) -> &mut [u8] {
        let wanted = self.wanted().unwrap_or(HEADER);
        if self.text.is_empty() && (self.raw.is_empty() || self.buffer.len() - self.raw.start < wanted) {
            self.buffer.copy_within(self.raw.clone(), 0);
            self.raw = 0..self.raw.len();
            self.text = 0..0;
        }
        if self.buffer.len() - self.raw.start < wanted || self.raw.end == self.buffer.len() {
            let grown = if self.raw.start + wanted <= SMALL && self.raw.end < SMALL {
                SMALL
            } else {
                LARGE.max(self.raw.start + wanted).max(self.raw.end + SMALL)
            };
            self.buffer.resize(grown, 0);
        }
        self.buffer.get_mut(self.raw.end..).unwrap_or_default()
    }

    /// `n` bytes came in and were put into [`room`](Self::room).
    pub fn received(&mut self, n: usize) {
        self.raw.end = (self.raw.end + n).min(self.buffer.len());
    }

    /// Bytes that came in elsewhere.
    pub fn came(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.room();
            let n = room.len().min(bytes.len());
            let (now, later) = bytes.split_at(n);
            if let Some(room) = room.get_mut(..n) {
                room.copy_from_slice(now);
            }
            self.received(n);
            bytes = later;
        }
    }

    /// Opens the next record if no text waits. True if there is text then.
    ///
    /// # Errors
    /// The record is not the one that the other end sent next. Every later call says so, too.
    pub fn open(&mut self) -> Result<bool, NotAuthentic> {
        if !self.text.is_empty() {
            return Ok(true);
        }
        if self.broken {
            return Err(NotAuthentic);
        }
        let opened = self.open_next();
        self.broken = opened.is_err();
        opened
    }

    fn open_next(&mut self) -> Result<bool, NotAuthentic> {
        let wanted = self.wanted()?;
        if wanted == HEADER || self.raw.len() < wanted {
            return Ok(false);
        }
        let nonce = self.key.next()?;
        let start = self.raw.start;
        let record = self.buffer.get_mut(start..start + wanted);
        let (header, sealed) = record
            .and_then(|record| record.split_first_chunk_mut::<HEADER>())
            .ok_or(NotAuthentic)?;
        let text = self
            .key
            .key
            .open_in_place(nonce, Aad::from(*header), sealed)
            .map_err(|_| NotAuthentic)?;
        self.text = start + HEADER..start + HEADER + text.len();
        self.raw.start = start + wanted;
        Ok(true)
    }

    /// As [`open`](Self::open), with what `receive` puts into the [`room`](Self::room) until a record is all here. False at the end of what
    /// comes in.
    ///
    /// # Errors
    /// Those of [`open`](Self::open) and `receive`.
    pub fn open_from(&mut self, mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<bool> {
        while !self.open()? {
            match receive(self.room())? {
                0 => return Ok(false),
                n => self.received(n),
            }
        }
        Ok(true)
    }

    /// The text of the record that was opened last, as far as it was not taken.
    pub fn text(&self) -> &[u8] {
        self.buffer.get(self.text.clone()).unwrap_or_default()
    }

    /// Takes text into `into`, opening a record if none waits; 0 if the next one is not all here (or `into` is empty).
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn take(&mut self, into: &mut [u8]) -> Result<usize, NotAuthentic> {
        if !self.open()? {
            return Ok(0);
        }
        let n = self.text.len().min(into.len());
        let from = self.buffer.get(self.text.start..self.text.start + n);
        if let (Some(into), Some(from)) = (into.get_mut(..n), from) {
            into.copy_from_slice(from);
        }
        self.text.start += n;
        Ok(n)
    }
}

#[cfg(test)]
#[path = "records/tests.rs"]
mod tests;
