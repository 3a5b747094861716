//! What travels: a header of 48 bytes, then the encoded values. The header lets ranks that disagree name both sides, and its checksum
//! covers header and values: what is summed here decides weights (INV-10).
//!
//! | bytes | what |
//! |---|---|
//! | 0–3 | `oxq3` |
//! | 4 | the format's code |
//! | 5 | the phase: 1 for a rank's own values, 2 for a result |
//! | 6–7 | zero |
//! | 8–11 | how many ranks contributed to the values; 0 says that they are all zero |
//! | 12–15 | CRC-32 (as in zip) of the chunk with these bytes zero |
//! | 16–23 | the number of values |
//! | 24–47 | the fingerprint of the operation that was called |

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use ftcore::{Error, ErrorKind, Fingerprint, Result, Tensor};

use crate::codec::rounding::splitmix64;
use crate::codec::{Codec, Encoding, Rounding};
use crate::kernels::BlockKernels;

/// Bytes before the values.
pub(crate) const HEADER: usize = 48;

const MAGIC: [u8; 4] = *b"oxq3";

/// Where the checksum lies.
const CHECKSUM: Range<usize> = 12..16;

/// Values between two looks at the order to stop, at least. Their bytes are still in the cache when the checksum is taken.
const STEP: usize = 1 << 18;

/// Values of a slice, at least. All ranks of an all-to-all that is short send to all others at about the same time, so that no link rests; long
/// ones go rank by rank, and a rank that is late leaves a link idle and fills another (measured: docs/quantisation.md).
const SLICE: usize = 1 << 16;

/// Slices of an operation, at most: each costs the delay of its links again, as far as it does not travel beside others.
const SLICES: usize = 64;

/// Values that travel together where the longest part of an operation has so many: no block lies in two slices of a part.
pub(crate) fn slice(codec: Codec, longest: usize) -> usize {
    SLICE
        .max(longest.div_ceil(SLICES))
        .next_multiple_of(codec.grain())
}

/// Whose values a chunk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// One rank's.
    Inputs = 1,
    /// The sum of all.
    Results = 2,
}

/// What all chunks of one operation have in common.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    pub(crate) codec: Codec,
    /// With the key of this operation.
    pub(crate) rounding: Rounding,
    pub(crate) rank: u32,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) interrupt: &'a AtomicBool,
    pub(crate) kernels: &'a dyn BlockKernels,
}

/// A chunk whose header has been checked; its checksum is checked while the values are read.
pub(crate) struct Opened<'a> {
    /// How many ranks contributed.
    pub(crate) contributors: u32,
    values: &'a [u8],
    begun: crc32fast::Hasher,
    checksum: u32,
}

fn protocol(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, text)
}

