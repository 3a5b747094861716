//! Streams: an in-order queue, and the operations that it waits for although they are not in any queue yet.
//!
//! `wait` for such an operation closes a gate. A gated stream takes note of the gate and lets the host go on; the next command on
//! it waits on the host until the gate is open. A queue that the caller brought takes commands that are not seen here, so
//! there `wait` itself waits until the operation is enqueued.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Device, Event, Result, Stream, deadline_in};

use super::device::Xpu;
use super::event::XpuEvent;
use crate::raw::sycl::Queue;

/// Beyond any operation's own deadline, which ends the wait first.
const LONGEST: Duration = Duration::from_secs(3600);

/// What handles and events of one stream share.
pub(crate) struct Core {
    pub(crate) xpu: Arc<Xpu>,
    pub(crate) queue: Queue,
    /// The caller's own queue.
    pub(crate) is_foreign: bool,
    gates: Mutex<Vec<XpuEvent>>,
}

impl Core {
    pub(crate) fn new(xpu: &Arc<Xpu>, queue: Queue, is_foreign: bool) -> Arc<Self> {
        let core = Arc::new(Self {
            xpu: xpu.clone(),
            queue,
            is_foreign,
            gates: Mutex::default(),
        });
        xpu.remember(&core);
        core
    }

    fn gates(&self) -> MutexGuard<'_, Vec<XpuEvent>> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue, with all gates open; waits for them until `deadline` at most.
    pub(crate) fn enter(&self, deadline: Instant) -> Result<&Queue> {
        loop {
            let Some(gate) = self.gates().first().cloned() else {
                return Ok(&self.queue);
            };
            let settled = gate.settle(deadline);
            let mut gates = self.gates();
            // Another thread may have opened it meanwhile.
            if gates.first().is_some_and(|g| g.is(&gate)) {
                match settled {
                    Ok(event) => {
                        gates.remove(0);
                        if let Some(event) = event {
                            self.queue.wait_for(&event)?;
                        }
                    }
                    Err(error) => {
                        // Reported once: the operation's own work has the failure, too.
                        if error.kind() != ftcore::ErrorKind::Timeout || gate.settled().is_some() {
                            gates.remove(0);
                        }
                        return Err(error);
                    }
                }
            }
        }
    }

    /// The queue, with all gates at the front open that can be; does not wait.
    pub(crate) fn pass(&self) -> Result<&Queue> {
        let mut gates = self.gates();
        while let Some(settled) = gates.first().and_then(XpuEvent::settled) {
            gates.remove(0);
            if let Some(event) = settled? {
                self.queue.wait_for(&event)?;
            }
        }
        Ok(&self.queue)
    }

    /// The queue for a command, behind all gates.
    pub(crate) fn command(&self) -> Result<&Queue> {
        self.enter(deadline_in(LONGEST))
    }

    /// The present end.
    pub(crate) fn record(self: &Arc<Self>) -> Result<XpuEvent> {
        let gates = self.gates().clone();
        if gates.iter().any(|g| g.settled().is_none()) {
            return Ok(XpuEvent::behind(gates, self.clone()));
        }
        let event = self.command()?.barrier()?;
        Ok(XpuEvent::recorded(event, Some(self.clone())))
    }

    /// Later commands start after `event`.
    pub(crate) fn wait(&self, event: &XpuEvent) -> Result<()> {
        let settled = match event.settled() {
            None if self.is_foreign => Some(event.settle(deadline_in(LONGEST))),
            settled => settled,
        };
        match settled {
            None => self.gates().push(event.clone()),
            Some(point) => {
                if let Some(event) = point? {
                    self.queue.wait_for(&event)?;
                }
            }
        }
        Ok(())
    }
}

/// A stream of one xpu.
#[derive(Clone)]
pub struct XpuStream(pub(super) Arc<Core>);

impl XpuStream {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self(core)
    }

    /// A new stream on xpu `index`: what `Accelerator::new_stream` gives, with the methods of this type.
    ///
    /// Errors: `Unsupported` if there is no such device or no SYCL; `Backend` with SYCL's refusal.
    pub fn of(index: u32) -> Result<Self> {
        let xpu = Xpu::open(index)?;
        let queue = xpu.queue()?;
        Ok(Self(Core::new(&xpu, queue, false)))
    }

    /// Over a queue of the caller's; see `XpuStream::adopt`.
    pub(crate) fn over(queue: Queue) -> Result<Self> {
        let xpu = Xpu::of(&queue.device()?)?;
        Ok(Self(Core::new(&xpu, queue, true)))
    }

    /// A stream over the same queue as if the caller had brought it; see `adopt`, whose promise holds here by itself.
    #[doc(hidden)]
    pub fn brought_by_the_caller(&self) -> Result<Self> {
        Self::adopt_own(&self.0)
    }

    /// The `sycl::queue*`, for commands of the caller's own. Alive as long as this stream; commands enqueued this way do not wait for
    /// operations that the stream waits for, but that are not enqueued yet: [`Stream::synchronize`] or an event of the stream tells.
    pub fn queue(&self) -> *mut c_void {
        self.0.queue.pointer()
    }
}

impl Stream for XpuStream {
    fn device(&self) -> Device {
        self.0.xpu.device()
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(self.0.record()?))
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        match event.as_any().downcast_ref::<XpuEvent>() {
            Some(event) => self.0.wait(event),
            // Another kind of device: only the host can order the two.
            None => event.synchronize(deadline_in(LONGEST)),
        }
    }

    fn query(&self) -> Result<bool> {
        self.0.record()?.query()
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.0.record()?.synchronize(deadline)
    }
}
