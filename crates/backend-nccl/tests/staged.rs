//! Gloo behind CUDA tensors (`ftcore::Staged`, which the registry falls back to) against the one suite. The device is the stand-in of
//! `fixtures/nccl-standin`: host memory behind the driver's C interface, with real asynchrony. What fails on purpose is in
//! `scenarios/staged.rs`.

#[path = "standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;

// Links the backend and the device kind, which register themselves.
use backend_gloo as _;
use backend_nccl as _;
use conformance::{Limit, Mode, Plan};
use ftcore::{Device, DeviceKind, Registry};

fn main() -> ExitCode {
    // Work on streams comes late, so that an order that was forgotten shows as wrong data.
    // Not all of it: waking up costs more than the wait.
    standin::or_restart(&[
        ("OXCCL_STANDIN_CUDA_DELAY_US", "150"),
        ("OXCCL_STANDIN_CUDA_DELAY_SHARE", "5"),
    ]);
    let plan = Plan::new(
        Device::new(DeviceKind::Cuda, 0),
        &[Mode::Threads, Mode::Processes],
        Arc::new(|device, options| Registry::global().create("gloo", device, &options)),
    );
    Plan {
        limit: Limit::of_a_wrapper(),
        lasting: true,
        ..plan
    }
    .run()
}
