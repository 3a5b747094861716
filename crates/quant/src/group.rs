//! The process group around another one: agreement on the format, then every collective in order through the engine.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::{Label, Place};
use ftcore::lifecycle::{Engine as _, Lifecycle, leave_at_exit};
use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Device, DeviceKind, Error,
    ErrorKind, Failed, Feature, FeatureSet, GroupInfo, OpKind, ProcessGroup, ReduceOp, Rejected, Result,
    SubmitOptions, Tensor, Traffic, Work, deadline_in, wrong_device,
};

use crate::agree::Agreement;
use crate::codec::Rounding;
use crate::codec::rounding::splitmix64;
use crate::driver::{Call, Engine, Layer, QuantDriver, Quantised, RULES};
use crate::kernels::{block_kernels, device_kinds};
use crate::options::{Accuracy, CodecChoice, Moves, QuantizeOptions};
use crate::plan::{FLOATS, Plan, REDUCTIONS, is_reduction, plan, unsupported};
use crate::{Codec, ErrorFeedback};

/// A group whose reductions travel in a [`Codec`].
///
/// - `all_reduce`, `reduce_scatter` and `reduce_scatter_into` of f32, f16 and bf16 with `Sum` and `Avg` are quantised; other reductions are
///   `Unsupported` with the reason. `all_gather`, `all_gather_into` and `broadcast` of those types are quantised with [`Moves::Quantized`]. Everything
///   else is forwarded as it is. What would be quantised needs input and output apart: its forms in place are `Unsupported`.
/// - All ranks of an all-reduce hold bitwise equal results, and the ranks' values are summed in f32 in rank order (INV-3).
/// - Averages divide by the contributors counted in the same exchange (INV-4).
/// - `configure` compares format, accuracy and moves with every other rank's through the store: `Mismatch` on all ranks names both (L12).
/// - A world of one exchanges nothing, so nothing is quantised.
/// - With error feedback there is no `split`: split the group below before it is wrapped, and wrap what comes of it.
/// - Tensors are on the host, or on a device that [`BlockKernels`](crate::BlockKernels) are linked in for. A quantised operation comes after what
///   the stream in [`SubmitOptions`] had before it, and is over on the device when its work ends.
/// - Over a group that moves only a device's memory the encoded bytes stay on the device
///   ([`DeviceBytes`](crate::DeviceBytes)); error feedback and [`Moves::Quantized`] are then `Unsupported`.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use ftcore::{ProcessGroup, ProcessGroupExt as _, ReduceOp, Result};
/// use oxccl_quant::{Codec, QuantizedGroup};
///
/// /// Bitwise the same on all ranks, for a quarter of the bytes.
/// fn mean(group: Arc<dyn ProcessGroup>, gradients: &mut [f32]) -> Result<()> {
///     let group = QuantizedGroup::new(group, Codec::Int8B64, Duration::from_secs(60))?;
///     group.all_reduce_slice(gradients, ReduceOp::Avg)
/// }
/// ```
pub struct QuantizedGroup {
    /// The first field: whatever is pending ends before the group below is let go of.
    lifecycle: Lifecycle<Engine>,
    layer: Arc<Layer>,
    capabilities: Capabilities,
    turn: Mutex<Turn>,
    /// Ends once the group below was let go of.
    gone: Mutex<Option<Receiver<()>>>,
}

/// Which call the next one is.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    round: u64,
    in_round: u64,
}

impl QuantizedGroup {
    /// Wraps `inner`, which must not be used directly any more, with default options but for these. `timeout` is that of calls that name no
    /// deadline.
    ///
    /// Errors: as [`with_options`](Self::with_options).
    pub fn new(
        inner: Arc<dyn ProcessGroup>,
        codec: impl Into<CodecChoice>,
        timeout: Duration,
    ) -> Result<Self> {
        let options = QuantizeOptions {
            codec: codec.into(),
            timeout,
            ..QuantizeOptions::default()
        };
        Self::with_options(inner, options)
    }

