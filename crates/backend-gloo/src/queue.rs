//! Where callers and the engine's thread meet: the queue of submissions, the lane while nobody drives it, the order to stop,
//! and the first failure.
//!
//! Collectives get their sequence numbers here, under the lock, so the order of submission is the order of execution. All
//! calls return at once, except those that say that they wait, which have a deadline.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Completer, Error, ErrorKind, OpKind, Rejected, Result, Work, driven_work_pair, time_left,
};

use crate::exec::{Exec, Label, Place};
use crate::farewell::LAST_WORDS;
use crate::lane::Lane;
use crate::mail::{Mail, Post};
use crate::news::News;
use crate::plan::plan;
use crate::schedule::Hosts;
use crate::transport::shm::{Bell, Bells, LANE, MAIL};
use crate::transport::waker::Waker;

/// `at` and a bit; `at` itself where that cannot be represented.
pub(crate) fn later(at: Instant, by: Duration) -> Instant {
    at.checked_add(by).unwrap_or(at)
}

/// How a group ends.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    /// Pending work fails with this; peers are told.
    Abort(Error),
    /// In good order if nothing is pending, else as `Abort` with this text.
    Leave(String),
    /// Like `Leave`, once nothing is pending, or at the deadline.
    Drain(Instant),
}

/// One call on its way to the engine.
pub(crate) struct Submission {
    pub(crate) op: Collective,
    /// `None` for point-to-point.
    pub(crate) seq: Option<u64>,
    pub(crate) contribute: bool,
    pub(crate) deadline: Instant,
    pub(crate) submitted: Instant,
    pub(crate) completer: Completer,
}

/// What the lock protects.
#[derive(Default)]
pub(crate) struct Queue {
    /// Point-to-point messages on their way to the engine's thread, or to whoever drives the mail.
    pub(crate) messages: VecDeque<Submission>,
    /// Collectives that have not begun.
    pub(crate) collectives: VecDeque<Submission>,
    /// The collective that began last.
    pub(crate) running: Option<(OpKind, u64)>,
    /// `None` while somebody drives it.
    pub(crate) lane: Option<Box<Lane>>,
    /// Likewise.
    pub(crate) mail: Option<Box<Mail>>,
    next_seq: u64,
    pub(crate) stop: Option<Stop>,
    pub(crate) first_error: Option<Error>,
    /// The thread has let go of its peers and its work.
    ended: bool,
    /// The drain was cut short by its deadline.
    pub(crate) cut_short: bool,
}

/// What the group's handle and the engine's thread have in common.
pub(crate) struct Shared {
    pub(crate) place: Place,
    hosts: Hosts,
    transport: &'static str,
    queue: Mutex<Queue>,
    pub(crate) changed: Condvar,
    waker: Waker,
    /// Raised with every stop and failure, so that whoever drives the lane gives it back.
    interrupt: AtomicBool,
    /// Wakes whoever drives the lane, and whoever drives the mail.
    bells: Bells,
    /// Raised when messages are new, and whoever drives the mail does not know.
    pub(crate) incoming: AtomicBool,
    /// Raised when a fate or a report is new.
    pub(crate) attention: AtomicBool,
    /// A peer is gone or was reported: decided upon once the lane is free.
    pub(crate) trouble: AtomicBool,
    pub(crate) news: Mutex<News>,
    /// Collectives that were submitted and have not ended.
    unfinished: AtomicUsize,
    /// How often the engine's thread has read every control connection as far as it goes.
    pub(crate) looks: AtomicU64,
}

/// What is driven, where it is at hand.
pub(crate) type Drivable = (Option<Box<Lane>>, Option<Box<Mail>>);

/// Who drove the lane, or the mail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Caller,
    Engine,
}

/// What a blocking call finds.
pub(crate) enum Begin {
    /// The group is idle: the caller drives operation number so-and-so itself.
    Here(Box<Lane>, u64),
    /// Others are ahead: through the queue.
    Queued,
    /// Nothing can be submitted.
    Refused(Error),
}

