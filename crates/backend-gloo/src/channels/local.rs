//! Messages through shared memory: frames are written into a ring whole, so a reader finds either all of one or nothing.

use std::collections::VecDeque;
use std::sync::Arc;

use ftcore::{Epoch, Result};

use super::checked;
use crate::p2p::Runs;
use crate::transport::shm::{MESSAGES, Reader, Ringer, Writer};
use crate::transport::tcp::Counters;
use crate::wire::{Control, ControlKind, INLINE};

/// Bytes of a long message that are written, and shown, at a time.
pub(super) const PIECE: usize = 32 * 1024;

/// What comes from a rank.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(super) reader: Reader,
    pub(super) counters: Arc<Counters>,
}

/// What goes to a rank.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(super) writer: Writer,
    pub(super) bell: Ringer<MESSAGES>,
    pub(super) counters: Arc<Counters>,
    /// Frames without payload that found no room.
    pub(super) waiting: VecDeque<Control>,
    /// Accepted messages that still have bytes to send, in turn.
    pub(super) sending: VecDeque<u64>,
    /// Something was written to this rank, or taken from it, since its bell was last rung.
    pub(crate) stirred: bool,
}

impl Inbox {
    /// The next frame and the length of its payload, if all of it is there. [`take`](Self::take) takes it.
    pub(crate) fn next(&mut self, epoch: Epoch) -> Result<Option<(Control, usize)>> {
        if self.reader.available(Control::BYTES)? < Control::BYTES {
            return Ok(None);
        }
        let Some(bytes) = self.reader.peek() else {
            return Ok(None);
        };
        let (frame, payload) = checked(&bytes, epoch, PIECE, INLINE)?;
        let all = Control::BYTES + payload;
        Ok((self.reader.available(all)? >= all).then_some((frame, payload)))
    }

    /// The payload of the next frame.
    pub(crate) fn payload(&self, length: usize) -> Runs<'_> {
        let first = self.reader.data(Control::BYTES, length);
        let rest = length.saturating_sub(first.len());
        [first, self.reader.data(Control::BYTES + first.len(), rest)]
    }

    /// Takes the next frame.
    pub(crate) fn take(&mut self, payload: usize) {
        self.reader.take(Control::BYTES + payload);
        self.reader.pad();
        self.reader.release();
        self.counters.add_received(Control::BYTES + payload);
    }
}

impl Outbox {
    /// Writes a frame if it fits; the caller has made sure that nothing waits before it.
    pub(super) fn put(&mut self, frame: &Control, bytes: &[u8]) -> Result<bool> {
        let need = Control::BYTES + bytes.len();
        if self.writer.room(need)? < need {
            return Ok(false);
        }
        self.writer.put(&frame.encode());
        self.writer.put(bytes);
        self.writer.pad();
        self.writer.publish();
        self.counters.add_sent(need);
        self.stirred = true;
        Ok(true)
    }

    /// As [`put`](Self::put), if nothing waits before it.
    pub(crate) fn put_alone(&mut self, frame: &Control, bytes: &[u8]) -> Result<bool> {
        Ok(self.waiting.is_empty() && self.put(frame, bytes)?)
    }

    /// True if a frame without payload would go out at once.
    pub(crate) fn has_room(&mut self) -> Result<bool> {
        Ok(self.waiting.is_empty() && self.writer.room(Control::BYTES)? >= Control::BYTES)
    }

    /// Wakes the rank if it waits and something happened.
    pub(crate) fn ring(&mut self) {
        if std::mem::take(&mut self.stirred) {
            self.bell.ring();
        }
    }

    /// As [`Way::push`](crate::p2p::Way::push).
    pub(crate) fn push(&mut self, frame: Control) {
        // A damaged ring shows on the next turn.
        if !self.waiting.is_empty() || !self.put(&frame, &[]).is_ok_and(|put| put) {
            self.waiting.push_back(frame);
        }
    }

    /// As [`Way::offer`](crate::p2p::Way::offer).
    pub(super) fn offer(&mut self, frame: Control, bytes: &[u8]) -> bool {
        let inline = Control {
            kind: ControlKind::Inline,
            ..frame
        };
        let may = bytes.len() <= INLINE && self.waiting.is_empty();
        if may && self.put(&inline, bytes).is_ok_and(|put| put) {
            return true;
        }
        self.push(frame);
        false
    }
}
