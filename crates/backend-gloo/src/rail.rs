//! One of the connections that carry the pieces of large payloads to a rank, and what is under way on it.

use crate::transport::tcp::Link;
use crate::wire::{Frame, PieceHeader, STRIPE};

/// A piece on its way out.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) header: [u8; PieceHeader::BYTES],
    pub(crate) offset: usize,
    pub(crate) length: usize,
    /// Of header and bytes.
    pub(crate) done: usize,
}

/// One connection for pieces.
#[derive(Debug)]
pub(crate) struct Rail {
    pub(crate) link: Link,
    pub(crate) out: Option<Out>,
    /// The header of the next piece, as far as it has come.
    pub(crate) head: [u8; PieceHeader::BYTES],
    pub(crate) have: usize,
    /// The piece that comes in: its header is here, and that many of its bytes.
    pub(crate) piece: Option<PieceHeader>,
    pub(crate) taken: usize,
    /// Its bytes, where they wait for a reduction.
    pub(crate) buffer: Vec<u8>,
}

/// How many of the first `ready` of `length` bytes make whole pieces.
pub(crate) fn whole(ready: usize, length: usize) -> usize {
    if ready < length {
        ready - ready % STRIPE
    } else {
        length
    }
}

impl Rail {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            out: None,
            head: [0; PieceHeader::BYTES],
            have: 0,
            piece: None,
            taken: 0,
            buffer: Vec::new(),
        }
    }

    /// True if a piece is on its way out, or could be: `more` can be given out.
    pub(crate) fn wants_write(&self, more: bool) -> bool {
        self.link.write_closed.is_none() && (self.out.is_some() || more)
    }

    /// True if bytes that arrive now would be read for the payload of `frame`.
    pub(crate) fn wants_read(&self, frame: Frame) -> bool {
        let wanted = match &self.piece {
            None => true,
            Some(piece) => piece.frame() == frame && self.taken < piece.length as usize,
        };
        wanted && self.link.read_closed.is_none()
    }

    /// In the middle of a piece.
    pub(crate) fn is_within(&self) -> bool {
        let unfinished = self.piece.is_some_and(|p| self.taken < p.length as usize);
        self.have > 0 || unfinished
    }
}
