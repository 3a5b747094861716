//! The device kind `xpu`: Intel GPUs through SYCL, and groups on their memory.
//!
//! `driver` chooses the devices and `device` opens one; `stream`, `event` and `memory` are what ftcore's traits ask for, and
//! `accelerator` answers for the kind. A group (`group`) has the driver of the host path: its executors lend device memory to
//! `ops`, which enqueues oneCCL's calls on the group's own queue (`comm`) after the caller's stream, or takes values to the host
//! where the library lacks an operation. Everything unsafe is in `raw::sycl` and `raw::device_calls`.
//!
//! Which devices there are: `OXCCL_XPU_DEVICES`, a list of SYCL's device filters separated by commas; without it all GPUs that
//! Level Zero knows. `OXCCL_XPU_DEVICES=cpu` takes SYCL's CPU device, a stand-in for tests that need no Intel GPU.

mod accelerator;
pub(crate) mod comm;
pub(crate) mod device;
mod driver;
pub(crate) mod event;
mod group;
mod memory;
pub(crate) mod ops;
mod probe;
pub(crate) mod stream;

pub use accelerator::{XpuAccelerator, alloc_shared, device_for_replica};
pub(crate) use group::library_and_side;
pub use group::{XcclXpuFactory, XpuGroup};
pub use stream::XpuStream;
