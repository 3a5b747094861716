//! CUDA streams as ftcore sees them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Device, Event, Result, Stream, deadline_in};

use super::event::{CudaEvent, poll};
use super::gpu::Gpu;
use super::raw::StreamHandle;

/// A stream of one device.
pub(crate) struct CudaStream {
    gpu: Arc<Gpu>,
    handle: StreamHandle,
    owned: bool,
}

impl CudaStream {
    /// A new stream that does not order itself with the default stream.
    pub(crate) fn new(gpu: &Arc<Gpu>, high_priority: bool) -> Result<Self> {
        gpu.enter()?;
        Ok(Self {
            gpu: gpu.clone(),
            handle: gpu.driver.stream(high_priority)?,
            owned: true,
        })
    }

    /// The device's legacy default stream.
    pub(crate) fn default_of(gpu: &Arc<Gpu>) -> Self {
        Self {
            gpu: gpu.clone(),
            handle: StreamHandle::DEFAULT,
            owned: false,
        }
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// As `Stream::record`, with the type known.
    pub(crate) fn mark(&self) -> Result<Arc<CudaEvent>> {
        self.gpu.enter()?;
        CudaEvent::record(&self.gpu, self.handle)
    }
}

impl Stream for CudaStream {
    fn device(&self) -> Device {
        self.gpu.device()
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(self.mark()?)
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        match event.as_any().downcast_ref::<CudaEvent>() {
            Some(event) => {
                self.gpu.enter()?;
                self.gpu.driver.stream_wait(self.handle, event.handle())
            }
            // Another kind of device: only the host can order the two. An hour is beyond any operation's own deadline.
            None => event.synchronize(deadline_in(Duration::from_secs(3600))),
        }
    }

    fn query(&self) -> Result<bool> {
        self.gpu.enter()?;
        self.gpu.driver.stream_query(self.handle)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.gpu.enter()?;
        poll(deadline, "the end of a stream", || {
            self.gpu.driver.stream_query(self.handle)
        })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.owned {
            self.gpu.driver.destroy_stream(self.handle);
        }
    }
}
