//! A view of another store in which every key is under a prefix, so that several users of one store cannot meet.
//!
//! The key given to the inner store is `prefix + "/" + key`, the rule of PyTorch's PrefixStore, so ranks of both kinds
//! find each other's keys. Errors of the inner store name the full key.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::contract::Store;
use crate::{Cancel, Result};

/// A store whose keys all live under `prefix + "/"` of another store. Clones share the inner store.
///
/// Unlike PyTorch's, `num_keys` counts (and `list` shows, without the prefix) only the keys under the prefix; it
/// therefore costs a listing of the inner store. The inner store's limit on the length of a key applies to the
/// whole key, prefix included.
#[derive(Clone)]
pub struct PrefixStore {
    inner: Arc<dyn Store>,
    prefix: String,
}

impl PrefixStore {
    /// A view of `inner` under `prefix`. The prefix is taken as it is: with `"p/"`, key `k` becomes `p//k`.
    pub fn new(inner: Arc<dyn Store>, prefix: impl Into<String>) -> Self {
        let mut prefix = prefix.into();
        prefix.push('/');
        Self { inner, prefix }
    }

    /// The store behind this view.
    pub fn inner(&self) -> &Arc<dyn Store> {
        &self.inner
    }

    fn full(&self, key: &str) -> Result<String> {
        super::keys::check_key("store", key)?;
        Ok(format!("{}{key}", self.prefix))
    }

    fn all(&self, keys: &[&str]) -> Result<Vec<String>> {
        keys.iter().map(|key| self.full(key)).collect()
    }
}

fn borrowed(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.inner.set(&self.full(key)?, value, deadline)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.inner.get(&self.full(key)?, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.inner.add(&self.full(key)?, amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.inner
            .compare_set(&self.full(key)?, expected, desired, deadline)
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        self.inner.check(&borrowed(&self.all(keys)?), deadline)
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        self.inner.wait(&borrowed(&self.all(keys)?), deadline)
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        self.inner.delete(&self.full(key)?, deadline)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.inner.append(&self.full(key)?, value, deadline)
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.inner.multi_get(&borrowed(&self.all(keys)?), deadline)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        let keys = pairs
            .iter()
            .map(|(key, _)| self.full(key))
            .collect::<Result<Vec<_>>>()?;
        let full: Vec<(&str, &[u8])> = keys
            .iter()
            .zip(pairs)
            .map(|(key, (_, value))| (key.as_str(), *value))
            .collect();
        self.inner.multi_set(&full, deadline)
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        let under = self
            .inner
            .list(deadline)?
            .iter()
            .filter(|key| key.starts_with(&self.prefix))
            .count();
        Ok(i64::try_from(under).unwrap_or(i64::MAX))
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        let keys = self.inner.list(deadline)?;
        Ok(keys
            .iter()
            .filter_map(|key| key.strip_prefix(&self.prefix))
            .map(str::to_owned)
            .collect())
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        self.inner.barrier(&self.full(key)?, world_size, deadline)
    }

    fn cancelled_by(&self, cancel: &Cancel) -> Option<Arc<dyn Store>> {
        let inner = self.inner.cancelled_by(cancel)?;
        let prefix = self.prefix.clone();
        Some(Arc::new(Self { inner, prefix }))
    }
}

impl fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixStore")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}
