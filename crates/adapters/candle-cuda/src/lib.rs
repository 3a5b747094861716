//! candle's CUDA tensors in oxccl's groups, without copies and in the order of candle's stream.
//!
//! [`lend`] makes an [`ftcore::Tensor`] of a candle tensor's own memory, [`stream_of`] an [`ftcore::Stream`] of the stream on which
//! candle works (by default the calling thread's own), and [`submit`] does both around one operation: it comes after everything that
//! candle has enqueued, everything that candle enqueues later comes after it, and the host waits for nothing.
//!
//! Everything is behind the feature `cuda`, which needs nvcc and the CUDA libraries at build time, as candle's own does.
#![cfg(feature = "cuda")]

mod loan;
mod raw;

pub use loan::{lend, stream_of, submit};
