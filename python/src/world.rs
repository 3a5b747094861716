//! `init` and the group of all ranks.

use std::sync::Arc;

use oxccl::core::{Device, DeviceKind, Error, GroupOptions, Registry, Result, deadline_in};
use oxccl::isolate::{self, IsolateOptions};
use oxccl::world::{self, Place, WorldOptions};
use pyo3::prelude::*;

use crate::errors::Raise;
use crate::group::{Group, Handle, Inner};
use crate::interrupt::apart;
use crate::options::{self, Given, Limit};
use crate::process::{self, Crossing};

/// The group of all ranks of a job, from which other groups are made.
#[pyclass(extends = Group, frozen, module = "oxccl")]
pub(crate) struct World {
    handle: Arc<Handle>,
    local_rank: Option<u32>,
    /// How long making a group may take if the call does not say.
    timeout: f64,
}

/// Meets the other ranks and connects. Without arguments the launcher's variables say who this is (torchrun, MPI, Slurm).
#[pyfunction]
#[pyo3(signature = (address=None, *, rank=None, world_size=None, backend=None, device="cpu", timeout=options::MINUTE, isolated=false, options=None))]
#[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
pub(crate) fn init(
    py: Python<'_>,
    address: Option<&str>,
    rank: Option<u32>,
    world_size: Option<u32>,
    backend: Option<&str>,
    device: &str,
    timeout: Limit,
    isolated: bool,
    options: Option<Given>,
) -> PyResult<Py<World>> {
    process::may_make_groups(py)?;
    let place = place(address, rank, world_size).or_raise(py)?;
    let wanted = wanted(py, backend, device, timeout, isolated, options)?;
    let deadline = options::deadline(timeout.or(60.0)).or_raise(py)?;
    let local_rank = place.local_rank;
    let world = apart(py, move || world::World::init(&place, wanted, deadline))?;
    let group = Group::new(Inner::World(Box::new(world)));
    let world = World {
        handle: group.handle().clone(),
        local_rank,
        timeout: timeout.or(60.0),
    };
    Py::new(py, PyClassInitializer::from(group).add_subclass(world))
}

/// A group of a backend that has met no rank yet: `Group.configure` connects it, again and again.
#[pyfunction]
#[pyo3(signature = (*, backend=None, device="cpu", timeout=options::MINUTE, isolated=false, options=None))]
pub(crate) fn unconfigured(
    py: Python<'_>,
    backend: Option<&str>,
    device: &str,
    timeout: Limit,
    isolated: bool,
    options: Option<Given>,
) -> PyResult<Group> {
    process::may_make_groups(py)?;
    let wanted = wanted(py, backend, device, timeout, isolated, options)?;
    let group = apart(py, move || wanted.group("group"))?;
    Ok(Group::new(Inner::Group(Arc::from(group))))
}

fn wanted(
    py: Python<'_>,
    backend: Option<&str>,
    device: &str,
    timeout: Limit,
    isolated: bool,
    options: Option<Given>,
) -> PyResult<WorldOptions> {
    let helper = if isolated { helper(py)? } else { None };
    Ok(WorldOptions {
        backends: backend.unwrap_or_default().parse().or_raise(py)?,
        device: parse_device(device).or_raise(py)?,
        options: options::group(timeout, options).or_raise(py)?,
        make: Arc::new(move |name, device, options| {
            if isolated {
                in_a_child(name, device, options, helper.as_deref())
            } else {
                Registry::global().create(name, device, options)
            }
        }),
        ..WorldOptions::default()
    })
}

fn place(address: Option<&str>, rank: Option<u32>, world_size: Option<u32>) -> Result<Place> {
    match (address, rank, world_size) {
        (None | Some("env://"), None, None) => Place::from_env(),
        (Some(address), None, None) => Place::from_url(address),
        (Some(address), Some(rank), Some(size)) if !address.contains('?') => {
            Place::from_url(&format!("{address}?rank={rank}&world_size={size}"))
        }
        _ => Err(Error::invalid(
            "rank and world_size go together with an address that does not name them, such as tcp://HOST:PORT",
        )),
    }
}

fn parse_device(text: &str) -> Result<Device> {
    let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
    let kind: DeviceKind = kind.parse()?;
    let index = index
        .parse()
        .map_err(|_| Error::invalid(format!("'{text}' is no device; write cpu, or KIND:INDEX")))?;
    Ok(if kind == DeviceKind::Cpu {
        Device::CPU
    } else {
        Device::new(kind, index)
    })
}

