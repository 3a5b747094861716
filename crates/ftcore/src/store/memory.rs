//! A store inside one process: ranks as threads, tests, and groups of one.
//!
//! One mutex and one condition variable: every write wakes all waiters, and each looks at all its keys again under the
//! lock, so a wait ends exactly when its keys exist at the same moment (L40).

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::contract::Store;
use super::keys;
use super::table::{Refusal, Table, leading_number};
use crate::{Result, time_left};

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

    fn write<T>(
        &self,
        op: &'static str,
        key: &str,
        f: impl FnOnce(&mut Table) -> std::result::Result<T, Refusal>,
    ) -> Result<T> {
        let out = f(&mut self.lock().table).map_err(|refusal| refusal.into_error(op, key))?;
        self.shared.changed.notify_all();
        Ok(out)
    }

    /// Blocks until `ready` returns something; at the deadline, gives `late` the last look at the table.
    fn block<T, E>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut(&Table) -> Option<T>,
        late: impl FnOnce(&Table) -> E,
    ) -> Result<T, E> {
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

    fn values(&self, op: &'static str, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        keys::check_keys(op, keys)?;
        let since = Instant::now();
        self.block(
            deadline,
            |table| {
                let found: Option<Vec<_>> = keys
                    .iter()
                    .map(|key| table.get(key.as_bytes()).cloned())
                    .collect();
                found.map(|values| values.iter().map(|v| v.to_vec()).collect())
            },
            |table| keys::wait_timed_out(op, keys, &missing(table, keys), since),
        )
    }
}

fn missing<'a>(table: &Table, keys: &[&'a str]) -> Vec<&'a str> {
    keys.iter()
        .copied()
        .filter(|key| !table.contains(key.as_bytes()))
        .collect()
}

impl Store for InMemoryStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Instant) -> Result<()> {
        keys::check_pair("store.set", key, value)?;
        self.write("store.set", key, |table| {
            table.set(key.as_bytes(), value.to_vec())
        })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        Ok(self
            .values("store.get", &[key], deadline)?
            .pop()
            .unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64, _deadline: Instant) -> Result<i64> {
        keys::check_key("store.add", key)?;
        self.write("store.add", key, |table| table.add(key.as_bytes(), amount))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], _deadline: Instant) -> Result<Vec<u8>> {
        keys::check_pair("store.compare_set", key, desired)?;
        let (value, _) = self.write("store.compare_set", key, |table| {
            table.compare_set(key.as_bytes(), expected, desired)
        })?;
        Ok(value.to_vec())
    }

    fn check(&self, keys: &[&str], _deadline: Instant) -> Result<bool> {
        keys::check_keys("store.check", keys)?;
        let state = self.lock();
        Ok(keys.iter().all(|key| state.table.contains(key.as_bytes())))
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        keys::check_keys("store.wait", keys)?;
        let since = Instant::now();
        self.block(
            deadline,
            |table| {
                keys.iter()
                    .all(|key| table.contains(key.as_bytes()))
                    .then_some(())
            },
            |table| keys::wait_timed_out("store.wait", keys, &missing(table, keys), since),
        )
    }

    fn delete(&self, key: &str, _deadline: Instant) -> Result<bool> {
        keys::check_key("store.delete", key)?;
        Ok(self.lock().table.remove(key.as_bytes()))
    }

    fn append(&self, key: &str, value: &[u8], _deadline: Instant) -> Result<()> {
        keys::check_pair("store.append", key, value)?;
        self.write("store.append", key, |table| table.append(key.as_bytes(), value))
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.values("store.multi_get", keys, deadline)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], _deadline: Instant) -> Result<()> {
        keys::check_pairs("store.multi_set", pairs)?;
        let mut state = self.lock();
        for (key, value) in pairs {
            state
                .table
                .set(key.as_bytes(), value.to_vec())
                .map_err(|refusal| refusal.into_error("store.multi_set", key))?;
        }
        drop(state);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn num_keys(&self, _deadline: Instant) -> Result<i64> {
        Ok(i64::try_from(self.lock().table.len()).unwrap_or(i64::MAX))
    }

    fn list(&self, _deadline: Instant) -> Result<Vec<String>> {
        Ok(self
            .lock()
            .table
            .keys()
            .map(|key| String::from_utf8_lossy(key).into_owned())
            .collect())
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        keys::check_barrier(key, world_size)?;
        let since = Instant::now();
        self.write("store.barrier", key, |table| table.add(key.as_bytes(), 1))?;
        let arrived = |table: &Table| table.get(key.as_bytes()).and_then(|v| leading_number(v));
        self.block(
            deadline,
            |table| arrived(table).filter(|n| *n >= i64::from(world_size)).map(drop),
            |table| keys::barrier_timed_out(key, arrived(table), world_size, since),
        )
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
