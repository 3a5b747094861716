//! The process group: what it offers, how it connects, how it is divided.

use std::sync::Arc;
use std::time::Instant;

use ftcore::engine::{Backend, Counters, Engine, Group, OnCallers};
use ftcore::lifecycle::Split;
use ftcore::{
    Capabilities, Collective, Configuration, Device, DeviceKind, Error, ErrorKind, Event, GroupOptions,
    ProcessGroup, ReduceOp, Rejected, Result, SubmitOptions, Traffic, bounded, peers, wrong_device,
};
use nccl_sys::UniqueId;

use crate::capability::capabilities;
use crate::cuda::event::CudaEvent;
use crate::cuda::gpu::Gpu;
use crate::driver::{self, Call, Ingredients, NcclDriver};
use crate::options::Settings;
use crate::raw::{Comm, Nccl, Part, factor_in, give_up, id_of, nccl};
use crate::split::split;
use crate::threads;

/// A group of ranks on CUDA devices, one device per rank, over NCCL.
///
/// Made unconfigured; [`configure`](ProcessGroup::configure) connects it. May be used from any thread, whatever device is current there.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - `submit` enqueues and returns; the host waits for nothing but NCCL's own set-up of the first calls. `Work::wait_on` orders a
///   stream after the operation without the host;
/// - messages run in channels of their own, so that they neither wait for collectives nor hold them up; tags are not matched;
/// - the communicator is aborted on a thread that is given up if NCCL does not return; memory that the device may still touch then
///   counts as leaked (`ftcore::leaked_bytes`), and is freed only if it is proven to be free later;
/// - ranks as threads of one process share memory through NCCL: abort all of them together.
pub type NcclGroup = Group<NcclBackend>;

/// What is NCCL's own in its groups.
pub struct NcclBackend {
    device: Device,
    settings: Settings,
    capabilities: Capabilities,
    gpu: Arc<Gpu>,
    counters: Arc<Counters>,
}

/// Where the communicator comes from.
enum Origin {
    /// A new one, by an id that rank 0 gives out.
    Id,
    /// Split off a parent.
    Parent(Unclaimed),
}

/// A communicator that no engine has yet. Given up if none is made of it, whichever step of a `configure` that prevents.
struct Unclaimed(Option<Box<Comm>>);

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(comm) = self.0.take() {
            comm.give_up();
        }
    }
}

impl NcclBackend {
    /// Makes the engine of a new configuration.
    fn connect_over(&self, c: &Configuration, origin: Origin) -> Result<Arc<Engine<NcclDriver>>> {
        // What was put off because no thread started then.
        threads::catch_up();
        let nccl = nccl()?;
        let _inside = self.gpu.enter()?;
        let meeting = peers::meet(c, &self.settings.terms())?;
        let comm = match origin {
            Origin::Parent(mut child) => {
                let gone = || Error::new(ErrorKind::Internal, "the child's communicator is taken");
                child.0.take().map(|comm| *comm).ok_or_else(gone)
            }
            Origin::Id => {
                let id = meeting.id(c, || unique_id(nccl, c, &meeting.watch()));
                id.and_then(|id| self.initialise(nccl, c, id_of(&id, 0)?, &meeting.watch()))
            }
        };
        let settled = comm.and_then(|comm| match settle(&comm, c, &meeting.watch()) {
            Ok(()) => Ok(Arc::new(comm)),
            Err(error) => {
                comm.give_up();
                Err(error)
            }
        });
        let comm = settled.inspect_err(|error| meeting.fail(error))?;
        let started = driver::start(Ingredients {
            configuration: c.clone(),
            gpu: self.gpu.clone(),
            comm: comm.clone(),
            settings: self.settings.clone(),
            counters: self.counters.clone(),
            meeting,
        });
        started.inspect_err(|_| give_up(comm))
    }

    /// Joins NCCL's communicator on a thread that can be given up: even a non-blocking library may block in its first call. `elsewhere`: why
    /// another rank's part of it has failed.
    fn initialise(
        &self,
        nccl: &'static Nccl,
        c: &Configuration,
        id: UniqueId,
        elsewhere: &dyn Fn() -> Option<Error>,
    ) -> Result<Comm> {
        let (rank, world, wish) = (c.rank, c.world_size, self.settings.wish(&c.name));
        let gpu = self.gpu.clone();
        let join = move || {
            gpu.enter()
                .and_then(|_inside| Comm::init(nccl, &gpu, id, rank, world, &wish))
        };
        let unclaimed = |comm: Result<Comm>| comm.iter().for_each(Comm::abort);
        let stop = || c.cancel.reason().or_else(elsewhere);
        let late = || too_late(c);
        bounded("ox-nccl-init", c.deadline, &stop, &late, join, unclaimed)?
    }
}

