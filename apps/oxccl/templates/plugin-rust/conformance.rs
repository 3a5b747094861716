//! The suite that every backend passes, on this one.

use std::process::ExitCode;

use oxccl_conformance::{Mode, run};
use oxccl_plugin::ftcore::Device;
use oxccl_plugin::ftcore::registry::BackendFactory as _;

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |options| {
        acme::Factory.create(&Device::CPU, &options)
    })
}
