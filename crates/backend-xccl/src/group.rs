//! The process group on host memory: what it offers, how it connects, and its calls to the engine of the current configuration.

use std::sync::Arc;
use std::time::Instant;

use ftcore::lifecycle::{self, Lifecycle, Split};
use ftcore::{
    Capabilities, Checked, Collective, Configuration, DType, DTypeSet, Device, Error, Feature, FeatureSet,
    GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work,
    deadline_in, names, notes,
};
use oneccl_sys::Flavour;

use crate::engine::{Comms, Engine, Parts, Place, require_unstuck};
use crate::link::Link;
use crate::news::Channel;
use crate::options::{HONOURED, Settings};
use crate::tally::Tally;
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
    lifecycle: Lifecycle<Engine>,
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
                "ranks of one host write them down beside the data; else in the same call up to 256 KiB, or a second \
                 all-reduce of one u32",
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
        rendezvous::warm_up(probe::library(Flavour::Host)?);
        Ok(Self::with(name.into(), settings))
    }

    fn with(name: String, settings: Settings) -> Self {
        Self {
            capabilities: capabilities(settings.counted),
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
        let comms = rendezvous::connect(configuration, probe::library(Flavour::Host)?)?;
        let channel = Some(rendezvous::channel(configuration));
        self.start(configuration, comms, channel)
    }

    /// What an operation is to run on, and until when; or the operation is refused.
    fn begin(
        &self,
        op: Checked,
        options: &SubmitOptions,
    ) -> Result<(Arc<Engine>, Collective, Instant), Box<Rejected>> {
        let op = op.into_inner();
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(op.kind().name());
            Err(Box::new(Rejected { error, op }))
        };
        if let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) {
            let text = format!(
                "xccl on host memory cannot order itself after a stream on {}",
                stream.device()
            );
            return refuse(Error::unsupported(text), op);
        }
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.settings.timeout));
        match self.lifecycle.engine() {
            Ok(engine) => Ok((engine, op, deadline)),
            Err(error) => refuse(error, op),
        }
    }

    fn start(&self, c: &Configuration, comms: Comms, channel: Option<Channel>) -> Result<Arc<Engine>> {
        let place = Place {
            rank: c.rank,
            world: c.world_size,
            epoch: c.epoch.0,
        };
        let tally = match &channel {
            Some(channel) if self.settings.beside => Tally::agree(c, channel)?,
            _ => None,
        };
        let parts = Parts {
            comms,
            channel,
            counters: self.counters.clone(),
            counted: self.settings.counted,
            tally,
            side: None,
        };
        Engine::start(place, parts)
    }
}

impl Drop for XcclGroup {
    fn drop(&mut self) {
        rendezvous::let_it_load();
    }
}

impl lifecycle::Engine for Engine {
    fn abort(self: &Arc<Self>, reason: &str) {
        Self::abort(self, reason);
    }
    fn leave(self: &Arc<Self>, reason: &str) {
        Self::leave(self, reason);
    }
    /// Nothing to wait for: oneCCL cannot be made to end.
    fn wait_ended(self: &Arc<Self>, _deadline: Instant) -> Result<()> {
        Ok(())
    }
    fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        Self::drain(self, deadline)
    }
    fn error(&self) -> Option<Error> {
        Self::error(self)
    }
}

impl ProcessGroup for XcclGroup {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info("xccl", Device::CPU)
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let (engine, op, deadline) = self.begin(op, &options)?;
        engine.submit(op, options.contribute, deadline)
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
        let child = Self::with(configuration.name.clone(), self.settings.clone());
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
