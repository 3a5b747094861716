//! One submitted operation until it has ended: it owns the tensors, the scratch memory and the answer (INV-8).
//!
//! A flight has parts (a batch has one per message); each part is enqueued at some time and has an event from then on. All events
//! reached: done. Whatever is not provably free when the group fails is leaked.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ftcore::{Completer, Completion, DType, Error, Event, OpKind, Result, Tensor};

use crate::cuda::event::CudaEvent;
use crate::cuda::gpu::Gpu;
use crate::cuda::memory::{Block, Slot};

/// What names an operation in errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Label {
    pub(crate) kind: OpKind,
    pub(crate) seq: u64,
    pub(crate) dtype: Option<DType>,
    pub(crate) count: usize,
    pub(crate) rank: u32,
    pub(crate) epoch: u64,
}

impl Label {
    /// `error` with the operation's name on it.
    pub(crate) fn name(&self, error: Error) -> Error {
        let error = error
            .with_op(self.kind.name())
            .with_seq(self.seq)
            .with_rank(self.rank)
            .with_epoch(self.epoch);
        match self.dtype {
            Some(d) => error.with_data(d, self.count),
            None => error,
        }
    }
}

#[derive(Default)]
struct Inner {
    tensors: Vec<Tensor>,
    scratch: Vec<Block>,
    completer: Option<Completer>,
    slot: Option<Slot>,
    source: Option<u32>,
    contributors: u32,
    events: Vec<Arc<CudaEvent>>,
    /// Parts that are being enqueued right now, or were without an event to show for it.
    begun: usize,
    cancelled: bool,
}

/// See the module.
pub(crate) struct Flight {
    pub(crate) label: Label,
    pub(crate) deadline: Instant,
    /// In words, for time-outs: what is waited for.
    pub(crate) waits_for: String,
    /// On the group's one stream, in order with its neighbours there.
    pub(crate) in_order: bool,
    parts: usize,
    inner: Mutex<Inner>,
}

fn leak(tensors: Vec<Tensor>) {
    for tensor in tensors {
        tensor.leak("the device may still work on it after a failed operation");
    }
}

impl Flight {
    pub(crate) fn new(
        label: Label,
        deadline: Instant,
        waits_for: String,
        in_order: bool,
        parts: usize,
        completer: Completer,
    ) -> Self {
        Self {
            label,
            deadline,
            waits_for,
            in_order,
            parts,
            inner: Mutex::new(Inner {
                completer: Some(completer),
                ..Inner::default()
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The flight owns them from here on. Before anything is enqueued.
    pub(crate) fn own(&self, tensors: Vec<Tensor>, source: Option<u32>) {
        let mut inner = self.lock();
        if inner.completer.is_none() && inner.begun > 0 {
            drop(inner);
            return leak(tensors);
        }
        inner.tensors = tensors;
        inner.source = source;
    }

    /// Scratch memory lives as long as the flight.
    pub(crate) fn keep(&self, block: Block) {
        let mut inner = self.lock();
        if inner.completer.is_none() {
            std::mem::forget(block);
        } else {
            inner.scratch.push(block);
        }
    }

    /// Where the number of contributors will be; or the number itself.
    pub(crate) fn count(&self, slot: Option<Slot>, contributors: u32) {
        let mut inner = self.lock();
        inner.slot = slot;
        inner.contributors = contributors;
    }

    /// Announces that a part is about to be enqueued; false if the flight is over already.
    pub(crate) fn begin(&self) -> bool {
        let mut inner = self.lock();
        if inner.cancelled {
            return false;
        }
        inner.begun += 1;
        true
    }

    /// A part that was begun is enqueued up to `event`. With the last part the work is told of `joined`, which stands for all.
    pub(crate) fn enqueued(
        &self,
        event: Arc<CudaEvent>,
        joined: impl FnOnce(&[Arc<CudaEvent>]) -> Result<Arc<dyn Event>>,
    ) -> Result<()> {
        let mut inner = self.lock();
        inner.events.push(event);
        if inner.events.len() == self.parts
            && let Some(completer) = &inner.completer
        {
            completer.recorded(joined(&inner.events)?);
        }
        Ok(())
    }

    /// True if every part is enqueued and reached.
    pub(crate) fn reached(&self) -> Result<bool> {
        let inner = self.lock();
        if inner.events.len() < self.parts {
            return Ok(false);
        }
        for event in &inner.events {
            if !event.query()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True if nothing on the device can touch the memory any more, whether or not the operation came about. A flight that is
    /// asked here takes no more parts. `drained`: the communicator was aborted and the group's stream is empty since.
    pub(crate) fn is_free(&self, drained: bool) -> bool {
        let mut inner = self.lock();
        inner.cancelled = true;
        (drained && self.in_order)
            || (inner.begun == inner.events.len() && inner.events.iter().all(|e| e.query().unwrap_or(false)))
    }

    /// The operation succeeded.
    pub(crate) fn succeed(&self, gpu: &Gpu) {
        let (completer, completion, scratch) = {
            let mut inner = self.lock();
            let slot = inner.slot.take();
            let contributors = match (slot, gpu.slots()) {
                (Some(slot), Ok(slots)) => slots.finish(slot),
                _ => inner.contributors,
            };
            let completion = Completion {
                tensors: std::mem::take(&mut inner.tensors),
                source: inner.source,
                contributors,
            };
            (
                inner.completer.take(),
                completion,
                std::mem::take(&mut inner.scratch),
            )
        };
        drop(scratch);
        if let Some(completer) = completer {
            completer.succeed(completion);
        }
    }

    /// The operation failed; memory that may still be touched is leaked. `ended`: the library has let go of the communicator; without that
    /// events prove nothing, because it may write from elsewhere, and only what never began is free.
    pub(crate) fn fail(&self, error: &Error, gpu: &Gpu, ended: bool, drained: bool) {
        let free = self.is_free(drained) && (ended || self.lock().begun == 0);
        let (completer, tensors, scratch, slot) = {
            let mut inner = self.lock();
            (
                inner.completer.take(),
                std::mem::take(&mut inner.tensors),
                std::mem::take(&mut inner.scratch),
                inner.slot.take(),
            )
        };
        let mut back = Vec::new();
        if free {
            drop(scratch);
            back = tensors;
            if let (Some(slot), Ok(slots)) = (slot, gpu.slots()) {
                slots.finish(slot);
            }
        } else {
            // The slot is lost with them: a late write into a slot of another operation would be a wrong result.
            scratch.into_iter().for_each(std::mem::forget);
            leak(tensors);
        }
        if let Some(completer) = completer {
            completer.fail(self.label.name(error.clone()), back);
        }
    }
}
