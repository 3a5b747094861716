//! Fault-tolerant Streaming DiLoCo on real text. See `oxccl_examples::diloco_replica` for what is trained and `program` for the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    oxccl_examples::program::main::<oxccl_examples::diloco_replica::DilocoArgs>()
}
