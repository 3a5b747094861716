//! The process group: how it connects, and its calls to the engine of the current configuration.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ftcore::lifecycle::{self, Lifecycle, Split};
use ftcore::{
    Capabilities, Checked, Configuration, Device, DeviceKind, Error, ErrorKind, GroupInfo, GroupOptions,
    ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, deadline_in,
};

use crate::bounded::bounded;
use crate::capability::capabilities;
use crate::control;
use crate::cuda::gpu::Gpu;
use crate::engine::{Counters, Engine, Ingredients, Place};
use crate::options::Settings;
use crate::raw::{Comm, Nccl, Part, nccl};
use crate::threads;

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
        let version = nccl()?.version();
        let settings = Settings::new(options, version)?;
        let gpu = Gpu::open(device.index)?;
        let _inside = gpu.enter()?;
        gpu.prepare()?;
        let capabilities = capabilities(version, gpu.native_fp8(), settings.count_contributors);
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
        // What was put off because no thread started then.
        threads::catch_up();
        let nccl = nccl()?;
        let _inside = self.gpu.enter()?;
        let id = match &origin {
            Origin::Id if c.rank == 0 => {
                let id = self.unique_id(nccl, c);
                Some(id.inspect_err(|e| control::refuse(c, e))?)
            }
            _ => None,
        };
        let (constants, cancel) = (self.settings.constants(), self.lifecycle.cancelled());
        let credentials = self.settings.credentials.as_ref();
        let mut meeting = match control::meet(c, constants, credentials, id, cancel) {
            Ok(meeting) => meeting,
            Err(error) => {
                if let Origin::Parent(comm) = origin {
                    comm.give_up();
                }
                return Err(error);
            }
        };
        let comm = match (origin, meeting.id) {
            (Origin::Parent(comm), _) => Ok(*comm),
            (Origin::Id, Some(id)) => self.initialise(nccl, c, id, &meeting.watch()),
            (Origin::Id, None) => Err(Error::new(ErrorKind::Protocol, "rank 0 gave no unique id")),
        };
        let settled = comm.and_then(|comm| match self.settle(&comm, c, &meeting.watch()) {
            Ok(()) => Ok(Arc::new(comm)),
            Err(error) => {
                comm.give_up();
                Err(error)
            }
        });
        let comm = settled.inspect_err(|error| meeting.fail(c.rank, error))?;
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

    fn cancelled(&self) -> Option<Error> {
        let cancelled = self.lifecycle.cancelled().load(Ordering::Acquire);
        cancelled.then(|| Error::new(ErrorKind::Aborted, "aborted while it was being configured"))
    }

    /// What rank 0 gives out. The library opens its sockets for it, which may take long.
    fn unique_id(&self, nccl: &'static Nccl, c: &Configuration) -> Result<nccl_sys::UniqueId> {
        let (stop, late) = (
            || self.cancelled(),
            || Error::timeout("NCCL made no unique id by the deadline (phase: unique id)"),
        );
        bounded("ox-nccl-id", c.deadline, &stop, &late, || nccl.unique_id(), drop)?
    }

    /// Joins NCCL's communicator on a thread that can be given up: even a non-blocking library may block in its first call. `elsewhere`: why
    /// another rank's part of it has failed.
    fn initialise(
        &self,
        nccl: &'static Nccl,
        c: &Configuration,
        id: nccl_sys::UniqueId,
        elsewhere: &dyn Fn() -> Option<Error>,
    ) -> Result<Comm> {
        let (rank, world, wish) = (c.rank, c.world_size, self.settings.wish(&c.name));
        let gpu = self.gpu.clone();
        let join = move || {
            gpu.enter()
                .and_then(|_inside| Comm::init(nccl, id, rank, world, &wish))
        };
        let unclaimed = |comm: Result<Comm>| comm.iter().for_each(Comm::abort);
        let stop = || self.cancelled().or_else(elsewhere);
        let late = || self.too_late(c);
        bounded("ox-nccl-init", c.deadline, &stop, &late, join, unclaimed)?
    }

    fn too_late(&self, c: &Configuration) -> Error {
        Error::timeout(format!(
            "NCCL did not connect rank {} of {} by the deadline (phase: communicator)",
            c.rank, c.world_size
        ))
    }

    fn settle(&self, comm: &Comm, c: &Configuration, elsewhere: &dyn Fn() -> Option<Error>) -> Result<()> {
        let stop = || self.cancelled().or_else(elsewhere);
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
        let part = Part::new(color, key).map_err(named)?;
        let split = Split::agree(self, parent, color, key, deadline)?;
        // Before the collective call, after which nothing of this rank's own may fail.
        let child = Self::new("split", &self.device, self.settings.options.clone())?;
        let comm = engine.split(part, wish, deadline).map_err(named)?;
        let (Some(configuration), Some(comm)) = (split.child(deadline), comm) else {
            return Ok(None);
        };
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
