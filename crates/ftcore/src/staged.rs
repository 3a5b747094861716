//! A group on host memory that serves tensors of a device, through copies in the device's stream order.
//!
//! [`Staged`] is itself a `ProcessGroup`. One thread copies what an operation reads to the host, after the point that the
//! caller's stream had reached at `submit`, and hands the operation to the inner group; another copies the results back
//! and completes the work (`staged/sides.rs`). They are two so that results never wait behind a stream that waits for something
//! else. The host side is the accelerator's own kind of host memory (pinned where it has that) and is used again
//! (`staged/pool.rs`).

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{
    Capabilities, Checked, Collective, Completion, Configuration, Device, Error, ErrorKind, Failed, Feature,
    GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, accelerator, deadline_in,
    execute_by_submit, time_left, work_pair,
};

mod pool;
mod sides;

use crate::parting::part_from;
use pool::Pool;
use sides::{Sides, State, Submitted};

/// A host group behind tensors of a device. See the module.
///
/// - It advertises what the inner group does, except `Borrow`, for memory on its device only.
/// - `Work::wait_on` waits on the host for the whole operation: nothing is enqueued on the device before it has ended.
/// - An operation whose inputs are not ready at its deadline fails with `Timeout`, and the group with it; so does one
///   that waits behind it. `abort`, `configure` and dropping the group end that wait at once.
/// - After a failure the tensors come back, unless a copy may still be under way; those are leaked and counted.
pub struct Staged {
    sides: Arc<Sides>,
    capabilities: Capabilities,
    timeout: Duration,
    /// Ends once both threads have let go of the inner group.
    threads: Mutex<Option<Receiver<()>>>,
}

impl Staged {
    /// Puts `inner`, which serves host memory, behind `device`. `timeout` is that of calls that name no deadline.
    ///
    /// Errors: `Unsupported` if the device kind is not known in this program; what the accelerator says.
    pub fn new(inner: Arc<dyn ProcessGroup>, device: &Device, timeout: Duration) -> Result<Self> {
        let accelerator = accelerator(&device.kind)?;
        let mut capabilities = inner.capabilities().clone();
        capabilities.features = capabilities.features.without(Feature::Borrow);
        capabilities.devices = vec![device.kind.name().to_string().into()];
        capabilities.notes.push((
            "staging".into(),
            format!("tensors on {} are copied to the host and back", device.kind).into(),
        ));
        capabilities
            .notes
            .push((WAIT_ON.into(), "waits on the host for the whole operation".into()));
        let (to_host, from_host) = (
            accelerator.new_stream(device.index, true)?,
            accelerator.new_stream(device.index, true)?,
        );
        let sides = Arc::new(Sides {
            inner,
            accelerator,
            device: device.clone(),
            pool: Pool::default(),
            state: Mutex::default(),
            moved: Condvar::new(),
            handover: Mutex::default(),
        });
        let (ended, incoming) = channel();
        let (reader, writer) = (sides.clone(), sides.clone());
        let (reading, threads) = channel();
        let writing = reading.clone();
        // The second first: it ends when the first one's sender goes, the first only when the group is dropped.
        spawn("ox-stage-in", move || {
            writer.copy_in(&incoming, &*from_host);
            drop(writer);
            drop(writing);
        })?;
        spawn("ox-stage-out", move || {
            reader.copy_out(&ended, &*to_host);
            drop((ended, reader));
            drop(reading);
        })?;
        Ok(Self {
            sides,
            capabilities,
            timeout,
            threads: Mutex::new(Some(threads)),
        })
    }

    /// Why nothing can be submitted.
    fn refusal(&self) -> Option<Error> {
        let shut = self.sides.lock().shut;
        if shut {
            return Some(Error::new(ErrorKind::InvalidState, "the group was shut down"));
        }
        if self.sides.inner.info().world_size == 0 {
            return Some(Error::new(ErrorKind::InvalidState, "the group is not configured"));
        }
        let first = self.sides.error()?;
        let text = format!("the group failed earlier: {first}");
        Some(Error::new(ErrorKind::Poisoned, text).with_source(first))
    }

