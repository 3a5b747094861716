//! oxccl's backend over Intel's oneCCL, on host memory and on xpu.
//!
//! Data flows down: [`XcclGroup`] (`group`, over `member`) takes validated operations and submits a `call` for each to ftcore's engine, one
//! per configuration; the `driver` runs its `recipe` through `ops`, which makes it of oneCCL's calls (`link`, `raw::comm`) and, for
//! reductions that the library lacks or gets wrong, of a `route`. `rendezvous` starts communicators (`comms`), [`ftcore::peers`] carries failures
//! between ranks. `xpu` is the device kind: [`XpuGroup`] has the same driver, over SYCL queues and USM memory. oneCCL has no abort: see
//! [`XcclGroup`] for what that means, and `docs/xccl.md` for users.
//!
//! Linking this crate registers the backend `xccl` for `cpu` and `xpu`, and the device kind `xpu`.

mod call;
mod comms;
mod driver;
mod group;
mod link;
mod member;
mod movement;
mod ops;
mod options;
pub mod plain;
mod probe;
mod raw;
mod recipe;
mod rendezvous;
mod route;
mod tally;
mod traffic;
pub mod xpu;

use std::sync::Arc;

use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{Capabilities, Device, Error, GroupOptions, ProcessGroup, Result};

use crate::options::Settings;

pub use group::XcclGroup;
pub use xpu::{XcclXpuFactory, XpuGroup};

/// Makes xccl groups on host memory for the registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct XcclFactory;

impl BackendFactory for XcclFactory {
    fn probe(&self) -> Result<()> {
        probe::probe()
    }

    fn capabilities(&self) -> Capabilities {
        group::capabilities(&Settings::default())
    }

    fn library(&self) -> Option<String> {
        probe::describe()
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        if !device.is_cpu() {
            return Err(Error::invalid(format!("this xccl serves cpu, not {device}")));
        }
        Ok(Box::new(XcclGroup::new("xccl", options.clone())?))
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "xccl",
        device: "cpu",
        origin: "backend-xccl",
        version: env!("CARGO_PKG_VERSION"),
        factory: || Arc::new(XcclFactory),
    }
}
