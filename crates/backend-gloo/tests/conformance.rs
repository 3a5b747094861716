//! Gloo against the one suite, with ranks as threads and as processes. `threads::` or `processes::` as a filter runs one.

use std::process::ExitCode;

use backend_gloo::GlooGroup;
use conformance::{Mode, run};

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |options| {
        Ok(Box::new(GlooGroup::new("conformance", options)?))
    })
}
