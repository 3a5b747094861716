//! The stores that are a [`Table`] of this process: each says how its table is looked at, written and waited for, and has the methods of
//! [`Store`] from here.

use std::time::Instant;

use super::contract::Store;
use super::keys::{self, MAX_VALUE};
use super::table::{Refusal, Table, Value, leading_number};
use crate::{Error, Result};

/// A store around a table.
pub(super) trait Tabled: Send + Sync {
    /// Looks at the table as it is now.
    fn look<T>(&self, op: &'static str, deadline: Instant, look: impl FnOnce(&Table) -> T) -> Result<T>;

    /// Changes `keys` of the table, all at once for those that look, and has those look again that wait.
    fn write<T>(
        &self,
        op: &'static str,
        keys: &[&str],
        deadline: Instant,
        write: impl FnOnce(&mut Table) -> Result<T>,
    ) -> Result<T>;

    /// Blocks until `ready` returns something; at the deadline, gives `late` the last look at the table.
    fn block<T>(
        &self,
        op: &'static str,
        deadline: Instant,
        ready: impl FnMut(&Table) -> Option<T>,
        late: impl FnOnce(&Table) -> Error,
    ) -> Result<T>;
}

/// Changes one key.
fn change<T>(
    store: &impl Tabled,
    op: &'static str,
    key: &str,
    deadline: Instant,
    change: impl FnOnce(&mut Table, &[u8]) -> Result<T, Refusal>,
) -> Result<T> {
    store.write(op, &[key], deadline, |table| {
        change(table, key.as_bytes()).map_err(|refusal| refusal.into_error(op, key))
    })
}

/// The values of `keys`, once all exist at the same moment. They are copied by the caller, who holds no lock.
fn values(store: &impl Tabled, op: &'static str, keys: &[&str], deadline: Instant) -> Result<Vec<Value>> {
    keys::check_keys(op, keys)?;
    let since = Instant::now();
    let found = |table: &Table| {
        let values = keys.iter().map(|key| table.get(key.as_bytes()).cloned());
        values.collect()
    };
    store.block(op, deadline, found, |table| {
        let mut missing = keys.to_vec();
        missing.retain(|key| !table.contains(key.as_bytes()));
        keys::wait_timed_out(op, keys, keys.len(), &missing, since)
    })
}

impl<S: Tabled> Store for S {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let op = "store.set";
        keys::check_pair(op, key, value)?;
        change(self, op, key, deadline, |table, key| {
            table.set(key, value.to_vec())
        })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let found = values(self, "store.get", &[key], deadline)?;
        Ok(found.first().map(|value| value.to_vec()).unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        let op = "store.add";
        keys::check_key(op, key)?;
        change(self, op, key, deadline, |table, key| table.add(key, amount))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        let op = "store.compare_set";
        keys::check_pair(op, key, desired)?;
        let (value, _) = change(self, op, key, deadline, |table, key| {
            table.compare_set(key, expected, desired)
        })?;
        Ok(value.to_vec())
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        let op = "store.check";
        keys::check_keys(op, keys)?;
        self.look(op, deadline, |table| {
            keys.iter().all(|key| table.contains(key.as_bytes()))
        })
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        values(self, "store.wait", keys, deadline).map(drop)
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        let op = "store.delete";
        keys::check_key(op, key)?;
        change(self, op, key, deadline, |table, key| Ok(table.remove(key)))
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let op = "store.append";
        keys::check_pair(op, key, value)?;
        change(self, op, key, deadline, |table, key| {
            table.append(key, value, MAX_VALUE)
        })
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let found = values(self, "store.multi_get", keys, deadline)?;
        Ok(found.iter().map(|value| value.to_vec()).collect())
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        let op = "store.multi_set";
        keys::check_pairs(op, pairs)?;
        if pairs.is_empty() {
            return Ok(());
        }
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        self.write(op, &keys, deadline, |table| {
            pairs.iter().try_for_each(|(key, value)| {
                let set = table.set(key.as_bytes(), value.to_vec());
                set.map_err(|refusal| refusal.into_error(op, key))
            })
        })
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        let len = self.look("store.num_keys", deadline, Table::len)?;
        Ok(i64::try_from(len).unwrap_or(i64::MAX))
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        let text = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        self.look("store.list", deadline, |table| table.keys().map(text).collect())
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        let op = "store.barrier";
        keys::check_barrier(key, world_size)?;
        let since = Instant::now();
        change(self, op, key, deadline, |table, key| table.add(key, 1))?;
        let arrived = |table: &Table| table.get(key.as_bytes()).and_then(|v| leading_number(v));
        self.block(
            op,
            deadline,
            |table| arrived(table).filter(|n| *n >= i64::from(world_size)).map(drop),
            |table| keys::barrier_timed_out(key, arrived(table), world_size, since),
        )
    }
}
