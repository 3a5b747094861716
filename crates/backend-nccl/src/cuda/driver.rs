//! Finding the CUDA driver, once per process.
//!
//! `OXCCL_CUDA_PATH` names the driver library (a file); without it the loader's `libcuda.so.1` is taken, which the NVIDIA driver
//! installs. Nothing is opened before the first question, and a machine without a driver gets a reason, never a panic.

use std::path::PathBuf;
use std::sync::OnceLock;

use ftcore::Result;

use super::raw::Driver;

/// Names the driver library to use instead of the loader's.
pub(crate) const ENV_CUDA_PATH: &str = "OXCCL_CUDA_PATH";
const FILE: &str = "libcuda.so.1";

/// The driver. The first failure is kept: a driver does not appear while a program runs.
pub(crate) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER
        .get_or_init(|| {
            let path = std::env::var_os(ENV_CUDA_PATH)
                .filter(|v| !v.is_empty())
                .map_or_else(|| PathBuf::from(FILE), PathBuf::from);
            Driver::open(&path)
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// How many devices there are; the error says why it cannot be known.
pub(crate) fn device_count() -> Result<u32> {
    driver()?.device_count()
}
