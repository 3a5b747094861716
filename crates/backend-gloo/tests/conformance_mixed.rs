//! Gloo against the one suite, with shared memory between some pairs of ranks and TCP between the others.

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::{Limit, Mode, Plan};
use ftcore::Device;

fn main() -> ExitCode {
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, options| Ok(Box::new(GlooGroup::mixed("conformance", options)?))),
    );
    Plan {
        large: true,
        // Each transport by itself has rows of both modes.
        limit: Limit::NONE.kills_only_again(),
        ..plan
    }
    .run()
}
