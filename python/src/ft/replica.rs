//! One rank of a replica: the manager as a Python object.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use oxccl::core::{self, Credentials, DType, Error, ErrorKind, ReduceOp, Result, Tensor, deadline_in};
use oxccl::manager::{
    self, Interrupter, Lineage, ManagedWork, Manager, ManagerConfig, Replica, State, WorldSizeMode,
};
use pyo3::prelude::*;

use super::states;
use crate::errors::{self, Raise};
use crate::group::{Group, Handle};
use crate::interrupt::apart;
use crate::lend::{Access, one_or_list};
use crate::options::{self, Reduction};
use crate::process::{self, detached};
use crate::raw::fork;
use crate::raw::holder::give_back_waiting;
use crate::store;
use crate::table::Traffic;
use crate::work::Work;

/// How long after its deadline a reduction has ended for certain.
const MARGIN: Duration = Duration::from_secs(5);

/// A manager and its group, shared by what drives it.
pub(crate) struct Core {
    manager: Mutex<Option<Manager>>,
    handle: Arc<Handle>,
    waits: Interrupter,
    born: u32,
}

fn shut_down() -> Error {
    Error::new(ErrorKind::InvalidState, "the manager was shut down")
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, Option<Manager>> {
        self.manager.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a call on the thread of another one, which it is a part of.
    pub(crate) fn within<R>(&self, call: impl FnOnce(&mut Manager) -> Result<R>) -> Result<R> {
        self.lock().as_mut().map_or_else(|| Err(shut_down()), call)
    }

    /// For a call of Python's. Errors: `InvalidState` while another one is under way, as one that was interrupted may be, or after the end.
    fn with<R>(&self, call: impl FnOnce(&mut Manager) -> Result<R>) -> Result<R> {
        let mut manager = match self.manager.try_lock() {
            Ok(manager) => manager,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let text = "another call of this manager is still under way: one thread drives it, and a call that was interrupted goes on for a while";
                return Err(Error::new(ErrorKind::InvalidState, text));
            }
        };
        manager.as_mut().map_or_else(|| Err(shut_down()), call)
    }

    pub(crate) fn is_at_home(&self) -> Result<()> {
        process::is_at_home(self.born, "the manager")
    }

    /// Ends what waits for other replicas.
    pub(crate) fn interrupt(&self) {
        self.waits.interrupt();
        self.handle.group().abort("interrupted at the keyboard");
    }

    pub(crate) fn configured(&self) {
        self.handle.configured();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.born != fork::count() {
            // Its connections are the parent's.
            let manager = self.manager.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(manager.take());
        }
    }
}

/// The manager as DiLoCo drives it.
pub(crate) struct Shared(pub(crate) Arc<Core>);

impl Replica for Shared {
    fn start_quorum(&mut self, state: &mut dyn State, deadline: Instant) -> Result<manager::Participation> {
        self.0.within(|m| m.start_quorum(state, deadline))
    }

