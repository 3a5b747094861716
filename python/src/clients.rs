//! Clients of lighthouses and manager servers as Python objects. A call runs apart from the interpreter, so that Ctrl-C ends its wait; events come through
//! a queue that Python empties, so that no thread of ours runs Python code.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use oxccl::coordination::{self as ours, Cancel, CommitVote, Order, OrderKind, QuorumRequest, WatchGuard};
use oxccl::core::{Credentials, Epoch, Error, ErrorKind, Result, Step, deadline_in, time_left};
use oxccl::identity::{self, Party, Role};
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::Raise;
use crate::interrupt::{apart, in_slices};
use crate::options;
use crate::process::{self, Crossing, detached};
use crate::quorum::{Event, Member, Quorum, QuorumResult};
use crate::servers::Home;

/// Adds the classes of this file, and those of its answers.
pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<LighthouseClient>()?;
    m.add_class::<ManagerClient>()?;
    m.add_class::<Watch>()?;
    m.add_class::<Progress>()?;
    m.add_class::<Event>()?;
    m.add_class::<Member>()?;
    m.add_class::<Quorum>()?;
    m.add_class::<QuorumResult>()
}

/// As whom a program calls, with these credentials or those of the environment: as a rank of this replica, or as one who takes part in no step.
fn party(named: Option<PathBuf>, replica_id: Option<&str>) -> Result<Option<Arc<Party>>> {
    let named = named.map(|folder| Credentials::load(&folder)).transpose()?;
    let found = identity::credentials(named.as_ref())?;
    let role = replica_id.map(|id| Role::Replica(identity::name_of(id).to_owned()));
    let party = |credentials: Arc<Credentials>| match role {
        Some(role) => Party::new(&credentials, role),
        None => Party::tool(&credentials),
    };
    found.map(party).transpose()
}

fn called<C: Clone + Send + 'static, T: Send + 'static>(
    py: Python<'_>,
    client: &Arc<Home<C>>,
    timeout: f64,
    call: impl FnOnce(C, Instant) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    client.is_here().or_raise(py)?;
    let deadline = options::deadline(timeout).or_raise(py)?;
    let client = client.get().or_raise(py)?;
    apart(py, move || call(client, deadline))
}

/// A client of a lighthouse, or of several of which one leads: for tools and tests. Replicas ask through their manager server.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct LighthouseClient {
    client: Arc<Home<ours::LighthouseClient>>,
}

impl LighthouseClient {
    fn operate(
        &self,
        py: Python<'_>,
        kind: OrderKind,
        replica: String,
        reason: String,
        timeout: f64,
    ) -> PyResult<Vec<String>> {
        called(py, &self.client, timeout, move |client, until| {
            client.operate(&replica, Order { kind, reason }, until)
        })
    }
}

#[pymethods]
impl LighthouseClient {
    #[new]
    #[pyo3(signature = (url, *, timeout=60.0, credentials=None))]
    fn new(py: Python<'_>, url: String, timeout: f64, credentials: Option<PathBuf>) -> PyResult<Self> {
        process::may_make_groups(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let client = apart(py, move || {
            ours::LighthouseClient::connect_as(party(credentials, None)?, &url, deadline)
        })?;
        Ok(Self {
            client: Home::new(client, "the lighthouse's client"),
        })
    }

    /// Asks for a quorum with this replica in it and waits for it.
    #[pyo3(signature = (replica_id, *, address, store_address, step=0, world_size=1, shrink_only=false, data="", commit_failures=0, timeout=60.0))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn quorum(
        &self,
        py: Python<'_>,
        replica_id: String,
        address: &str,
        store_address: &str,
        step: i64,
        world_size: u64,
        shrink_only: bool,
        data: &str,
        commit_failures: i64,
        timeout: f64,
    ) -> PyResult<Quorum> {
        let member = ours::Member {
            replica_id,
            address: address.to_owned(),
            store_address: store_address.to_owned(),
            step: Step(step),
            world_size,
            shrink_only,
            data: data.to_owned(),
            commit_failures,
            ..ours::Member::default()
        };
        let quorum = called(py, &self.client, timeout, move |client, until| {
            client.quorum(&member, until)
        })?;
        Quorum::of(py, quorum)
    }

    /// Says that a replica which asked for a quorum is alive.
    #[pyo3(signature = (replica_id, *, timeout=60.0))]
    fn heartbeat(&self, py: Python<'_>, replica_id: String, timeout: f64) -> PyResult<()> {
        called(py, &self.client, timeout, move |client, until| {
            client.heartbeat(&replica_id, until)
        })
    }

    /// Says that a replica leaves, and why.
    #[pyo3(signature = (replica_id, reason="", *, timeout=60.0))]
    fn leave(&self, py: Python<'_>, replica_id: String, reason: &str, timeout: f64) -> PyResult<()> {
        let reason = reason.to_owned();
        called(py, &self.client, timeout, move |client, until| {
            client.leave(&replica_id, &reason, until)
        })
    }

