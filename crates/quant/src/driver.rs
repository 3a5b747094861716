//! What the engine of a quantised group works with: the group below.
//!
//! Every collective passes through the engine, forwarded ones too: otherwise one of them could overtake the second half of a quantised
//! operation on one rank and not on another. A quantised one is carried out inside `enqueue`, step by step; a forwarded one ends when
//! the group below ends it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use ftcore::engine::{self, Driver, Ended, Job, Place, Rules, Ticket, spawn};
use ftcore::{
    Checked, Collective, Completion, DeviceKind, Error, ErrorKind, Event, Fingerprint, ProcessGroup,
    ProcessGroupExt, Result, SubmitOptions, Tensor, Work, time_left,
};

use crate::agree::{Agreement, DISPUTED, may_be_mismatch};
use crate::chunk::Frame;
use crate::codec::{Codec, Rounding};
use crate::exchange::Exchange;
use crate::feedback::{ErrorFeedback, Slot};
use crate::kernels::block_kernels;
use crate::options::QuantizeOptions;
use crate::plan::Plan;

/// One configuration of a group at work.
pub(crate) type Engine = engine::Engine<QuantDriver>;

/// The group below ends its work at once when it is told to; the grace is for threads without a core.
pub(crate) const RULES: Rules = Rules {
    depth: usize::MAX,
    grace: Duration::from_secs(5),
    gives_up: false,
};

/// One call.
pub(crate) struct Call {
    pub(crate) op: Checked,
    pub(crate) options: SubmitOptions,
    /// Its caller waits for it.
    pub(crate) blocks: bool,
    /// `None`: it is forwarded.
    pub(crate) quantised: Option<Quantised>,
}

/// What a call needs besides to be quantised.
pub(crate) struct Quantised {
    pub(crate) plan: Plan,
    /// With the key of this call.
    pub(crate) rounding: Rounding,
    pub(crate) slot: Option<Slot>,
    /// What the values wait for: the end that the caller's stream had when it submitted.
    pub(crate) after: Option<Arc<dyn Event>>,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op.into_inner()
    }
}

/// What all configurations of a group have in common.
pub(crate) struct Layer {
    pub(crate) inner: Arc<dyn ProcessGroup>,
    pub(crate) codec: Codec,
    pub(crate) options: QuantizeOptions,
    pub(crate) feedback: Option<Arc<ErrorFeedback>>,
    pub(crate) non_finite: AtomicU64,
    /// The last field: its other end hears that the group below was let go of.
    pub(crate) _gone: Sender<()>,
}

impl Layer {
    /// A call that was accepted before the group below failed ends with the cause, not with a refusal because of it.
    fn first_cause(&self, refusal: Error) -> Error {
        match refusal.kind() {
            ErrorKind::Poisoned => self.inner.error().unwrap_or(refusal),
            _ => refusal,
        }
    }
}

/// See the module.
pub(crate) struct QuantDriver {
    layer: Arc<Layer>,
    place: Place,
    /// `None` for a group that was split from another.
    agreement: Option<Agreement>,
    /// The group has failed: whatever works for it ends.
    stop: AtomicBool,
    /// It is being found out which calls the ranks made.
    disputing: AtomicBool,
}

impl QuantDriver {
    pub(crate) fn new(layer: Arc<Layer>, place: Place, agreement: Option<Agreement>) -> Self {
        Self {
            layer,
            place,
            agreement,
            stop: AtomicBool::new(false),
            disputing: AtomicBool::new(false),
        }
    }

    /// The failure of the group below, for a call that has not begun: `None` where that call helps to say in this group's words what it was.
    pub(crate) fn failed_below(&self) -> Option<Error> {
        let error = self.layer.inner.error()?;
        let disputed = may_be_mismatch(&error) || self.disputing.load(Ordering::Acquire);
        (!disputed || self.agreement.is_none()).then_some(error)
    }

