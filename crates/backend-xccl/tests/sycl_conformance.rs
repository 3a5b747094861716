//! xccl on `xpu` against the one suite: the real oneCCL on SYCL queues and USM memory, with ranks as processes, two at most (four with
//! `OXCCL_LONG=1`).
//!
//! SYCL's CPU device stands in for an Intel GPU: the calls, the queues and the memory are the real ones, the driver (Level Zero)
//! and several devices are not seen. Where SYCL or oneCCL is not there, everything is one ignored trial with the probe's reason;
//! `cargo xtask oneccl --sycl` prepares them and prints the variables.

use std::process::ExitCode;
use std::sync::Arc;

use backend_xccl::{XcclXpuFactory, XpuGroup};
use conformance::{Limit, Mode, Plan};
use ftcore::registry::BackendFactory;
use ftcore::{Device, DeviceKind};
use libtest_mimic::{Arguments, Completion, Trial};

fn main() -> ExitCode {
    if let Err(reason) = XcclXpuFactory.probe() {
        let trial = Trial::ignorable_test("processes::all_of_it", move || {
            Ok(Completion::ignored_with(reason.to_string()))
        });
        return libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code();
    }
    let plan = Plan::new(
        Device::new(DeviceKind::Xpu, 0),
        &[Mode::Processes],
        Arc::new(|device, options| Ok(Box::new(XpuGroup::new("conformance", device, options)?))),
    );
    Plan {
        limit: Limit::unless_long(
            2,
            "every rank is a SYCL runtime with a thread per core; OXCCL_LONG=1 runs them",
        ),
        lasting: true,
        at_once: Some(1),
        ..plan
    }
    .run()
}
