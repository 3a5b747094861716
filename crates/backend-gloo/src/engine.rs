//! One thread per configuration: takes submissions, moves bytes, watches deadlines and peers, and ends.
//!
//! Submissions enter a queue under a mutex, where collectives get their sequence numbers; the thread takes them out, runs
//! collectives one after the other and point-to-point messages beside them, and sleeps in `poll` in between. The first
//! failure ends the engine: everything pending fails with that cause, every peer is told so that nobody waits (L27),
//! and the thread and its sockets are gone. Deadlines, peers and work belong to this one epoch (L30).

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Completer, Error, ErrorKind, OpKind, Result, Work, deadline_in, time_left, work_pair,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::exec::{Exec, Label, Place, Step};
use crate::p2p::Messages;
use crate::peer::{Incoming, Payload, Peer};
use crate::plan::plan;
use crate::transport::waker::Waker;
use crate::wire::{self, Control, ControlKind};

/// A data connection that breaks gets this long until the control connection has said why.
const GRACE: Duration = Duration::from_millis(50);
/// How long the last words of a failed engine may take.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Control frames that are read from one peer before the others get their turn.
const FRAMES: usize = 64;
/// Ranks other than 0 give rank 0 of a monitored barrier this long after the deadline to name the missing ones.
const VERDICT: Duration = Duration::from_millis(500);

/// How a group ends.
#[derive(Debug, Clone)]
enum Stop {
    /// Pending work fails with this; peers are told.
    Abort(Error),
    /// In good order if nothing is pending, else as `Abort` with this text.
    Leave(String),
    /// Like `Leave`, once nothing is pending, or at the deadline.
    Drain(Instant),
}

struct Submission {
    op: Collective,
    /// `None` for point-to-point.
    seq: Option<u64>,
    contribute: bool,
    deadline: Instant,
    submitted: Instant,
    completer: Completer,
}

#[derive(Default)]
struct Queue {
    incoming: VecDeque<Submission>,
    next_seq: u64,
    stop: Option<Stop>,
    first_error: Option<Error>,
    /// The thread has let go of its peers and its work.
    ended: bool,
    /// The drain was cut short by its deadline.
    cut_short: bool,
}

/// What the group's handle and the engine's thread have in common.
pub(crate) struct Shared {
    pub(crate) place: Place,
    queue: Mutex<Queue>,
    changed: Condvar,
    waker: Waker,
    /// Raised with every stop, so that long local work ends early.
    interrupt: AtomicBool,
}

impl Shared {
    pub(crate) fn new(place: Place) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            place,
            queue: Mutex::new(Queue::default()),
            changed: Condvar::new(),
            waker: Waker::new()?,
            interrupt: AtomicBool::new(false),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure.
    pub(crate) fn error(&self) -> Option<Error> {
        self.lock().first_error.clone()
    }

