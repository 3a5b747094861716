//! The bytes on the wire: the header of a data frame, the control frames, and the greeting of a new connection.
//!
//! Everything is little-endian and of fixed size, so a reader knows how much to expect before it reads. Decoding accepts
//! only what this version writes; lengths are checked against fixed limits before anything is allocated (INV-10), and
//! every frame carries its epoch (INV-1).

use ftcore::fields::{Put, Take};
use ftcore::{Epoch, ErrorKind, Fingerprint};

/// The longest text in an abort or leave frame; longer ones are cut.
pub(crate) const MAX_TEXT: usize = 4096;
/// The largest payload of one point-to-point data frame.
pub(crate) const SEGMENT: usize = 128 * 1024;
/// The bytes of one piece of a payload that goes over several connections; its last one may be shorter.
pub(crate) const STRIPE: usize = 256 * 1024;
/// The largest message whose bytes go through shared memory together with its offer.
pub(crate) const INLINE: usize = 8 * 1024;
/// The same over a connection. An offer and its answer cost two wake-ups, or the latency of a line; bytes are sent in vain only if the
/// receiver waits for a later message, since one that waits for none reads nothing.
pub(crate) const EAGER: usize = 1024 * 1024;

const DATA_MAGIC: u32 = 0x4F58_4744; // "OXGD"
const LENT_MAGIC: u32 = 0x4F58_474C; // "OXGL"
const CONTROL_MAGIC: u32 = 0x4F58_4743; // "OXGC"
const PIECE_MAGIC: u32 = 0x4F58_4750; // "OXGP"
const HELLO_MAGIC: u32 = 0x4F58_4748; // "OXGH"
/// Raised whenever a frame or the meaning of one changes.
pub(crate) const VERSION: u32 = 8;

/// What stands before the payload of every data frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataHeader {
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
    pub(crate) round: u32,
    /// `Algorithm as u32`.
    pub(crate) algorithm: u32,
    /// Ranks whose values are in the payload, where the payload is a reduction.
    pub(crate) contributors: u32,
    /// Bytes of payload.
    pub(crate) length: u64,
    pub(crate) fingerprint: Fingerprint,
    /// The payload does not follow, but where it lies in its sender's memory (`u64`).
    pub(crate) lent: bool,
}

impl DataHeader {
    pub(crate) const BYTES: usize = 64;

    /// Makes of an encoded header one whose payload is lent.
    pub(crate) fn lend(encoded: &mut [u8; Self::BYTES]) {
        let mut put = Put(encoded);
        put.u32(LENT_MAGIC);
    }

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = Put(&mut out);
        put.u32(if self.lent { LENT_MAGIC } else { DATA_MAGIC });
        put.u32(self.round);
        put.u64(self.epoch.0);
        put.u64(self.seq);
        put.u32(self.algorithm);
        put.u32(self.contributors);
        put.u64(self.length);
        put.bytes(&self.fingerprint.encode());
        out
    }

    /// A number that stands for an encoded header where there is no room for it: equal for equal ones, and else as good as never.
    pub(crate) fn digest(encoded: &[u8; Self::BYTES]) -> u64 {
        let (words, _) = encoded.as_chunks();
        words.iter().fold(0, |sum: u64, word| {
            (sum ^ u64::from_le_bytes(*word))
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .rotate_left(29)
        })
    }

    /// `None` if the magic is wrong.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut take = Take(bytes);
        let lent = match take.u32() {
            DATA_MAGIC => false,
            LENT_MAGIC => true,
            _ => return None,
        };
        let round = take.u32();
        let (epoch, seq) = (Epoch(take.u64()), take.u64());
        let (algorithm, contributors) = (take.u32(), take.u32());
        let length = take.u64();
        let fingerprint = Fingerprint::decode(&take.bytes());
        Some(Self {
            epoch,
            seq,
            round,
            algorithm,
            contributors,
            length,
            fingerprint,
            lent,
        })
    }
}

/// What identifies a frame among all that come from one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
    pub(crate) round: u32,
}

