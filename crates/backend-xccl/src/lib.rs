//! oxccl's backend over Intel's oneCCL, on host memory.
//!
//! Data flows down: [`XcclGroup`] (`group`) takes validated operations; one `engine` per configuration queues them in lanes;
//! a lane's thread runs a `recipe` through `ops`, which makes it of oneCCL's calls (`link`, `raw::comm`) and, for reductions
//! that the library lacks or gets wrong, of a `route`. `rendezvous` starts communicators, `news` carries failures between
//! ranks. oneCCL has no abort: see [`XcclGroup`] for what that means, and `docs/xccl.md` for users.
//!
//! Linking this crate registers the backend `xccl` for `cpu`, and for `xpu` with a probe that says what is missing.

mod engine;
mod group;
mod job;
mod link;
mod news;
mod ops;
mod options;
pub mod plain;
mod probe;
mod raw;
mod recipe;
mod rendezvous;
mod route;
mod traffic;

use std::sync::Arc;

use ftcore::registry::{BackendFactory, StaticBackend, Unavailable};
use ftcore::{Capabilities, Device, Error, GroupOptions, ProcessGroup, Result};

pub use group::XcclGroup;

/// Makes xccl groups on host memory for the registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct XcclFactory;

impl BackendFactory for XcclFactory {
    fn probe(&self) -> Result<()> {
        probe::probe()
    }

    fn capabilities(&self) -> Capabilities {
        group::capabilities(true)
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

/// The place of xccl on Intel GPUs. Never usable in this version: USM memory and SYCL queues are not served yet.
#[derive(Debug, Clone, Copy, Default)]
pub struct XcclXpuFactory;

impl BackendFactory for XcclXpuFactory {
    fn probe(&self) -> Result<()> {
        Err(Unavailable::InitFailed {
            code: None,
            text: "this version of backend-xccl serves host memory only: it has no SYCL queues and no USM memory. Stage \
                   through the CPU (xccl or gloo on cpu)"
                .to_string(),
        }
        .into())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            devices: ftcore::names(&["xpu"]),
            ..group::capabilities(true)
        }
    }

    fn create(&self, _device: &Device, _options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        Err(self
            .probe()
            .err()
            .unwrap_or_else(|| Error::unsupported("xccl does not serve xpu")))
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "xccl",
        device: "xpu",
        origin: "backend-xccl",
        version: env!("CARGO_PKG_VERSION"),
        factory: || Arc::new(XcclXpuFactory),
    }
}
