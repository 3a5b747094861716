//! The process group: what it offers, how it connects, and what it adds to a call.

use std::sync::Arc;

use crate::driver::{Call, HcclDriver};
use crate::ftcore::engine::{Backend, Counters, Engine, Group, OnCallers};
use crate::ftcore::peers::Door;
use crate::ftcore::{
    Capabilities, Collective, Configuration, Credentials, DType, DTypeSet, Device, FeatureSet, GroupOptions,
    OpKind, OpSet, ReduceOp, Rejected, Result, SubmitOptions, Traffic, names, notes, wrong_device,
};
use crate::raw::memory::DEVICE;

/// The element types that HCCL documents.
const DTYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U32];

/// What is acted on; the variables it reads by itself.
const HONOURED: [&str; 5] = [
    "hint:credentials",
    "hint:encrypt",
    "variable:PATH",
    "variable:MODULE_ID",
    "variable:HOST",
];

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
        options: names(&HONOURED),
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
                "matched by order per pair of ranks; tags are carried, not matched; a stream per peer and direction, of which a \
                 Gaudi may have few",
            ),
            (
                "abort",
                "ends the work of all ranks at once; the device may keep the memory",
            ),
            ("device", "one Gaudi per process; ranks are processes"),
        ]),
    }
}

/// A group of ranks on Gaudis, over HCCL.
///
/// Made unconfigured; [`configure`](ProcessGroup::configure) makes a communicator. Beyond the common contract:
/// - a failure (a deadline, an error of the library, `abort`, the end of a rank) ends all pending work of all ranks at once; the communicator
///   is aborted on a thread of its own, and what the device may still touch is leaked (INV-8);
/// - `configure` after a failure works only if the library has given the old communicator back by the deadline, and says
///   so otherwise; nothing promises that it will, so the group is best run isolated;
/// - a group of one rank has no communicator at all.
pub type HcclGroup = Group<HcclBackend>;

/// What is HCCL's own in its groups.
pub struct HcclBackend {
    capabilities: Capabilities,
    /// What ranks prove to each other on the control connections.
    credentials: Option<Arc<Credentials>>,
    door: Door,
    counters: Arc<Counters>,
}

impl Backend for HcclBackend {
    type Driver = HcclDriver;
    const NAME: &'static str = "hccl";
    // Any call into the library may block.
    const ON_CALLERS: OnCallers = OnCallers::Never;

    fn new(_: &Device, options: &GroupOptions) -> Result<Self> {
        let options = options.clone().resolved(Self::NAME, &HONOURED)?.options;
        Ok(Self {
            capabilities: capabilities(),
            credentials: options.credentials()?,
            door: Door::of(Self::NAME),
            counters: Arc::default(),
        })
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn device(&self) -> Device {
        DEVICE
    }

    fn connect(&self, configuration: &Configuration) -> Result<Arc<Engine<HcclDriver>>> {
        HcclDriver::connect(
            configuration,
            self.credentials.as_ref(),
            self.door.clone(),
            self.counters.clone(),
        )
    }

    /// The stream's present end is marked here and now, on the caller's thread.
    fn job(&self, op: Collective, options: &SubmitOptions) -> Result<Call, Box<Rejected>> {
        let elsewhere = op.tensors().into_iter().find(|t| *t.device() != DEVICE);
        let ready = match elsewhere {
            Some(tensor) => Err(wrong_device(tensor, "hpu:0, this process's one Gaudi")),
            None => options.stream.as_ref().map(|s| s.record()).transpose(),
        };
        match ready {
            Ok(after) => Ok(Call { op, after }),
            Err(error) => Err(Box::new(Rejected { error, op })),
        }
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}
