//! A group of ranks and its operations: Python arguments to a `Collective`, which then runs here and now or comes back as a `Work`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oxccl::core::{
    Collective, Completion, Configuration, Epoch, Error, Failed, OpKind, ProcessGroup, ProcessGroupExt,
    Result, deadline_in,
};
use oxccl::world;
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::{self, Raise, Refused};
use crate::interrupt::{apart, blocking};
use crate::lend::{Access, is_list, list, one, one_or_list};
use crate::memory::{Memory, Shape};
use crate::options::{self, Limit, Reduction};
use crate::process::{self, detached};
use crate::raw::fork;
use crate::raw::holder::{drop_attached, give_back_waiting};
use crate::store;
use crate::table::{Capabilities, Traffic};
use crate::work::Work;

/// A group that Python holds: its end, if the process was forked since, is its parent's affair.
pub(crate) struct Handle {
    inner: Arc<Inner>,
    /// As of the present configuration.
    rank: AtomicU32,
    /// How long an operation may take whose call does not say, in the place of the group's own time; the bits of seconds, 0 for none.
    limit: AtomicU64,
    /// The count of forks when it was made.
    born: u32,
}

pub(crate) enum Inner {
    World(Box<world::World>),
    Group(Arc<dyn ProcessGroup>),
}

impl Handle {
    pub(crate) fn group(&self) -> &dyn ProcessGroup {
        match &*self.inner {
            Inner::World(world) => world.group(),
            Inner::Group(group) => &**group,
        }
    }

    /// The group itself, to be kept by another one around it; `None` for a world.
    pub(crate) fn shared(&self) -> Option<Arc<dyn ProcessGroup>> {
        match &*self.inner {
            Inner::World(_) => None,
            Inner::Group(group) => Some(group.clone()),
        }
    }

    pub(crate) fn world(&self) -> Option<&world::World> {
        match &*self.inner {
            Inner::World(world) => Some(world),
            Inner::Group(_) => None,
        }
    }

    fn rank(&self) -> u32 {
        self.rank.load(Ordering::Relaxed)
    }

    fn limit(&self) -> Option<f64> {
        let bits = self.limit.load(Ordering::Relaxed);
        (bits != 0).then(|| f64::from_bits(bits))
    }

    /// Notes the rank that the group has now.
    pub(crate) fn configured(&self) {
        self.rank.store(self.group().info().rank, Ordering::Relaxed);
    }

    pub(crate) fn is_at_home(&self) -> Result<()> {
        process::is_at_home(self.born, "the group").map_err(|e| e.with_rank(self.rank()))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.born != fork::count() {
            // It would say on the parent's connections that the group has ended.
            std::mem::forget(self.inner.clone());
        }
    }
}

/// Each rank's values times `factor`, then the sum.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct PremulSum {
    pub(crate) factor: f64,
}

#[pymethods]
impl PremulSum {
    #[new]
    fn new(factor: f64) -> Self {
        Self { factor }
    }

    fn __repr__(&self) -> String {
        format!("PremulSum({})", self.factor)
    }
}

/// A send in a batch.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct Send {
    tensor: Py<PyAny>,
    peer: u32,
    tag: u32,
}

#[pymethods]
impl Send {
    #[new]
    #[pyo3(signature = (tensor, peer, tag=0))]
    fn new(tensor: Py<PyAny>, peer: u32, tag: u32) -> Self {
        Self { tensor, peer, tag }
    }
}

/// A receive in a batch; without a peer from the first that sends with the tag.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct Recv {
    tensor: Py<PyAny>,
    peer: Option<u32>,
    tag: u32,
}

#[pymethods]
impl Recv {
    #[new]
    #[pyo3(signature = (tensor, peer=None, tag=0))]
    fn new(tensor: Py<PyAny>, peer: Option<u32>, tag: u32) -> Self {
        Self { tensor, peer, tag }
    }
}

/// What every operation may be told besides its arguments.
struct Call {
    timeout: Option<Limit>,
    async_op: bool,
    contribute: bool,
}

impl Call {
    fn of(timeout: Option<Limit>, async_op: bool) -> Self {
        Self {
            timeout,
            async_op,
            contribute: true,
        }
    }

    fn reducing(timeout: Option<Limit>, async_op: bool, contribute: bool) -> Self {
        Self {
            timeout,
            async_op,
            contribute,
        }
    }
}

/// How long after its deadline an operation that was submitted has ended for certain.
const MARGIN: Duration = Duration::from_secs(5);
/// The longest time-out that a group can have by default, for the wait for a work whose call named none.
const A_DAY: Duration = Duration::from_secs(24 * 3600);

