//! The one suite over a quantised gloo group, with ranks as threads and as processes. `threads::` or `processes::` as a filter runs one.
//!
//! The suite compares reductions with an exact oracle, and a quantised group rounds: those cases are ignored here with that reason, and
//! `groups.rs` holds the quantised ones. The small integers by which the suite probes groups go through the quantised path as f16, in which
//! they are exact (`integers`, a stand-in for this test only).

mod integers;

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::{Harness, MakeOn, Processes, Threads, cases};
use ftcore::{Device, GroupOptions, ProcessGroup, Result};
use integers::IntegersAsFloats;
use libtest_mimic::{Arguments, Completion, Trial};
use quant::{Codec, QuantizedGroup};

fn make(options: GroupOptions) -> Result<Box<dyn ProcessGroup>> {
    let timeout = options.timeout;
    let inner = Arc::new(GlooGroup::new("conformance", options)?);
    let group = QuantizedGroup::new(inner, Codec::F16, timeout)?;
    Ok(Box::new(IntegersAsFloats::new(Arc::new(group))))
}

/// Why a case that the capabilities call for cannot be held to a quantised group.
fn inapplicable(name: &str) -> Option<&'static str> {
    const EXACT: &str = "the suite's oracle is exact, the format is not";
    const REFUSED: &str =
        "the case calls with f64 or max, which a quantised group refuses before anybody could compare";
    let beginnings = [
        ("all_reduce::", EXACT),
        ("reduce_scatter", EXACT),
        ("mismatch::l15_dtype", REFUSED),
        ("mismatch::l15_reduction", REFUSED),
    ];
    beginnings
        .into_iter()
        .find(|(beginning, _)| name.starts_with(beginning))
        .map(|(_, reason)| reason)
}

fn main() -> ExitCode {
    // A process rank was started for one case, which the suite itself runs.
    if std::env::var_os("OXCCL_CONFORMANCE_CASE").is_some() {
        return conformance::run(&[], make);
    }
    let on: MakeOn = Arc::new(|_, options| make(options));
    let harnesses = Threads::new(Device::CPU, on.clone()).and_then(|threads| {
        let both: [Arc<dyn Harness>; 2] = [Arc::new(threads), Arc::new(Processes::new(&Device::CPU, &on)?)];
        Ok(both)
    });
    let harnesses = match harnesses {
        Ok(harnesses) => harnesses,
        Err(error) => {
            eprintln!("the group cannot be used here: {error}");
            return ExitCode::FAILURE;
        }
    };
    let trials = harnesses.into_iter().flat_map(|harness| {
        cases().into_iter().map(move |case| {
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
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}
