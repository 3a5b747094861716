//! A whole process group on the engine: a backend says what it offers and how it connects, and nothing else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Driver, Engine, Label};
use crate::lifecycle::Lifecycle;
use crate::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, Device, Error, Failed, GroupInfo,
    GroupOptions, ProcessGroup, Rejected, Result, SubmitOptions, Tensor, Traffic, Work, deadline_in,
};

/// On which callers' threads a driver's `enqueue` may run, which saves a hand-over to the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCallers {
    /// On none.
    Never,
    /// On those of blocking calls: `enqueue` may last as long as the operation.
    Blocking,
    /// On any: `enqueue` returns when the operation is on its way.
    Any,
}

/// What is a backend's own in a [`Group`].
pub trait Backend: Sized + Send + Sync + 'static {
    /// How its operations are carried out.
    type Driver: Driver;
    /// Its name.
    const NAME: &'static str;
    /// Where `enqueue` runs.
    const ON_CALLERS: OnCallers;

    /// Of a group on `device`. Errors: options that it does not honour (INV-9), a device that it cannot serve.
    fn new(device: &Device, options: &GroupOptions) -> Result<Self>;

    /// What it offers.
    fn capabilities(&self) -> &Capabilities;

    /// The device that it serves.
    fn device(&self) -> Device {
        Device::CPU
    }

    /// Meets the other ranks and starts the engine of a configuration. Its waits look at the configuration's token; those for keys of its
    /// store do so by themselves.
    fn connect(&self, configuration: &Configuration) -> Result<Arc<Engine<Self::Driver>>>;

    /// Divides `group`, for a backend with [`Feature::Split`](crate::Feature::Split): see [`ProcessGroup::split`].
    fn split(
        group: &Group<Self>,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let _ = (group, color, key, deadline);
        let text = format!(
            "{} does not split its groups; make a group of the ranks instead",
            Self::NAME
        );
        Err(Error::unsupported(text))
    }

    /// What is submitted for `op`, on the caller's thread. Refusals give it back.
    fn job(&self, op: Collective, options: &SubmitOptions) -> Result<JobOf<Self>, Box<Rejected>>;

    /// Bytes moved so far.
    fn traffic(&self) -> Traffic;
}

type JobOf<B> = <<B as Backend>::Driver as Driver>::Job;

/// A process group over the backend `B`.
pub struct Group<B: Backend> {
    backend: B,
    timeout: Duration,
    lifecycle: Lifecycle<Engine<B::Driver>>,
}

impl<B: Backend> Group<B> {
    /// A new, unconfigured group on `device`. `name` is for messages until `configure` gives another.
    ///
    /// Errors: those of [`Backend::new`].
    pub fn new(name: impl Into<String>, device: &Device, options: &GroupOptions) -> Result<Self> {
        Ok(Self {
            backend: B::new(device, options)?,
            timeout: options.timeout,
            lifecycle: Lifecycle::new(B::NAME, name.into()),
        })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Its configurations.
    pub fn lifecycle(&self) -> &Lifecycle<Engine<B::Driver>> {
        &self.lifecycle
    }

    fn begin(&self, op: Checked, options: &SubmitOptions, blocks: bool) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let kind = op.kind().name();
        let named = |rejected: Box<Rejected>| {
            Box::new(Rejected {
                error: rejected.error.with_op(kind),
                op: rejected.op,
            })
        };
        let engine = match self.lifecycle.engine() {
            Ok(engine) => engine,
            Err(error) => return Err(named(Box::new(Rejected { error, op }))),
        };
        let label = Label::of(&op);
        let job = self.backend.job(op, options).map_err(named)?;
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        match B::ON_CALLERS {
            OnCallers::Any => engine.submit_here(job, label, deadline),
            OnCallers::Blocking if blocks => engine.submit_here(job, label, deadline),
            OnCallers::Blocking | OnCallers::Never => engine.submit(job, label, deadline),
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> ProcessGroup for Group<B> {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info(self.backend.device())
    }

    fn capabilities(&self) -> &Capabilities {
        self.backend.capabilities()
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle
            .configure(configuration, |c| self.backend.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.begin(op, &options, false)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.begin(op, &options, true)?.finish()
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
        B::split(self, color, key, deadline).map_err(|error| match error.context().op {
            Some(_) => error,
            None => error.with_op("split"),
        })
    }

    fn abort(&self, reason: &str) {
        self.lifecycle.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.lifecycle.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.lifecycle.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.backend.traffic()
    }
}
