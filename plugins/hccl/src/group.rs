//! The process group: what it offers, how it connects, and its calls to the engine of the current configuration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::{Engine, Place};
use crate::ftcore::lifecycle::{self, Lifecycle};
use crate::ftcore::{
    Capabilities, Checked, Collective, Configuration, DType, DTypeSet, Error, FeatureSet, GroupInfo,
    GroupOptions, OpKind, OpSet, ProcessGroup, ReduceOp, Rejected, Result, SubmitOptions, Traffic, Work,
    deadline_in, names, notes, wrong_device,
};
use crate::issue::{Counters, Issuer};
use crate::raw::memory::DEVICE;
use crate::rendezvous;
use crate::runtime::libraries;

/// The element types that HCCL documents.
const DTYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U32];

/// What every HCCL group offers, whatever the library's version.
///
/// No feature is advertised. HCCL has no promise that a communicator can be ended while its work hangs and that another can
/// be made afterwards in the same process, so neither `Abort` nor `Reconfigure` is; and what its results look like bit by
/// bit is not documented.
pub(crate) fn capabilities() -> Capabilities {
    let mut reduces = [DTypeSet::NONE; ReduceOp::COUNT];
    for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
        if let Some(set) = reduces.get_mut(usize::from(op.code())) {
            *set = DTypeSet::of(&DTYPES);
        }
    }
    Capabilities {
        ops: OpSet::of(&[
            OpKind::AllReduce,
            OpKind::Broadcast,
            OpKind::Reduce,
            OpKind::AllGather,
            OpKind::AllGatherInto,
            OpKind::Gather,
            OpKind::Scatter,
            OpKind::ReduceScatter,
            OpKind::ReduceScatterInto,
            OpKind::AllToAll,
            OpKind::AllToAllInto,
            OpKind::Send,
            OpKind::Recv,
            OpKind::Barrier,
            OpKind::Batch,
        ]),
        moves: DTypeSet::of(&DTYPES),
        reduces,
        features: FeatureSet::NONE,
        options: Vec::new(),
        devices: names(&["hpu"]),
        notes: notes(&[
            (
                "reductions",
                "sum, min and max; HCCL documents product and average as not supported",
            ),
            (
                "all_gather",
                "composed of grouped sends and receives, as gather, scatter and all_to_all",
            ),
            (
                "all_to_all_into",
                "native without splits, composed with them: pass splits on all ranks or on none",
            ),
            (
                "reduce_scatter",
                "composed of one reduce per part; reduce_scatter_into is native",
            ),
            ("barrier", "an all-reduce of one element"),
            (
                "send, recv",
                "matched by order per pair of ranks; tags are carried, not matched",
            ),
            (
                "abort",
                "ends this rank's work at once; peers are not told, and the device may keep the memory",
            ),
            ("device", "one Gaudi per process; ranks are processes"),
        ]),
    }
}

/// A group of ranks on Gaudis, over HCCL.
///
/// Made unconfigured; [`configure`](ProcessGroup::configure) makes a communicator. Beyond the common contract:
/// - a failure (a deadline, an error of the library, `abort`) ends all pending work of this rank at once; the communicator
///   is aborted on a thread of its own, and what the device may still touch is leaked (INV-8);
/// - `configure` after a failure works only if the library has given the old communicator back by the deadline, and says
///   so otherwise; nothing promises that it will, so the group is best run isolated;
/// - a group of one rank has no communicator at all.
pub struct HcclGroup {
    timeout: Duration,
    capabilities: Capabilities,
    counters: Arc<Counters>,
    lifecycle: Lifecycle<Engine>,
}

impl HcclGroup {
    /// A new, unconfigured group. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `InvalidArgument` names the options that are set, since none is honoured (INV-9).
    pub fn new(name: impl Into<String>, options: &GroupOptions) -> Result<Self> {
        options.require_honoured("hccl", &[])?;
        Ok(Self {
            timeout: options.timeout,
            capabilities: capabilities(),
            counters: Arc::default(),
            lifecycle: Lifecycle::new(name),
        })
    }

    /// Makes the engine of a new configuration.
    fn connect(&self, configuration: &Configuration) -> Result<Arc<Engine>> {
        let (runtime, comm) = rendezvous::connect(configuration, self.lifecycle.cancelled())?;
        let place = Place {
            rank: configuration.rank,
            world: configuration.world_size,
            epoch: configuration.epoch.0,
        };
        let hccl = &libraries()?.hccl;
        let issuer = Issuer::new(runtime, comm, place.rank, place.world, self.counters.clone());
        match issuer {
            Ok(issuer) => Engine::start(place, hccl, comm, issuer),
            Err(e) => {
                if let Some(comm) = comm {
                    let spawned = std::thread::Builder::new()
                        .name("ox-hccl-abort".to_string())
                        .spawn(move || hccl.abort(comm));
                    if let Err(error) = spawned {
                        tracing::warn!(%error, "a communicator is left behind");
                    }
                }
                Err(e)
            }
        }
    }
}

/// Refuses what validation cannot know: a device other than this process's own.
fn on_own_device(op: &Collective) -> Result<()> {
    match op.tensors().into_iter().find(|t| *t.device() != DEVICE) {
        Some(tensor) => Err(wrong_device(tensor, "hpu:0, this process's one Gaudi")),
        None => Ok(()),
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
        Self::error(self)
    }
}

impl ProcessGroup for HcclGroup {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info("hccl", DEVICE)
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        // The stream's present end is marked here and now, on the caller's thread.
        let ready = self.lifecycle.engine().and_then(|engine| {
            on_own_device(&op)?;
            let after = options.stream.as_ref().map(|s| s.record()).transpose()?;
            Ok((engine, after))
        });
        match ready {
            Ok((engine, after)) => {
                let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
                engine.submit(op, after, deadline)
            }
            Err(error) => {
                let error = error.with_op(op.kind().name());
                Err(Box::new(Rejected { error, op }))
            }
        }
    }

    fn split(
        &self,
        _color: Option<u32>,
        _key: u32,
        _deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        Err(
            Error::unsupported("HCCL does not split communicators; make a group of the ranks instead")
                .with_op("split"),
        )
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
