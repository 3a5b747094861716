//! Bytes that a group has moved.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Traffic;

/// Over all configurations of a group, for [`Backend::traffic`](super::Backend::traffic).
#[derive(Debug, Default)]
pub struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    /// Counts bytes.
    pub fn add(&self, sent: u64, received: u64) {
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.received.fetch_add(received, Ordering::Relaxed);
    }

    /// So far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }
}
