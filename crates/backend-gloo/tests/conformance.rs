//! Gloo against the one suite over shared memory, with ranks as threads and as processes. `threads::` or `processes::` as a filter runs one.

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::{Mode, Plan};
use ftcore::Device;

fn main() -> ExitCode {
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, mut options| {
            options.hints.insert("transport".into(), "shm".into());
            Ok(Box::new(GlooGroup::new("conformance", options)?))
        }),
    );
    Plan { large: true, ..plan }.run()
}
