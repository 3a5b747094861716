//! The queue between callers and the thread `ox-quant`, which carries collectives out in the order of submission.
//!
//! Every collective passes through it, forwarded ones too: otherwise one of them could overtake the second half of a quantised
//! reduction on one rank and not on another. Nothing here blocks a caller, except waits that say so.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::{
    Checked, Collective, Completer, Completion, Error, ErrorKind, OpKind, ProcessGroup, ProcessGroupExt,
    ReduceOp, Result, Status, SubmitOptions, Tensor, Work, time_left,
};

use crate::Codec;
use crate::chunk::Frame;
use crate::reduce::{self, Place};

/// How long the group below may take to report an operation's own deadline, or an abort.
const REPORT: Duration = Duration::from_secs(5);

/// One call.
pub(crate) struct Job {
    pub(crate) op: Checked,
    pub(crate) options: SubmitOptions,
    pub(crate) deadline: Instant,
    pub(crate) completer: Completer,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) jobs: VecDeque<Job>,
    /// The thread has a job in hand.
    busy: bool,
    /// That job is a quantised reduction whose caller does not know of its end yet.
    reducing: bool,
    ended: bool,
    /// `None`: not configured.
    pub(crate) place: Option<Place>,
    pub(crate) configuring: bool,
    pub(crate) closing: bool,
    /// The first failure of this layer, or why `configure` failed.
    pub(crate) failure: Option<Error>,
}

