//! The backend against the one suite on a real GPU with the real NCCL: the row `nccl`. Every trial is ignored with the reason where there
//! is no library, no driver or no GPU, and where a case needs more ranks than this machine can run.
//!
//! One rank per device; with `NCCL_MULTI_RANK_GPU_ENABLE=1` (recent NCCL) several ranks share one. Ranks are processes, as NCCL wants them.
//! Run: `cargo test -p backend-nccl --test nccl-real-conformance`, with `OXCCL_NCCL_PATH` if the library is not in one of the usual places.

use std::process::ExitCode;
use std::sync::Arc;

use backend_nccl::{CudaAccelerator, NcclFactory, NcclGroup};
use conformance::{Limit, Mode, Plan, cases};
use ftcore::registry::BackendFactory;
use ftcore::{Accelerator, Device, DeviceKind};
use libtest_mimic::{Arguments, Completion, Trial};

/// Why nothing can run here.
fn unusable() -> Option<String> {
    if let Err(e) = NcclFactory.probe() {
        return Some(e.to_string());
    }
    let library = NcclFactory.library().unwrap_or_default();
    library
        .contains("stand-in")
        .then(|| format!("this is not NCCL but a {library}"))
}

fn main() -> ExitCode {
    if let Some(reason) = unusable() {
        let trials = cases()
            .into_iter()
            .map(|case| {
                let reason = reason.clone();
                Trial::ignorable_test(format!("processes::{}", case.name), move || {
                    Ok(Completion::ignored_with(reason))
                })
            })
            .collect();
        return libtest_mimic::run(&Arguments::from_args(), trials).exit_code();
    }
    let shared = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
    // Ranks of one process that share a device share its context, too, and there calls of one can wait for kernels that wait for the other:
    // most cases of two ranks stalled on an H200.
    let (modes, limit) = match shared {
        true => (vec![Mode::Processes], Limit::NONE),
        false => (
            vec![Mode::Threads, Mode::Processes],
            Limit {
                ranks: CudaAccelerator.count(),
                why: "one rank per GPU; NCCL_MULTI_RANK_GPU_ENABLE=1 lets recent NCCL share one",
                ..Limit::NONE
            },
        ),
    };
    let plan = Plan {
        limit,
        // Starting CUDA takes a second, and processes take turns on a device that they share.
        lasting: true,
        at_once: Some(4),
        ..Plan::new(
            Device::new(DeviceKind::Cuda, 0),
            &modes,
            Arc::new(|device, options| Ok(Box::new(NcclGroup::new("real", device, &options)?))),
        )
    };
    plan.run()
}
