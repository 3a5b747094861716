//! A group that dispatches by device against the one suite, with gloo as its only member: nothing may be lost on the way. The cases that have
//! messages again, where another gloo matches them.

use std::process::ExitCode;
use std::sync::Arc;

// Links the backend, which registers itself.
use backend_gloo as _;
use conformance::{Limit, Mode, Part, Plan};
use ftcore::Device;
use oxccl_world::{BackendSpec, WorldOptions};

/// The argument of a rank as a process whose messages are matched.
const MATCHED: &str = "matched";

fn plan(backends: &'static str) -> Plan {
    let make = Arc::new(move |_: &Device, options| {
        let made = WorldOptions {
            backends: backends.parse::<BackendSpec>()?,
            options,
            ..WorldOptions::default()
        };
        made.group("conformance")
    });
    Plan {
        limit: Limit::of_a_wrapper(),
        lasting: true,
        ..Plan::new(Device::CPU, &[Mode::Threads, Mode::Processes], make)
    }
}

fn main() -> ExitCode {
    let mut matched = plan("cpu:gloo,messages:gloo");
    if std::env::args().nth(1).as_deref() == Some(MATCHED) {
        return matched.run();
    }
    if let Ok(program) = std::env::current_exe() {
        matched.again = vec![program.into(), MATCHED.into()];
    }
    matched.part = Some(Part::messages("matched::"));
    plan("cpu:gloo").run_with(&[matched])
}
