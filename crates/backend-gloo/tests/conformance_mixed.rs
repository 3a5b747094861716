//! Gloo against the one suite, with shared memory between some pairs of ranks and TCP between the others.

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::{Mode, Plan};
use ftcore::Device;

fn main() -> ExitCode {
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, options| Ok(Box::new(GlooGroup::mixed("conformance", options)?))),
    );
    Plan { large: true, ..plan }.run()
}
