//! A quantised group over isolated oneCCL against the one suite, with ranks as threads, in small worlds.
//!
//! As for gloo (`quant-conformance`): what the suite's exact oracle cannot be held to is ignored with that reason; the suite probes
//! groups that sum no integers with small whole numbers in f32, which f16, the format here, holds exactly.

use std::process::ExitCode;
use std::sync::Arc;

use backend_xccl::XcclFactory;
use conformance::{Case, Harness, MakeOn, Threads, cases};
use ftcore::registry::BackendFactory;
use ftcore::{Device, GroupOptions, ProcessGroup, Result};
use isolate::{IsolateOptions, IsolatedGroup};
use libtest_mimic::{Arguments, Completion, Trial};
use quant::{Codec, QuantizedGroup};

/// A selection: what the cases find in oneCCL itself they find in its own rows. Hundreds of operations at once of three ranks that
/// spin on two cores take longer than their deadline when other programs run beside them.
fn is_selected(case: &Case) -> bool {
    case.world == 2 || (case.world == 3 && case.shares && !case.name.starts_with("lifetime::many"))
}

fn make(device: &Device, options: GroupOptions) -> Result<Box<dyn ProcessGroup>> {
    let timeout = options.timeout;
    let inner = Arc::new(IsolatedGroup::new(IsolateOptions {
        options,
        ..IsolateOptions::new("xccl", device.clone())
    })?);
    Ok(Box::new(QuantizedGroup::new(inner, Codec::F16, timeout)?))
}

/// Why a case that the capabilities call for cannot be held to a quantised group.
fn inapplicable(name: &str) -> Option<&'static str> {
    let rounded = name.starts_with("all_reduce::") || name.starts_with("reduce_scatter");
    rounded.then_some("the suite's oracle is exact, the format is not")
}

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    let mut arguments = Arguments::from_args();
    // A start of oneCCL is mostly sleep.
    arguments.test_threads.get_or_insert(3);
    let on: MakeOn = Arc::new(make);
    let harness = XcclFactory.probe().and_then(|()| Threads::new(Device::CPU, on));
    let harness = match harness {
        Ok(harness) => Arc::new(harness.lasting()),
        Err(reason) => {
            let trial = Trial::ignorable_test("threads::all_of_it", move || {
                Ok(Completion::ignored_with(reason.to_string()))
            });
            return libtest_mimic::run(&arguments, vec![trial]).exit_code();
        }
    };
    let mut cases = cases();
    cases.retain(is_selected);
    cases.sort_by_key(|case| (!case.shares, case.world));
    let trials = cases.into_iter().map(|case| {
        let harness = harness.clone();
        Trial::ignorable_test(format!("{}::{}", harness.name(), case.name), move || {
            let unmet = case.unmet(harness.capabilities(), harness.real_processes());
            let reason = unmet.or_else(|| inapplicable(&case.name).map(str::to_string));
            if let Some(reason) = reason {
                return Ok(Completion::ignored_with(reason));
            }
            harness.run(&case)?;
            Ok(Completion::Completed)
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
