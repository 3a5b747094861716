//! A group that stops in the middle of a chosen step, so that a kill falls inside a reduction and not beside it; or that from a chosen
//! step on cannot reduce at all.
//!
//! The wrapper lets the first bucket of that step through and then holds the second (or the only one) while peers wait for it. The
//! program's driver sees `ReduceBegin` and kills the process there and then. If it is not killed, it goes on after a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ftcore::{
    Checked, Completion, Error, Failed, OpKind, ProcessGroup, Rejected, Result, SubmitOptions, Work, Wrapper,
    deadline_in,
};
use oxccl::launch::{EventKind, EventSender};

use crate::drive::Kill;

/// The step in which this incarnation is to hold; set by the driver for the victim's first incarnation.
pub const ENV_HOLD: &str = "OXCCL_CHAOS_HOLD_STEP";

/// From which step on the all-reduces of a replica's rank are refused as not offered, as REPLICA[/RANK]@STEP; for tests of what ends a run.
pub const ENV_REFUSE: &str = "OXCCL_CHAOS_REFUSE";

/// How long it holds if it is not killed.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// See the module.
pub struct HoldGroup {
    inner: Arc<dyn ProcessGroup>,
    events: EventSender,
    hold_at: Option<i64>,
    refuse_from: Option<i64>,
    step: Arc<AtomicI64>,
    submitted: AtomicU32,
}

impl HoldGroup {
    /// Wraps `inner` for a rank of `replica`; the training loop keeps `step` at the step that it works on.
    ///
    /// Errors: `OXCCL_CHAOS_HOLD_STEP` or `OXCCL_CHAOS_REFUSE` is set and not what it must be.
    pub fn from_env(
        inner: Arc<dyn ProcessGroup>,
        (replica, rank): (u32, u32),
        events: EventSender,
        step: Arc<AtomicI64>,
    ) -> Result<Self> {
        let hold_at = match std::env::var(ENV_HOLD) {
            Ok(text) => Some(
                text.parse()
                    .map_err(|_| Error::invalid(format!("{ENV_HOLD} must be a step, not \"{text}\"")))?,
            ),
            Err(_) => None,
        };
        let refuse = match std::env::var(ENV_REFUSE) {
            Ok(text) => Some(
                text.parse::<Kill>()
                    .map_err(|e| Error::invalid(format!("{ENV_REFUSE}=\"{text}\": {e}")))?,
            ),
            Err(_) => None,
        };
        Ok(Self {
            inner,
            events,
            hold_at,
            refuse_from: refuse
                .filter(|r| (r.replica, r.rank) == (replica, rank))
                .map(|r| r.step),
            step,
            submitted: AtomicU32::new(0),
        })
    }

    /// Holds if this is the operation to hold at.
    fn pass(&self, op: &Checked) {
        let here =
            self.hold_at == Some(self.step.load(Ordering::Acquire)) && op.get().kind() == OpKind::AllReduce;
        if here && self.submitted.fetch_add(1, Ordering::AcqRel) == 1 {
            self.hold();
        }
    }

    /// Why this operation is not done, if it is not.
    fn refusal(&self, op: &Checked) -> Option<Error> {
        let step = self.step.load(Ordering::Acquire);
        let is_refused = self.refuse_from.is_some_and(|from| step >= from);
        (is_refused && op.get().kind() == OpKind::AllReduce)
            .then(|| Error::unsupported(format!("{ENV_REFUSE}: no all-reduce at step {step}")))
    }

    fn hold(&self) {
        let step = u64::try_from(self.step.load(Ordering::Acquire)).unwrap_or(0);
        let epoch = self.inner.info().epoch.0;
        self.events.send(EventKind::ReduceBegin { step, epoch });
        let deadline = deadline_in(TIME_LIMIT);
        while Instant::now() < deadline {
            std::thread::park_timeout(TIME_LIMIT);
        }
    }
}

impl Wrapper for HoldGroup {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        if let Some(error) = self.refusal(&op) {
            let op = op.into_inner();
            return Err(Box::new(Rejected { error, op }));
        }
        self.pass(&op);
        self.inner.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        if let Some(error) = self.refusal(&op) {
            let tensors = op.into_inner().into_tensors();
            return Err(Box::new(Failed { error, tensors }));
        }
        self.pass(&op);
        self.inner.execute(op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.inner.split(color, key, deadline)
    }
}
