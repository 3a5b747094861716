//! Streams that another library made, such as a framework's.

use std::any::Any;
use std::sync::Arc;

use ftcore::{Result, Stream};

use super::StreamHandle;
use crate::CudaAccelerator;
use crate::cuda::accelerator::handle_of;
use crate::cuda::gpu::Gpu;
use crate::cuda::stream::CudaStream;

impl CudaAccelerator {
    /// `stream` once more, by its handle as another library would give it; for tests. Errors as [`stream_from_handle`](Self::stream_from_handle).
    #[doc(hidden)]
    pub fn stream_by_handle(&self, stream: Arc<dyn Stream>) -> Result<Arc<dyn Stream>> {
        let (gpu, handle) = handle_of(&*stream)?;
        // SAFETY: a stream of that device's primary context, which `stream` keeps.
        unsafe { self.stream_from_handle(gpu.index, handle.0 as usize, Box::new(stream)) }
    }

    /// The stream behind a driver's handle (`CUstream`), so that groups order themselves after a framework's work and its work after
    /// theirs. 0 and 1 are the device's default stream, 2 is the calling thread's own: that one belongs to this thread, and using it on
    /// another one is `InvalidState`.
    ///
    /// `owner` keeps the handle alive and is dropped with the stream. Errors: `Unsupported` (no driver, no such device).
    ///
    /// # Safety
    /// `handle` is a stream of the primary context of device `index`, and stays one while `owner` lives.
    pub unsafe fn stream_from_handle(
        &self,
        index: u32,
        handle: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Stream>> {
        let gpu = Gpu::open(index)?;
        let stream = match handle {
            0 | 1 => CudaStream::default_of(&gpu),
            2 => CudaStream::per_thread(&gpu),
            made => CudaStream::foreign(&gpu, StreamHandle(made as *mut _), owner),
        };
        Ok(Arc::new(stream))
    }
}