/// The program that children of isolated groups run; `None` if the environment names one.
fn helper(py: Python<'_>) -> PyResult<Option<String>> {
    let _crossing = Crossing::begin().or_raise(py)?;
    py.import("oxccl._isolate")?.call_method0("helper")?.extract()
}

fn in_a_child(
    name: &str,
    device: &Device,
    options: &GroupOptions,
    helper: Option<&str>,
) -> Result<Box<dyn oxccl::core::ProcessGroup>> {
    let backend = oxccl::backend::find(Some(name), device)?;
    let template = IsolateOptions {
        helper: helper.map_or(isolate::Helper::Auto, |path| {
            isolate::Helper::Program(path.into())
        }),
        ..IsolateOptions::new(backend.name.clone(), device.clone())
    };
    isolate::wrap(&backend, template).create(device, options)
}

impl World {
    /// In what a new group differs from the world's.
    fn spec(
        &self,
        backend: Option<&str>,
        timeout: Option<f64>,
        given: Option<Given>,
        name: Option<String>,
    ) -> Result<world::GroupSpec> {
        let limit = Limit(Some(timeout.unwrap_or(self.timeout)));
        Ok(world::GroupSpec {
            backends: backend.map(str::parse).transpose()?,
            options: given
                .map(|given| options::group(limit, Some(given)))
                .transpose()?,
            timeout: timeout.map(options::duration).transpose()?,
            name,
            ..world::GroupSpec::default()
        })
    }

    fn make(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        make: impl FnOnce(&world::World, std::time::Instant) -> Result<Option<Box<dyn oxccl::core::ProcessGroup>>>
        + Send
        + 'static,
    ) -> PyResult<Option<Group>> {
        self.handle.is_at_home().or_raise(py)?;
        let limit = options::duration(timeout.unwrap_or(self.timeout)).or_raise(py)?;
        let handle = self.handle.clone();
        let made = apart(py, move || match handle.world() {
            Some(world) => make(world, deadline_in(limit)),
            None => Err(Error::invalid("this group is no world")),
        })?;
        Ok(made.map(|group| Group::new(Inner::Group(Arc::from(group)))))
    }
}

#[pymethods]
impl World {
    /// This rank's number among those of its host, where the launcher says so.
    #[getter]
    fn local_rank(&self) -> Option<u32> {
        self.local_rank
    }

    /// A group of `ranks`, in which rank `ranks[i]` is rank i; `None` on ranks that are not among them. A call of all ranks, with the same arguments.
    #[pyo3(signature = (ranks, *, backend=None, timeout=None, options=None, name=None))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn new_group(
        &self,
        py: Python<'_>,
        ranks: Vec<u32>,
        backend: Option<&str>,
        timeout: Option<f64>,
        options: Option<Given>,
        name: Option<String>,
    ) -> PyResult<Option<Group>> {
        let spec = self.spec(backend, timeout, options, name).or_raise(py)?;
        self.make(py, timeout, move |world, deadline| {
            world.new_group(&ranks, &spec, deadline)
        })
    }

    /// One group for each list of ranks; gives this rank's, or `None` if it is in no list. A call of all ranks, with the same arguments.
    #[pyo3(signature = (partition, *, backend=None, timeout=None, options=None, name=None))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn split_group(
        &self,
        py: Python<'_>,
        partition: Vec<Vec<u32>>,
        backend: Option<&str>,
        timeout: Option<f64>,
        options: Option<Given>,
        name: Option<String>,
    ) -> PyResult<Option<Group>> {
        let spec = self.spec(backend, timeout, options, name).or_raise(py)?;
        self.make(py, timeout, move |world, deadline| {
            world.split_group(&partition, &spec, deadline)
        })
    }

    /// Connects a group that has met no rank yet among `ranks` (all, if none are named), in that order: a quantised group, or one of another
    /// backend. False on ranks that are not among them. A call of all ranks, with the same list.
    #[pyo3(signature = (group, ranks=None, *, timeout=None))]
    fn connect(
        &self,
        py: Python<'_>,
        group: &Group,
        ranks: Option<Vec<u32>>,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        self.handle.is_at_home().or_raise(py)?;
        let limit = options::duration(timeout.unwrap_or(self.timeout)).or_raise(py)?;
        let (world, child) = (self.handle.clone(), group.handle().clone());
        apart(py, move || {
            let Some(world) = world.world() else {
                return Err(Error::invalid("this group is no world"));
            };
            let ranks = ranks.unwrap_or_else(|| (0..world.world_size()).collect());
            let is_in = world.connect(child.group(), &ranks, deadline_in(limit))?;
            child.configured();
            Ok(is_in)
        })
    }
}
