//! Bytes of the control connections: a greeting of fixed size, then frames of {kind, origin, number, text}.
//!
//! Nothing is believed: lengths are bounded before anything is allocated, unknown kinds end the connection (INV-10).

use std::fmt;
use std::io::{Read, Write};

use crate::coded::coded;
use crate::fields::Take;
use crate::identity::records::NotAuthentic;
use crate::printable::one_line;
use crate::{Error, ErrorKind, Result};

/// Changes with the meaning of any byte here.
const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"oxpeers\x00";
/// A longer text is cut before it is sent; a longer one that arrives ends the connection.
pub(super) const MAX_TEXT: usize = 4096;
/// Bytes of a frame before its text.
const HEAD: usize = 17;
pub(crate) const TOKEN: usize = 16;
/// Bytes of a [`Setup`].
pub(crate) const SETUP: usize = 128;

/// What all ranks must have in common, in words; shorter texts end in zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup(pub(crate) [u8; SETUP]);

impl Setup {
    /// Of a text; what is longer is cut.
    pub(crate) fn of(text: &str) -> Self {
        let mut bytes = [0; SETUP];
        bytes
            .iter_mut()
            .zip(text.bytes())
            .for_each(|(to, from)| *to = from);
        Self(bytes)
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = String::from_utf8_lossy(&self.0);
        f.write_str(&one_line(text.trim_end_matches('\0'), SETUP))
    }
}

/// What a rank says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Proves that the rank read the store.
    pub(crate) token: [u8; TOKEN],
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
    /// One for every process and life.
    pub(crate) process: u64,
    pub(crate) setup: Setup,
}

impl Hello {
    pub(crate) const BYTES: usize = 8 + 4 + TOKEN + 4 + 4 + 8 + 8 + SETUP;

    pub(crate) fn write(&self, stream: &mut impl Write) -> std::io::Result<()> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.token);
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.world.to_le_bytes());
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.setup.0);
        stream.write_all(&bytes)
    }

    /// Checks the form; a stranger is `Protocol`.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        let mut at = Take(bytes);
        let magic: [u8; 8] = at.bytes();
        let version = at.u32();
        if &magic != MAGIC || version != VERSION {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("not a rank of this job, or of another version ({version} instead of {VERSION})"),
            ));
        }
        Ok(Self {
            token: at.bytes(),
            rank: at.u32(),
            world: at.u32(),
            epoch: at.u64(),
            process: at.u64(),
            setup: Setup(at.bytes()),
        })
    }
}

coded! {
    /// What a frame means.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Kind {
        /// Every rank is there: go on; number: one more than the rank before in the order of processes.
        Ready = 1,
        /// The configuration failed; number: the kind of error.
        Refused = 2,
        /// Something failed; number: kind of error and the rank that is to blame.
        Failed = 3,
        /// The origin leaves in good order.
        Bye = 4,
        /// The origin entered barrier `number`.
        Enter = 5,
        /// Barrier `number` opens.
        Release = 6,
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) origin: u32,
    pub(crate) number: u64,
    pub(crate) text: String,
}

impl Frame {
    /// Bytes of the longest.
    pub(crate) const MOST: usize = HEAD + MAX_TEXT;

    pub(crate) fn new(kind: Kind, origin: u32, number: u64, text: impl Into<String>) -> Self {
        Self {
            kind,
            origin,
            number,
            text: text.into(),
        }
    }

    /// The failure of a group as a frame.
    pub(crate) fn of_error(kind: Kind, origin: u32, error: &Error, blamed: Option<u32>) -> Self {
        let number = u64::from(error_code(error.kind())) << 32 | u64::from(blamed.unwrap_or(u32::MAX));
        Self::new(kind, origin, number, error.to_string())
    }

    /// And back: the error as rank `own` tells it. Blames the origin if that blames no rank. What ends the run of the rank that it is the fault of
    /// ([`ErrorKind::InvalidArgument`], [`ErrorKind::Unsupported`]) keeps its kind on that rank alone.
    pub(crate) fn error(&self, own: u32) -> Error {
        let blamed = Some(self.number as u32).filter(|r| *r != u32::MAX);
        let kind = match error_kind((self.number >> 32) as u8) {
            ErrorKind::InvalidArgument | ErrorKind::Unsupported if blamed != Some(own) => ErrorKind::Protocol,
            kind => kind,
        };
        let text = match kind {
            ErrorKind::Aborted => format!("aborted by rank {}: {}", self.origin, self.text),
            _ => format!("rank {} reports: {}", self.origin, self.text),
        };
        Error::new(kind, text).with_peer(blamed.unwrap_or(self.origin))
    }

    pub(crate) fn write(&self, stream: &mut impl Write) -> std::io::Result<()> {
        let mut end = self.text.len().min(MAX_TEXT);
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let text = self.text.as_bytes().get(..end).unwrap_or(&[]);
        let mut bytes = vec![self.kind.code()];
        bytes.extend(self.origin.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text);
        stream.write_all(&bytes)
    }

