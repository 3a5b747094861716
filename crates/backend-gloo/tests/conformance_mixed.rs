//! Gloo against the one suite, with shared memory between some pairs of ranks and TCP between the others.

use std::process::ExitCode;

use backend_gloo::GlooGroup;
use conformance::{Mode, run};

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |options| {
        Ok(Box::new(GlooGroup::mixed("conformance", options)?))
    })
}
