//! How tensors and events of a device kind get into a child process and back: the seam for device memory.
//!
//! Host memory crosses in shared memory, and its events are trivial: work on the CPU is done before a call returns, so an
//! event that is not reached yet is waited for *before* the inputs are read (L09: elsewhere an event that does not really
//! cross is silently empty, and the order is lost). A device kind that is to cross brings both halves: memory by the
//! driver's IPC handles, and events by the driver's inter-process events; one without the other is not enough.

use std::time::Instant;

use ftcore::{Device, DeviceKind, Error, Event, Result, Stream, Tensor};

/// What a device kind needs to cross. For device memory implemented by the crate that knows the driver.
///
/// Contract: an imported tensor is the exporter's memory, not a copy; the exporter keeps it until the child has reported the
/// end of the operation or is gone (INV-8). An imported event is reached when, and only when, the exported one is. What
/// cannot be exported is `Unsupported` with the reason, never an empty handle.
pub trait Crossing: Send + Sync {
    /// The device kind.
    fn kind(&self) -> DeviceKind;
    /// In the parent: a handle by which another process of this host can open the tensor's memory.
    fn export(&self, tensor: &Tensor) -> Result<Vec<u8>>;
    /// In the child: the memory of a handle.
    fn import(&self, handle: &[u8]) -> Result<Tensor>;
    /// A handle of an event.
    fn export_event(&self, event: &dyn Event) -> Result<Vec<u8>>;
    /// In the other process: the event of a handle.
    fn import_event(&self, handle: &[u8]) -> Result<std::sync::Arc<dyn Event>>;
}

/// A crossing that is linked in. Submit one with `ftcore::inventory::submit!`.
pub struct StaticCrossing {
    /// The device kind's name.
    pub kind: &'static str,
    /// Makes it.
    pub make: fn() -> std::sync::Arc<dyn Crossing>,
}

ftcore::inventory::collect!(StaticCrossing);

/// `Unsupported` with the reason if tensors of `device` cannot cross into a child process.
pub(crate) fn require(device: &Device) -> Result<()> {
    if device.is_cpu() {
        return Ok(());
    }
    let known = ftcore::inventory::iter::<StaticCrossing>
        .into_iter()
        .any(|c| c.kind == device.kind.name());
    Err(Error::unsupported(if known {
        format!(
            "memory of {device} can cross between processes, but isolated groups carry host memory only in this version"
        )
    } else {
        format!(
            "isolated groups carry host memory; for {} no crate in this program can pass memory and events between \
             processes. Stage through host memory, or use the backend directly",
            device.kind
        )
    }))
}

/// Orders an operation after the present end of `stream`, before its inputs are read.
pub(crate) fn order_after(stream: &dyn Stream, deadline: Instant) -> Result<()> {
    if !stream.device().is_cpu() {
        return Err(Error::unsupported(format!(
            "an isolated group on the CPU cannot order itself after a stream on {}",
            stream.device()
        )));
    }
    let event = stream.record()?;
    if event.query()? {
        Ok(())
    } else {
        event.synchronize(deadline)
    }
}
