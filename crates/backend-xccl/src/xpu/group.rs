//! The process group on xpu memory: the host path's engine with a device beside it.

use std::sync::Arc;

use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{Capabilities, Device, DeviceKind, Error, GroupOptions, OpKind, ProcessGroup, Result, names};

use oneccl_sys::Library;

use super::comm::Side;
use super::device::Xpu;
use super::probe;
use crate::group;
use crate::member::{Member, is_a_member};
use crate::options::Settings;

/// Why there are no messages on SYCL's CPU device.
const NO_MESSAGES: &str = "not offered on SYCL's CPU device, where oneCCL's own calls end the process with SIGSEGV; on a GPU \
                           they are offered (not tried: no GPU was at hand)";

/// A group of ranks over oneCCL, on the memory of one xpu. One rank per process.
///
/// What [`XcclGroup`](crate::XcclGroup) says about deadlines, failures and other ranks holds here, too. Besides:
/// - an operation begins after the present end of the stream that it is submitted with; without one its inputs are ready;
/// - oneCCL's calls block, so a thread of the group makes them. `Work::wait_on` does not block the host for a stream of ours; the next
///   command on that stream does, until the operation is enqueued. For an adopted queue `wait_on` itself waits for that;
/// - what oneCCL lacks and needs a look at values (averages, min and max of floats, bool, 16-bit integers, bits) goes by way of
///   host memory: there is no compiler here to make kernels with.
pub struct XpuGroup(Member);

/// What groups on `xpu` memory offer, with messages or without.
fn capabilities(settings: &Settings, has_messages: bool) -> Capabilities {
    let host = group::capabilities(settings);
    let mut ops = host.ops;
    let mut notes = host.notes;
    let mut say = |operation: &'static str, text: &'static str| {
        notes.retain(|(name, _)| name != operation);
        notes.push((operation.into(), text.into()));
    };
    if !has_messages {
        for kind in [OpKind::Send, OpKind::Recv, OpKind::Batch] {
            ops = ops.without(kind);
        }
        say("send, recv", NO_MESSAGES);
        say("batch", NO_MESSAGES);
    }
    say("avg", "composed: sum on the device, division by way of the host");
    for operation in [
        "premul_sum",
        "min, max of floats",
        "bool",
        "i16, u16",
        "band, bor, bxor",
    ] {
        say(operation, "composed, by way of the host");
    }
    say(
        "gather, scatter",
        "composed: an even exchange of the longest part",
    );
    say(
        "all_to_all",
        "even in place of one tensor; else an even exchange of the longest part",
    );
    say("all_reduce of several", "one call each");
    say("contributors", "an all-reduce of one u32");
    Capabilities {
        ops,
        notes,
        devices: names(&["xpu"]),
        ..host
    }
}

/// The library for xpu `index`, and what a communicator there works with.
pub(crate) fn library_and_side(index: u32) -> Result<(&'static Library, Arc<Side>)> {
    let xpu = Xpu::open(index)?;
    Ok((probe::usable(&xpu)?, Side::new(&xpu)?))
}

impl XpuGroup {
    /// A new, unconfigured group on `device`. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `InvalidArgument` names the options that are not honoured (INV-9), or a device of another kind; `Unsupported` says what is
    /// missing.
    pub fn new(name: impl Into<String>, device: &Device, options: GroupOptions) -> Result<Self> {
        if device.kind != DeviceKind::Xpu {
            return Err(Error::invalid(format!("this xccl serves xpu, not {device}")));
        }
        let settings = Settings::new(options)?;
        let xpu = Xpu::open(device.index)?;
        let library = probe::usable(&xpu)?;
        let capabilities = capabilities(&settings, !xpu.is_cpu);
        let member = Member::new(name.into(), library, settings, capabilities, Some(xpu));
        Ok(Self(member))
    }
}

is_a_member!(XpuGroup);

/// Makes xccl groups on xpu memory for the registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct XcclXpuFactory;

impl BackendFactory for XcclXpuFactory {
    fn probe(&self) -> Result<()> {
        probe::probe()
    }

    /// Of device 0; without one, what a GPU would offer.
    fn capabilities(&self) -> Capabilities {
        capabilities(&Settings::default(), !Xpu::open(0).is_ok_and(|xpu| xpu.is_cpu))
    }

    fn library(&self) -> Option<String> {
        probe::describe()
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        Ok(Box::new(XpuGroup::new("xccl", device, options.clone())?))
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
