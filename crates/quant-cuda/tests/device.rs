//! The kernels against the host's codec, bit for bit, and quantised groups of CUDA tensors against those of host tensors: on the stand-in
//! of `fixtures/nccl-standin`, or with `OXCCL_GPU_TESTS` on a GPU with the real NCCL and NVRTC. The stand-in runs the host's codec, so there
//! it is the calls, the places and the steps that are compared; the arithmetic is on a GPU.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../../backend-nccl/tests/standin/mod.rs"]
mod standin;

#[path = "device/groups.rs"]
mod groups;
#[path = "device/kernels.rs"]
mod kernels;
#[path = "device/values.rs"]
mod values;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    standin::or_restart(&[]);
    let trials = kernels::trials().into_iter().chain(groups::trials());
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// A trial that fails by panicking.
fn trial(name: impl Into<String>, body: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        body();
        Ok(())
    })
}
