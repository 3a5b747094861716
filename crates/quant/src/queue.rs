//! The queue between callers and the thread `ox-quant`, which carries collectives out in the order of submission.
//!
//! Every collective passes through it, forwarded ones too: otherwise one of them could overtake the second half of a quantised
//! operation on one rank and not on another. Nothing here blocks a caller, except waits that say so.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::{
    Cancel, Checked, Collective, Completer, Completion, Epoch, Error, ErrorKind, Fingerprint, ProcessGroup,
    ProcessGroupExt, Result, Status, SubmitOptions, Tensor, Work, time_left,
};

use crate::agree::{Agreement, DISPUTED, may_be_mismatch};
use crate::chunk::Frame;
use crate::codec::rounding::splitmix64;
use crate::codec::{Codec, Rounding};
use crate::exchange::{Exchange, Place};
use crate::feedback::{ErrorFeedback, Slot};
use crate::kernels::block_kernels;
use crate::options::QuantizeOptions;
use crate::plan::{Plan, plan};

/// How long the group below may take to report an operation's own deadline, or an abort.
const REPORT: Duration = Duration::from_secs(5);

/// One call.
pub(crate) struct Job {
    pub(crate) op: Checked,
    pub(crate) options: SubmitOptions,
    pub(crate) deadline: Instant,
    pub(crate) completer: Completer,
    pub(crate) turn: Turn,
    pub(crate) slot: Option<Slot>,
}

/// Which call of the group a job is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Turn {
    /// The number since `configure`.
    pub(crate) seq: u64,
    /// The caller's round, and the number in it.
    pub(crate) round: u64,
    pub(crate) in_round: u64,
}

/// A forwarded call that failed because ranks called different things; the thread finds out what.
struct Dispute {
    completer: Completer,
    error: Error,
    tensors: Vec<Tensor>,
    turn: Turn,
    fingerprint: Fingerprint,
    /// With whom, when it failed: while the group is being configured again there is nobody.
    agreement: Option<Agreement>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) jobs: VecDeque<Job>,
    disputes: VecDeque<Dispute>,
    /// The thread has a job in hand.
    busy: bool,
    /// That job is a quantised operation whose caller does not know of its end yet.
    exchanging: bool,
    ended: bool,
    /// `None`: not configured.
    pub(crate) place: Option<Place>,
    pub(crate) agreement: Option<Agreement>,
    /// Of the last `configure` that worked.
    pub(crate) epoch: Option<Epoch>,
    pub(crate) next: Turn,
    /// Ends the `configure` that is under way.
    pub(crate) configuring: Option<Cancel>,
    pub(crate) closing: bool,
    /// The first failure of this layer, or why `configure` failed.
    pub(crate) failure: Option<Error>,
}

