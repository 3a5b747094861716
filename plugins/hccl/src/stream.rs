//! Streams and events of the device. Waits on the host poll with a deadline: Synapse's own have none.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ftcore::{Device, Error, Event, Result, Stream, deadline_in};
use crate::raw::memory::DEVICE;
use crate::raw::synapse::{EventHandle, StreamHandle};
use crate::runtime::Runtime;

/// How long between two looks at something that takes time.
const SLOWEST_POLL: Duration = Duration::from_micros(500);

/// Pauses that grow from a yield to [`SLOWEST_POLL`]: quick answers cost no sleep, long waits no core.
#[derive(Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    /// Pauses once.
    pub(crate) fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..=30 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(20 * u64::from(n - 30)).min(SLOWEST_POLL)),
        }
    }
}

/// Waits until `done` says so; `Timeout` at the deadline, naming `what`.
pub(crate) fn wait_until(
    deadline: Instant,
    what: &str,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let mut backoff = Backoff::default();
    while !done()? {
        if Instant::now() >= deadline {
            return Err(Error::timeout(format!("{what} on {DEVICE} was not reached")));
        }
        backoff.pause();
    }
    Ok(())
}

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
        wait_until(deadline, "the end of a stream", || self.query())
    }
}

impl Event for HpuEvent {
    fn query(&self) -> Result<bool> {
        self.runtime.libraries.synapse.reached(self.handle)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        wait_until(deadline, "an event", || self.query())
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
