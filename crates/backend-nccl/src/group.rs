//! The process group: how it connects, and its calls to the engine of the current configuration.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ftcore::lifecycle::{self, Lifecycle, Split};
use ftcore::{
    Capabilities, Checked, Configuration, Device, DeviceKind, Error, ErrorKind, GroupInfo, GroupOptions,
    ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, deadline_in, time_left,
};

use crate::capability::capabilities;
use crate::control;
use crate::cuda::gpu::Gpu;
use crate::engine::{Counters, Engine, Ingredients, Place};
use crate::options::Settings;
use crate::raw::{Comm, Nccl, nccl};

/// A group of ranks on CUDA devices, one device per rank, over NCCL.
///
/// Made unconfigured; [`configure`](ProcessGroup::configure) connects it. May be used from any thread, whatever device is current there.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - `submit` enqueues and returns; the host waits for nothing but NCCL's own set-up of the first calls. `Work::wait_on` orders a
///   stream after the operation without the host;
/// - messages run in lanes of their own, so that they neither wait for collectives nor hold them up; tags are not matched;
/// - the communicator is aborted on a thread that is given up if NCCL does not return; memory that the device may still touch is then
///   leaked and counted (`ftcore::leaked_bytes`), never freed;
/// - ranks as threads of one process share memory through NCCL: abort all of them together.
pub struct NcclGroup {
    device: Device,
    settings: Settings,
    capabilities: Capabilities,
    gpu: Arc<Gpu>,
    counters: Arc<Counters>,
    lifecycle: Lifecycle<Engine>,
}

/// Where the communicator comes from.
enum Origin {
    /// A new one, by an id that rank 0 gives out.
    Id,
    /// Split off a parent.
    Parent(Box<Comm>),
}

impl NcclGroup {
    /// A new, unconfigured group on `device`. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `Unsupported` (no library, no driver, no such device), `InvalidArgument` (an option that is not honoured).
    pub fn new(name: impl Into<String>, device: &Device, options: GroupOptions) -> Result<Self> {
        if device.kind != DeviceKind::Cuda {
            return Err(Error::invalid(format!("nccl serves cuda, not {device}")));
        }
        let nccl = nccl()?;
        let settings = Settings::new(options, nccl.version())?;
        let gpu = Gpu::open(device.index)?;
        gpu.enter()?;
        gpu.prepare()?;
        let capabilities = capabilities(nccl.version(), gpu.reduces_fp8(), settings.count_contributors);
        Ok(Self {
            device: device.clone(),
            settings,
            capabilities,
            gpu,
            counters: Arc::default(),
            lifecycle: Lifecycle::new(name),
        })
    }

    /// Makes the engine of a new configuration.
    fn connect(&self, c: &Configuration, origin: Origin) -> Result<Arc<Engine>> {
        let nccl = nccl()?;
        self.gpu.enter()?;
        let id = match &origin {
            Origin::Id if c.rank == 0 => Some(nccl.unique_id()?),
            _ => None,
        };
        let meeting = control::meet(c, self.settings.constants(), id, self.lifecycle.cancelled());
        let comm = match (origin, meeting.as_ref().ok().and_then(|m| m.id)) {
            (Origin::Parent(comm), _) => Ok(*comm),
            (Origin::Id, Some(id)) if meeting.is_ok() => self.initialise(nccl, c, id),
            _ => Err(Error::new(ErrorKind::Protocol, "rank 0 gave no unique id")),
        };
        let (meeting, comm) = match (meeting, comm) {
            (Ok(meeting), Ok(comm)) => (meeting, comm),
            (Err(error), comm) => {
                comm.into_iter().for_each(give_up);
                return Err(error);
            }
            (Ok(_), Err(error)) => return Err(error),
        };
        let settled = self.settle(&comm, c);
        if let Err(error) = settled {
            give_up(comm);
            return Err(error);
        }
        Engine::start(Ingredients {
            place: Place {
                rank: c.rank,
                world: c.world_size,
                epoch: c.epoch.0,
            },
            gpu: self.gpu.clone(),
            comm,
            settings: self.settings.clone(),
            configuration: c.clone(),
            counters: self.counters.clone(),
            streams: meeting.streams,
        })
    }

