//! A group whose reductions travel in fewer bytes, over another group.

use std::sync::Arc;

use oxccl::core::{Error, ErrorKind, Result};
use oxccl::quant::{self, Accuracy, ErrorFeedback, Moves, QuantizeOptions, Rounding};
use pyo3::prelude::*;

use crate::errors::Raise;
use crate::group::{Group, Handle, Inner};
use crate::interrupt::apart;
use crate::options::{self, Limit};
use crate::{process, world};

/// A group whose reductions of floats travel in fewer bytes.
#[pyclass(extends = Group, frozen, module = "oxccl")]
pub(crate) struct QuantizedGroup {
    handle: Arc<Handle>,
    group: Arc<quant::QuantizedGroup>,
}

fn accuracy(name: &str) -> Result<Accuracy> {
    match name {
        "economic" => Ok(Accuracy::Economic),
        "best" => Ok(Accuracy::Best),
        _ => Err(Error::invalid(format!(
            "accuracy is '{name}', not 'economic' or 'best'"
        ))),
    }
}

fn moves(name: &str) -> Result<Moves> {
    match name {
        "exact" => Ok(Moves::Exact),
        "quantized" => Ok(Moves::Quantized),
        _ => Err(Error::invalid(format!(
            "moves is '{name}', not 'exact' or 'quantized'"
        ))),
    }
}

impl QuantizedGroup {
    /// What it owes of earlier steps; `None` if it keeps no residuals.
    pub(crate) fn residuals(&self) -> Option<Arc<ErrorFeedback>> {
        self.group.error_feedback()
    }

    fn feedback(&self, py: Python<'_>) -> PyResult<Arc<ErrorFeedback>> {
        self.handle.is_at_home().or_raise(py)?;
        let none = || {
            let text = "this group keeps no residuals; make it with error_feedback=True";
            Error::new(ErrorKind::InvalidState, text)
        };
        self.group.error_feedback().ok_or_else(none).or_raise(py)
    }
}

#[pymethods]
impl QuantizedGroup {
    #[new]
    #[pyo3(signature = (format="auto", *, over=None, accuracy="economic", moves="exact", error_feedback=false, seed=None, timeout=60.0))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn new(
        py: Python<'_>,
        format: &str,
        over: Option<&Bound<'_, Group>>,
        accuracy: &str,
        moves: &str,
        error_feedback: bool,
        seed: Option<u64>,
        timeout: f64,
    ) -> PyResult<PyClassInitializer<Self>> {
        process::may_make_groups(py)?;
        let options = QuantizeOptions {
            codec: format.parse().or_raise(py)?,
            rounding: seed.map_or(Rounding::Nearest, |key| Rounding::Stochastic { key }),
            error_feedback,
            accuracy: self::accuracy(accuracy).or_raise(py)?,
            moves: self::moves(moves).or_raise(py)?,
            timeout: options::duration(timeout).or_raise(py)?,
        };
        let over = match over {
            Some(group) => group.get().handle().clone(),
            None => {
                let plain = world::unconfigured(py, None, "cpu", Limit(Some(timeout)), false, None)?;
                plain.handle().clone()
            }
        };
        over.is_at_home().or_raise(py)?;
        let Some(inner) = over.shared() else {
            let text = "a world cannot be quantised, since its ranks are connected already: make QuantizedGroup(format) and give it to world.connect";
            return Err(Error::invalid(text)).or_raise(py);
        };
        let group = apart(py, move || {
            quant::QuantizedGroup::with_options(inner, options).map(Arc::new)
        })?;
        let base = Group::new(Inner::Group(group.clone()));
        let own = Self {
            handle: base.handle().clone(),
            group,
        };
        Ok(PyClassInitializer::from(base).add_subclass(own))
    }

    /// The format's full name.
    #[getter]
    fn format(&self) -> String {
        self.group.codec().to_string()
    }

    /// Whether it keeps what rounding takes.
    #[getter]
    fn has_error_feedback(&self) -> bool {
        self.residuals().is_some()
    }

    /// How many values that are not finite this rank has put into quantised operations so far.
    #[getter]
    fn non_finite(&self) -> u64 {
        self.group.non_finite()
    }

    /// Names the round that the next calls belong to, for stochastic rounding.
    fn start_round(&self, py: Python<'_>, round: u64) -> PyResult<()> {
        self.handle.is_at_home().or_raise(py)?;
        self.group.start_round(round);
        Ok(())
    }

    /// Begins a step of error feedback.
    #[pyo3(signature = (scope="step"))]
    fn begin(&self, py: Python<'_>, scope: &str) -> PyResult<()> {
        self.feedback(py)?.begin(scope);
        Ok(())
    }

    /// Ends the step: it counted.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        self.feedback(py)?.commit();
        Ok(())
    }

    /// Ends the step: it did not count.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        self.feedback(py)?.rollback();
        Ok(())
    }
}
