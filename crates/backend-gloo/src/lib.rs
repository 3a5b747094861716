//! oxccl's CPU backend: collectives over TCP in pure Rust.
//!
//! Data flows down: [`GlooGroup`] takes validated operations (`group`), one thread per configuration runs them (`engine`),
//! a collective becomes a `plan` (which tensors, which `schedule`) that `exec` carries out round by round over the
//! connections of `peer`, made by `rendezvous`; point-to-point messages go beside it (`p2p`). `wire` has the bytes,
//! `kernels` the arithmetic.
//!
//! Linking this crate registers the backend `gloo` for `cpu`.
//!
//! Options: `net_name` is the IP address or interface to listen on and to tell the others. Without it, the environment
//! variable `OXCCL_GLOO_HOST` is told to the others; without both, ranks of one host use loopback and the others the
//! address of the default route.

mod buffers;
mod engine;
mod exec;
mod farewell;
mod group;
mod kernels;
mod options;
mod p2p;
mod peer;
mod plan;
mod probe;
mod queue;
mod rendezvous;
mod schedule;
mod transport;
mod wire;

#[cfg(test)]
mod bad_peer;

use std::sync::Arc;

use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{Capabilities, Device, Error, GroupOptions, ProcessGroup, Result};

pub use group::GlooGroup;

/// Makes gloo groups for the registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct GlooFactory;

impl BackendFactory for GlooFactory {
    fn probe(&self) -> Result<()> {
        probe::probe()
    }

    fn capabilities(&self) -> Capabilities {
        group::capabilities()
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        if !device.is_cpu() {
            return Err(Error::invalid(format!("gloo serves cpu, not {device}")));
        }
        Ok(Box::new(GlooGroup::new("gloo", options.clone())?))
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "gloo",
        device: "cpu",
        origin: "backend-gloo",
        version: env!("CARGO_PKG_VERSION"),
        factory: || Arc::new(GlooFactory),
    }
}
