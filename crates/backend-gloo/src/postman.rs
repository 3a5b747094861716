//! Blocking sends and receives, run by their caller.
//!
//! A short message goes with its offer, and its receiver says that it has it: between ranks that share memory two hand-overs of a cache line, of
//! which the second passes while the receiver goes on. For as long as a rank looks again anyway that is done there without any books (`quick`);
//! whatever is not there by then, or is not the very next frame, goes the way of all messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ftcore::{Collective, Completion, DType, Error, Failed, Result, Status, Tensor, Work, deadline_in};
use rustix::event::{PollFd, PollFlags};

use crate::caller::{LOOK_AGAIN, outcome};
use crate::lane::wait_for;
use crate::mail::{Inbox, Mail, Out, Outbox, YIELDS, near};
use crate::p2p::{Begun, Way, copy, lost};
use crate::queue::{Shared, Submission, Taken, refusal};
use crate::transport::shm::Sleep;
use crate::waiter::{Driven, Patience, Waiter};
use crate::wire::{Control, ControlKind, INLINE};

/// Looks for the answer before others are let run in between: some hand-overs long. A rank that shares its core with the one it waits
/// for loses no more than that.
const SPINS: u32 = 100;

impl Driven for Mail {
    fn patience(&mut self) -> &mut Patience {
        &mut self.patience
    }

    // A turn looks.
    fn look(&mut self, _: &Shared) {}

    fn glance(&mut self) -> u32 {
        if self.is_near() {
            std::hint::spin_loop();
        } else {
            self.try_sockets();
        }
        0
    }

    fn arm(&self, shared: &Shared) {
        let how = if self.is_near() {
            Sleep::Word
        } else {
            Sleep::Descriptor
        };
        shared.mail_bell().arm(how);
    }

    fn disarm(&self, shared: &Shared) {
        shared.mail_bell().disarm();
    }

    fn sleep(&mut self, shared: &Shared, until: Instant) -> Result<()> {
        let bell = shared.mail_bell();
        if self.is_near() {
            bell.sleep(until);
            return Ok(());
        }
        let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
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

/// The mail while a caller drives it; given back whatever happens.
struct Round<'a> {
    shared: &'a Shared,
    mail: Option<Box<Mail>>,
}

impl Round<'_> {
    fn mail(&mut self) -> Result<&mut Mail> {
        self.mail.as_deref_mut().ok_or_else(lost)
    }

    /// The caller gives up: the engine's thread ends the group with `error`.
    fn fail(mut self, error: Error) {
        if let Some(mail) = &mut self.mail {
            mail.failure.get_or_insert(error);
        }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if let Some(mail) = self.mail.take() {
            self.shared.give_back_mail(mail, Taken::Caller);
        }
    }
}

