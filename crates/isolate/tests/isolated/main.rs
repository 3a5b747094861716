//! Isolated groups where it hurts: killed children, killed parents, wedged and crashing backends, noise, leaks, options.
//!
//! One test at a time: many count the processes, threads and descriptors of this process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod children;
mod endings;
mod lessons;
mod losses;
mod odd;
mod rig;

use std::process::ExitCode;

use backend_gloo as _;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    oxccl_isolate::run_child_if_asked();
    if let Some(code) = endings::as_quitter()
        .or_else(children::as_victim)
        .or_else(lessons::as_teller)
    {
        return code;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let tests: Vec<(&str, fn())> = [children::TESTS, endings::TESTS, losses::TESTS, lessons::TESTS].concat();
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
