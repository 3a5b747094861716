//! What waits in a lane and what runs in it, and where the result goes.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Completer, Completion, DType, Error, OpKind, Result, Tensor};

use crate::engine::Comms;
use crate::raw::lent::Held;
use crate::recipe::Recipe;
use crate::xpu::event::Order;

/// What an operation is called in messages, and until when it may take.
#[derive(Debug, Clone)]
pub(crate) struct Label {
    pub(crate) kind: OpKind,
    /// `None` for messages.
    pub(crate) seq: Option<u64>,
    pub(crate) dtype: Option<DType>,
    pub(crate) count: usize,
    /// The other end of a message, and its tag (which is only for messages to the user: oneCCL matches none).
    pub(crate) message: Option<(u32, u32)>,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
    /// On a device: after what it begins, and who waits for it to be enqueued.
    pub(crate) order: Option<Order>,
}

/// A monitored barrier finds out by itself who is missing at its deadline, and gets this long to say so.
const VERDICT: Duration = Duration::from_secs(3);

impl Label {
    /// When the watcher ends the job.
    pub(crate) fn watched_until(&self) -> Instant {
        match self.kind {
            OpKind::MonitoredBarrier => self.deadline.checked_add(VERDICT).unwrap_or(self.deadline),
            _ => self.deadline,
        }
    }

    /// Adds what is known about the operation to an error.
    pub(crate) fn on(&self, error: Error) -> Error {
        let mut error = error.with_op(self.kind.name());
        if let Some(seq) = self.seq {
            error = error.with_seq(seq);
        }
        if let Some(dtype) = self.dtype {
            error = error.with_data(dtype, self.count);
        }
        error
    }
}

/// A job of a lane.
pub(crate) struct Job {
    pub(crate) label: Label,
    pub(crate) task: Task,
}

/// What there is to do.
pub(crate) enum Task {
    /// An operation with its tensors.
    Run {
        recipe: Recipe,
        tensors: Vec<Tensor>,
        contribute: bool,
        sink: Sink,
    },
    /// A split: colours are small and dense, ranks our own.
    Split {
        color: Option<u32>,
        rank: u32,
        world: u32,
        reply: Sender<Result<Option<Comms>>>,
    },
}

/// A job that a lane's thread is in.
pub(crate) struct Active {
    pub(crate) label: Label,
    pub(crate) memory: Memory,
    pub(crate) sink: Option<Sink>,
}

/// Where the tensors of an active job are.
pub(crate) enum Memory {
    /// Nobody touches them yet.
    Idle(Vec<Tensor>),
    /// The thread has their addresses.
    Lent(Held),
}

impl Memory {
    /// The tensors; those that the thread may touch are leaked instead.
    pub(crate) fn take(self) -> Vec<Tensor> {
        match self {
            Self::Idle(tensors) => tensors,
            Self::Lent(held) => held.take(),
        }
    }
}

/// Where a result goes.
pub(crate) enum Sink {
    /// To the operation itself.
    One(Completer),
    /// To a batch, as part `slot`.
    Part { batch: Arc<Batch>, slot: usize },
}

impl Sink {
    pub(crate) fn succeed(self, tensors: Vec<Tensor>, source: Option<u32>, contributors: u32) {
        match self {
            Self::One(completer) => completer.succeed(Completion {
                tensors,
                source,
                contributors,
            }),
            Self::Part { batch, slot } => batch.end(slot, Ok(tensors)),
        }
    }

    pub(crate) fn fail(self, error: Error, tensors: Vec<Tensor>) {
        match self {
            Self::One(completer) => completer.fail(error, tensors),
            Self::Part { batch, slot } => batch.end(slot, Err((error, tensors))),
        }
    }
}

/// Messages that count as one operation.
pub(crate) struct Batch(Mutex<Parts>);

struct Parts {
    slots: Vec<Vec<Tensor>>,
    left: usize,
    error: Option<Error>,
    completer: Option<Completer>,
}

impl Batch {
    pub(crate) fn new(parts: usize, completer: Completer) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Parts {
            slots: (0..parts).map(|_| Vec::new()).collect(),
            left: parts,
            error: None,
            completer: Some(completer),
        })))
    }

    fn end(&self, slot: usize, result: std::result::Result<Vec<Tensor>, (Error, Vec<Tensor>)>) {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let tensors = match result {
            Ok(tensors) => tensors,
            Err((error, tensors)) => {
                parts.error.get_or_insert(error);
                tensors
            }
        };
        if let Some(slot) = parts.slots.get_mut(slot) {
            *slot = tensors;
        }
        parts.left = parts.left.saturating_sub(1);
        if parts.left > 0 {
            return;
        }
        let tensors = std::mem::take(&mut parts.slots).into_iter().flatten().collect();
        let (completer, error) = (parts.completer.take(), parts.error.take());
        drop(parts);
        match (completer, error) {
            (Some(completer), None) => completer.succeed(Completion {
                tensors,
                source: None,
                contributors: 0,
            }),
            (Some(completer), Some(error)) => completer.fail(error, tensors),
            (None, _) => {}
        }
    }
}
