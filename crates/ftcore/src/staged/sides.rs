//! The two sides of a staged group: the driver, which brings operations to the host, and the thread that brings results back.
//!
//! An operation waits inside `enqueue` until its stream has made its inputs. That wait is on the host and ends early when
//! the group fails, is configured again or is dropped: the device may never reach that point. Nothing is enqueued on a
//! stream of the caller's.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pool::Pool;
use crate::engine::{self, Channel, Driver, Ended, Job, Label, Place, Stage, Ticket};
use crate::{
    Accelerator, Checked, Collective, Completion, Device, Error, ErrorKind, Event, ProcessGroup, Result,
    Stream, SubmitOptions, Tensor, Work, deadline_in, time_left,
};

/// One configuration of a group at work.
pub(super) type Engine = engine::Engine<StagedDriver>;

/// How long the copies of one operation's results may take.
const COPY_LIMIT: Duration = Duration::from_secs(60);
/// Between two looks at an event that is not reached: it is not signalled to the host. The first pause, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(500));

/// What is submitted.
pub(super) struct Call {
    pub(super) op: Collective,
    pub(super) contribute: bool,
    /// Reached when the caller's stream has made the inputs.
    pub(super) ready: Option<Arc<dyn Event>>,
    /// Nothing is done: it ends once everything that was submitted before is with the inner group.
    pub(super) is_mark: bool,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op
    }

    fn channel(&self, label: &Label) -> Channel {
        match self.is_mark {
            true => Channel::Unordered,
            false => label.channel(),
        }
    }
}

/// What all configurations of a group and the thread that brings results back share.
pub(super) struct Sides {
    pub(super) inner: Arc<dyn ProcessGroup>,
    pub(super) accelerator: Arc<dyn Accelerator>,
    pub(super) device: Device,
    pub(super) pool: Pool,
    /// Of the copies to the host.
    pub(super) to_host: Arc<dyn Stream>,
    /// The last field: its other end hears that the inner group was let go of.
    pub(super) _gone: Sender<()>,
}

/// An operation that the inner group has ended.
pub(super) struct Landed {
    work: Work,
    op: Collective,
    ticket: Ticket<StagedDriver>,
}

/// The way to the host.
pub(super) struct StagedDriver {
    sides: Arc<Sides>,
    place: Place,
    landed: Sender<Landed>,
    /// The group has failed: no inputs are waited for.
    stopped: Mutex<bool>,
    moved: Condvar,
}

/// An operation that did not get to the inner group.
struct Stopped {
    error: Error,
    /// A copy may still be reading the caller's memory.
    touched: bool,
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        let touched = false;
        Self { error, touched }
    }
}

impl StagedDriver {
    pub(super) fn new(sides: Arc<Sides>, place: Place, landed: Sender<Landed>) -> Self {
        Self {
            sides,
            place,
            landed,
            stopped: Mutex::default(),
            moved: Condvar::new(),
        }
    }

    /// The inner group.
    pub(super) fn inner(&self) -> &dyn ProcessGroup {
        &*self.sides.inner
    }

    fn stopped(&self) -> MutexGuard<'_, bool> {
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the caller's stream has made the inputs, on the host: the stream of the copies would wait for ever if that point
    /// were never reached.
    fn await_inputs(&self, ready: &dyn Event, deadline: Instant) -> Result<()> {
        let mut pause = PAUSES.0;
        while !ready.query()? {
            if time_left(deadline).is_zero() {
                return Err(Error::timeout(
                    "the stream had not made the inputs at the deadline",
                ));
            }
            let stopped = self.stopped();
            if *stopped {
                return Err(Error::new(ErrorKind::Aborted, "the group has failed"));
            }
            drop(self.moved.wait_timeout(stopped, pause));
            pause = (pause * 2).min(PAUSES.1);
        }
        Ok(())
    }

