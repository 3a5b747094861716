//! The process group: its lifecycle (configure, split, shut down, drop) around one engine per configuration.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ftcore::{
    Capabilities, Checked, Collective, Configuration, DType, DTypeSet, Device, Epoch, Error, ErrorKind,
    Feature, FeatureSet, GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup, ProcessGroupExt, Rejected,
    Result, SubmitOptions, Tensor, Traffic, Work, deadline_in, names, notes,
};
use oneccl_sys::Flavour;

use crate::engine::{Comms, Engine, Place, require_unstuck};
use crate::link::Link;
use crate::options::{HONOURED, Settings};
use crate::traffic::Counters;
use crate::{probe, rendezvous, route};

/// A group of ranks over oneCCL, on host memory. One rank per process.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - oneCCL cannot cancel anything. An operation that passes its deadline fails with `Timeout`, its memory is leaked and
///   counted, its thread given up, and no group of this process can be configured again. Neither `Abort` nor `Reconfigure`
///   is advertised; an isolated group, which kills a child process instead, has both;
/// - a failure on one rank is told to the others through the store, within about a quarter of a second;
/// - ranks that call different collectives are not found out: they hang until their deadlines, or worse;
/// - `shutdown` waits up to two seconds for the other ranks to leave too, so that communicators can be destroyed.
pub struct XcclGroup {
    settings: Settings,
    capabilities: Capabilities,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

struct State {
    name: String,
    engine: Option<Arc<Engine>>,
    configuration: Option<Configuration>,
    last_epoch: Option<Epoch>,
    /// Why the last `configure` failed.
    failure: Option<Error>,
    configuring: bool,
}

/// What groups on host memory offer.
pub(crate) fn capabilities(counted: bool) -> Capabilities {
    let mut features = FeatureSet::of(&[Feature::Split]);
    if counted {
        features = features.with(Feature::Contributors);
    }
    Capabilities {
        ops: OpSet::of(&OpKind::ALL),
        moves: DTypeSet::of(&DType::ALL),
        reduces: route::table(),
        features,
        options: names(HONOURED),
        devices: names(&["cpu"]),
        notes: notes(&[
            ("abort", "oneCCL cannot cancel; isolated groups can"),
            ("avg", "composed: sum, then division by the contributors"),
            ("premul_sum", "composed: scaled in scratch, then sum"),
            (
                "min, max of floats",
                "composed: as ordered integers, so that NaN propagates",
            ),
            ("bool", "composed: min, max or sum of u8"),
            ("i16, u16", "moved as bytes, reduced as i32 and u32"),
            ("f8", "moved as bytes, not reduced"),
            ("band, bor, bxor", "composed: all-gather, folded on every rank"),
            (
                "contributors",
                "in the same call up to 256 KiB, else a second all-reduce of one u32",
            ),
            (
                "all_reduce of several",
                "one call up to 256 KiB together, else one each",
            ),
            ("broadcast of several", "composed: one call each"),
            ("all_gather of uneven parts", "composed: one broadcast per rank"),
            (
                "gather, scatter",
                "composed: onecclAllToAllV to or from the root, messages before 2022.2",
            ),
            ("reduce_scatter of uneven parts", "composed: one reduce per rank"),
            (
                "all_to_all",
                "lists are packed; uneven: onecclAllToAllV, pairwise messages before 2022.2",
            ),
            ("barrier", "composed: all-reduce of one element"),
            ("monitored_barrier", "composed: through the store"),
            (
                "send, recv",
                "a communicator of their own, a thread per peer and direction; tags are not matched",
            ),
            (
                "recv from any",
                "not offered: oneCCL receives from a named rank only",
            ),
            ("batch", "composed: the same threads side by side"),
            ("traffic", "computed, not measured"),
        ]),
    }
}

impl XcclGroup {
    /// A new, unconfigured group. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `InvalidArgument` names the options that are not honoured (INV-9); `Unsupported` says why oneCCL cannot be
    /// used.
    pub fn new(name: impl Into<String>, options: GroupOptions) -> Result<Self> {
        let settings = Settings::new(options)?;
        probe::probe()?;
        Ok(Self::with(name.into(), settings))
    }

