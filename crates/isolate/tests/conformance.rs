//! Gloo in child processes against the one suite.

mod suite;

use std::process::ExitCode;

use backend_gloo as _;

fn main() -> ExitCode {
    suite::run("gloo")
}