    /// The work of `op`, which is in the queue now.
    fn enter(&self, op: Collective, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(op.kind().name());
            Err(Box::new(Rejected { error, op }))
        };
        if let Some(tensor) = op.tensors().iter().find(|t| *t.device() != self.sides.device) {
            let text = format!(
                "a tensor is on {}; this group works on {}",
                tensor.device(),
                self.sides.device
            );
            return refuse(Error::invalid(text), op);
        }
        if let Some(error) = self.refusal() {
            return refuse(error, op);
        }
        let ready = match options.stream.map(|s| s.record()).transpose() {
            Ok(ready) => ready,
            Err(error) => return refuse(error, op),
        };
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        let sides = Arc::downgrade(&self.sides);
        let (work, completer) = work_pair(op.kind(), deadline, move |reason| {
            if let Some(sides) = sides.upgrade() {
                sides.abort(reason);
            }
        });
        self.sides.enter(Submitted {
            op,
            contribute: options.contribute,
            ready,
            deadline,
            generation: 0,
            completer,
        });
        Ok(work)
    }

    /// Waits until `done`, the group has failed (its error), or the deadline passes (`Timeout` with `late`).
    fn wait(&self, deadline: Instant, late: &str, done: impl Fn(&State) -> bool) -> Result<()> {
        loop {
            // The inner group's own failures are announced to nobody here.
            if let Some(error) = self.sides.error() {
                return Err(error);
            }
            let state = self.sides.lock();
            if done(&state) {
                return Ok(());
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(late));
            }
            drop(self.sides.rest(state, left.min(LOOK)));
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_string())
        .spawn(body)
        .map(drop)
        .map_err(|e| Error::io(format!("cannot start the thread {name}"), e))
}

/// The key of the note about `Work::wait_on`.
const WAIT_ON: &str = "wait_on";
/// How often a call that waits looks whether the inner group has failed.
const LOOK: Duration = Duration::from_millis(20);

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for Staged {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            device: self.sides.device.clone(),
            ..self.sides.inner.info()
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        {
            let _handover = self.sides.handover.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.sides.lock();
            state.generation += 1;
            state.over = None;
            state.shut = false;
        }
        // What is queued ends now, whatever its stream waits for.
        self.sides.moved.notify_all();
        self.sides.inner.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.enter(op.into_inner(), options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        // In order with what was submitted before: on another rank it may be under way already.
        self.wait(
            deadline,
            "operations before the split still waited for their inputs",
            Sides::is_handed_over,
        )
        .map_err(|e| e.with_op("split"))?;
        let Some(child) = self.sides.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        Ok(Some(Box::new(Self::new(
            Arc::from(child),
            &self.sides.device,
            self.timeout,
        )?)))
    }

    fn abort(&self, reason: &str) {
        self.sides.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.sides.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.sides.lock().shut = true;
        let late = "work was still pending at the deadline of shutdown";
        let ended = self.wait(deadline, late, |state| state.pending == 0);
        if let Err(error) = &ended
            && error.kind() == ErrorKind::Timeout
            && self.sides.error().is_none()
        {
            self.sides
                .abort("shut down with work that did not end by the deadline");
            let _ = self.sides.inner.shutdown(deadline);
            return Err(error.clone().with_op("shutdown"));
        }
        self.sides.inner.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.sides.inner.traffic()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The threads hold the inner group until every operation has ended. An idle one leaves by itself.
        let pending = {
            let mut state = self.sides.lock();
            state.dropped = true;
            state.pending > 0
        };
        if pending {
            self.sides.abort("the group was dropped");
        }
        self.sides.moved.notify_all();
        // One of them drops the inner group, which has its leave to send.
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        threads.take().into_iter().for_each(part_from);
    }
}
