//! The proxied store behaves as the store behind it; answers find their callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Cancel, Error, ErrorKind, InMemoryStore, Store, deadline_in, time_left};

use super::proxy::{Line, ProxyStore};
use super::serve::Stores;
use super::*;
use crate::channel::pair;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

/// A store over a link so long that no call with less than a second left hears an answer. As a TCP store it looks at a token while it waits.
pub(crate) struct Far {
    inner: Arc<dyn Store>,
    /// So many calls of `check` find no server.
    refuses: Arc<AtomicU32>,
}

impl Far {
    pub(crate) fn new(inner: Arc<InMemoryStore>, refuses: u32) -> Self {
        Self {
            inner,
            refuses: Arc::new(refuses.into()),
        }
    }

    fn reach(&self, deadline: Instant) -> Result<&dyn Store> {
        if time_left(deadline) < Duration::from_secs(1) {
            return Err(Error::timeout("the answer is still on its way"));
        }
        Ok(&*self.inner)
    }
}

impl Store for Far {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.reach(deadline)?.set(key, value, deadline)
    }
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.reach(deadline)?.get(key, deadline)
    }
    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.reach(deadline)?.add(key, amount, deadline)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.reach(deadline)?
            .compare_set(key, expected, desired, deadline)
    }
    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        let one_less = |left: u32| left.checked_sub(1);
        let refused = self
            .refuses
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
        if refused.is_ok() {
            return Err(Error::new(ErrorKind::Unavailable, "no server is there"));
        }
        self.reach(deadline)?.check(keys, deadline)
    }
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        self.reach(deadline)?.wait(keys, deadline)
    }
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        self.reach(deadline)?.delete(key, deadline)
    }
    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.reach(deadline)?.append(key, value, deadline)
    }
    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.reach(deadline)?.multi_get(keys, deadline)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        self.reach(deadline)?.multi_set(pairs, deadline)
    }
    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        self.reach(deadline)?.num_keys(deadline)
    }
    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        self.reach(deadline)?.list(deadline)
    }
    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        self.reach(deadline)?.barrier(key, world_size, deadline)
    }
    fn cancelled_by(&self, cancel: &Cancel) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self {
            inner: cancel.over(&self.inner),
            refuses: self.refuses.clone(),
        }))
    }
}

/// A store and the same one through a socket.
fn proxied() -> (Arc<InMemoryStore>, Arc<ProxyStore>, Arc<Stores>) {
    let (parents, childs) = pair().unwrap();
    let stores = Stores::serve(parents, "test").unwrap();
    let real = Arc::new(InMemoryStore::new());
    let number = stores.offer(real.clone());
    let line = Line::open(childs).unwrap();
    (real, Arc::new(ProxyStore::new(line, number)), stores)
}

#[test]
fn every_call_gives_what_the_store_itself_gives() {
    let (real, far, _stores) = proxied();
    far.set("a", &[1, 2], soon()).unwrap();
    assert_eq!(real.get("a", soon()).unwrap(), [1, 2]);
    assert_eq!(far.get("a", soon()).unwrap(), [1, 2]);
    assert_eq!(far.add("n", 5, soon()).unwrap(), 5);
    assert_eq!(far.add("n", -7, soon()).unwrap(), -2);
    assert_eq!(far.compare_set("c", &[], &[9], soon()).unwrap(), [9]);
    assert_eq!(far.compare_set("c", &[1], &[2], soon()).unwrap(), [9]);
    assert!(far.check(&["a", "n"], soon()).unwrap());
    assert!(!far.check(&["a", "z"], soon()).unwrap());
    far.wait(&["a", "c"], soon()).unwrap();
    far.append("a", &[3], soon()).unwrap();
    assert_eq!(
        far.multi_get(&["a", "c"], soon()).unwrap(),
        [vec![1, 2, 3], vec![9]]
    );
    far.multi_set(&[("x", &[1][..]), ("y", &[])], soon()).unwrap();
    assert_eq!(far.num_keys(soon()).unwrap(), real.num_keys(soon()).unwrap());
    assert_eq!(far.list(soon()).unwrap(), real.list(soon()).unwrap());
    assert!(far.delete("x", soon()).unwrap());
    assert!(!far.delete("x", soon()).unwrap());
    far.barrier("b", 1, soon()).unwrap();
    let big = vec![7u8; 8 << 20];
    far.set("big", &big, soon()).unwrap();
    assert!(far.get("big", soon()).unwrap() == big);
    let e = far.set("", &[], soon()).unwrap_err();
    assert_eq!(e.kind(), real.set("", &[], soon()).unwrap_err().kind());
    let began = Instant::now();
    let e = far
        .get("never", deadline_in(Duration::from_millis(350)))
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    assert!(e.to_string().contains("never"), "{e}");
    assert!(began.elapsed() >= Duration::from_millis(350));
}

