//! Where callers and the engine's thread meet: the queue of submissions, the order to stop, and the first failure.
//!
//! Collectives get their sequence numbers here, under the lock, so the order of submission is the order of execution. All
//! calls return at once, except those that say that they wait, which have a deadline.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Collective, Completer, Error, ErrorKind, Rejected, Result, Work, time_left, work_pair};

use crate::exec::{Exec, Label, Place};
use crate::farewell::LAST_WORDS;
use crate::plan::plan;
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
    pub(crate) incoming: VecDeque<Submission>,
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
        let weak = Arc::downgrade(self);
        let mut queue = self.lock();
        if let Some(error) = refusal(&queue) {
            let error = error.with_op(kind.name()).with_rank(self.place.rank);
            return Err(Box::new(Rejected { error, op }));
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
pub(crate) fn prepare(
    submission: Submission,
    seq: u64,
    place: Place,
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
    match plan(submission.op, submission.contribute, place.rank, place.world) {
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
        let left = std::mem::take(&mut queue.incoming);
        drop(queue);
        self.0.changed.notify_all();
        drop(left);
    }
}
