//! The `oxccl` command, which is [`oxccl::command`].

use std::process::ExitCode;

fn main() -> ExitCode {
    // A child of an isolated group is this program too.
    oxccl::backend::init();
    ExitCode::from(oxccl::command::run(std::env::args_os(), Vec::new()))
}