/// What stands before each piece of a payload that goes over several connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PieceHeader {
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
    pub(crate) round: u32,
    /// Where it begins in the payload of that frame.
    pub(crate) offset: u64,
    /// Bytes that follow.
    pub(crate) length: u32,
}

impl PieceHeader {
    pub(crate) const BYTES: usize = 36;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = Put(&mut out);
        put.u32(PIECE_MAGIC);
        put.u32(self.round);
        put.u64(self.epoch.0);
        put.u64(self.seq);
        put.u64(self.offset);
        put.u32(self.length);
        out
    }

    /// `None` if the magic or the length is not one that is written here.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut take = Take(bytes);
        if take.u32() != PIECE_MAGIC {
            return None;
        }
        let round = take.u32();
        let (epoch, seq, offset) = (Epoch(take.u64()), take.u64(), take.u64());
        let length = take.u32();
        (1..=STRIPE).contains(&(length as usize)).then_some(Self {
            epoch,
            seq,
            round,
            offset,
            length,
        })
    }

    /// The frame that it is a part of.
    pub(crate) fn frame(&self) -> Frame {
        Frame {
            epoch: self.epoch,
            seq: self.seq,
            round: self.round,
        }
    }
}

/// What a control frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ControlKind {
    /// "I have a message for you": tag, dtype, number of elements.
    Offer = 1,
    /// "Send it": the receive is posted.
    Accept = 2,
    /// A piece of the message.
    Data = 3,
    /// The group has failed; the text says why.
    Abort = 4,
    /// This rank leaves in good order; the text says why.
    Leave = 5,
    /// This rank is connected with all others: the first frame on every control connection.
    Ready = 6,
    /// An offer with the message itself behind it.
    Inline = 7,
    /// "I have it": the answer to that, if the receive was posted. Otherwise it counts as an offer.
    Taken = 8,
}

/// A control frame without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control {
    pub(crate) kind: ControlKind,
    /// Offer, Inline: dtype code. Abort: error code. Ready: one more than the core to which it is bound, or 0.
    pub(crate) code: u8,
    pub(crate) epoch: Epoch,
    /// The sender's number of the message. Ready: the lowest rank with which it shares memory, itself included. Abort: 1 from a rank that
    /// gives up its configuration.
    pub(crate) id: u64,
    /// Offer, Inline: tag. Abort: the rank the report is about, or `u32::MAX`. Ready: 1 if it shares memory with every rank.
    pub(crate) a: u32,
    /// Abort: the rank that saw it first.
    pub(crate) b: u32,
    /// Offer, Inline: number of elements. Otherwise: bytes of payload that follow.
    pub(crate) length: u64,
}

impl Control {
    pub(crate) const BYTES: usize = 40;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = Put(&mut out);
        put.u32(CONTROL_MAGIC);
        put.bytes(&[self.kind as u8, self.code, 0, 0]);
        put.u64(self.epoch.0);
        put.u64(self.id);
        put.u32(self.a);
        put.u32(self.b);
        put.u64(self.length);
        out
    }

    /// "I have it", about message `id` of the rank that this goes to.
    pub(crate) fn taken(epoch: Epoch, rank: u32, id: u64) -> Self {
        Self {
            kind: ControlKind::Taken,
            code: 0,
            epoch,
            id,
            a: 0,
            b: rank,
            length: 0,
        }
    }

    /// The same without the bytes that came along.
    pub(crate) fn as_offer(&self) -> Self {
        Self {
            kind: ControlKind::Offer,
            ..*self
        }
    }

    /// `None` if the magic, the kind or the length is not one that is written here.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut take = Take(bytes);
        if take.u32() != CONTROL_MAGIC {
            return None;
        }
        let [kind, code, _, _] = take.bytes();
        let kind = match kind {
            1 => ControlKind::Offer,
            2 => ControlKind::Accept,
            3 => ControlKind::Data,
            4 => ControlKind::Abort,
            5 => ControlKind::Leave,
            6 => ControlKind::Ready,
            7 => ControlKind::Inline,
            8 => ControlKind::Taken,
            _ => return None,
        };
        let (epoch, id) = (Epoch(take.u64()), take.u64());
        let (a, b) = (take.u32(), take.u32());
        let length = take.u64();
        let limit = match kind {
            ControlKind::Offer => u64::MAX,
            ControlKind::Accept | ControlKind::Ready | ControlKind::Taken => 0,
            ControlKind::Inline => EAGER as u64,
            ControlKind::Data => SEGMENT as u64,
            ControlKind::Abort | ControlKind::Leave => MAX_TEXT as u64,
        };
        (length <= limit).then_some(Self {
            kind,
            code,
            epoch,
            id,
            a,
            b,
            length,
        })
    }
}

