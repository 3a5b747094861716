//! Backends and device kinds as dylibs, over a C ABI of our own, from both sides.
//!
//! [`abi`] has the plain C structs, from which the header `include/oxccl_plugin.h` is generated. The *host* side (feature
//! `host`, the default) finds plugins, tries each in a child process first, opens it and registers what it brings: see
//! [`discover`] and [`load`]. The *guest* side (feature `guest`) makes a plugin out of any `BackendFactory`: see
//! [`export!`](crate::export). No Rust type crosses: two sides built by different compilers fit, and so does a plugin in C.
//!
//! The rules of the ABI and a walk-through are in `docs/plugins.md`.

#![cfg_attr(
    not(all(feature = "host", feature = "guest")),
    allow(
        dead_code,
        reason = "the two sides share the conversions, and each needs one direction"
    )
)]

pub mod abi;
mod fault;
#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "host")]
mod host;
mod offer;
mod text;

#[cfg(feature = "host")]
pub use host::{
    ENV_HELPER, ENV_LIBRARY, ENV_PATH, ENV_PROBE_SECONDS, Loaded, Report, discover, discover_with, load,
    load_within, open_trusted, verdicts_for_job,
};

/// The C header, as text.
#[cfg(feature = "host")]
pub const HEADER: &str = include_str!("../include/oxccl_plugin.h");

/// The types that a plugin's backend is written against, in the version that this crate uses.
pub use ftcore;
