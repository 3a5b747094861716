//! The backend against the one suite with a library of 2.27: the newer functions are missing, and an abort does without. The same stand-in
//! as in `conformance.rs`, in which those names are changed.

#[path = "standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;

use backend_nccl::NcclGroup;
use conformance::{Limit, Mode, run_limited};
use ftcore::{Device, DeviceKind};

fn main() -> ExitCode {
    if !standin::is_ready() {
        return restart();
    }
    run_limited(
        &Device::new(DeviceKind::Cuda, 0),
        &[Mode::Threads],
        Arc::new(|device, options| Ok(Box::new(NcclGroup::new("conformance", device, &options)?))),
        Limit::of_a_wrapper(),
    )
}

/// This program again, on the changed library.
#[allow(clippy::expect_used, reason = "a test binary that cannot start ends")]
fn restart() -> ExitCode {
    let name = format!("oxccl-nccl-old-{}.so", std::process::id());
    let to = std::env::temp_dir().join(name);
    let old = standin::without(&standin::library(), to, &standin::NEWER);
    let status = standin::command(&old, &[("OXCCL_STANDIN_NCCL_VERSION", "22703")])
        .args(std::env::args_os().skip(1))
        .status();
    let _ = std::fs::remove_file(&old);
    let code = status.expect("this program starts again").code().unwrap_or(101);
    ExitCode::from(u8::try_from(code).unwrap_or(101))
}
