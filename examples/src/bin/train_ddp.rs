//! Fault-tolerant data parallel on the 8x8 digits. See `oxccl_examples::ddp_replica` for what is trained and `program` for the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    oxccl_examples::program::main::<oxccl_examples::ddp_replica::DdpArgs>()
}
