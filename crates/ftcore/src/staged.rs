//! A group on host memory that serves tensors of a device, through copies in the device's stream order.
//!
//! [`Staged`] is itself a `ProcessGroup` over the engine. Its driver copies what an operation reads to the host, after the point that the
//! caller's stream had reached at `submit`, and hands the operation to the inner group; a thread copies the results back
//! (`staged/sides.rs`): results never wait behind a stream that waits for something
//! else. The host side is the accelerator's own kind of host memory (pinned where it has that) and is used again
//! (`staged/pool.rs`).

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::{Label, Place, Rules, spawn};
use crate::lifecycle::{Lifecycle, leave_at_exit};
use crate::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, Device, Error, Failed, Feature,
    GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Tensor, Traffic, Work, accelerator,
    deadline_in,
};

mod pool;
mod sides;

use pool::Pool;
use sides::{Call, Engine, Landed, Sides, StagedDriver};

/// The inner group ends its work at once when it is told to; the grace is for copies that are under way.
const RULES: Rules = Rules {
    depth: usize::MAX,
    grace: Duration::from_secs(5),
    gives_up: false,
};

/// A host group behind tensors of a device. See the module.
///
/// - It advertises what the inner group does, except `Borrow`, for memory on its device only.
/// - `Work::wait_on` waits on the host for the whole operation: nothing is enqueued on the device before it has ended.
/// - An operation whose inputs are not ready at its deadline fails with `Timeout`, and the group with it; so does one
///   that waits behind it. `abort`, `configure` and dropping the group end that wait at once.
/// - After a failure the tensors come back, unless a copy may still be under way; those are leaked and counted.
pub struct Staged {
    /// The first field: whatever is pending ends before the inner group is let go of.
    lifecycle: Lifecycle<Engine>,
    sides: Arc<Sides>,
    capabilities: Capabilities,
    timeout: Duration,
    landed: Sender<Landed>,
    /// Ends once the inner group was let go of.
    gone: Mutex<Option<Receiver<()>>>,
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
        let (holding, gone) = channel();
        let info = inner.info();
        let sides = Arc::new(Sides {
            inner,
            accelerator,
            device: device.clone(),
            pool: Pool::default(),
            to_host,
            _gone: holding,
        });
        let (landed, incoming) = channel();
        let writer = sides.clone();
        spawn("ox-stage-in", move || writer.copy_in(&incoming, &*from_host))?;
        Ok(Self {
            lifecycle: Lifecycle::new(info.backend, info.name),
            sides,
            capabilities,
            timeout,
            landed,
            gone: Mutex::new(Some(gone)),
        })
    }

    /// The engine of a configuration of the inner group that is there.
    fn start(&self, c: &Configuration) -> Result<Arc<Engine>> {
        let driver = StagedDriver::new(self.sides.clone(), Place::of(c), self.landed.clone());
        Engine::start("ox-stage-out", Place::of(c), RULES, driver)
    }

    /// The work of `op`. A call that `blocks` may wait for its inputs on this thread.
    fn begin(&self, op: Checked, options: SubmitOptions, blocks: bool) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let mut ready = None;
        let engine = self.admit(&op).and_then(|engine| {
            ready = options.stream.map(|s| s.record()).transpose()?;
            Ok(engine)
        });
        let engine = match engine {
            Ok(engine) => engine,
            Err(error) => {
                let error = error.with_op(op.kind().name());
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        let label = Label::of(&op);
        let call = Call {
            op,
            contribute: options.contribute,
            ready,
            is_mark: false,
        };
        match blocks {
            true => engine.submit_here(call, label, deadline),
            false => engine.submit(call, label, deadline),
        }
    }

    /// The engine that takes `op`, or why there is none.
    fn admit(&self, op: &Collective) -> Result<Arc<Engine>> {
        if let Some(tensor) = op.tensors().iter().find(|t| *t.device() != self.sides.device) {
            let text = format!(
                "a tensor is on {}; this group works on {}",
                tensor.device(),
                self.sides.device
            );
            return Err(Error::invalid(text));
        }
        let engine = self.lifecycle.engine()?;
        // The engine was not told if nothing was pending.
        if let Some(error) = engine.driver().inner().error() {
            engine.fail(error);
        }
        Ok(engine)
    }
}

/// The key of the note about `Work::wait_on`.
const WAIT_ON: &str = "wait_on";
#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for Staged {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            dropped_options: self.sides.inner.info().dropped_options,
            ..self.lifecycle.info(self.sides.device.clone())
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| {
            self.sides.inner.configure(c.clone())?;
            self.start(c)
        })
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.begin(op, options, false)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.begin(op, options, true)?.finish()
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Tensor::try_zeros(dtype, &[count])
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| e.with_op("split");
        let (engine, parent) = self.lifecycle.configured().map_err(named)?;
        // In order with what was submitted before: on another rank it may be under way already.
        let mark = Call {
            op: Collective::Barrier,
            contribute: false,
            ready: None,
            is_mark: true,
        };
        let label = Label::of(&mark.op);
        let mark = engine.submit(mark, label, deadline);
        mark.map_err(Error::from)
            .and_then(|handed_over| handed_over.wait_done())
            .map_err(named)?;
        let Some(child) = self.sides.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        let info = child.info();
        let child = Self::new(Arc::from(child), &self.sides.device, self.timeout)?;
        let configuration = Configuration {
            name: info.name.to_string(),
            epoch: info.epoch,
            rank: info.rank,
            world_size: info.world_size,
            deadline,
            ..parent
        };
        // It is connected.
        child.lifecycle.configure(configuration, |c| child.start(c))?;
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.lifecycle.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.lifecycle.error().or_else(|| self.sides.inner.error())
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        let drained = self.lifecycle.shutdown(deadline);
        drained.and(self.sides.inner.shutdown(deadline))
    }

    fn traffic(&self) -> Traffic {
        self.sides.inner.traffic()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // A thread may be the last to let go of the inner group, which has its leave to send.
        let gone = self.gone.get_mut().unwrap_or_else(PoisonError::into_inner);
        gone.take().into_iter().for_each(leave_at_exit);
    }
}