/// What a blocking send or receive finds.
pub(crate) enum Begin {
    /// There are no other messages: the caller drives the mail itself.
    Here(Box<Mail>),
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
    /// For a blocking send or receive: the mail, if there are no other messages.
    pub(crate) fn begin_mail(&self) -> Begin {
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            return Begin::Refused(error);
        }
        let idle = queue.messages.is_empty() && queue.mail.as_ref().is_some_and(|m| m.is_idle());
        match queue.mail.take_if(|_| idle) {
            Some(mail) => Begin::Here(mail),
            None => Begin::Queued,
        }
    }

    /// The mail for the engine's thread, if nobody drives it and it has something to do.
    pub(crate) fn take_busy_mail(&self) -> Option<Box<Mail>> {
        let mut queue = self.lock();
        let busy = !queue.messages.is_empty();
        queue.mail.take_if(|mail| busy || !mail.is_idle())
    }

    /// Puts the mail back.
    pub(crate) fn give_back_mail(&self, mail: Box<Mail>, by: Taken) {
        let mut queue = self.lock();
        let more = !mail.is_idle() || !queue.messages.is_empty() || queue.stop.is_some();
        queue.mail = Some(mail);
        drop(queue);
        if self.interrupt().load(Ordering::Acquire) {
            self.changed.notify_all();
        }
        if by == Taken::Caller && (more || self.in_trouble()) {
            self.waker().wake();
        }
    }

    /// The messages that were submitted and not taken by whoever drives the mail.
    pub(crate) fn take_messages(&self) -> VecDeque<Submission> {
        if !self.incoming.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        let mut queue = self.lock();
        self.incoming.store(false, Ordering::Release);
        std::mem::take(&mut queue.messages)
    }

    /// Runs a blocking send, receive or batch with the mail that [`begin_mail`](Shared::begin_mail) gave out.
    pub(crate) fn carry(
        self: &Arc<Self>,
        mail: Box<Mail>,
        mut op: Collective,
        deadline: Instant,
    ) -> Result<Completion, Box<Failed>> {
        let kind = op.kind();
        let mut round = Round {
            shared: self,
            mail: Some(mail),
        };
        let quick = match pair_of(&mut op) {
            Some((send, receive)) => round.mail().and_then(|mail| mail.quick(send, receive)),
            None => Ok(Begun::default()),
        };
        if let Ok(Begun {
            taken: true,
            received: true,
            ..
        }) = quick
        {
            drop(round);
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
        let submission = Submission {
            op,
            seq: None,
            contribute: true,
            deadline,
            submitted: Instant::now(),
            completer,
        };
        let begun = match (quick, round.mail()) {
            (Ok(begun), Ok(mail)) if begun.sent.is_some() => {
                mail.messages
                    .adopt(submission.op, begun, submission.completer, deadline);
                Ok(())
            }
            (Ok(_), Ok(mail)) => mail.submit(submission),
            // A damaged ring: the operation ends with the group.
            (Err(error), Ok(mail)) => mail.submit(submission).and(Err(error)),
            (_, Err(error)) => Err(error),
        };
        match begun.and_then(|()| self.deliver(&mut round, &work)) {
            Ok(()) => drop(round),
            Err(error) => round.fail(error),
        }
        outcome(&work)
    }

    /// Drives the mail until `work` has ended.
    fn deliver(&self, round: &mut Round<'_>, work: &Work) -> Result<()> {
        let mut waiter = Waiter::default();
        let mail = round.mail()?;
        loop {
            if mail.turn(self)? {
                waiter.moved(mail, self);
                if !matches!(work.status(), Status::Pending) {
                    return Ok(());
                }
                continue;
            }
            if waiter.is_slow() {
                mail.check_deadlines()?;
            }
            let due = mail.next_deadline();
            waiter.wait(mail, self, due.unwrap_or_else(|| deadline_in(LOOK_AGAIN)))?;
        }
    }
}

impl Mail {
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
        let Out::Near(out) = &mut outbox.out else {
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
        let (Some(Some(outbox)), Some(Some(Inbox::Near(inbox)))) =
            (self.outboxes.get_mut(index), self.inboxes.get_mut(index))
        else {
            return Ok(None);
        };
        let stepped = quick_frame((rank, epoch), inbox, outbox, begun, receive);
        stepped.map_err(|e| outbox.blame(e))
    }
}

/// Of one rank that shares memory; see [`Mail::quick_step`].
fn quick_frame(
    (rank, epoch): (u32, u64),
    inbox: &mut near::Inbox,
    outbox: &mut Outbox,
    begun: &mut Begun,
    receive: &mut Receiving<'_>,
) -> Result<Option<bool>> {
    let peer = outbox.rank;
    let Out::Near(out) = &mut outbox.out else {
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
    copy(tensor.bytes_mut(), inbox.payload(payload))?;
    if tensor.dtype() == DType::Bool {
        crate::kernels::canonical_bools(tensor.bytes_mut());
    }
    inbox.take(payload);
    out.push(Control::taken(epoch, rank, frame.id));
    out.ring();
    begun.received = true;
    Ok(Some(true))
}
