//! The server's state: the map, the queues, and who waits for what. One mutex, no IO.
//!
//! A waiter watches one of its keys that is absent; when it appears, the waiter looks for the next absent one, once round all of them, so
//! that a wait ends exactly when all its keys exist at the same moment (L40). Ending a wait removes the waiter and rings its
//! connection's bell. The names that many wait for are held once.
//!
//! Keys under `namespace/number/` may be retired below a number ([`Engine::retire`]): they are removed, a client that waits for one is told, and
//! they are not made again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::link::Bell;
use crate::store::table::{Refusal, Table, Value, leading_number};

/// What an entry of a queue costs besides its bytes.
const ITEM_BYTES: usize = 64;
/// What a waiter costs for each key, and more for each that no other waits for.
const WAIT_BYTES: usize = 16;
const NAME_BYTES: usize = 128;

/// A key that is waited for, shared by all who do.
type Name = Arc<[u8]>;

/// A pending wait, as its connection knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

/// What a wait or barrier came to at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// What it is for is there.
    Ready,
    /// It is not; the bell will ring. So many bytes are held for it.
    Pending(Ticket, usize),
    /// It never will be: this key, of this epoch, is retired.
    Retired(Vec<u8>, u64),
}

/// How a wait stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Progress {
    Pending,
    Reached,
    /// As [`Entry::Retired`].
    Retired(Vec<u8>, u64),
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
    /// Who watches a key: each waiter one.
    by_key: HashMap<Name, BTreeSet<Ticket>>,
    /// Every key of every waiter.
    names: HashSet<Name>,
    /// Waits that ended because of a retired key, until their connections have asked.
    hopeless: BTreeMap<Ticket, (Vec<u8>, u64)>,
    next: u64,
    retired: Option<Retired>,
}

/// Of the keys `namespace` + number + `/` + anything, those with a lower number than `below` are gone.
#[derive(Debug)]
struct Retired {
    namespace: Vec<u8>,
    below: u64,
}

impl Retired {
    fn number(&self, key: &[u8]) -> Option<u64> {
        let rest = key.strip_prefix(self.namespace.as_slice())?;
        let end = rest.iter().position(|b| *b == b'/')?;
        std::str::from_utf8(rest.get(..end)?).ok()?.parse().ok()
    }

    /// The number of a key that is retired.
    fn has(&self, key: &[u8]) -> Option<u64> {
        self.number(key).filter(|n| *n < self.below)
    }
}

#[derive(Debug)]
struct Waiter {
    bell: Arc<Bell>,
    goal: Goal,
}

#[derive(Debug)]
enum Goal {
    /// All of these exist; the one at `at` is watched.
    Keys { keys: Box<[Name]>, at: usize },
    /// The number at `key` is at least this.
    Count { key: Name, at_least: i64 },
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
                names: HashSet::new(),
                hopeless: BTreeMap::new(),
                next: 0,
                retired: None,
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

    /// As PyTorch's server does it: beyond 64 bits it begins again at the other end.
    pub(super) fn add_wrapping(&self, key: &[u8], amount: i64) -> Result<i64, Refusal> {
        self.lock().write(key, |table| table.add_wrapping(key, amount))
    }

    /// Appends to a value of up to `most` bytes.
    pub(super) fn append(&self, key: &[u8], more: &[u8], most: usize) -> Result<(), Refusal> {
        self.lock().write(key, |table| table.append(key, more, most))
    }

    /// The values of the first keys, of `most` bytes together or one that is longer; `None` for an absent key.
    pub(super) fn get(&self, keys: &[Vec<u8>], most: usize) -> Vec<Option<Value>> {
        let state = self.lock();
        let (mut out, mut bytes) = (Vec::new(), 0);
        for key in keys {
            let value = state.table.get(key);
            bytes += ITEM_BYTES + value.map_or(0, |value| value.len());
            if bytes > most && !out.is_empty() {
                break;
            }
            out.push(value.cloned());
        }
        out
    }

    /// True if all keys exist, in the map or as a non-empty queue.
    pub(super) fn check(&self, keys: &[Vec<u8>]) -> bool {
        self.lock().all_exist(keys)
    }

    /// True if the key existed.
    pub(super) fn delete(&self, key: &[u8]) -> bool {
        self.lock().table.remove(key)
    }

    pub(super) fn num_keys(&self) -> usize {
        self.lock().table.len()
    }

    /// The keys, sorted, if `room` is made for the bytes that a list of them holds.
    pub(super) fn list<E>(&self, room: impl FnOnce(usize) -> Result<(), E>) -> Result<Vec<Vec<u8>>, E> {
        let state = self.lock();
        room(state.table.keys().map(|key| key.len() + ITEM_BYTES).sum())?;
        Ok(state.table.keys().map(<[u8]>::to_vec).collect())
    }

