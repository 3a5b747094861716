//! Gloo against the one suite, over TCP between all ranks.

use std::process::ExitCode;

use backend_gloo::GlooGroup;
use conformance::{Mode, run};

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |mut options| {
        options.hints.insert("transport".into(), "tcp".into());
        Ok(Box::new(GlooGroup::new("conformance", options)?))
    })
}
