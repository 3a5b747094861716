//! The process group: what it offers, how it connects, and its calls to the engine of the current configuration.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ftcore::flight_recorder::Recorder;
use ftcore::lifecycle::{Engine, Lifecycle, Split};
use ftcore::{
    Capabilities, Checked, Completion, Configuration, DType, DTypeSet, Device, Error, Failed, Feature,
    FeatureSet, GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup, Rejected, Result, SubmitOptions,
    Tensor, Traffic, Work, deadline_in, names, notes,
};

use crate::engine;
use crate::execution::Place;
use crate::executor::Executor;
use crate::options::{HONOURED, Settings, Transport};
use crate::queue::Shared;
use crate::schedule::Hosts;
use crate::transport::shm::{self, Bells};
use crate::transport::tcp::Counters;
use crate::{kernels, rendezvous};

/// A group of ranks on CPUs, over shared memory within a host and TCP between hosts.
///
/// Made unconfigured; [`configure`](ProcessGroup::configure) connects it. May be used from any thread, and several groups
/// may live in one process (ranks as threads included).
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - no collective ends on a rank before all ranks have entered it with the same arguments, so a mismatch fails on all;
/// - `Completion::contributors` is set on every rank of an all-reduce and reduce-scatter, and on the root of a reduce;
/// - a failure of any operation, point-to-point included, ends the configuration: every rank is told at once;
/// - `shutdown`, or dropping an idle group, leaves: the others fail only if they still need this rank.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use backend_gloo::GlooGroup;
/// use ftcore::store::InMemoryStore;
/// use ftcore::{
///     Cancel, Configuration, Epoch, GroupOptions, ProcessGroup as _, ProcessGroupExt as _, ReduceOp, deadline_in,
/// };
///
/// let store = Arc::new(InMemoryStore::new());
/// let sum = |rank| {
///     let group = GlooGroup::new("example", GroupOptions::default())?;
///     group.configure(Configuration {
///         store: store.clone(),
///         prefix: "example".into(),
///         name: "example".into(),
///         epoch: Epoch(1),
///         rank,
///         world_size: 2,
///         deadline: deadline_in(Duration::from_secs(30)),
///         cancel: Cancel::default(),
///     })?;
///     let mut values = [rank as f32 + 1.0; 4];
///     group.all_reduce_slice(&mut values, ReduceOp::Sum)?;
///     group.shutdown(deadline_in(Duration::from_secs(10)))?;
///     Ok::<_, ftcore::Error>(values)
/// };
/// // Ranks are threads here, and mostly processes.
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| sum(1));
///     assert_eq!(sum(0).unwrap(), [3.0; 4]);
///     assert_eq!(other.join().unwrap().unwrap(), [3.0; 4]);
/// });
/// ```
pub struct GlooGroup {
    settings: Settings,
    /// By how the ranks are connected: see [`TRANSPORTS`].
    capabilities: [Capabilities; 4],
    /// Which of them stands now.
    connected: AtomicUsize,
    counters: Arc<Counters>,
    lifecycle: Lifecycle<Shared>,
}

/// How ranks can be connected; before `configure`, and in a world of one, they are not.
const TRANSPORTS: [&str; 4] = ["none", "shm", "tcp", "shm and tcp"];

/// What every gloo group offers, before it is configured.
pub(crate) fn capabilities() -> Capabilities {
    capabilities_over("none")
}

fn capabilities_over(transport: &'static str) -> Capabilities {
    Capabilities {
        ops: OpSet::of(&OpKind::ALL),
        moves: DTypeSet::of(&DType::ALL),
        reduces: kernels::table(),
        features: FeatureSet::of(&[
            Feature::Abort,
            Feature::Reconfigure,
            Feature::MismatchDetection,
            Feature::BitwiseEqual,
            Feature::Contributors,
            Feature::Tags,
            Feature::RecvAny,
            Feature::ThreadRanks,
            Feature::Split,
            Feature::Borrow,
        ]),
        options: names(HONOURED),
        devices: names(&["cpu"]),
        notes: notes(&[
            ("reduce", "contributors are known on the root only"),
            ("f8", "f8e4m3 and f8e5m2 are moved, not reduced"),
            ("transport", transport),
        ]),
    }
}

impl GlooGroup {
    /// A new, unconfigured group. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `InvalidArgument` names the options that are not honoured (INV-9).
    pub fn new(name: impl Into<String>, options: GroupOptions) -> Result<Self> {
        Ok(Self::with(name.into(), Settings::new(options)?))
    }

    fn with(name: String, settings: Settings) -> Self {
        Self {
            settings,
            capabilities: TRANSPORTS.map(capabilities_over),
            connected: AtomicUsize::new(0),
            counters: Arc::default(),
            lifecycle: Lifecycle::new("gloo", name),
        }
    }