    /// Wraps `inner`, which must not be used directly any more.
    ///
    /// Errors: `Unsupported` if `inner` lacks what this needs (u8, all_gather, all_gather_into, all_to_all_into on the host, and broadcast to
    /// quantise moves; or all_gather and all_to_all on a device with kernels); `InvalidArgument` for options that do not go together.
    pub fn with_options(inner: Arc<dyn ProcessGroup>, options: QuantizeOptions) -> Result<Self> {
        let info = inner.info();
        let codec = options.codec.on(&info.device);
        options.check(codec)?;
        let capabilities = inner.capabilities();
        let on_device = !capabilities.serves(&DeviceKind::Cpu);
        let mut needed = match on_device {
            true => vec![OpKind::AllGather, OpKind::AllToAll],
            false => vec![OpKind::AllGather, OpKind::AllGatherInto, OpKind::AllToAllInto],
        };
        if on_device {
            stays_on_device(&info.device, codec, &options)?;
        }
        if options.moves == Moves::Quantized {
            needed.push(OpKind::Broadcast);
        }
        let missing = needed.iter().find(|k| !capabilities.ops.contains(**k));
        let lacks = match missing {
            Some(kind) => Some(kind.name()),
            None if !capabilities.moves.contains(DType::U8) => Some("u8"),
            None => None,
        };
        if let Some(lacks) = lacks {
            return Err(Error::unsupported(format!(
                "quantised collectives need {lacks}, which backend '{}' does not offer",
                info.backend
            )));
        }
        let capabilities = offered(capabilities, codec, &options);
        let (holding, gone) = channel();
        Ok(Self {
            lifecycle: Lifecycle::new(format!("{}+{}", info.backend, codec.name()), info.name),
            capabilities,
            turn: Mutex::default(),
            gone: Mutex::new(Some(gone)),
            layer: Arc::new(Layer {
                inner,
                codec,
                feedback: options.error_feedback.then(Arc::default),
                options,
                non_finite: AtomicU64::new(0),
                _gone: holding,
            }),
        })
    }

    /// The format.
    pub fn codec(&self) -> Codec {
        self.layer.codec
    }

    /// How many values that are not finite this rank has put into quantised operations so far (INV-11).
    pub fn non_finite(&self) -> u64 {
        self.layer.non_finite.load(Ordering::Relaxed)
    }

    /// This rank's residuals, if the options ask for error feedback.
    pub fn error_feedback(&self) -> Option<Arc<ErrorFeedback>> {
        self.layer.feedback.clone()
    }

    /// Names the round that the next calls belong to, for stochastic rounding: the same seed, round, rank and number of the call in
    /// its round draw the same random numbers, so that a step that is done again gives the same bytes. Round 0 begins with every `configure`.
    pub fn start_round(&self, round: u64) {
        *self.turn() = Turn { round, in_round: 0 };
    }

    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rounding of the next call.
    fn next_rounding(&self) -> Rounding {
        let mut turn = self.turn();
        let now = *turn;
        turn.in_round += 1;
        match self.layer.options.rounding {
            Rounding::Nearest => Rounding::Nearest,
            Rounding::Stochastic { key } => Rounding::Stochastic {
                key: splitmix64(splitmix64(key, now.round), now.in_round),
            },
        }
    }

    fn connect(&self, c: &Configuration) -> Result<Arc<Engine>> {
        let phases = match self.layer.options.accuracy {
            Accuracy::Economic => "economic",
            Accuracy::Best => "best",
        };
        let moves = match self.layer.options.moves {
            Moves::Exact => "exact",
            Moves::Quantized => "quantised",
        };
        // The format first: see Agreement.
        let mine = format!("{}, accuracy {phases}, moves {moves}", self.layer.codec);
        let agreement = Agreement::new(c, mine);
        agreement.publish()?;
        let inner = &self.layer.inner;
        inner.configure(c.clone()).map_err(|e| match e.kind() {
            // Another rank may have found out first and left.
            ErrorKind::PeerLost | ErrorKind::Aborted | ErrorKind::Timeout | ErrorKind::Poisoned => {
                agreement.known_mismatch().unwrap_or(e)
            }
            _ => e,
        })?;
        agreement
            .compare_all()
            .inspect_err(|e| inner.abort(&e.to_string()))?;
        self.start(c, Some(agreement))
    }

    fn start(&self, c: &Configuration, agreement: Option<Agreement>) -> Result<Arc<Engine>> {
        *self.turn() = Turn::default();
        let driver = QuantDriver::new(self.layer.clone(), Place::of(c), agreement);
        Engine::start("ox-quant", Place::of(c), RULES, driver)
    }

