//! Intel's oneCCL (the C API of `libccl.so.2`) as a table of functions that is opened at run time.
//!
//! No header and no link step: [`Library::open`] finds the library ([`search`]), prepares the process for it
//! ([`environment`], [`output`]), opens it with the plugin that does the work, and looks up every function; what a version
//! lacks is `None`. `types` has the values that cross. Everything here is as raw as the C API: the safe layer is
//! `backend-xccl`.
//!
//! The library stays open until the process ends: it starts threads of its own and cannot be unloaded.

pub mod environment;
mod library;
pub mod output;
pub mod search;
mod types;

pub use environment::Flavour;
pub use library::{Functions, Library};
pub use types::{Comm, Config, DataType, RedOp, ResultCode, Stream, UniqueId, Version};