    /// `Ok(None)` at the end of the connection.
    pub(crate) fn read(stream: &mut impl Read) -> Result<Option<Self>> {
        let mut head = [0u8; HEAD];
        match stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(e) => return Err(unread(e)),
        }
        let (frame, length) = Self::headed(&head)?;
        let mut text = vec![0u8; length];
        stream.read_exact(&mut text).map_err(unread)?;
        Ok(Some(frame.saying(&text)))
    }

    /// The frame that `bytes` begin with; `None` as long as not all of it is there.
    pub(crate) fn seen(bytes: &[u8]) -> Result<Option<Self>> {
        let Some((head, rest)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let (frame, length) = Self::headed(head)?;
        Ok(rest.get(..length).map(|text| frame.saying(text)))
    }

    /// Without its text, and how long that is.
    fn headed(head: &[u8; HEAD]) -> Result<(Self, usize)> {
        let mut at = Take(head);
        let [code] = at.bytes();
        let origin = at.u32();
        let number = at.u64();
        let length = at.u32() as usize;
        let kind = Kind::from_code(code)
            .filter(|_| length <= MAX_TEXT)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Protocol,
                    format!("a control frame of kind {code} with {length} bytes of text"),
                )
            })?;
        Ok((Self::new(kind, origin, number, ""), length))
    }

    fn saying(self, text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text).into_owned();
        Self { text, ..self }
    }
}

fn unread(error: std::io::Error) -> Error {
    match NotAuthentic::of(&error) {
        Some(forged) => Error::new(ErrorKind::Protocol, forged.to_string()),
        None => Error::io("reading a control frame", error),
    }
}

/// The kinds that travel, in the order of their codes. Others, and codes that are not here, are `Backend`.
const KINDS: [ErrorKind; 10] = [
    ErrorKind::Internal,
    ErrorKind::Aborted,
    ErrorKind::Timeout,
    ErrorKind::PeerLost,
    ErrorKind::Mismatch,
    ErrorKind::Backend,
    ErrorKind::Unavailable,
    ErrorKind::InvalidArgument,
    ErrorKind::Unsupported,
    ErrorKind::Protocol,
];

fn error_code(kind: ErrorKind) -> u8 {
    KINDS.iter().position(|k| *k == kind).map_or(5, |i| i as u8)
}

fn error_kind(code: u8) -> ErrorKind {
    KINDS
        .get(usize::from(code))
        .copied()
        .unwrap_or(ErrorKind::Backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_kind_its_words_and_whom_it_blames() {
        let e = Error::new(ErrorKind::PeerLost, "closed its connection");
        let told = Frame::of_error(Kind::Failed, 3, &e, Some(7)).error(0);
        assert_eq!(told.kind(), ErrorKind::PeerLost);
        assert_eq!(told.context().peer, Some(7));
        assert!(
            told.to_string().contains("rank 3") && told.to_string().contains("closed its"),
            "{told}"
        );
        let aborted = Error::new(ErrorKind::Aborted, "enough");
        let told = Frame::of_error(Kind::Failed, 0, &aborted, None).error(1);
        assert_eq!(told.message(), "aborted by rank 0: enough");
        assert_eq!(told.context().peer, Some(0));
    }

    #[test]
    fn what_ends_a_run_keeps_its_kind_on_the_rank_that_it_blames_alone() {
        for kind in [ErrorKind::InvalidArgument, ErrorKind::Unsupported] {
            let told = |blamed| {
                Frame::of_error(Kind::Refused, 0, &Error::new(kind, "no such host"), blamed).error(2)
            };
            assert_eq!(told(Some(2)).kind(), kind);
            for blamed in [None, Some(0), Some(1)] {
                let e = told(blamed);
                assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
                assert!(e.to_string().contains("rank 0 reports: no such host"), "{e}");
            }
        }
    }

    #[test]
    fn a_frame_is_seen_once_all_of_it_is_there() {
        let frame = Frame::new(Kind::Failed, 3, 9, "text");
        let mut bytes = Vec::new();
        frame.write(&mut bytes).unwrap();
        let whole = bytes.len();
        bytes.extend([Kind::Bye as u8; 40]);
        for there in 0..bytes.len() {
            let seen = Frame::seen(&bytes[..there]).unwrap();
            assert_eq!(seen, (there >= whole).then(|| frame.clone()), "of {there} bytes");
        }
    }

    #[test]
    fn garbage_is_refused_before_anything_is_allocated() {
        let mut huge = vec![3u8];
        huge.extend([0; 12]);
        huge.extend(u32::MAX.to_le_bytes());
        assert_eq!(
            Frame::read(&mut huge.as_slice()).unwrap_err().kind(),
            ErrorKind::Protocol
        );
        let unknown = [0xEEu8; 17];
        assert_eq!(
            Frame::read(&mut unknown.as_slice()).unwrap_err().kind(),
            ErrorKind::Protocol
        );
        assert_eq!(Frame::read(&mut [].as_slice()).unwrap(), None);
    }
}
