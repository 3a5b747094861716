//! The two programs with `--device xpu`: gradients are reduced by the real oneCCL on SYCL queues and USM memory, each replica on the
//! device that its number gives it; one is killed inside a reduction and started again; all end bitwise equal.
//!
//! Where SYCL or oneCCL is not there the tests are ignored with the probe's reason. `cargo xtask oneccl --sycl` prepares both, with
//! SYCL's CPU device as a stand-in: what only an Intel GPU can show (its speed, several devices) is not shown here.

mod survivors;

use std::process::ExitCode;

use ftcore::{Device, DeviceKind};
use survivors::{Row, run};

/// The backend is the device kind's default.
const ROWS: &[Row] = &[
    Row {
        name: "train_ddp::survives_a_kill_on_xpu_and_ends_equal",
        program: env!("CARGO_BIN_EXE_train_ddp"),
        arguments: "--replicas 2 --steps 1000 --kill 1@100 --device xpu",
        killed_at: 100,
        log: "gradients are reduced on this device",
        is_long: false,
    },
    Row {
        name: "train_diloco::survives_a_kill_on_xpu_and_ends_equal",
        program: env!("CARGO_BIN_EXE_train_diloco"),
        arguments: "--rounds 1200 --sync-every 8 --d-model 32 --layers 2 --seq 32 --batch 2 --kill 1@40 --device xpu --quantize int8",
        killed_at: 40,
        log: "gradients are reduced on this device",
        is_long: true,
    },
];

fn main() -> ExitCode {
    run(&Device::new(DeviceKind::Xpu, 0), ROWS)
}
