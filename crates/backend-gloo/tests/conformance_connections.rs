//! Gloo against the one suite, over TCP with several connections for large payloads.

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::{Limit, Mode, run_limited};
use ftcore::Device;

fn main() -> ExitCode {
    run_limited(
        &Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, mut options| {
            options.hints.insert("transport".into(), "tcp".into());
            options.hints.insert("connections".into(), "4".into());
            Ok(Box::new(GlooGroup::new("conformance", options)?))
        }),
        Limit::unless_long(
            3,
            "larger worlds over TCP have rows of their own; OXCCL_LONG=1 runs them",
        )
        .kills_only_again(),
    )
}