/// What the handle and the thread have in common.
pub(crate) struct Shared {
    pub(crate) inner: Arc<dyn ProcessGroup>,
    pub(crate) codec: Codec,
    pub(crate) options: QuantizeOptions,
    pub(crate) feedback: Option<Arc<ErrorFeedback>>,
    pub(crate) non_finite: AtomicU64,
    /// Raised while an order to stop stands.
    pub(crate) interrupt: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn new(inner: Arc<dyn ProcessGroup>, codec: Codec, options: QuantizeOptions) -> Self {
        let feedback = options.error_feedback.then(Arc::default);
        Self {
            inner,
            codec,
            options,
            feedback,
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

    /// How `op` is quantised over `world` ranks; `None` if it is forwarded.
    pub(crate) fn plan(&self, op: &Collective, world: u32) -> Option<Plan> {
        plan(op, world, self.options.moves)
    }

    /// Ends everything that is pending, a `configure` too. Never blocks.
    pub(crate) fn abort(&self, reason: &str) {
        if let Some(cancel) = &self.lock().configuring {
            let text = format!("aborted while it was being configured: {reason}");
            cancel.cancel(Error::new(ErrorKind::Aborted, text));
        }
        self.stop(reason);
    }

    /// Ends everything that is pending in the present configuration. Never blocks.
    pub(crate) fn stop(&self, reason: &str) {
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
        let pending = state.exchanging || !state.jobs.is_empty();
        drop(state);
        if pending {
            self.abort("the group was dropped");
        }
        self.wake();
    }

    /// True if nothing is queued or being exchanged. What was forwarded is the group below's.
    pub(crate) fn idle(&self) -> bool {
        let state = self.lock();
        !state.exchanging && state.jobs.is_empty()
    }

    /// Waits until nothing is queued or running.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> Result<()> {
        let mut state = self.lock();
        while state.busy || !state.jobs.is_empty() || !state.disputes.is_empty() {
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
    pub(crate) fn serve(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            state.busy = false;
            self.wake();
            let job = loop {
                if let Some(dispute) = state.disputes.pop_front() {
                    state.busy = true;
                    drop(state);
                    self.settle(dispute);
                    state = self.lock();
                    state.busy = false;
                    self.wake();
                    continue;
                }
                if let Some(job) = state.jobs.pop_front() {
                    break job;
                }
                if state.ended {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.busy = true;
            let place = state.place;
            let plan = place.and_then(|p| self.plan(job.op.get(), p.world));
            // Before the lock is let go, so that a group dropped now finds it pending.
            state.exchanging = plan.is_some();
            drop(state);
            self.carry_out(job, place, plan);
        }
    }

    fn carry_out(self: &Arc<Self>, job: Job, place: Option<Place>, plan: Option<Plan>) {
        let kind = job.op.get().kind();
        let stopped = match (self.error(), place) {
            (Some(e), _) if may_be_mismatch(&e) => {
                // The news came before the call: this call is this rank's side of it.
                let agreement = self.lock().agreement.clone();
                Some(self.disputed(e, job.turn, job.op.get().fingerprint(), agreement))
            }
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
            self.lock().exchanging = false;
            job.completer
                .fail(error.with_op(kind.name()), job.op.into_inner().into_tensors());
            return;
        }
        match (plan, place) {
            (Some(plan), Some(place)) => self.exchange(job, &plan, place),
            _ => self.forward(job),
        }
    }

    /// The outcome of the group below becomes the job's.
    fn forward(self: &Arc<Self>, job: Job) {
        let options = SubmitOptions {
            deadline: Some(job.deadline),
            ..job.options
        };
        let (turn, fingerprint, completer) = (job.turn, job.op.get().fingerprint(), job.completer);
        let work = match self.inner.submit(job.op, options) {
            Ok(work) => work,
            Err(rejected) => {
                let error = self.first_cause(rejected.error);
                return completer.fail(error, rejected.op.into_tensors());
            }
        };
        let (source, weak) = (work.clone(), Arc::downgrade(self));
        work.on_complete(move |status| match status {
            Status::Failed(error) => {
                let (error, tensors) = (error.clone(), source.recover());
                match weak.upgrade() {
                    Some(shared) if may_be_mismatch(&error) => {
                        let mut state = shared.lock();
                        let agreement = state.agreement.clone();
                        state.disputes.push_back(Dispute {
                            completer,
                            error,
                            tensors,
                            turn,
                            fingerprint,
                            agreement,
                        });
                        drop(state);
                        shared.wake();
                    }
                    _ => completer.fail(error, tensors),
                }
            }
            _ => match source.take() {
                Ok(completion) => completer.succeed(completion),
                Err(e) => completer.fail(e, Vec::new()),
            },
        });
    }

    /// A call that was accepted before the group failed ends with the cause, not with a refusal because of it.
    fn first_cause(&self, refusal: Error) -> Error {
        match refusal.kind() {
            ErrorKind::Poisoned => self.inner.error().unwrap_or(refusal),
            _ => refusal,
        }
    }

    fn settle(&self, dispute: Dispute) {
        let error = self.disputed(
            dispute.error,
            dispute.turn,
            dispute.fingerprint,
            dispute.agreement,
        );
        dispute.completer.fail(error, dispute.tensors);
    }

    /// Names both sides of a mismatch by what was called; it becomes the group's error if there is none of this layer yet.
    /// Not for a call of a configuration that is over: that one's failure is none of the next (L30).
    fn disputed(
        &self,
        error: Error,
        turn: Turn,
        fingerprint: Fingerprint,
        agreement: Option<Agreement>,
    ) -> Error {
        let Some(agreement) = agreement else {
            return error;
        };
        if let Some(known) = self.lock().failure.clone() {
            return known;
        }
        let named = agreement.name_both(turn.seq, fingerprint, &error, &self.interrupt);
        self.lock().failure.get_or_insert(named).clone()
    }

    fn exchange(self: &Arc<Self>, job: Job, plan: &Plan, place: Place) {
        let op = job.op.get();
        let (fingerprint, count, dtype, kind) = (op.fingerprint(), op.count(), op.dtype(), op.kind());
        let device = op.tensors().first().map(|t| t.device().kind.clone());
        let mut tensors = job.op.into_inner().into_tensors();
        let below = Below {
            shared: self,
            deadline: job.deadline,
        };
        let done = device
            .map_or(Ok(ftcore::DeviceKind::Cpu), Ok)
            .and_then(|kind| block_kernels(&kind))
            .and_then(|kernels| {
                let exchange = Exchange {
                    frame: Frame {
                        codec: self.codec,
                        rounding: rounding(self.options.rounding, job.turn),
                        rank: place.rank,
                        fingerprint,
                        interrupt: &self.interrupt,
                        kernels: &*kernels,
                    },
                    place,
                    accuracy: self.options.accuracy,
                    contribute: job.options.contribute,
                    feedback: self.feedback.as_deref().zip(job.slot.as_ref()),
                };
                exchange.carry_out(plan, &mut tensors, &below)
            });
        let done = done.map_err(|error| {
            if may_be_mismatch(&error) {
                // The others first, so that nobody waits while the ranks compare notes.
                let agreement = self.lock().agreement.clone();
                if let Some(Err(e)) = agreement.map(|a| a.say_call(job.turn.seq, fingerprint)) {
                    tracing::warn!(error = %e, "the other ranks cannot be told of a mismatch");
                }
                if self.inner.error().is_none() {
                    self.inner.abort(&format!("{DISPUTED}: {error}"));
                }
                let agreement = self.lock().agreement.clone();
                return self.disputed(error, job.turn, fingerprint, agreement);
            }
            self.poison(&error);
            error
        });
        // Before the caller is told: a group dropped at once after its last operation says good-bye, and does not abort peers
        // that are still finishing it.
        self.lock().exchanging = false;
        match done {
            Ok(outcome) => {
                if outcome.non_finite > 0 {
                    self.non_finite
                        .fetch_add(outcome.non_finite as u64, Ordering::Relaxed);
                    tracing::warn!(
                        rank = place.rank,
                        count = outcome.non_finite,
                        codec = %self.codec,
                        "values that are not finite went into a quantised {kind}"
                    );
                }
                job.completer.succeed(Completion {
                    tensors,
                    source: None,
                    contributors: outcome.contributors,
                });
            }
            Err(error) => {
                let error = error.with_op(kind.name()).with_rank(place.rank);
                let error = dtype.map_or(error.clone(), |d| error.with_data(d, count));
                job.completer.fail(error, tensors);
            }
        }
    }

    /// Waits for `ended`. If something queued behind it is overdue first, the group is ended and that is the error; if nothing is heard of the
    /// end for a while after that or after the step's own `deadline`, it is waited for no longer.
    fn watch(&self, ended: &AtomicBool, deadline: Instant) -> Option<Error> {
        let mut last = deadline.checked_add(REPORT).unwrap_or(deadline);
        let mut overdue = None;
        let mut state = self.lock();
        while !ended.load(Ordering::Acquire) {
            let earliest = state.jobs.iter().map(|j| j.deadline).min();
            let until = match (&overdue, earliest) {
                (None, Some(earliest)) => earliest.min(last),
                _ => last,
            };
            let left = time_left(until);
            if !left.is_zero() {
                state = self
                    .changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            if overdue.is_some() || until == last {
                break;
            }
            drop(state);
            let error = Error::timeout("an operation queued behind this one timed out");
            self.poison(&error);
            overdue = Some(error);
            last = Instant::now().checked_add(REPORT).unwrap_or(last);
            state = self.lock();
        }
        overdue
    }
}

/// The group below, for the steps of one operation.
pub(crate) struct Below<'a> {
    shared: &'a Arc<Shared>,
    deadline: Instant,
}

/// A step that was begun.
pub(crate) struct Begun {
    work: Work,
    ended: Arc<AtomicBool>,
}

impl Below<'_> {
    /// Begins one step behind those that were begun before.
    pub(crate) fn begin(&self, collective: Collective) -> Result<Begun> {
        let shared = self.shared;
        if shared.interrupt.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Aborted, "ended between two steps"));
        }
        let work = shared
            .inner
            .run(collective, SubmitOptions::by(self.deadline))
            .map_err(|rejected| shared.first_cause(rejected.error))?;
        let ended = Arc::new(AtomicBool::new(false));
        let (flag, weak): (_, Weak<Shared>) = (ended.clone(), Arc::downgrade(shared));
        work.on_complete(move |_| {
            flag.store(true, Ordering::Release);
            if let Some(shared) = weak.upgrade() {
                drop(shared.lock());
                shared.wake();
            }
        });
        Ok(Begun { work, ended })
    }

    /// Waits for the end of a step, watching the deadlines of what is queued behind the operation; its tensors.
    pub(crate) fn finish(&self, begun: Begun) -> Result<Vec<Tensor>> {
        let Begun { work, ended } = begun;
        let overdue = self.shared.watch(&ended, self.deadline);
        if !ended.load(Ordering::Acquire) {
            return Err(
                overdue.unwrap_or_else(|| Error::timeout("the group below did not report the end of a step"))
            );
        }
        match work.take() {
            Ok(completion) => Ok(completion.tensors),
            Err(e) => Err(overdue.unwrap_or(e)),
        }
    }

    /// Runs one step.
    pub(crate) fn run(&self, collective: Collective) -> Result<Vec<Tensor>> {
        self.finish(self.begin(collective)?)
    }
}

/// The rounding of one call.
fn rounding(seed: Rounding, turn: Turn) -> Rounding {
    match seed {
        Rounding::Nearest => Rounding::Nearest,
        Rounding::Stochastic { key } => Rounding::Stochastic {
            key: splitmix64(splitmix64(key, turn.round), turn.in_round),
        },
    }
}
