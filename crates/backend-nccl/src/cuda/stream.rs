//! CUDA streams as ftcore sees them.

use std::any::Any;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use ftcore::{Device, Error, ErrorKind, Event, Result, Stream, deadline_in, poll};

use super::event::CudaEvent;
use super::gpu::{Entered, Gpu};
use super::raw::StreamHandle;

/// A stream of one device.
pub(crate) struct CudaStream {
    gpu: Arc<Gpu>,
    handle: StreamHandle,
    origin: Origin,
}

/// Whose the handle is.
enum Origin {
    /// Made here, ended here.
    Own,
    /// The device's default stream, which is always there.
    Default,
    /// The default stream of this thread; on another one the same handle means another stream.
    Thread(ThreadId),
    /// Another library's, which this keeps alive.
    Foreign(#[allow(dead_code, reason = "kept for its drop")] Box<dyn Any + Send + Sync>),
}

impl CudaStream {
    /// A new stream that does not order itself with the default stream.
    pub(crate) fn new(gpu: &Arc<Gpu>, high_priority: bool) -> Result<Self> {
        let _inside = gpu.enter()?;
        Ok(Self {
            gpu: gpu.clone(),
            handle: gpu.driver.stream(high_priority)?,
            origin: Origin::Own,
        })
    }

    /// The device's legacy default stream.
    pub(crate) fn default_of(gpu: &Arc<Gpu>) -> Self {
        Self {
            gpu: gpu.clone(),
            handle: StreamHandle::DEFAULT,
            origin: Origin::Default,
        }
    }

    /// The calling thread's own default stream.
    pub(crate) fn per_thread(gpu: &Arc<Gpu>) -> Self {
        Self {
            gpu: gpu.clone(),
            handle: StreamHandle::PER_THREAD,
            origin: Origin::Thread(std::thread::current().id()),
        }
    }

    /// Another library's stream, which `owner` keeps.
    pub(crate) fn foreign(gpu: &Arc<Gpu>, handle: StreamHandle, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            gpu: gpu.clone(),
            handle,
            origin: Origin::Foreign(owner),
        }
    }

    /// As [`Gpu::enter`]; refuses another thread's default stream.
    fn enter(&self) -> Result<Entered> {
        match self.origin {
            Origin::Thread(thread) if thread != std::thread::current().id() => Err(Error::new(
                ErrorKind::InvalidState,
                "this is the default stream of another thread; take one on this thread, or a stream of its own",
            )),
            _ => self.gpu.enter(),
        }
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// As `Stream::record`, with the type known.
    pub(crate) fn mark(&self) -> Result<Arc<CudaEvent>> {
        let _inside = self.enter()?;
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
                let _inside = self.enter()?;
                self.gpu.driver.stream_wait(self.handle, event.handle())
            }
            // Another kind of device: only the host can order the two. An hour is beyond any operation's own deadline.
            None => event.synchronize(deadline_in(Duration::from_secs(3600))),
        }
    }

    fn query(&self) -> Result<bool> {
        let _inside = self.enter()?;
        self.gpu.driver.stream_query(self.handle)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        let _inside = self.enter()?;
        poll(deadline, "the end of a stream", || {
            self.gpu.driver.stream_query(self.handle)
        })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if matches!(self.origin, Origin::Own) {
            self.gpu.driver.destroy_stream(self.handle);
        }
    }
}
