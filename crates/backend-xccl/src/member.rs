//! What a group is on any memory: its options, counters and lifecycle, how it is configured and split, when an operation is due.
//!
//! `group` (host memory) and `xpu::group` make them, and say what they offer.

use std::sync::Arc;
use std::time::Instant;

use ftcore::agreement::Agreement;
use ftcore::engine::{Counters, Place};
use ftcore::lifecycle::{Lifecycle, Split};
use ftcore::peers::{self, Meeting};
use ftcore::{
    Capabilities, Checked, Collective, Configuration, Device, Error, ErrorKind, Event, GroupInfo,
    ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, deadline_in, wrong_device,
};
use oneccl_sys::Library;

use crate::call::{self, Terms};
use crate::comms::Comms;
use crate::driver::{Engine, Parts, XcclDriver};
use crate::options::Settings;
use crate::raw::exit;
use crate::rendezvous;
use crate::tally::Tally;
use crate::xpu::comm::Side;
use crate::xpu::device::Xpu;

/// A group, on either kind of memory.
pub(crate) struct Member {
    library: &'static Library,
    settings: Settings,
    capabilities: Capabilities,
    /// Whose memory it is; `None`: the host's.
    xpu: Option<Arc<Xpu>>,
    counters: Arc<Counters>,
    lifecycle: Lifecycle<Engine>,
}

impl Member {
    pub(crate) fn new(
        name: String,
        library: &'static Library,
        settings: Settings,
        capabilities: Capabilities,
        xpu: Option<Arc<Xpu>>,
    ) -> Self {
        Self {
            library,
            settings,
            capabilities,
            xpu,
            counters: Arc::default(),
            lifecycle: Lifecycle::new("xccl", name),
        }
    }

    fn device(&self) -> Device {
        self.xpu.as_ref().map_or(Device::CPU, |xpu| xpu.device())
    }

    /// On a device: the side of `comms`, or a new one for those of a world of one.
    fn side(&self, comms: &Comms) -> Result<Option<Arc<Side>>> {
        let made = comms.collectives.side().cloned();
        let new = || self.xpu.as_ref().map(Side::new).transpose();
        made.map_or_else(new, |side| Ok(Some(side)))
    }

    /// Makes the engine of a new configuration, over communicators that are there. If it does not come up, the other ranks are told.
    fn start(&self, c: &Configuration, comms: Comms, meeting: Meeting) -> Result<Arc<Engine>> {
        let (place, store) = (Place::of(c), meeting.store(c));
        let ready = self.side(&comms).and_then(|side| {
            let counts = c.world_size > 1 && self.settings.beside && side.is_none();
            let agree = || Tally::agree(c, &*meeting.cancel(c).over(&store));
            Ok((side, counts.then(agree).transpose()?.flatten()))
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

    /// Splits this group: the configuration and communicators of the part in which this rank is.
    fn divide(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<(Configuration, Comms)>> {
        let (engine, parent) = self.lifecycle.configured().map_err(|e| e.with_op("split"))?;
        let alone = parent.world_size == 1;
        let split = Split::agree(self, parent, color, key, deadline)?;
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

    /// The point after which `op` begins. Refuses memory of another device and a stream behind which it cannot be.
    fn after(&self, op: &Collective, options: &SubmitOptions) -> Result<Option<Arc<dyn Event>>> {
        let stream = options.stream.as_ref();
        if self.xpu.is_none() {
            return match stream.filter(|stream| !stream.device().is_cpu()) {
                Some(stream) => Err(Error::unsupported(format!(
                    "xccl on host memory cannot order itself after a stream on {}",
                    stream.device()
                ))),
                None => Ok(None),
            };
        }
        let own = self.device();
        match op.tensors().into_iter().find(|t| *t.device() != own) {
            Some(tensor) => Err(wrong_device(tensor, &own.to_string())),
            None => stream.map(|stream| stream.record()).transpose(),
        }
    }
}

impl ProcessGroup for Member {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info(self.device())
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        let side = self.xpu.as_ref().map(Side::new).transpose()?;
        let complete = move |made| Comms::complete(made, side.as_ref());
        self.lifecycle.configure(configuration, |c| {
            if c.world_size > 1 {
                require_unstuck()?;
            }
            let terms = self.settings.terms(self.library);
            let (comms, meeting) = rendezvous::connect(c, &terms, self.library, complete)?;
            self.start(c, comms, meeting)
        })
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let ready = self.after(&op, &options);
        match ready.and_then(|after| Ok((after, self.lifecycle.engine()?))) {
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

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let Some((configuration, comms)) = self.divide(color, key, deadline)? else {
            return Ok(None);
        };
        let child = Self::new(
            configuration.name.clone(),
            self.library,
            self.settings.clone(),
            self.capabilities.clone(),
            self.xpu.clone(),
        );
        child.lifecycle.configure(configuration, |c| {
            let meeting = peers::meet(c, &child.settings.terms(child.library))?;
            child.start(c, comms, meeting)
        })?;
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.lifecycle.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.lifecycle.error()
    }

    /// Lets pending work end, and waits a little for the other ranks to leave too.
    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.lifecycle.shutdown(deadline)?;
        if let Ok(engine) = self.lifecycle.engine() {
            engine.driver().wait_left(deadline);
        }
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}

/// Gives a group's type the methods of the [`Member`] in it.
macro_rules! is_a_member {
    ($group:ty) => {
        impl ftcore::Wrapper for $group {
            fn inner(&self) -> &dyn ftcore::ProcessGroup {
                &self.0
            }

            fn submit(
                &self,
                op: ftcore::Checked,
                options: ftcore::SubmitOptions,
            ) -> ftcore::Result<ftcore::Work, Box<ftcore::Rejected>> {
                self.inner().submit(op, options)
            }

            fn execute(
                &self,
                op: ftcore::Checked,
                options: ftcore::SubmitOptions,
            ) -> ftcore::Result<ftcore::Completion, Box<ftcore::Failed>> {
                self.inner().execute(op, options)
            }

            fn split(
                &self,
                color: Option<u32>,
                key: u32,
                deadline: std::time::Instant,
            ) -> ftcore::Result<Option<Box<dyn ftcore::ProcessGroup>>> {
                self.inner().split(color, key, deadline)
            }
        }
    };
}

pub(crate) use is_a_member;

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
