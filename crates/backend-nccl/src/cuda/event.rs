//! CUDA events: taken from the device's cache, given back when the last reference goes.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use ftcore::{Event, Result, poll};

use super::gpu::Gpu;
use super::raw::{EventHandle, IpcHandle, StreamHandle};

/// A recorded point in a stream.
pub(crate) struct CudaEvent {
    gpu: Arc<Gpu>,
    handle: EventHandle,
    stream: StreamHandle,
    origin: Origin,
}

/// Where the handle comes from, and so where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The device's cache.
    Own,
    /// The cache of those that another process waits for, with its name there.
    Shared(IpcHandle),
    /// Another process.
    Opened,
}

impl CudaEvent {
    /// The present end of `stream`. The device must be current (see [`Gpu::enter`]).
    pub(crate) fn record(gpu: &Arc<Gpu>, stream: StreamHandle) -> Result<Arc<Self>> {
        // An event belongs to the context in which it is made.
        let _inside = gpu.enter()?;
        Self::record_on(gpu, gpu.take_event()?, Origin::Own, stream)
    }

    /// As [`record`](Self::record) with a handle from elsewhere.
    pub(crate) fn record_on(
        gpu: &Arc<Gpu>,
        handle: EventHandle,
        origin: Origin,
        stream: StreamHandle,
    ) -> Result<Arc<Self>> {
        let event = Self {
            gpu: gpu.clone(),
            handle,
            stream,
            origin,
        };
        gpu.driver.record(event.handle, stream)?;
        Ok(Arc::new(event))
    }

    /// An event that another process has recorded.
    pub(crate) fn opened(gpu: &Arc<Gpu>, handle: EventHandle) -> Arc<Self> {
        Arc::new(Self {
            gpu: gpu.clone(),
            handle,
            stream: StreamHandle::DEFAULT,
            origin: Origin::Opened,
        })
    }

    pub(crate) fn handle(&self) -> EventHandle {
        self.handle
    }

    /// The stream on which it was recorded; the caller knows that it is alive.
    pub(crate) fn stream(&self) -> StreamHandle {
        self.stream
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Event for CudaEvent {
    fn query(&self) -> Result<bool> {
        let _inside = self.gpu.enter()?;
        self.gpu.driver.event_query(self.handle)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        let _inside = self.gpu.enter()?;
        poll(deadline, "an event", || self.gpu.driver.event_query(self.handle))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // A stream that was told to wait keeps what was recorded, so the handle may serve again at once.
        match self.origin {
            Origin::Own => self.gpu.put_event(self.handle),
            Origin::Shared(name) => self.gpu.put_shared_event(self.handle, name),
            // Kept, because the other process uses it again.
            Origin::Opened => {}
        }
    }
}
