//! A submitted operation, as Python waits for it.

use std::io::Write;
use std::os::fd::IntoRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use oxccl::core::{self, Error, Result, Status, Tensor};
use pyo3::intern;
use pyo3::prelude::*;

use crate::completions::Completions;
use crate::errors::{self, Raise};
use crate::interrupt::in_slices;
use crate::options::{self, Limit};
use crate::process::{self, Crossing, detached};
use crate::raw::holder::{drop_attached, give_back_waiting};

/// An operation in flight: `wait` for it, or `await` it. It keeps the memory of its tensors alive until it has ended, also when it is dropped before.
#[pyclass(frozen, weakref, module = "oxccl")]
pub(crate) struct Work {
    work: core::Work,
    rank: u32,
    /// When it has ended for certain.
    latest: Instant,
    born: u32,
    /// What it gave, once the tensors were given back.
    outcome: Mutex<Option<Outcome>>,
}

#[derive(Clone, Copy)]
struct Outcome {
    source: Option<u32>,
}

impl Work {
    pub(crate) fn new(work: core::Work, rank: u32, latest: Instant, born: u32) -> Self {
        Self {
            work,
            rank,
            latest,
            born,
            outcome: Mutex::default(),
        }
    }

    fn outcome(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn named(&self, error: Error) -> Error {
        if error.context().rank.is_some() {
            error
        } else {
            error.with_rank(self.rank)
        }
    }

    /// What it gave, noted for later, and the tensors: the first time.
    fn take(&self, ended: &Result<()>) -> Result<Vec<Tensor>> {
        let mut outcome = self.outcome();
        if outcome.is_some() {
            return Ok(Vec::new());
        }
        let (source, tensors) = match ended {
            Ok(()) => self.work.take().map(|given| (given.source, given.tensors))?,
            Err(_) => (None, self.work.recover()),
        };
        *outcome = Some(Outcome { source });
        Ok(tensors)
    }

    /// Gives the tensors back, once it has ended.
    fn settle(&self, py: Python<'_>, ended: Result<()>) -> PyResult<()> {
        // Not under the lock: to give back memory can run the finalizer of whatever owns it, during which other threads have the interpreter, and one
        // of them may want the outcome.
        let tensors = self.take(&ended).map_err(|e| errors::raise(py, &self.named(e)))?;
        drop_attached(py, tensors);
        ended.map_err(|e| errors::raise(py, &self.named(e)))
    }
}

#[pymethods]
impl Work {
    /// The name of the operation.
    #[getter]
    fn op(&self) -> &'static str {
        self.work.kind().name()
    }

    /// Waits until the operation has ended; raises its error. After `timeout` seconds raises `Timeout`, and the operation goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Limit>) -> PyResult<()> {
        give_back_waiting(py);
        process::is_at_home(self.born, "the group").or_raise(py)?;
        let deadline = match timeout.and_then(|limit| limit.0) {
            Some(seconds) => options::deadline(seconds).or_raise(py)?,
            None => self.latest,
        };
        let work = &self.work;
        let ended = in_slices(py, deadline, |until| match work.wait(until) {
            Err(_) if matches!(work.status(), Status::Pending) => None,
            ended => Some(ended),
        })?;
        match ended {
            Some(ended) => self.settle(py, ended),
            None => {
                let error = work.wait(Instant::now()).err();
                let error =
                    error.unwrap_or_else(|| Error::timeout("it ended just after the wait's deadline"));
                Err(errors::raise(py, &self.named(error)))
            }
        }
    }

    /// True once the operation has ended.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        process::is_at_home(self.born, "the group").or_raise(py)?;
        Ok(!matches!(self.work.status(), Status::Pending))
    }

    /// The error of an operation that failed, else `None`.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        process::is_at_home(self.born, "the group").or_raise(py)?;
        match self.work.status() {
            Status::Failed(error) => errors::exception(py, &self.named(error)).map(Some),
            _ => Ok(None),
        }
    }

    /// After `wait` for a receive: the rank that sent.
    #[getter]
    fn source(&self) -> Option<u32> {
        self.outcome().and_then(|outcome| outcome.source)
    }

    /// How many ranks contributed to a finished reduction; 0 before, and for other operations.
    #[getter]
    fn contributors(&self) -> u32 {
        self.work.contributors()
    }

    /// From submission to the end, once it has ended.
    #[getter]
    fn seconds(&self) -> Option<f64> {
        self.work.timings().duration.map(|d| d.as_secs_f64())
    }

    /// Ends the operation; on backends that cannot end one alone, all of its group.
    #[pyo3(signature = (reason="aborted by the program"))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        process::is_at_home(self.born, "the group").or_raise(py)?;
        detached(py, || self.work.abort(reason));
        Ok(())
    }

    /// Hands `number` to `completions` once the operation has ended.
    fn _tell(&self, py: Python<'_>, completions: &Completions, number: u64) -> PyResult<()> {
        process::is_at_home(self.born, "the group").or_raise(py)?;
        completions.expect(&self.work, number);
        Ok(())
    }

    /// A descriptor, the caller's to close, that becomes readable when the operation has ended.
    fn _done_descriptor(&self, py: Python<'_>) -> PyResult<i32> {
        process::is_at_home(self.born, "the group").or_raise(py)?;
        let (read, mut write) = std::io::pipe()?;
        // Who no longer waits closes the descriptor; a pipe without a reader would end programs that leave SIGPIPE as the system has it.
        let reader = read.try_clone()?;
        // A thread of the group writes, without the interpreter.
        self.work.on_complete(move |_| {
            drop(write.write_all(&[1]));
            drop(reader);
        });
        Ok(read.into_raw_fd())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let _crossing = Crossing::begin().or_raise(py)?;
        let waiting = py
            .import(intern!(py, "oxccl._await"))?
            .call_method1(intern!(py, "until_done"), (slf,))?;
        waiting.call_method0(intern!(py, "__await__"))
    }

    fn __repr__(&self) -> String {
        let standing = match self.work.status() {
            Status::Pending => "pending".to_owned(),
            Status::Succeeded => "succeeded".to_owned(),
            Status::Failed(error) => format!("failed: {error}"),
        };
        format!("Work({}, {standing})", self.op())
    }
}
