//! Arguments that many calls share: time-outs, reductions, options of groups.

use std::time::{Duration, Instant};

use oxccl::core::{Error, GroupOptions, ReduceOp, Result, SubmitOptions, deadline_in};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};

use crate::group::PremulSum;

/// How long something may take: seconds, or a `timedelta`, which says, as in torch, that the default counts if it is not positive.
#[derive(Clone, Copy)]
pub(crate) struct Limit(pub(crate) Option<f64>);

/// For a group and its making.
pub(crate) const MINUTE: Limit = Limit(Some(60.0));

impl<'py> FromPyObject<'_, 'py> for Limit {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>() {
            return Ok(Self(Some(object.extract()?)));
        }
        let py = object.py();
        let Some(total) = object.getattr_opt(intern!(py, "total_seconds"))? else {
            // Whatever else is a number; a `TypeError` for what is none.
            return Ok(Self(Some(object.extract()?)));
        };
        let seconds: f64 = total.call0()?.extract()?;
        Ok(Self((seconds > 0.0).then_some(seconds)))
    }
}

impl Limit {
    /// In seconds; `default` if none was given.
    pub(crate) fn or(self, default: f64) -> f64 {
        self.0.unwrap_or(default)
    }
}

/// A time-out in seconds.
pub(crate) fn duration(seconds: f64) -> Result<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(Error::invalid(format!(
            "a time-out of {seconds} seconds; it is a number that is not negative"
        )));
    }
    // One too long to represent counts as a year, as in `deadline_in`.
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(365 * 24 * 3600)))
}

/// The instant `seconds` from now.
pub(crate) fn deadline(seconds: f64) -> Result<Instant> {
    duration(seconds).map(deadline_in)
}

/// Options of one operation.
pub(crate) fn submit(timeout: Option<f64>, contribute: bool) -> Result<SubmitOptions> {
    Ok(SubmitOptions {
        deadline: timeout.map(deadline).transpose()?,
        contribute,
        stream: None,
    })
}

/// `"sum"`, … or `PremulSum(factor)`.
pub(crate) struct Reduction(Result<ReduceOp>);

impl Default for Reduction {
    fn default() -> Self {
        Self(Ok(ReduceOp::Sum))
    }
}

impl Reduction {
    pub(crate) fn get(self) -> Result<ReduceOp> {
        self.0
    }
}

impl<'py> FromPyObject<'_, 'py> for Reduction {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(premul) = object.cast::<PremulSum>() {
            return Ok(Self(Ok(ReduceOp::PremulSum(premul.get().factor))));
        }
        let name: String = object.extract()?;
        Ok(Self(named(&name)))
    }
}

fn named(name: &str) -> Result<ReduceOp> {
    Ok(match name {
        "sum" => ReduceOp::Sum,
        "avg" => ReduceOp::Avg,
        "product" => ReduceOp::Product,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        "band" => ReduceOp::Band,
        "bor" => ReduceOp::Bor,
        "bxor" => ReduceOp::Bxor,
        _ => {
            return Err(Error::invalid(format!(
                "'{name}' is no reduction; known: sum, avg, product, min, max, band, bor, bxor, and PremulSum(factor)"
            )));
        }
    })
}

/// Options of a group: a dict with a text, a number or a truth value for each name, which the core reads as it reads those of a command line. A name
/// that is no option of groups is a hint; a backend refuses what it does not know, and names what it does.
pub(crate) struct Given(Vec<(String, String)>);

impl<'py> FromPyObject<'_, 'py> for Given {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(dict) = object.cast::<PyDict>() else {
            let kind = object.get_type().name()?;
            let text = format!("options are a dict from names to values, not a {kind}");
            return Err(PyTypeError::new_err(text));
        };
        let given = dict.iter().map(|(name, value)| {
            let name: String = name.extract()?;
            let is_plain = value.is_instance_of::<PyString>()
                || value.is_instance_of::<PyInt>()
                || value.is_instance_of::<PyFloat>();
            if !is_plain {
                let kind = value.get_type().name()?;
                let text = format!("option {name} is a {kind}; it can be a text, a number, or True or False");
                return Err(PyTypeError::new_err(text));
            }
            // `True` and `False` are numbers of Python, and written as the core reads them.
            let text = value.str()?.to_string();
            let is_truth = value.is_instance_of::<PyBool>();
            Ok((name, if is_truth { text.to_lowercase() } else { text }))
        });
        given.collect::<PyResult<_>>().map(Self)
    }
}

/// Options of a group whose operations may take `timeout`.
pub(crate) fn group(timeout: Limit, given: Option<Given>) -> Result<GroupOptions> {
    let mut options = GroupOptions::default();
    if let Some(seconds) = timeout.0 {
        options.timeout = duration(seconds)?;
    }
    for (name, value) in given.map(|given| given.0).unwrap_or_default() {
        options.set(&name, &value)?;
    }
    Ok(options)
}