    /// Puts an operation into the queue, or says why not and gives it back.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Collective,
        contribute: bool,
        deadline: Instant,
    ) -> Result<Work, (Error, Collective)> {
        let kind = op.kind();
        let weak = Arc::downgrade(self);
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            return Err((error, op));
        }
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(shared) = weak.upgrade() {
                shared.abort(reason);
            }
        });
        let seq = (!kind.is_p2p()).then_some(queue.next_seq);
        queue.next_seq += u64::from(seq.is_some());
        let submission = Submission {
            op,
            seq,
            contribute,
            deadline,
            submitted: Instant::now(),
            completer,
        };
        if self.place.world == 1 {
            drop(queue);
            self.run_alone(submission);
            return Ok(work);
        }
        queue.incoming.push_back(submission);
        drop(queue);
        self.waker.wake();
        Ok(work)
    }

    /// A world of one needs no thread and no socket.
    fn run_alone(&self, submission: Submission) {
        let Some(seq) = submission.seq else {
            let error = Error::invalid("a world of one has nobody to send to or receive from");
            submission.completer.fail(error, submission.op.into_tensors());
            return;
        };
        match prepare(submission, seq, self.place) {
            Ok(exec) => match exec.run_alone() {
                Ok((completer, completion)) => completer.succeed(completion),
                Err(failed) => {
                    let (error, completer, tensors) = *failed;
                    completer.fail(error, tensors);
                }
            },
            Err(failed) => {
                let (error, completer) = *failed;
                completer.fail(error, Vec::new());
            }
        }
    }

    fn stop(&self, stop: Stop) {
        let mut queue = self.lock();
        // A group of one has no thread that would act on it.
        if self.place.world == 1 {
            if let (Stop::Abort(error), None) = (&stop, &queue.first_error) {
                queue.first_error = Some(error.clone());
            }
            queue.stop.get_or_insert(stop);
            return;
        }
        let stronger = match (&queue.stop, &stop) {
            (None, _) => true,
            (Some(Stop::Drain(_)), _) => true,
            (Some(Stop::Leave(_)), Stop::Abort(_)) => true,
            _ => false,
        };
        if stronger {
            if let (Stop::Abort(error), None) = (&stop, &queue.first_error) {
                // At once, so that no submission slips in between the call and the thread's next turn.
                queue.first_error = Some(error.clone());
            }
            if !matches!(stop, Stop::Drain(_)) {
                self.interrupt.store(true, Ordering::Release);
            }
            queue.stop = Some(stop);
        }
        drop(queue);
        self.waker.wake();
    }

    /// Ends all pending work with `Aborted`. Never blocks.
    pub(crate) fn abort(&self, reason: &str) {
        let text = format!("rank {} aborted the group: {reason}", self.place.rank);
        let error = Error::new(ErrorKind::Aborted, text).with_epoch(self.place.epoch);
        self.stop(Stop::Abort(error));
    }

    /// Ends in good order if idle, else aborts. Never blocks.
    pub(crate) fn leave(&self, reason: &str) {
        self.stop(Stop::Leave(reason.to_string()));
    }

    /// Refuses further work, lets pending work end until `deadline`. Waits for it; `Err` if it had to be cut short.
    pub(crate) fn drain(&self, deadline: Instant) -> Result<()> {
        self.stop(Stop::Drain(deadline));
        self.wait_ended(deadline + LAST_WORDS + GRACE)?;
        if self.lock().cut_short {
            return Err(
                Error::timeout("pending work did not end by the deadline; it was aborted")
                    .with_op("shutdown")
                    .with_rank(self.place.rank)
                    .with_epoch(self.place.epoch),
            );
        }
        Ok(())
    }

    /// Waits until the thread has let go of its sockets and its work.
    pub(crate) fn wait_ended(&self, deadline: Instant) -> Result<()> {
        if self.place.world == 1 {
            return Ok(());
        }
        let mut queue = self.lock();
        while !queue.ended {
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout("the earlier configuration did not end in time")
                    .with_rank(self.place.rank)
                    .with_epoch(self.place.epoch));
            }
            queue = self
                .changed
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }
}

/// Why nothing can be submitted, if nothing can.
fn refusal(queue: &Queue) -> Option<Error> {
    if let Some(first) = &queue.first_error {
        let text = format!("the group failed earlier and was not configured again: {first}");
        return Some(Error::new(ErrorKind::Poisoned, text).with_source(first.clone()));
    }
    match &queue.stop {
        Some(_) => Some(Error::new(ErrorKind::InvalidState, "the group is shut down")),
        None if queue.ended => Some(Error::new(ErrorKind::InvalidState, "the group has ended")),
        None => None,
    }
}

