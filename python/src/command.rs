//! The `oxccl` command in this process, for `python -m oxccl` and the script that the wheel brings.

use std::ffi::OsString;

use pyo3::prelude::*;

use crate::process::detached;

/// Runs the command with these arguments, the first of which is its name, and gives its exit code. `again` is how to start it once more.
#[pyfunction]
#[pyo3(name = "_command")]
pub(crate) fn command(py: Python<'_>, arguments: Vec<OsString>, again: Vec<OsString>) -> u8 {
    detached(py, || oxccl_cli::run(arguments, again))
}
