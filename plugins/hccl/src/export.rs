//! What makes this dylib a plugin: its two C entry points.

use std::sync::Arc;

use crate::{HcclFactory, HpuAccelerator};

plugin::export! {
    name: "hccl",
    version: env!("CARGO_PKG_VERSION"),
    backends: [("hccl", "hpu", || Arc::new(HcclFactory))],
    devices: [("hpu", || Arc::new(HpuAccelerator))],
}