impl Frame<'_> {
    /// Bytes of a chunk of `count` values.
    pub(crate) fn len(&self, count: usize) -> usize {
        HEADER + self.codec.encoded_len(count)
    }

    fn step(&self) -> usize {
        STEP.next_multiple_of(self.codec.grain())
    }

    pub(crate) fn go_on(&self) -> Result<()> {
        if self.interrupt.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Aborted,
                "ended while values were being converted",
            ));
        }
        Ok(())
    }

    fn header(&self, phase: Phase, contributors: u32, count: usize) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        let fields: [&[u8]; 6] = [
            &MAGIC,
            &[self.codec.code(), phase as u8, 0, 0],
            &contributors.to_le_bytes(),
            &[0; 4],
            &(count as u64).to_le_bytes(),
            &self.fingerprint.encode(),
        ];
        for (to, from) in header.iter_mut().zip(fields.concat()) {
            *to = from;
        }
        header
    }

    /// How values are rounded in `phase`: ranks and phases draw different numbers.
    pub(crate) fn rounding(&self, phase: Phase) -> Rounding {
        match self.rounding {
            Rounding::Nearest => Rounding::Nearest,
            Rounding::Stochastic { key } => Rounding::Stochastic {
                key: splitmix64(key, u64::from(self.rank) << 8 | phase as u64),
            },
        }
    }

    /// Appends a chunk of `range` of `values`, whose first value has number `first` for stochastic rounding; without contributors its values are
    /// left zero. Returns how many values are not finite.
    pub(crate) fn write(
        &self,
        (phase, contributors): (Phase, u32),
        values: &Tensor,
        range: Range<usize>,
        first: usize,
        out: &mut Vec<u8>,
    ) -> Result<usize> {
        let start = out.len();
        out.reserve(self.len(range.len()));
        let header = self.header(phase, contributors, range.len());
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&header);
        out.extend_from_slice(&header);
        let mut non_finite = 0;
        if contributors == 0 {
            out.resize(start + self.len(range.len()), 0);
            checksum.update(out.get(start + HEADER..).unwrap_or_default());
        } else {
            let begin = range.start;
            for part in steps(range, self.step()) {
                self.go_on()?;
                let begins = out.len();
                let how = Encoding {
                    rounding: self.rounding(phase),
                    first: (first + part.start - begin) as u64,
                    ..Encoding::default()
                };
                non_finite += self.kernels.encode(self.codec, how, values, part, out)?;
                checksum.update(out.get(begins..).unwrap_or_default());
            }
        }
        let checksum = checksum.finalize().to_le_bytes();
        if let Some(to) = out.get_mut(start + CHECKSUM.start..start + CHECKSUM.end) {
            to.copy_from_slice(&checksum);
        }
        Ok(non_finite)
    }

    /// Checks the header of a chunk that should hold `count` values of `phase` with at most `most` contributors against this rank's call.
    ///
    /// Errors: `Protocol` for what is not such a chunk, `Mismatch` naming both sides for one of another format or operation.
    pub(crate) fn open<'b>(
        &self,
        chunk: &'b [u8],
        phase: Phase,
        count: usize,
        most: u32,
    ) -> Result<Opened<'b>> {
        let Some((header, values)) = chunk.split_first_chunk::<HEADER>() else {
            return Err(protocol(format!(
                "a chunk of {} bytes has no header",
                chunk.len()
            )));
        };
        let (contributors, checksum) = self.check(header, values.len(), phase, count, most)?;
        let mut begun = crc32fast::Hasher::new();
        begun.update(&self.header(phase, contributors, count));
        Ok(Opened {
            contributors,
            values,
            begun,
            checksum,
        })
    }

    /// As [`open`](Self::open) for a chunk on a device, of which the header was fetched: its contributors. The checksum covers the header.
    pub(crate) fn open_on_device(
        &self,
        header: &[u8],
        bytes: usize,
        phase: Phase,
        count: usize,
        most: u32,
    ) -> Result<u32> {
        let Ok(header) = <&[u8; HEADER]>::try_from(header) else {
            return Err(protocol(format!("a header of {} bytes", header.len())));
        };
        let (contributors, checksum) =
            self.check(header, bytes.saturating_sub(HEADER), phase, count, most)?;
        if crc32fast::hash(&self.header(phase, contributors, count)) == checksum {
            Ok(contributors)
        } else {
            Err(protocol(
                "the checksum of a chunk's header does not fit its bytes",
            ))
        }
    }

    /// The header of a chunk on a device, with its checksum: the values are not looked at on the host, and what carries them is trusted with
    /// them as it is with any tensor.
    pub(crate) fn header_on_device(&self, phase: Phase, contributors: u32, count: usize) -> [u8; HEADER] {
        let mut header = self.header(phase, contributors, count);
        let checksum = crc32fast::hash(&header).to_le_bytes();
        if let Some(to) = header.get_mut(CHECKSUM) {
            to.copy_from_slice(&checksum);
        }
        header
    }

    /// The contributors and the checksum that a header claims, if all else in it is as this rank expects. See [`open`](Self::open).
    fn check(
        &self,
        header: &[u8; HEADER],
        bytes: usize,
        phase: Phase,
        count: usize,
        most: u32,
    ) -> Result<(u32, u32)> {
        let (words, fingerprint) = header.split_at(HEADER - Fingerprint::BYTES);
        let (&[magic, kind, contributors, checksum, low, high], Some(fingerprint)) =
            (words.as_chunks::<4>().0, fingerprint.first_chunk())
        else {
            return Err(protocol("a header of the wrong size"));
        };
        let [codec, number, 0, 0] = kind else {
            return Err(protocol("a header with unknown flags"));
        };
        if magic != MAGIC {
            return Err(protocol(format!(
                "{magic:02x?} is not the beginning of a quantised chunk"
            )));
        }
        if codec != self.codec.code() {
            let text = format!(
                "sent format {codec}; this rank uses {} ({})",
                self.codec.code(),
                self.codec
            );
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        let theirs = Fingerprint::decode(fingerprint);
        if theirs != self.fingerprint {
            let text = format!("called {theirs}; this rank called {}", self.fingerprint);
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        if number != phase as u8 {
            return Err(protocol(format!(
                "sent phase {number} instead of {}",
                phase as u8
            )));
        }
        let claimed = u64::from(u32::from_le_bytes(low)) | u64::from(u32::from_le_bytes(high)) << 32;
        if claimed != count as u64 || bytes != self.codec.encoded_len(count) {
            return Err(protocol(format!(
                "claims {claimed} values in {} bytes where {count} in {} are expected",
                bytes,
                self.codec.encoded_len(count)
            )));
        }
        let contributors = u32::from_le_bytes(contributors);
        if contributors > most {
            return Err(protocol(format!(
                "claims {contributors} contributors where at most {most} are possible"
            )));
        }
        Ok((contributors, u32::from_le_bytes(checksum)))
    }

    /// Decodes an opened chunk into `range` of `values`, or adds to it; a chunk without contributors is left out.
    ///
    /// Errors: `Protocol` if the checksum does not fit; `values` is then undefined.
    pub(crate) fn read(
        &self,
        chunk: Opened<'_>,
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()> {
        let mut checksum = chunk.begun;
        let mut rest = chunk.values;
        for part in steps(range, self.step()) {
            self.go_on()?;
            let Some((bytes, behind)) = rest.split_at_checked(self.codec.encoded_len(part.len())) else {
                return Err(protocol("a chunk is too short for its values"));
            };
            rest = behind;
            checksum.update(bytes);
            if chunk.contributors > 0 {
                self.kernels.decode(self.codec, bytes, add, values, part)?;
            }
        }
        if checksum.finalize() == chunk.checksum {
            Ok(())
        } else {
            Err(protocol("the checksum of a chunk does not fit its bytes"))
        }
    }
}

/// `range` in pieces of `size`.
fn steps(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(size.max(1))
        .map(move |from| from..(from + size).min(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::block_kernels;
    use ftcore::{Collective, DType, DeviceKind, ReduceOp};
    use proptest::prelude::*;

    static GO: AtomicBool = AtomicBool::new(false);

    fn with_frame<T>(codec: Codec, f: impl FnOnce(&Frame<'_>) -> T) -> T {
        let kernels = block_kernels(&DeviceKind::Cpu).unwrap();
        let op = Collective::AllReduce {
            tensors: vec![Tensor::zeros(DType::F32, 300)],
            op: ReduceOp::Sum,
        };
        f(&Frame {
            codec,
            rounding: Rounding::Nearest,
            rank: 1,
            fingerprint: op.fingerprint(),
            interrupt: &GO,
            kernels: &*kernels,
        })
    }

    fn chunk(frame: &Frame<'_>) -> Vec<u8> {
        let values = Tensor::from_vec((0..300).map(|i| (i as f32).sin()).collect());
        let mut bytes = Vec::new();
        frame
            .write((Phase::Inputs, 1), &values, 0..300, 0, &mut bytes)
            .unwrap();
        assert_eq!(bytes.len(), frame.len(300));
        bytes
    }

    fn read(frame: &Frame<'_>, chunk: &[u8]) -> Result<Tensor> {
        let mut values = Tensor::zeros(DType::F32, 300);
        let opened = frame.open(chunk, Phase::Inputs, 300, 1)?;
        frame.read(opened, false, &mut values, 0..300)?;
        Ok(values)
    }

    #[test]
    fn a_header_that_lies_is_refused_by_what_it_lies_about() {
        with_frame(Codec::Int8B64, |frame| {
            let good = chunk(frame);
            read(frame, &good).unwrap();
            let refused = |bytes: &[u8], kind: ErrorKind, word: &str| {
                let e = read(frame, bytes).unwrap_err();
                assert!(e.kind() == kind && e.to_string().contains(word), "{word}: {e}");
            };
            let with = |at: usize, byte: u8| {
                let mut bytes = good.clone();
                bytes[at] = byte;
                bytes
            };
            refused(&with(0, b'x'), ErrorKind::Protocol, "beginning");
            refused(&with(4, Codec::MxE4M3.code()), ErrorKind::Mismatch, "format 6");
            refused(&with(4, 255), ErrorKind::Mismatch, "int8-b64");
            refused(&with(5, 2), ErrorKind::Protocol, "phase 2");
            refused(&with(6, 1), ErrorKind::Protocol, "flags");
            refused(&with(8, 2), ErrorKind::Protocol, "2 contributors");
            refused(&with(11, 0xff), ErrorKind::Protocol, "contributors");
            refused(&with(12, good[12] ^ 1), ErrorKind::Protocol, "checksum");
            refused(&with(16, 45), ErrorKind::Protocol, "claims 301 values");
            refused(&with(23, 0x80), ErrorKind::Protocol, "values");
            refused(&with(24, 1), ErrorKind::Mismatch, "broadcast");
            refused(&with(32, 45), ErrorKind::Mismatch, "301 elements");
            refused(&good[..good.len() - 1], ErrorKind::Protocol, "bytes");
            refused(&good[..HEADER - 1], ErrorKind::Protocol, "no header");
            refused(&[], ErrorKind::Protocol, "no header");
            refused(&[good.clone(), vec![0]].concat(), ErrorKind::Protocol, "bytes");
            // A contributor that says it is none: its values would be left out in silence.
            refused(&with(8, 0), ErrorKind::Protocol, "checksum");
        });
    }

    #[test]
    fn a_chunk_without_contributors_is_zero_and_checked_too() {
        with_frame(Codec::Int4Hadamard { seed: 3 }, |frame| {
            let values = Tensor::from_vec(vec![1.0f32; 300]);
            let mut bytes = Vec::new();
            frame
                .write((Phase::Inputs, 0), &values, 0..300, 0, &mut bytes)
                .unwrap();
            assert_eq!(bytes.len(), frame.len(300));
            assert_eq!(
                read(frame, &bytes).unwrap().as_slice::<f32>().unwrap(),
                [0.0; 300]
            );
            let last = bytes.len() - 1;
            bytes[last] = 1;
            assert_eq!(read(frame, &bytes).unwrap_err().kind(), ErrorKind::Protocol);
        });
    }

    #[test]
    fn ranks_and_shots_draw_random_numbers_of_their_own() {
        with_frame(Codec::Int4B64, |frame| {
            let values = Tensor::from_vec((0..300).map(|i| (i as f32).sin()).collect::<Vec<_>>());
            let coded = |rank, phase| {
                let frame = Frame {
                    rank,
                    rounding: Rounding::Stochastic { key: 3 },
                    ..*frame
                };
                let mut bytes = Vec::new();
                frame.write((phase, 1), &values, 0..300, 0, &mut bytes).unwrap();
                bytes.split_off(HEADER)
            };
            let all = [
                coded(0, Phase::Inputs),
                coded(1, Phase::Inputs),
                coded(0, Phase::Results),
                coded(1, Phase::Results),
            ];
            for (i, one) in all.iter().enumerate() {
                assert!(all[i + 1..].iter().all(|other| one != other), "{i}");
            }
            assert_eq!(coded(1, Phase::Results), all[3], "a replay draws the same");
        });
    }

    #[test]
    fn an_order_to_stop_ends_the_conversion() {
        let stop = AtomicBool::new(true);
        with_frame(Codec::Int8B64, |frame| {
            let good = chunk(frame);
            let frame = Frame {
                interrupt: &stop,
                ..*frame
            };
            assert_eq!(read(&frame, &good).unwrap_err().kind(), ErrorKind::Aborted);
        });
    }

    proptest! {
        #[test]
        fn no_flipped_bit_goes_unnoticed(at in 0usize..10_000, bit in 0u8..8, codec in 0..Codec::ALL.len()) {
            with_frame(Codec::ALL[codec], |frame| {
                let mut bytes = chunk(frame);
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
                let e = read(frame, &bytes).unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::Protocol | ErrorKind::Mismatch), "{e}");
            });
        }

        #[test]
        fn no_bytes_make_it_panic_or_pass(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            with_frame(Codec::Int8B64, |frame| {
                let mut framed = chunk(frame);
                assert!(read(frame, &bytes).is_err());
                framed.truncate(HEADER);
                framed.extend_from_slice(&bytes);
                assert!(read(frame, &framed).is_err());
            });
        }
    }
}
