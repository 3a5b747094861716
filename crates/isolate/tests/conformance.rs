//! Gloo in child processes against the one suite, with ranks as threads and as processes: every rank has its own child.

use std::process::ExitCode;

use backend_gloo as _;
use conformance::{Mode, run};
use ftcore::Device;
use oxccl_isolate::{IsolateOptions, IsolatedGroup};

fn main() -> ExitCode {
    oxccl_isolate::run_child_if_asked();
    run(&[Mode::Threads, Mode::Processes], |options| {
        Ok(Box::new(IsolatedGroup::new(IsolateOptions {
            options,
            ..IsolateOptions::new("gloo", Device::CPU)
        })?))
    })
}
