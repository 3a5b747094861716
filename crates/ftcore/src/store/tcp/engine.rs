//! The server's state: the map, the queues, and who waits for what. One mutex, no IO.
//!
//! A waiter counts how many of its keys are absent; the count goes down when a key appears and *up again when one is
//! deleted*, so a wait ends exactly when all its keys exist at the same moment (L40), at constant cost per change even
//! with 100 000 keys. Ending a wait removes the waiter and rings its connection's bell.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::link::Bell;
use crate::store::table::{Refusal, Table, Value, leading_number};

/// What an entry of a queue costs besides its bytes.
const ITEM_BYTES: usize = 64;

/// A pending wait, as its connection knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

/// What a wait or barrier came to at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// What it is for is there.
    Ready,
    /// It is not; the bell will ring.
    Pending(Ticket),
}

#[derive(Debug)]
pub(super) struct Engine {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    table: Table,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    waiters: BTreeMap<Ticket, Waiter>,
    by_key: HashMap<Vec<u8>, BTreeSet<Ticket>>,
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    bell: Arc<Bell>,
    goal: Goal,
}

#[derive(Debug)]
enum Goal {
    /// All of these exist; `absent` of them are not in the table now (in a queue they may be).
    Keys { keys: Vec<Vec<u8>>, absent: usize },
    /// The number at `key` is at least this.
    Count { key: Vec<u8>, at_least: i64 },
}

impl Engine {
    /// An empty store that refuses to grow beyond `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            state: Mutex::new(State {
                table: Table::with_limit(limit),
                queues: HashMap::new(),
                waiters: BTreeMap::new(),
                by_key: HashMap::new(),
                next: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, key: &[u8], value: Vec<u8>) -> Result<(), Refusal> {
        self.lock().write(key, |table| table.set(key, value))
    }

    /// Sets all pairs; up to the first refused one.
    pub(super) fn multi_set(&self, pairs: Vec<(Vec<u8>, Vec<u8>)>) -> Result<(), (Vec<u8>, Refusal)> {
        let mut state = self.lock();
        for (key, value) in pairs {
            state
                .write(&key, |table| table.set(&key, value))
                .map_err(|refusal| (key, refusal))?;
        }
        Ok(())
    }

    pub(super) fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8]) -> Result<Value, Refusal> {
        Ok(self
            .lock()
            .write(key, |table| table.compare_set(key, expected, desired))?
            .0)
    }

    pub(super) fn add(&self, key: &[u8], amount: i64) -> Result<i64, Refusal> {
        self.lock().write(key, |table| table.add(key, amount))
    }

    pub(super) fn append(&self, key: &[u8], more: &[u8]) -> Result<(), Refusal> {
        self.lock().write(key, |table| table.append(key, more))
    }

    /// The values; `None` for an absent key.
    pub(super) fn get(&self, keys: &[Vec<u8>]) -> Vec<Option<Value>> {
        let state = self.lock();
        keys.iter().map(|key| state.table.get(key).cloned()).collect()
    }

    /// True if all keys exist, in the map or as a non-empty queue.
    pub(super) fn check(&self, keys: &[Vec<u8>]) -> bool {
        self.lock().all_exist(keys)
    }

    /// True if the key existed.
    pub(super) fn delete(&self, key: &[u8]) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        if !state.table.remove(key) {
            return false;
        }
        for ticket in state.by_key.get(key).into_iter().flatten() {
            if let Some(Waiter {
                goal: Goal::Keys { absent, .. },
                ..
            }) = state.waiters.get_mut(ticket)
            {
                *absent += 1;
            }
        }
        true
    }

    pub(super) fn num_keys(&self) -> usize {
        self.lock().table.len()
    }

    pub(super) fn list(&self) -> Vec<Vec<u8>> {
        self.lock().table.keys().map(<[u8]>::to_vec).collect()
    }

    /// Puts an item at the end of a queue and wakes one waiter, as it can be popped once only.
    pub(super) fn push(&self, key: Vec<u8>, item: Vec<u8>) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.table.charge(ITEM_BYTES + item.len() + key.len(), 0)?;
        state.queues.entry(key.clone()).or_default().push_back(item);
        let tickets: Vec<Ticket> = state.by_key.get(&key).into_iter().flatten().copied().collect();
        if let Some(first) = tickets.into_iter().find(|ticket| state.is_met(*ticket)) {
            state.finish(first);
        }
        Ok(())
    }

    /// The length before, and the first item if there was one.
    pub(super) fn pop(&self, key: &[u8]) -> (usize, Option<Vec<u8>>) {
        let mut state = self.lock();
        let Some(queue) = state.queues.get_mut(key) else {
            return (0, None);
        };
        let len = queue.len();
        let item = queue.pop_front();
        if queue.is_empty() {
            state.queues.remove(key);
        }
        if let Some(item) = &item {
            // Giving back cannot be refused.
            let _ = state.table.charge(0, ITEM_BYTES + item.len() + key.len());
        }
        (len, item)
    }

    pub(super) fn queue_len(&self, key: &[u8]) -> usize {
        self.lock().queues.get(key).map_or(0, VecDeque::len)
    }

    /// Waits for all keys to exist.
    pub(super) fn wait(&self, mut keys: Vec<Vec<u8>>, bell: &Arc<Bell>) -> Entry {
        keys.sort_unstable();
        keys.dedup();
        let mut state = self.lock();
        if state.all_exist(&keys) {
            return Entry::Ready;
        }
        let absent = keys.iter().filter(|key| !state.table.contains(key)).count();
        Entry::Pending(state.register(bell, Goal::Keys { keys, absent }))
    }

    /// Counts one more caller at `key` and waits for the count to reach `world_size`.
    pub(super) fn barrier(&self, key: Vec<u8>, world_size: i64, bell: &Arc<Bell>) -> Result<Entry, Refusal> {
        let mut state = self.lock();
        if state.write(&key, |table| table.add(&key, 1))? >= world_size {
            return Ok(Entry::Ready);
        }
        Ok(Entry::Pending(state.register(
            bell,
            Goal::Count {
                key,
                at_least: world_size,
            },
        )))
    }

    pub(super) fn is_pending(&self, ticket: Ticket) -> bool {
        self.lock().waiters.contains_key(&ticket)
    }

    /// Gives a wait up; false if it had ended before.
    pub(super) fn cancel(&self, ticket: Ticket) -> bool {
        self.lock().take(ticket).is_some()
    }

    /// How many waits are pending.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiters.len()
    }
}