/// What rank 0 gives out. The library opens its sockets for it, which may take long, and a thread of it waits there until all ranks have come.
fn unique_id(
    nccl: &'static Nccl,
    c: &Configuration,
    elsewhere: &dyn Fn() -> Option<Error>,
) -> Result<Vec<u8>> {
    let late = || Error::timeout("NCCL made no unique id by the deadline (phase: unique id)");
    let stop = || c.cancel.reason().or_else(elsewhere);
    let id = bounded("ox-nccl-id", c.deadline, &stop, &late, || nccl.unique_id(), drop)??;
    Ok(id.0.to_vec())
}

fn too_late(c: &Configuration) -> Error {
    Error::timeout(format!(
        "NCCL did not connect rank {} of {} by the deadline (phase: communicator)",
        c.rank, c.world_size
    ))
}

/// Waits until the communicator stands, with as many ranks as the configuration.
fn settle(comm: &Comm, c: &Configuration, elsewhere: &dyn Fn() -> Option<Error>) -> Result<()> {
    let stop = || c.cancel.reason().or_else(elsewhere);
    match comm.settle(c.deadline, &stop) {
        Err(e) if e.kind() == ErrorKind::Timeout => return Err(too_late(c)),
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

/// `InvalidArgument` for a factor that is another one in the type of the elements: NCCL takes it in that type, and would scale by infinity or
/// by zero.
fn factor_fits(op: &Collective) -> Result<()> {
    let (Collective::AllReduce { op: reduction, .. }
    | Collective::Reduce { op: reduction, .. }
    | Collective::ReduceScatter { op: reduction, .. }
    | Collective::ReduceScatterInto { op: reduction, .. }
    | Collective::ReduceScatterInPlace { op: reduction, .. }) = op
    else {
        return Ok(());
    };
    let (ReduceOp::PremulSum(factor), Some(dtype)) = (*reduction, op.dtype()) else {
        return Ok(());
    };
    let held = factor_in(factor, dtype);
    if held.is_infinite() == factor.is_infinite() && (held == 0.0) == (factor == 0.0) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "premul_sum by {factor} of {dtype}: that type cannot hold the factor, which would be {held}"
    )))
}

/// The event after which the inputs may be read; `None` if they are ready.
fn ready(options: &SubmitOptions) -> Result<Option<Arc<dyn Event>>> {
    let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) else {
        return Ok(None);
    };
    let event = stream.record()?;
    if event.as_any().is::<CudaEvent>() {
        return Ok(Some(event));
    }
    Err(Error::unsupported(format!(
        "NCCL cannot order itself after a stream on {}",
        stream.device()
    )))
}

impl Backend for NcclBackend {
    type Driver = NcclDriver;
    const NAME: &'static str = "nccl";
    const ON_CALLERS: OnCallers = OnCallers::Any;

    /// Errors: `Unsupported` (no library, no driver, no such device), `InvalidArgument` (an option that is not honoured).
    fn new(device: &Device, options: &GroupOptions) -> Result<Self> {
        if device.kind != DeviceKind::Cuda {
            return Err(Error::invalid(format!("nccl serves cuda, not {device}")));
        }
        let version = nccl()?.version();
        let settings = Settings::new(options.clone(), version)?;
        let gpu = Gpu::open(device.index)?;
        let _inside = gpu.enter()?;
        gpu.prepare()?;
        let capabilities = capabilities(gpu.native_fp8(), settings.count_contributors, settings.detects);
        Ok(Self {
            device: device.clone(),
            settings,
            capabilities,
            gpu,
            counters: Arc::default(),
        })
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn connect(&self, c: &Configuration) -> Result<Arc<Engine<NcclDriver>>> {
        self.connect_over(c, Origin::Id)
    }

    fn split(
        group: &NcclGroup,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let settings = &group.backend().settings;
        let (engine, parent) = group.lifecycle().configured()?;
        let wish = settings.wish(&format!("{}/{}", parent.name, color.unwrap_or(0)));
        let part = Part::new(color, key)?;
        let agreed = Split::agree(group, parent, color, key, deadline)?;
        // Before the collective call, after which nothing of this rank's own may fail.
        let child = NcclGroup::new("split", &group.backend().device, &settings.options)?;
        let comm = split(&engine, part, wish, deadline)?;
        let (Some(configuration), Some(comm)) = (agreed.child(deadline), comm) else {
            return Ok(None);
        };
        let origin = Origin::Parent(Unclaimed(Some(Box::new(comm))));
        let lifecycle = child.lifecycle();
        lifecycle.configure(configuration, |c| child.backend().connect_over(c, origin))?;
        Ok(Some(Box::new(child)))
    }

    /// The stream's present end is marked here and now, on the caller's thread.
    fn job(&self, op: Collective, options: &SubmitOptions) -> Result<Call, Box<Rejected>> {
        let elsewhere = op.tensors().into_iter().find(|t| *t.device() != self.device);
        let after = match elsewhere {
            Some(tensor) => Err(wrong_device(tensor, &self.device.to_string())),
            None => factor_fits(&op).and_then(|()| ready(options)),
        };
        let contribute = options.contribute;
        match after {
            Ok(after) => Ok(Call {
                op,
                contribute,
                after,
            }),
            Err(error) => Err(Box::new(Rejected { error, op })),
        }
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}
