//! Messages over a connection of their own to each rank. What is read is either a frame, or bytes that go to where they belong at once.

use std::collections::VecDeque;
use std::io::IoSlice;

use ftcore::{Error, ErrorKind, Result};

use super::{FRAMES, Outbox as To, checked};
use crate::execution::Place;
use crate::p2p::Messages;
use crate::transport::tcp::{Link, Moved};
use crate::wire::{Control, ControlKind, EAGER, SEGMENT};

/// Bytes that are read in the hope that a whole short message is among them.
const BUFFER: usize = 16 * 1024;

/// Bytes of a message that come now.
#[derive(Debug)]
struct Open {
    id: u64,
    left: usize,
    /// They belong into a tensor; otherwise they were not asked for.
    lands: bool,
}

/// What comes from a rank.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(super) link: Link,
    /// What was read and not yet taken stands from `from` to `to`.
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    open: Option<Open>,
}

impl Inbox {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            buffer: vec![0; BUFFER],
            from: 0,
            to: 0,
            open: None,
        }
    }

    /// Takes what the rank has sent, for as long as something is pending: what comes after waits in the connection for its receive. True
    /// if anything moved.
    pub(super) fn read(
        &mut self,
        place: Place,
        rank: u32,
        messages: &mut Messages,
        ways: &mut [Option<To>],
    ) -> Result<bool> {
        let moved = self.frames(place, rank, messages, ways)?;
        if !moved {
            self.link.authentic()?;
        }
        Ok(moved)
    }

    fn frames(
        &mut self,
        place: Place,
        rank: u32,
        messages: &mut Messages,
        ways: &mut [Option<To>],
    ) -> Result<bool> {
        let mut moved = false;
        for _ in 0..FRAMES {
            while let Some(open) = &self.open {
                if open.left > 0 {
                    match self.some(rank, messages)? {
                        0 => return Ok(moved),
                        n => self.took(rank, n, messages, ways)?,
                    }
                    moved = true;
                } else {
                    self.open = None;
                }
            }
            if messages.is_idle() {
                break;
            }
            let Some(head) = self.head() else { break };
            moved = true;
            let (frame, length) = checked(&head, place.epoch, SEGMENT, EAGER)?;
            match frame.kind {
                ControlKind::Data => {
                    let length = messages.piece(rank, &frame)?;
                    self.begin(rank, frame.id, length, true, messages, ways)?;
                }
                ControlKind::Inline => {
                    let lands = messages.comes_inline(rank, &frame, ways)?;
                    self.begin(rank, frame.id, length, lands, messages, ways)?;
                }
                ControlKind::Taken => messages.taken(rank, &frame, ways)?,
                _ => messages.frame(rank, &frame, ways)?,
            }
        }
        Ok(moved)
    }

    /// The header of the next frame, if all of it is here.
    fn head(&mut self) -> Option<[u8; Control::BYTES]> {
        loop {
            let waiting = self.buffer.get(self.from..self.to).unwrap_or(&[]);
            if let Some((head, _)) = waiting.split_first_chunk() {
                let head = *head;
                self.from += Control::BYTES;
                return Some(head);
            }
            if !self.link.readable {
                return None;
            }
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            match self.link.read(self.buffer.get_mut(self.to..)?) {
                Moved::Bytes(n) => self.to += n,
                Moved::Nothing | Moved::Closed => return None,
            }
        }
    }

    fn begin(
        &mut self,
        rank: u32,
        id: u64,
        length: usize,
        lands: bool,
        messages: &mut Messages,
        ways: &mut [Option<To>],
    ) -> Result<()> {
        if length == 0 && lands {
            return messages.landed(rank, id, 0, ways);
        }
        self.open = Some(Open {
            id,
            left: length,
            lands,
        });
        Ok(())
    }

    /// Moves some of the bytes that come now to where they belong. How many.
    fn some(&mut self, rank: u32, messages: &mut Messages) -> Result<usize> {
        let Some(open) = &self.open else { return Ok(0) };
        let waiting = self.buffer.get(self.from..self.to).unwrap_or(&[]);
        let have = waiting.len().min(open.left);
        if have > 0 {
            if open.lands {
                let into = messages.room(rank, open.id)?.get_mut(..have);
                let from = waiting.get(..have).unwrap_or(&[]);
                into.ok_or_else(crate::p2p::lost)?.copy_from_slice(from);
            }
            self.from += have;
            return Ok(have);
        }
        if !self.link.readable {
            return Ok(0);
        }
        let target = if open.lands {
            let room = messages.room(rank, open.id)?;
            room.get_mut(..open.left).ok_or_else(crate::p2p::lost)?
        } else {
            let most = open.left.min(self.buffer.len());
            self.buffer.get_mut(..most).unwrap_or(&mut [])
        };
        match self.link.read(target) {
            Moved::Bytes(n) => Ok(n),
            Moved::Nothing | Moved::Closed => Ok(0),
        }
    }

    fn took(&mut self, rank: u32, n: usize, messages: &mut Messages, ways: &mut [Option<To>]) -> Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.left = open.left.saturating_sub(n);
        match open.lands {
            true => messages.landed(rank, open.id, n, ways),
            false => Ok(()),
        }
    }

    /// Reads what is not wanted any more: a socket that is closed with something unread breaks, and may take what was written with it.
    pub(super) fn forget(&mut self) {
        for _ in 0..FRAMES {
            if !matches!(self.link.read(&mut self.buffer), Moved::Bytes(_)) {
                return;
            }
        }
    }
}

