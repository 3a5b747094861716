//! DiLoCo against data parallel at equal tokens, as a table. See `oxccl_examples::compare`.

use std::process::ExitCode;

use clap::Parser;
use oxccl_examples::compare::{CompareArgs, compare};

fn main() -> ExitCode {
    oxccl_examples::drive::main_with(|| compare(&CompareArgs::parse()).map(|()| ExitCode::SUCCESS))
}
