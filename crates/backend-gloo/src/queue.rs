//! Where callers and the engine's thread meet: the queue of submissions, the executor while it has no driver, the order to stop,
//! and the first failure.
//!
//! Collectives get their sequence numbers here, under the lock, so the order of submission is the order of execution. All
//! calls return at once, except those that say that they wait, which have a deadline.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ftcore::flight_recorder::{Recorder, Summary};
use ftcore::{
    Collective, Completer, Error, ErrorKind, OpKind, Rejected, Result, Work, driven_work_pair, time_left,
};

use crate::channels::{Channel, Channels};
use crate::execution::{Execution, Label, Place};
use crate::executor::Executor;
use crate::notices::Notices;
use crate::peer::NOTICE_TIME;
use crate::plan::plan;
use crate::schedule::Hosts;
use crate::transport::shm::{Bell, Bells, COLLECTIVES, MESSAGES, ThreadBell};
use crate::transport::waker::Waker;

/// `at` and a bit; `at` itself where that cannot be represented.
pub(crate) fn later(at: Instant, by: Duration) -> Instant {
    at.checked_add(by).unwrap_or(at)
}

/// Up to so many bytes a thread that submits an operation begins it itself: what takes a few microseconds. More would keep it from what it computes.
const BEGIN_HERE: usize = 64 * 1024;

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
    /// Point-to-point messages on their way to the engine's thread, or to the driver of the channels.
    pub(crate) messages: VecDeque<Submission>,
    /// Collectives that have not begun.
    pub(crate) collectives: VecDeque<Submission>,
    /// The collective that began last.
    pub(crate) running: Option<(OpKind, u64)>,
    /// `None` while a thread drives it.
    pub(crate) executor: Option<Box<Executor>>,
    /// Likewise.
    pub(crate) channels: Option<Box<Channels>>,
    next_seq: u64,
    /// Until when the engine's thread sleeps at the most, or slept last; `None` without an end.
    pub(crate) sleeps_until: Option<Instant>,
    /// When that thread looks again though nothing has to be done by then: the deadline of an operation whose caller has not woken it. So one call
    /// in many wakes it.
    pub(crate) looks_again: Option<Instant>,
    pub(crate) stop: Option<Stop>,
    pub(crate) first_error: Option<Error>,
    /// The thread has let go of its peers and its work.
    ended: bool,
    /// The drain was cut short by its deadline.
    pub(crate) cut_short: bool,
}

impl Queue {
    /// True if the engine's thread has to be woken, or it would sleep past what is `due`.
    fn sleeps_past(&mut self, due: Option<Instant>) -> bool {
        let sleeps_past = due.is_some_and(|due| self.sleeps_until.is_none_or(|until| until > due));
        if sleeps_past {
            self.looks_again = due;
        }
        sleeps_past
    }
}

/// What the group's handle and the engine's thread have in common.
pub(crate) struct Shared {
    pub(crate) place: Place,
    hosts: Hosts,
    transport: &'static str,
    queue: Mutex<Queue>,
    pub(crate) changed: Condvar,
    /// For a thread that watches sockets; else the bell of the thread wakes it.
    waker: Option<Waker>,
    /// Raised with every stop and failure, so that the executor's driver gives it back.
    interrupt: AtomicBool,
    /// Wakes the driver of the executor, and that of the channels.
    bells: Bells,
    /// Raised when messages are new, and the driver of the channels does not know.
    pub(crate) incoming: AtomicBool,
    /// Raised when a fate or a report is new.
    pub(crate) attention: AtomicBool,
    /// A peer is gone or was reported: decided upon once the executor is free.
    pub(crate) trouble: AtomicBool,
    pub(crate) notices: Mutex<Notices>,
    /// Collectives that were submitted and have not ended.
    unfinished: AtomicUsize,
    /// How often the engine's thread has read every control connection as far as it goes.
    pub(crate) looks: AtomicU64,
    /// What the flight recorder keeps of this configuration.
    pub(crate) recorder: OnceLock<Recorder>,
}

/// What is driven, where it is at hand.
pub(crate) type Drivable = (Option<Box<Executor>>, Option<Box<Channels>>);

/// Who drove the executor, or the channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Caller,
    Engine,
}

/// What a blocking call finds.
pub(crate) enum Begin {
    /// The group is idle: the caller drives operation number so-and-so itself.
    Here(Box<Executor>, u64),
    /// Others are ahead: through the queue.
    Queued,
    /// Nothing can be submitted.
    Refused(Error),
}

