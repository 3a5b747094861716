//! Gloo against the one suite, over TCP with several connections for large payloads.

use std::process::ExitCode;

use backend_gloo::GlooGroup;
use conformance::{Mode, run};

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |mut options| {
        options.hints.insert("transport".into(), "tcp".into());
        options.hints.insert("connections".into(), "4".into());
        Ok(Box::new(GlooGroup::new("conformance", options)?))
    })
}
