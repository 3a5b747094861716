//! CUDA as the backend needs it: devices, streams, events, memory and a few kernels, over the driver API.
//!
//! `driver` finds the library, `raw` is its table (the only unsafe part), `gpu` one opened device with its caches, `stream` and
//! `event` the traits of ftcore, `memory` blocks and tensors, `slots` where contributors are counted, `pinned` host memory for copies, `lost`
//! what is never freed, `kernels` the PTX, `accelerator` what ftcore asks.

pub(crate) mod accelerator;
pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod gpu;
mod ipc;
pub(crate) mod kernels;
pub(crate) mod lost;
pub(crate) mod memory;
pub(crate) mod pinned;
pub(crate) mod raw;
pub(crate) mod slots;
pub(crate) mod stream;
