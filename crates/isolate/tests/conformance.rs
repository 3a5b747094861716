//! Gloo in child processes against the one suite, with ranks as threads and as processes: every rank has its own child.

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo as _;
use conformance::{Limit, Mode, Plan};
use ftcore::Device;
use oxccl_isolate::{IsolateOptions, IsolatedGroup};

fn main() -> ExitCode {
    oxccl_isolate::run_child_if_asked();
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, options| {
            Ok(Box::new(IsolatedGroup::new(IsolateOptions {
                options,
                ..IsolateOptions::new("gloo", Device::CPU)
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
