//! The suite's lives and deaths with `reuse_communicators=on`: communicators are revoked, split, shrunk and grown out of the last ones instead of
//! made anew. On the stand-in, as in `conformance.rs`; what fails on purpose is in `scenarios/reuse.rs`.

#[path = "standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;

use backend_nccl::NcclGroup;
use conformance::{Harness, MakeOn, Mode, Processes, Threads, run_on, suite};
use ftcore::{Device, DeviceKind};
use libtest_mimic::{Arguments, Trial};

/// Set in a rank that is a process of its own.
const RANK: &str = "OXCCL_CONFORMANCE_CASE";

fn main() -> ExitCode {
    standin::or_restart(&[]);
    let device = Device::new(DeviceKind::Cuda, 0);
    let make: MakeOn = Arc::new(|device, mut options| {
        options.hints.insert("reuse_communicators".into(), "on".into());
        Ok(Box::new(NcclGroup::new("conformance", device, options)?))
    });
    if std::env::var_os(RANK).is_some() {
        return run_on(&device, &[Mode::Processes], make);
    }
    let threads = Threads::new(device.clone(), make.clone()).map(|h| Arc::new(h) as Arc<dyn Harness>);
    let processes = Processes::new(&device, &make).map(|h| Arc::new(h) as Arc<dyn Harness>);
    let mut trials: Vec<Trial> = Vec::new();
    for harness in [threads, processes] {
        match harness {
            Ok(harness) => trials.extend(suite(harness)),
            Err(error) => {
                eprintln!("the backend cannot be used here: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    // The rest does not depend on where the communicator comes from.
    trials.retain(|t| t.name().contains("::lifetime::") || t.name().contains("::failures::"));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
