//! Point-to-point messages: the ways to all ranks, and what their driver does in a turn.
//!
//! As the executor is for collectives, the channels is driven by one thread at a time: the engine's, or the caller of a blocking send
//! or receive on a group without other messages (`blocking`). Ranks of this host are reached through rings in shared memory (`local`), the others over a
//! connection that has nothing but messages (`remote`). While nothing is pending here they are not looked at: what others send waits in the rings and sockets.

mod ends;
pub(crate) mod local;
mod remote;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use ftcore::{DType, Epoch, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags};

use crate::buffers::go_on;
use crate::execution::Place;
use crate::p2p::{Messages, Way};
use crate::peer::{Fate, GRACE};
use crate::queue::{Shared, Submission, later};
use crate::spin_budget::SpinBudget;
use crate::transport::shm::{MESSAGES, Rings};
use crate::transport::tcp::{Counters, Link};
use crate::wire::{Control, ControlKind};

/// How often a rank that waits lets others run before it sleeps. The one it waits for may be next on this very core.
pub(crate) const YIELDS: u32 = 100;
/// Frames that are read from one rank, or written to it, before the others get their turn.
const FRAMES: usize = 64;

/// What comes from a rank.
#[derive(Debug)]
pub(crate) enum Inbox {
    Local(local::Inbox),
    Remote(remote::Inbox),
}

/// How frames go to a rank.
#[derive(Debug)]
pub(crate) enum Out {
    Local(local::Outbox),
    Remote(remote::Outbox),
}

/// What goes to a rank.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) rank: u32,
    address: String,
    pub(crate) out: Out,
}

/// Both.
#[derive(Debug)]
pub(crate) struct Channel(Inbox, Outbox);

impl Channel {
    /// The way to a rank of this host.
    pub(crate) fn local(rank: u32, address: String, rings: Rings<MESSAGES>, counters: Arc<Counters>) -> Self {
        let inbox = local::Inbox {
            reader: rings.reader,
            counters: counters.clone(),
        };
        let out = local::Outbox {
            writer: rings.writer,
            bell: rings.bell,
            counters,
            waiting: VecDeque::new(),
            sending: VecDeque::new(),
            stirred: false,
        };
        let out = Out::Local(out);
        Self(Inbox::Local(inbox), Outbox { rank, address, out })
    }

    /// The way over a connection.
    pub(crate) fn remote(rank: u32, address: String, link: Link) -> Self {
        let (reads, writes) = link.split();
        let out = Out::Remote(remote::Outbox::new(writes));
        Self(
            Inbox::Remote(remote::Inbox::new(reads)),
            Outbox { rank, address, out },
        )
    }
}

/// A frame, and the length of what follows it: in a piece of a message at most `piece` bytes, with an offer at most `inline`.
fn checked(
    bytes: &[u8; Control::BYTES],
    epoch: Epoch,
    piece: usize,
    inline: usize,
) -> Result<(Control, usize)> {
    let protocol = |text: String| Err(Error::new(ErrorKind::Protocol, text));
    let Some(frame) = Control::decode(bytes) else {
        return protocol("sent something that is not the frame of a message".to_string());
    };
    if frame.epoch != epoch {
        let text = format!("sent a frame of epoch {}; this is epoch {epoch}", frame.epoch);
        return protocol(text);
    }
    let payload = match frame.kind {
        ControlKind::Offer | ControlKind::Accept | ControlKind::Taken => Some(0),
        ControlKind::Data => usize::try_from(frame.length).ok().filter(|n| *n <= piece),
        ControlKind::Inline => payload_of(&frame).filter(|n| *n <= inline),
        ControlKind::Abort | ControlKind::Leave | ControlKind::Ready => None,
    };
    match payload {
        Some(payload) => Ok((frame, payload)),
        None => protocol(format!("sent a frame that messages do not have: {frame:?}")),
    }
}

/// The bytes behind an offer that has them.
fn payload_of(frame: &Control) -> Option<usize> {
    let size = DType::from_code(frame.code)?.size();
    usize::try_from(frame.length).ok()?.checked_mul(size)
}

impl Outbox {
    /// Wakes the rank if it shares memory, waits, and something happened.
    fn ring(&mut self) {
        if let Out::Local(out) = &mut self.out {
            out.ring();
        }
    }

    /// True if nothing waits to be written but pieces of messages that are pending.
    fn is_empty(&self) -> bool {
        match &self.out {
            Out::Local(out) => out.waiting.is_empty(),
            Out::Remote(out) => out.is_empty(),
        }
    }
}

impl Way for Outbox {
    fn push(&mut self, frame: Control) {
        match &mut self.out {
            Out::Local(out) => out.push(frame),
            Out::Remote(out) => out.push(&frame, 0),
        }
    }

