//! The backend against the one suite, on the stand-in (`fixtures/nccl-standin`): host memory behind NCCL's and the driver's C interfaces,
//! with real asynchrony. It tests the backend's logic and says nothing about a GPU; `tests/real.rs` does.
//!
//! The library is built by `cargo build -p nccl-standin` through the variable CARGO, so that a clean clone needs nothing else.

#[path = "standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;

use backend_nccl::NcclGroup;
use conformance::{Limit, Mode, run_limited};
use ftcore::{Device, DeviceKind};

fn main() -> ExitCode {
    standin::or_restart(&[]);
    run_limited(
        &Device::new(DeviceKind::Cuda, 0),
        &[Mode::Threads, Mode::Processes],
        Arc::new(|device, options| Ok(Box::new(NcclGroup::new("conformance", device, &options)?))),
        Limit::NONE.kills_only_again(),
    )
}
