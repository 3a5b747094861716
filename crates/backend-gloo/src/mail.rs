//! Point-to-point messages between ranks that all share memory: the rings, and what whoever drives them does in a turn.
//!
//! As the lane is for collectives, the mail is driven by one thread at a time: the engine's, or the caller of a blocking send
//! or receive on a group without other messages (`postman`). Frames are written into a ring whole, so a reader finds either all
//! of one or nothing. While nothing is pending here nobody looks: what others send waits in the rings.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ftcore::{DType, Error, ErrorKind, Result};

use crate::buffers::go_on;
use crate::exec::Place;
use crate::p2p::{Messages, Runs, Way};
use crate::queue::{Shared, Submission};
use crate::transport::shm::{MAIL, Reader, Ringer, Rings, Writer};
use crate::transport::tcp::Counters;
use crate::waiter::Patience;
use crate::wire::{Control, ControlKind, INLINE};

/// Bytes of a long message that are written, and shown, at a time.
const PIECE: usize = 32 * 1024;
/// How often a rank that waits lets others run before it sleeps. The one it waits for may be next on this very core.
pub(crate) const YIELDS: u32 = 100;
/// Frames that are read from one rank before the others get their turn.
const FRAMES: usize = 64;

/// What comes from a rank.
#[derive(Debug)]
pub(crate) struct Inbox {
    reader: Reader,
    counters: Arc<Counters>,
}

/// What goes to a rank.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) rank: u32,
    address: String,
    writer: Writer,
    bell: Ringer<MAIL>,
    counters: Arc<Counters>,
    /// Frames without payload that found no room.
    waiting: VecDeque<Control>,
    /// Accepted messages that still have bytes to send, in turn.
    sending: VecDeque<u64>,
    /// Something was written to this rank, or taken from it, since its bell was last rung.
    pub(crate) stirred: bool,
}

/// Both.
#[derive(Debug)]
pub(crate) struct Post(Inbox, Outbox);

impl Post {
    pub(crate) fn new(rank: u32, address: String, rings: Rings<MAIL>, counters: Arc<Counters>) -> Self {
        let inbox = Inbox {
            reader: rings.reader,
            counters: counters.clone(),
        };
        let outbox = Outbox {
            rank,
            address,
            writer: rings.writer,
            bell: rings.bell,
            counters,
            waiting: VecDeque::new(),
            sending: VecDeque::new(),
            stirred: false,
        };
        Self(inbox, outbox)
    }
}

/// The bytes behind an offer that has them; `None` if it cannot have any.
fn payload_of(frame: &Control) -> Option<usize> {
    let size = DType::from_code(frame.code)?.size();
    let bytes = usize::try_from(frame.length).ok()?.checked_mul(size)?;
    (bytes <= INLINE).then_some(bytes)
}

