//! The queues and scratch memory of a group on a device.
//!
//! Operations enqueue spans of device memory (`xpu::ops`). Slices of host memory, which the compositions of the host path reduce and
//! move (`link`), go through scratch memory on the device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Event, Result, deadline_in};

use super::device::Xpu;
use super::event::{Order, XpuEvent};
use super::memory::Block;
use crate::raw::sycl::{Queue, Span, Usm};
use crate::recipe::Recipe;

/// How long work that failed half-way may take to leave its scratch memory alone.
const SETTLING: Duration = Duration::from_secs(5);

/// The device's side of a group.
pub(crate) struct Side {
    pub(crate) xpu: Arc<Xpu>,
    /// Of the collectives.
    queue: Arc<Queue>,
    /// Of messages: one per peer and direction, so that none waits behind another.
    messages: Mutex<BTreeMap<(bool, u32), Arc<Queue>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Side {
    pub(crate) fn new(xpu: &Arc<Xpu>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            xpu: xpu.clone(),
            queue: Arc::new(xpu.queue()?),
            messages: Mutex::default(),
        }))
    }

    /// One for another group on the same device.
    pub(crate) fn sibling(&self) -> Result<Arc<Self>> {
        Self::new(&self.xpu)
    }

    /// True if oneCCL's messages work on this device. On SYCL's CPU device they end the process with SIGSEGV.
    pub(crate) fn has_messages(&self) -> bool {
        !self.xpu.is_cpu
    }

    /// The queue on which `recipe` runs.
    pub(crate) fn queue_of(&self, recipe: &Recipe) -> Result<Arc<Queue>> {
        let key = match recipe {
            Recipe::Send { peer } => (true, *peer),
            Recipe::Recv { peer } => (false, *peer),
            _ => return Ok(self.queue.clone()),
        };
        let mut messages = lock(&self.messages);
        if let Some(queue) = messages.get(&key) {
            return Ok(queue.clone());
        }
        let queue = Arc::new(self.xpu.queue()?);
        messages.insert(key, queue.clone());
        Ok(queue)
    }

    /// Lets an operation begin after the point that its caller named. Waits on the host only for points that are in no queue of
    /// this kind of device, until the operation's deadline.
    pub(crate) fn begin(&self, recipe: &Recipe, order: &Order, deadline: Instant) -> Result<()> {
        let Some(after) = &order.after else {
            return Ok(());
        };
        let queue = self.queue_of(recipe)?;
        match after.as_any().downcast_ref::<XpuEvent>() {
            Some(event) => {
                if let Some(event) = event.settle(deadline)? {
                    queue.wait_for(&event)?;
                }
                Ok(())
            }
            None => after.synchronize(deadline),
        }
    }
}

/// The scratch memory of one operation, given back to the device when nothing uses it any more.
pub(crate) struct Scratch<'a> {
    side: &'a Side,
    pub(super) queue: &'a Queue,
    blocks: Vec<Block>,
    /// Whether everything on the queue is known to be done.
    pub(crate) is_idle: bool,
}

impl<'a> Scratch<'a> {
    pub(crate) fn new(side: &'a Side, queue: &'a Queue) -> Self {
        Self {
            side,
            queue,
            blocks: Vec::new(),
            is_idle: false,
        }
    }

    /// Device memory with undefined contents, aligned for every dtype.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<Span> {
        let block = Block::new(&self.side.xpu, Usm::Device, bytes)?;
        let span = block.span();
        self.blocks.push(block);
        Ok(span)
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut idle = self.is_idle;
        if !idle && !self.blocks.is_empty() {
            // After a failure: what was enqueued may still use it.
            let end = self.queue.barrier().map(|e| XpuEvent::recorded(e, None));
            idle = end.is_ok_and(|e| e.synchronize(deadline_in(SETTLING)).is_ok());
        }
        for block in self.blocks.drain(..) {
            if !idle {
                tracing::warn!(
                    bytes = block.span().bytes(),
                    "scratch memory is leaked on purpose: a command that failed may still use it"
                );
                std::mem::forget(block);
            }
        }
    }
}

/// Slices of host memory for calls on the device: what a call works on is done when these return.
impl Side {
    /// Runs `f` on device memory that has the bytes of `from`, and on as much as `into` is long, which is then copied there.
    pub(crate) fn through(
        &self,
        from: &[u8],
        into: &mut [u8],
        f: impl FnOnce(&Queue, Span, Span) -> Result<()>,
    ) -> Result<()> {
        let queue = &*self.queue;
        let mut scratch = Scratch::new(self, queue);
        let source = scratch.take(from.len())?;
        queue.copy_in(from, source)?;
        let target = scratch.take(into.len())?;
        // `reduce` leaves it alone on all ranks but the root, and all of it is copied back.
        queue.copy_in(into, target)?;
        f(queue, source, target)?;
        queue.copy_out(target, into)?;
        scratch.is_idle = true;
        Ok(())
    }

    /// As [`through`](Self::through) in place.
    pub(crate) fn in_place(&self, data: &mut [u8], f: impl FnOnce(&Queue, Span) -> Result<()>) -> Result<()> {
        let queue = &*self.queue;
        let mut scratch = Scratch::new(self, queue);
        let span = scratch.take(data.len())?;
        queue.copy_in(data, span)?;
        f(queue, span)?;
        queue.copy_out(span, data)?;
        scratch.is_idle = true;
        Ok(())
    }
}
