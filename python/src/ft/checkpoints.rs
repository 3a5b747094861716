//! The checkpoints of one replica on disk, which a run of DiLoCo writes beside its training and goes on from.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use oxccl::checkpoint::{self, Search, Series, StateDict, Writer};
use oxccl::core::{Error, Result, Step};
use pyo3::prelude::*;

use crate::errors::{self, Raise};
use crate::interrupt::apart;
use crate::raw::fork;
use crate::{options, process};

/// How the checkpoints ended that are not being written any more.
#[derive(Default)]
struct Ended {
    step: Option<i64>,
    error: Option<Error>,
}

/// The folder of one replica's checkpoints, and the thread that writes them.
pub(crate) struct Disk {
    root: PathBuf,
    replica: u32,
    replicas: u32,
    writer: Writer,
    ended: Arc<Mutex<Ended>>,
}

impl Disk {
    /// True while nothing more is taken.
    pub(crate) fn is_busy(&self) -> bool {
        self.writer.is_busy()
    }

    pub(crate) fn offer(&self, step: i64, lineage: &str, state: StateDict) -> bool {
        self.writer.offer(Step(step), lineage, state)
    }

    /// The checkpoint that all replicas with checkpoints in this folder can go on from.
    pub(crate) fn newest(&self) -> Result<Search> {
        checkpoint::newest(&self.root, self.replica, 0..self.replicas)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    fn ended<R>(&self, look: impl FnOnce(&mut Ended) -> R) -> R {
        look(&mut self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// See [`Disk`].
#[pyclass(frozen, weakref, module = "oxccl._oxccl", name = "_Checkpoints")]
pub(crate) struct PyCheckpoints {
    disk: Arc<Disk>,
    born: u32,
}

impl PyCheckpoints {
    pub(crate) fn disk(&self) -> Result<Arc<Disk>> {
        process::is_at_home(self.born, "the folder of checkpoints")?;
        Ok(self.disk.clone())
    }
}

#[pymethods]
impl PyCheckpoints {
    #[new]
    #[pyo3(signature = (root, replica, replicas, keep, timeout))]
    fn new(
        py: Python<'_>,
        root: PathBuf,
        replica: u32,
        replicas: u32,
        keep: usize,
        timeout: f64,
    ) -> PyResult<Self> {
        if replica >= replicas {
            let text = format!("replica {replica} of {replicas}; replicas are numbered from 0");
            return Err(Error::invalid(text)).or_raise(py);
        }
        let deadline = options::deadline(timeout).or_raise(py)?;
        let disk = apart(py, move || {
            let series = Series::open(root.clone(), replica, keep, deadline)?;
            let ended = Arc::<Mutex<Ended>>::default();
            let theirs = ended.clone();
            let writer = Writer::start(series, move |outcome| {
                let mut ended = theirs.lock().unwrap_or_else(PoisonError::into_inner);
                match outcome {
                    Ok(written) => {
                        *ended = Ended {
                            step: Some(written.step.0),
                            error: None,
                        }
                    }
                    Err(error) => ended.error = Some(error.clone()),
                }
            })?;
            Ok(Disk {
                root,
                replica,
                replicas,
                writer,
                ended,
            })
        })?;
        Ok(Self {
            disk: Arc::new(disk),
            born: fork::count(),
        })
    }

    /// Waits until nothing is being written; raises what the last write failed of, once.
    fn flush(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let deadline = options::deadline(timeout).or_raise(py)?;
        let disk = self.disk().or_raise(py)?;
        apart(py, move || {
            disk.writer.flush(deadline)?;
            disk.ended(|ended| ended.error.take()).map_or(Ok(()), Err)
        })
    }

    /// The step of the newest checkpoint that was written.
    #[getter]
    fn step(&self) -> Option<i64> {
        self.disk.ended(|ended| ended.step)
    }

    /// What the last write failed of.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let error = self.disk.ended(|ended| ended.error.clone());
        error.map(|error| errors::exception(py, &error)).transpose()
    }
}
