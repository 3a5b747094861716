//! What travels: a header of 40 bytes, then the encoded values. The header lets ranks that disagree name both sides.

use std::sync::atomic::{AtomicBool, Ordering};

use ftcore::{Error, ErrorKind, Fingerprint, Result};

use crate::Codec;
use crate::codec::TILE;

/// Bytes before the values.
pub(crate) const HEADER: usize = 40;

const MAGIC: [u8; 4] = *b"oxq1";

/// Values between two looks at the order to stop.
const STEP: usize = 32 * TILE;

/// What all chunks of one operation have in common.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    pub(crate) codec: Codec,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) interrupt: &'a AtomicBool,
}

impl Frame<'_> {
    /// Bytes of a chunk of `count` values.
    pub(crate) fn len(&self, count: usize) -> usize {
        HEADER + self.codec.encoded_len(count)
    }

    fn go_on(&self) -> Result<()> {
        if self.interrupt.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Aborted,
                "ended while values were being converted",
            ));
        }
        Ok(())
    }

    /// Appends a chunk; without contributors its values are left zero. Returns how many values are not finite.
    pub(crate) fn write(&self, contributors: u32, values: &[f32], out: &mut Vec<u8>) -> Result<usize> {
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&u32::from(self.codec.code()).to_le_bytes());
        out.extend_from_slice(&contributors.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.fingerprint.encode());
        let mut non_finite = 0;
        if contributors == 0 {
            out.resize(out.len() + self.codec.encoded_len(values.len()), 0);
            return Ok(0);
        }
        for part in values.chunks(STEP) {
            self.go_on()?;
            non_finite += self.codec.encode(part, out);
        }
        Ok(non_finite)
    }

    /// Checks a chunk's header against this rank's. Returns the contributors and the encoded values.
    pub(crate) fn open<'b>(&self, chunk: &'b [u8], most: u32) -> Result<(u32, &'b [u8])> {
        let protocol = |text: String| Err(Error::new(ErrorKind::Protocol, text));
        let Some((header, values)) = chunk.split_first_chunk::<HEADER>() else {
            return protocol(format!("a chunk of {} bytes has no header", chunk.len()));
        };
        let (words, fingerprint) = header.split_at(HEADER - Fingerprint::BYTES);
        let (Some((magic, words)), Some(fingerprint)) =
            (words.split_first_chunk::<4>(), fingerprint.first_chunk())
        else {
            return protocol("a header of the wrong size".to_string());
        };
        let words: Vec<u32> = words
            .as_chunks::<4>()
            .0
            .iter()
            .map(|w| u32::from_le_bytes(*w))
            .collect();
        let [codec, contributors, _] = words[..] else {
            return protocol("a header of the wrong size".to_string());
        };
        if *magic != MAGIC {
            return protocol(format!("{magic:02x?} is not the beginning of a quantised chunk"));
        }
        if codec != u32::from(self.codec.code()) {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "sent format {codec}; this rank uses {} ({})",
                    self.codec.code(),
                    self.codec
                ),
            ));
        }
        let theirs = Fingerprint::decode(fingerprint);
        if theirs != self.fingerprint {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!("called {theirs}; this rank called {}", self.fingerprint),
            ));
        }
        if contributors > most {
            return protocol(format!(
                "claims {contributors} contributors where at most {most} are possible"
            ));
        }
        Ok((contributors, values))
    }

    /// Decodes into `out`, or adds to it.
    pub(crate) fn read(&self, bytes: &[u8], add: bool, out: &mut [f32]) -> Result<()> {
        let mut rest = bytes;
        for part in out.chunks_mut(STEP) {
            self.go_on()?;
            let Some((bytes, behind)) = rest.split_at_checked(self.codec.encoded_len(part.len())) else {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "a chunk is too short for its values",
                ));
            };
            rest = behind;
            if add {
                self.codec.decode_add(bytes, part)?;
            } else {
                self.codec.decode(bytes, part)?;
            }
        }
        Ok(())
    }
}