/// Some or all ranks of a job, which call operations together. All methods may be called from any thread.
#[pyclass(subclass, frozen, weakref, module = "oxccl")]
pub(crate) struct Group {
    handle: Arc<Handle>,
}

impl Group {
    pub(crate) fn new(inner: Inner) -> Self {
        let handle = Handle {
            inner: Arc::new(inner),
            rank: AtomicU32::new(0),
            limit: AtomicU64::new(0),
            born: fork::count(),
        };
        let rank = handle.group().info().rank;
        handle.rank.store(rank, Ordering::Relaxed);
        let handle = Arc::new(handle);
        process::note(&handle);
        Self { handle }
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    fn run(
        &self,
        py: Python<'_>,
        kind: OpKind,
        call: Call,
        make: impl FnOnce() -> Result<Collective, Refused>,
    ) -> PyResult<Py<PyAny>> {
        give_back_waiting(py);
        let handle = &self.handle;
        let refused = |refused: Refused| refused.raise(py, kind.name(), handle.rank());
        handle.is_at_home().map_err(|e| refused(e.into()))?;
        let timeout = call.timeout.and_then(|limit| limit.0).or_else(|| handle.limit());
        let options = options::submit(timeout, call.contribute).map_err(|e| refused(e.into()))?;
        let op = make().map_err(refused)?;
        let group = handle.group();
        if call.async_op {
            let latest = options.deadline.unwrap_or_else(|| deadline_in(A_DAY)) + MARGIN;
            let work = detached(py, || group.run(op, options)).map_err(|rejected| {
                let error = self.named(rejected.error.clone());
                drop_attached(py, rejected);
                errors::raise(py, &error)
            })?;
            let work = Work::new(work, handle.rank(), latest, handle.born);
            return Ok(Py::new(py, work)?.into_any());
        }
        let done = blocking(py, handle, || group.run_blocking(op, options))?;
        self.completed(py, kind, done)
    }

    fn completed(
        &self,
        py: Python<'_>,
        kind: OpKind,
        done: Result<Completion, Box<Failed>>,
    ) -> PyResult<Py<PyAny>> {
        match done {
            Ok(completion) => {
                let source = completion.source;
                drop_attached(py, completion);
                if kind == OpKind::Recv {
                    return Ok(source.into_pyobject(py)?.unbind());
                }
                Ok(py.None())
            }
            Err(failed) => {
                let error = self.named(failed.error.clone());
                drop_attached(py, failed);
                // Aborted for a signal: its handler raises.
                py.check_signals()?;
                Err(errors::raise(py, &error))
            }
        }
    }

    fn named(&self, error: Error) -> Error {
        if error.context().rank.is_some() {
            error
        } else {
            error.with_rank(self.handle.rank())
        }
    }
}

/// Inputs and outputs that go together one by one.
fn pairs(
    input: &Bound<'_, PyAny>,
    output: &Bound<'_, PyAny>,
) -> Result<Vec<(oxccl::core::Tensor, oxccl::core::Tensor)>, Refused> {
    if is_list(input) != is_list(output) {
        return Err(Error::invalid("input and output are two tensors or two lists of them").into());
    }
    let inputs = one_or_list(input, "input", Access::Reads)?;
    let outputs = one_or_list(output, "output", Access::Writes)?;
    if inputs.len() != outputs.len() {
        let text = format!(
            "{} inputs and {} outputs; they go together one by one",
            inputs.len(),
            outputs.len()
        );
        return Err(Error::invalid(text).into());
    }
    Ok(inputs.into_iter().zip(outputs).collect())
}

fn optional(
    object: Option<&Bound<'_, PyAny>>,
    what: &str,
    access: Access,
) -> Result<Vec<oxccl::core::Tensor>, Refused> {
    object.map_or(Ok(Vec::new()), |object| list(object, what, access))
}

#[pymethods]
impl Group {
    /// This process's rank in the group.
    #[getter]
    fn rank(&self) -> u32 {
        self.handle.rank()
    }

    /// The number of ranks.
    #[getter]
    fn world_size(&self) -> u32 {
        self.handle.group().info().world_size
    }

    /// The backend's name.
    #[getter]
    fn backend(&self) -> String {
        self.handle.group().info().backend.to_string()
    }

    /// The group's name, for messages.
    #[getter]
    fn name(&self) -> String {
        self.handle.group().info().name.to_string()
    }

    /// The number of the group's configuration.
    #[getter]
    fn epoch(&self) -> u64 {
        self.handle.group().info().epoch.0
    }

    /// The device that the group serves.
    #[getter]
    fn device(&self) -> String {
        self.handle.group().info().device.to_string()
    }

