//! A store that is slow to be reached, or gone: the first holds a configuration up, only the second ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Configuration, Error, ErrorKind, InMemoryStore, ProcessGroup, Result, Store, time_left};

use crate::ranks::{configuration, group, soon, store};

/// To wait at it takes a connection, and that this long.
struct Remote {
    inner: Arc<dyn Store>,
    connecting: Duration,
    connected: AtomicBool,
}

impl Remote {
    fn new(inner: &Arc<dyn Store>, connecting: Duration) -> Arc<Self> {
        Arc::new(Self {
            inner: inner.clone(),
            connecting,
            connected: AtomicBool::new(false),
        })
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for Remote {
    fn set(&self, key: &str, value: &[u8], by: Instant) -> Result<()> {
        self.inner.set(key, value, by)
    }
    fn get(&self, key: &str, by: Instant) -> Result<Vec<u8>> {
        self.inner.get(key, by)
    }
    fn add(&self, key: &str, amount: i64, by: Instant) -> Result<i64> {
        self.inner.add(key, amount, by)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], by: Instant) -> Result<Vec<u8>> {
        self.inner.compare_set(key, expected, desired, by)
    }
    fn check(&self, keys: &[&str], by: Instant) -> Result<bool> {
        self.inner.check(keys, by)
    }
    fn wait(&self, keys: &[&str], by: Instant) -> Result<()> {
        let left = time_left(by);
        if !self.connected.load(Ordering::Acquire) && left < self.connecting {
            // A connection that does not stand in time is closed again.
            std::thread::sleep(left);
            return Err(Error::new(ErrorKind::Unavailable, "no server was reached"));
        }
        self.connected.store(true, Ordering::Release);
        self.inner.wait(keys, by)
    }
    fn delete(&self, key: &str, by: Instant) -> Result<bool> {
        self.inner.delete(key, by)
    }
    fn append(&self, key: &str, value: &[u8], by: Instant) -> Result<()> {
        self.inner.append(key, value, by)
    }
    fn multi_get(&self, keys: &[&str], by: Instant) -> Result<Vec<Vec<u8>>> {
        self.inner.multi_get(keys, by)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])], by: Instant) -> Result<()> {
        self.inner.multi_set(pairs, by)
    }
    fn num_keys(&self, by: Instant) -> Result<i64> {
        self.inner.num_keys(by)
    }
    fn list(&self, by: Instant) -> Result<Vec<String>> {
        self.inner.list(by)
    }
    fn barrier(&self, key: &str, world_size: u32, by: Instant) -> Result<()> {
        self.inner.barrier(key, world_size, by)
    }
}

fn through(store: Arc<dyn Store>, rank: u32) -> Configuration {
    Configuration {
        store,
        ..configuration(&(Arc::new(InMemoryStore::new()) as _), 1, rank, 2)
    }
}

#[test]
fn a_store_that_is_not_reached_within_one_look_is_asked_again_for_longer() {
    let shared = store();
    std::thread::scope(|scope| {
        for rank in 0..2u32 {
            let slow = Remote::new(&shared, Duration::from_millis(300));
            scope.spawn(move || {
                let group = group();
                group.configure(through(slow, rank)).unwrap();
                group.shutdown(soon()).unwrap();
            });
        }
    });
}

#[test]
fn a_store_that_stays_out_of_reach_fails_the_configuration_before_its_deadline() {
    let gone = Remote::new(&store(), Duration::from_secs(3600));
    let began = Instant::now();
    let e = group().configure(through(gone, 1)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    assert!(e.to_string().contains("no server was reached"), "{e}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}
