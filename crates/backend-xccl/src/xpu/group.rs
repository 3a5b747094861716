//! The process group on xpu memory: the host path's engine with a device beside it.

use std::sync::Arc;
use std::time::Instant;

use ftcore::lifecycle::{Lifecycle, Split};
use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{
    Capabilities, Checked, Collective, Configuration, Device, DeviceKind, Error, GroupInfo, GroupOptions,
    OpKind, ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, deadline_in, names, wrong_device,
};

use super::comm::Side;
use super::device::Xpu;
use super::probe;
use crate::engine::{Comms, Engine, Parts, Place, on_device, require_unstuck};
use crate::link::Link;
use crate::news::Channel;
use crate::options::Settings;
use crate::traffic::Counters;
use crate::{group, rendezvous};

/// Why there are no messages on SYCL's CPU device.
const NO_MESSAGES: &str = "not offered on SYCL's CPU device, where oneCCL's own calls end the process with SIGSEGV; on a GPU \
                           they are offered (not tried: no GPU was at hand)";

/// A group of ranks over oneCCL, on the memory of one xpu. One rank per process.
///
/// What [`XcclGroup`](crate::XcclGroup) says about deadlines, failures and other ranks holds here, too. Besides:
/// - an operation begins after the present end of the stream that it is submitted with; without one its inputs are ready;
/// - oneCCL's calls block, so a thread of the group makes them. `Work::wait_on` does not block the host for a stream of ours; the next
///   command on that stream does, until the operation is enqueued. For an adopted queue `wait_on` itself waits for that;
/// - what oneCCL lacks and needs a look at values (averages, min and max of floats, bool, 16-bit integers, bits) goes by way of
///   host memory: there is no compiler here to make kernels with.
pub struct XpuGroup {
    xpu: Arc<Xpu>,
    settings: Settings,
    capabilities: Capabilities,
    counters: Arc<Counters>,
    lifecycle: Lifecycle<Engine>,
}

/// What groups on `xpu` memory offer, with messages or without.
fn capabilities(counted: bool, has_messages: bool) -> Capabilities {
    let host = group::capabilities(counted);
    let mut ops = host.ops;
    let mut notes = host.notes;
    let mut say = |operation: &'static str, text: &'static str| {
        notes.retain(|(name, _)| name != operation);
        notes.push((operation.into(), text.into()));
    };
    if !has_messages {
        for kind in [OpKind::Send, OpKind::Recv, OpKind::Batch] {
            ops = ops.without(kind);
        }
        say("send, recv", NO_MESSAGES);
        say("batch", NO_MESSAGES);
    }
    say("avg", "composed: sum on the device, division by way of the host");
    for operation in [
        "premul_sum",
        "min, max of floats",
        "bool",
        "i16, u16",
        "band, bor, bxor",
    ] {
        say(operation, "composed, by way of the host");
    }
    say(
        "gather, scatter",
        "composed: an even exchange of the longest part",
    );
    say(
        "all_to_all",
        "even in place of one tensor; else an even exchange of the longest part",
    );
    say("all_reduce of several", "one call each");
    say("contributors", "an all-reduce of one u32");
    Capabilities {
        ops,
        notes,
        devices: names(&["xpu"]),
        ..host
    }
}

/// Meets the other ranks and starts the communicators of a group on `xpu`.
fn communicators(configuration: &Configuration, xpu: &Arc<Xpu>) -> Result<Comms> {
    let side = Side::new(xpu)?;
    let library = probe::usable(xpu)?;
    rendezvous::connect_with(configuration, library, move |made| on_device(made, &side))
}

/// As [`communicators`], on xpu `index`.
pub(crate) fn connect(configuration: &Configuration, index: u32) -> Result<Comms> {
    communicators(configuration, &Xpu::open(index)?)
}

impl XpuGroup {
    /// A new, unconfigured group on `device`. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `InvalidArgument` names the options that are not honoured (INV-9), or a device of another kind; `Unsupported` says what is
    /// missing.
    pub fn new(name: impl Into<String>, device: &Device, options: GroupOptions) -> Result<Self> {
        if device.kind != DeviceKind::Xpu {
            return Err(Error::invalid(format!("this xccl serves xpu, not {device}")));
        }
        let settings = Settings::new(options)?;
        let xpu = Xpu::open(device.index)?;
        probe::usable(&xpu)?;
        Ok(Self::with(name.into(), xpu, settings))
    }

