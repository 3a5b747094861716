//! The one suite over a quantised gloo group, with ranks as threads and as processes. `threads::` or `processes::` as a filter runs one.
//!
//! The format is f16: the suite knows how close it comes (the group's note `rounds_to`), and the small whole numbers by which it probes groups
//! are exact in it. What the formats by blocks do is in `groups.rs` and `slices.rs`.

use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::Mode;
use ftcore::{GroupOptions, ProcessGroup, Result};
use oxccl_quant::{Codec, QuantizedGroup};

fn make(options: GroupOptions) -> Result<Box<dyn ProcessGroup>> {
    let timeout = options.timeout;
    let inner = Arc::new(GlooGroup::new("conformance", options)?);
    Ok(Box::new(QuantizedGroup::new(inner, Codec::F16, timeout)?))
}

fn main() -> ExitCode {
    conformance::run(&[Mode::Threads, Mode::Processes], make)
}
