//! The process group: its lifecycle (configure, abort, shut down, drop) around one engine per configuration.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Device, Epoch, Error,
    ErrorKind, Failed, Feature, FeatureSet, GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup,
    ProcessGroupExt, Rejected, Result, SubmitOptions, Tensor, Traffic, Work, deadline_in, names, notes,
};

use crate::engine;
use crate::exec::Place;
use crate::lane::Lane;
use crate::options::{HONOURED, Settings, Transport};
use crate::queue::Shared;
use crate::transport::shm::Bell;
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
/// - `shutdown`, or dropping an idle group, says good-bye: the others fail only if they still need this rank.
pub struct GlooGroup {
    settings: Settings,
    /// By how the ranks are connected: see [`TRANSPORTS`].
    capabilities: [Capabilities; 4],
    /// Which of them stands now.
    connected: AtomicUsize,
    counters: Arc<Counters>,
    state: Mutex<State>,
    /// Raised by `abort` while `configure` runs.
    cancel: AtomicBool,
}

struct State {
    name: String,
    engine: Option<Arc<Shared>>,
    configuration: Option<Configuration>,
    last_epoch: Option<Epoch>,
    /// Why the last `configure` failed.
    failure: Option<Error>,
    configuring: bool,
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
            state: Mutex::new(State {
                name,
                engine: None,
                configuration: None,
                last_epoch: None,
                failure: None,
                configuring: false,
            }),
            cancel: AtomicBool::new(false),
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

    /// How the ranks are connected: `shm`, `tcp`, `shm and tcp`, or `none` in a world of one and before `configure`. Also
    /// the note `transport` of the capabilities.
    pub fn transport(&self) -> &'static str {
        let index = self.connected.load(Ordering::Acquire);
        TRANSPORTS.get(index).copied().unwrap_or("none")
    }

    /// A group whose constants differ from every real one's.
    #[cfg(test)]
    pub(crate) fn of_another_build(name: &str) -> Result<Self> {
        let mut settings = Settings::new(GroupOptions::default())?;
        settings.constants ^= 1;
        Ok(Self::with(name.to_string(), settings))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the old engine and makes the new one. Runs outside the lock, so that abort and submit stay responsive.
    fn connect(&self, configuration: &Configuration, old: Option<Arc<Shared>>) -> Result<Arc<Shared>> {
        if let Some(old) = old {
            old.leave(&format!("configured again at epoch {}", configuration.epoch));
            old.wait_ended(configuration.deadline)?;
        }
        let mut place = Place {
            rank: configuration.rank,
            world: configuration.world_size,
            epoch: configuration.epoch.0,
            near: false,
        };
        if place.world == 1 {
            return Shared::new(place, Bell::private()?, None);
        }
        let counters = self.counters.clone();
        let connected = rendezvous::connect(configuration, &self.settings, counters, &self.cancel)?;
        place.near = connected.near;
        let lane = Lane::new(connected.ports);
        let shared = Shared::new(place, connected.bell, Some(lane))?;
        engine::start(&shared, connected.peers)?;
        Ok(shared)
    }

    /// The engine for a call with `options`, and the call's deadline.
    fn ready(&self, options: &SubmitOptions) -> Result<(Arc<Shared>, Instant)> {
        if let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) {
            let text = format!("gloo cannot order itself after a stream on {}", stream.device());
            return Err(Error::unsupported(text));
        }
        let state = self.lock();
        let deadline = || deadline_in(self.settings.timeout);
        match (&state.engine, &state.failure) {
            (Some(engine), _) => Ok((engine.clone(), options.deadline.unwrap_or_else(deadline))),
            (None, Some(failure)) => {
                let text = format!("the group is not configured; the last attempt failed: {failure}");
                Err(Error::new(ErrorKind::InvalidState, text).with_source(failure.clone()))
            }
            (None, None) => Err(Error::new(ErrorKind::InvalidState, "the group is not configured")),
        }
    }

    /// What every rank passes, and rank 0's number for this call: names that do not depend on anybody's counters (L34).
    fn exchange(&self, color: Option<u32>, key: u32, deadline: Instant) -> Result<Vec<[u32; 5]>> {
        let world = self.info().world_size as usize;
        let nonce = rendezvous::nonce();
        let (high, low) = ((nonce >> 32) as u32, nonce as u32);
        let mine = vec![u32::from(color.is_some()), color.unwrap_or(0), key, high, low];
        let pairs = vec![(Tensor::from_vec(mine), Tensor::zeros(DType::U32, world * 5))];
        let work = self
            .run(Collective::AllGatherInto { pairs }, SubmitOptions::by(deadline))
            .map_err(Error::from)?;
        let all = work.take_tensor()?;
        Ok(all.as_slice::<u32>()?.as_chunks::<5>().0.to_vec())
    }
}

impl ProcessGroup for GlooGroup {
    fn info(&self) -> GroupInfo {
        let state = self.lock();
        let place = state.engine.as_ref().map(|e| e.place);
        GroupInfo {
            backend: "gloo".to_string(),
            name: state.name.clone(),
            rank: place.map_or(0, |p| p.rank),
            world_size: place.map_or(0, |p| p.world),
            epoch: place.map_or(Epoch(0), |p| Epoch(p.epoch)),
            device: Device::CPU,
        }
    }

    fn capabilities(&self) -> &Capabilities {
        let index = self.connected.load(Ordering::Acquire);
        let [unconnected, ..] = &self.capabilities;
        self.capabilities.get(index).unwrap_or(unconnected)
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
            state.configuration = None;
            self.cancel.store(false, Ordering::Release);
            state.engine.take()
        };
        let connected = self.connect(&configuration, old);
        let mut state = self.lock();
        state.configuring = false;
        match connected {
            Ok(shared) => {
                if self.cancel.load(Ordering::Acquire) {
                    shared.abort("aborted while it was being configured");
                }
                let transport = TRANSPORTS.iter().position(|t| *t == shared.transport());
                self.connected.store(transport.unwrap_or(0), Ordering::Release);
                state.engine = Some(shared);
                state.configuration = Some(configuration);
                Ok(())
            }
            Err(error) => {
                let error = if error.context().op.is_none() {
                    named(error)
                } else {
                    error
                };
                state.failure = Some(error.clone());
                Err(error)
            }
        }
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

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let parent = self.lock().configuration.clone().ok_or_else(|| {
            Error::new(ErrorKind::InvalidState, "the group is not configured").with_op("split")
        })?;
        let all = self.exchange(color, key, deadline)?;
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<(u32, u32)> = all
            .iter()
            .zip(0u32..)
            .filter(|([has, c, ..], _)| *has == 1 && *c == color)
            .map(|([_, _, key, ..], rank)| (*key, rank))
            .collect();
        members.sort_unstable();
        let rank = members.iter().position(|(_, r)| *r == parent.rank).unwrap_or(0);
        let [_, _, _, high, low] = all.first().copied().unwrap_or_default();
        let child = Self::new(parent.name.clone(), self.settings.options.clone())?;
        child.configure(Configuration {
            store: parent.store,
            prefix: format!("{}/split-{high:08x}{low:08x}/{color}", parent.prefix),
            name: format!("{}/{color}", parent.name),
            epoch: parent.epoch,
            rank: u32::try_from(rank).unwrap_or(0),
            world_size: u32::try_from(members.len()).unwrap_or(1),
            deadline,
        })?;
        Ok(Some(Box::new(child)))
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
        let Some(engine) = self.lock().engine.clone() else {
            return Ok(());
        };
        engine.drain(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}

impl Drop for GlooGroup {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = state.engine.take() {
            engine.leave("the group was dropped");
        }
    }
}
