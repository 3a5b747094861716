//! What a group is on any memory: its options, counters and lifecycle, how it is configured and split, when an operation is due.
//!
//! `group` (host memory) and `xpu::group` say what differs: how communicators are made there and what the engine has beside it.

use std::sync::Arc;
use std::time::Instant;

use ftcore::lifecycle::{self, Lifecycle, Split};
use ftcore::{
    Capabilities, Checked, Collective, Configuration, Error, ProcessGroup, Rejected, Result, deadline_in,
};

use crate::engine::{Comms, Engine, Parts, Place, require_unstuck};
use crate::options::Settings;
use crate::rendezvous;
use crate::tally::Tally;
use crate::traffic::Counters;
use crate::xpu::comm::Side;

/// What both kinds of group have.
pub(crate) struct Member {
    pub(crate) settings: Settings,
    pub(crate) capabilities: Capabilities,
    pub(crate) counters: Arc<Counters>,
    pub(crate) lifecycle: Lifecycle<Engine>,
}

impl Member {
    pub(crate) fn new(name: String, settings: Settings, capabilities: Capabilities) -> Self {
        Self {
            settings,
            capabilities,
            counters: Arc::default(),
            lifecycle: Lifecycle::new(name),
        }
    }

    /// Connects with the other ranks: `meet` makes communicators with them, `beside` what the engine needs for these.
    pub(crate) fn configure(
        &self,
        configuration: Configuration,
        meet: impl FnOnce(&Configuration) -> Result<Comms>,
        beside: impl FnOnce(&Comms) -> Result<Option<Arc<Side>>>,
    ) -> Result<()> {
        self.lifecycle.configure(configuration, |c| {
            let comms = if c.world_size == 1 {
                Comms::alone()
            } else {
                require_unstuck()?;
                meet(c)?
            };
            self.start(c, comms, beside)
        })
    }

    /// Makes the engine of a new configuration, over communicators that are there.
    fn start(
        &self,
        c: &Configuration,
        comms: Comms,
        beside: impl FnOnce(&Comms) -> Result<Option<Arc<Side>>>,
    ) -> Result<Arc<Engine>> {
        let place = Place {
            rank: c.rank,
            world: c.world_size,
            epoch: c.epoch.0,
        };
        let side = beside(&comms)?;
        let channel = (c.world_size > 1).then(|| rendezvous::channel(c));
        let tally = match &channel {
            Some(channel) if self.settings.beside && side.is_none() => Tally::agree(c, channel)?,
            _ => None,
        };
        let parts = Parts {
            comms,
            channel,
            counters: self.counters.clone(),
            counted: self.settings.counted,
            tally,
            side,
        };
        Engine::start(place, parts)
    }

    /// Splits `group`, which is this member's: the configuration and communicators of the part in which this rank is.
    pub(crate) fn split(
        &self,
        group: &dyn ProcessGroup,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<(Configuration, Comms)>> {
        let (engine, parent) = self.lifecycle.configured().map_err(|e| e.with_op("split"))?;
        let alone = parent.world_size == 1;
        let split = Split::agree(group, parent, color, key, deadline)?;
        let child = split.child(deadline);
        let comms = if alone {
            child.is_some().then(Comms::alone)
        } else {
            // oneCCL reserves some colours for itself: it gets their places in the sorted list.
            let dense = color
                .and_then(|c| split.colors().binary_search(&c).ok())
                .and_then(|c| u32::try_from(c).ok());
            let (rank, world) = child.as_ref().map_or((0, 1), |c| (c.rank, c.world_size));
            engine.split(dense, rank, world, deadline)?
        };
        Ok(child.zip(comms))
    }

    /// Configures the part of a [`split`](Self::split).
    pub(crate) fn adopt(
        &self,
        configuration: Configuration,
        comms: Comms,
        beside: impl FnOnce(&Comms) -> Result<Option<Arc<Side>>>,
    ) -> Result<()> {
        self.lifecycle
            .configure(configuration, |c| self.start(c, comms, beside))
    }

    /// The engine that is to run `op`, and until when; or `op` is refused, for what `check` says or because there is none.
    pub(crate) fn admit(
        &self,
        op: Checked,
        deadline: Option<Instant>,
        check: impl FnOnce(&Collective) -> Result<()>,
    ) -> Result<(Arc<Engine>, Collective, Instant), Box<Rejected>> {
        let op = op.into_inner();
        match check(&op).and_then(|()| self.lifecycle.engine()) {
            Ok(engine) => {
                let deadline = deadline.unwrap_or_else(|| deadline_in(self.settings.timeout));
                Ok((engine, op, deadline))
            }
            Err(error) => Err(refused(error, op)),
        }
    }
}

/// An operation that does not begin.
pub(crate) fn refused(error: Error, op: Collective) -> Box<Rejected> {
    let error = error.with_op(op.kind().name());
    Box::new(Rejected { error, op })
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
