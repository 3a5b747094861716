//! oxccl's CUDA backend: NCCL, opened at run time. Nothing of CUDA is needed to build, and a machine without it gets a reason.
//!
//! Data flows down: [`NcclGroup`] takes validated operations (`group`); ftcore's engine hands them to the `driver` of a configuration,
//! which enqueues collectives on its stream (`enqueue`) and messages in channels (`channels`). [`ftcore::peers`] carries what NCCL does not:
//! who died, who aborted, who is missing. `raw` is NCCL and `cuda/raw` the driver; nothing else is unsafe.
//!
//! Linking this crate registers the backend `nccl` and the device kind `cuda`.
//!
//! Options: all typed options of [`ftcore::GroupOptions`] reach the library as they are (`traffic_class` from 2.26 on); calls are
//! non-blocking unless `blocking` says otherwise. The hint `contributors=all` leaves out the counting of contributors: averages are then
//! NCCL's own and no rank may abstain.
//!
//! Environment: `OXCCL_NCCL_PATH` (the library, see `nccl_sys::locate`), `OXCCL_CUDA_PATH` (the driver library instead of the loader's
//! `libcuda.so.1`), `OXCCL_NCCL_HOST` (the address of rank 0's control port for other hosts). NCCL's own variables work as ever.

mod capability;
mod channels;
mod compared;
mod cuda;
mod driver;
mod enqueue;
mod group;
mod options;
mod probe;
mod raw;
mod split;
mod threads;

use std::sync::Arc;

use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{Capabilities, Device, GroupOptions, ProcessGroup, Result};

pub use cuda::accelerator::CudaAccelerator;
pub use cuda::raw::program::CudaProgram;
pub use group::{NcclBackend, NcclGroup};

/// Makes NCCL groups for the registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct NcclFactory;

impl BackendFactory for NcclFactory {
    fn probe(&self) -> Result<()> {
        probe::probe()
    }

    /// What it offers on device 0, or would with a library.
    fn capabilities(&self) -> Capabilities {
        capability::capabilities(probe::native_fp8(), true, false)
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        Ok(Box::new(NcclGroup::new("nccl", device, options)?))
    }

    fn library(&self) -> Option<String> {
        probe::library()
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "nccl",
        device: "cuda",
        origin: "backend-nccl",
        version: env!("CARGO_PKG_VERSION"),
        factory: || Arc::new(NcclFactory),
    }
}