/// Makes the executable form of a collective.
fn prepare(submission: Submission, seq: u64, place: Place) -> Result<Exec, Box<(Error, Completer)>> {
    let kind = submission.op.kind();
    let label = Label {
        kind,
        seq,
        deadline: submission.deadline,
        submitted: submission.submitted,
        elements: submission.op.count(),
        wait_all: matches!(submission.op, Collective::MonitoredBarrier { wait_all: true }),
    };
    match plan(submission.op, submission.contribute, place.rank, place.world) {
        Ok(plan) => Ok(Exec::new(label, place, plan, submission.completer)),
        Err(e) => Err(Box::new((e, submission.completer))),
    }
}

/// How the thread's work came to an end.
enum End {
    Failed(Error),
    Left(String),
}

struct Engine {
    shared: Arc<Shared>,
    peers: Vec<Option<Peer>>,
    waiting: VecDeque<Submission>,
    current: Option<Exec>,
    messages: Messages,
    /// The rank that a peer's abort named as the origin, if it was one.
    reported: Option<(u32, u32)>,
}

/// Marks the end whatever happens, so that nobody waits for a thread that is gone.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.ended = true;
        if queue.first_error.is_none() && queue.stop.is_none() {
            queue.first_error = Some(Error::new(ErrorKind::Internal, "the engine ended unexpectedly"));
        }
        let left = std::mem::take(&mut queue.incoming);
        drop(queue);
        self.0.changed.notify_all();
        drop(left);
    }
}

/// Starts the engine over connected peers (`None` at the own rank).
pub(crate) fn start(shared: &Arc<Shared>, peers: Vec<Option<Peer>>) -> Result<()> {
    let place = shared.place;
    let engine = Engine {
        shared: shared.clone(),
        peers,
        waiting: VecDeque::new(),
        current: None,
        messages: Messages::new(place),
        reported: None,
    };
    let ended = Ended(shared.clone());
    std::thread::Builder::new()
        .name(format!("ox-gloo-{}", place.rank))
        .spawn(move || {
            let ended = ended;
            engine.run();
            drop(ended);
        })
        .map(drop)
        .map_err(|e| Error::io("starting the engine's thread", e))
}

impl Engine {
    fn run(mut self) {
        match self.serve() {
            End::Failed(error) => self.fail(error),
            End::Left(reason) => {
                tracing::debug!(rank = self.shared.place.rank, epoch = self.shared.place.epoch, %reason, "leaving");
                self.tell(ControlKind::Goodbye, 0, u32::MAX, self.shared.place.rank, &reason);
                self.last_words();
            }
        }
        // The sockets close here, before the end is announced.
    }

    fn serve(&mut self) -> End {
        loop {
            let ended = match self.turn() {
                Ok(None) => continue,
                Ok(Some(end)) => end,
                Err(error) => End::Failed(error),
            };
            // An order that interrupted the turn is the true cause.
            if let End::Failed(e) = &ended
                && e.kind() == ErrorKind::Aborted
                && self.shared.interrupt.load(Ordering::Acquire)
                && let Ok(Some(ordered)) = self.take_orders()
            {
                return ordered;
            }
            return ended;
        }
    }

    /// One turn of the loop: look for orders, move what can be moved, sleep until something can.
    fn turn(&mut self) -> Result<Option<End>> {
        if let Some(end) = self.take_orders()? {
            return Ok(Some(end));
        }
        let mut moved = self.control()?;
        moved |= self.collective()?;
        self.check_deadlines()?;
        if !moved {
            self.sleep()?;
        }
        Ok(None)
    }

    fn is_idle(&self) -> bool {
        self.current.is_none() && self.waiting.is_empty() && self.messages.is_idle()
    }

