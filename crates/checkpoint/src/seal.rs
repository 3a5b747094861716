//! The seal of a file: a BLAKE3 hash over every byte of it, inside its own header.
//!
//! The header of a sealed file has a metadata entry of 64 digits. The hash is taken with zeros in their place, over the
//! length, the header and all tensors, and then written there. So the file stays plain safetensors for other readers, and a
//! flipped bit anywhere is found by one pass over it, without decoding.

use std::fs::File;
use std::io::{ErrorKind as IoKind, Read};
use std::path::Path;

use ftcore::{Error, ErrorKind, Result};

use crate::codec::{LENGTH_BYTES, MAX_HEADER_BYTES, corrupt};

/// The metadata entry; before sealing its value is [`BLANK`].
pub(crate) const KEY: &str = "oxccl.seal";
/// As many zeros as a hash has digits.
pub(crate) const BLANK: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// How much is read at once.
const PART_BYTES: usize = 1 << 20;

/// Where the digits stand in a header. A quotation mark inside a name or a value is escaped, so that only the entry itself
/// looks like this.
fn digits(header: &[u8]) -> Option<std::ops::Range<usize>> {
    let before = format!("\"{KEY}\":\"");
    let at = header
        .windows(before.len())
        .position(|w| w == before.as_bytes())?;
    let start = at + before.len();
    let end = start + BLANK.len();
    (header.get(end) == Some(&b'"')).then_some(start..end)
}

fn header_end(bytes: &[u8]) -> Option<usize> {
    let length = bytes.first_chunk::<LENGTH_BYTES>()?;
    let header = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    header.checked_add(LENGTH_BYTES).filter(|end| *end <= bytes.len())
}

/// Seals encoded bytes whose header has the entry [`KEY`] with the value [`BLANK`].
pub(crate) fn seal(bytes: &mut [u8]) -> Result<()> {
    let place = header_end(bytes)
        .and_then(|end| bytes.get(..end))
        .and_then(digits)
        .ok_or_else(|| Error::new(ErrorKind::Internal, "a state to be sealed has no place for it"))?;
    let hash = blake3::hash(bytes).to_hex();
    if let Some(place) = bytes.get_mut(place) {
        place.copy_from_slice(hash.as_bytes());
    }
    Ok(())
}

/// A file of a state, of which the header has been read.
pub(crate) struct Opened {
    file: File,
    /// Of the whole file, when it was opened.
    size: u64,
    /// The length and the header as they stand in the file.
    head: Vec<u8>,
    /// The digits that the header claims, and the hash of what was read so far.
    seal: Option<(Vec<u8>, blake3::Hasher)>,
}

impl Opened {
    /// Opens `path` and reads the header: `NotFound`, `Io`, or `Corrupt` for a file that is shorter than it says.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| match e.kind() {
            IoKind::NotFound => Error::new(ErrorKind::NotFound, "no such file").with_source(e),
            IoKind::UnexpectedEof => corrupt("the file ends in its header").with_source(e),
            _ => Error::io("reading", e),
        };
        let mut file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut length = [0; LENGTH_BYTES];
        file.read_exact(&mut length).map_err(failed)?;
        let claimed = u64::from_le_bytes(length);
        let header = usize::try_from(claimed).unwrap_or(usize::MAX);
        if header > MAX_HEADER_BYTES || claimed > size.saturating_sub(LENGTH_BYTES as u64) {
            return Err(corrupt(format!(
                "a header of {claimed} bytes in a file of {size} (the limit is {MAX_HEADER_BYTES})"
            )));
        }
        let mut head = vec![0; LENGTH_BYTES.saturating_add(header)];
        if let Some((first, rest)) = head.split_first_chunk_mut::<LENGTH_BYTES>() {
            *first = length;
            file.read_exact(rest).map_err(failed)?;
        }
        let seal = digits(&head).and_then(|place| {
            let claimed = head.get(place.clone())?.to_vec();
            let mut hasher = blake3::Hasher::new();
            hasher.update(head.get(..place.start)?);
            hasher.update(BLANK.as_bytes());
            hasher.update(head.get(place.end..)?);
            Some((claimed, hasher))
        });
        Ok(Self {
            file,
            size,
            head,
            seal,
        })
    }

    /// The header, without the length before it.
    pub(crate) fn header(&self) -> &[u8] {
        self.head.get(LENGTH_BYTES..).unwrap_or_default()
    }

    /// How many bytes stood behind the header when the file was opened.
    pub(crate) fn data_bytes(&self) -> usize {
        let behind = self.size.saturating_sub(self.head.len() as u64);
        usize::try_from(behind).unwrap_or(usize::MAX)
    }

    /// True if the header has a seal.
    pub(crate) fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Reads the [`data_bytes`](Self::data_bytes) in parts, and gives each to `keep`. `Corrupt` if there are more or fewer by now, and at the end if
    /// the seal does not fit.
    pub(crate) fn read(mut self, keep: &mut dyn FnMut(&[u8])) -> Result<()> {
        let resized = || corrupt("its size changed while it was read");
        let mut left = self.data_bytes();
        let mut part = vec![0; PART_BYTES];
        loop {
            let got = match self.file.read(&mut part) {
                Ok(0) => break,
                Ok(got) => part.get(..got).unwrap_or_default(),
                Err(e) if e.kind() == IoKind::Interrupted => continue,
                Err(e) => return Err(Error::io("reading", e)),
            };
            left = left.checked_sub(got.len()).ok_or_else(resized)?;
            if let Some((_, hasher)) = &mut self.seal {
                hasher.update(got);
            }
            keep(got);
        }
        if left > 0 {
            return Err(resized());
        }
        match self.seal {
            // As text: capital digits would be the same number, and are damage all the same.
            Some((claimed, hasher)) if hasher.finalize().to_hex().as_bytes() != claimed => Err(corrupt(
                "its bytes are not those that were written (the hash differs)",
            )),
            _ => Ok(()),
        }
    }
}
