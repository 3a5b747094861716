//! The control plane's servers as Python objects: a lighthouse, and the manager server of a replica. They answer on threads of their own, which never
//! run Python code, so that neither the GIL nor a signal holds them up.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oxccl::coordination::{
    EtcdConfig, LighthouseConfig, LighthouseServer, ManagerServer as Server, ManagerServerConfig,
};
use oxccl::core::{Credentials, Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::errors::Raise;
use crate::interrupt::apart;
use crate::raw::fork;
use crate::{options, process};

/// What a Python object keeps until it is closed. A process that was forked since neither uses nor ends it: that is its parent's affair.
pub(crate) struct Home<T> {
    kept: Mutex<Option<T>>,
    born: u32,
    what: &'static str,
}

impl<T> Home<T> {
    /// `what` names it in errors.
    pub(crate) fn new(kept: T, what: &'static str) -> Arc<Self> {
        Arc::new(Self {
            kept: Mutex::new(Some(kept)),
            born: fork::count(),
            what,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors: `InvalidState` in a process that was forked since.
    pub(crate) fn is_here(&self) -> Result<()> {
        process::is_at_home(self.born, self.what)
    }

    /// Takes it away; `None` if that was done before.
    pub(crate) fn close(&self) -> Option<T> {
        self.lock().take()
    }

    /// Errors: `InvalidState` once it was closed.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        match &*self.lock() {
            Some(kept) => call(kept),
            None => {
                let text = format!("{} was shut down", self.what);
                Err(Error::new(ErrorKind::InvalidState, text))
            }
        }
    }
}

impl<T: Clone> Home<T> {
    /// As [`with`](Self::with), for calls that take their time.
    pub(crate) fn get(&self) -> Result<T> {
        self.with(|kept| Ok(kept.clone()))
    }
}

impl<T> Drop for Home<T> {
    fn drop(&mut self) {
        if self.born != fork::count() {
            std::mem::forget(self.close());
        }
    }
}

/// Adds the classes of this file.
pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Lighthouse>()?;
    m.add_class::<ManagerServer>()
}

/// One folder of credentials, or several.
#[derive(FromPyObject)]
pub(crate) enum Folders {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl Folders {
    fn load(self) -> Result<Vec<Arc<Credentials>>> {
        let folders = match self {
            Self::One(folder) => vec![folder],
            Self::Several(folders) => folders,
        };
        folders.iter().map(|folder| Credentials::load(folder)).collect()
    }
}

/// The lighthouse of a job, or of several: through it replicas find each other.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct Lighthouse {
    server: Arc<Home<LighthouseServer>>,
    address: String,
}

#[pymethods]
impl Lighthouse {
    #[new]
    #[pyo3(signature = (bind="127.0.0.1:0", *, min_replicas=1, initial_replicas=None, join_timeout=60.0, heartbeat_timeout=5.0, quorum_tick=0.1,
        state_file=None, etcd=None, job="job", accept_rollback=false, advertise_host=None, credentials=None, insecure=false))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn new(
        py: Python<'_>,
        bind: &str,
        min_replicas: usize,
        initial_replicas: Option<usize>,
        join_timeout: f64,
        heartbeat_timeout: f64,
        quorum_tick: f64,
        state_file: Option<PathBuf>,
        etcd: Option<Vec<String>>,
        job: &str,
        accept_rollback: bool,
        advertise_host: Option<String>,
        credentials: Option<Folders>,
        insecure: bool,
    ) -> PyResult<Self> {
        process::may_make_groups(py)?;
        let job = job.to_owned();
        let mut config = LighthouseConfig {
            bind: bind.to_owned(),
            advertise_host,
            min_replicas,
            initial_replicas,
            join_timeout: options::duration(join_timeout).or_raise(py)?,
            heartbeat_timeout: options::duration(heartbeat_timeout).or_raise(py)?,
            quorum_tick: options::duration(quorum_tick).or_raise(py)?,
            state_file,
            etcd: etcd.map(|members| EtcdConfig { members, job }),
            accept_rollback,
            insecure,
            ..LighthouseConfig::default()
        };
        let server = apart(py, move || {
            config.credentials = credentials.map(Folders::load).transpose()?.unwrap_or_default();
            LighthouseServer::start(config)
        })?;
        Ok(Self {
            address: server.address(),
            server: Home::new(server, "the lighthouse"),
        })
    }

    /// The URL that managers are given: `http://host:port`, `https://` with credentials.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Closes the port and all connections. A second call does nothing.
    #[pyo3(signature = (timeout=5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.server.is_here().or_raise(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let server = self.server.clone();
        apart(py, move || {
            server.close().map_or(Ok(()), |server| server.shutdown(deadline))
        })
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
        self.shutdown(py, 5.0)
    }

    fn __repr__(&self) -> String {
        format!("Lighthouse({})", self.address)
    }
}

