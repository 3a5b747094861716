//! The process group around another one: agreement on the format, then every collective in order through the queue.

use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::lifecycle::part_from;
use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Error, ErrorKind, Failed,
    Feature, FeatureSet, GroupInfo, OpKind, ProcessGroup, ReduceOp, Rejected, Result, SubmitOptions, Traffic,
    Work, deadline_in, execute_by_submit, work_pair, wrong_device,
};

use crate::agree::{Agreement, may_be_mismatch};
use crate::exchange::Place;
use crate::kernels::{block_kernels, device_kinds};
use crate::options::{Accuracy, CodecChoice, Moves, QuantizeOptions};
use crate::plan::{FLOATS, REDUCTIONS, is_reduction, unsupported};
use crate::queue::{Job, Shared, Turn};
use crate::{Codec, ErrorFeedback};

/// A group whose reductions travel in a [`Codec`].
///
/// - `all_reduce`, `reduce_scatter` and `reduce_scatter_into` of f32, f16 and bf16 with `Sum` and `Avg` are quantised; other reductions are
///   `Unsupported` with the reason. `all_gather`, `all_gather_into` and `broadcast` of those types are quantised with [`Moves::Quantized`]. Everything
///   else is forwarded as it is.
/// - All ranks of an all-reduce hold bitwise equal results, and the ranks' values are summed in f32 in rank order (INV-3).
/// - Averages divide by the contributors counted in the same exchange (INV-4).
/// - `configure` compares format, accuracy and moves with every other rank's through the store: `Mismatch` on all ranks names both (L12).
/// - A world of one exchanges nothing, so nothing is quantised.
/// - Tensors are on the host, or on a device that [`BlockKernels`](crate::BlockKernels) are linked in for; streams of devices are `Unsupported` for
///   quantised operations.
pub struct QuantizedGroup {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    /// Ends once the thread has let go of the group below.
    thread: Mutex<Option<Receiver<()>>>,
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
    /// quantise moves); `InvalidArgument` for options that do not go together.
    pub fn with_options(inner: Arc<dyn ProcessGroup>, options: QuantizeOptions) -> Result<Self> {
        let info = inner.info();
        let codec = options.codec.on(&info.device);
        options.check(codec)?;
        let capabilities = inner.capabilities();
        let mut needed = vec![OpKind::AllGather, OpKind::AllGatherInto, OpKind::AllToAllInto];
        if options.moves == Moves::Quantized {
            needed.push(OpKind::Broadcast);
        }
        let missing = needed.iter().find(|k| !capabilities.ops.contains(**k));
        let lacks = match missing {
            Some(kind) => Some(kind.name()),
            None if !capabilities.moves.contains(DType::U8) => Some("u8"),
            None if !capabilities.serves(&ftcore::DeviceKind::Cpu) => Some("host memory"),
            None => None,
        };
        if let Some(lacks) = lacks {
            return Err(Error::unsupported(format!(
                "quantised collectives need {lacks}, which backend '{}' does not offer",
                info.backend
            )));
        }
        let capabilities = offered(capabilities, codec, options.moves);
        let shared = Arc::new(Shared::new(inner, codec, options));
        let served = shared.clone();
        let (serving, thread) = channel();
        std::thread::Builder::new()
            .name("ox-quant".to_string())
            .spawn(move || {
                served.serve();
                drop(served);
                drop(serving);
            })
            .map_err(|e| Error::io("cannot start the thread ox-quant", e))?;
        Ok(Self {
            shared,
            capabilities,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The format.
    pub fn codec(&self) -> Codec {
        self.shared.codec
    }

    /// How many values that are not finite this rank has put into quantised operations so far (INV-11).
    pub fn non_finite(&self) -> u64 {
        self.shared.non_finite.load(Ordering::Relaxed)
    }

    /// This rank's residuals, if the options ask for error feedback.
    pub fn error_feedback(&self) -> Option<Arc<ErrorFeedback>> {
        self.shared.feedback.clone()
    }

    /// Names the round that the next calls belong to, for stochastic rounding: the same seed, round, rank and number of the call in
    /// its round draw the same random numbers, so that a step that is done again gives the same bytes. Round 0 begins with every `configure`.
    pub fn start_round(&self, round: u64) {
        let mut state = self.shared.lock();
        (state.next.round, state.next.in_round) = (round, 0);
    }

    fn connect(&self, c: &Configuration, agreement: &Agreement) -> Result<()> {
        let shared = &self.shared;
        if !shared.idle() {
            shared.stop(&format!("configured again at epoch {}", c.epoch));
        }
        shared.wait_idle(c.deadline)?;
        shared.interrupt.store(false, Ordering::Release);
        c.cancel.check()?;
        agreement.publish()?;
        let inner = &shared.inner;
        let connected = inner.configure(c.clone()).map_err(|e| match e.kind() {
            // Another rank may have found out first and left.
            ErrorKind::PeerLost | ErrorKind::Aborted | ErrorKind::Timeout | ErrorKind::Poisoned => {
                agreement.known_mismatch().unwrap_or(e)
            }
            _ => e,
        });
        connected?;
        agreement
            .compare_all()
            .inspect_err(|e| inner.abort(&e.to_string()))
    }

    /// Why `op` is not carried out; `None` if it is.
    fn refusal(&self, op: &Collective, options: &SubmitOptions, place: Place) -> Option<Error> {
        if let Some(reason) = unsupported(op) {
            return Some(Error::unsupported(reason));
        }
        let inner = self.shared.inner.capabilities();
        if place.world == 1 || self.shared.plan(op, place.world).is_none() {
            // Kernels may serve devices that the group below does not.
            let odd = op.tensors().into_iter().find(|t| !inner.serves(&t.device().kind));
            return odd.map(|t| wrong_device(t, &inner.devices.join(", ")));
        }
        let device = op.tensors().first().map(|t| t.device().clone());
        if let Some(device) = device.filter(|d| !d.is_cpu()) {
            if let Err(e) = block_kernels(&device.kind) {
                return Some(e);
            }
            if self.shared.feedback.is_some() {
                return Some(Error::unsupported(format!(
                    "error feedback keeps its residuals on the host; the values are on {device}"
                )));
            }
        }
        let stream = options.stream.as_ref().filter(|s| !s.device().is_cpu())?;
        Some(Error::unsupported(format!(
            "quantising cannot order itself after a stream on {}; synchronise it first",
            stream.device()
        )))
    }
}

/// What the wrapper offers over a group that offers `inner`.
fn offered(inner: &Capabilities, codec: Codec, moves: Moves) -> Capabilities {
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
    let features = kept.into_iter().filter(|f| inner.has(*f));
    let features = features.fold(FeatureSet::NONE, FeatureSet::with);
    let mut devices = inner.devices.clone();
    for kind in device_kinds() {
        if !devices.iter().any(|d| d == kind) {
            devices.push(kind.into());
        }
    }
    let reduction =
        |shots: &str| format!("sum and avg of f32, f16 and bf16 in {codec}, {shots}; others are unsupported");
    let moved = match moves {
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
    Capabilities {
        ops: inner
            .ops
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
        let mut info = self.shared.inner.info();
        info.backend = format!("{}+{}", info.backend, self.shared.codec.name());
        if self.shared.lock().place.is_none() {
            (info.rank, info.world_size) = (0, 0);
        }
        info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, mut configuration: Configuration) -> Result<()> {
        configuration.cancel = configuration.cancel.child();
        let (rank, epoch) = (configuration.rank, configuration.epoch);
        let named = |e: Error| e.with_op("configure").with_rank(rank).with_epoch(epoch.0);
        {
            let mut state = self.shared.lock();
            if state.configuring.is_some() {
                let text = "another thread is configuring this group right now";
                return Err(named(Error::new(ErrorKind::InvalidState, text)));
            }
            // A wrong call leaves the group as it is.
            let (rank, world) = (configuration.rank, configuration.world_size);
            if rank >= world {
                let text = format!("rank {rank} does not exist in a world of {world}");
                return Err(named(Error::invalid(text)));
            }
            if let Some(last) = state.epoch.filter(|last| configuration.epoch <= *last) {
                let text = format!(
                    "epoch {} is not larger than {last}, the group's present one",
                    configuration.epoch
                );
                return Err(named(Error::invalid(text)));
            }
            state.configuring = Some(configuration.cancel.clone());
            state.place = None;
            state.agreement = None;
            state.failure = None;
            state.closing = false;
        }
        let options = &self.shared.options;
        let shots = match options.accuracy {
            Accuracy::Economic => "economic",
            Accuracy::Best => "best",
        };
        let moves = match options.moves {
            Moves::Exact => "exact",
            Moves::Quantized => "quantised",
        };
        // The format first: see Agreement.
        let mine = format!("{}, accuracy {shots}, moves {moves}", self.shared.codec);
        let agreement = Agreement::new(&configuration, mine);
        let connected = self.connect(&configuration, &agreement).map_err(named);
        configuration.cancel.settle();
        let mut state = self.shared.lock();
        state.configuring = None;
        state.failure = connected.clone().err();
        if connected.is_ok() {
            state.place = Some(Place {
                rank: configuration.rank,
                world: configuration.world_size,
            });
            state.agreement = Some(agreement);
            state.epoch = Some(configuration.epoch);
            state.next = Turn::default();
        }
        connected
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let kind = op.get().kind();
        let refuse = |error: Error, op: Checked| {
            let error = error.with_op(kind.name());
            let op = op.into_inner();
            Err(Box::new(Rejected { error, op }))
        };
        let below = self.shared.inner.error();
        let mut state = self.shared.lock();
        let Some(place) = state.place else {
            let text = match &state.failure {
                Some(e) => format!("the group is not configured; the last attempt failed: {e}"),
                None => "the group is not configured".to_string(),
            };
            return refuse(Error::new(ErrorKind::InvalidState, text), op);
        };
        // A mismatch that only the group below knows of is first put into this group's own words by the thread; the call is this rank's side of it.
        let below = below.filter(|e| kind.is_p2p() || !may_be_mismatch(e));
        if let Some(first) = state.failure.clone().or(below) {
            let text = format!("the group failed earlier and was not configured again: {first}");
            let error = Error::new(ErrorKind::Poisoned, text).with_source(first);
            return refuse(error, op);
        }
        if state.closing {
            return refuse(Error::new(ErrorKind::InvalidState, "the group is shut down"), op);
        }
        if let Some(error) = self.refusal(op.get(), &options, place) {
            return refuse(error, op);
        }
        if kind.is_p2p() || place.world == 1 {
            drop(state);
            return self.shared.inner.submit(op, options);
        }
        let slot = match &self.shared.feedback {
            Some(feedback) if is_reduction(kind) => match feedback.slot(kind, op.get().count()) {
                Ok(slot) => Some(slot),
                Err(e) => return refuse(e, op),
            },
            _ => None,
        };
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.shared.options.timeout));
        let weak = Arc::downgrade(&self.shared);
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(shared) = weak.upgrade() {
                shared.abort(reason);
            }
        });
        let turn = state.next;
        state.next.seq += 1;
        state.next.in_round += 1;
        state.jobs.push_back(Job {
            op,
            options,
            deadline,
            completer,
            turn,
            slot,
        });
        drop(state);
        self.shared.wake();
        Ok(work)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        // Behind everything queued, as on the other ranks.
        self.shared.wait_idle(deadline)?;
        let Some(child) = self.shared.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        let options = QuantizeOptions {
            codec: CodecChoice::Exactly(self.shared.codec),
            ..self.shared.options.clone()
        };
        let child = Self::with_options(Arc::from(child), options)?;
        let info = child.shared.inner.info();
        child.shared.lock().place = Some(Place {
            rank: info.rank,
            world: info.world_size,
        });
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.shared.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.shared.lock().closing = true;
        let drained = self.shared.wait_idle(deadline);
        if drained.is_err() {
            self.shared
                .abort("pending work did not end before the group was shut down");
        }
        let inner = self.shared.inner.shutdown(deadline);
        drained.map_err(|e| e.with_op("shutdown")).and(inner)
    }

    fn traffic(&self) -> Traffic {
        self.shared.inner.traffic()
    }
}

impl Drop for QuantizedGroup {
    fn drop(&mut self) {
        self.shared.end();
        // The thread may be the one that drops the group below, which has its good-bye to say.
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        thread.take().into_iter().for_each(part_from);
    }
}