/// The code of an error kind in an abort frame.
pub(crate) fn code_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Timeout => 1,
        ErrorKind::PeerLost => 2,
        ErrorKind::Mismatch => 3,
        ErrorKind::Protocol => 5,
        ErrorKind::Io => 6,
        ErrorKind::Internal => 7,
        _ => 4,
    }
}

/// The inverse of [`code_of`]; a code of a newer version counts as an abort.
pub(crate) fn kind_of(code: u8) -> ErrorKind {
    match code {
        1 => ErrorKind::Timeout,
        2 => ErrorKind::PeerLost,
        3 => ErrorKind::Mismatch,
        5 => ErrorKind::Protocol,
        6 => ErrorKind::Io,
        7 => ErrorKind::Internal,
        _ => ErrorKind::Aborted,
    }
}

/// The text of a frame, cut to [`MAX_TEXT`] bytes at a character boundary.
pub(crate) fn cut(text: &str) -> &str {
    text.get(..text.floor_char_boundary(MAX_TEXT)).unwrap_or("")
}

/// The most connections that can carry a payload.
pub(crate) const MAX_CONNECTIONS: u32 = 16;
/// The code of the first rail.
const FIRST_RAIL: u32 = 4;
/// The code behind the last one.
const MESSAGES: u32 = FIRST_RAIL + MAX_CONNECTIONS;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Collectives, strictly in the order of the schedule.
    Data,
    /// Pieces of large payloads: the rail of that number.
    Rail(u32),
    /// Aborts and leaves.
    Control,
    /// Point-to-point.
    Messages,
    /// As `Control`, over a Unix socket with the handles of shared memory that stands for `Data` and `Messages`.
    Local,
}

/// The first bytes in both directions of every connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u32,
    pub(crate) purpose: Purpose,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// How many connections carry a large payload.
    pub(crate) connections: u32,
    /// What links are taken for, as a code.
    pub(crate) links: u32,
    pub(crate) epoch: Epoch,
    /// Hash of everything that decides about algorithms and frames (INV-3).
    pub(crate) constants: u64,
    /// The secret that the listener published in the store: a stranger does not know it.
    pub(crate) nonce: u64,
    /// The process of the rank.
    pub(crate) process: u64,
    /// Of a connection within the host: the number of a line of the two processes. From the one that connects: one that it knows, or 0. The answer: the
    /// same if it is known there, else the number that this connection has as a line. 0 between ranks of one process.
    pub(crate) line: u64,
}