    /// Has a replica finish its step and leave. Gives the ids of the replicas that were told.
    #[pyo3(signature = (replica, reason="", *, timeout=60.0))]
    fn drain(&self, py: Python<'_>, replica: String, reason: &str, timeout: f64) -> PyResult<Vec<String>> {
        self.operate(py, OrderKind::Drain, replica, reason.to_owned(), timeout)
    }

    /// Takes a replica out of the job now. Gives the ids of the replicas that were told.
    #[pyo3(signature = (replica, reason="", *, timeout=60.0))]
    fn evict(&self, py: Python<'_>, replica: String, reason: &str, timeout: f64) -> PyResult<Vec<String>> {
        self.operate(py, OrderKind::Evict, replica, reason.to_owned(), timeout)
    }

    /// Ends a replica's processes. Gives the ids of the replicas that were told.
    #[pyo3(signature = (replica, reason="", *, timeout=60.0))]
    fn kill(&self, py: Python<'_>, replica: String, reason: &str, timeout: f64) -> PyResult<Vec<String>> {
        self.operate(py, OrderKind::Kill, replica, reason.to_owned(), timeout)
    }

    /// What the lighthouse's page shows.
    #[pyo3(signature = (*, timeout=60.0))]
    fn status<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Bound<'py, PyAny>> {
        let text = called(py, &self.client, timeout, |client, until| {
            let status = client.status(until)?;
            serde_json::to_string(&status)
                .map_err(|e| Error::new(ErrorKind::Internal, format!("write the status: {e}")))
        })?;
        let _crossing = Crossing::begin().or_raise(py)?;
        py.import(intern!(py, "json"))?
            .call_method1(intern!(py, "loads"), (text,))
    }

    /// Closes the connection. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.client.is_here().or_raise(py)?;
        detached(py, || drop(self.client.close()));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }
}

/// A rank's client of its replica's manager server.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct ManagerClient {
    client: Arc<Home<ours::ManagerClient>>,
}

#[pymethods]
impl ManagerClient {
    #[new]
    #[pyo3(signature = (url, *, replica_id=None, timeout=60.0, credentials=None))]
    fn new(
        py: Python<'_>,
        url: String,
        replica_id: Option<String>,
        timeout: f64,
        credentials: Option<PathBuf>,
    ) -> PyResult<Self> {
        process::may_make_groups(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let client = apart(py, move || {
            let party = party(credentials, replica_id.as_deref())?;
            ours::ManagerClient::connect_as(party, replica_id.as_deref(), &url, deadline)
        })?;
        Ok(Self {
            client: Home::new(client, "the manager server's client"),
        })
    }

    /// Asks for the next quorum and waits for it, together with the other ranks of the replica.
    #[pyo3(signature = (group_rank, step, *, checkpoint_metadata="", shrink_only=false, init_sync=true, commit_failures=0, lineage="",
        last_quorum_id=0, healed=false, batches_committed=0, is_last=false, timeout=60.0))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn quorum(
        &self,
        py: Python<'_>,
        group_rank: u32,
        step: i64,
        checkpoint_metadata: &str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: i64,
        lineage: &str,
        last_quorum_id: i64,
        healed: bool,
        batches_committed: i64,
        is_last: bool,
        timeout: f64,
    ) -> PyResult<QuorumResult> {
        let request = QuorumRequest {
            group_rank,
            step: Step(step),
            checkpoint_metadata: checkpoint_metadata.to_owned(),
            shrink_only,
            init_sync,
            commit_failures,
            lineage: lineage.to_owned(),
            last_quorum_id: Epoch::of_signed(last_quorum_id),
            healed,
            batches_committed,
            is_last,
            ..QuorumRequest::default()
        };
        let cancel = Cancel::default();
        let told = cancel.clone();
        let answer = called(py, &self.client, timeout, move |client, until| {
            client.quorum_unless(&request, until, &told)
        });
        // After Ctrl-C the server must not go on asking in this rank's name.
        cancel.cancel();
        answer.map(QuorumResult::from)
    }

    /// Votes, and waits until all ranks of the replica have: true if all votes were.
    #[pyo3(signature = (group_rank, step, vote, *, quorum_id=0, attempt=0, timeout=60.0))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn should_commit(
        &self,
        py: Python<'_>,
        group_rank: u32,
        step: i64,
        vote: bool,
        quorum_id: i64,
        attempt: i64,
        timeout: f64,
    ) -> PyResult<bool> {
        let vote = CommitVote {
            group_rank,
            step: Step(step),
            quorum_id: Epoch::of_signed(quorum_id),
            attempt,
            vote,
        };
        called(py, &self.client, timeout, move |client, until| {
            client.should_commit(&vote, until)
        })
    }

    /// What a rank of that replica said with its last quorum request.
    #[pyo3(signature = (group_rank, *, timeout=60.0))]
    fn checkpoint_metadata(&self, py: Python<'_>, group_rank: u32, timeout: f64) -> PyResult<String> {
        called(py, &self.client, timeout, move |client, until| {
            client.checkpoint_metadata(group_rank, until)
        })
    }

    /// Tells the lighthouse that the epoch failed: all its members are told to abort it.
    #[pyo3(signature = (quorum_id, reason, *, suspects=Vec::new(), timeout=60.0))]
    fn report(
        &self,
        py: Python<'_>,
        quorum_id: i64,
        reason: String,
        suspects: Vec<String>,
        timeout: f64,
    ) -> PyResult<()> {
        called(py, &self.client, timeout, move |client, until| {
            client.report_suspects(Epoch::of_signed(quorum_id), &reason, &suspects, until)
        })
    }

    /// Says that a rank leaves in good order.
    #[pyo3(signature = (group_rank, *, timeout=60.0))]
    fn leave(&self, py: Python<'_>, group_rank: u32, timeout: f64) -> PyResult<()> {
        called(py, &self.client, timeout, move |client, until| {
            client.leave(group_rank, until)
        })
    }

    /// Ends the replica. For the operator, with credentials.
    #[pyo3(signature = (reason, *, timeout=60.0))]
    fn kill(&self, py: Python<'_>, reason: String, timeout: f64) -> PyResult<()> {
        called(py, &self.client, timeout, move |client, until| {
            client.kill(&reason, until)
        })
    }

    /// What the server tells this rank from now on.
    fn watch(&self, py: Python<'_>, group_rank: u32) -> PyResult<Watch> {
        self.client.is_here().or_raise(py)?;
        let queue = Arc::new(Queue::default());
        let put = queue.clone();
        let client = self.client.get().or_raise(py)?;
        let guard = client.watch(group_rank, Arc::new(move |event| put.put(Event::of(event))));
        Ok(Watch {
            queue,
            guard: Home::new(guard, "the watch"),
        })
    }

    /// Tells the server that the training moves, whenever `moved` was called.
    #[pyo3(signature = (group_rank, *, every=1.0))]
    fn progress(&self, py: Python<'_>, group_rank: u32, every: f64) -> PyResult<Progress> {
        self.client.is_here().or_raise(py)?;
        let every = options::duration(every).or_raise(py)?;
        let stamp = Arc::new(AtomicU64::new(0));
        let client = self.client.get().or_raise(py)?;
        let guard = client.progress(group_rank, stamp.clone(), every);
        Ok(Progress {
            stamp,
            guard: Home::new(guard, "the progress"),
        })
    }

    /// Closes the connection. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.client.is_here().or_raise(py)?;
        detached(py, || drop(self.client.close()));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }
}

