//! What a group's handle and its child's keeper share: the first failure and the counters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ftcore::{Error, Traffic};

/// What the handle of a group and the keeper share: the first failure and the counters.
#[derive(Default)]
pub(crate) struct Front {
    error: Mutex<Option<Error>>,
    sent: AtomicU64,
    received: AtomicU64,
    /// Collectives so far in this configuration, for messages.
    pub(crate) seq: AtomicU64,
}

impl Front {
    pub(crate) fn error(&self) -> Option<Error> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The first failure stays.
    pub(crate) fn poison(&self, error: &Error) {
        let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| error.clone());
    }

    pub(crate) fn reset(&self) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.seq.store(0, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, sent: u64, received: u64) {
        self.sent.fetch_max(sent, Ordering::Relaxed);
        self.received.fetch_max(received, Ordering::Relaxed);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    /// The counters so far, which begin again at zero with another child.
    pub(crate) fn take_traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.swap(0, Ordering::Relaxed),
            received: self.received.swap(0, Ordering::Relaxed),
        }
    }
}