    /// The work of `op`. A call that `blocks` may be carried out on this thread.
    fn begin(&self, op: Checked, options: SubmitOptions, blocks: bool) -> Result<Work, Box<Rejected>> {
        let kind = op.get().kind();
        let refuse = |error: Error, op: Checked| {
            let error = error.with_op(kind.name());
            let op = op.into_inner();
            Err(Box::new(Rejected { error, op }))
        };
        let engine = match self.lifecycle.engine() {
            Ok(engine) => engine,
            Err(error) => return refuse(error, op),
        };
        let world = engine.place().world;
        let plan = match world {
            1 => None,
            _ => plan(op.get(), world, self.layer.options.moves),
        };
        if let Some(error) = self.refusal(op.get(), plan.as_ref()) {
            return refuse(error, op);
        }
        if kind.is_p2p() || world == 1 {
            return self.layer.inner.submit(op, options);
        }
        // The engine was not told if nothing was pending.
        if let Some(error) = engine.driver().failed_below() {
            engine.fail(error);
        }
        let quantised = match plan {
            Some(plan) if engine.error().is_none() => {
                let slot = match &self.layer.feedback {
                    Some(feedback) if is_reduction(kind) => match feedback.slot(kind, op.get().count()) {
                        Ok(slot) => Some(slot),
                        Err(e) => return refuse(e, op),
                    },
                    _ => None,
                };
                let after = match options.stream.as_ref().filter(|s| !s.device().is_cpu()) {
                    Some(stream) => match stream.record() {
                        Ok(event) => Some(event),
                        Err(e) => return refuse(e, op),
                    },
                    None => None,
                };
                let rounding = self.next_rounding();
                Some(Quantised {
                    plan,
                    rounding,
                    slot,
                    after,
                })
            }
            // A forwarded call has its number, too.
            _ => {
                self.next_rounding();
                None
            }
        };
        let deadline = options.deadline;
        let deadline = deadline.unwrap_or_else(|| deadline_in(self.layer.options.timeout));
        let label = Label::of(op.get());
        // What is forwarded does not keep its caller.
        let here = blocks || quantised.is_none();
        let call = Call {
            op,
            options,
            blocks,
            quantised,
        };
        match here {
            true => engine.submit_here(call, label, deadline),
            false => engine.submit(call, label, deadline),
        }
    }

    /// Why `op` is not carried out; `None` if it is.
    fn refusal(&self, op: &Collective, plan: Option<&Plan>) -> Option<Error> {
        if let Some(reason) = unsupported(op) {
            return Some(Error::unsupported(reason));
        }
        if plan.is_none() {
            // Kernels may serve devices that the group below does not.
            let inner = self.layer.inner.capabilities();
            let odd = op.tensors().into_iter().find(|t| !inner.serves(&t.device().kind));
            return odd.map(|t| wrong_device(t, &inner.devices.join(", ")));
        }
        let device = op.tensors().first().map(|t| t.device().clone());
        if let Some(device) = device.filter(|d| !d.is_cpu()) {
            if let Err(e) = block_kernels(&device.kind) {
                return Some(e);
            }
            if self.layer.feedback.is_some() {
                return Some(Error::unsupported(format!(
                    "error feedback keeps its residuals on the host; the values are on {device}"
                )));
            }
        }
        None
    }
}

/// Errors: `Unsupported`, with the reason, if values on `device` cannot be quantised without host memory below.
fn stays_on_device(device: &Device, codec: Codec, options: &QuantizeOptions) -> Result<()> {
    let kernels = block_kernels(&device.kind)?;
    let because = match kernels.on_device() {
        None => "these kernels need a group that moves host memory",
        Some(bytes) if !bytes.knows(codec) => {
            "there are no kernels for that format; int8-b64, int8-b32 and mx-e4m3 have some"
        }
        Some(_) if options.error_feedback => "error feedback keeps its residuals on the host",
        Some(_) if options.moves == Moves::Quantized => "what is only moved is moved bit for bit there",
        Some(_) => return Ok(()),
    };
    Err(Error::unsupported(format!(
        "quantising in {codec} on {device}: {because}; a group over host memory behind ftcore::Staged can"
    )))
}

