//! Intel Gaudi's HCCL as an oxccl backend outside oxccl's tree: `hccl` for the device kind `hpu`.
//!
//! This crate is a plugin: a dylib that a program names in `OXCCL_PLUGIN_PATH`. It depends on nothing of oxccl but the
//! guest side of the plugin crate, and opens the vendor's libraries at run time (`raw`). Data flows down: [`HcclGroup`]
//! takes validated operations (`group`), `rendezvous` makes a communicator per epoch, the threads of `engine` put
//! operations on streams (`issue`), watch them end and keep their deadlines. `runtime` holds the process's one device,
//! `stream` its streams and events, `accelerator` answers for the device kind.
//!
//! What was and what was not exercised on hardware is in the README: nothing was. All tests run over a stand-in.
//!
//! Options: the hints `credentials` and `encrypt`, for the control connections between ranks; any other is refused (INV-9). Environment: `OXCCL_HCCL_PATH` is the file or folder of
//! the vendor libraries; `OXCCL_HCCL_MODULE_ID`, else Intel's own `HLS_MODULE_ID`, says which module (0 to 7) this process
//! takes; without both it takes any free one.

#![deny(unsafe_code)]

mod accelerator;
mod driver;
#[allow(unsafe_code, reason = "the C entry points of a plugin")]
mod export;
mod group;
mod issue;
mod probe;
#[allow(unsafe_code, reason = "bindings; every block names its invariant")]
mod raw;
mod rendezvous;
mod runtime;
mod stream;

pub use plugin::ftcore;

pub use accelerator::HpuAccelerator;
pub use driver::HcclDriver;
pub use group::{HcclBackend, HcclGroup};
pub use probe::HcclFactory;