    /// Puts an item at the end of a queue and wakes one waiter, as it can be popped once only.
    pub(super) fn push(&self, key: Vec<u8>, item: Vec<u8>) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.allow(&key)?;
        state.table.charge(ITEM_BYTES + item.len() + key.len(), 0)?;
        state.queues.entry(key.clone()).or_default().push_back(item);
        let mut first = None;
        // All of them: a client that lacks another key watches that one from now on.
        for ticket in state.watchers(&key) {
            if state.is_met(ticket) && first.is_none() {
                first = Some(ticket);
            }
        }
        if let Some(first) = first {
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
        let mut absent = None;
        for (i, key) in keys.iter().enumerate() {
            if state.exists(key) {
                continue;
            }
            if let Some(number) = state.retired.as_ref().and_then(|r| r.has(key)) {
                return Entry::Retired(key.clone(), number);
            }
            absent = absent.or(Some(i));
        }
        let Some(at) = absent else {
            return Entry::Ready;
        };
        let mut held = 0;
        let keys = keys
            .into_iter()
            .map(|key| state.name(key, &mut held))
            .collect::<Box<[Name]>>();
        state.register(bell, Goal::Keys { keys, at }, held)
    }

    /// Counts one more caller at `key` and waits for the count to reach `world_size`.
    pub(super) fn barrier(&self, key: Vec<u8>, world_size: i64, bell: &Arc<Bell>) -> Result<Entry, Refusal> {
        let mut state = self.lock();
        if state.write(&key, |table| table.add(&key, 1))? >= world_size {
            return Ok(Entry::Ready);
        }
        let mut held = 0;
        let goal = Goal::Count {
            key: state.name(key, &mut held),
            at_least: world_size,
        };
        Ok(state.register(bell, goal, held))
    }

    /// How a wait stands. One that ended is asked for once.
    pub(super) fn progress(&self, ticket: Ticket) -> Progress {
        let mut state = self.lock();
        if state.waiters.contains_key(&ticket) {
            return Progress::Pending;
        }
        match state.hopeless.remove(&ticket) {
            Some((key, number)) => Progress::Retired(key, number),
            None => Progress::Reached,
        }
    }

    /// Gives a wait up; says how it stood.
    pub(super) fn cancel(&self, ticket: Ticket) -> Progress {
        let progress = self.progress(ticket);
        self.lock().take(ticket);
        progress
    }

