//! What is known about groups and backends, as Python objects.

use oxccl::core::{self, DType, Feature, OpKind, Registry};
use pyo3::prelude::*;

use crate::process::detached;

/// What a group offers.
#[pyclass(frozen, module = "oxccl")]
pub(crate) struct Capabilities {
    inner: core::Capabilities,
}

impl From<core::Capabilities> for Capabilities {
    fn from(inner: core::Capabilities) -> Self {
        Self { inner }
    }
}

const REDUCTIONS: [&str; 9] = [
    "sum",
    "avg",
    "product",
    "min",
    "max",
    "band",
    "bor",
    "bxor",
    "premul_sum",
];

fn names(set: core::DTypeSet) -> Vec<&'static str> {
    DType::ALL
        .into_iter()
        .filter(|&d| set.contains(d))
        .map(DType::name)
        .collect()
}

#[pymethods]
impl Capabilities {
    /// Names of the operations that are served.
    #[getter]
    fn ops(&self) -> Vec<&'static str> {
        OpKind::ALL
            .into_iter()
            .filter(|&k| self.inner.ops.contains(k))
            .map(OpKind::name)
            .collect()
    }

    /// Names of the element types that can be moved.
    #[getter]
    fn dtypes(&self) -> Vec<&'static str> {
        names(self.inner.moves)
    }

    /// Names of the element types that `op` reduces.
    fn reduces(&self, op: &str) -> Vec<&'static str> {
        let at = REDUCTIONS.iter().position(|&name| name == op);
        at.and_then(|at| self.inner.reduces.get(at))
            .map_or_else(Vec::new, |&set| names(set))
    }

    /// Names of the features.
    #[getter]
    fn features(&self) -> Vec<&'static str> {
        Feature::ALL
            .into_iter()
            .filter(|&f| self.inner.has(f))
            .map(Feature::name)
            .collect()
    }

    /// Names of the options that are honoured.
    #[getter]
    fn options(&self) -> Vec<String> {
        self.inner.options.iter().map(ToString::to_string).collect()
    }

    /// Kinds of devices whose memory is served.
    #[getter]
    fn devices(&self) -> Vec<String> {
        self.inner.devices.iter().map(ToString::to_string).collect()
    }

    /// What is composed rather than native, or limited: (operation, in words).
    #[getter]
    fn notes(&self) -> Vec<(String, String)> {
        let notes = self.inner.notes.iter();
        notes
            .map(|(op, text)| (op.to_string(), text.to_string()))
            .collect()
    }
}

/// Bytes that a group has moved, over all its configurations, headers included.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct Traffic {
    /// Bytes sent to other ranks.
    pub(crate) sent: u64,
    /// Bytes received from other ranks.
    pub(crate) received: u64,
}

#[pymethods]
impl Traffic {
    fn __repr__(&self) -> String {
        format!("Traffic(sent={}, received={})", self.sent, self.received)
    }
}

/// The backends that this process knows, plugins included: each with `None`, or why it cannot be used here.
#[pyfunction]
pub(crate) fn backends(py: Python<'_>) -> Vec<(String, Option<String>)> {
    detached(py, || {
        oxccl::backend::load_plugins();
        let backends = Registry::global().list().into_iter();
        let known = backends.map(|b| (b.name.clone(), b.factory.probe().err().map(|e| e.to_string())));
        let unusable = Registry::global().unusable().into_iter();
        let unusable = unusable.filter_map(|u| Some((u.name?, Some(u.error.to_string()))));
        known.chain(unusable).collect()
    })
}

/// Bytes that were never freed on purpose, since an operation might still touch them.
#[pyfunction]
pub(crate) fn leaked_bytes() -> u64 {
    core::leaked_bytes()
}
