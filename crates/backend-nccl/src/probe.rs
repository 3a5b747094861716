//! Is NCCL usable here? The first thing that is missing, in the order in which one would look: library, driver, device.

use ftcore::{Error, Result};

use crate::cuda::driver::{device_count, driver};
use crate::cuda::gpu::Gpu;
use crate::raw::nccl;

/// `Ok`, or what is missing.
pub(crate) fn probe() -> Result<()> {
    nccl()?;
    match device_count()? {
        0 => Err(Error::unsupported("the CUDA driver sees no device")),
        _ => Ok(()),
    }
}

/// The library and the driver in words, as far as they are there.
pub(crate) fn library() -> Option<String> {
    let nccl = nccl().ok()?.describe();
    Some(match driver() {
        Ok(driver) => format!("{nccl}; {}", driver.describe()),
        Err(_) => nccl,
    })
}

/// Whether device 0, if there is one, reduces 8-bit floats: the table of the backend before a group exists.
pub(crate) fn native_fp8() -> bool {
    probe().is_ok() && Gpu::open(0).is_ok_and(|gpu| gpu.native_fp8())
}
