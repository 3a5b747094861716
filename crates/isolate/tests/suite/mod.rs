//! The one suite over a backend in child processes.

use std::process::ExitCode;
use std::sync::Arc;

use conformance::{Limit, Mode, Plan};
use ftcore::Device;
use oxccl_isolate::{IsolateOptions, IsolatedGroup};

/// First thing in `main`: with ranks as threads and as processes, each of which has a child of its own.
pub(crate) fn run(backend: &'static str) -> ExitCode {
    oxccl_isolate::run_child_if_asked();
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(move |_, options| {
            Ok(Box::new(IsolatedGroup::new(IsolateOptions {
                options,
                ..IsolateOptions::new(backend, Device::CPU)
            })?))
        }),
    );
    Plan {
        // A child for each rank.
        lasting: true,
        limit: Limit::of_a_wrapper(),
        ..plan
    }
    .run()
}