    fn all_reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        match self.0.lock().as_mut() {
            Some(manager) => manager.all_reduce(tensors, op),
            None => ManagedWork::failed(shut_down(), tensors),
        }
    }

    fn alloc(&self, dtype: DType, count: usize) -> Tensor {
        match self.0.lock().as_ref() {
            Some(manager) => manager.alloc(dtype, count),
            None => Tensor::zeros(dtype, count),
        }
    }

    fn should_commit(&mut self, deadline: Instant) -> Result<bool> {
        self.0.within(|m| m.should_commit(deadline))
    }

    fn current_step(&self) -> core::Step {
        self.0
            .lock()
            .as_ref()
            .map_or(core::Step(0), Replica::current_step)
    }

    fn batches_committed(&self) -> i64 {
        self.0.lock().as_ref().map_or(0, Replica::batches_committed)
    }

    fn draining(&self) -> bool {
        self.0.lock().as_ref().is_some_and(Replica::draining)
    }

    fn set_last(&mut self, is_last: bool) {
        if let Some(manager) = self.0.lock().as_mut() {
            manager.set_last(is_last);
        }
    }

    fn set_joins_at_once(&mut self, at_once: bool) {
        if let Some(manager) = self.0.lock().as_mut() {
            manager.set_joins_at_once(at_once);
        }
    }

    fn set_healed(&mut self) {
        if let Some(manager) = self.0.lock().as_mut() {
            manager.set_healed();
        }
    }

    fn progress(&self) {
        if let Some(manager) = self.0.lock().as_ref() {
            manager.progress();
        }
    }

    fn report_error(&mut self, error: Error) {
        if let Some(manager) = self.0.lock().as_mut() {
            manager.report_error(error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.0.lock().as_ref().and_then(Replica::error)
    }

    fn traffic(&self) -> core::Traffic {
        self.0.handle.group().traffic()
    }

    fn leave(&mut self, deadline: Instant) -> Result<()> {
        self.0.within(|m| m.leave(deadline))
    }
}

/// A replica's part in the present quorum.
#[pyclass(frozen, get_all, module = "oxccl._oxccl")]
pub(crate) struct Participation {
    epoch: i64,
    step: i64,
    replica_rank: u32,
    replica_world_size: u32,
    contributor_rank: Option<u32>,
    contributors: u32,
    healed_bytes: Option<usize>,
    healed_seconds: Option<f64>,
    members: Option<Vec<String>>,
}

impl From<manager::Participation> for Participation {
    fn from(p: manager::Participation) -> Self {
        Self {
            epoch: p.epoch.signed(),
            step: p.step.0,
            replica_rank: p.replica_rank,
            replica_world_size: p.replica_world_size,
            contributor_rank: p.contributor_rank.filter(|_| p.contributes),
            contributors: p.contributors,
            healed_bytes: p.healed.as_ref().map(|h| h.bytes),
            healed_seconds: p.healed.as_ref().map(|h| h.took.as_secs_f64()),
            members: p.members.ids().map(<[String]>::to_vec),
        }
    }
}

#[pymethods]
impl Participation {
    fn __repr__(&self) -> String {
        format!(
            "Participation(epoch {}, step {}, rank {} of {}, {} contribute)",
            self.epoch, self.step, self.replica_rank, self.replica_world_size, self.contributors
        )
    }
}

/// One rank of one replica of a fault-tolerant job. One thread drives it.
#[pyclass(frozen, weakref, module = "oxccl._oxccl", name = "_Replica")]
pub(crate) struct PyReplica {
    core: Arc<Core>,
    replica_id: String,
    timeout: Duration,
}

impl PyReplica {
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    fn at_home(&self, py: Python<'_>) -> PyResult<()> {
        self.core.is_at_home().or_raise(py)
    }
}

#[pymethods]
impl PyReplica {
    #[new]
    #[pyo3(signature = (group, name, lighthouse, *, group_rank=0, group_world_size=1, store=None, bind="127.0.0.1:0", advertise_host=None,
        min_replicas=1, fixed_with_spares=false, init_sync=true, max_retries=None, timeout=60.0, connect_timeout=20.0, heartbeat_interval=0.1,
        progress_timeout=120.0, max_state_bytes=None, credentials=None, insecure=false))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, Group>,
        name: String,
        lighthouse: Option<String>,
        group_rank: u32,
        group_world_size: u32,
        store: Option<&Bound<'_, PyAny>>,
        bind: &str,
        advertise_host: Option<String>,
        min_replicas: u32,
        fixed_with_spares: bool,
        init_sync: bool,
        max_retries: Option<u32>,
        timeout: f64,
        connect_timeout: f64,
        heartbeat_interval: f64,
        progress_timeout: f64,
        max_state_bytes: Option<u64>,
        credentials: Option<PathBuf>,
        insecure: bool,
    ) -> PyResult<Self> {
        process::may_make_groups(py)?;
        let handle = group.get().handle().clone();
        handle.is_at_home().or_raise(py)?;
        let Some(shared) = handle.shared() else {
            let text = "a world's ranks are connected already: give the manager a group of oxccl.unconfigured() or a QuantizedGroup";
            return Err(Error::invalid(text)).or_raise(py);
        };
        let timeout = options::duration(timeout).or_raise(py)?;
        let mut config = ManagerConfig {
            name,
            lighthouse,
            group_rank,
            group_world_size,
            replica_store: store.map(store::any).transpose()?,
            bind: bind.to_owned(),
            advertise_host,
            min_replicas,
            world_size_mode: if fixed_with_spares {
                WorldSizeMode::FixedWithSpares
            } else {
                WorldSizeMode::Dynamic
            },
            init_sync,
            heal_over: manager::HealOver::default(),
            max_state_bytes,
            max_retries,
            timeout,
            connect_timeout: options::duration(connect_timeout).or_raise(py)?,
            heartbeat_interval: options::duration(heartbeat_interval).or_raise(py)?,
            progress_timeout: options::duration(progress_timeout).or_raise(py)?,
            credentials: None,
            event_log: None,
            insecure,
        };
        let manager = apart(py, move || {
            if let Some(folder) = credentials {
                config.credentials = Some(Credentials::load(&folder)?);
            }
            Manager::new(shared, config)
        })?;
        Ok(Self {
            replica_id: manager.replica_id().to_owned(),
            timeout,
            core: Arc::new(Core {
                waits: manager.interrupter(),
                manager: Mutex::new(Some(manager)),
                handle,
                born: fork::count(),
            }),
        })
    }

    /// This incarnation's id: the name and a random part.
    #[getter]
    fn replica_id(&self) -> &str {
        &self.replica_id
    }

    /// Agrees on who takes part in the step, connects the group, and heals this replica through `states` if it is behind.
    fn start_quorum(
        &self,
        py: Python<'_>,
        states: &Bound<'_, PyAny>,
        timeout: f64,
    ) -> PyResult<Participation> {
        self.at_home(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let core = self.core.clone();
        let call = move |state: &mut dyn State| core.with(|m| m.start_quorum(state, deadline));
        let found = states::run(py, states, || self.core.interrupt(), call)?;
        self.core.configured();
        Ok(found.into())
    }

    /// Asks for the quorum and returns at once. False if it cannot: `start_quorum` does all then.
    fn begin_quorum(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        self.at_home(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        detached(py, || self.core.with(|m| m.begin_quorum(deadline))).or_raise(py)
    }

    /// Waits for the quorum that was begun.
    fn await_quorum(&self, py: Python<'_>) -> PyResult<Participation> {
        self.at_home(py)?;
        let core = self.core.clone();
        let call = move |_: &mut dyn State| core.with(Replica::await_quorum);
        let found = states::run(py, &py.None().into_bound(py), || self.core.interrupt(), call)?;
        self.core.configured();
        Ok(found.into())
    }

    /// Submits a reduction over the members: a `Work`, or the error because of which there is none. Either counts in the vote.
    fn all_reduce(&self, py: Python<'_>, tensors: &Bound<'_, PyAny>, op: Reduction) -> PyResult<Py<PyAny>> {
        give_back_waiting(py);
        self.at_home(py)?;
        let op = op.get().or_raise(py)?;
        let tensors = one_or_list(tensors, "tensors", Access::Writes)
            .map_err(|refused| refused.raise(py, "all_reduce", self.core.handle.group().info().rank))?;
        let submitted = detached(py, || self.core.with(|m| Ok(m.all_reduce(tensors, op))));
        let work = submitted.or_raise(py)?;
        match work.work() {
            Ok(work) => {
                let latest = deadline_in(self.timeout) + MARGIN;
                let rank = self.core.handle.group().info().rank;
                let work = Work::new(work.clone(), rank, latest, self.core.born);
                Ok(Py::new(py, work)?.into_any())
            }
            Err(error) => Ok(errors::exception(py, &error)?.unbind()),
        }
    }

    /// Waits for all reductions of the step, and decides.
    fn should_commit(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        self.at_home(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let core = self.core.clone();
        let call = move |_: &mut dyn State| core.with(|m| m.should_commit(deadline));
        states::run(py, &py.None().into_bound(py), || self.core.interrupt(), call)
    }

    /// Makes the vote on this step a no.
    fn report_error(&self, py: Python<'_>, text: String) -> PyResult<()> {
        self.at_home(py)?;
        let error = Error::new(ErrorKind::Aborted, text);
        let report = |m: &mut Manager| {
            m.report_error(error);
            Ok(())
        };
        detached(py, || self.core.with(report)).or_raise(py)
    }

    /// The step's first error.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.at_home(py)?;
        let error = self.core.with(|m| Ok(m.error())).or_raise(py)?;
        error.map(|error| errors::exception(py, &error)).transpose()
    }

    #[getter]
    fn current_step(&self, py: Python<'_>) -> PyResult<i64> {
        self.at_home(py)?;
        self.core.with(|m| Ok(m.current_step().0)).or_raise(py)
    }

    #[getter]
    fn batches_committed(&self, py: Python<'_>) -> PyResult<i64> {
        self.at_home(py)?;
        self.core.with(|m| Ok(m.batches_committed())).or_raise(py)
    }

    /// Which commits led to the state.
    #[getter]
    fn lineage(&self, py: Python<'_>) -> PyResult<String> {
        self.at_home(py)?;
        self.core
            .with(|m| Ok(m.lineage().as_str().to_owned()))
            .or_raise(py)
    }

    /// An operator has told this replica to drain.
    #[getter]
    fn draining(&self, py: Python<'_>) -> PyResult<bool> {
        self.at_home(py)?;
        self.core.with(|m| Ok(m.draining())).or_raise(py)
    }

    /// Before the first quorum: the loaded state is of this step.
    fn restore(&self, py: Python<'_>, step: i64, lineage: String, batches_committed: i64) -> PyResult<()> {
        self.at_home(py)?;
        let lineage = Lineage::from_peer(lineage);
        self.core
            .with(|m| m.restore(core::Step(step), lineage, batches_committed))
            .or_raise(py)
    }

    fn set_shrink_only(&self, py: Python<'_>, on: bool) -> PyResult<()> {
        self.at_home(py)?;
        let set = |m: &mut Manager| {
            m.set_shrink_only(on);
            Ok(())
        };
        self.core.with(set).or_raise(py)
    }

    fn set_last(&self, py: Python<'_>, is_last: bool) -> PyResult<()> {
        self.at_home(py)?;
        let set = |m: &mut Manager| {
            m.set_last(is_last);
            Ok(())
        };
        self.core.with(set).or_raise(py)
    }

    /// Shows that the training thread moves.
    fn progress(&self, py: Python<'_>) -> PyResult<()> {
        self.at_home(py)?;
        let show = |m: &mut Manager| {
            m.progress();
            Ok(())
        };
        self.core.with(show).or_raise(py)
    }

    /// Bytes moved by the group so far.
    fn traffic(&self) -> Traffic {
        let moved = self.core.handle.group().traffic();
        Traffic {
            sent: moved.sent,
            received: moved.received,
        }
    }

    /// Leaves in good order, so that no other waits for this replica. A second call does nothing.
    fn leave(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.at_home(py)?;
        options::deadline(timeout).or_raise(py)?;
        let core = self.core.clone();
        apart(py, move || {
            // Behind a call that was interrupted: without leaving, the others would count this replica in.
            let mut manager = core.lock();
            if let Some(manager) = manager.as_mut() {
                manager.leave(options::deadline(timeout)?)?;
            }
            drop(manager.take());
            Ok(())
        })
    }

    /// Ends without a word, which the others take for a death.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.at_home(py)?;
        self.core.handle.group().abort("the manager was closed");
        let core = self.core.clone();
        apart(py, move || {
            drop(core.lock().take());
            Ok(())
        })
    }

    fn __repr__(&self) -> String {
        format!("_Replica({})", self.replica_id)
    }
}