    /// Removes all keys `namespace` + number + `/` + anything with a number lower than `below`, and refuses them from now on.
    /// Returns how many were removed.
    pub(super) fn retire(&self, namespace: &[u8], below: u64) -> usize {
        let mut state = self.lock();
        let retired = Retired {
            namespace: namespace.to_vec(),
            below,
        };
        let mut doomed: Vec<Vec<u8>> = Vec::new();
        let mut from = namespace.to_vec();
        loop {
            // One look for each number, and one for each key that goes.
            let mut skip = None;
            for key in state.table.keys_from(&from, namespace) {
                if retired.has(key).is_none() {
                    skip = Some(key.to_vec());
                    break;
                }
                doomed.push(key.to_vec());
            }
            let Some(kept) = skip else { break };
            let end = kept
                .iter()
                .skip(namespace.len())
                .position(|b| *b == b'/')
                .map(|at| namespace.len() + at);
            from = match end {
                // `0` is the character behind `/`.
                Some(end) => [kept.get(..end).unwrap_or_default(), b"0"].concat(),
                None => [kept.as_slice(), b"\0"].concat(),
            };
        }
        doomed.extend(
            state
                .queues
                .keys()
                .filter(|key| retired.has(key).is_some())
                .cloned(),
        );
        for key in &doomed {
            state.table.remove(key);
            for item in state.queues.remove(key).into_iter().flatten() {
                // Giving back cannot be refused.
                let _ = state.table.charge(0, ITEM_BYTES + item.len() + key.len());
            }
        }
        // A client that waits for one of them learns that it will not come.
        if state.names.iter().any(|name| retired.has(name).is_some()) {
            let lost: Vec<(Ticket, Vec<u8>, u64)> = state
                .waiters
                .iter()
                .filter_map(|(ticket, waiter)| {
                    let mut keys = waiter.goal.keys().iter();
                    keys.find_map(|key| Some((*ticket, key.to_vec(), retired.has(key)?)))
                })
                .collect();
            for (ticket, key, number) in lost {
                state.hopeless.insert(ticket, (key, number));
                state.finish(ticket);
            }
        }
        state.retired = Some(retired);
        doomed.len()
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

    /// Refuses what belongs to a retired number.
    fn allow(&self, key: &[u8]) -> Result<(), Refusal> {
        match self.retired.as_ref().and_then(|r| r.has(key)) {
            Some(number) => Err(Refusal::Retired(number)),
            None => Ok(()),
        }
    }

    /// Does a write to the table, then wakes whom it satisfies.
    fn write<T>(
        &mut self,
        key: &[u8],
        f: impl FnOnce(&mut Table) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        self.allow(key)?;
        let out = f(&mut self.table)?;
        for ticket in self.watchers(key) {
            if self.is_met(ticket) {
                self.finish(ticket);
            }
        }
        Ok(out)
    }

    fn watchers(&self, key: &[u8]) -> Vec<Ticket> {
        self.by_key.get(key).into_iter().flatten().copied().collect()
    }

    /// True if what a waiter waits for is there; otherwise it watches what is not.
    fn is_met(&mut self, ticket: Ticket) -> bool {
        let (from, to) = match self.waiters.get(&ticket).map(|waiter| &waiter.goal) {
            None => return false,
            Some(Goal::Count { key, at_least }) => {
                let count = self.table.get(key).and_then(|value| leading_number(value));
                return count.is_some_and(|n| n >= *at_least);
            }
            Some(Goal::Keys { keys, at }) => {
                let order = (*at..keys.len()).chain(0..*at);
                let absent = order
                    .filter_map(|i| Some((i, keys.get(i)?)))
                    .find(|(_, key)| !self.exists(key));
                match (absent, keys.get(*at)) {
                    (None, _) | (_, None) => return true,
                    (Some((i, _)), _) if i == *at => return false,
                    (Some((i, key)), Some(watched)) => ((watched.clone()), (i, key.clone())),
                }
            }
        };
        self.unwatch(&from, ticket);
        let (i, key) = to;
        let number = self.retired.as_ref().and_then(|r| r.has(&key));
        if let Some(Waiter {
            goal: Goal::Keys { at, .. },
            ..
        }) = self.waiters.get_mut(&ticket)
        {
            *at = i;
        }
        if let Some(number) = number {
            self.hopeless.insert(ticket, (key.to_vec(), number));
        }
        self.by_key.entry(key).or_default().insert(ticket);
        if number.is_some() {
            self.finish(ticket);
        }
        false
    }

    /// The shared name of a key; what it costs is added to `held`.
    fn name(&mut self, key: Vec<u8>, held: &mut usize) -> Name {
        *held += WAIT_BYTES;
        if let Some(name) = self.names.get(key.as_slice()) {
            return name.clone();
        }
        *held += NAME_BYTES + key.len();
        let name = Name::from(key);
        self.names.insert(name.clone());
        name
    }

    fn register(&mut self, bell: &Arc<Bell>, goal: Goal, held: usize) -> Entry {
        let ticket = Ticket(self.next);
        self.next += 1;
        if let Some(key) = goal.watched() {
            self.by_key.entry(key.clone()).or_default().insert(ticket);
        }
        self.waiters.insert(
            ticket,
            Waiter {
                bell: bell.clone(),
                goal,
            },
        );
        Entry::Pending(ticket, held)
    }

    fn unwatch(&mut self, key: &Name, ticket: Ticket) {
        if let Some(tickets) = self.by_key.get_mut(key) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.by_key.remove(key);
            }
        }
    }

    fn take(&mut self, ticket: Ticket) -> Option<Waiter> {
        let waiter = self.waiters.remove(&ticket)?;
        if let Some(key) = waiter.goal.watched() {
            self.unwatch(key, ticket);
        }
        for name in waiter.goal.keys() {
            // Held by the set and by this waiter only.
            if Arc::strong_count(name) == 2 {
                self.names.remove(name);
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
    fn keys(&self) -> &[Name] {
        match self {
            Self::Keys { keys, .. } => keys,
            Self::Count { key, .. } => std::slice::from_ref(key),
        }
    }

    fn watched(&self) -> Option<&Name> {
        match self {
            Self::Keys { keys, at } => keys.get(*at),
            Self::Count { key, .. } => Some(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> (Engine, Arc<Bell>) {
        (Engine::new(1 << 20), Arc::new(Bell::new().unwrap()))
    }

    impl Engine {
        fn is_pending(&self, ticket: Ticket) -> bool {
            self.progress(ticket) == Progress::Pending
        }
    }

    fn keys(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|n| n.as_bytes().to_vec()).collect()
    }

    fn pending(entry: Entry) -> Ticket {
        match entry {
            Entry::Pending(ticket, _) => ticket,
            other => panic!("expected to wait: {other:?}"),
        }
    }

    #[test]
    fn l40_every_write_wakes_a_waiter_compare_set_too() {
        type Write = fn(&Engine);
        let writes: [(&str, Write); 7] = [
            ("set", |e| e.set(b"k", b"v".to_vec()).unwrap()),
            ("add", |e| assert_eq!(e.add(b"k", 1), Ok(1))),
            ("append", |e| e.append(b"k", b"v", 9).unwrap()),
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
        assert_eq!([e.cancel(a), e.cancel(w)], [Progress::Pending, Progress::Pending]);
        assert_ne!(e.cancel(w), Progress::Pending);
        let state = e.lock();
        assert!(state.waiters.is_empty() && state.by_key.is_empty() && state.names.is_empty());
        assert_eq!(state.table.get(b"b").unwrap().as_slice(), b"1");
    }

    #[test]
    fn names_that_many_wait_for_are_held_once_and_every_waiter_says_what_it_costs() {
        let (e, bell) = engine();
        let many: Vec<Vec<u8>> = (0..1000)
            .map(|i| format!("/a/long/name/of/key/{i}").into_bytes())
            .collect();
        let Entry::Pending(first, dear) = e.wait(many.clone(), &bell) else {
            panic!("nothing is there")
        };
        let Entry::Pending(second, cheap) = e.wait(many.clone(), &bell) else {
            panic!("nothing is there")
        };
        let bytes: usize = many.iter().map(Vec::len).sum();
        assert!(dear >= bytes + 1000 * 100 && cheap <= 1000 * 32, "{dear} {cheap}");
        {
            let state = e.lock();
            assert_eq!((state.names.len(), state.by_key.len()), (1000, 1));
        }
        e.cancel(first);
        for key in many.iter().rev() {
            assert!(e.is_pending(second));
            e.set(key, Vec::new()).unwrap();
        }
        assert!(!e.is_pending(second));
        let state = e.lock();
        assert!(state.names.is_empty() && state.by_key.is_empty());
    }

    #[test]
    fn a_wait_is_not_lost_whatever_order_writes_deletions_and_pushes_come_in() {
        let names = ["a", "b", "c", "d"];
        let mut seed = 7u64;
        for _ in 0..2000 {
            let (e, bell) = engine();
            let ticket = pending(e.wait(keys(&names), &bell));
            let mut there = BTreeSet::new();
            while e.is_pending(ticket) {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let name = names[(seed >> 33) as usize % 4];
                match (seed >> 40) % 3 {
                    0 if there.remove(name) => assert!(e.delete(name.as_bytes())),
                    0 => {}
                    _ => {
                        there.insert(name);
                        e.set(name.as_bytes(), Vec::new()).unwrap();
                    }
                }
                assert_eq!(e.is_pending(ticket), there.len() < 4, "{there:?}");
            }
        }
    }

    #[test]
    fn retired_keys_are_gone_refused_and_told_to_those_who_wait_and_no_others_are() {
        let (e, bell) = engine();
        for key in [
            "n/1/a", "n/2/a", "n/2/b", "n/9/a", "n/10/a", "n/x/a", "n/3", "nn/1/a", "m",
        ] {
            e.set(key.as_bytes(), vec![1]).unwrap();
        }
        e.push(b"n/2/q".to_vec(), vec![1]).unwrap();
        let old = pending(e.wait(keys(&["n/9/late"]), &bell));
        let oldest = pending(e.wait(keys(&["m", "n/1/late", "later"]), &bell));
        let at_barrier = pending(e.barrier(b"n/1/barrier".to_vec(), 2, &bell).unwrap());
        let free = pending(e.wait(keys(&["n/x/late"]), &bell));
        assert_eq!(e.retire(b"n/", 9), 5);
        let left: Vec<String> = e
            .list(|_| Ok::<_, ()>(()))
            .unwrap()
            .into_iter()
            .map(|k| String::from_utf8(k).unwrap())
            .collect();
        assert_eq!(left, ["m", "n/10/a", "n/3", "n/9/a", "n/x/a", "nn/1/a"]);
        assert_eq!(e.queue_len(b"n/2/q"), 0);
        assert_eq!(e.progress(oldest), Progress::Retired(b"n/1/late".to_vec(), 1));
        assert_eq!(
            e.progress(at_barrier),
            Progress::Retired(b"n/1/barrier".to_vec(), 1)
        );
        assert!(e.is_pending(old) && e.is_pending(free));
        assert_eq!(e.set(b"n/2/a", vec![]), Err(Refusal::Retired(2)));
        assert_eq!(e.add(b"n/8/a", 1), Err(Refusal::Retired(8)));
        assert_eq!(e.push(b"n/8/a".to_vec(), vec![]), Err(Refusal::Retired(8)));
        assert_eq!(
            e.wait(keys(&["m", "n/2/a"]), &bell),
            Entry::Retired(b"n/2/a".to_vec(), 2)
        );
        e.set(b"n/9/late", vec![]).unwrap();
        assert!(!e.is_pending(old));
        assert!(e.lock().hopeless.is_empty());
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