    fn offer(&mut self, frame: Control, bytes: &[u8]) -> bool {
        match &mut self.out {
            Out::Local(out) => out.offer(frame, bytes),
            Out::Remote(out) => out.offer(frame, bytes),
        }
    }

    fn begin(&mut self, id: u64) {
        match &mut self.out {
            Out::Local(out) => out.sending.push_back(id),
            Out::Remote(out) => out.sending.push_back(id),
        }
    }

    fn blame(&self, error: Error) -> Error {
        if error.context().peer.is_some() {
            return error;
        }
        error.with_peer(self.rank).with_peer_address(self.address.clone())
    }
}

/// What is known of the end of a rank (see `ends`).
#[derive(Debug, Default)]
struct End {
    fate: Option<Fate>,
    /// Something of it came in this turn; there may be more.
    heard: bool,
    /// Since when nothing more came although it is gone or its connection has ended, and how often the engine's thread had looked at the control
    /// connections by then.
    silent: Option<(Instant, u64)>,
}

impl End {
    /// A turn has read what there was of it.
    fn hears(&mut self, something: bool) {
        self.heard = something;
        if something {
            self.silent = None;
        }
    }
}

/// All point-to-point state of a group.
pub(crate) struct Channels {
    pub(crate) place: Place,
    /// By rank; `None` at the own one.
    pub(crate) inboxes: Vec<Option<Inbox>>,
    /// Likewise.
    pub(crate) outboxes: Vec<Option<Outbox>>,
    pub(crate) messages: Messages,
    /// By rank.
    ends: Vec<End>,
    /// How many fates of other ranks are in there.
    fates: usize,
    pub(crate) spin_budget: SpinBudget,
    /// There are as many cores as ranks: a look keeps no thread from running.
    pub(crate) spins: bool,
    /// Why the driver gave up: the engine's thread ends the group with it.
    pub(crate) failure: Option<Error>,
    /// No thread drives them, and their bell is armed for the engine's thread.
    pub(crate) parked: bool,
}

impl Channels {
    /// `apart`: the ranks of this host have a core each.
    pub(crate) fn new(place: Place, channels: Vec<Option<Channel>>, apart: bool) -> Self {
        let spin_budget = SpinBudget::of(channels.iter().flatten().count(), apart);
        let spins = spin_budget.spins();
        let one_host = place.one_host;
        let split = |channel: Option<Channel>| match channel {
            Some(Channel(inbox, outbox)) => (Some(inbox), Some(outbox)),
            None => (None, None),
        };
        let (inboxes, outboxes) = channels.into_iter().map(split).unzip();
        Self {
            place,
            inboxes,
            outboxes,
            messages: Messages::new(place),
            ends: (0..place.world).map(|_| End::default()).collect(),
            fates: 0,
            spin_budget: match one_host {
                true if spins => spin_budget,
                true => SpinBudget::yielding(YIELDS),
                false => SpinBudget::with_sockets(),
            },
            spins,
            failure: None,
            parked: false,
        }
    }

