//! Blocking calls on an idle group, and waiting for an operation that has not begun: run by the thread that waits.
//!
//! A hand-over to another thread and back costs more than a whole small all-reduce. When a blocking call returns, nothing touches its
//! tensors any more (`Feature::Borrow`): either this thread ran the operation itself, or the engine has ended it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::flight_recorder::Summary;
use ftcore::{
    Collective, Completion, Error, ErrorKind, Failed, Result, Status, Work, deadline_in, time_left,
};

use crate::blocking;
use crate::direct;
use crate::executor::{Executor, Holder, Turn};
use crate::peer::NOTICE_TIME;
use crate::queue::{Begin, Shared, Submission, later, prepare};
use crate::transport::shm::Sleep;
use crate::waiter::Waiter;

/// A driver without any deadline of its own looks again after this long.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How often a thread that begins an operation looks at it before it goes: where each rank has a core, the others are often as far, and to look
/// costs less than to have a thread woken.
pub(crate) fn looks(spins: bool) -> u32 {
    if spins { 16 } else { 1 }
}

impl Shared {
    /// Runs an operation to its end.
    pub(crate) fn execute(
        self: &Arc<Self>,
        mut op: Collective,
        contribute: bool,
        deadline: Instant,
    ) -> Result<Completion, Box<Failed>> {
        let kind = op.kind();
        let refused = |op: Collective, error: Error| {
            let error = error.with_op(kind.name()).with_rank(self.place.rank);
            self.refused(&op, &error);
            let tensors = op.into_tensors();
            Err(Box::new(Failed { error, tensors }))
        };
        if kind.is_p2p() && self.place.world > 1 {
            return match self.begin_messages() {
                blocking::Begin::Here(channels) => self.carry(channels, op, deadline),
                blocking::Begin::Queued => outcome(&self.submit(op, contribute, deadline)?),
                blocking::Begin::Refused(error) => refused(op, error),
            };
        }
        if self.place.world == 1 {
            return outcome(&self.submit(op, contribute, deadline)?);
        }
        let (executor, seq) = match self.begin(kind) {
            Begin::Here(executor, seq) => (executor, seq),
            Begin::Queued => return outcome(&self.submit(op, contribute, deadline)?),
            Begin::Refused(error) => return refused(op, error),
        };
        let mut holder = Holder::new(self, executor);
        let recorder = self.recorder.get();
        let running = recorder.map(|recorder| recorder.started(&Summary::of(&op), Some(seq)));
        if let Some(done) = direct::run(&mut holder, self, &mut op, contribute, seq, deadline) {
            return match done {
                Ok(contributors) => {
                    if let Some((recorder, running)) = recorder.zip(running) {
                        recorder.ended(running, None);
                    }
                    self.finished();
                    drop(holder);
                    Ok(Completion {
                        tensors: op.into_tensors(),
                        source: None,
                        contributors,
                    })
                }
                Err(error) => {
                    holder.fail(error.clone());
                    let mut error = self.verdict(error);
                    error = error
                        .with_op(kind.name())
                        .with_seq(seq)
                        .with_epoch(self.place.epoch)
                        .with_rank(self.place.rank);
                    if let Some(dtype) = op.dtype() {
                        error = error.with_data(dtype, op.count());
                    }
                    if let Some((recorder, running)) = recorder.zip(running) {
                        recorder.ended(running, Some(&error));
                    }
                    let tensors = op.into_tensors();
                    Err(Box::new(Failed { error, tensors }))
                }
            };
        }
        let (work, completer) = self.work(kind, deadline, Some(seq));
        if let Some((recorder, running)) = recorder.zip(running) {
            completer.record(recorder.entry(running));
        }
        let submission = Submission {
            op,
            seq: Some(seq),
            contribute,
            deadline,
            submitted: Instant::now(),
            completer,
        };
        let driven = match prepare(submission, seq, self) {
            Ok(execution) => match holder.executor() {
                Ok(executor) => {
                    executor.current = Some(execution);
                    self.drive(&mut holder, None, None)
                }
                Err(error) => Err(error),
            },
            Err(failed) => {
                let (error, completer) = *failed;
                completer.fail(error.clone(), Vec::new());
                Err(error)
            }
        };
        match driven {
            Ok(()) => drop(holder),
            Err(error) => holder.fail(error),
        }
        outcome(&work)
    }

