//! Blocking sends and receives, run by their caller.
//!
//! A short message goes with its offer, and its receiver says that it has it: between ranks that share memory two hand-overs of a cache line, of
//! which the second passes while the receiver goes on. For as long as a rank looks again anyway that is done there without any books (`quick`);
//! whatever is not there by then, or is not the very next frame, goes the way of all messages. A thread that waits for one that was submitted drives
//! them, too.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ftcore::flight_recorder::Summary;
use ftcore::{
    Collective, Completion, DType, Epoch, Error, Failed, Result, Status, Tensor, deadline_in, time_left,
};
use rustix::event::{PollFd, PollFlags};

use crate::caller::{LOOK_AGAIN, looks, outcome};
use crate::channels::{Channels, Inbox, Out, Outbox, YIELDS, local};
use crate::executor::wait_for;
use crate::p2p::{Begun, Way, copy, lost};
use crate::queue::{Shared, Submission, Taken, refusal};
use crate::spin_budget::SpinBudget;
use crate::transport::shm::Sleep;
use crate::waiter::{Driven, Waiter};
use crate::wire::{Control, ControlKind, INLINE};

/// Looks for the answer before others are let run in between: some hand-overs long. A rank that shares its core with the one it waits
/// for loses no more than that.
const SPINS: u32 = 100;

impl Driven for Channels {
    fn spin_budget(&mut self) -> &mut SpinBudget {
        &mut self.spin_budget
    }

    // A turn looks.
    fn look(&mut self, _: &Shared) -> bool {
        false
    }

    fn glance(&mut self) -> u32 {
        if self.is_local() {
            std::hint::spin_loop();
        } else {
            self.try_sockets();
        }
        0
    }

    fn arm(&self, shared: &Shared) {
        let how = if self.is_local() {
            Sleep::Word
        } else {
            Sleep::Descriptor
        };
        shared.channels_bell().arm(how);
    }

    fn disarm(&self, shared: &Shared) {
        shared.channels_bell().disarm();
    }

    fn sleep(&mut self, shared: &Shared, until: Instant) -> Result<()> {
        let bell = shared.channels_bell();
        if self.is_local() {
            bell.sleep(until);
            return Ok(());
        }
        let Some(descriptor) = bell.descriptor() else {
            bell.disarm();
            return Ok(());
        };
        let mut fds = vec![PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
        let mut whose = Vec::new();
        if self.interest(&mut fds, &mut whose).is_none() {
            bell.disarm();
            return Ok(());
        }
        wait_for(&mut fds, Some(until))?;
        bell.disarm();
        bell.drain();
        let ready: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        drop(fds);
        self.heard(&whose, &ready);
        Ok(())
    }
}

/// The channels while a caller drives it; given back whatever happens.
struct Round<'a> {
    shared: &'a Shared,
    channels: Option<Box<Channels>>,
}

impl Round<'_> {
    fn channels(&mut self) -> Result<&mut Channels> {
        self.channels.as_deref_mut().ok_or_else(lost)
    }

    /// What is pending waits for others, and this thread does not.
    fn park(mut self) {
        if let Some(channels) = self.channels.take() {
            self.shared.park_channels(channels);
        }
    }

    /// The caller gives up: the engine's thread ends the group with `error`.
    fn fail(mut self, error: Error) {
        if let Some(channels) = &mut self.channels {
            channels.failure.get_or_insert(error);
        }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if let Some(channels) = self.channels.take() {
            self.shared.give_back_channels(channels, Taken::Caller);
        }
    }
}

/// What a blocking send or receive finds.
pub(crate) enum Begin {
    /// There are no other messages: the caller drives the channels itself.
    Here(Box<Channels>),
    /// Through the queue.
    Queued,
    /// Nothing can be submitted.
    Refused(Error),
}

/// A send that may go the quick way: what, to whom, under which tag.
type Sending<'a> = Option<(&'a Tensor, u32, u32)>;
/// Likewise a receive.
type Receiving<'a> = Option<(&'a mut Tensor, u32, u32)>;

