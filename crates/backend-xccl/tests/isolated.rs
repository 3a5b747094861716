//! xccl in child processes against the one suite: data, failure and reconfigure cases, all on the real oneCCL. What oneCCL
//! cannot do (abort, start again, several ranks in one program) comes from isolation.
//!
//! The data cases of a world share one group; those in which something fails, ends or is configured again have their own.

use std::process::ExitCode;
use std::sync::Arc;

use backend_xccl::XcclFactory;
use conformance::{Limit, Mode, Plan};
use ftcore::Device;
use ftcore::registry::BackendFactory;
use isolate::{IsolateOptions, IsolatedGroup};
use libtest_mimic::{Arguments, Completion, Trial};

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    if let Err(reason) = XcclFactory.probe() {
        let trial = Trial::ignorable_test("threads::all_of_it", move || {
            Ok(Completion::ignored_with(reason.to_string()))
        });
        return libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code();
    }
    // Ranks as threads of this process: each has a oneCCL of its own all the same.
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads],
        Arc::new(|device, mut options| {
            // For the cases of ranks that call different things; the rows of worlds run without it.
            let hint = ("mismatch_detection".to_string(), "on".to_string());
            options.hints.extend([hint]);
            Ok(Box::new(IsolatedGroup::new(IsolateOptions {
                options,
                ..IsolateOptions::new("xccl", device.clone())
            })?))
        }),
    );
    Plan {
        lasting: true,
        limit: Limit::of_an_isolated_vendor(),
        // A start of oneCCL is mostly sleep.
        at_once: Some(3),
        ..plan
    }
    .run()
}