    /// Begins an operation that was submitted on an idle group: sends what it sends first, and leaves the rest to the thread that waits for it, or to
    /// the engine's once the others have sent theirs.
    pub(crate) fn begin_here(&self, executor: Box<Executor>, submission: Submission, seq: u64) {
        let mut holder = Holder::new(self, executor);
        match self.begin_on(&mut holder, submission, seq) {
            Ok(Turn::Waiting) => holder.park(),
            Ok(_) => drop(holder),
            Err(error) => holder.fail(error),
        }
    }

    /// What came of the first turns of an operation. If it waits, the bell is armed for the engine's thread.
    fn begin_on(&self, holder: &mut Holder<'_>, submission: Submission, seq: u64) -> Result<Turn> {
        let executor = holder.executor()?;
        let execution = prepare(submission, seq, self).map_err(|failed| {
            let (error, completer) = *failed;
            completer.fail(error.clone(), Vec::new());
            error
        })?;
        execution.started();
        executor.current = Some(execution);
        for _ in 0..looks(executor.spin_budget.spins()) {
            if executor.turn(self, None)? == Turn::Ended {
                return Ok(Turn::Ended);
            }
        }
        // What came before that is seen now; for what comes after it others ring.
        self.bell().arm(Sleep::Thread);
        match executor.turn(self, None) {
            Ok(Turn::Waiting) => Ok(Turn::Waiting),
            other => {
                self.bell().disarm();
                other
            }
        }
    }

    /// Runs what is queued up to operation `last`, if no other thread does, until that has ended or `until`.
    pub(crate) fn help(&self, last: u64, until: Instant) {
        if time_left(until).is_zero() {
            return;
        }
        let Some(executor) = self.take_executor_for(last) else {
            return;
        };
        let mut holder = Holder::new(self, executor);
        if let Err(error) = self.drive(&mut holder, Some(last), Some(until)) {
            holder.fail(error);
        }
    }

    /// Drives the executor until what it runs has ended, and what is queued up to operation `last`; or until `until`.
    fn drive(&self, holder: &mut Holder<'_>, last: Option<u64>, until: Option<Instant>) -> Result<()> {
        let mut waiter = Waiter::default();
        loop {
            let executor = holder.executor()?;
            match executor.turn(self, last)? {
                Turn::Ended if last.is_some() => waiter.moved(executor, self),
                Turn::Ended | Turn::Idle => {
                    waiter.moved(executor, self);
                    return Ok(());
                }
                Turn::Moved => waiter.moved(executor, self),
                Turn::Waiting => {
                    if waiter.asks_the_clock() {
                        executor.check_deadlines(self)?;
                        if until.is_some_and(|until| time_left(until).is_zero()) {
                            waiter.moved(executor, self);
                            return Ok(());
                        }
                    }
                    waiter.wait(executor, self, |executor| {
                        let due = executor.next_deadline(self).into_iter().chain(until).min();
                        due.unwrap_or_else(|| deadline_in(LOOK_AGAIN))
                    })?;
                }
            }
        }
    }

    /// Why an operation failed that this thread ran: waits until the peers have been told.
    fn verdict(&self, error: Error) -> Error {
        // The engine ends at once; this thread has given the executor back.
        let _ = self.wait_ended(later(Instant::now(), NOTICE_TIME * 5));
        match self.error() {
            Some(first) if error.kind() == ErrorKind::Aborted => first,
            _ => error,
        }
    }
}

/// The result of a work, once it has ended. Its memory may be borrowed, so this does not give up before.
pub(crate) fn outcome(work: &Work) -> Result<Completion, Box<Failed>> {
    loop {
        match work.take() {
            Ok(completion) => return Ok(completion),
            Err(error) => match work.status() {
                // The engine ends every operation at its deadline; its thread is only slow to run.
                Status::Pending => {
                    tracing::warn!(%error, "an operation is overdue");
                    let _ = work.wait(deadline_in(LOOK_AGAIN));
                }
                Status::Succeeded | Status::Failed(_) => {
                    return Err(Box::new(Failed {
                        error,
                        tensors: work.recover(),
                    }));
                }
            },
        }
    }
}
