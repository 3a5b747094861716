//! Our errors as Python exceptions: `oxccl.Error` and its subclasses, with what the error says in attributes.

use oxccl::core::{Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The module of the exceptions.
static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Imports the exceptions. With the module, so that an error can be raised later without running Python code, in which the interpreter might end
/// (see `process`).
pub(crate) fn prepare(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let import = || py.import("oxccl._errors").map(Bound::unbind);
    Ok(CLASSES.get_or_try_init(py, import)?.bind(py))
}

/// Why a call was refused before it reached a group.
pub(crate) enum Refused {
    Ours(Error),
    /// An exception that Python code raised.
    Python(PyErr),
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<PyErr> for Refused {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl Refused {
    /// The exception; `op` and `rank` are added to an error of ours.
    pub(crate) fn raise(self, py: Python<'_>, op: &'static str, rank: u32) -> PyErr {
        match self {
            Self::Ours(error) => raise(py, &error.with_op(op).with_rank(rank)),
            Self::Python(error) => error,
        }
    }
}

/// The exception for `error`. If even that fails, the exception that says why.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).map_or_else(|failure| failure, PyErr::from_value)
}

/// The exception object for `error`.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class = match error.kind() {
        ErrorKind::InvalidArgument => "InvalidArgument",
        ErrorKind::Unsupported => "Unsupported",
        ErrorKind::Timeout => "Timeout",
        ErrorKind::PeerLost => "PeerLost",
        _ => "Error",
    };
    let raised = prepare(py)?.getattr(class)?.call1((error.to_string(),))?;
    let context = error.context();
    let kind = format!("{:?}", error.kind());
    raised.setattr(intern!(py, "kind"), kind)?;
    raised.setattr(intern!(py, "op"), context.op)?;
    raised.setattr(intern!(py, "rank"), context.rank)?;
    raised.setattr(intern!(py, "peer"), context.peer)?;
    raised.setattr(intern!(py, "peer_address"), context.peer_address.as_deref())?;
    raised.setattr(intern!(py, "epoch"), context.epoch.map(|epoch| epoch.0))?;
    raised.setattr(intern!(py, "seq"), context.seq)?;
    raised.setattr(intern!(py, "dtype"), context.dtype.map(|d| d.name()))?;
    raised.setattr(intern!(py, "count"), context.count)?;
    raised.setattr(intern!(py, "code"), error.code())?;
    raised.setattr(intern!(py, "retryable"), error.is_retryable())?;
    raised.setattr(intern!(py, "advice"), error.advice())?;
    Ok(raised)
}

/// Raises on error.
pub(crate) trait Raise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> Raise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}
