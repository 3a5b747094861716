//! One other rank as the engine's thread sees it: its control connection and the frames that go in and out on it.

use std::collections::VecDeque;
use std::io::IoSlice;

use ftcore::{Error, ErrorKind, Result};

use crate::p2p::Way;
use crate::transport::tcp::{Link, Moved};
use crate::wire::{Control, ControlKind};

/// Writes to one peer before the others get their turn.
const TURNS: usize = 64;

/// Another rank.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) address: String,
    pub(crate) control: ControlLink,
    /// It said good-bye, and why.
    pub(crate) left: Option<String>,
    /// Its control connection ended without a good-bye, and how: it is lost.
    pub(crate) gone: Option<String>,
    /// Why it ended, in its own words, and whom it blames.
    pub(crate) words: Option<Error>,
}

impl Way for Peer {
    fn push(&mut self, frame: Control) {
        self.control.push(frame, Vec::new());
    }

    fn offer(&mut self, frame: Control, _: &[u8]) -> bool {
        self.control.push(frame, Vec::new());
        false
    }

    fn begin(&mut self, id: u64) {
        self.control.sending.push_back(id);
    }

    fn blame(&self, error: Error) -> Error {
        error.with_peer(self.rank).with_peer_address(self.address.clone())
    }
}

impl Peer {
    /// An error about this peer.
    pub(crate) fn error(&self, kind: ErrorKind, text: impl Into<String>) -> Error {
        self.blame(Error::new(kind, text))
    }
}

/// What follows a control header on the wire.
#[derive(Debug)]
pub(crate) enum Payload {
    None,
    Text(Vec<u8>),
    /// `length` bytes of message `id` from `offset` on; the bytes stand in the tensor that is sent.
    Message {
        id: u64,
        offset: usize,
        length: usize,
    },
}

impl Payload {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Text(text) => text.len(),
            Self::Message { length, .. } => *length,
        }
    }
}

/// A frame on its way out.
#[derive(Debug)]
pub(crate) struct Outgoing {
    header: [u8; Control::BYTES],
    pub(crate) payload: Payload,
    /// Bytes of header and payload already written.
    pub(crate) done: usize,
}

impl Outgoing {
    pub(crate) fn new(header: Control, payload: Payload) -> Self {
        Self {
            header: header.encode(),
            payload,
            done: 0,
        }
    }

    /// The bytes not yet written: the rest of the header, and the number of payload bytes already out.
    pub(crate) fn rest(&self) -> (&[u8], usize) {
        (
            self.header.get(self.done..).unwrap_or(&[]),
            self.done.saturating_sub(Control::BYTES),
        )
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.done >= Control::BYTES + self.payload.len()
    }
}

/// A control frame that came in.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A frame with its text, complete.
    Frame(Control, Vec<u8>),
    /// The header of a piece of a message: its bytes follow and are read where they belong.
    Piece(Control),
}

/// The control connection.
#[derive(Debug)]
pub(crate) struct ControlLink {
    pub(crate) link: Link,
    /// Small frames that wait; a piece of a message is only made when this is empty.
    pub(crate) queue: VecDeque<Outgoing>,
    /// The frame that is being written.
    pub(crate) current: Option<Outgoing>,
    /// Accepted messages that still have bytes to send, in turn.
    pub(crate) sending: VecDeque<u64>,
    buffer: [u8; Control::BYTES],
    have: usize,
    text: Option<(Control, Vec<u8>, usize)>,
    /// Message id and bytes of the present piece that have not been read.
    pub(crate) piece: Option<(u64, usize)>,
}

