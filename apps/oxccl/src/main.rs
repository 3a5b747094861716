//! The `oxccl` command, which is [`oxccl_cli::run`].

use std::process::ExitCode;

fn main() -> ExitCode {
    // A child of an isolated group is this program too.
    oxccl::backend::init();
    ExitCode::from(oxccl_cli::run(std::env::args_os(), Vec::new()))
}
