//! Our errors as Python exceptions: `oxccl.Error` and its subclasses, with what the error says in attributes.

use oxccl::core::{Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

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
    let context = error.context();
    let fields = PyDict::new(py);
    let kind = format!("{:?}", error.kind());
    fields.set_item(intern!(py, "kind"), kind)?;
    fields.set_item(intern!(py, "op"), context.op)?;
    fields.set_item(intern!(py, "rank"), context.rank)?;
    fields.set_item(intern!(py, "peer"), context.peer)?;
    fields.set_item(intern!(py, "peer_address"), context.peer_address.as_deref())?;
    fields.set_item(intern!(py, "epoch"), context.epoch)?;
    fields.set_item(intern!(py, "seq"), context.seq)?;
    fields.set_item(intern!(py, "dtype"), context.dtype.map(|d| d.name()))?;
    fields.set_item(intern!(py, "count"), context.count)?;
    fields.set_item(intern!(py, "code"), error.code())?;
    fields.set_item(intern!(py, "retryable"), error.is_retryable())?;
    fields.set_item(intern!(py, "advice"), error.kind().advice())?;
    py.import(intern!(py, "oxccl._errors"))?
        .getattr(class)?
        .call((error.to_string(),), Some(&fields))
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