/// What the wrapper offers over a group that offers `inner`.
fn offered(inner: &Capabilities, codec: Codec, options: &QuantizeOptions) -> Capabilities {
    let floats = DTypeSet::of(&FLOATS);
    let mut reduces = [DTypeSet::NONE; ReduceOp::COUNT];
    for op in REDUCTIONS {
        if let Some(set) = reduces.get_mut(usize::from(op.code())) {
            *set = floats;
        }
    }
    let kept = [
        Feature::Abort,
        Feature::Reconfigure,
        Feature::MismatchDetection,
        Feature::Tags,
        Feature::RecvAny,
        Feature::ThreadRanks,
        Feature::Split,
    ];
    // Nothing would reach the residuals of a group that was split off.
    let lost = options.error_feedback.then_some(Feature::Split);
    let features = kept.into_iter().filter(|f| inner.has(*f) && Some(*f) != lost);
    let features = features.fold(FeatureSet::NONE, FeatureSet::with);
    let mut devices = inner.devices.clone();
    for kind in device_kinds() {
        if !devices.iter().any(|d| d == kind) {
            devices.push(kind.into());
        }
    }
    let reduction = |phases: &str| {
        format!("sum and avg of f32, f16 and bf16 in {codec}, {phases}; others are unsupported")
    };
    let moved = match options.moves {
        Moves::Exact => "forwarded bit for bit".to_string(),
        Moves::Quantized => format!("f32, f16 and bf16 in {codec}, others bit for bit"),
    };
    let mut notes: Vec<(Cow<'static, str>, Cow<'static, str>)> = vec![
        (
            "all_reduce".into(),
            reduction("rounded twice from three ranks on").into(),
        ),
        ("reduce_scatter".into(), reduction("rounded once").into()),
        ("reduce".into(), "unsupported: use all_reduce".into()),
        // Where that is a data type, it says how close a reduction comes.
        ("rounds_to".into(), codec.name().into()),
        ("all_gather".into(), moved.clone().into()),
        ("broadcast".into(), moved.into()),
    ];
    // What the group below says of operations that are forwarded to it holds here too.
    let forwarded = |name: &str| {
        let kind = OpKind::ALL.into_iter().find(|k| k.name() == name);
        kind.is_some_and(|k| !is_reduction(k)) && !notes.iter().any(|(n, _)| n == name)
    };
    let kept: Vec<_> = inner
        .notes
        .iter()
        .filter(|(name, _)| forwarded(name))
        .cloned()
        .collect();
    notes.extend(kept);
    // Exact moves are forwarded; what is quantised is read while the results of other ranks come.
    let exact = match options.moves {
        Moves::Exact => inner.ops,
        Moves::Quantized => inner.ops.without(OpKind::AllGatherInPlace),
    };
    Capabilities {
        ops: exact
            .without(OpKind::ReduceScatterInPlace)
            .without(OpKind::Reduce)
            .with(OpKind::AllReduce)
            .with(OpKind::ReduceScatter)
            .with(OpKind::ReduceScatterInto),
        moves: inner.moves,
        reduces,
        features: features.with(Feature::BitwiseEqual).with(Feature::Contributors),
        options: inner.options.clone(),
        devices,
        notes,
    }
}

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for QuantizedGroup {
    fn info(&self) -> GroupInfo {
        let inner = self.layer.inner.info();
        GroupInfo {
            dropped_options: inner.dropped_options,
            ..self.lifecycle.info(inner.device)
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.begin(op, options, false)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.begin(op, options, true)?.finish()
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        self.layer.inner.alloc(dtype, count)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| e.with_op("split");
        if self.layer.feedback.is_some() {
            return Err(named(Error::unsupported(
                "nothing would reach the residuals of a group that is split from one with error feedback; split the group below \
                 before it is wrapped, and wrap what comes of it",
            )));
        }
        let (engine, parent) = self.lifecycle.configured().map_err(named)?;
        // Behind everything queued, as on the other ranks.
        let late = "operations before the split did not end by its deadline";
        engine.wait_idle(deadline, late).map_err(named)?;
        let Some(child) = self.layer.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        let options = QuantizeOptions {
            codec: CodecChoice::Exactly(self.layer.codec),
            ..self.layer.options.clone()
        };
        let info = child.info();
        let child = Self::with_options(Arc::from(child), options)?;
        let configuration = Configuration {
            name: info.name.to_string(),
            epoch: info.epoch,
            rank: info.rank,
            world_size: info.world_size,
            deadline,
            ..parent
        };
        // It is connected, and quantises like its parent.
        child
            .lifecycle
            .configure(configuration, |c| child.start(c, None))?;
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.lifecycle.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.lifecycle.error().or_else(|| self.layer.inner.error())
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        let drained = self.lifecycle.shutdown(deadline);
        drained.and(self.layer.inner.shutdown(deadline))
    }

    fn traffic(&self) -> Traffic {
        self.layer.inner.traffic()
    }
}

impl Drop for QuantizedGroup {
    fn drop(&mut self) {
        // The engine's threads may be the last to let go of the group below, which has its leave to send.
        let gone = self.gone.get_mut().unwrap_or_else(PoisonError::into_inner);
        gone.take().into_iter().for_each(leave_at_exit);
    }
}
