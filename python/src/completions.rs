//! Tells Python which operations have ended, in the order of their ends: threads of groups leave numbers here without the interpreter, and a thread
//! of Python's fetches them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use oxccl::core::Work;
use pyo3::prelude::*;

use crate::process::detached;

#[derive(Default)]
struct Ended {
    numbers: VecDeque<u64>,
    is_closed: bool,
}

/// A queue of the numbers of operations that have ended.
#[pyclass(frozen, module = "oxccl._oxccl", name = "_Completions")]
pub(crate) struct Completions {
    shared: Arc<(Mutex<Ended>, Condvar)>,
}

impl Completions {
    /// Leaves `number` here once `work` has ended.
    pub(crate) fn expect(&self, work: &Work, number: u64) {
        let shared = self.shared.clone();
        work.on_complete(move |_| {
            let (ended, bell) = &*shared;
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            ended.numbers.push_back(number);
            bell.notify_one();
        });
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> Self {
        Self {
            shared: Arc::default(),
        }
    }

    /// Waits for the next number; `None` once the queue is closed.
    fn next(&self, py: Python<'_>) -> Option<u64> {
        let (ended, bell) = &*self.shared;
        detached(py, || {
            let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            let mut ended = bell
                .wait_while(ended, |e| e.numbers.is_empty() && !e.is_closed)
                .unwrap_or_else(PoisonError::into_inner);
            if ended.is_closed {
                None
            } else {
                ended.numbers.pop_front()
            }
        })
    }

    /// Ends the wait of `next`, for ever.
    fn close(&self) {
        let (ended, bell) = &*self.shared;
        ended.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        bell.notify_all();
    }
}
