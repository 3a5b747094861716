//! One other rank as the engine's thread sees it: its control connection and the frames that go in and out on it.

use std::collections::VecDeque;
use std::io::IoSlice;

use ftcore::{Error, ErrorKind, Result};

use crate::transport::tcp::{Link, Moved};
use crate::wire::{Control, ControlKind};

/// Another rank.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) address: String,
    pub(crate) control: ControlLink,
    /// It has left, and why.
    pub(crate) left: Option<String>,
    /// Its control connection ended without a leave, and how: it is lost.
    pub(crate) gone: Option<String>,
    /// Why it ended, in its own words, and whom it blames.
    pub(crate) words: Option<Error>,
}

impl Peer {
    /// An error about this peer.
    pub(crate) fn error(&self, kind: ErrorKind, text: impl Into<String>) -> Error {
        Error::new(kind, text)
            .with_peer(self.rank)
            .with_peer_address(self.address.clone())
    }
}

/// A frame on its way out.
#[derive(Debug)]
struct Outgoing {
    header: [u8; Control::BYTES],
    text: Vec<u8>,
    /// Bytes of header and text already written.
    done: usize,
}

/// The control connection.
#[derive(Debug)]
pub(crate) struct ControlLink {
    pub(crate) link: Link,
    /// Frames that wait, or are being written.
    queue: VecDeque<Outgoing>,
    buffer: [u8; Control::BYTES],
    have: usize,
    text: Option<(Control, Vec<u8>, usize)>,
}

impl ControlLink {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            queue: VecDeque::new(),
            buffer: [0; Control::BYTES],
            have: 0,
            text: None,
        }
    }

    /// True if something waits to be written.
    pub(crate) fn wants_write(&self) -> bool {
        self.link.write_closed.is_none() && !self.queue.is_empty()
    }

    /// Queues a frame.
    pub(crate) fn push(&mut self, header: Control, text: Vec<u8>) {
        self.queue.push_back(Outgoing {
            header: header.encode(),
            text,
            done: 0,
        });
    }

    /// The next frame that is complete, with its text; `None` if more bytes are needed first.
    pub(crate) fn next(&mut self) -> Result<Option<(Control, Vec<u8>)>> {
        let next = self.read();
        if let Ok(None) = next {
            self.link.authentic()?;
        }
        next
    }

    fn read(&mut self) -> Result<Option<(Control, Vec<u8>)>> {
        while self.link.readable && self.link.read_closed.is_none() {
            if let Some((_, text, have)) = &mut self.text {
                let Some(rest) = text.get_mut(*have..).filter(|r| !r.is_empty()) else {
                    return Ok(self.text.take().map(|(header, text, _)| (header, text)));
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
                ControlKind::Ready => return Ok(Some((header, Vec::new()))),
                ControlKind::Offer
                | ControlKind::Accept
                | ControlKind::Data
                | ControlKind::Inline
                | ControlKind::Taken => {
                    let text = "sent a message where only aborts and leaves go";
                    return Err(Error::new(ErrorKind::Protocol, text));
                }
                ControlKind::Abort | ControlKind::Goodbye => {
                    let length = usize::try_from(header.length).unwrap_or(0);
                    if length == 0 {
                        return Ok(Some((header, Vec::new())));
                    }
                    self.text = Some((header, vec![0; length], 0));
                }
            }
        }
        // A text may have been completed by the read that emptied the socket.
        match &self.text {
            Some((_, text, have)) if *have == text.len() => {
                Ok(self.text.take().map(|(header, text, _)| (header, text)))
            }
            _ => Ok(None),
        }
    }

    /// Writes as much of the waiting frames as the socket takes. True if anything moved.
    pub(crate) fn flush(&mut self) -> bool {
        let mut moved = false;
        while self.link.writable && self.link.write_closed.is_none() {
            let Some(frame) = self.queue.front_mut() else {
                break;
            };
            let header = frame.header.get(frame.done..).unwrap_or(&[]);
            let text = frame.done.saturating_sub(Control::BYTES);
            let text = frame.text.get(text..).unwrap_or(&[]);
            let left = header.len() + text.len();
            match self.link.write(&[IoSlice::new(header), IoSlice::new(text)]) {
                Moved::Bytes(n) => {
                    moved = true;
                    frame.done += n;
                    if n >= left {
                        self.queue.pop_front();
                    }
                }
                Moved::Nothing | Moved::Closed => break,
            }
        }
        moved
    }
}