    /// Joins NCCL's communicator on a thread that can be given up: even a non-blocking library may block in its first call.
    fn initialise(&self, nccl: &'static Nccl, c: &Configuration, id: nccl_sys::UniqueId) -> Result<Comm> {
        let (sender, receiver) = channel();
        let (rank, world, wish) = (c.rank, c.world_size, self.settings.wish(&c.name));
        let gpu = self.gpu.clone();
        std::thread::Builder::new()
            .name("ox-nccl-init".to_string())
            .spawn(move || {
                let comm = gpu
                    .enter()
                    .and_then(|()| Comm::init(nccl, id, rank, world, &wish));
                if let Err(returned) = sender.send(comm) {
                    // Nobody waits any more.
                    returned.0.iter().for_each(Comm::abort);
                }
            })
            .map_err(|e| Error::io("starting a thread", e))?;
        loop {
            match receiver.recv_timeout(Duration::from_millis(20).min(time_left(c.deadline))) {
                Ok(comm) => return comm,
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        "the thread that joins the communicator ended",
                    ));
                }
                Err(_) if self.lifecycle.cancelled().load(Ordering::Acquire) => {
                    return Err(Error::new(
                        ErrorKind::Aborted,
                        "aborted while it was being configured",
                    ));
                }
                Err(_) if time_left(c.deadline).is_zero() => return Err(self.too_late(c)),
                Err(_) => {}
            }
        }
    }

    fn too_late(&self, c: &Configuration) -> Error {
        Error::timeout(format!(
            "NCCL did not connect rank {} of {} by the deadline (phase: communicator)",
            c.rank, c.world_size
        ))
    }

    fn settle(&self, comm: &Comm, c: &Configuration) -> Result<()> {
        let stop = || {
            self.lifecycle
                .cancelled()
                .load(Ordering::Acquire)
                .then(|| Error::new(ErrorKind::Aborted, "aborted while it was being configured"))
        };
        match comm.settle(c.deadline, &stop) {
            Err(e) if e.kind() == ErrorKind::Timeout => return Err(self.too_late(c)),
            other => other?,
        }
        let count = comm.count()?;
        if count != c.world_size {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!("NCCL sees {count} ranks, the configuration {}", c.world_size),
            ));
        }
        Ok(())
    }
}

/// Ends a communicator on a thread of its own.
fn give_up(comm: Comm) {
    let started = std::thread::Builder::new()
        .name("ox-nccl-abort".to_string())
        .spawn(move || comm.abort());
    if let Err(error) = started {
        tracing::warn!(%error, "a communicator was left behind");
    }
}

impl lifecycle::Engine for Engine {
    fn abort(self: &Arc<Self>, reason: &str) {
        Self::abort(self, reason);
    }
    fn leave(self: &Arc<Self>, reason: &str) {
        Self::leave(self, reason);
    }
    fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        Self::wait_ended(self, deadline)
    }
    fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        Self::drain(self, deadline)
    }
    fn error(&self) -> Option<Error> {
        Self::failure(self)
    }
}

impl ProcessGroup for NcclGroup {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info("nccl", self.device.clone())
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle
            .configure(configuration, |c| self.connect(c, Origin::Id))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let engine = match self.lifecycle.engine() {
            Ok(engine) => engine,
            Err(error) => {
                let error = error.with_op(op.kind().name());
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.settings.timeout));
        engine.submit(op, &options, deadline)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| {
            if e.context().op.is_some() {
                e
            } else {
                e.with_op("split")
            }
        };
        let (engine, parent) = self.lifecycle.configured().map_err(named)?;
        let wish = self
            .settings
            .wish(&format!("{}/{}", parent.name, color.unwrap_or(0)));
        let split = Split::agree(self, parent, color, key, deadline)?;
        self.gpu.enter()?;
        let comm = engine.split(color, key, &wish, deadline).map_err(named)?;
        let (Some(configuration), Some(comm)) = (split.child(deadline), comm) else {
            return Ok(None);
        };
        let child = Self::new(
            configuration.name.clone(),
            &self.device,
            self.settings.options.clone(),
        )?;
        let origin = Origin::Parent(Box::new(comm));
        child
            .lifecycle
            .configure(configuration, |c| child.connect(c, origin))?;
        Ok(Some(Box::new(child)))
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
        self.counters.traffic()
    }
}
