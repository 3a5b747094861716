//! Streams and events of the device. Waits on the host poll with a deadline: Synapse's own have none.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ftcore::{Device, Event, Result, Stream, deadline_in, poll};
use crate::raw::memory::DEVICE;
use crate::raw::synapse::{EventHandle, StreamHandle};
use crate::runtime::Runtime;

/// A stream. Ended when dropped if it is idle; left to the driver otherwise.
pub(crate) struct HpuStream {
    runtime: &'static Runtime,
    handle: StreamHandle,
}

/// A point in a stream, recorded once.
pub(crate) struct HpuEvent {
    runtime: &'static Runtime,
    handle: EventHandle,
    stream: StreamHandle,
}

impl HpuStream {
    /// A new one.
    pub(crate) fn new(runtime: &'static Runtime) -> Result<Self> {
        let handle = runtime.create_stream()?;
        Ok(Self { runtime, handle })
    }

    /// Its handle.
    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Marks the present end.
    pub(crate) fn mark(&self) -> Result<Arc<HpuEvent>> {
        let handle = self
            .runtime
            .libraries
            .synapse
            .record(self.runtime.device, self.handle)?;
        Ok(Arc::new(HpuEvent {
            runtime: self.runtime,
            handle,
            stream: self.handle,
        }))
    }

    /// Lets later work wait for `event`; a foreign one is waited for on the host, until `deadline`.
    pub(crate) fn wait_for(&self, event: &dyn Event, deadline: Instant) -> Result<()> {
        match event.as_any().downcast_ref::<HpuEvent>() {
            // In order anyway; Synapse wants an event of another stream.
            Some(own) if own.stream == self.handle => Ok(()),
            Some(own) => self
                .runtime
                .libraries
                .synapse
                .stream_wait(self.handle, own.handle),
            None => event.synchronize(deadline),
        }
    }
}

impl Drop for HpuStream {
    fn drop(&mut self) {
        self.runtime.end_stream(self.handle);
    }
}

impl Stream for HpuStream {
    fn device(&self) -> Device {
        DEVICE
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(self.mark()?)
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        // Only a foreign event blocks; its own collective's deadline fires long before this one.
        self.wait_for(event, deadline_in(Duration::from_secs(3600)))
    }

    fn query(&self) -> Result<bool> {
        self.runtime.libraries.synapse.stream_idle(self.handle)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        poll(deadline, "the end of a stream", || self.query())
    }
}

impl Event for HpuEvent {
    fn query(&self) -> Result<bool> {
        self.runtime.libraries.synapse.reached(self.handle)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        poll(deadline, "an event", || self.query())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HpuEvent {
    fn drop(&mut self) {
        self.runtime.libraries.synapse.destroy_event(self.handle);
    }
}
