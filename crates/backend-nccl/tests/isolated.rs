//! NCCL in child processes against the one suite: tensors and events really cross by the driver's IPC handles. On the stand-in of
//! `fixtures/nccl-standin`, whose handles name shared memory. What fails on purpose is in `scenarios/isolated.rs`.

#[path = "standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;

use backend_nccl as _;
use conformance::{Limit, Mode, Plan};
use ftcore::{Device, DeviceKind};
use isolate::{IsolateOptions, IsolatedGroup};

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    // Work on streams comes late, so that an order that was forgotten shows as wrong data.
    // Not all of it: waking up costs more than the wait.
    standin::or_restart(&[
        ("OXCCL_STANDIN_CUDA_DELAY_US", "150"),
        ("OXCCL_STANDIN_CUDA_DELAY_SHARE", "5"),
    ]);
    let plan = Plan::new(
        Device::new(DeviceKind::Cuda, 0),
        &[Mode::Threads],
        Arc::new(|device, mut options| {
            // For the cases of ranks that call different things; the rows of worlds run without it.
            let hint = ("mismatch_detection".to_string(), "on".to_string());
            options.hints.extend([hint]);
            Ok(Box::new(IsolatedGroup::new(IsolateOptions {
                options,
                ..IsolateOptions::new("nccl", device.clone())
            })?))
        }),
    );
    Plan {
        // A child for each rank.
        lasting: true,
        limit: Limit::of_an_isolated_vendor(),
        ..plan
    }
    .run()
}
