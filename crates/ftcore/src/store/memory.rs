//! A store inside one process: ranks as threads, tests, and groups of one.
//!
//! One mutex and one condition variable: every write wakes all waiters, and each looks at all its keys again under the
//! lock, so a wait ends exactly when its keys exist at the same moment (L40).

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::table::Table;
use super::tabled::Tabled;
use crate::{Error, Result, time_left};

/// A store inside one process. Clones share their contents.
#[derive(Clone, Default)]
pub struct InMemoryStore {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    table: Table,
    waiting: usize,
}

impl InMemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many calls are blocked now.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiting
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock means a panic in a test's thread; the table is never left half written.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tabled for InMemoryStore {
    fn look<T>(&self, _: &'static str, _: Instant, look: impl FnOnce(&Table) -> T) -> Result<T> {
        Ok(look(&self.lock().table))
    }

    fn write<T>(
        &self,
        _: &'static str,
        _: &[&str],
        _: Instant,
        write: impl FnOnce(&mut Table) -> Result<T>,
    ) -> Result<T> {
        let out = write(&mut self.lock().table)?;
        self.shared.changed.notify_all();
        Ok(out)
    }

    fn block<T>(
        &self,
        _: &'static str,
        deadline: Instant,
        mut ready: impl FnMut(&Table) -> Option<T>,
        late: impl FnOnce(&Table) -> Error,
    ) -> Result<T> {
        let mut state = self.lock();
        loop {
            if let Some(out) = ready(&state.table) {
                return Ok(out);
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(late(&state.table));
            }
            state.waiting += 1;
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            state.waiting -= 1;
        }
    }
}

impl fmt::Debug for InMemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("InMemoryStore")
            .field("keys", &state.table.len())
            .field("waiting", &state.waiting)
            .finish()
    }
}