    fn with(name: String, xpu: Arc<Xpu>, settings: Settings) -> Self {
        Self {
            capabilities: capabilities(settings.counted, !xpu.is_cpu),
            xpu,
            settings,
            counters: Arc::default(),
            lifecycle: Lifecycle::new(name),
        }
    }

    /// Makes the engine of a new configuration.
    fn connect(&self, configuration: &Configuration) -> Result<Arc<Engine>> {
        if configuration.world_size == 1 {
            let comms = Comms {
                collectives: Link::Alone,
                messages: None,
            };
            return self.start(configuration, comms, None);
        }
        require_unstuck()?;
        let comms = communicators(configuration, &self.xpu)?;
        let channel = Some(rendezvous::channel(configuration));
        self.start(configuration, comms, channel)
    }

    fn start(&self, c: &Configuration, comms: Comms, channel: Option<Channel>) -> Result<Arc<Engine>> {
        let place = Place {
            rank: c.rank,
            world: c.world_size,
            epoch: c.epoch.0,
        };
        // The queue of the communicator is the engine's.
        let side = match &comms.collectives {
            Link::Xpu(on_device) => on_device.side.clone(),
            Link::Alone | Link::Comm(_) => Side::new(&self.xpu)?,
        };
        let parts = Parts {
            comms,
            channel,
            counters: self.counters.clone(),
            counted: self.settings.counted,
            tally: None,
            side: Some(side),
        };
        Engine::start(place, parts)
    }
}

impl ProcessGroup for XpuGroup {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info("xccl", self.xpu.device())
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(op.kind().name());
            Err(Box::new(Rejected { error, op }))
        };
        let own = self.xpu.device();
        if let Some(tensor) = op.tensors().into_iter().find(|t| *t.device() != own) {
            let error = wrong_device(tensor, &own.to_string());
            return refuse(error, op);
        }
        let engine = match self.lifecycle.engine() {
            Ok(engine) => engine,
            Err(error) => return refuse(error, op),
        };
        let after = match options.stream.map(|s| s.record()).transpose() {
            Ok(after) => after,
            Err(error) => return refuse(error, op),
        };
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.settings.timeout));
        engine.submit_after(op, options.contribute, deadline, after)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let (engine, parent) = self.lifecycle.configured().map_err(|e| e.with_op("split"))?;
        let alone = parent.world_size == 1;
        let split = Split::agree(self, parent, color, key, deadline)?;
        let child = split.child(deadline);
        let comms = if alone {
            child.is_some().then_some(Comms {
                collectives: Link::Alone,
                messages: None,
            })
        } else {
            // oneCCL reserves some colours for itself: it gets their places in the sorted list.
            let dense = color
                .and_then(|c| split.colors().binary_search(&c).ok())
                .and_then(|c| u32::try_from(c).ok());
            let (rank, world) = child.as_ref().map_or((0, 1), |c| (c.rank, c.world_size));
            engine.split(dense, rank, world, deadline)?
        };
        let (Some(configuration), Some(comms)) = (child, comms) else {
            return Ok(None);
        };
        let child = Self::with(
            configuration.name.clone(),
            self.xpu.clone(),
            self.settings.clone(),
        );
        child.lifecycle.configure(configuration, |c| {
            let channel = (c.world_size > 1).then(|| rendezvous::channel(c));
            child.start(c, comms, channel)
        })?;
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

/// Makes xccl groups on xpu memory for the registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct XcclXpuFactory;

impl BackendFactory for XcclXpuFactory {
    fn probe(&self) -> Result<()> {
        probe::probe()
    }

    /// Of device 0; without one, what a GPU would offer.
    fn capabilities(&self) -> Capabilities {
        capabilities(true, !Xpu::open(0).is_ok_and(|xpu| xpu.is_cpu))
    }

    fn library(&self) -> Option<String> {
        probe::describe()
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        Ok(Box::new(XpuGroup::new("xccl", device, options.clone())?))
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "xccl",
        device: "xpu",
        origin: "backend-xccl",
        version: env!("CARGO_PKG_VERSION"),
        factory: || Arc::new(XcclXpuFactory),
    }
}
