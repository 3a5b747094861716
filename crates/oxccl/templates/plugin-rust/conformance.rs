//! The suite that every backend passes, on this one.

use std::process::ExitCode;

use conformance::{Mode, run};
use plugin::ftcore::Device;
use plugin::ftcore::registry::BackendFactory as _;

fn main() -> ExitCode {
    run(&[Mode::Threads, Mode::Processes], |options| {
        acme::Factory.create(&Device::CPU, &options)
    })
}
