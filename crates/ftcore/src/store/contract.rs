//! The contract of all stores.

use std::sync::Arc;
use std::time::Instant;

use crate::{Cancel, Result};

/// A key-value store shared by the ranks of a job.
///
/// Behaviour common to all methods:
/// - keys are non-empty UTF-8 of at most 8192 bytes, values at most 8 MiB (the limits of PyTorch's server);
/// - a call that cannot finish by `deadline` fails with `ErrorKind::Timeout` naming the keys it waited for, not
///   earlier and at most some tens of milliseconds later;
/// - a lost server is `ErrorKind::Unavailable` (the store reconnects until the deadline first), one that has not answered by the deadline
///   `ErrorKind::Timeout`;
/// - calls may be made from several threads; a blocked `wait` does not delay calls of other threads.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::store::{InMemoryStore, Store};
/// use ftcore::deadline_in;
///
/// let (store, soon) = (InMemoryStore::new(), deadline_in(Duration::from_secs(5)));
/// store.set("rank0/address", b"10.0.0.4:4103", soon)?;
/// assert_eq!(store.get("rank0/address", soon)?, b"10.0.0.4:4103"); // waits until the key is there
/// assert_eq!(store.add("arrived", 1, soon)?, 1);
/// # Ok::<(), ftcore::Error>(())
/// ```
pub trait Store: Send + Sync {
    /// Sets `key`, replacing what is there.
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()>;
    /// The value of `key`, waiting until it exists.
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>>;
    /// Adds to the integer at `key` (absent counts as 0; stored as decimal text) and returns the new value.
    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64>;
    /// If the value equals `expected` (or is absent and `expected` is empty), sets `desired`. Returns the value that
    /// stands afterwards; for an absent key with a non-empty `expected`, returns `expected` and creates nothing.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>>;
    /// True if all keys exist now. Does not wait for them.
    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool>;
    /// Waits until all keys exist at the same moment.
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()>;
    /// Removes `key`; true if it existed.
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool>;
    /// Appends to the value of `key` (absent counts as empty).
    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()>;
    /// The values of all keys, waiting until they exist.
    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>>;
    /// Sets all pairs.
    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()>;
    /// The number of keys.
    fn num_keys(&self, deadline: Instant) -> Result<i64>;
    /// The keys, sorted.
    fn list(&self, deadline: Instant) -> Result<Vec<String>>;
    /// Blocks until `world_size` callers have entered the barrier `key`. A key serves for one barrier only.
    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()>;
    /// A view of this store whose calls look at `cancel` while they wait, and end with its reason once it is cancelled. `None` if this store
    /// cannot look: [`Cancel::over`] then asks it in turns.
    fn cancelled_by(&self, _cancel: &Cancel) -> Option<Arc<dyn Store>> {
        None
    }
}