    /// The outcome of the group below becomes the call's.
    fn forward(&self, op: Checked, options: SubmitOptions, blocks: bool, ticket: Ticket<Self>) {
        let fingerprint = op.get().fingerprint();
        let options = SubmitOptions {
            deadline: Some(ticket.deadline()),
            ..options
        };
        if blocks {
            // On this thread where the group below can: usually it is the caller's.
            return match self.layer.inner.execute(op, options) {
                Ok(completion) => ticket.succeed(completion),
                Err(failed) => {
                    let error = self.layer.first_cause(failed.error);
                    self.end(error, failed.tensors, fingerprint, ticket);
                }
            };
        }
        let work = match self.layer.inner.submit(op, options) {
            Ok(work) => work,
            Err(rejected) => {
                let error = self.layer.first_cause(rejected.error);
                return self.end(error, rejected.op.into_tensors(), fingerprint, ticket);
            }
        };
        let source = work.clone();
        work.on_complete(move |_| match source.take() {
            Ok(completion) => ticket.succeed(completion),
            Err(error) => {
                let (engine, tensors) = (ticket.engine().clone(), source.recover());
                engine.driver().end(error, tensors, fingerprint, ticket);
            }
        });
    }

    /// A forwarded call has failed. Does not block.
    fn end(&self, error: Error, tensors: Vec<Tensor>, fingerprint: Fingerprint, ticket: Ticket<Self>) {
        if may_be_mismatch(&error) {
            self.dispute(error, tensors, fingerprint, ticket);
        } else if self.disputing.load(Ordering::Acquire) || self.layer.inner.error().is_none() {
            ticket.refuse(error, tensors);
        } else {
            ticket.fail(error, tensors);
        }
    }

    /// A call has failed because ranks called different things. Which, is found out on a thread of its own: that waits for the other ranks.
    fn dispute(&self, error: Error, tensors: Vec<Tensor>, fingerprint: Fingerprint, ticket: Ticket<Self>) {
        let Some(agreement) = self.agreement.clone().filter(|_| !self.is_stopped()) else {
            return ticket.fail(error, tensors);
        };
        if self.disputing.swap(true, Ordering::AcqRel) {
            // Its caller is told after that of the first, and so with what is found out.
            return ticket.refuse(error, tensors);
        }
        let (engine, number) = (ticket.engine().clone(), ticket.number());
        // If it does not start, the ticket ends without an answer.
        let started = spawn("ox-quant-calls", move || {
            let driver = engine.driver();
            let inner = &driver.layer.inner;
            // The others first, so that none waits while the ranks compare their calls.
            if let Err(e) = agreement.say_call(number, fingerprint) {
                tracing::warn!(error = %e, "the other ranks cannot be told of a mismatch");
            }
            if inner.error().is_none() {
                inner.abort(&format!("{DISPUTED}: {error}"));
            }
            let named = agreement.name_both(number, fingerprint, &error, &driver.stop);
            ticket.fail(named, tensors);
        });
        if let Err(e) = started {
            tracing::warn!(error = %e, "it is not found out which calls the ranks made");
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn exchange(&self, call: Quantised, op: Checked, contribute: bool, ticket: Ticket<Self>) {
        let layer = &self.layer;
        let (fingerprint, kind) = (op.get().fingerprint(), op.get().kind());
        let device = op.get().tensors().first().map(|t| t.device().kind.clone());
        let mut tensors = op.into_inner().into_tensors();
        let below = Below {
            driver: self,
            deadline: ticket.deadline(),
            in_flight: Cell::new(0),
        };
        let kernels = block_kernels(&device.unwrap_or(DeviceKind::Cpu));
        let ready = call.after.as_deref().map_or(Ok(()), |e| below.wait_for(e));
        let done = ready.and(kernels).and_then(|kernels| {
            let exchange = Exchange {
                frame: Frame {
                    codec: layer.codec,
                    rounding: call.rounding,
                    rank: self.place.rank,
                    fingerprint,
                    interrupt: &self.stop,
                    kernels: &*kernels,
                },
                place: self.place,
                accuracy: layer.options.accuracy,
                contribute,
                feedback: layer.feedback.as_deref().zip(call.slot.as_ref()),
            };
            match kernels.on_device() {
                Some(bytes) if !layer.inner.capabilities().serves(&DeviceKind::Cpu) => {
                    exchange.carry_out_on_device(&call.plan, &mut tensors, &below, bytes)
                }
                _ => exchange.carry_out(&call.plan, &mut tensors, &below),
            }
        });
        match done {
            Ok(outcome) => {
                if outcome.non_finite > 0 {
                    let count = outcome.non_finite;
                    layer.non_finite.fetch_add(count as u64, Ordering::Relaxed);
                    tracing::warn!(
                        rank = self.place.rank,
                        count,
                        codec = %layer.codec,
                        "values that are not finite went into a quantised {kind}"
                    );
                }
                ticket.succeed(Completion {
                    tensors,
                    source: None,
                    contributors: outcome.contributors,
                });
            }
            Err(error) if may_be_mismatch(&error) => self.dispute(error, tensors, fingerprint, ticket),
            Err(error) if self.disputing.load(Ordering::Acquire) => ticket.refuse(error, tensors),
            Err(error) => ticket.fail(error, tensors),
        }
    }
}

impl Driver for QuantDriver {
    type Job = Call;
    const OVERTIME: Duration = Duration::from_secs(2);

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let Call {
            op,
            options,
            blocks,
            quantised,
        } = call;
        match quantised {
            Some(quantised) => self.exchange(quantised, op, options.contribute, ticket),
            None => self.forward(op, options, blocks, ticket),
        }
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        self.stop.store(true, Ordering::Release);
        // What the group below found out itself it has told the others already.
        if self.layer.inner.error().is_none() {
            self.layer.inner.abort(failure.message());
        }
        ended.clean();
    }

    /// The group below goes on: it is configured again, shut down or dropped by its owner.
    fn release(&self) -> Result<()> {
        Ok(())
    }
}

/// How long after its deadline a step may be reported that is waited for here.
const REPORT: Duration = Duration::from_secs(2);

/// The group below, for the steps of one operation.
pub(crate) struct Below<'a> {
    driver: &'a QuantDriver,
    deadline: Instant,
    /// Steps that were begun and not finished.
    in_flight: Cell<usize>,
}

