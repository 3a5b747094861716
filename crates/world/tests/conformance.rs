//! A group that dispatches by device against the one suite, with gloo as its only member: nothing may be lost on the way.

use std::process::ExitCode;
use std::sync::Arc;

// Links the backend, which registers itself.
use backend_gloo as _;
use conformance::{Limit, Mode, run_limited};
use ftcore::Device;
use oxccl_world::{BackendSpec, WorldOptions};

fn main() -> ExitCode {
    run_limited(
        &Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, options| {
            let made = WorldOptions {
                backends: "cpu:gloo".parse::<BackendSpec>()?,
                options,
                ..WorldOptions::default()
            };
            made.group("conformance")
        }),
        Limit::of_a_wrapper(),
    )
}