impl Shared {
    /// `lane` is `None` in a world of one, and `posts` is empty. `apart`: the ranks of this host have a core each.
    pub(crate) fn new(
        place: Place,
        hosts: Hosts,
        bells: Bells,
        lane: Option<Lane>,
        posts: Vec<Option<Post>>,
        apart: bool,
    ) -> Result<Arc<Self>> {
        let transport = lane.as_ref().map_or("none", Lane::transport);
        let queue = Queue {
            lane: lane.map(Box::new),
            mail: (place.world > 1).then(|| Box::new(Mail::new(place, posts, apart))),
            ..Queue::default()
        };
        Ok(Arc::new(Self {
            place,
            hosts,
            transport,
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            waker: Waker::new()?,
            interrupt: AtomicBool::new(false),
            bells,
            incoming: AtomicBool::new(false),
            attention: AtomicBool::new(false),
            trouble: AtomicBool::new(false),
            news: Mutex::default(),
            unfinished: AtomicUsize::new(0),
            looks: AtomicU64::new(0),
        }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread's poll.
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Raised while an order to stop stands.
    pub(crate) fn interrupt(&self) -> &AtomicBool {
        &self.interrupt
    }

    /// How the ranks are connected.
    pub(crate) fn transport(&self) -> &'static str {
        self.transport
    }

    pub(crate) fn bell(&self) -> &Bell<LANE> {
        &self.bells.lane
    }

    pub(crate) fn mail_bell(&self) -> &Bell<MAIL> {
        &self.bells.mail
    }

    /// Wakes whoever drives anything.
    pub(crate) fn alarm(&self) {
        self.bells.lane.alarm();
        self.bells.mail.alarm();
    }

    /// For a blocking call: the lane, if the group is idle.
    pub(crate) fn begin(&self, kind: OpKind) -> Begin {
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            return Begin::Refused(error);
        }
        if !queue.collectives.is_empty() || !queue.lane.as_ref().is_some_and(|l| l.is_idle()) {
            return Begin::Queued;
        }
        let Some(lane) = queue.lane.take() else {
            return Begin::Queued;
        };
        let seq = queue.next_seq;
        queue.next_seq += 1;
        queue.running = Some((kind, seq));
        self.unfinished.fetch_add(1, Ordering::AcqRel);
        Begin::Here(lane, seq)
    }

    /// A collective has ended. Said before anybody can see it: whoever sees it may end the group, and must not be told that
    /// something is pending.
    pub(crate) fn finished(&self) {
        self.unfinished.fetch_sub(1, Ordering::AcqRel);
    }

    /// It is this one's turn.
    pub(crate) fn begins(&self, exec: &Exec) {
        self.lock().running = Some((exec.kind, exec.seq));
    }

    /// How many collectives run or wait.
    pub(crate) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    /// True if a collective runs or waits, whoever drives it.
    pub(crate) fn is_busy(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) > 0
    }

    /// The lane for whoever waits for operation `last`, if nobody drives it and it has something to do up to there.
    pub(crate) fn take_lane_for(&self, last: u64) -> Option<Box<Lane>> {
        let mut queue = self.lock();
        let lane = queue.lane.as_ref()?;
        let next = queue.collectives.front().and_then(|s| s.seq);
        let begun = lane.ahead.front().map(|exec| exec.seq);
        let wanted = lane.current.is_some() || begun.or(next).is_some_and(|next| next <= last);
        if !wanted || lane.failure.is_some() {
            return None;
        }
        queue.lane.take()
    }

    /// The lane for the engine's thread, if nobody drives it and it has something to do.
    pub(crate) fn take_busy_lane(&self) -> Option<Box<Lane>> {
        let mut queue = self.lock();
        let lane = queue.lane.as_ref()?;
        if lane.is_idle() && queue.collectives.is_empty() {
            return None;
        }
        queue.lane.take()
    }