/// What the handle and the thread have in common.
pub(crate) struct Shared {
    pub(crate) inner: Arc<dyn ProcessGroup>,
    pub(crate) codec: Codec,
    pub(crate) non_finite: AtomicU64,
    /// Raised while an order to stop stands.
    pub(crate) interrupt: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn new(inner: Arc<dyn ProcessGroup>, codec: Codec) -> Self {
        Self {
            inner,
            codec,
            non_finite: AtomicU64::new(0),
            interrupt: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake(&self) {
        self.changed.notify_all();
    }

    /// The first failure since the last `configure`.
    pub(crate) fn error(&self) -> Option<Error> {
        let own = self.lock().failure.clone();
        own.or_else(|| self.inner.error())
    }

    /// Ends everything that is pending. Never blocks.
    pub(crate) fn abort(&self, reason: &str) {
        self.interrupt.store(true, Ordering::Release);
        self.inner.abort(reason);
        let inner = self.inner.error();
        let mut state = self.lock();
        if state.failure.is_none() && inner.is_none() && state.place.is_some() {
            state.failure = Some(Error::new(ErrorKind::Aborted, format!("aborted: {reason}")));
        }
        drop(state);
        self.wake();
    }

    fn poison(&self, error: &Error) {
        // What the group below found out itself it has told the others already.
        if self.inner.error().is_some() {
            return;
        }
        self.lock().failure.get_or_insert_with(|| error.clone());
        self.inner.abort(&error.to_string());
    }

    /// Orders the thread to end; what is pending is aborted. Never blocks.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let pending = state.reducing || !state.jobs.is_empty();
        drop(state);
        if pending {
            self.abort("the group was dropped");
        }
        self.wake();
    }

    /// True if nothing is queued or being reduced. What was forwarded is the group below's.
    pub(crate) fn idle(&self) -> bool {
        let state = self.lock();
        !state.reducing && state.jobs.is_empty()
    }

    /// Waits until nothing is queued or running.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> Result<()> {
        let mut state = self.lock();
        while state.busy || !state.jobs.is_empty() {
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout("pending work did not end by the deadline"));
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    /// The thread: one job after the other until the group is dropped.
    pub(crate) fn serve(self: Arc<Self>) {
        loop {
            let mut state = self.lock();
            state.busy = false;
            self.wake();
            let job = loop {
                if let Some(job) = state.jobs.pop_front() {
                    break job;
                }
                if state.ended {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.busy = true;
            // Before the lock is let go, so that a group dropped now finds it pending.
            state.reducing = quantised(job.op.get()).is_some();
            let place = state.place;
            drop(state);
            self.carry_out(job, place);
        }
    }

    fn carry_out(self: &Arc<Self>, job: Job, place: Option<Place>) {
        let kind = job.op.get().kind();
        let stopped = match (self.error(), place) {
            (Some(e), _) => Some(e),
            (None, None) => Some(Error::new(ErrorKind::Aborted, "the group was configured again")),
            (None, Some(_)) if self.interrupt.load(Ordering::Acquire) => {
                Some(Error::new(ErrorKind::Aborted, "the group is being ended"))
            }
            (None, Some(_)) if time_left(job.deadline).is_zero() => {
                let e = Error::timeout("timed out while still queued behind earlier operations");
                self.poison(&e);
                Some(e)
            }
            (None, Some(_)) => None,
        };
        if let Some(error) = stopped {
            self.lock().reducing = false;
            job.completer
                .fail(error.with_op(kind.name()), job.op.into_inner().into_tensors());
            return;
        }
        match (quantised(job.op.get()), place) {
            (Some(op), Some(place)) => self.reduce(job, op, place),
            _ => self.forward(job),
        }
    }

    fn forward(&self, job: Job) {
        let options = SubmitOptions {
            deadline: Some(job.deadline),
            ..job.options
        };
        match self.inner.submit(job.op, options) {
            Ok(work) => follow(&work, job.completer),
            Err(rejected) => job.completer.fail(rejected.error, rejected.op.into_tensors()),
        }
    }

    fn reduce(self: &Arc<Self>, job: Job, op: ReduceOp, place: Place) {
        let fingerprint = job.op.get().fingerprint();
        let count = job.op.get().count();
        let frame = Frame {
            codec: self.codec,
            fingerprint,
            interrupt: &self.interrupt,
        };
        let mut tensors = job.op.into_inner().into_tensors();
        let deadline = job.deadline;
        let mut run = |collective| self.run(collective, deadline);
        let contribute = job.options.contribute;
        let done = with_values(&mut tensors, |values| {
            reduce::all_reduce(&frame, place, op, contribute, values, &mut run)
        });
        if let Err(error) = &done {
            self.poison(error);
        }
        // Before the caller is told: a group dropped at once after its last reduction says good-bye, and does not abort peers
        // that are still finishing it.
        self.lock().reducing = false;
        match done {
            Ok(outcome) => {
                if outcome.non_finite > 0 {
                    self.non_finite
                        .fetch_add(outcome.non_finite as u64, Ordering::Relaxed);
                    tracing::warn!(
                        rank = place.rank,
                        count = outcome.non_finite,
                        codec = %self.codec,
                        "values that are not finite went into a quantised all-reduce"
                    );
                }
                job.completer.succeed(Completion {
                    tensors,
                    source: None,
                    contributors: outcome.contributors,
                });
            }
            Err(error) => {
                let error = error
                    .with_op(OpKind::AllReduce.name())
                    .with_rank(place.rank)
                    .with_data(ftcore::DType::F32, count);
                job.completer.fail(error, tensors);
            }
        }
    }

    /// Runs one step and waits for it, watching the deadlines of what is queued behind it.
    fn run(self: &Arc<Self>, collective: Collective, deadline: Instant) -> Result<Vec<Tensor>> {
        if self.interrupt.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Aborted, "ended between two steps"));
        }
        let work = self
            .inner
            .run(collective, SubmitOptions::by(deadline))
            .map_err(Error::from)?;
        let ended = Arc::new(AtomicBool::new(false));
        let (flag, weak): (_, Weak<Self>) = (ended.clone(), Arc::downgrade(self));
        work.on_complete(move |_| {
            flag.store(true, Ordering::Release);
            if let Some(shared) = weak.upgrade() {
                drop(shared.lock());
                shared.wake();
            }
        });
        let mut last = deadline.checked_add(REPORT).unwrap_or(deadline);
        let mut overdue = None;
        let mut state = self.lock();
        while !ended.load(Ordering::Acquire) {
            let earliest = state.jobs.iter().map(|j| j.deadline).min();
            let until = earliest
                .filter(|_| overdue.is_none())
                .map_or(last, |e| e.min(last));
            let left = time_left(until);
            if left.is_zero() {
                let text = match overdue {
                    None if until < last => "an operation queued behind this one timed out",
                    _ => "the group below did not report the end of a step",
                };
                let error = Error::timeout(text);
                if overdue.is_some() || until == last {
                    return Err(overdue.unwrap_or(error));
                }
                drop(state);
                self.poison(&error);
                overdue = Some(error);
                last = Instant::now().checked_add(REPORT).unwrap_or(last);
                state = self.lock();
                continue;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        drop(state);
        match work.take() {
            Ok(completion) => Ok(completion.tensors),
            Err(e) => Err(overdue.unwrap_or(e)),
        }
    }
}

/// The reduction of an operation that is quantised; `None` for those that are forwarded.
pub(crate) fn quantised(op: &Collective) -> Option<ReduceOp> {
    match op {
        Collective::AllReduce {
            tensors,
            op: op @ (ReduceOp::Sum | ReduceOp::Avg),
        } if tensors.iter().all(|t| t.dtype() == ftcore::DType::F32) => Some(*op),
        _ => None,
    }
}

/// The outcome of `work` becomes `completer`'s.
fn follow(work: &Work, completer: Completer) {
    let source = work.clone();
    work.on_complete(move |status| match status {
        Status::Failed(e) => completer.fail(e.clone(), source.recover()),
        _ => match source.take() {
            Ok(completion) => completer.succeed(completion),
            Err(e) => completer.fail(e, Vec::new()),
        },
    });
}

/// Calls `f` with the values of all tensors as one slice.
fn with_values<T>(tensors: &mut [Tensor], f: impl FnOnce(&mut [f32]) -> Result<T>) -> Result<T> {
    if let [only] = tensors {
        return f(only.as_mut_slice::<f32>()?);
    }
    let mut flat = Vec::with_capacity(tensors.iter().map(Tensor::count).sum());
    for tensor in &*tensors {
        flat.extend_from_slice(tensor.as_slice::<f32>()?);
    }
    let result = f(&mut flat)?;
    let mut rest = flat.as_slice();
    for tensor in tensors {
        if let Some((part, behind)) = rest.split_at_checked(tensor.count()) {
            tensor.as_mut_slice::<f32>()?.copy_from_slice(part);
            rest = behind;
        }
    }
    Ok(result)
}