    /// The first failure, or `None`. After one every operation is refused.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.handle.is_at_home().or_raise(py)?;
        let error = self.handle.group().error();
        error
            .map(|error| errors::exception(py, &self.named(error)))
            .transpose()
    }

    /// What the group offers.
    fn capabilities(&self) -> Capabilities {
        self.handle.group().capabilities().clone().into()
    }

    /// Bytes moved so far.
    fn traffic(&self) -> Traffic {
        let moved = self.handle.group().traffic();
        Traffic {
            sent: moved.sent,
            received: moved.received,
        }
    }

    /// Memory of zeros that the other ranks of this host read in place, where there is such memory.
    #[pyo3(signature = (shape, dtype="f32"))]
    fn alloc(&self, py: Python<'_>, shape: Shape, dtype: &str) -> PyResult<Memory> {
        self.handle.is_at_home().or_raise(py)?;
        Memory::of(self.handle.group(), shape, dtype)
            .map_err(|e| e.with_op("alloc").with_rank(self.handle.rank()))
            .or_raise(py)
    }

    /// Meets the other ranks of `epoch` in `store` and connects. Operations of an earlier epoch end as aborted.
    #[pyo3(signature = (store, rank, world_size, *, epoch=1, prefix="oxccl", name="group", timeout=options::MINUTE))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn configure(
        &self,
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: u32,
        world_size: u32,
        epoch: u64,
        prefix: &str,
        name: &str,
        timeout: Limit,
    ) -> PyResult<()> {
        self.handle.is_at_home().or_raise(py)?;
        let configuration = Configuration {
            store: store::any(store)?,
            prefix: prefix.to_owned(),
            name: name.to_owned(),
            epoch: Epoch(epoch),
            rank,
            world_size,
            deadline: options::deadline(timeout.or(60.0)).or_raise(py)?,
            cancel: Default::default(),
        };
        let handle = self.handle.clone();
        apart(py, move || handle.group().configure(configuration))?;
        self.handle.rank.store(rank, Ordering::Relaxed);
        Ok(())
    }

    /// Every tensor becomes the reduction over all ranks, in place.
    #[pyo3(signature = (tensors, op=Reduction::default(), *, timeout=None, async_op=false, contribute=true))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        op: Reduction,
        timeout: Option<Limit>,
        async_op: bool,
        contribute: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(
            py,
            OpKind::AllReduce,
            Call::reducing(timeout, async_op, contribute),
            || {
                Ok(Collective::AllReduce {
                    tensors: one_or_list(tensors, "tensors", Access::Writes)?,
                    op: op.get()?,
                })
            },
        )
    }

    /// Every rank's tensors become the root's.
    #[pyo3(signature = (tensors, root, *, timeout=None, async_op=false))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        root: u32,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Broadcast, Call::of(timeout, async_op), || {
            let access = if root == self.handle.rank() {
                Access::Reads
            } else {
                Access::Writes
            };
            Ok(Collective::Broadcast {
                tensors: one_or_list(tensors, "tensors", access)?,
                root,
            })
        })
    }

    /// The root's tensor becomes the reduction; the others keep theirs.
    #[pyo3(signature = (tensor, root, op=Reduction::default(), *, timeout=None, async_op=false, contribute=true))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn reduce(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        root: u32,
        op: Reduction,
        timeout: Option<Limit>,
        async_op: bool,
        contribute: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(
            py,
            OpKind::Reduce,
            Call::reducing(timeout, async_op, contribute),
            || {
                Ok(Collective::Reduce {
                    tensor: one(tensor, "tensor", Access::Writes)?,
                    op: op.get()?,
                    root,
                })
            },
        )
    }

    /// `outputs[r]` becomes rank r's `input`; sizes may differ between ranks.
    #[pyo3(signature = (input, outputs, *, timeout=None, async_op=false))]
    fn all_gather(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        outputs: &Bound<'_, PyAny>,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::AllGather, Call::of(timeout, async_op), || {
            Ok(Collective::AllGather {
                input: one(input, "input", Access::Reads)?,
                outputs: list(outputs, "outputs", Access::Writes)?,
            })
        })
    }

    /// `output` becomes the inputs of all ranks, one after the other. Two lists of tensors count as one operation.
    #[pyo3(signature = (input, output, *, timeout=None, async_op=false))]
    fn all_gather_into(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::AllGatherInto, Call::of(timeout, async_op), || {
            Ok(Collective::AllGatherInto {
                pairs: pairs(input, output)?,
            })
        })
    }

    /// Part r of every tensor, which has one of the same size for each rank, becomes rank r's.
    #[pyo3(signature = (tensors, *, timeout=None, async_op=false))]
    fn all_gather_in_place(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::AllGatherInPlace, Call::of(timeout, async_op), || {
            Ok(Collective::AllGatherInPlace {
                tensors: one_or_list(tensors, "tensors", Access::Writes)?,
            })
        })
    }

    /// On the root `outputs[r]` becomes rank r's `input`; the others pass no outputs.
    #[pyo3(signature = (input, outputs=None, *, root, timeout=None, async_op=false))]
    fn gather(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        outputs: Option<&Bound<'_, PyAny>>,
        root: u32,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Gather, Call::of(timeout, async_op), || {
            Ok(Collective::Gather {
                input: one(input, "input", Access::Reads)?,
                outputs: optional(outputs, "outputs", Access::Writes)?,
                root,
            })
        })
    }

    /// `output` becomes the root's `inputs[own rank]`; the others pass no inputs.
    #[pyo3(signature = (inputs=None, *, output, root, timeout=None, async_op=false))]
    fn scatter(
        &self,
        py: Python<'_>,
        inputs: Option<&Bound<'_, PyAny>>,
        output: &Bound<'_, PyAny>,
        root: u32,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Scatter, Call::of(timeout, async_op), || {
            Ok(Collective::Scatter {
                inputs: optional(inputs, "inputs", Access::Reads)?,
                output: one(output, "output", Access::Writes)?,
                root,
            })
        })
    }

    /// `output` becomes the reduction over all ranks of their `inputs[own rank]`; sizes may differ between parts.
    #[pyo3(signature = (inputs, output, op=Reduction::default(), *, timeout=None, async_op=false, contribute=true))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        inputs: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        op: Reduction,
        timeout: Option<Limit>,
        async_op: bool,
        contribute: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(
            py,
            OpKind::ReduceScatter,
            Call::reducing(timeout, async_op, contribute),
            || {
                Ok(Collective::ReduceScatter {
                    inputs: list(inputs, "inputs", Access::Reads)?,
                    output: one(output, "output", Access::Writes)?,
                    op: op.get()?,
                })
            },
        )
    }

    /// `output` becomes this rank's part of the reduction of `input`. Two lists of tensors count as one operation.
    #[pyo3(signature = (input, output, op=Reduction::default(), *, timeout=None, async_op=false, contribute=true))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn reduce_scatter_into(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        op: Reduction,
        timeout: Option<Limit>,
        async_op: bool,
        contribute: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(
            py,
            OpKind::ReduceScatterInto,
            Call::reducing(timeout, async_op, contribute),
            || {
                Ok(Collective::ReduceScatterInto {
                    pairs: pairs(input, output)?,
                    op: op.get()?,
                })
            },
        )
    }

    /// This rank's part of every tensor, which has one of the same size for each rank, becomes the reduction of it; what is in the others
    /// afterwards is undefined.
    #[pyo3(signature = (tensors, op=Reduction::default(), *, timeout=None, async_op=false, contribute=true))]
    fn reduce_scatter_in_place(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        op: Reduction,
        timeout: Option<Limit>,
        async_op: bool,
        contribute: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(
            py,
            OpKind::ReduceScatterInPlace,
            Call::reducing(timeout, async_op, contribute),
            || {
                Ok(Collective::ReduceScatterInPlace {
                    tensors: one_or_list(tensors, "tensors", Access::Writes)?,
                    op: op.get()?,
                })
            },
        )
    }

    /// `outputs[r]` becomes rank r's `inputs[own rank]`; sizes may differ.
    #[pyo3(signature = (inputs, outputs, *, timeout=None, async_op=false))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        inputs: &Bound<'_, PyAny>,
        outputs: &Bound<'_, PyAny>,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::AllToAll, Call::of(timeout, async_op), || {
            Ok(Collective::AllToAll {
                inputs: list(inputs, "inputs", Access::Reads)?,
                outputs: list(outputs, "outputs", Access::Writes)?,
            })
        })
    }

    /// As `all_to_all` on one tensor each; splits are in elements, one per rank, and none mean even ones.
    #[pyo3(signature = (input, output, *, input_splits=None, output_splits=None, timeout=None, async_op=false))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn all_to_all_into(
        &self,
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        input_splits: Option<Vec<usize>>,
        output_splits: Option<Vec<usize>>,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::AllToAllInto, Call::of(timeout, async_op), || {
            Ok(Collective::AllToAllInto {
                input: one(input, "input", Access::Reads)?,
                output: one(output, "output", Access::Writes)?,
                input_splits: input_splits.unwrap_or_default(),
                output_splits: output_splits.unwrap_or_default(),
            })
        })
    }

    /// Sends to `peer`; done when the memory may be reused.
    #[pyo3(signature = (tensor, peer, tag=0, *, timeout=None, async_op=false))]
    fn send(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        peer: u32,
        tag: u32,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Send, Call::of(timeout, async_op), || {
            Ok(Collective::Send {
                tensor: one(tensor, "tensor", Access::Reads)?,
                peer,
                tag,
            })
        })
    }

    /// Receives from `peer`, or from the first that sends with the tag. Gives the sender's rank.
    #[pyo3(signature = (tensor, peer=None, tag=0, *, timeout=None, async_op=false))]
    fn recv(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        peer: Option<u32>,
        tag: u32,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Recv, Call::of(timeout, async_op), || {
            Ok(Collective::Recv {
                tensor: one(tensor, "tensor", Access::Writes)?,
                peer,
                tag,
            })
        })
    }

    /// Sends and receives that progress together, in any order.
    #[pyo3(signature = (ops, *, timeout=None, async_op=false))]
    fn batch(
        &self,
        py: Python<'_>,
        ops: Vec<Bound<'_, PyAny>>,
        timeout: Option<Limit>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Batch, Call::of(timeout, async_op), || {
            let message = |(n, op): (usize, &Bound<'_, PyAny>)| {
                let what = format!("ops[{n}]");
                if let Ok(send) = op.cast::<Send>() {
                    let send = send.get();
                    return Ok(Collective::Send {
                        tensor: one(send.tensor.bind(py), &what, Access::Reads)?,
                        peer: send.peer,
                        tag: send.tag,
                    });
                }
                if let Ok(recv) = op.cast::<Recv>() {
                    let recv = recv.get();
                    return Ok(Collective::Recv {
                        tensor: one(recv.tensor.bind(py), &what, Access::Writes)?,
                        peer: recv.peer,
                        tag: recv.tag,
                    });
                }
                Err(Refused::from(Error::invalid(format!(
                    "{what} is neither Send nor Recv"
                ))))
            };
            let ops = ops
                .iter()
                .enumerate()
                .map(message)
                .collect::<Result<_, Refused>>()?;
            Ok(Collective::Batch { ops })
        })
    }

    /// Waits until every rank is here.
    #[pyo3(signature = (*, timeout=None, async_op=false))]
    fn barrier(&self, py: Python<'_>, timeout: Option<Limit>, async_op: bool) -> PyResult<Py<PyAny>> {
        self.run(py, OpKind::Barrier, Call::of(timeout, async_op), || {
            Ok(Collective::Barrier)
        })
    }

    /// As `barrier`; at the deadline the error names ranks that are missing, all of them if `wait_all`.
    #[pyo3(signature = (*, wait_all=false, timeout=None))]
    fn monitored_barrier(&self, py: Python<'_>, wait_all: bool, timeout: Option<Limit>) -> PyResult<()> {
        let call = Call::of(timeout, false);
        let make = || Ok(Collective::MonitoredBarrier { wait_all });
        self.run(py, OpKind::MonitoredBarrier, call, make).map(drop)
    }

    /// From now on operations whose call names no time may take `timeout`.
    fn _set_timeout(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        let seconds = timeout.0.map(options::duration).transpose().or_raise(py)?;
        let bits = seconds.map_or(0, |seconds| seconds.as_secs_f64().to_bits());
        self.handle.limit.store(bits, Ordering::Relaxed);
        Ok(())
    }

    /// Ends all pending operations and refuses further ones; peers are told. Returns at once.
    #[pyo3(signature = (reason="aborted by the program"))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        self.handle.is_at_home().or_raise(py)?;
        detached(py, || self.handle.group().abort(reason));
        Ok(())
    }

    /// Ends the group: waits for pending operations, and aborts what is left after `timeout` seconds.
    #[pyo3(signature = (timeout=5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.handle.is_at_home().or_raise(py)?;
        let deadline: Instant = options::deadline(timeout).or_raise(py)?;
        let handle = self.handle.clone();
        apart(py, move || handle.group().shutdown(deadline))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() {
            return self.shutdown(py, 5.0);
        }
        let name: String = kind.getattr(intern!(py, "__name__"))?.extract()?;
        self.abort(py, &format!("left by {name}"))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let info = slf.get().handle.group().info();
        let class = slf.get_type().name()?;
        Ok(format!(
            "{class}(rank {} of {}, {}, epoch {})",
            slf.get().handle.rank(),
            info.world_size,
            info.backend,
            info.epoch
        ))
    }
}