impl Shared {
    /// `executor` is `None` in a world of one, and `channels` is empty. `apart`: the ranks of this host have a core each.
    pub(crate) fn new(
        place: Place,
        hosts: Hosts,
        bells: Bells,
        executor: Option<Executor>,
        channels: Vec<Option<Channel>>,
        apart: bool,
    ) -> Result<Arc<Self>> {
        let transport = executor.as_ref().map_or("none", Executor::transport);
        let queue = Queue {
            executor: executor.map(Box::new),
            channels: (place.world > 1).then(|| Box::new(Channels::new(place, channels, apart))),
            ..Queue::default()
        };
        Ok(Arc::new(Self {
            place,
            hosts,
            transport,
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            waker: bells.have_descriptors().then(Waker::new).transpose()?,
            interrupt: AtomicBool::new(false),
            bells,
            incoming: AtomicBool::new(false),
            attention: AtomicBool::new(false),
            trouble: AtomicBool::new(false),
            notices: Mutex::default(),
            unfinished: AtomicUsize::new(0),
            looks: AtomicU64::new(0),
            recorder: OnceLock::new(),
        }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        match &self.waker {
            Some(waker) => waker.wake(),
            None => self.bells.thread.ring(),
        }
    }

    /// What wakes a thread that watches sockets.
    pub(crate) fn waker(&self) -> Option<&Waker> {
        self.waker.as_ref()
    }

    /// What wakes a thread that watches none.
    pub(crate) fn thread_bell(&self) -> &ThreadBell {
        &self.bells.thread
    }

    /// Raised while an order to stop stands.
    pub(crate) fn interrupt(&self) -> &AtomicBool {
        &self.interrupt
    }

    /// How the ranks are connected.
    pub(crate) fn transport(&self) -> &'static str {
        self.transport
    }

    pub(crate) fn bell(&self) -> &Bell<COLLECTIVES> {
        &self.bells.collectives
    }

    pub(crate) fn channels_bell(&self) -> &Bell<MESSAGES> {
        &self.bells.messages
    }

    /// Wakes all drivers.
    pub(crate) fn alarm(&self) {
        self.bells.collectives.alarm();
        self.bells.messages.alarm();
    }

    /// For a blocking call: the executor, if the group is idle.
    pub(crate) fn begin(&self, kind: OpKind) -> Begin {
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            return Begin::Refused(error);
        }
        if !queue.collectives.is_empty() || !queue.executor.as_ref().is_some_and(|l| l.is_idle()) {
            return Begin::Queued;
        }
        let Some(executor) = queue.executor.take() else {
            return Begin::Queued;
        };
        let seq = queue.next_seq;
        queue.next_seq += 1;
        queue.running = Some((kind, seq));
        self.unfinished.fetch_add(1, Ordering::AcqRel);
        Begin::Here(executor, seq)
    }

    /// A collective has ended. Said before it can be seen: a caller that sees it may end the group, and must not be told that
    /// something is pending.
    pub(crate) fn finished(&self) {
        self.unfinished.fetch_sub(1, Ordering::AcqRel);
    }

    /// It is this one's turn.
    pub(crate) fn begins(&self, execution: &Execution) {
        execution.started();
        self.lock().running = Some((execution.kind, execution.seq));
    }