/// The most events that wait for Python; then the oldest are dropped, since a later one makes them void.
const MOST_EVENTS: usize = 256;

#[derive(Default)]
struct Queue {
    events: Mutex<(VecDeque<Event>, bool)>,
    came: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<Event>, bool)> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, event: Option<Event>) {
        let Some(event) = event else { return };
        let mut state = self.lock();
        if state.0.len() >= MOST_EVENTS {
            state.0.pop_front();
        }
        state.0.push_back(event);
        self.came.notify_one();
    }

    fn close(&self) {
        self.lock().1 = true;
        self.came.notify_all();
    }

    /// `None` if nothing came until then; `Some(None)` after the end.
    fn take(&self, until: Instant) -> Option<Option<Event>> {
        let mut state = self.lock();
        loop {
            if let Some(event) = state.0.pop_front() {
                return Some(Some(event));
            }
            if state.1 {
                return Some(None);
            }
            let left = time_left(until);
            if left.is_zero() {
                return None;
            }
            let waited = self.came.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The events of one rank, as its manager server tells them.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct Watch {
    queue: Arc<Queue>,
    guard: Arc<Home<WatchGuard>>,
}

#[pymethods]
impl Watch {
    /// The next event; `None` if none comes in `timeout` seconds, or once the watch was closed.
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Event>> {
        self.guard.is_here().or_raise(py)?;
        let deadline = match timeout {
            Some(timeout) => options::deadline(timeout).or_raise(py)?,
            None => deadline_in(std::time::Duration::MAX),
        };
        let next = in_slices(py, deadline, |until| self.queue.take(until))?;
        Ok(next.flatten())
    }

    /// Ends the watch, and calls of `next` that wait. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.guard.is_here().or_raise(py)?;
        detached(py, || {
            drop(self.guard.close());
            self.queue.close();
        });
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }
}

/// Tells a manager server that a rank's training moves.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct Progress {
    stamp: Arc<AtomicU64>,
    guard: Arc<Home<WatchGuard>>,
}

#[pymethods]
impl Progress {
    /// Notes that the training moved; the server hears of it soon.
    fn moved(&self) {
        self.stamp.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends it. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.guard.is_here().or_raise(py)?;
        detached(py, || drop(self.guard.close()));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }
}