impl State {
    fn exists(&self, key: &[u8]) -> bool {
        // A queue in the map is never empty.
        self.table.contains(key) || self.queues.contains_key(key)
    }

    fn all_exist(&self, keys: &[Vec<u8>]) -> bool {
        keys.iter().all(|key| self.exists(key))
    }

    /// Does a write to the table, then wakes whom it satisfies.
    fn write<T>(
        &mut self,
        key: &[u8],
        f: impl FnOnce(&mut Table) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let existed = self.table.contains(key);
        let out = f(&mut self.table)?;
        let Some(tickets) = self.by_key.get(key) else {
            return Ok(out);
        };
        if !existed && self.table.contains(key) {
            for ticket in tickets {
                if let Some(Waiter {
                    goal: Goal::Keys { absent, .. },
                    ..
                }) = self.waiters.get_mut(ticket)
                {
                    *absent = absent.saturating_sub(1);
                }
            }
        }
        let met: Vec<Ticket> = tickets
            .iter()
            .copied()
            .filter(|ticket| self.is_met(*ticket))
            .collect();
        for ticket in met {
            self.finish(ticket);
        }
        Ok(out)
    }

    fn is_met(&self, ticket: Ticket) -> bool {
        match self.waiters.get(&ticket).map(|waiter| &waiter.goal) {
            None => false,
            Some(Goal::Keys { absent: 0, .. }) => true,
            Some(Goal::Keys { keys, .. }) => !self.queues.is_empty() && self.all_exist(keys),
            Some(Goal::Count { key, at_least }) => self
                .table
                .get(key)
                .and_then(|value| leading_number(value))
                .is_some_and(|n| n >= *at_least),
        }
    }

    fn register(&mut self, bell: &Arc<Bell>, goal: Goal) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        for key in goal.keys() {
            self.by_key.entry(key.clone()).or_default().insert(ticket);
        }
        self.waiters.insert(
            ticket,
            Waiter {
                bell: bell.clone(),
                goal,
            },
        );
        ticket
    }

    fn take(&mut self, ticket: Ticket) -> Option<Waiter> {
        let waiter = self.waiters.remove(&ticket)?;
        for key in waiter.goal.keys() {
            if let Some(tickets) = self.by_key.get_mut(key) {
                tickets.remove(&ticket);
                if tickets.is_empty() {
                    self.by_key.remove(key);
                }
            }
        }
        Some(waiter)
    }

    fn finish(&mut self, ticket: Ticket) {
        if let Some(waiter) = self.take(ticket) {
            waiter.bell.ring();
        }
    }
}