impl Inbox {
    /// The next frame and the length of its payload, if all of it is there. [`take`](Self::take) takes it.
    pub(crate) fn next(&mut self, epoch: u64) -> Result<Option<(Control, usize)>> {
        if self.reader.available(Control::BYTES)? < Control::BYTES {
            return Ok(None);
        }
        let Some(bytes) = self.reader.peek() else {
            return Ok(None);
        };
        let protocol = |text: String| Err(Error::new(ErrorKind::Protocol, text));
        let Some(frame) = Control::decode(&bytes) else {
            return protocol("sent something that is not the frame of a message".to_string());
        };
        if frame.epoch != epoch {
            let text = format!("sent a frame of epoch {}; this is epoch {epoch}", frame.epoch);
            return protocol(text);
        }
        let payload = match frame.kind {
            ControlKind::Offer | ControlKind::Accept | ControlKind::Taken => Some(0),
            ControlKind::Data => usize::try_from(frame.length).ok().filter(|n| *n <= PIECE),
            ControlKind::Inline => payload_of(&frame),
            ControlKind::Abort | ControlKind::Goodbye | ControlKind::Ready => None,
        };
        let Some(payload) = payload else {
            let text = format!("sent a frame that messages do not have: {frame:?}");
            return protocol(text);
        };
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
    /// Writes a frame if it fits; whoever calls this has looked that nothing waits before it.
    fn put(&mut self, frame: &Control, bytes: &[u8]) -> Result<bool> {
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
}

impl Way for Outbox {
    fn push(&mut self, frame: Control) {
        // A damaged ring shows on the next turn.
        if !self.waiting.is_empty() || !self.put(&frame, &[]).is_ok_and(|put| put) {
            self.waiting.push_back(frame);
        }
    }

    fn offer(&mut self, frame: Control, bytes: &[u8]) -> bool {
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

    fn begin(&mut self, id: u64) {
        self.sending.push_back(id);
    }

    fn blame(&self, error: Error) -> Error {
        if error.context().peer.is_some() {
            return error;
        }
        error.with_peer(self.rank).with_peer_address(self.address.clone())
    }
}

/// All point-to-point state of a group whose ranks share memory.
pub(crate) struct Mail {
    pub(crate) place: Place,
    /// By rank; `None` at the own one.
    pub(crate) inboxes: Vec<Option<Inbox>>,
    /// Likewise.
    pub(crate) outboxes: Vec<Option<Outbox>>,
    pub(crate) messages: Messages,
    pub(crate) patience: Patience,
    /// There are as many cores as ranks: a look keeps nobody from running.
    pub(crate) spins: bool,
    /// Why the driver gave up: the engine's thread ends the group with it.
    pub(crate) failure: Option<Error>,
}

impl Mail {
    pub(crate) fn new(place: Place, posts: Vec<Option<Post>>) -> Self {
        let spins = Patience::of(posts.iter().flatten().count()).spins();
        let split = |post: Option<Post>| match post {
            Some(Post(inbox, outbox)) => (Some(inbox), Some(outbox)),
            None => (None, None),
        };
        let (inboxes, outboxes) = posts.into_iter().map(split).unzip();
        Self {
            place,
            inboxes,
            outboxes,
            messages: Messages::new(place),
            patience: Patience::yielding(YIELDS),
            spins,
            failure: None,
        }
    }

    /// True if nothing is pending, nor waits to be written.
    pub(crate) fn is_idle(&self) -> bool {
        let mut outboxes = self.outboxes.iter().flatten();
        self.messages.is_idle() && self.failure.is_none() && outboxes.all(|o| o.waiting.is_empty())
    }

    /// Takes a send, a receive or a batch.
    pub(crate) fn submit(&mut self, s: Submission) -> Result<()> {
        let ways = &mut self.outboxes;
        self.messages
            .submit(s.op, s.completer, s.deadline, s.submitted, ways)
    }

    /// Takes what was submitted, reads and writes what goes. True if anything moved.
    pub(crate) fn turn(&mut self, shared: &Shared) -> Result<bool> {
        go_on(shared.interrupt())?;
        // Looked at before the rings: what a peer wrote before it went is there to be read.
        let trouble = shared.in_trouble();
        let mut moved = false;
        for s in shared.take_messages() {
            moved = true;
            self.submit(s)?;
        }
        for rank in 0..self.place.world {
            moved |= self.read(rank).map_err(|e| self.blame(rank, e))?;
            moved |= self.write(rank).map_err(|e| self.blame(rank, e))?;
        }
        self.outboxes.iter_mut().flatten().for_each(Outbox::ring);
        if trouble {
            self.judge(shared)?;
        }
        Ok(moved)
    }

    /// Names `rank` in an error that came out of its rings.
    pub(crate) fn blame(&self, rank: u32, error: Error) -> Error {
        match self.outboxes.get(rank as usize) {
            Some(Some(outbox)) => outbox.blame(error),
            _ => error,
        }
    }

    /// Takes the frames that `rank` has sent, for as long as something is pending. What comes after waits in the ring for its
    /// receive: read now, a short message would be an offer only, and its bytes would have to come again.
    fn read(&mut self, rank: u32) -> Result<bool> {
        let index = rank as usize;
        let (messages, ways) = (&mut self.messages, &mut self.outboxes);
        let Some(Some(inbox)) = self.inboxes.get_mut(index) else {
            return Ok(false);
        };
        let mut moved = false;
        for _ in 0..FRAMES {
            if messages.is_idle() {
                break;
            }
            let Some((frame, payload)) = inbox.next(self.place.epoch)? else {
                break;
            };
            match frame.kind {
                ControlKind::Inline => messages.inline(rank, &frame, inbox.payload(payload), ways)?,
                ControlKind::Data => messages.arrive(rank, &frame, inbox.payload(payload))?,
                ControlKind::Taken => messages.taken(rank, &frame, ways)?,
                _ => messages.frame(rank, &frame, ways)?,
            }
            inbox.take(payload);
            if let Some(Some(way)) = ways.get_mut(index) {
                way.stirred = true;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Writes what waits for `rank` as far as there is room: frames first, then pieces of messages in turn.
    fn write(&mut self, rank: u32) -> Result<bool> {
        let Some(Some(way)) = self.outboxes.get_mut(rank as usize) else {
            return Ok(false);
        };
        let mut moved = false;
        while let Some(frame) = way.waiting.pop_front() {
            if !way.put(&frame, &[])? {
                way.waiting.push_front(frame);
                return Ok(moved);
            }
            moved = true;
        }
        while let Some(id) = way.sending.pop_front() {
            let rest = self.messages.rest(id).unwrap_or(&[]);
            let piece = rest.get(..PIECE).unwrap_or(rest);
            let frame = Control {
                kind: ControlKind::Data,
                code: 0,
                epoch: self.place.epoch,
                id,
                a: 0,
                b: self.place.rank,
                length: piece.len() as u64,
            };
            let length = piece.len();
            if !way.put(&frame, piece)? {
                way.sending.push_front(id);
                break;
            }
            way.ring();
            moved = true;
            if !self.messages.gone_out(id, length) {
                way.sending.push_back(id);
            }
        }
        Ok(moved)
    }

    /// A rank that something pending needs has gone, or its loss was reported: nothing more comes.
    fn judge(&self, shared: &Shared) -> Result<()> {
        for outbox in self.outboxes.iter().flatten() {
            if !self.messages.needs(outbox.rank) {
                continue;
            }
            // What a rank said is told before it is told that it has gone.
            let Some(fate) = shared.fate(outbox.rank) else {
                continue;
            };
            if let Some(report) = shared.report() {
                return Err(report);
            }
            let how = if fate.left {
                format!("left the group ({})", fate.text)
            } else {
                fate.text
            };
            let error = outbox.blame(Error::new(ErrorKind::PeerLost, how));
            return Err(error.with_epoch(self.place.epoch));
        }
        Ok(())
    }

    /// The error of a message whose deadline has passed, if there is one.
    pub(crate) fn check_deadlines(&self) -> Result<()> {
        self.messages.overdue(Instant::now()).map_or(Ok(()), Err)
    }
}
