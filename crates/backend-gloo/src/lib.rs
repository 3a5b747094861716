//! oxccl's CPU backend: collectives over shared memory and TCP in pure Rust.
//!
//! Data flows down: [`GlooGroup`] takes validated operations (`group`) into the `queue`. Collectives run on the `executor`, one after
//! the other, driven by the caller that waits for them (`caller`) or else by the group's thread (`engine`): each becomes a `plan` (which
//! tensors, which `schedule`) that `execution` carries out round by round over the `port`s, made by `rendezvous`; the most common ones take
//! a shorter way through shared memory (`direct`), large payloads may go over several connections (`stripes`, each a `rail`). Point-to-point messages (`p2p`) go beside it
//! through rings and connections of their own (`channels`), which a blocking call drives itself (`blocking`); aborts and leaves have the `peer`s' control connections. `wire` has the bytes, `kernels` the arithmetic.
//!
//! Linking this crate registers the backend `gloo` for `cpu`.
//!
//! Options: `net_name` is the IP address or interface to listen on and to tell the others. Without it, the
//! hint `host` (or else the variable `OXCCL_GLOO_HOST`) is told to the others; without both, ranks of one host use loopback and the others the
//! address of the default route or, without one, of the first interface that is up and not loopback. The hint `transport` (or else the variable `OXCCL_GLOO_TRANSPORT`) is `auto` (shared memory within
//! a host, TCP between hosts), `tcp`, or `shm` (shared memory everywhere, or an error). The hint `connections` (or else the variable
//! `OXCCL_GLOO_CONNECTIONS`), 1 to 16, is how many TCP connections carry a large payload between two ranks, for links that one does not
//! fill; the default is 1. All ranks must say the same. The hint `links` (or else the variable `OXCCL_GLOO_LINKS`) is `even`, the default, or
//! `measured`: `configure` measures what the links between 3 to 16 ranks without common memory carry, and large sums are shared so that
//! slow links carry less. All ranks must say the same. The hint `credentials` (or else the variable `OXCCL_CREDENTIALS`) names the folder of
//! the job's credentials, whose secret every connection then proves; the hint `encrypt` (or else the variable `OXCCL_ENCRYPT`), 1 or 0, says whether
//! what goes over TCP is encrypted. Without credentials and without `OXCCL_INSECURE=1` a rank listens on loopback only.

mod blocking;
mod buffers;
mod caller;
mod channels;
mod direct;
mod engine;
mod execution;
mod executor;
mod expected;
mod group;
mod kernels;
mod leave;
mod messages;
mod notices;
mod options;
mod p2p;
mod peer;
mod plan;
mod port;
mod probe;
mod queue;
mod rail;
mod raw;
mod rendezvous;
mod schedule;
mod spin_budget;
mod stripes;
mod transfer;
mod transport;
mod waiter;
mod wire;

#[cfg(test)]
mod bad_channels;
#[cfg(test)]
mod bad_greeting;
#[cfg(test)]
mod bad_links;
#[cfg(test)]
mod bad_peer;
#[cfg(test)]
mod bad_rails;
#[cfg(test)]
mod failure_notices;

use std::sync::Arc;

use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{Capabilities, Device, Error, GroupOptions, ProcessGroup, Result};

pub use group::GlooGroup;
pub use messages::{Exchange, Message, Messages};

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