/// A frame on its way out, with bytes of a message behind it.
#[derive(Debug)]
struct Frame {
    header: [u8; Control::BYTES],
    id: u64,
    offset: usize,
    length: usize,
    /// The bytes are a piece of an accepted message.
    piece: bool,
    /// Of header and bytes.
    done: usize,
}

/// What goes to a rank.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(super) link: Link,
    /// Frames that wait; the first one may have gone out in part.
    queue: VecDeque<Frame>,
    /// Accepted messages that still have bytes to send, in turn; a piece is only made when nothing else waits.
    pub(super) sending: VecDeque<u64>,
}

impl Outbox {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            queue: VecDeque::new(),
            sending: VecDeque::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// True if it waits until the rank takes bytes.
    pub(super) fn wants_write(&self) -> bool {
        self.link.write_closed.is_none() && !(self.queue.is_empty() && self.sending.is_empty())
    }

    pub(super) fn push(&mut self, frame: &Control, length: usize) {
        self.queue.push_back(Frame {
            header: frame.encode(),
            id: frame.id,
            offset: 0,
            length,
            piece: false,
            done: 0,
        });
    }

    /// As [`Way::offer`](crate::p2p::Way::offer).
    pub(super) fn offer(&mut self, frame: Control, bytes: &[u8]) -> bool {
        if bytes.len() > EAGER {
            self.push(&frame, 0);
            return false;
        }
        let inline = Control {
            kind: ControlKind::Inline,
            ..frame
        };
        self.push(&inline, bytes.len());
        true
    }

    /// Writes what waits as far as the socket takes it: frames first, then pieces of messages in turn. True if anything moved.
    pub(super) fn write(&mut self, place: Place, messages: &mut Messages) -> Result<bool> {
        let mut moved = false;
        // A bounded number, so that a fast reader does not keep the driver from all others.
        for _ in 0..FRAMES {
            if !self.link.writable || self.link.write_closed.is_some() {
                break;
            }
            if self.queue.is_empty()
                && let Some(id) = self.sending.pop_front()
            {
                let piece = next_piece(place, id, messages);
                self.queue.push_back(piece);
            }
            let Some(frame) = self.queue.front_mut() else {
                break;
            };
            let header = frame.header.get(frame.done..).unwrap_or(&[]);
            let out = frame.done.saturating_sub(Control::BYTES);
            let bytes = match frame.length - out {
                0 => &[],
                left => messages
                    .bytes_of(frame.id, frame.offset + out, left)
                    .ok_or_else(|| {
                        let text = "says that it has a message that has not gone out";
                        Error::new(ErrorKind::Protocol, text)
                    })?,
            };
            let left = header.len() + bytes.len();
            match self.link.write(&[IoSlice::new(header), IoSlice::new(bytes)]) {
                Moved::Bytes(n) => {
                    moved = true;
                    frame.done += n;
                    if n < left {
                        continue;
                    }
                    let (id, piece, length) = (frame.id, frame.piece, frame.length);
                    self.queue.pop_front();
                    if piece && !messages.gone_out(id, length) {
                        self.sending.push_back(id);
                    }
                    // What was copied is received from a cache if it is received soon.
                    if piece {
                        break;
                    }
                }
                Moved::Nothing | Moved::Closed => break,
            }
        }
        Ok(moved)
    }
}

/// The next piece of accepted message `id`.
fn next_piece(place: Place, id: u64, messages: &Messages) -> Frame {
    let (offset, rest) = messages.rest_of(id);
    let length = rest.min(SEGMENT);
    let header = Control {
        kind: ControlKind::Data,
        code: 0,
        epoch: place.epoch,
        id,
        a: 0,
        b: place.rank,
        length: length as u64,
    };
    Frame {
        header: header.encode(),
        id,
        offset,
        length,
        piece: true,
        done: 0,
    }
}
