//! The backend against the one suite, on the stand-in (`fixtures/nccl-standin`): host memory behind NCCL's and the driver's C interfaces,
//! with real asynchrony. It tests the backend's logic and says nothing about a GPU; `tests/real.rs` does.
//!
//! The library is built by `cargo build -p nccl-standin` through the variable CARGO, so that a clean clone needs nothing else.

#[path = "standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;

use backend_nccl::NcclGroup;
use conformance::{Harness, MakeOn, Mode, Processes, Threads, run_on, suite};
use ftcore::{Device, DeviceKind, Result};
use libtest_mimic::{Arguments, Completion, Trial};

/// Set in a rank that is a process of its own.
const RANK: &str = "OXCCL_CONFORMANCE_CASE";

fn main() -> ExitCode {
    standin::or_restart(&[]);
    let device = Device::new(DeviceKind::Cuda, 0);
    let make: MakeOn =
        Arc::new(|device, options| Ok(Box::new(NcclGroup::new("conformance", device, &options)?)));
    if std::env::var_os(RANK).is_some() {
        return run_on(&device, &[Mode::Processes], make);
    }
    match trials(&device, &make) {
        Ok(trials) => libtest_mimic::run(&Arguments::from_args(), trials).exit_code(),
        Err(error) => {
            eprintln!("the backend cannot be used here: {error}");
            ExitCode::FAILURE
        }
    }
}

fn trials(device: &Device, make: &MakeOn) -> Result<Vec<Trial>> {
    let threads: Arc<dyn Harness> = Arc::new(Threads::new(device.clone(), make.clone())?);
    let processes: Arc<dyn Harness> = Arc::new(Processes::new(device, make)?);
    let long = std::env::var_os("OXCCL_LONG").is_some();
    let as_processes = suite(processes)
        .into_iter()
        .map(|t| if long { t } else { spared(t) });
    Ok(suite(threads).into_iter().chain(as_processes).collect())
}

/// What an operation makes of the parts of more than two ranks is the same in processes as in threads, where it takes half as long.
fn spared(trial: Trial) -> Trial {
    const MOVING: [&str; 10] = [
        "::all_reduce::",
        "::reduce::",
        "::reduce_scatter",
        "::all_gather",
        "::all_to_all",
        "::broadcast::",
        "::gather::",
        "::scatter::",
        "::gather_",
        "::scatter_",
    ];
    let name = trial.name().to_string();
    let is_large = name.ends_with("::world3") || name.ends_with("::world4");
    if !is_large || !MOVING.iter().any(|part| name.contains(part)) {
        return trial;
    }
    Trial::ignorable_test(name, || {
        let why = "the same operation of as many ranks runs in threads; OXCCL_LONG=1 runs it";
        Ok(Completion::ignored_with(why))
    })
}
