//! What a group is on any memory: its options, counters and lifecycle, how it is configured and split, when an operation is due.
//!
//! `group` (host memory) and `xpu::group` say what differs: how communicators are made there and what the driver has beside them.

use std::sync::Arc;
use std::time::Instant;

use ftcore::agreement::Agreement;
use ftcore::engine::Place;
use ftcore::lifecycle::{Lifecycle, Split};
use ftcore::peers::{self, Meeting};
use ftcore::{
    Capabilities, Checked, Collective, Configuration, Error, ErrorKind, Event, ProcessGroup, Rejected,
    Result, SubmitOptions, Work, deadline_in,
};
use oneccl_sys::Library;

use crate::call::{self, Terms};
use crate::comms::Comms;
use crate::driver::{Engine, Parts, XcclDriver};
use crate::options::Settings;
use crate::raw::comm::Comm;
use crate::raw::exit;
use crate::rendezvous;
use crate::tally::Tally;
use crate::traffic::Counters;
use crate::xpu::comm::Side;

/// What both kinds of group have.
pub(crate) struct Member {
    pub(crate) library: &'static Library,
    pub(crate) settings: Settings,
    pub(crate) capabilities: Capabilities,
    pub(crate) counters: Arc<Counters>,
    pub(crate) lifecycle: Lifecycle<Engine>,
}

impl Member {
    pub(crate) fn new(
        name: String,
        library: &'static Library,
        settings: Settings,
        capabilities: Capabilities,
    ) -> Self {
        Self {
            library,
            settings,
            capabilities,
            counters: Arc::default(),
            lifecycle: Lifecycle::new("xccl", name),
        }
    }

    /// Connects with the other ranks: `complete` makes what the group needs of its first communicator, `beside` what the engine needs beside them.
    pub(crate) fn configure(
        &self,
        configuration: Configuration,
        complete: impl FnOnce(Comm) -> Result<Comms> + Send + 'static,
        beside: impl FnOnce(&Comms) -> Result<Option<Arc<Side>>>,
    ) -> Result<()> {
        self.lifecycle.configure(configuration, |c| {
            if c.world_size > 1 {
                require_unstuck()?;
            }
            let terms = self.settings.terms(self.library);
            let (comms, meeting) = rendezvous::connect(c, &terms, self.library, complete)?;
            self.start(c, comms, meeting, beside)
        })
    }

    /// Makes the engine of a new configuration, over communicators that are there. If it does not come up, the other ranks are told.
    fn start(
        &self,
        c: &Configuration,
        comms: Comms,
        mut meeting: Meeting,
        beside: impl FnOnce(&Comms) -> Result<Option<Arc<Side>>>,
    ) -> Result<Arc<Engine>> {
        let (place, store) = (Place::of(c), rendezvous::store(c));
        let ready = beside(&comms).and_then(|side| {
            let counts = c.world_size > 1 && self.settings.beside && side.is_none();
            let tally = counts.then(|| Tally::agree(c, &*store)).transpose()?.flatten();
            Ok((side, tally))
        });
        let (side, tally) = ready.inspect_err(|error| meeting.fail(error))?;
        let agreement = (c.world_size > 1).then(|| Agreement::new(store, String::new(), place));
        let parts = Parts {
            comms,
            agreement,
            counters: self.counters.clone(),
            counted: self.settings.counted,
            detects: self.settings.detects,
            tally,
            side,
        };
        XcclDriver::start(place, parts, meeting)
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
            call::split(&engine, dense, rank, world, deadline)?
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
        self.lifecycle.configure(configuration, |c| {
            let meeting = peers::meet(c, &self.settings.terms(self.library), None)?;
            self.start(c, comms, meeting, beside)
        })
    }

    /// Queues `op` after the point that `check` gives; or it is refused, for what `check` says or because there is no engine.
    pub(crate) fn submit(
        &self,
        op: Checked,
        options: &SubmitOptions,
        check: impl FnOnce(&Collective) -> Result<Option<Arc<dyn Event>>>,
    ) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let ready = check(&op).and_then(|after| Ok((after, self.lifecycle.engine()?)));
        match ready {
            Ok((after, engine)) => {
                let terms = Terms {
                    contribute: options.contribute,
                    deadline: options
                        .deadline
                        .unwrap_or_else(|| deadline_in(self.settings.timeout)),
                    after,
                };
                call::submit(&engine, op, terms)
            }
            Err(error) => {
                let error = error.with_op(op.kind().name());
                Err(Box::new(Rejected { error, op }))
            }
        }
    }

    /// Lets pending work end, and waits a little for the other ranks to leave too.
    pub(crate) fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.lifecycle.shutdown(deadline)?;
        if let Ok(engine) = self.lifecycle.engine() {
            engine.driver().wait_left(deadline);
        }
        Ok(())
    }
}

/// Refuses if a thread of this process is stuck in oneCCL: a new communicator beside one has been seen to return wrong sums.
fn require_unstuck() -> Result<()> {
    match exit::stuck() {
        0 => Ok(()),
        n => Err(Error::new(
            ErrorKind::InvalidState,
            format!(
                "{n} thread(s) of this process are stuck in a oneCCL call that cannot be cancelled; oneCCL is not safe to use \
                 beside them: replace the process (an isolated group does that by itself)"
            ),
        )),
    }
}
