//! Groups that a world makes against the one suite: `new_group` may lose nothing of what the backend does, split or not.
//!
//! `OXCCL_TEST_WORLD` names the backend: gloo with ranks as processes (the default), isolated oneCCL (`xccl`), or nccl over the stand-in (`nccl`).
//! Over the latter two the cases that have messages run again, with gloo to match them. `OXCCL_SPLIT_GROUPS` says whether the groups are split off the world's, as it does for programs.

#[path = "../../backend-nccl/tests/standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

// Link the backends, which register themselves.
use backend_gloo as _;
use backend_nccl as _;
use backend_xccl as _;
use conformance::{Limit, Mode, Part, Plan};
use ftcore::{
    Capabilities, Checked, Completion, Configuration, Device, DeviceKind, Epoch, Error, ErrorKind, Failed,
    Feature, GroupInfo, GroupOptions, PrefixStore, ProcessGroup, Registry, Rejected, Result, SubmitOptions,
    Work, Wrapper,
};
use isolate::{IsolateOptions, IsolatedGroup};
use oxccl_world::{BackendSpec, GroupSpec, World, WorldOptions};

/// Configured, it is the group of all ranks that a world of its own has made.
struct ThroughWorld {
    options: WorldOptions,
    capabilities: Capabilities,
    /// Stands for it until then.
    unconfigured: Box<dyn ProcessGroup>,
    made: OnceLock<Made>,
}

struct Made {
    world: World,
    group: Box<dyn ProcessGroup>,
    epoch: Epoch,
}

impl ThroughWorld {
    fn new(options: WorldOptions) -> Result<Self> {
        let unconfigured = options.group("conformance")?;
        let mut capabilities = unconfigured.capabilities().clone();
        // A world is configured once.
        capabilities.features = capabilities.features.without(Feature::Reconfigure);
        Ok(Self {
            options,
            capabilities,
            unconfigured,
            made: OnceLock::new(),
        })
    }

    fn group(&self) -> &dyn ProcessGroup {
        self.made.get().map_or(&*self.unconfigured, |made| &*made.group)
    }
}

impl Wrapper for ThroughWorld {
    fn inner(&self) -> &dyn ProcessGroup {
        self.group()
    }

    fn info(&self) -> GroupInfo {
        let epoch = self.made.get().map(|made| made.epoch);
        let info = self.group().info();
        GroupInfo {
            epoch: epoch.unwrap_or(info.epoch),
            ..info
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, c: Configuration) -> Result<()> {
        if self.made.get().is_some() {
            return Err(Error::new(ErrorKind::InvalidState, "a world is configured once"));
        }
        // Each world has keys of its own, as each epoch of a group has.
        let store = Arc::new(PrefixStore::new(c.store, format!("{}/{}", c.prefix, c.epoch.0)));
        let options = WorldOptions {
            cancel: c.cancel,
            ..self.options.clone()
        };
        let world = World::with_store(store, c.rank, c.world_size, options, c.deadline)?;
        let all: Vec<u32> = (0..c.world_size).collect();
        let group = world.new_group(&all, &GroupSpec::default(), c.deadline)?;
        let group = group.ok_or_else(|| Error::new(ErrorKind::Internal, "no group of all ranks"))?;
        let epoch = c.epoch;
        let _ = self.made.set(Made { world, group, epoch });
        Ok(())
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.group().submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.group().execute(op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.group().split(color, key, deadline)
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        let ended = self.group().shutdown(deadline);
        let world = self.made.get().map(|made| made.world.shutdown(deadline));
        ended.and(world.unwrap_or(Ok(())))
    }
}

fn make(backend: &str, device: &Device, options: GroupOptions) -> Result<Box<dyn ProcessGroup>> {
    let mut wanted = WorldOptions {
        backends: backend.parse::<BackendSpec>()?,
        device: device.clone(),
        options,
        ..WorldOptions::default()
    };
    if backend.starts_with("xccl") {
        wanted.make = Arc::new(|backend, device, options| {
            if backend != "xccl" {
                return Registry::global().create(backend, device, options);
            }
            Ok(Box::new(IsolatedGroup::new(IsolateOptions {
                options: options.clone(),
                ..IsolateOptions::new(backend, device.clone())
            })?))
        });
    }
    Ok(Box::new(ThroughWorld::new(wanted)?))
}

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    let backend = std::env::var("OXCCL_TEST_WORLD").unwrap_or_else(|_| "gloo".to_string());
    let (kind, modes) = match &*backend {
        "nccl" => {
            standin::or_restart(&[]);
            (DeviceKind::Cuda, [Mode::Threads])
        }
        "xccl" => (DeviceKind::Cpu, [Mode::Threads]),
        _ => (DeviceKind::Cpu, [Mode::Processes]),
    };
    let plan = |backend: String| {
        let make = Arc::new(move |device: &Device, options| make(&backend, device, options));
        Plan {
            lasting: true,
            limit: Limit::unless_long(
                2,
                "larger worlds differ only in the backend, which has rows of its own; OXCCL_LONG=1 runs them",
            ),
            ..Plan::new(Device::new(kind.clone(), 0), &modes, make)
        }
    };
    // gloo matches its messages itself.
    let matched = (backend != "gloo").then(|| Plan {
        part: Some(Part::messages("matched::")),
        ..plan(format!("{backend},messages:gloo"))
    });
    plan(backend).run_with(matched.as_slice())
}
