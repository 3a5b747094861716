//! The two programs over the real oneCCL: two replica groups, one of them killed inside a reduction and started again; all end
//! bitwise equal. oneCCL has no abort, so each replica's group runs in a child process by itself, without a flag.
//!
//! Where oneCCL is not there the tests are ignored with the probe's reason. `cargo xtask oneccl` prepares it.

mod survivors;

use std::process::ExitCode;

use survivors::{Row, run};

/// Small, on the real data all the same.
const ROWS: &[Row] = &[
    Row {
        name: "train_diloco::survives_a_kill_and_ends_equal",
        program: env!("CARGO_BIN_EXE_train_diloco"),
        arguments: "--rounds 200 --sync-every 8 --d-model 32 --layers 2 --seq 32 --batch 2 --kill 1@60 --backend xccl",
        killed_at: 60,
        log: "runs in a child process",
        is_long: false,
    },
    Row {
        name: "train_ddp::survives_a_kill_and_ends_equal",
        program: env!("CARGO_BIN_EXE_train_ddp"),
        arguments: "--replicas 2 --steps 1500 --kill 1@300 --backend xccl",
        killed_at: 300,
        log: "runs in a child process",
        is_long: false,
    },
];

fn main() -> ExitCode {
    run(&ftcore::Device::CPU, ROWS)
}