    /// A group that uses shared memory between ranks whose sum is even and TCP between the others, as if they were on two
    /// hosts. For tests on one host.
    #[doc(hidden)]
    pub fn mixed(name: impl Into<String>, options: GroupOptions) -> Result<Self> {
        let mut settings = Settings::new(options)?;
        settings.transport = Transport::Mixed;
        Ok(Self::with(name.into(), settings))
    }

    /// A group whose ranks own these shares of large sums, of 65,536 in all, as if their links had been measured; the same on all ranks. For tests.
    #[doc(hidden)]
    pub fn uneven(name: impl Into<String>, options: GroupOptions, shares: Vec<u32>) -> Result<Self> {
        let mut settings = Settings::new(options)?;
        settings.shares = shares;
        Ok(Self::with(name.into(), settings))
    }

    /// How the ranks are connected: `shm`, `tcp`, `shm and tcp`, or `none` in a world of one and before `configure`. Also
    /// the note `transport` of the capabilities.
    pub fn transport(&self) -> &'static str {
        let index = self.connected.load(Ordering::Acquire);
        TRANSPORTS.get(index).copied().unwrap_or("none")
    }

    /// Bytes sent by other ways than through the rings in shared memory, headers included: what the hosts' network carries. For tests.
    #[doc(hidden)]
    pub fn sent_elsewhere(&self) -> u64 {
        self.counters.sent_elsewhere()
    }

    /// A group whose constants differ from every real one's.
    #[cfg(test)]
    pub(crate) fn of_another_build(name: &str) -> Result<Self> {
        let mut settings = Settings::new(GroupOptions::default())?;
        settings.constants ^= 1;
        Ok(Self::with(name.to_string(), settings))
    }

    /// Makes the engine of a new configuration.
    fn connect(&self, configuration: &Configuration) -> Result<Arc<Shared>> {
        let mut place = Place {
            rank: configuration.rank,
            world: configuration.world_size,
            epoch: configuration.epoch,
            one_host: false,
        };
        let shared = if place.world == 1 {
            Shared::new(
                place,
                Hosts::default(),
                Bells::private(false)?,
                None,
                Vec::new(),
                false,
            )?
        } else {
            let counters = self.counters.clone();
            let connected = rendezvous::connect(configuration, &self.settings, counters)?;
            place.one_host = connected.one_host;
            let executor = Executor::new(connected.ports, connected.apart);
            let shared = Shared::new(
                place,
                connected.hosts,
                connected.bells,
                Some(executor),
                connected.channels,
                connected.apart,
            )?;
            engine::start(&shared, connected.peers)?;
            shared
        };
        let transport = TRANSPORTS.iter().position(|t| *t == shared.transport());
        self.connected.store(transport.unwrap_or(0), Ordering::Release);
        Ok(shared)
    }

    /// The engine for a call with `options`, and the call's deadline.
    pub(crate) fn ready(&self, options: &SubmitOptions) -> Result<(Arc<Shared>, Instant)> {
        if let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) {
            let text = format!("gloo cannot order itself after a stream on {}", stream.device());
            return Err(Error::unsupported(text));
        }
        let deadline = || deadline_in(self.settings.timeout);
        Ok((
            self.lifecycle.engine()?,
            options.deadline.unwrap_or_else(deadline),
        ))
    }
}

impl Engine for Shared {
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
    fn recorder(&self) -> Option<&OnceLock<Recorder>> {
        Some(&self.recorder)
    }
}

impl ProcessGroup for GlooGroup {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info(Device::CPU)
    }

    fn capabilities(&self) -> &Capabilities {
        let index = self.connected.load(Ordering::Acquire);
        let [unconnected, ..] = &self.capabilities;
        self.capabilities.get(index).unwrap_or(unconnected)
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        match self.ready(&options) {
            Ok((engine, deadline)) => engine.submit(op, options.contribute, deadline),
            Err(error) => {
                let error = error.with_op(op.kind().name());
                Err(Box::new(Rejected { error, op }))
            }
        }
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        let op = op.into_inner();
        match self.ready(&options) {
            Ok((engine, deadline)) => engine.execute(op, options.contribute, deadline),
            Err(error) => Err(Box::new(Failed {
                error: error.with_op(op.kind().name()),
                tensors: op.into_tensors(),
            })),
        }
    }

    /// In memory that the other ranks of this host read in place, where the system allows it.
    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        shm::alloc(dtype, count).map_or_else(|| Tensor::try_zeros(dtype, &[count]), Ok)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let (_, parent) = self.lifecycle.configured().map_err(|e| e.with_op("split"))?;
        let split = Split::agree(self, parent, color, key, deadline)?;
        let Some(configuration) = split.child(deadline) else {
            return Ok(None);
        };
        // As the parent was made, whatever the environment says by now. Shares are those of its ranks.
        let settings = Settings {
            shares: Vec::new(),
            ..self.settings.clone()
        };
        let child = Self::with(configuration.name.clone(), settings);
        child.configure(configuration)?;
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