    /// True if nothing is pending, nor waits to be written.
    pub(crate) fn is_idle(&self) -> bool {
        let mut outboxes = self.outboxes.iter().flatten();
        self.messages.is_idle() && self.failure.is_none() && outboxes.all(Outbox::is_empty)
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
        // Before the rings: what a rank wrote before it went is there to be read.
        self.take_in(shared);
        let mut moved = false;
        let mut failed = None;
        for s in shared.take_messages() {
            moved = true;
            // The first one that fails ends the group, and its end gives back the tensors of all that are in here.
            if let Err(error) = self.submit(s) {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)?;
        for rank in 0..self.place.world {
            let heard = self.read(rank).map_err(|e| self.blame(rank, e))?;
            if let Some(end) = self.ends.get_mut(rank as usize) {
                end.hears(heard);
            }
            moved |= heard;
            moved |= self.write(rank).map_err(|e| self.blame(rank, e))?;
        }
        self.outboxes.iter_mut().flatten().for_each(Outbox::ring);
        if self.fates > 0 || !self.place.one_host {
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

    /// Takes the frames that `rank` has sent, for as long as something is pending. What comes after waits for its
    /// receive: read now, a short message would be an offer only, and its bytes would have to come again.
    fn read(&mut self, rank: u32) -> Result<bool> {
        let index = rank as usize;
        let (messages, ways) = (&mut self.messages, &mut self.outboxes);
        let inbox = match self.inboxes.get_mut(index) {
            Some(Some(Inbox::Local(inbox))) => inbox,
            Some(Some(Inbox::Remote(inbox))) => return inbox.read(self.place, rank, messages, ways),
            _ => return Ok(false),
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
            if let Some(Some(Outbox {
                out: Out::Local(out), ..
            })) = ways.get_mut(index)
            {
                out.stirred = true;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Writes what waits for `rank` as far as there is room: frames first, then pieces of messages in turn.
    fn write(&mut self, rank: u32) -> Result<bool> {
        let way = match self.outboxes.get_mut(rank as usize) {
            Some(Some(Outbox {
                out: Out::Local(out), ..
            })) => out,
            Some(Some(Outbox {
                out: Out::Remote(out),
                ..
            })) => return out.write(self.place, &mut self.messages),
            _ => return Ok(false),
        };
        let mut moved = false;
        while let Some(frame) = way.waiting.pop_front() {
            if !way.put(&frame, &[])? {
                way.waiting.push_front(frame);
                return Ok(moved);
            }
            moved = true;
        }
        for _ in 0..FRAMES {
            let Some(id) = way.sending.pop_front() else {
                break;
            };
            let rest = self.messages.rest(id).unwrap_or(&[]);
            let piece = rest.get(..local::PIECE).unwrap_or(rest);
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

    /// When the driver must look again, whatever happens.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let suspects = self.ends.iter().filter_map(|end| end.silent);
        let looks = suspects.map(|(since, _)| match now.saturating_duration_since(since) < GRACE {
            true => later(since, GRACE),
            false => later(now, GRACE / 10),
        });
        looks.chain(self.messages.deadline()).min()
    }

    /// True if every rank shares memory: a driver needs to watch no socket.
    pub(crate) fn is_local(&self) -> bool {
        self.place.one_host
    }

    /// The sockets that are waited for, and whose they are: the rank, and whether it is for writing. `None` if one has something already.
    pub(crate) fn interest<'a>(
        &'a self,
        fds: &mut Vec<PollFd<'a>>,
        whose: &mut Vec<(u32, bool)>,
    ) -> Option<()> {
        for (inbox, outbox) in self.inboxes.iter().flatten().zip(self.outboxes.iter().flatten()) {
            let (Inbox::Remote(inbox), Out::Remote(out)) = (inbox, &outbox.out) else {
                continue;
            };
            // What comes while nothing is pending is not read.
            if inbox.link.read_closed.is_none() && !self.messages.is_idle() {
                if inbox.link.readable {
                    return None;
                }
                fds.push(PollFd::from_borrowed_fd(inbox.link.as_fd(), PollFlags::IN));
                whose.push((outbox.rank, false));
            }
            if out.wants_write() {
                if out.link.writable {
                    return None;
                }
                fds.push(PollFd::from_borrowed_fd(out.link.as_fd(), PollFlags::OUT));
                whose.push((outbox.rank, true));
            }
        }
        Some(())
    }

    /// Between two looks without a sleep nothing says what is ready: the sockets are simply tried.
    pub(crate) fn try_sockets(&mut self) {
        for inbox in self.inboxes.iter_mut().flatten() {
            if let Inbox::Remote(inbox) = inbox {
                inbox.link.readable = inbox.link.read_closed.is_none();
            }
        }
        for outbox in self.outboxes.iter_mut().flatten() {
            if let Out::Remote(out) = &mut outbox.out {
                out.link.writable = out.link.write_closed.is_none();
            }
        }
    }

    /// What poll said about the sockets of [`interest`](Self::interest).
    pub(crate) fn heard(&mut self, whose: &[(u32, bool)], ready: &[PollFlags]) {
        for ((rank, write), flags) in whose.iter().zip(ready) {
            let index = *rank as usize;
            if flags.is_empty() {
                continue;
            }
            match (write, self.inboxes.get_mut(index), self.outboxes.get_mut(index)) {
                (false, Some(Some(Inbox::Remote(inbox))), _) => inbox.link.readable = true,
                (true, _, Some(Some(outbox))) => {
                    if let Out::Remote(out) = &mut outbox.out {
                        out.link.writable = true;
                    }
                }
                _ => {}
            }
        }
    }

    /// All connections, with the hand that reads.
    pub(crate) fn into_links(self) -> impl Iterator<Item = Link> {
        self.inboxes
            .into_iter()
            .flatten()
            .filter_map(|inbox| match inbox {
                Inbox::Local(_) => None,
                Inbox::Remote(inbox) => Some(inbox.link),
            })
    }

    /// Reads what is not wanted any more, before the connections close.
    pub(crate) fn forget(&mut self) {
        for inbox in self.inboxes.iter_mut().flatten() {
            if let Inbox::Remote(inbox) = inbox {
                inbox.forget();
            }
        }
    }

    /// The error of a message whose deadline has passed, if there is one.
    pub(crate) fn check_deadlines(&self) -> Result<()> {
        self.messages.overdue(Instant::now()).map_or(Ok(()), Err)
    }
}