    fn take_orders(&mut self) -> Result<Option<End>> {
        let (incoming, stop) = {
            let mut queue = self.shared.lock();
            (std::mem::take(&mut queue.incoming), queue.stop.clone())
        };
        for submission in incoming {
            if submission.seq.is_some() {
                self.waiting.push_back(submission);
            } else {
                let Submission {
                    op,
                    completer,
                    deadline,
                    submitted,
                    ..
                } = submission;
                self.messages
                    .submit(op, completer, deadline, submitted, &mut self.peers)?;
            }
        }
        Ok(match stop {
            None => None,
            Some(Stop::Abort(error)) => Some(End::Failed(error)),
            Some(Stop::Leave(reason)) if self.is_idle() => Some(End::Left(reason)),
            Some(Stop::Leave(reason)) => {
                let text = format!(
                    "rank {} left while work was pending: {reason}",
                    self.shared.place.rank
                );
                Some(End::Failed(
                    Error::new(ErrorKind::Aborted, text).with_epoch(self.shared.place.epoch),
                ))
            }
            Some(Stop::Drain(_)) if self.is_idle() => Some(End::Left("shut down".to_string())),
            Some(Stop::Drain(deadline)) if time_left(deadline).is_zero() => {
                self.shared.lock().cut_short = true;
                let text = format!(
                    "rank {} shut down; its pending work was cut short at the deadline",
                    self.shared.place.rank
                );
                Some(End::Failed(
                    Error::new(ErrorKind::Aborted, text).with_epoch(self.shared.place.epoch),
                ))
            }
            Some(Stop::Drain(_)) => None,
        })
    }

