//! Gloo against the one suite over shared memory, with ranks as threads and as processes. `threads::` or `processes::` as a filter runs one.

use std::process::ExitCode;

use backend_gloo::GlooGroup;
use conformance::{Mode, run};

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |mut options| {
        options.hints.insert("transport".into(), "shm".into());
        Ok(Box::new(GlooGroup::new("conformance", options)?))
    })
}
