//! What ftcore asks about CUDA devices.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use ftcore::engine::spawn;
use ftcore::{Accelerator, DType, DeviceKind, Error, Result, StaticAccelerator, Stream, Tensor, time_left};

use super::driver::{device_count, driver};
use super::event::CudaEvent;
use super::gpu::Gpu;
use super::memory;
use super::pinned;
use super::raw::StreamHandle;
use super::stream::CudaStream;

/// The device kind `cuda`. Nothing is opened before a method that needs the driver is called.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaAccelerator;

ftcore::inventory::submit! {
    StaticAccelerator {
        kind: "cuda",
        make: || Arc::new(CudaAccelerator),
    }
}

/// The device and the handle of a stream that is known by its trait only: an event recorded on it tells.
pub(crate) fn handle_of(stream: &dyn Stream) -> Result<(Arc<Gpu>, StreamHandle)> {
    let event = stream.record()?;
    event
        .as_any()
        .downcast_ref::<CudaEvent>()
        .map(|e| (e.gpu().clone(), e.stream()))
        .ok_or_else(|| {
            Error::invalid(format!(
                "the stream is on {}, not on a CUDA device",
                stream.device()
            ))
        })
}

fn same_device(gpu: &Gpu, tensor: &Tensor) -> Result<()> {
    if *tensor.device() == gpu.device() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the stream is on {}, the tensor on {}",
        gpu.device(),
        tensor.device()
    )))
}

impl CudaAccelerator {
    /// The calling thread's own default stream on device `index` (`CU_STREAM_PER_THREAD`), on which frameworks such as candle work. It
    /// belongs to this thread: using it on another one is `InvalidState`. Errors: `Unsupported` (no driver, no such device).
    pub fn per_thread_stream(&self, index: u32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::per_thread(&Gpu::open(index)?)))
    }
}

impl Accelerator for CudaAccelerator {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn count(&self) -> u32 {
        device_count().unwrap_or(0)
    }

    fn current(&self) -> Result<u32> {
        driver()?.current_device()
    }

    fn set(&self, index: u32) -> Result<()> {
        Gpu::open(index)?.make_current()
    }

    /// The legacy default stream: CUDA itself knows no other "current" one.
    fn current_stream(&self, index: u32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::default_of(&Gpu::open(index)?)))
    }

    /// The driver's call has no deadline, so it runs on a thread that is given up when the deadline passes.
    fn synchronize(&self, index: u32, deadline: Instant) -> Result<()> {
        let gpu = Gpu::open(index)?;
        let (sender, receiver) = channel();
        spawn("ox-cuda-sync", move || {
            let done = gpu.enter().and_then(|_inside| gpu.driver.synchronize());
            let _ = sender.send(done);
        })?;
        receiver.recv_timeout(time_left(deadline)).unwrap_or_else(|_| {
            Err(Error::timeout(format!(
                "cuda:{index} still had work at the deadline"
            )))
        })
    }

    fn name(&self, index: u32) -> Result<String> {
        Ok(Gpu::open(index)?.name.clone())
    }

    fn new_stream(&self, index: u32, high_priority: bool) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(&Gpu::open(index)?, high_priority)?))
    }

    fn alloc(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        memory::tensor(&Gpu::open(index)?, dtype, shape)
    }

    /// Page-locked, from a cache. Ordinary memory, with a warning, if the driver has no more of it.
    fn alloc_host(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        pinned::tensor(&Gpu::open(index)?, dtype, shape)
    }

    fn copy_in(&self, from: &[u8], to: &mut Tensor, stream: &dyn Stream) -> Result<()> {
        let (gpu, handle) = handle_of(stream)?;
        same_device(&gpu, to)?;
        memory::copy_in(&gpu, from, to, handle)
    }

    fn copy_out(&self, from: &Tensor, to: &mut [u8], stream: &dyn Stream) -> Result<()> {
        let (gpu, handle) = handle_of(stream)?;
        same_device(&gpu, from)?;
        memory::copy_out(&gpu, from, to, handle)
    }

    fn native_fp8(&self, index: u32) -> bool {
        Gpu::open(index).is_ok_and(|gpu| gpu.native_fp8())
    }
}
