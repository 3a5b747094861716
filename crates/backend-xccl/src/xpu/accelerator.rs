//! What ftcore asks about xpu devices.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use ftcore::{Accelerator, DType, Device, DeviceKind, Error, Result, StaticAccelerator, Stream, Tensor};

use super::device::Xpu;
use super::driver::{selectors, turn};
use super::event::XpuEvent;
use super::memory;
use super::stream::{Core, XpuStream};
use crate::raw::sycl::Usm;

/// The device kind `xpu`. Nothing is opened before a method that needs SYCL is called.
#[derive(Debug, Clone, Copy, Default)]
pub struct XpuAccelerator;

ftcore::inventory::submit! {
    StaticAccelerator {
        kind: "xpu",
        make: || Arc::new(XpuAccelerator),
    }
}

thread_local! {
    static CURRENT: Cell<u32> = const { Cell::new(0) };
}

/// What is behind a stream that is known by its trait only: an event recorded on it tells.
fn core_of(stream: &dyn Stream) -> Result<Arc<Core>> {
    let event = stream.record()?;
    event
        .as_any()
        .downcast_ref::<XpuEvent>()
        .and_then(XpuEvent::origin)
        .cloned()
        .ok_or_else(|| Error::invalid(format!("the stream is on {}, not on an xpu", stream.device())))
}

fn same_device(core: &Core, tensor: &Tensor) -> Result<()> {
    if *tensor.device() == core.xpu.device() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the stream is on {}, the tensor on {}",
        core.xpu.device(),
        tensor.device()
    )))
}

/// The device for replica group number `replica` when several share a host: they take turns, replica modulo devices.
///
/// Errors: `Unsupported` if there is no device; why SYCL cannot be used.
pub fn device_for_replica(replica: u32) -> Result<Device> {
    let count = u32::try_from(selectors()?.len()).unwrap_or(u32::MAX);
    match turn(replica, count) {
        Some(index) => Ok(Device::new(DeviceKind::Xpu, index)),
        // The reason is `open`'s to give.
        None => Xpu::open(0).map(|xpu| xpu.device()),
    }
}

/// Shared USM memory on xpu `index` with undefined contents: reachable from the host by its address, and moved to where it is used.
///
/// Errors: as [`Accelerator::alloc`].
pub fn alloc_shared(index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    memory::tensor(&Xpu::open(index)?, Usm::Shared, dtype, shape)
}

impl Accelerator for XpuAccelerator {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Xpu
    }

    fn count(&self) -> u32 {
        selectors().map_or(0, |list| u32::try_from(list.len()).unwrap_or(u32::MAX))
    }

    fn current(&self) -> Result<u32> {
        Ok(CURRENT.get())
    }

    fn set(&self, index: u32) -> Result<()> {
        Xpu::open(index)?;
        CURRENT.set(index);
        Ok(())
    }

    /// One stream per device: SYCL itself knows no "current" one.
    fn current_stream(&self, index: u32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(XpuStream::new(Xpu::open(index)?.default_stream()?)))
    }

    /// Waits for the streams that were made or adopted here.
    fn synchronize(&self, index: u32, deadline: Instant) -> Result<()> {
        Xpu::open(index)?.synchronize(deadline)
    }

    fn name(&self, index: u32) -> Result<String> {
        Ok(Xpu::open(index)?.name.clone())
    }

    /// dpctl makes no queues of a priority: all are equal.
    fn new_stream(&self, index: u32, _high_priority: bool) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(XpuStream::of(index)?))
    }

    fn alloc(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        memory::tensor(&Xpu::open(index)?, Usm::Device, dtype, shape)
    }

    fn alloc_host(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        memory::tensor(&Xpu::open(index)?, Usm::Host, dtype, shape)
    }

    fn copy_in(&self, from: &[u8], to: &mut Tensor, stream: &dyn Stream) -> Result<()> {
        let core = core_of(stream)?;
        same_device(&core, to)?;
        memory::copy_in(&core, from, to)
    }

    fn copy_out(&self, from: &Tensor, to: &mut [u8], stream: &dyn Stream) -> Result<()> {
        let core = core_of(stream)?;
        same_device(&core, from)?;
        memory::copy_out(&core, from, to)
    }
}
