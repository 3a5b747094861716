//! The process group: its lifecycle (configure, abort, shut down, drop) around one engine per configuration.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::{Engine, Place};
use crate::ftcore::{
    Capabilities, Checked, Collective, Configuration, DType, DTypeSet, Epoch, Error, ErrorKind, FeatureSet,
    GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup, ReduceOp, Rejected, Result, SubmitOptions, Traffic,
    Work, deadline_in, names, notes, wrong_device,
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
    state: Mutex<State>,
    /// Raised by `abort` while `configure` runs.
    cancel: AtomicBool,
}

struct State {
    name: String,
    engine: Option<Arc<Engine>>,
    last_epoch: Option<Epoch>,
    /// Why the last `configure` failed.
    failure: Option<Error>,
    configuring: bool,
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
            state: Mutex::new(State {
                name: name.into(),
                engine: None,
                last_epoch: None,
                failure: None,
                configuring: false,
            }),
            cancel: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the old engine and makes the new one. Runs outside the lock, so that abort and submit stay responsive.
    fn connect(&self, configuration: &Configuration, old: Option<Arc<Engine>>) -> Result<Arc<Engine>> {
        if let Some(old) = old {
            old.leave(&format!("configured again at epoch {}", configuration.epoch));
            old.wait_ended(configuration.deadline)?;
        }
        let (runtime, comm) = rendezvous::connect(configuration, &self.cancel)?;
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

impl ProcessGroup for HcclGroup {
    fn info(&self) -> GroupInfo {
        let state = self.lock();
        let place = state.engine.as_ref().map(|e| e.place);
        GroupInfo {
            backend: "hccl".to_string(),
            name: state.name.clone(),
            rank: place.map_or(0, |p| p.rank),
            world_size: place.map_or(0, |p| p.world),
            epoch: place.map_or(Epoch(0), |p| Epoch(p.epoch)),
            device: DEVICE,
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        let named = |e: Error| {
            e.with_op("configure")
                .with_rank(configuration.rank)
                .with_epoch(configuration.epoch.0)
        };
        if configuration.world_size == 0 || configuration.rank >= configuration.world_size {
            return Err(named(Error::invalid(format!(
                "rank {} does not exist in a world of {}",
                configuration.rank, configuration.world_size
            ))));
        }
        let old = {
            let mut state = self.lock();
            if state.configuring {
                return Err(named(Error::new(
                    ErrorKind::InvalidState,
                    "another thread is configuring this group right now",
                )));
            }
            if let Some(last) = state.last_epoch.filter(|&last| configuration.epoch <= last) {
                return Err(named(Error::invalid(format!(
                    "epoch {} is not larger than {last}, which this group had already",
                    configuration.epoch
                ))));
            }
            state.configuring = true;
            state.last_epoch = Some(configuration.epoch);
            state.name.clone_from(&configuration.name);
            state.failure = None;
            self.cancel.store(false, Ordering::Release);
            state.engine.take()
        };
        let connected = self.connect(&configuration, old);
        let mut state = self.lock();
        state.configuring = false;
        match connected {
            Ok(engine) => {
                if self.cancel.load(Ordering::Acquire) {
                    engine.abort("aborted while it was being configured");
                }
                state.engine = Some(engine);
                Ok(())
            }
            Err(error) => {
                let error = named(error);
                state.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let engine = {
            let state = self.lock();
            state.engine.clone().ok_or_else(|| match &state.failure {
                Some(failure) => Error::new(
                    ErrorKind::InvalidState,
                    format!("the group is not configured; the last attempt failed: {failure}"),
                )
                .with_source(failure.clone()),
                None => Error::new(ErrorKind::InvalidState, "the group is not configured"),
            })
        };
        // The stream's present end is marked here and now, on the caller's thread.
        let ready = engine.and_then(|engine| {
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
        let state = self.lock();
        if state.configuring {
            self.cancel.store(true, Ordering::Release);
        }
        if let Some(engine) = &state.engine {
            engine.abort(reason);
        }
    }

    fn error(&self) -> Option<Error> {
        let state = self.lock();
        match &state.engine {
            Some(engine) => engine.error(),
            None => state.failure.clone(),
        }
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        let engine = self.lock().engine.clone();
        engine.map_or(Ok(()), |engine| engine.drain(deadline))
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}

impl Drop for HcclGroup {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = state.engine.take() {
            engine.leave("the group was dropped");
        }
    }
}
