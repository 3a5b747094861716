//! The host's store, as a `Store` of this side.

use std::sync::Arc;
use std::time::Instant;

use ftcore::{Cancel, Error, Result, Store};

use super::breach;
use crate::abi::{self, Bytes, Fault, Growing, Str};
use crate::fault;
use crate::text::{self, Collected};

/// The host's table, with one reference held.
struct HostStore(abi::Store);

// SAFETY: the ABI says that any thread may call the store's functions.
unsafe impl Send for HostStore {}
// SAFETY: as above.
unsafe impl Sync for HostStore {}

impl Drop for HostStore {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: gives back the reference taken in `hold`.
            unsafe { release(self.0.ctx) }
        }
    }
}

/// Takes a reference to the host's store, with the token of the `configure` that it is passed in.
///
/// # Safety
/// `store` keeps to the ABI.
pub(super) unsafe fn hold(store: *const abi::Store) -> Result<(Arc<dyn Store>, Cancel)> {
    // SAFETY: by the contract.
    let store = unsafe { abi::read(store) }.map_err(breach)?;
    if let Some(retain) = store.retain {
        // SAFETY: the host's function for the host's context.
        unsafe { retain(store.ctx) }
    }
    let store = Arc::new(HostStore(store));
    let asked = store.clone();
    Ok((store, Cancel::watching(move || asked.wanted().err())))
}

impl HostStore {
    fn wanted(&self) -> Result<()> {
        match self.0.wanted {
            // SAFETY: the host's function; the fault lives for the call.
            Some(f) => call(|fault| unsafe { f(self.0.ctx, fault) }),
            None => Ok(()),
        }
    }
}

const WHO: &str = "the host's store";

fn missing() -> Error {
    breach("its store lacks a function".into())
}

/// Runs one call with a fault of its own.
fn call(run: impl FnOnce(*mut Fault) -> i32) -> Result<()> {
    let mut fault = Fault::empty();
    let status = run(&raw mut fault);
    fault::check(status, &fault, WHO)
}

fn lend(keys: &[&str]) -> Vec<Str> {
    keys.iter().map(|k| text::lend(k)).collect()
}

impl Store for HostStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let f = self.0.set.ok_or_else(missing)?;
        let ms = fault::milliseconds(deadline);
        // SAFETY: the host's function; the arguments live for the call.
        call(|fault| unsafe { f(self.0.ctx, text::lend(key), text::lend_bytes(value), ms, fault) })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let f = self.0.get.ok_or_else(missing)?;
        let mut value = Collected::default();
        let sink = value.sink();
        // SAFETY: as above; the sink's target is not moved during the call.
        call(|fault| unsafe {
            f(
                self.0.ctx,
                text::lend(key),
                fault::milliseconds(deadline),
                sink,
                fault,
            )
        })?;
        value.one().map_err(breach)
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        let f = self.0.add.ok_or_else(missing)?;
        let mut sum = 0;
        // SAFETY: as above.
        call(|fault| unsafe {
            f(
                self.0.ctx,
                text::lend(key),
                amount,
                fault::milliseconds(deadline),
                &raw mut sum,
                fault,
            )
        })?;
        Ok(sum)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        let f = self.0.compare_set.ok_or_else(missing)?;
        let mut value = Collected::default();
        let sink = value.sink();
        let ms = fault::milliseconds(deadline);
        let (expected, desired) = (text::lend_bytes(expected), text::lend_bytes(desired));
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, text::lend(key), expected, desired, ms, sink, fault) })?;
        value.one().map_err(breach)
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        let f = self.0.check.ok_or_else(missing)?;
        let keys = lend(keys);
        let mut all = 0;
        let ms = fault::milliseconds(deadline);
        // SAFETY: as above.
        call(|fault| unsafe {
            f(
                self.0.ctx,
                keys.as_ptr(),
                keys.len() as u64,
                ms,
                &raw mut all,
                fault,
            )
        })?;
        Ok(all != 0)
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        let f = self.0.wait.ok_or_else(missing)?;
        let keys = lend(keys);
        let ms = fault::milliseconds(deadline);
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, keys.as_ptr(), keys.len() as u64, ms, fault) })
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        let f = self.0.remove.ok_or_else(missing)?;
        let mut existed = 0;
        let ms = fault::milliseconds(deadline);
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, text::lend(key), ms, &raw mut existed, fault) })?;
        Ok(existed != 0)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let f = self.0.append.ok_or_else(missing)?;
        let ms = fault::milliseconds(deadline);
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, text::lend(key), text::lend_bytes(value), ms, fault) })
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let f = self.0.multi_get.ok_or_else(missing)?;
        let lent = lend(keys);
        let mut values = Collected::default();
        let sink = values.sink();
        let ms = fault::milliseconds(deadline);
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, lent.as_ptr(), lent.len() as u64, ms, sink, fault) })?;
        let values = values.finish().map_err(breach)?;
        if values.len() == keys.len() {
            Ok(values)
        } else {
            Err(breach(format!("{} values for {} keys", values.len(), keys.len())))
        }
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        let f = self.0.multi_set.ok_or_else(missing)?;
        let keys: Vec<Str> = pairs.iter().map(|(k, _)| text::lend(k)).collect();
        let values: Vec<Bytes> = pairs.iter().map(|(_, v)| text::lend_bytes(v)).collect();
        let ms = fault::milliseconds(deadline);
        let (keys_at, values_at, count) = (keys.as_ptr(), values.as_ptr(), keys.len() as u64);
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, keys_at, values_at, count, ms, fault) })
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        let f = self.0.num_keys.ok_or_else(missing)?;
        let mut count = 0;
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, fault::milliseconds(deadline), &raw mut count, fault) })?;
        Ok(count)
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        let f = self.0.list.ok_or_else(missing)?;
        let mut keys = Collected::default();
        let sink = keys.sink();
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, fault::milliseconds(deadline), sink, fault) })?;
        let keys = keys.finish().map_err(breach)?;
        keys.into_iter()
            .map(|k| String::from_utf8(k).map_err(|_| breach("a key that is not UTF-8".into())))
            .collect()
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        let f = self.0.barrier.ok_or_else(missing)?;
        let ms = fault::milliseconds(deadline);
        // SAFETY: as above.
        call(|fault| unsafe { f(self.0.ctx, text::lend(key), world_size, ms, fault) })
    }
}