impl Hello {
    pub(crate) const BYTES: usize = 68;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = Put(&mut out);
        put.u32(HELLO_MAGIC);
        put.u32(self.version);
        put.u32(match self.purpose {
            Purpose::Data => 1,
            Purpose::Control => 2,
            Purpose::Local => 3,
            Purpose::Messages => MESSAGES,
            Purpose::Rail(number) => FIRST_RAIL.saturating_add(number),
        });
        put.u32(self.rank);
        put.u32(self.world);
        put.u32(self.connections);
        put.u32(self.links);
        put.u64(self.epoch.0);
        put.u64(self.constants);
        put.u64(self.nonce);
        put.u64(self.process);
        put.u64(self.line);
        out
    }

    /// `None` if it is not a greeting.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut take = Take(bytes);
        if take.u32() != HELLO_MAGIC {
            return None;
        }
        let version = take.u32();
        let purpose = match take.u32() {
            1 => Purpose::Data,
            2 => Purpose::Control,
            3 => Purpose::Local,
            MESSAGES => Purpose::Messages,
            purpose => match purpose.checked_sub(FIRST_RAIL) {
                Some(number) if number < MAX_CONNECTIONS => Purpose::Rail(number),
                _ => return None,
            },
        };
        Some(Self {
            version,
            purpose,
            rank: take.u32(),
            world: take.u32(),
            connections: take.u32(),
            links: take.u32(),
            epoch: Epoch(take.u64()),
            constants: take.u64(),
            nonce: take.u64(),
            process: take.u64(),
            line: take.u64(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn data_headers_round_trip(epoch: u64, seq: u64, round: u32, algorithm: u32, contributors: u32, length: u64, fp: [u8; 24], lent: bool) {
            let h = DataHeader { epoch: Epoch(epoch), seq, round, algorithm, contributors, length, fingerprint: Fingerprint::decode(&fp), lent };
            prop_assert_eq!(DataHeader::decode(&h.encode()), Some(h));
        }

        #[test]
        fn hellos_round_trip(rank: u32, world: u32, connections: u32, links: u32, epoch: u64, constants: u64, nonce: u64, process: u64, line: u64) {
            for purpose in [Purpose::Data, Purpose::Control, Purpose::Local, Purpose::Messages, Purpose::Rail(0), Purpose::Rail(MAX_CONNECTIONS - 1)] {
                let h = Hello { version: VERSION, purpose, rank, world, connections, links, epoch: Epoch(epoch), constants, nonce, process, line };
                prop_assert_eq!(Hello::decode(&h.encode()), Some(h));
            }
        }

        #[test]
        fn piece_headers_round_trip_and_empty_or_too_long_ones_are_refused(epoch: u64, seq: u64, round: u32, offset: u64, length: u32) {
            let h = PieceHeader { epoch: Epoch(epoch), seq, round, offset, length };
            let fits = (1..=STRIPE).contains(&(length as usize));
            prop_assert_eq!(PieceHeader::decode(&h.encode()), fits.then_some(h));
            let h = PieceHeader { length: length % STRIPE as u32 + 1, ..h };
            prop_assert_eq!(PieceHeader::decode(&h.encode()), Some(h));
        }

        #[test]
        fn control_frames_round_trip_and_too_long_ones_are_refused(code: u8, epoch: u64, id: u64, a: u32, b: u32, length: u64) {
            for (kind, limit) in [
                (ControlKind::Offer, u64::MAX), (ControlKind::Accept, 0), (ControlKind::Ready, 0), (ControlKind::Data, SEGMENT as u64),
                (ControlKind::Abort, MAX_TEXT as u64), (ControlKind::Leave, MAX_TEXT as u64),
                (ControlKind::Inline, EAGER as u64), (ControlKind::Taken, 0),
            ] {
                let c = Control { kind, code, epoch: Epoch(epoch), id, a, b, length };
                prop_assert_eq!(Control::decode(&c.encode()), (length <= limit).then_some(c));
                let fits = Control { length: length.min(limit), ..c };
                prop_assert_eq!(Control::decode(&fits.encode()), Some(fits));
            }
        }

        #[test]
        fn random_bytes_never_decode_without_the_magic(bytes: [u8; 32], more: [u8; 32]) {
            let mut all = [0u8; 68];
            all[..32].copy_from_slice(&bytes);
            all[32..64].copy_from_slice(&more);
            all[0] = 0;
            prop_assert_eq!(DataHeader::decode(all.first_chunk().unwrap()), None);
            prop_assert_eq!(Control::decode(all.first_chunk().unwrap()), None);
            prop_assert_eq!(Hello::decode(all.first_chunk().unwrap()), None);
            prop_assert_eq!(PieceHeader::decode(all.first_chunk().unwrap()), None);
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "é".repeat(MAX_TEXT);
        assert!(cut(&text).len() <= MAX_TEXT);
        assert!(cut(&text).chars().all(|c| c == 'é'));
        assert_eq!(cut("short"), "short");
    }
}
