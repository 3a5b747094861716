//! Memory that is given up for ever and counted (`ftcore::leaked_bytes`), because the driver or the library does not free it.

use std::fmt::Display;

use ftcore::{DType, Device};

use super::raw::{self, HostBlock, Span, host_tensor};

/// Of `device`. `what` it was, and why it is lost. Nothing uses `span` any more, or the one that does keeps its owner for ever.
pub(crate) fn on_device(device: Device, span: Span, what: &str, why: impl Display) {
    match raw::tensor(span, DType::U8, &[span.bytes()], device, Box::new(())) {
        Ok(tensor) => tensor.leak(&format!("{what} cannot be freed: {why}")),
        Err(_) => tracing::warn!(bytes = span.bytes(), %why, "{what} cannot be freed, nor counted"),
    }
}

/// Page-locked memory.
pub(crate) fn on_host(block: HostBlock, why: impl Display) {
    let bytes = block.bytes();
    match host_tensor(block, DType::U8, &[bytes], |block| Box::new(block)) {
        Ok(tensor) => tensor.leak(&format!("page-locked memory cannot be freed: {why}")),
        Err(_) => tracing::warn!(bytes, %why, "page-locked memory cannot be freed, nor counted"),
    }
}
