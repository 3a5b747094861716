//! Arguments that many calls share: time-outs, reductions, options of groups.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use oxccl::core::{Error, GroupOptions, ReduceOp, Result, SubmitOptions, deadline_in};
use pyo3::prelude::*;

use crate::group::PremulSum;

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

/// Options of a group, by name; what no backend knows is a hint, which the backend honours or refuses.
pub(crate) fn group(timeout: f64, given: BTreeMap<String, String>) -> Result<GroupOptions> {
    let mut options = GroupOptions {
        timeout: duration(timeout)?,
        ..GroupOptions::default()
    };
    for (name, value) in given {
        let wrong = |wanted: &str| Error::invalid(format!("option {name} is '{value}', not {wanted}"));
        let number = || value.parse::<u32>().map_err(|_| wrong("a number"));
        let truth = || match value.as_str() {
            "1" | "true" | "True" => Ok(true),
            "0" | "false" | "False" => Ok(false),
            _ => Err(wrong("true or false")),
        };
        match name.as_str() {
            "is_high_priority_stream" => options.is_high_priority_stream = Some(truth()?),
            "cga_cluster_size" => options.cga_cluster_size = Some(number()?),
            "min_ctas" => options.min_ctas = Some(number()?),
            "max_ctas" => options.max_ctas = Some(number()?),
            "net_name" => options.net_name = Some(value),
            "split_share" => options.split_share = Some(truth()?),
            "blocking" => options.blocking = Some(truth()?),
            "traffic_class" => options.traffic_class = Some(number()?),
            "lenient" => options.lenient = truth()?,
            _ => {
                options.hints.insert(name, value);
            }
        }
    }
    Ok(options)
}
