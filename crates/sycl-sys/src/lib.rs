//! SYCL (queues, events, USM memory, devices) as a table of functions that is opened at run time.
//!
//! SYCL itself is C++ and needs Intel's compiler. dpctl, which `pip install dpctl` brings, wraps its runtime in a C library,
//! `libDPCTLSyclInterface.so`. [`Library::open`] finds it ([`search`]), prepares the process ([`environment`]), opens it with
//! what it needs and looks up every function; what a version lacks is `None`. `types` has the values that cross. Everything
//! here is as raw as the C API: the safe layer is `backend-xccl`.
//!
//! The library stays open until the process ends: it starts threads of its own and cannot be unloaded.

pub mod environment;
mod library;
pub mod search;
mod types;

pub use library::{Functions, Library};
pub use types::{
    BackendType, Bool, DeviceRef, DeviceType, EventRef, EventStatus, IN_ORDER, QueueRef, SelectorRef,
};