    /// Reads and writes all control connections. True if anything moved.
    fn control(&mut self) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.peers.len() {
            for _ in 0..FRAMES {
                let Some(Some(peer)) = self.peers.get_mut(index) else {
                    break;
                };
                let rank = peer.rank;
                let place = |e: Error| {
                    if e.context().peer.is_some() {
                        e
                    } else {
                        e.with_peer(rank)
                    }
                };
                moved |= self.messages.pull(peer).map_err(place)?;
                match peer.control.next().map_err(place)? {
                    None => break,
                    Some(Incoming::Piece(frame)) => {
                        self.check_epoch(rank, &frame)?;
                        if let Some(Some(peer)) = self.peers.get_mut(index) {
                            self.messages.piece(rank, &frame, peer)?;
                        }
                    }
                    Some(Incoming::Frame(frame, text)) => {
                        self.check_epoch(rank, &frame)?;
                        self.frame(rank, &frame, &text).map_err(place)?;
                    }
                }
                moved = true;
            }
            let Some(Some(peer)) = self.peers.get_mut(index) else {
                continue;
            };
            moved |= self.messages.flush(peer);
            // A header that waits says what the peer is doing, whether or not this rank is doing anything.
            peer.data
                .fill()
                .map_err(|e| e.with_peer(peer.rank).with_peer_address(peer.address.clone()))?;
            if let Some(how) = peer.control.link.read_closed.clone() {
                self.control_closed(index, &how)?;
            }
        }
        Ok(moved)
    }

    fn check_epoch(&self, rank: u32, frame: &Control) -> Result<()> {
        let epoch = self.shared.place.epoch;
        if frame.epoch == epoch {
            return Ok(());
        }
        let text = format!("sent a frame of epoch {}; this is epoch {epoch}", frame.epoch);
        Err(Error::new(ErrorKind::Protocol, text).with_peer(rank))
    }

    fn frame(&mut self, rank: u32, frame: &Control, text: &[u8]) -> Result<()> {
        let text = String::from_utf8_lossy(text);
        match frame.kind {
            ControlKind::Goodbye => {
                if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
                    tracing::debug!(rank, reason = %text, "a peer left in good order");
                    peer.left = Some(text.into_owned());
                }
                Ok(())
            }
            ControlKind::Abort => {
                let origin = frame.b;
                self.reported = Some((origin, frame.a));
                let kind = wire::kind_of(frame.code);
                let text = if kind == ErrorKind::Aborted {
                    text.into_owned()
                } else {
                    format!("rank {origin} reports: {text}")
                };
                let mut error = Error::new(kind, text).with_epoch(self.shared.place.epoch);
                if frame.a != u32::MAX && frame.a != self.shared.place.rank {
                    error = error.with_peer(frame.a);
                }
                if error.context().peer.is_none() {
                    error = error.with_peer(origin);
                }
                Err(error)
            }
            _ => self.messages.frame(rank, frame, &mut self.peers),
        }
    }

    /// The control connection of a peer has ended: with a good-bye that is in order, without it the peer is gone.
    fn control_closed(&mut self, index: usize, how: &str) -> Result<()> {
        let Some(Some(peer)) = self.peers.get(index) else {
            return Ok(());
        };
        match &peer.left {
            None => Err(self.lost(peer, how)),
            Some(reason) if self.messages.needs(peer.rank) => {
                Err(self.lost(peer, &format!("left the group ({reason})")))
            }
            Some(_) => Ok(()),
        }
    }

    fn lost(&self, peer: &Peer, how: &str) -> Error {
        let progress = self
            .current
            .as_ref()
            .map(|e| format!(" {}", e.progress_text(e.rounds())))
            .unwrap_or_default();
        peer.error(ErrorKind::PeerLost, format!("{how}{progress}"))
            .with_epoch(self.shared.place.epoch)
    }

    /// Runs the collective at the head. True if one ended.
    fn collective(&mut self) -> Result<bool> {
        if self.current.is_none() {
            let Some(submission) = self.waiting.pop_front() else {
                return Ok(false);
            };
            let seq = submission.seq.unwrap_or(0);
            match prepare(submission, seq, self.shared.place) {
                Ok(exec) => self.current = Some(exec),
                Err(failed) => {
                    let (error, completer) = *failed;
                    completer.fail(error.clone(), Vec::new());
                    return Err(error);
                }
            }
        }
        let Some(exec) = &mut self.current else {
            return Ok(false);
        };
        let step = exec.progress(&mut self.peers, &self.shared.interrupt)?;
        // Whoever waits looks at everybody's header, not only at those of its own round.
        for peer in self.peers.iter_mut().flatten() {
            peer.data
                .fill()
                .map_err(|e| e.with_peer(peer.rank).with_peer_address(peer.address.clone()))?;
            if step != Step::Finished {
                exec.inspect(peer)?;
            }
        }
        match step {
            Step::Finished => {
                if let Some(exec) = self.current.take() {
                    exec.succeed();
                }
                Ok(true)
            }
            Step::Waiting => Ok(false),
            Step::Blocked(rank) => {
                self.blocked(rank)?;
                Ok(false)
            }
        }
    }

    /// The collective needs a rank whose data connection is closed: wait a little for the reason, then give up.
    fn blocked(&mut self, rank: u32) -> Result<()> {
        let now = Instant::now();
        let Some(Some(peer)) = self.peers.get_mut(rank as usize) else {
            return Ok(());
        };
        let since = *peer.suspect.get_or_insert(now);
        let left = peer.left.clone();
        let link = &peer.data.link;
        let how = link.read_closed.clone().or_else(|| link.write_closed.clone());
        let Some(Some(peer)) = self.peers.get(rank as usize) else {
            return Ok(());
        };
        match left {
            Some(reason) => Err(self.lost(peer, &format!("left the group ({reason})"))),
            None if now.duration_since(since) >= GRACE => {
                Err(self.lost(peer, how.as_deref().unwrap_or("closed the connection")))
            }
            None => Ok(()),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let collectives = self
            .waiting
            .iter()
            .map(|s| s.deadline)
            .chain(self.current.iter().map(|e| self.due(e)));
        let suspects = self
            .peers
            .iter()
            .flatten()
            .filter_map(|p| p.suspect.map(|since| since + GRACE));
        let drain = match &self.shared.lock().stop {
            Some(Stop::Drain(deadline)) => Some(*deadline),
            _ => None,
        };
        collectives
            .chain(suspects)
            .chain(self.messages.deadline())
            .chain(drain)
            .min()
    }

    fn due(&self, exec: &Exec) -> Instant {
        if exec.kind == OpKind::MonitoredBarrier && self.shared.place.rank != 0 {
            exec.deadline + VERDICT
        } else {
            exec.deadline
        }
    }

    fn check_deadlines(&mut self) -> Result<()> {
        let now = Instant::now();
        if let Some(exec) = &self.current
            && self.due(exec) <= now
        {
            return Err(self.overdue(exec));
        }
        if let Some(queued) = self.waiting.iter().find(|s| s.deadline <= now) {
            let behind = self
                .current
                .as_ref()
                .map(|e| format!(" behind {} #{}", e.kind, e.seq))
                .unwrap_or_default();
            return Err(Error::timeout(format!(
                "timed out after {:.1} s while {} #{} was still queued{behind}",
                queued.submitted.elapsed().as_secs_f64(),
                queued.op.kind(),
                queued.seq.unwrap_or(0),
            ))
            .with_epoch(self.shared.place.epoch));
        }
        self.messages.overdue(now).map_or(Ok(()), Err)
    }

    fn overdue(&self, exec: &Exec) -> Error {
        let (senders, takers) = exec.waiting_for();
        let world = self.shared.place.world;
        let elapsed = exec.submitted.elapsed().as_secs_f64();
        let list = |ranks: &[u32]| {
            let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
            format!(
                "{} {}",
                if names.len() == 1 { "rank" } else { "ranks" },
                names.join(", ")
            )
        };
        let text = if exec.kind == OpKind::MonitoredBarrier && self.shared.place.rank == 0 {
            let missing = match senders.as_slice() {
                [first, ..] if !exec.wait_all => format!("rank {first} (the first one found)"),
                all => list(all),
            };
            format!("{missing} of {world} did not reach the barrier within {elapsed:.1} s")
        } else {
            let mut waits = Vec::new();
            if !senders.is_empty() {
                waits.push(format!("waiting for {} of {world}", list(&senders)));
            }
            if !takers.is_empty() {
                waits.push(format!("{} of {world} not taking data", list(&takers)));
            }
            format!(
                "timed out after {elapsed:.1} s, {}: {}",
                exec.progress_text(exec.rounds()),
                waits.join("; ")
            )
        };
        Error::timeout(text).with_epoch(self.shared.place.epoch)
    }

    /// Blocks until a socket that matters is ready, somebody calls, or a deadline passes.
    fn sleep(&mut self) -> Result<()> {
        let wake_at = self.next_deadline();
        let mut interest = Vec::with_capacity(self.peers.len() * 2);
        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        for (index, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let control = &peer.control;
            let takes = self.current.as_ref().is_some_and(|e| e.wants_write(peer.rank))
                && peer.data.link.write_closed.is_none();
            let wants = [
                (
                    false,
                    &control.link,
                    control.link.read_closed.is_none(),
                    control.wants_write(),
                ),
                (true, &peer.data.link, peer.data.wants_read(), takes),
            ];
            for (is_data, link, read, write) in wants {
                // Something that could have moved did not get its turn: do not sleep at all.
                if (read && link.readable) || (write && link.writable) {
                    return Ok(());
                }
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, read);
                flags.set(PollFlags::OUT, write);
                if !flags.is_empty() {
                    fds.push(PollFd::from_borrowed_fd(link.as_fd(), flags));
                    interest.push((index, is_data));
                }
            }
        }
        let timeout = wake_at.map(|at| {
            // Rounded up, so that a deadline has passed when poll returns.
            let left = time_left(at) + Duration::from_micros(100);
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("waiting for sockets", e.into())),
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        self.shared.waker.drain();
        let failed = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        for ((index, is_data), flags) in interest.into_iter().zip(ready.into_iter().skip(1)) {
            let Some(Some(peer)) = self.peers.get_mut(index) else {
                continue;
            };
            let link = if is_data {
                &mut peer.data.link
            } else {
                &mut peer.control.link
            };
            link.readable |= flags.intersects(PollFlags::IN | failed);
            link.writable |= flags.intersects(PollFlags::OUT | failed);
        }
        Ok(())
    }

    /// Everything pending fails with `error`, which becomes the group's first cause (L32); then the peers are told.
    fn fail(mut self, error: Error) {
        let place = self.shared.place;
        let (incoming, first) = {
            let mut queue = self.shared.lock();
            let first = queue.first_error.get_or_insert_with(|| error.clone()).clone();
            (std::mem::take(&mut queue.incoming), first)
        };
        let error = if first.kind() == ErrorKind::Aborted {
            first
        } else {
            error
        };
        tracing::debug!(rank = place.rank, epoch = place.epoch, %error, "the group failed");
        let about = error.context().peer.unwrap_or(u32::MAX);
        let text = self
            .current
            .as_ref()
            .map_or_else(|| error.clone(), |exec| exec.context(error.clone()))
            .to_string();
        for peer in self.peers.iter_mut().flatten() {
            self.messages.detach(peer);
        }
        if let Some(exec) = self.current.take() {
            exec.fail(error.clone());
        }
        for submission in std::mem::take(&mut self.waiting).into_iter().chain(incoming) {
            let mut error = error
                .clone()
                .with_op(submission.op.kind().name())
                .with_rank(place.rank)
                .with_epoch(place.epoch);
            if let Some(seq) = submission.seq {
                error = error.with_seq(seq);
            }
            if let Some(dtype) = submission.op.dtype() {
                error = error.with_data(dtype, submission.op.count());
            }
            submission.completer.fail(error, submission.op.into_tensors());
        }
        self.messages.fail_all(&error);
        let (origin, about, text) = match self.reported {
            // Passed on as it came: the origin may not have reached everybody before it closed.
            Some((origin, about)) => (origin, about, error.message().to_string()),
            None if error.kind() == ErrorKind::Aborted => (place.rank, about, error.message().to_string()),
            None => (place.rank, about, text),
        };
        self.tell(
            ControlKind::Abort,
            wire::code_of(error.kind()),
            about,
            origin,
            &text,
        );
        self.last_words();
    }

    fn tell(&mut self, kind: ControlKind, code: u8, about: u32, origin: u32, text: &str) {
        let text = wire::cut(text).as_bytes().to_vec();
        let header = Control {
            kind,
            code,
            epoch: self.shared.place.epoch,
            id: 0,
            a: about,
            b: origin,
            length: text.len() as u64,
        };
        for peer in self.peers.iter_mut().flatten() {
            peer.control.push(header, text.clone());
        }
    }

    /// Writes what is queued on the control connections, for a short time; then the sockets close.
    fn last_words(&mut self) {
        let until = deadline_in(LAST_WORDS);
        loop {
            let mut fds = Vec::new();
            for peer in self.peers.iter_mut().flatten() {
                let control = &mut peer.control;
                control.link.writable = true;
                while control.link.writable && control.link.write_closed.is_none() {
                    if control.current.is_none() {
                        control.current = control.queue.pop_front();
                    }
                    let Some(frame) = &mut control.current else { break };
                    let (header, out) = frame.rest();
                    let payload = match &frame.payload {
                        Payload::Text(text) => text.get(out..).unwrap_or(&[]),
                        _ => &[],
                    };
                    let slices = [IoSlice::new(header), IoSlice::new(payload)];
                    if let crate::transport::tcp::Moved::Bytes(n) = control.link.write(&slices) {
                        frame.done += n;
                    }
                    if frame.is_finished() {
                        control.current = None;
                    }
                }
            }
            for peer in self.peers.iter().flatten() {
                if peer.control.wants_write() {
                    fds.push(PollFd::from_borrowed_fd(
                        peer.control.link.as_fd(),
                        PollFlags::OUT,
                    ));
                }
            }
            let left = time_left(until);
            if fds.is_empty() || left.is_zero() {
                return;
            }
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
            if poll(&mut fds, Some(&timeout)).is_err() {
                return;
            }
        }
    }
}
