//! xccl against the one suite, on the real oneCCL, with ranks as processes (it takes one rank per process).
//!
//! Where oneCCL is not there, everything is one ignored trial with the probe's reason. `cargo xtask oneccl` prepares it.

use std::process::ExitCode;

use backend_xccl::{XcclFactory, XcclGroup};
use conformance::{Mode, run};
use ftcore::registry::BackendFactory;
use libtest_mimic::{Arguments, Completion, Trial};

fn main() -> ExitCode {
    if let Err(reason) = XcclFactory.probe() {
        let trial = Trial::ignorable_test("processes::all_of_it", move || {
            Ok(Completion::ignored_with(reason.to_string()))
        });
        return libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code();
    }
    run(&[Mode::Processes], |options| {
        Ok(Box::new(XcclGroup::new("conformance", options)?))
    })
}