impl Below<'_> {
    /// Begins one step behind those that were begun before.
    pub(crate) fn begin(&self, collective: Collective) -> Result<Work> {
        if self.driver.is_stopped() {
            return Err(Error::new(ErrorKind::Aborted, "ended between two steps"));
        }
        let layer = &self.driver.layer;
        let begun = layer.inner.run(collective, SubmitOptions::by(self.deadline));
        let begun = begun.map_err(|rejected| layer.first_cause(rejected.error))?;
        self.in_flight.set(self.in_flight.get() + 1);
        Ok(begun)
    }

    /// Waits for the end of a step; its tensors.
    pub(crate) fn finish(&self, begun: &Work) -> Result<Vec<Tensor>> {
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        if self.in_flight.get() > 0 {
            // A group that lets callers carry out what they wait for would leave the steps behind this one alone while this thread
            // encodes: its own threads are to have them all.
            let (tell, told) = channel();
            begun.on_complete(move |_| {
                let _ = tell.send(());
            });
            let _ = told.recv_timeout(time_left(self.deadline).saturating_add(REPORT));
        }
        Ok(begun.take()?.tensors)
    }

    /// Waits until a stream has come to `event`.
    fn wait_for(&self, event: &dyn Event) -> Result<()> {
        while !event.query()? {
            if self.driver.is_stopped() {
                return Err(Error::new(
                    ErrorKind::Aborted,
                    "ended while the caller's stream was waited for",
                ));
            }
            if time_left(self.deadline).is_zero() {
                return Err(Error::timeout(
                    "the caller's stream did not get there by the deadline",
                ));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    /// Runs one step.
    pub(crate) fn run(&self, collective: Collective) -> Result<Vec<Tensor>> {
        self.finish(&self.begin(collective)?)
    }
}