/// The one send and the one receive that an operation consists of; `None` if it is another one.
fn pair_of(op: &mut Collective) -> Option<(Sending<'_>, Receiving<'_>)> {
    match op {
        Collective::Send { tensor, peer, tag } => Some((Some((tensor, *peer, *tag)), None)),
        Collective::Recv { tensor, peer, tag } => Some((None, Some((tensor, (*peer)?, *tag)))),
        Collective::Batch { ops } => match ops.as_mut_slice() {
            [one, two] => match (pair_of(one)?, pair_of(two)?) {
                ((Some(send), None), (None, Some(receive))) | ((None, Some(receive)), (Some(send), None)) => {
                    Some((Some(send), Some(receive)))
                }
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

impl Shared {
    /// For a blocking send or receive: the channels, if there are no other messages.
    pub(crate) fn begin_messages(&self) -> Begin {
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            return Begin::Refused(error);
        }
        let idle = queue.messages.is_empty() && queue.channels.as_ref().is_some_and(|m| m.is_idle());
        match queue.channels.take_if(|_| idle) {
            Some(channels) => Begin::Here(channels),
            None => Begin::Queued,
        }
    }

    /// The channels for the engine's thread, if they have no driver and something to do.
    pub(crate) fn take_busy_channels(&self) -> Option<Box<Channels>> {
        let mut queue = self.lock();
        let busy = !queue.messages.is_empty();
        let channels = queue.channels.take_if(|channels| busy || !channels.is_idle());
        drop(queue);
        channels.map(|channels| self.unparked_channels(channels))
    }

    /// A driver looks for itself.
    fn unparked_channels(&self, mut channels: Box<Channels>) -> Box<Channels> {
        if std::mem::take(&mut channels.parked) {
            self.channels_bell().disarm();
        }
        channels
    }

    /// Begins a message that was submitted: sends what goes, and leaves the rest to the thread that waits for it, or to the engine's once others ring.
    pub(crate) fn send_here(&self, channels: Box<Channels>, submission: Submission) {
        let mut round = Round {
            shared: self,
            channels: Some(self.unparked_channels(channels)),
        };
        match self.send_on(&mut round, submission) {
            Ok(true) => round.park(),
            Ok(false) => drop(round),
            Err(error) => round.fail(error),
        }
    }

    /// The first turns of a message. True if it waits, with the bell armed for the engine's thread.
    fn send_on(&self, round: &mut Round<'_>, submission: Submission) -> Result<bool> {
        let channels = round.channels()?;
        channels.submit(submission)?;
        for _ in 0..looks(channels.spins) {
            channels.turn(self)?;
            if channels.is_idle() {
                return Ok(false);
            }
        }
        // What came before that is seen now; for what comes after it others ring.
        self.channels_bell().arm(Sleep::Thread);
        match channels.turn(self) {
            Ok(false) => Ok(true),
            other => {
                self.channels_bell().disarm();
                other.map(|_| false)
            }
        }
    }

    /// Drives the messages, if no other thread does, until what the caller waits for has `ended`, or `until`.
    pub(crate) fn help_messages(&self, ended: &dyn Fn() -> bool, until: Instant) {
        if time_left(until).is_zero() {
            return;
        }
        let Some(channels) = self.take_busy_channels() else {
            return;
        };
        let mut round = Round {
            shared: self,
            channels: Some(channels),
        };
        match self.deliver(&mut round, ended, Some(until)) {
            Ok(()) => drop(round),
            Err(error) => round.fail(error),
        }
    }

    /// Puts the channels back.
    pub(crate) fn give_back_channels(&self, channels: Box<Channels>, by: Taken) {
        let mut queue = self.lock();
        let more = !channels.is_idle() || !queue.messages.is_empty() || queue.stop.is_some();
        queue.channels = Some(channels);
        drop(queue);
        if self.interrupt().load(Ordering::Acquire) {
            self.changed.notify_all();
        }
        if by == Taken::Caller && (more || self.in_trouble()) {
            self.wake();
        }
    }

    /// The messages that were submitted and not taken by the driver of the channels.
    pub(crate) fn take_messages(&self) -> VecDeque<Submission> {
        if !self.incoming.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        let mut queue = self.lock();
        self.incoming.store(false, Ordering::Release);
        std::mem::take(&mut queue.messages)
    }

    /// Runs a blocking send, receive or batch with the channels that [`begin_messages`](Shared::begin_messages) gave out.
    pub(crate) fn carry(
        self: &Arc<Self>,
        channels: Box<Channels>,
        mut op: Collective,
        deadline: Instant,
    ) -> Result<Completion, Box<Failed>> {
        let kind = op.kind();
        let mut round = Round {
            shared: self,
            channels: Some(channels),
        };
        let recorder = self.recorder.get();
        let running = recorder.map(|recorder| recorder.started(&Summary::of(&op), None));
        let quick = match pair_of(&mut op) {
            Some((send, receive)) => round
                .channels()
                .and_then(|channels| channels.quick(send, receive)),
            None => Ok(Begun::default()),
        };
        if let Ok(Begun {
            taken: true,
            received: true,
            ..
        }) = quick
        {
            drop(round);
            if let Some((recorder, running)) = recorder.zip(running) {
                recorder.ended(running, None);
            }
            let source = match &op {
                Collective::Recv { peer, .. } => *peer,
                _ => None,
            };
            return Ok(Completion {
                tensors: op.into_tensors(),
                source,
                contributors: 0,
            });
        }
        let (work, completer) = self.work(kind, deadline, None);
        if let Some((recorder, running)) = recorder.zip(running) {
            completer.record(recorder.entry(running));
        }
        let submission = Submission {
            op,
            seq: None,
            contribute: true,
            deadline,
            submitted: Instant::now(),
            completer,
        };
        let begun = match (quick, round.channels()) {
            (Ok(begun), Ok(channels)) if begun.sent.is_some() => {
                channels
                    .messages
                    .adopt(submission.op, begun, submission.completer, deadline);
                Ok(())
            }
            (Ok(_), Ok(channels)) => channels.submit(submission),
            // A damaged ring: the operation ends with the group.
            (Err(error), Ok(channels)) => channels.submit(submission).and(Err(error)),
            (_, Err(error)) => Err(error),
        };
        let ended = || !matches!(work.status(), Status::Pending);
        match begun.and_then(|()| self.deliver(&mut round, &ended, None)) {
            Ok(()) => drop(round),
            Err(error) => round.fail(error),
        }
        outcome(&work)
    }

    /// Drives the channels until what is waited for has `ended`, or `until`.
    fn deliver(&self, round: &mut Round<'_>, ended: &dyn Fn() -> bool, until: Option<Instant>) -> Result<()> {
        let mut waiter = Waiter::default();
        let channels = round.channels()?;
        if let Some(error) = channels.failure.take() {
            return Err(error);
        }
        loop {
            let moved = channels.turn(self)?;
            if moved {
                waiter.moved(channels, self);
            }
            let asks = waiter.asks_the_clock();
            if ended() || ((moved || asks) && until.is_some_and(|until| time_left(until).is_zero())) {
                waiter.moved(channels, self);
                return Ok(());
            }
            if moved {
                continue;
            }
            if asks {
                channels.check_deadlines()?;
            }
            waiter.wait(channels, self, |channels| {
                let due = channels.next_deadline().into_iter().chain(until).min();
                due.unwrap_or_else(|| deadline_in(LOOK_AGAIN))
            })?;
        }
    }
}

impl Channels {
    /// Sends a short message, receives one, or both, as far as that goes while a rank would look again anyway.
    fn quick(&mut self, send: Sending<'_>, mut receive: Receiving<'_>) -> Result<Begun> {
        let spins = if self.spins { SPINS } else { 0 };
        // An offer that came before goes first.
        if !self.messages.is_clear() {
            return Ok(Begun::default());
        }
        let mut begun = Begun {
            sent: None,
            taken: send.is_none(),
            received: receive.is_none(),
        };
        let mut to = None;
        if let Some((tensor, peer, tag)) = send {
            to = Some(peer);
            begun.sent = self.send_short(tensor, peer, tag)?;
            if begun.sent.is_none() {
                return Ok(Begun::default());
            }
        }
        let from = receive.as_ref().map(|(_, peer, _)| *peer);
        for look in 0..spins + YIELDS {
            let mut moved = false;
            for peer in [from.filter(|_| !begun.received), to.filter(|_| !begun.taken)]
                .into_iter()
                .flatten()
            {
                match self.quick_step(peer, &mut begun, &mut receive)? {
                    Some(true) => moved = true,
                    Some(false) => {}
                    None => return Ok(begun),
                }
            }
            if begun.taken && begun.received {
                return Ok(begun);
            }
            if moved {
                continue;
            }
            if look < spins {
                std::hint::spin_loop();
            } else {
                rustix::thread::sched_yield();
            }
        }
        Ok(begun)
    }

    /// The number under which a message went out with its offer; `None` if it is too long or there is no room.
    fn send_short(&mut self, tensor: &Tensor, peer: u32, tag: u32) -> Result<Option<u64>> {
        let bytes = tensor.bytes();
        let id = self.messages.number();
        let frame = Control {
            kind: ControlKind::Inline,
            code: tensor.dtype().code(),
            epoch: self.place.epoch,
            id,
            a: tag,
            b: self.place.rank,
            length: tensor.count() as u64,
        };
        let Some(Some(outbox)) = self.outboxes.get_mut(peer as usize) else {
            return Ok(None);
        };
        let Out::Local(out) = &mut outbox.out else {
            return Ok(None);
        };
        if bytes.len() > INLINE {
            return Ok(None);
        }
        match out.put_alone(&frame, bytes) {
            Ok(false) => return Ok(None),
            Ok(true) => out.ring(),
            Err(error) => return Err(outbox.blame(error)),
        }
        Ok(Some(id))
    }

    /// Takes the next frame of `peer` if it is what is waited for. True if so; `None` if it is something else.
    fn quick_step(
        &mut self,
        peer: u32,
        begun: &mut Begun,
        receive: &mut Receiving<'_>,
    ) -> Result<Option<bool>> {
        let (rank, epoch) = (self.place.rank, self.place.epoch);
        let index = peer as usize;
        let (Some(Some(outbox)), Some(Some(Inbox::Local(inbox)))) =
            (self.outboxes.get_mut(index), self.inboxes.get_mut(index))
        else {
            return Ok(None);
        };
        let stepped = quick_frame((rank, epoch), inbox, outbox, begun, receive);
        stepped.map_err(|e| outbox.blame(e))
    }
}

/// Of one rank that shares memory; see [`Channels::quick_step`].
fn quick_frame(
    (rank, epoch): (u32, Epoch),
    inbox: &mut local::Inbox,
    outbox: &mut Outbox,
    begun: &mut Begun,
    receive: &mut Receiving<'_>,
) -> Result<Option<bool>> {
    let peer = outbox.rank;
    let Out::Local(out) = &mut outbox.out else {
        return Ok(None);
    };
    let Some((frame, payload)) = inbox.next(epoch)? else {
        return Ok(Some(false));
    };
    if frame.kind == ControlKind::Taken && !begun.taken && begun.sent == Some(frame.id) {
        inbox.take(payload);
        out.stirred = true;
        out.ring();
        begun.taken = true;
        return Ok(Some(true));
    }
    let Some((tensor, from, tag)) = receive.as_mut().filter(|_| !begun.received) else {
        return Ok(None);
    };
    let same = frame.kind == ControlKind::Inline
        && *from == peer
        && frame.a == *tag
        && frame.code == tensor.dtype().code()
        && frame.length == tensor.count() as u64;
    if !same || !out.has_room()? {
        return Ok(None);
    }
    copy(false, tensor.bytes_mut(), inbox.payload(payload))?;
    if tensor.dtype() == DType::Bool {
        crate::kernels::canonical_bools(tensor.bytes_mut());
    }
    inbox.take(payload);
    out.push(Control::taken(epoch, rank, frame.id));
    out.ring();
    begun.received = true;
    Ok(Some(true))
}