    fn start(
        &self,
        op: &Collective,
        contribute: bool,
        ready: Option<&dyn Event>,
        deadline: Instant,
    ) -> Result<Work, Stopped> {
        if let Some(ready) = ready {
            self.await_inputs(ready, deadline)?;
        }
        let sides = &self.sides;
        let mut touched = false;
        let mut taken: Vec<Tensor> = Vec::new();
        let host = op.with_tensors(self.place.rank, &mut |tensor, role| {
            let mut host = sides.pool.take(&*sides.accelerator, &sides.device, tensor)?;
            if role.is_read()
                && let Err(error) = sides
                    .accelerator
                    .copy_out(tensor, host.bytes_mut(), &*sides.to_host)
            {
                // The device may still be writing into it (INV-8).
                touched = true;
                taken.push(host);
                return Err(error);
            }
            Ok(host)
        });
        for tensor in taken {
            tensor.leak("a copy from the device did not end");
        }
        let host = host.map_err(|error| Stopped { error, touched })?;
        let options = SubmitOptions {
            stream: None,
            deadline: Some(deadline),
            contribute,
        };
        let inner = self.inner();
        let checked = Checked::new(host, &inner.info(), inner.capabilities(), &options);
        let submitted = checked.and_then(|checked| inner.submit(checked, options));
        submitted.map_err(|rejected| {
            sides.put(rejected.op.into_tensors());
            // What was accepted before the inner group failed ends with the cause, not with a refusal because of it.
            let error = match rejected.error.kind() {
                ErrorKind::Poisoned => inner.error().unwrap_or(rejected.error),
                _ => rejected.error,
            };
            error.into()
        })
    }
}

impl Driver for StagedDriver {
    type Job = Call;
    const OVERTIME: Duration = Duration::from_secs(2);

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let Call {
            op,
            contribute,
            ready,
            is_mark,
        } = call;
        if is_mark {
            return ticket.succeed(Completion {
                tensors: Vec::new(),
                source: None,
                contributors: 0,
            });
        }
        match self.start(&op, contribute, ready.as_deref(), ticket.deadline()) {
            Ok(work) => {
                let (landed, ended) = (self.landed.clone(), work.clone());
                work.on_complete(move |_| {
                    let work = ended;
                    let _ = landed.send(Landed { work, op, ticket });
                });
            }
            Err(stopped) => {
                let mut tensors = op.into_tensors();
                if stopped.touched {
                    for tensor in tensors.drain(..) {
                        tensor.leak("a copy from the device did not end");
                    }
                }
                ticket.fail(stopped.error, tensors);
            }
        }
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        *self.stopped() = true;
        self.moved.notify_all();
        // What the inner group found out itself it has told the others already.
        if self.inner().error().is_none() {
            self.inner().abort(failure.message());
        }
        ended.clean();
    }

    /// The inner group goes on: it is configured again, shut down or dropped by its owner.
    fn release(&self) -> Result<()> {
        Ok(())
    }

    fn waits_for(&self, _: &Label, stage: Stage) -> String {
        match stage {
            Stage::Queued => "not begun, behind an earlier one whose inputs are not ready, or for want of time on this host",
            Stage::Entering => "waiting for its inputs, or for copies of them",
            Stage::Running => "with the group on the host, or its results are being copied",
            Stage::Finished => "done, but an earlier one is not",
        }
        .to_string()
    }
}

impl Sides {
    fn put(&self, host: Vec<Tensor>) {
        host.into_iter().for_each(|t| self.pool.put(t));
    }

    /// The thread that writes results. Ends with the group and the last pending operation.
    pub(super) fn copy_in(&self, incoming: &Receiver<Landed>, stream: &dyn Stream) {
        for Landed { work, op, ticket } in incoming {
            match work.take() {
                Ok(completion) => self.write_back(op, completion, ticket, stream),
                Err(error) => {
                    self.put(work.recover());
                    // Whatever the inner group keeps: only copies touch the caller's memory, and those have ended.
                    let tensors = op.into_tensors();
                    match self.inner.error() {
                        Some(_) => ticket.fail(error, tensors),
                        None => ticket.refuse(error, tensors),
                    }
                }
            }
        }
    }

    fn write_back(
        &self,
        op: Collective,
        completion: Completion,
        ticket: Ticket<StagedDriver>,
        stream: &dyn Stream,
    ) {
        let roles = op.roles(ticket.engine().place().rank);
        let mut tensors = op.into_tensors();
        let parts = tensors.iter_mut().zip(&completion.tensors).zip(roles);
        let copied = parts
            .filter(|(_, role)| role.is_written())
            .try_for_each(|((to, from), _)| self.accelerator.copy_in(from.bytes(), to, stream))
            .and_then(|()| stream.synchronize(deadline_in(COPY_LIMIT)));
        match copied {
            Ok(()) => {
                self.put(completion.tensors);
                ticket.succeed(Completion {
                    tensors,
                    source: completion.source,
                    contributors: completion.contributors,
                });
            }
            Err(error) => {
                // A copy may still be reading the one and writing into the other (INV-8).
                for tensor in tensors.into_iter().chain(completion.tensors) {
                    tensor.leak("a copy to the device did not end");
                }
                ticket.fail(error, Vec::new());
            }
        }
    }
}