/// The server between the ranks of a replica and the lighthouse. One per replica.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct ManagerServer {
    server: Arc<Home<Server>>,
    address: String,
    replica_id: String,
}

#[pymethods]
impl ManagerServer {
    #[new]
    #[pyo3(signature = (replica_id, lighthouse, *, store_address, world_size=1, bind="127.0.0.1:0", advertise_host=None, heartbeat_interval=0.1,
        connect_timeout=10.0, progress_timeout=120.0, quorum_retries=0, credentials=None, insecure=false))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn new(
        py: Python<'_>,
        replica_id: String,
        lighthouse: String,
        store_address: &str,
        world_size: u32,
        bind: &str,
        advertise_host: Option<String>,
        heartbeat_interval: f64,
        connect_timeout: f64,
        progress_timeout: f64,
        quorum_retries: u32,
        credentials: Option<PathBuf>,
        insecure: bool,
    ) -> PyResult<Self> {
        process::may_make_groups(py)?;
        let mut config = ManagerServerConfig {
            replica_id: replica_id.clone(),
            lighthouse,
            bind: bind.to_owned(),
            advertise_host,
            store_address: store_address.to_owned(),
            world_size,
            heartbeat_interval: options::duration(heartbeat_interval).or_raise(py)?,
            connect_timeout: options::duration(connect_timeout).or_raise(py)?,
            progress_timeout: options::duration(progress_timeout).or_raise(py)?,
            quorum_retries,
            insecure,
            ..ManagerServerConfig::default()
        };
        let server = apart(py, move || {
            config.credentials = credentials.map(|folder| Credentials::load(&folder)).transpose()?;
            Server::start(config)
        })?;
        Ok(Self {
            address: server.address(),
            server: Home::new(server, "the manager server"),
            replica_id,
        })
    }

    /// The URL that the replica's ranks and the other replicas are given.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// The replica.
    #[getter]
    fn replica_id(&self) -> &str {
        &self.replica_id
    }

    /// Tells the lighthouse that the replica leaves, so that the others do not wait for it.
    #[pyo3(signature = (timeout=5.0))]
    fn leave(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.server.is_here().or_raise(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let server = self.server.clone();
        apart(py, move || server.with(|server| server.leave(deadline)))
    }

    /// Closes the port and all connections, which the lighthouse takes for the replica's death unless it has left. A second call does nothing.
    #[pyo3(signature = (timeout=5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.server.is_here().or_raise(py)?;
        let deadline = options::deadline(timeout).or_raise(py)?;
        let server = self.server.clone();
        apart(py, move || {
            server.close().map_or(Ok(()), |server| server.shutdown(deadline))
        })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Leaves in good order, unless an exception ends the block.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.server.is_here().or_raise(py)?;
        let is_in_order = kind.is_none();
        let deadline = options::deadline(5.0).or_raise(py)?;
        let server = self.server.clone();
        apart(py, move || {
            let Some(server) = server.close() else {
                return Ok(());
            };
            if is_in_order {
                // The end of its connection says the same a moment later.
                drop(server.leave(deadline));
            }
            server.shutdown(deadline)
        })
    }

    fn __repr__(&self) -> String {
        format!("ManagerServer({}, {})", self.replica_id, self.address)
    }
}