impl Goal {
    fn keys(&self) -> &[Vec<u8>] {
        match self {
            Self::Keys { keys, .. } => keys,
            Self::Count { key, .. } => std::slice::from_ref(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> (Engine, Arc<Bell>) {
        (Engine::new(1 << 20), Arc::new(Bell::new().unwrap()))
    }

    fn keys(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|n| n.as_bytes().to_vec()).collect()
    }

    fn pending(entry: Entry) -> Ticket {
        match entry {
            Entry::Pending(ticket) => ticket,
            Entry::Ready => panic!("expected to wait"),
        }
    }

    #[test]
    fn l40_every_write_wakes_a_waiter_compare_set_too() {
        type Write = fn(&Engine);
        let writes: [(&str, Write); 7] = [
            ("set", |e| e.set(b"k", b"v".to_vec()).unwrap()),
            ("add", |e| assert_eq!(e.add(b"k", 1), Ok(1))),
            ("append", |e| e.append(b"k", b"v").unwrap()),
            ("compare_set", |e| drop(e.compare_set(b"k", b"", b"v").unwrap())),
            ("multi_set", |e| {
                e.multi_set(vec![(b"k".to_vec(), Vec::new())]).unwrap()
            }),
            ("push", |e| e.push(b"k".to_vec(), b"v".to_vec()).unwrap()),
            ("barrier", |e| {
                let bell = Arc::new(Bell::new().unwrap());
                assert_eq!(e.barrier(b"k".to_vec(), 1, &bell), Ok(Entry::Ready));
            }),
        ];
        for (name, write) in writes {
            let (e, bell) = engine();
            let ticket = pending(e.wait(keys(&["k"]), &bell));
            assert!(e.is_pending(ticket));
            write(&e);
            assert!(!e.is_pending(ticket), "{name} must wake");
        }
    }

    #[test]
    fn l40_a_wait_ends_only_when_all_keys_exist_at_the_same_moment() {
        let (e, bell) = engine();
        let ticket = pending(e.wait(keys(&["p1", "p2", "p1"]), &bell));
        e.set(b"p1", vec![]).unwrap();
        assert!(e.delete(b"p1"));
        e.set(b"p2", vec![]).unwrap();
        assert!(e.is_pending(ticket), "p1 is gone again");
        e.set(b"p2", b"again".to_vec()).unwrap();
        assert!(e.is_pending(ticket), "writing p2 twice does not stand for p1");
        e.set(b"p1", vec![]).unwrap();
        assert!(!e.is_pending(ticket));
    }

    #[test]
    fn one_push_wakes_one_waiter_in_order_of_arrival() {
        let (e, bell) = engine();
        let first = pending(e.wait(keys(&["q"]), &bell));
        let second = pending(e.wait(keys(&["q"]), &bell));
        e.push(b"q".to_vec(), b"1".to_vec()).unwrap();
        assert!(!e.is_pending(first) && e.is_pending(second));
        e.push(b"q".to_vec(), b"2".to_vec()).unwrap();
        assert!(!e.is_pending(second));
        assert_eq!(e.pop(b"q"), (2, Some(b"1".to_vec())));
        assert_eq!(e.pop(b"q"), (1, Some(b"2".to_vec())));
        assert_eq!(e.pop(b"q"), (0, None));
        assert!(!e.check(&keys(&["q"])) && e.num_keys() == 0);
    }

    #[test]
    fn a_wait_for_a_key_and_a_queue_ends_with_whichever_comes_last() {
        for queue_first in [true, false] {
            let (e, bell) = engine();
            let ticket = pending(e.wait(keys(&["k", "q"]), &bell));
            let push = || e.push(b"q".to_vec(), vec![1]).unwrap();
            let set = || e.set(b"k", vec![]).unwrap();
            if queue_first {
                push()
            } else {
                set()
            }
            assert!(e.is_pending(ticket));
            if queue_first {
                set()
            } else {
                push()
            }
            assert!(!e.is_pending(ticket));
        }
    }

    #[test]
    fn a_barrier_ends_with_its_last_caller_and_is_for_single_use() {
        let (e, bell) = engine();
        let a = pending(e.barrier(b"b".to_vec(), 3, &bell).unwrap());
        let b = pending(e.barrier(b"b".to_vec(), 3, &bell).unwrap());
        assert!(e.is_pending(a) && e.is_pending(b));
        assert_eq!(e.barrier(b"b".to_vec(), 3, &bell).unwrap(), Entry::Ready);
        assert!(!e.is_pending(a) && !e.is_pending(b));
        assert_eq!(e.barrier(b"b".to_vec(), 3, &bell).unwrap(), Entry::Ready);
    }

    #[test]
    fn a_cancelled_barrier_leaves_its_count_and_a_cancelled_wait_leaves_nothing() {
        let (e, bell) = engine();
        let a = pending(e.barrier(b"b".to_vec(), 2, &bell).unwrap());
        let w = pending(e.wait(keys(&["x", "y"]), &bell));
        assert!(e.cancel(a) && e.cancel(w) && !e.cancel(w));
        let state = e.lock();
        assert!(state.waiters.is_empty() && state.by_key.is_empty());
        assert_eq!(state.table.get(b"b").unwrap().as_slice(), b"1");
    }

    #[test]
    fn queues_count_against_the_limit_and_give_it_back() {
        let (e, _) = engine();
        while e.push(b"q".to_vec(), vec![0; 10_000]).is_ok() {}
        assert!(matches!(e.set(b"k", vec![0; 20_000]), Err(Refusal::Full(_))));
        while e.pop(b"q").1.is_some() {}
        e.set(b"k", vec![0; 20_000]).unwrap();
    }
}