impl ControlLink {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            queue: VecDeque::new(),
            current: None,
            sending: VecDeque::new(),
            buffer: [0; Control::BYTES],
            have: 0,
            text: None,
            piece: None,
        }
    }

    /// True if something waits to be written.
    pub(crate) fn wants_write(&self) -> bool {
        self.link.write_closed.is_none()
            && (self.current.is_some() || !self.queue.is_empty() || !self.sending.is_empty())
    }

    /// Queues a frame without a message's bytes.
    pub(crate) fn push(&mut self, header: Control, text: Vec<u8>) {
        let payload = if text.is_empty() {
            Payload::None
        } else {
            Payload::Text(text)
        };
        self.queue.push_back(Outgoing::new(header, payload));
    }

    /// The next frame that is complete; `None` if more bytes are needed first. Does not read while a piece is open.
    pub(crate) fn next(&mut self) -> Result<Option<Incoming>> {
        while self.link.readable && self.piece.is_none() && self.link.read_closed.is_none() {
            if let Some((_, text, have)) = &mut self.text {
                let Some(rest) = text.get_mut(*have..).filter(|r| !r.is_empty()) else {
                    return Ok(self
                        .text
                        .take()
                        .map(|(header, text, _)| Incoming::Frame(header, text)));
                };
                match self.link.read(rest) {
                    Moved::Bytes(n) => *have += n,
                    Moved::Nothing | Moved::Closed => return Ok(None),
                }
                continue;
            }
            let Some(rest) = self.buffer.get_mut(self.have..) else {
                return Ok(None);
            };
            match self.link.read(rest) {
                Moved::Bytes(n) => self.have += n,
                Moved::Nothing | Moved::Closed => return Ok(None),
            }
            if self.have < Control::BYTES {
                continue;
            }
            self.have = 0;
            // decode has checked the length against the limits of the kind (INV-10).
            let header = Control::decode(&self.buffer).ok_or_else(|| {
                Error::new(ErrorKind::Protocol, "sent something that is not a control frame")
            })?;
            match header.kind {
                ControlKind::Offer | ControlKind::Accept | ControlKind::Ready => {
                    return Ok(Some(Incoming::Frame(header, Vec::new())));
                }
                ControlKind::Data => return Ok(Some(Incoming::Piece(header))),
                ControlKind::Inline | ControlKind::Taken => {
                    let text = "sent on a socket what only goes through shared memory";
                    return Err(Error::new(ErrorKind::Protocol, text));
                }
                ControlKind::Abort | ControlKind::Goodbye => {
                    let length = usize::try_from(header.length).unwrap_or(0);
                    if length == 0 {
                        return Ok(Some(Incoming::Frame(header, Vec::new())));
                    }
                    self.text = Some((header, vec![0; length], 0));
                }
            }
        }
        // A text may have been completed by the read that emptied the socket.
        match &self.text {
            Some((_, text, have)) if *have == text.len() => Ok(self
                .text
                .take()
                .map(|(header, text, _)| Incoming::Frame(header, text))),
            _ => Ok(None),
        }
    }

    /// Writes as much of the waiting frames as the socket takes. `bytes` gives the bytes of a message; `finished` is
    /// called for every piece of a message that is out, with its id and the offset after it. True if anything moved.
    pub(crate) fn flush<'a>(
        &mut self,
        bytes: impl Fn(u64, usize, usize) -> Option<&'a [u8]>,
        mut piece: impl FnMut(&mut VecDeque<u64>) -> Option<Outgoing>,
        mut finished: impl FnMut(u64, usize),
    ) -> bool {
        let mut moved = false;
        let mut turns = 0;
        // A bounded number of writes, so that a fast reader does not keep the engine from everybody else.
        while self.link.writable && self.link.write_closed.is_none() && turns < TURNS {
            turns += 1;
            if self.current.is_none() {
                self.current = self.queue.pop_front().or_else(|| piece(&mut self.sending));
            }
            let Some(frame) = &mut self.current else { break };
            let (header, out) = frame.rest();
            let payload = match &frame.payload {
                Payload::None => Some(&[][..]),
                Payload::Text(text) => text.get(out..),
                Payload::Message { id, offset, length } => bytes(*id, offset + out, length - out),
            };
            match self
                .link
                .write(&[IoSlice::new(header), IoSlice::new(payload.unwrap_or(&[]))])
            {
                Moved::Bytes(n) => {
                    moved = true;
                    frame.done += n;
                }
                Moved::Nothing | Moved::Closed => break,
            }
            if frame.is_finished() {
                if let Payload::Message { id, offset, length } = frame.payload {
                    finished(id, offset + length);
                }
                self.current = None;
            }
        }
        moved
    }
}
