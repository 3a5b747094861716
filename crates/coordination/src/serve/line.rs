//! What a service remembers of a connection: under which names its peer called, and what is to happen when the connection ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most names for one connection. A replica has one; a connection with more is some tool's.
const MAX_NAMES: usize = 16;

static NEXT: AtomicU64 = AtomicU64::new(1);

type AtEnd = Box<dyn FnOnce(bool) + Send>;

/// One connection, found in the extensions of its requests.
pub(crate) struct Line {
    number: u64,
    state: Mutex<(Vec<String>, Option<AtEnd>)>,
}

impl Line {
    pub(super) fn new() -> Self {
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
        }
    }

    /// Differs from that of every other connection of this process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn state(&self) -> MutexGuard<'_, (Vec<String>, Option<AtEnd>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the peer calls itself `name`. True if that is new; names beyond the most are not noted.
    pub(crate) fn is_new(&self, name: &str) -> bool {
        let names = &mut self.state().0;
        let new = names.len() < MAX_NAMES && names.iter().all(|n| n != name);
        if new {
            names.push(name.to_string());
        }
        new
    }

    /// Calls `end` when the connection ends, with true if its peer ended it unasked (as the kernel of a killed process does). Not called when the
    /// whole server closes.
    pub(crate) fn at_end(&self, end: impl FnOnce(bool) + Send + 'static) {
        self.state().1.get_or_insert_with(|| Box::new(end));
    }

    pub(super) fn ended(&self, by_peer: bool) {
        let end = self.state().1.take();
        if let Some(end) = end {
            end(by_peer);
        }
    }
}