    /// How many collectives run or wait.
    pub(crate) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    /// True if a collective runs or waits, with or without a driver.
    pub(crate) fn is_busy(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) > 0
    }

    /// The executor for a caller that waits for operation `last`, if it has no driver and something to do up to there.
    pub(crate) fn take_executor_for(&self, last: u64) -> Option<Box<Executor>> {
        let mut queue = self.lock();
        let executor = queue.executor.as_ref()?;
        let next = queue.collectives.front().and_then(|s| s.seq);
        let begun = executor.ahead.front().map(|execution| execution.seq);
        // One that runs for another thread may last longer than what the caller waits for.
        let first = executor
            .current
            .as_ref()
            .map(|current| current.seq)
            .or(begun)
            .or(next);
        let wanted = first.is_some_and(|first| first <= last);
        if !wanted || executor.failure.is_some() {
            return None;
        }
        let executor = queue.executor.take();
        drop(queue);
        executor.map(|executor| self.unparked(executor))
    }

    /// The executor for the engine's thread, if it has no driver and something to do.
    pub(crate) fn take_busy_executor(&self) -> Option<Box<Executor>> {
        let mut queue = self.lock();
        let executor = queue.executor.as_ref()?;
        if executor.is_idle() && queue.collectives.is_empty() {
            return None;
        }
        let executor = queue.executor.take();
        drop(queue);
        executor.map(|executor| self.unparked(executor))
    }

    /// A driver looks for itself.
    fn unparked(&self, mut executor: Box<Executor>) -> Box<Executor> {
        if std::mem::take(&mut executor.parked) {
            self.bell().disarm();
        }
        executor
    }

    /// The executor and the channels, whatever they do; waits until their drivers, who are told to hurry, give them back. `own`: those
    /// that the caller has.
    pub(crate) fn recall(&self, own: Drivable) -> Drivable {
        let (mut executor, mut channels) = own;
        if self.place.world == 1 {
            return (executor, channels);
        }
        self.interrupt.store(true, Ordering::Release);
        let mut queue = self.lock();
        loop {
            executor = executor.or_else(|| queue.executor.take());
            channels = channels.or_else(|| queue.channels.take());
            if executor.is_some() && channels.is_some() {
                return (executor, channels);
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

    /// Puts the executor back.
    pub(crate) fn give_back(&self, executor: Box<Executor>, by: Taken) {
        let mut queue = self.lock();
        let more = !executor.is_idle() || !queue.collectives.is_empty() || queue.stop.is_some();
        queue.executor = Some(executor);
        drop(queue);
        if self.interrupt.load(Ordering::Acquire) {
            self.changed.notify_all();
        }
        if by == Taken::Caller && (more || self.in_trouble()) {
            self.wake();
        }
    }

    /// Puts the executor back with an operation that waits for others, who ring for the engine's thread (the bell is armed). It drives from then on,
    /// unless the caller waits for its work before. It is woken only if it would sleep past a deadline or there is more to do.
    pub(crate) fn park(&self, mut executor: Box<Executor>) {
        executor.parked = true;
        let due = executor.next_deadline(self);
        let mut queue = self.lock();
        let more = queue.sleeps_past(due) || !queue.collectives.is_empty() || queue.stop.is_some();
        queue.executor = Some(executor);
        // Who was rung for before found nothing to drive.
        let rung = !self.bell().is_armed();
        drop(queue);
        self.parked(more || rung);
    }

    /// Likewise the channels.
    pub(crate) fn park_channels(&self, mut channels: Box<Channels>) {
        channels.parked = true;
        let due = channels.next_deadline();
        let mut queue = self.lock();
        let more = queue.sleeps_past(due) || !queue.messages.is_empty() || queue.stop.is_some();
        queue.channels = Some(channels);
        let rung = !self.channels_bell().is_armed();
        drop(queue);
        self.parked(more || rung);
    }

    fn parked(&self, more: bool) {
        if self.interrupt.load(Ordering::Acquire) {
            self.changed.notify_all();
        }
        if more || self.in_trouble() {
            self.wake();
        }
    }

    /// The next collective, if there is one up to number `last`, which begins now.
    pub(crate) fn pop(&self, last: Option<u64>) -> Result<Option<Execution>> {
        let Some(last) = last else { return Ok(None) };
        let execution = self.pop_ahead(last)?;
        if let Some(execution) = &execution {
            self.begins(execution);
        }
        Ok(execution)
    }

    /// The next collective, if there is one up to number `last`; others are before it.
    pub(crate) fn pop_ahead(&self, last: u64) -> Result<Option<Execution>> {
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
            Ok(execution) => Ok(Some(execution)),
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
            drop(queue);
            self.refused(&op, &error);
            return Err(Box::new(Rejected { error, op }));
        }
        let seq = (!kind.is_p2p()).then_some(queue.next_seq);
        queue.next_seq += u64::from(seq.is_some());
        let (work, completer) = self.work(kind, deadline, seq);
        if let Some(recorder) = self.recorder.get() {
            completer.record(recorder.queued(&Summary::of(&op), seq));
        }
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
        if let Some(seq) = seq {
            self.unfinished.fetch_add(1, Ordering::AcqRel);
            if self.may_begin_here(&queue, &submission.op)
                && let Some(executor) = queue.executor.take()
            {
                queue.running = Some((kind, seq));
                drop(queue);
                self.begin_here(executor, submission, seq);
                return Ok(work);
            }
            queue.collectives.push_back(submission);
        } else {
            if self.may_send_here(&queue, &submission.op)
                && let Some(channels) = queue.channels.take()
            {
                drop(queue);
                self.send_here(channels, submission);
                return Ok(work);
            }
            queue.messages.push_back(submission);
            self.incoming.store(true, Ordering::Release);
            if queue.channels.is_none() {
                // Its driver may sleep; if it is the engine's thread, that is told below.
                self.bells.messages.alarm();
            }
        }
        drop(queue);
        self.wake();
        Ok(work)
    }

    /// True if the thread that submits `op` begins it: where the group is idle and all ranks share memory, a short one takes less than to wake a thread.
    fn may_begin_here(&self, queue: &Queue, op: &Collective) -> bool {
        queue.collectives.is_empty()
            && queue.stop.is_none()
            && queue.executor.as_ref().is_some_and(|executor| executor.is_idle())
            && self.is_short(op)
    }

    /// Likewise a message, and beside short ones that were begun so.
    fn may_send_here(&self, queue: &Queue, op: &Collective) -> bool {
        let channels = queue.channels.as_deref();
        queue.messages.is_empty()
            && queue.stop.is_none()
            && channels.is_some_and(|channels| channels.is_idle() || channels.parked)
            && self.is_short(op)
    }

    fn is_short(&self, op: &Collective) -> bool {
        self.waker.is_none()
            && op.tensors().iter().map(|tensor| tensor.byte_len()).sum::<usize>() <= BEGIN_HERE
    }

    /// An operation was refused: the flight recorder keeps the first one.
    pub(crate) fn refused(&self, op: &Collective, error: &Error) {
        if let Some(recorder) = self.recorder.get() {
            recorder.refused(&Summary::of(op), error);
        }
    }

    /// A work whose abort is the group's, and which a caller that waits for it may run.
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
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let (work, completer) = driven_work_pair(kind, deadline, abort, move |until| {
            match (to_drive.upgrade(), seq) {
                (Some(shared), Some(seq)) => shared.help(seq, until),
                (Some(shared), None) => shared.help_messages(&|| seen.load(Ordering::Acquire), until),
                (None, _) => {}
            }
        });
        match seq {
            Some(seq) => completer.numbered(seq),
            None => work.on_complete(move |_| ended.store(true, Ordering::Release)),
        }
        (work, completer)
    }

    /// A world of one needs no thread and no socket.
    fn run_alone(&self, submission: Submission) {
        let Some(seq) = submission.seq else {
            let error = Error::invalid("a world of one has no peer to send to or receive from");
            submission.completer.fail(error, submission.op.into_tensors());
            return;
        };
        match prepare(submission, seq, self) {
            Ok(execution) => execution.run_alone(),
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
        self.wake();
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
        self.wait_ended(later(deadline, NOTICE_TIME * 2))?;
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
) -> Result<Execution, Box<(Error, Completer)>> {
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
        Ok(plan) => Ok(Execution::new(label, place, plan, submission.completer)),
        Err(e) => Err(Box::new((e, submission.completer))),
    }
}

/// Marks the end whatever happens, so that no caller waits for a thread that is gone.
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
        let driven = (queue.executor.take(), queue.channels.take());
        drop(queue);
        self.0.changed.notify_all();
        drop((messages, collectives, driven));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use ftcore::{
        DType, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Store, Tensor,
    };

    use super::*;
    use crate::GlooGroup;
    use crate::bad_peer::{configuration, soon};

    #[test]
    fn a_caller_does_not_drive_what_comes_after_that_which_it_waits_for() {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let group = || GlooGroup::new("queue", GroupOptions::default()).unwrap();
        let sum = |group: &GlooGroup| {
            group
                .all_reduce(Tensor::zeros(DType::F32, 4), ReduceOp::Sum)
                .unwrap()
        };
        let asked = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let group = group();
                group.configure(configuration(&store, 1, 1, 2)).unwrap();
                sum(&group).wait(soon()).unwrap();
                asked.wait();
                sum(&group).wait(soon()).unwrap();
            });
            let group = group();
            group.configure(configuration(&store, 1, 0, 2)).unwrap();
            sum(&group).wait(soon()).unwrap();
            // Begun, and waiting for the other rank, with no thread that drives it.
            let second = sum(&group);
            let (shared, _) = group.ready(&Default::default()).unwrap();
            let executor = loop {
                match shared.take_executor_for(1) {
                    Some(executor) if executor.current.is_some() => break executor,
                    Some(executor) => shared.give_back(executor, Taken::Caller),
                    None => std::thread::yield_now(),
                }
            };
            shared.lock().executor = Some(executor);
            // The first one's waiter, which was held up until now.
            assert!(shared.take_executor_for(0).is_none());
            asked.wait();
            second.wait(soon()).unwrap();
        });
    }
}
