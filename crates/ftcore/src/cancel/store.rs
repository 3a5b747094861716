//! A store that cannot look at a token, asked in turns: its waits end when the token is cancelled, so that no backend has to look while it waits
//! for a key.

use std::sync::Arc;
use std::time::Instant;

use super::Cancel;
use crate::{Result, Store};

pub(super) struct CancelStore {
    inner: Arc<dyn Store>,
    cancel: Cancel,
}

impl CancelStore {
    pub(super) fn new(inner: Arc<dyn Store>, cancel: Cancel) -> Self {
        Self { inner, cancel }
    }
}

impl Store for CancelStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.inner.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.cancel.in_turns(deadline, |until| self.inner.get(key, until))
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.inner.add(key, amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.inner.compare_set(key, expected, desired, deadline)
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        self.inner.check(keys, deadline)
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        self.cancel
            .in_turns(deadline, |until| self.inner.wait(keys, until))
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        self.inner.delete(key, deadline)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.inner.append(key, value, deadline)
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.cancel
            .in_turns(deadline, |until| self.inner.multi_get(keys, until))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        self.inner.multi_set(pairs, deadline)
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        self.inner.num_keys(deadline)
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        self.inner.list(deadline)
    }

    /// Passed on whole: a caller is counted when it enters, so that it cannot wait in turns. Nothing meets at one while it connects.
    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        self.inner.barrier(key, world_size, deadline)
    }
}
