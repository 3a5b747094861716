//! xccl against the one suite, on the real oneCCL, with ranks as processes (it takes one rank per process).
//!
//! oneCCL takes about a second to start, so the data cases of a world share one set of ranks; whatever starts, splits off or
//! ends a communicator for its own sake has processes of its own. Where oneCCL is not there, everything is one ignored trial
//! with the probe's reason. `cargo xtask oneccl` prepares it.

use std::process::ExitCode;
use std::sync::Arc;

use backend_xccl::{XcclFactory, XcclGroup};
use conformance::{Mode, Plan};
use ftcore::Device;
use ftcore::registry::BackendFactory;
use libtest_mimic::{Arguments, Completion, Trial};

fn main() -> ExitCode {
    if let Err(reason) = XcclFactory.probe() {
        let trial = Trial::ignorable_test("processes::all_of_it", move || {
            Ok(Completion::ignored_with(reason.to_string()))
        });
        return libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code();
    }
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Processes],
        Arc::new(|_, options| Ok(Box::new(XcclGroup::new("conformance", options)?))),
    );
    Plan {
        lasting: true,
        // Its start is mostly sleep.
        at_once: Some(3),
        ..plan
    }
    .run()
}