/// L39: torchft's child-process groups swap replies when two threads wait.
#[test]
fn l39_answers_find_their_callers_and_a_blocked_call_delays_no_other() {
    let (real, far, _stores) = proxied();
    std::thread::scope(|scope| {
        for i in 0..16u8 {
            let far = &far;
            scope.spawn(move || {
                let key = format!("key{i}");
                assert_eq!(far.get(&key, soon()).unwrap(), [i]);
                for j in 0..50u8 {
                    far.set(&key, &[i, j], soon()).unwrap();
                    assert_eq!(far.get(&key, soon()).unwrap(), [i, j]);
                }
            });
        }
        // In the opposite order of the calls; each is blocked until now.
        far.set("free", b"yes", soon()).unwrap();
        for i in (0..16u8).rev() {
            real.set(&format!("key{i}"), &[i], soon()).unwrap();
        }
    });
}

#[test]
fn a_store_that_is_released_or_whose_parent_is_gone_is_an_error_at_once() {
    let (_real, far, stores) = proxied();
    let none = ProxyStore::new(Line::open(pair().unwrap().0).unwrap(), 0);
    assert_eq!(none.get("a", soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    far.set("a", &[], soon()).unwrap();
    let waiting = {
        let far = far.clone();
        std::thread::spawn(move || far.get("never", soon()).unwrap_err())
    };
    let until = soon();
    while stores.waiting() == 0 && Instant::now() < until {
        std::thread::yield_now();
    }
    stores.hang_up();
    assert_eq!(waiting.join().unwrap().kind(), ErrorKind::Unavailable);
    assert_eq!(far.get("a", soon()).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn waits_reach_a_store_over_a_long_link() {
    let (parents, childs) = pair().unwrap();
    let stores = Stores::serve(parents, "test").unwrap();
    let number = stores.offer(Arc::new(Far::new(Arc::default(), 0)));
    let near: Arc<dyn Store> = Arc::new(ProxyStore::new(Line::open(childs).unwrap(), number));
    // As a configuration has it, which may be cancelled.
    let view = Cancel::default().over(&near);
    for store in [near, view] {
        store.set("a", &[1], soon()).unwrap();
        store.wait(&["a"], soon()).unwrap();
        assert_eq!(store.get("a", soon()).unwrap(), [1]);
        assert_eq!(store.multi_get(&["a"], soon()).unwrap(), [[1]]);
    }
}

#[test]
fn a_wait_ends_when_it_is_cancelled_and_at_the_parent_when_no_view_is_left_to_hear_of_it() {
    let (_real, far, stores) = proxied();
    let cancel = Cancel::default();
    let view = cancel.over(&(far.clone() as Arc<dyn Store>));
    let waiting = std::thread::spawn(move || view.get("never", deadline_in(Duration::from_secs(3600))));
    let until = soon();
    while stores.waiting() == 0 && Instant::now() < until {
        std::thread::yield_now();
    }
    cancel.cancel(Error::new(ErrorKind::Aborted, "enough"));
    let error = waiting.join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Aborted, "enough"));
    // Another view goes on.
    far.set("a", &[], soon()).unwrap();
    assert_eq!(stores.waiting(), 1);
    drop(far);
    while stores.waiting() > 0 {
        assert!(Instant::now() < until, "the parent goes on waiting");
        std::thread::yield_now();
    }
}

#[test]
fn requests_and_answers_cross_and_damaged_ones_are_refused() {
    for (number, &call) in (0..).zip(&CALLS) {
        let request = Request {
            number,
            store: 3,
            deadline: soon(),
            call,
            keys: vec!["key".into(), "ü".into()],
            values: vec![vec![], vec![1]],
            amount: i64::MIN,
        };
        let frame = encode(&request).unwrap();
        let back: Request = decode(&frame[4..]).unwrap();
        let deadline = request.deadline;
        assert_eq!(Request { deadline, ..back }, request);
        for n in 4..frame.len() {
            assert!(decode::<Request>(&frame[4..n]).is_err());
        }
    }
    let given = Answer {
        values: vec![vec![], vec![1]],
        number: -1,
    };
    let frame = encode(&(9u64, Ok::<_, ftcore::Error>(given.clone()))).unwrap();
    let (number, back): (u64, Result<Answer>) = decode(&frame[4..]).unwrap();
    assert_eq!((number, back.unwrap()), (9, given));
    for n in 4..frame.len() {
        assert!(decode::<(u64, Result<Answer>)>(&frame[4..n]).is_err());
    }
    // Calls that lack what they need are the store's to refuse, or odd.
    let store = InMemoryStore::new();
    for call in CALLS {
        let empty = Request {
            number: 0,
            store: 0,
            deadline: deadline_in(Duration::ZERO),
            call,
            keys: Vec::new(),
            values: Vec::new(),
            amount: -1,
        };
        drop(perform(&store, &empty, empty.deadline));
    }
}