    /// The lane and the mail, whatever they do; waits until their drivers, who are told to hurry, give them back. `own`: those
    /// that the caller has.
    pub(crate) fn recall(&self, own: Drivable) -> Drivable {
        let (mut lane, mut mail) = own;
        if self.place.world == 1 {
            return (lane, mail);
        }
        self.interrupt.store(true, Ordering::Release);
        let mut queue = self.lock();
        loop {
            lane = lane.or_else(|| queue.lane.take());
            mail = mail.or_else(|| queue.mail.take());
            if lane.is_some() && mail.is_some() {
                return (lane, mail);
            }
            // A driver looks at the interrupt between two pieces, and wakes for it; the alarm is repeated to be sure. It
            // works on memory that may be borrowed, so there is no giving up.
            self.alarm();
            queue = self
                .changed
                .wait_timeout(queue, Duration::from_millis(20))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Puts the lane back.
    pub(crate) fn give_back(&self, lane: Box<Lane>, by: Taken) {
        let mut queue = self.lock();
        let more = !lane.is_idle() || !queue.collectives.is_empty() || queue.stop.is_some();
        queue.lane = Some(lane);
        drop(queue);
        if self.interrupt.load(Ordering::Acquire) {
            self.changed.notify_all();
        }
        if by == Taken::Caller && (more || self.in_trouble()) {
            self.waker.wake();
        }
    }

    /// The next collective, if there is one up to number `last`, which begins now.
    pub(crate) fn pop(&self, last: Option<u64>) -> Result<Option<Exec>> {
        let Some(last) = last else { return Ok(None) };
        let exec = self.pop_ahead(last)?;
        if let Some(exec) = &exec {
            self.begins(exec);
        }
        Ok(exec)
    }

    /// The next collective, if there is one up to number `last`; others are before it.
    pub(crate) fn pop_ahead(&self, last: u64) -> Result<Option<Exec>> {
        let mut queue = self.lock();
        let next = queue.collectives.front().and_then(|s| s.seq);
        if next.is_none_or(|next| next > last) {
            return Ok(None);
        }
        let Some(submission) = queue.collectives.pop_front() else {
            return Ok(None);
        };
        let seq = submission.seq.unwrap_or(0);
        drop(queue);
        match prepare(submission, seq, self) {
            Ok(exec) => Ok(Some(exec)),
            Err(failed) => {
                let (error, completer) = *failed;
                completer.fail(error.clone(), Vec::new());
                Err(error)
            }
        }
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
    ) -> Result<Work, Box<Rejected>> {
        let kind = op.kind();
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            let error = error.with_op(kind.name()).with_rank(self.place.rank);
            return Err(Box::new(Rejected { error, op }));
        }
        let seq = (!kind.is_p2p()).then_some(queue.next_seq);
        queue.next_seq += u64::from(seq.is_some());
        let (work, completer) = self.work(kind, deadline, seq);
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
        if seq.is_some() {
            self.unfinished.fetch_add(1, Ordering::AcqRel);
            queue.collectives.push_back(submission);
        } else {
            queue.messages.push_back(submission);
            self.incoming.store(true, Ordering::Release);
            if queue.mail.is_none() {
                // Whoever drives it may sleep; if it is the engine's thread, that is told below.
                self.bells.mail.alarm();
            }
        }
        drop(queue);
        self.waker.wake();
        Ok(work)
    }

    /// A work whose abort is the group's, and which whoever waits for it may run.
    pub(crate) fn work(
        self: &Arc<Self>,
        kind: OpKind,
        deadline: Instant,
        seq: Option<u64>,
    ) -> (Work, Completer) {
        let (to_abort, to_drive) = (Arc::downgrade(self), Arc::downgrade(self));
        let abort = move |reason: &str| {
            if let Some(shared) = to_abort.upgrade() {
                shared.abort(reason);
            }
        };
        driven_work_pair(kind, deadline, abort, move |until| {
            if let (Some(seq), Some(shared)) = (seq, to_drive.upgrade()) {
                shared.help(seq, until);
            }
        })
    }

    /// A world of one needs no thread and no socket.
    fn run_alone(&self, submission: Submission) {
        let Some(seq) = submission.seq else {
            let error = Error::invalid("a world of one has nobody to send to or receive from");
            submission.completer.fail(error, submission.op.into_tensors());
            return;
        };
        match prepare(submission, seq, self) {
            Ok(exec) => exec.run_alone(),
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
        let stronger = matches!(
            (&queue.stop, &stop),
            (None | Some(Stop::Drain(_)), _) | (Some(Stop::Leave(_)), Stop::Abort(_))
        );
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
        if self.interrupt.load(Ordering::Acquire) {
            self.alarm();
        }
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
        self.wait_ended(later(deadline, LAST_WORDS * 2))?;
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
pub(crate) fn refusal(queue: &Queue) -> Option<Error> {
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
pub(crate) fn prepare(
    submission: Submission,
    seq: u64,
    shared: &Shared,
) -> Result<Exec, Box<(Error, Completer)>> {
    let kind = submission.op.kind();
    let label = Label {
        kind,
        seq,
        deadline: submission.deadline,
        submitted: submission.submitted,
        elements: submission.op.count(),
        wait_all: matches!(submission.op, Collective::MonitoredBarrier { wait_all: true }),
    };
    let place = shared.place;
    match plan(submission.op, submission.contribute, place, &shared.hosts) {
        Ok(plan) => Ok(Exec::new(label, place, plan, submission.completer)),
        Err(e) => Err(Box::new((e, submission.completer))),
    }
}

/// Marks the end whatever happens, so that nobody waits for a thread that is gone.
pub(crate) struct Ended(pub(crate) Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.ended = true;
        if queue.first_error.is_none() && queue.stop.is_none() {
            queue.first_error = Some(Error::new(ErrorKind::Internal, "the engine ended unexpectedly"));
        }
        let messages = std::mem::take(&mut queue.messages);
        let collectives = std::mem::take(&mut queue.collectives);
        let driven = (queue.lane.take(), queue.mail.take());
        drop(queue);
        self.0.changed.notify_all();
        drop((messages, collectives, driven));
    }
}