    fn with(name: String, settings: Settings) -> Self {
        Self {
            capabilities: capabilities(settings.counted),
            settings,
            counters: Arc::default(),
            state: Mutex::new(State {
                name,
                engine: None,
                configuration: None,
                last_epoch: None,
                failure: None,
                configuring: false,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the old engine and makes the new one. Runs outside the lock, so that abort and submit stay responsive.
    fn connect(&self, configuration: &Configuration, old: Option<Arc<Engine>>) -> Result<Arc<Engine>> {
        if let Some(old) = old {
            old.leave(&format!("configured again at epoch {}", configuration.epoch));
        }
        let place = Place {
            rank: configuration.rank,
            world: configuration.world_size,
            epoch: configuration.epoch.0,
        };
        let (comms, channel) = if place.world == 1 {
            let comms = Comms {
                collectives: Link::Alone,
                messages: None,
            };
            (comms, None)
        } else {
            require_unstuck()?;
            let comms = rendezvous::connect(configuration, probe::library(Flavour::Host)?)?;
            (comms, Some(rendezvous::channel(configuration)))
        };
        Engine::start(
            place,
            comms,
            channel,
            self.counters.clone(),
            self.settings.counted,
        )
    }

    /// What every rank passes to a split, and rank 0's number for this call: names that do not depend on anybody's
    /// counters (L34).
    fn exchange(&self, color: Option<u32>, key: u32, deadline: Instant) -> Result<Vec<[u32; 5]>> {
        let world = self.info().world_size as usize;
        let nonce = rendezvous::random();
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

impl ProcessGroup for XcclGroup {
    fn info(&self) -> GroupInfo {
        let state = self.lock();
        let place = state.engine.as_ref().map(|e| e.place);
        GroupInfo {
            backend: "xccl".to_string(),
            name: state.name.clone(),
            rank: place.map_or(0, |p| p.rank),
            world_size: place.map_or(0, |p| p.world),
            epoch: place.map_or(Epoch(0), |p| Epoch(p.epoch)),
            device: Device::CPU,
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
            state.configuration = None;
            state.engine.take()
        };
        let connected = self.connect(&configuration, old);
        let mut state = self.lock();
        state.configuring = false;
        match connected {
            Ok(engine) => {
                state.engine = Some(engine);
                state.configuration = Some(configuration);
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
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(op.kind().name());
            Err(Box::new(Rejected { error, op }))
        };
        if let Some(stream) = options.stream.filter(|s| !s.device().is_cpu()) {
            let text = format!(
                "xccl on host memory cannot order itself after a stream on {}",
                stream.device()
            );
            return refuse(Error::unsupported(text), op);
        }
        let engine = {
            let state = self.lock();
            match (&state.engine, &state.failure) {
                (Some(engine), _) => engine.clone(),
                (None, Some(failure)) => {
                    let text = format!("the group is not configured; the last attempt failed: {failure}");
                    let error = Error::new(ErrorKind::InvalidState, text).with_source(failure.clone());
                    return refuse(error, op);
                }
                (None, None) => {
                    return refuse(
                        Error::new(ErrorKind::InvalidState, "the group is not configured"),
                        op,
                    );
                }
            }
        };
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.settings.timeout));
        engine.submit(op, options.contribute, deadline)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let unconfigured =
            || Error::new(ErrorKind::InvalidState, "the group is not configured").with_op("split");
        let (parent, engine) = {
            let state = self.lock();
            let parent = state.configuration.clone().ok_or_else(unconfigured)?;
            (parent, state.engine.clone().ok_or_else(unconfigured)?)
        };
        let all = self.exchange(color, key, deadline)?;
        // oneCCL reserves some colours for itself: it gets their places in a sorted list.
        let mut colors: Vec<u32> = all.iter().filter(|m| m[0] == 1).map(|m| m[1]).collect();
        colors.sort_unstable();
        colors.dedup();
        let mut members: Vec<(u32, u32)> = all
            .iter()
            .zip(0u32..)
            .filter(|([has, c, ..], _)| *has == 1 && Some(*c) == color)
            .map(|([_, _, key, ..], rank)| (*key, rank))
            .collect();
        members.sort_unstable();
        let place = |rank| members.iter().position(|(_, r)| *r == rank);
        let rank = place(parent.rank)
            .and_then(|p| u32::try_from(p).ok())
            .unwrap_or(0);
        let world = u32::try_from(members.len()).unwrap_or(1);
        let dense = color
            .and_then(|c| colors.binary_search(&c).ok())
            .and_then(|c| u32::try_from(c).ok());
        let made = if parent.world_size == 1 {
            color.map(|_| Comms {
                collectives: Link::Alone,
                messages: None,
            })
        } else {
            engine.split(dense, rank, world, deadline)?
        };
        let (Some(color), Some(comms)) = (color, made) else {
            return Ok(None);
        };
        let [_, _, _, high, low] = all.first().copied().unwrap_or_default();
        let configuration = Configuration {
            store: parent.store,
            prefix: format!("{}/split-{high:08x}{low:08x}/{color}", parent.prefix),
            name: format!("{}/{color}", parent.name),
            epoch: parent.epoch,
            rank,
            world_size: world,
            deadline,
        };
        let child = Self::with(configuration.name.clone(), self.settings.clone());
        let channel = (world > 1).then(|| rendezvous::channel(&configuration));
        let place = Place {
            rank,
            world,
            epoch: parent.epoch.0,
        };
        let engine = Engine::start(
            place,
            comms,
            channel,
            child.counters.clone(),
            child.settings.counted,
        )?;
        {
            let mut state = child.lock();
            state.engine = Some(engine);
            state.last_epoch = Some(configuration.epoch);
            state.configuration = Some(configuration);
        }
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        let engine = self.lock().engine.clone();
        if let Some(engine) = engine {
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
        match engine {
            Some(engine) => engine.drain(deadline),
            None => Ok(()),
        }
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}

impl Drop for XcclGroup {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = state.engine.take() {
            engine.leave("the group was dropped");
        }
    }
}
