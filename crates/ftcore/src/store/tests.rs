//! One behaviour suite for all stores: every test runs over each of them, through two handles on the same data.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::{ErrorKind, deadline_in};

/// A store under test and what keeps it alive.
struct Fixture {
    name: &'static str,
    store: Arc<dyn Store>,
    other: Arc<dyn Store>,
    /// How many calls are blocked now; `None` for a store that polls, where it makes no difference.
    waiting: Option<Box<dyn Fn() -> usize>>,
    _keep: Box<dyn Any>,
}

impl Fixture {
    fn memory() -> Self {
        let store = InMemoryStore::new();
        let seen = store.clone();
        Self {
            name: "memory",
            store: Arc::new(store.clone()),
            other: Arc::new(store),
            waiting: Some(Box::new(move || seen.waiting())),
            _keep: Box::new(()),
        }
    }

    fn file() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        Self {
            name: "file",
            store: Arc::new(FileStore::open(&path).unwrap()),
            other: Arc::new(FileStore::open(&path).unwrap()),
            waiting: None,
            _keep: Box::new(dir),
        }
    }

    fn tcp() -> Self {
        let server = Arc::new(TcpStoreServer::bind("127.0.0.1:0").unwrap());
        let client = || TcpStore::connect(&server.local_addr().to_string(), soon()).unwrap();
        let seen = server.clone();
        Self {
            name: "tcp",
            store: Arc::new(client()),
            other: Arc::new(client()),
            waiting: Some(Box::new(move || seen.waiting())),
            _keep: Box::new(server),
        }
    }

    /// Under the same prefix of another store, which holds a stranger's keys as well.
    fn prefixed(self, name: &'static str) -> Self {
        self.store.set("stranger", b"1", soon()).unwrap();
        self.store.set("job-2/k", b"1", soon()).unwrap();
        let wrap = |inner| -> Arc<dyn Store> { Arc::new(PrefixStore::new(inner, "job")) };
        Self {
            name,
            store: wrap(self.store),
            other: wrap(self.other),
            ..self
        }
    }

    /// Waits until `n` calls are blocked.
    fn blocked(&self, n: usize) {
        let Some(waiting) = &self.waiting else { return };
        let deadline = soon();
        while waiting() < n {
            assert!(
                Instant::now() < deadline,
                "{}: {n} calls should be blocked",
                self.name
            );
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn each(test: impl Fn(&Fixture)) {
    let all = [
        Fixture::memory(),
        Fixture::file(),
        Fixture::tcp(),
        Fixture::memory().prefixed("prefix over memory"),
        Fixture::tcp().prefixed("prefix over tcp"),
    ];
    for fixture in &all {
        test(fixture);
    }
}

fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

fn millis(n: u64) -> Instant {
    deadline_in(Duration::from_millis(n))
}

/// Runs a call that must time out, after `at_least` but not much later.
fn times_out<T: std::fmt::Debug>(
    name: &str,
    at_least: Duration,
    f: impl FnOnce() -> crate::Result<T>,
) -> String {
    let start = Instant::now();
    let e = f().unwrap_err();
    let took = start.elapsed();
    assert_eq!(e.kind(), ErrorKind::Timeout, "{name}: {e}");
    assert!(
        took >= at_least && took < at_least + Duration::from_secs(5),
        "{name}: {took:?}: {e}"
    );
    e.to_string()
}

#[test]
fn what_was_set_is_read_checked_and_deleted_through_either_handle() {
    each(|f| {
        let (s, o, n) = (&f.store, &f.other, f.name);
        assert!(!o.check(&["k"], soon()).unwrap(), "{n}");
        s.set("k", b"v1", soon()).unwrap();
        assert!(o.check(&["k"], soon()).unwrap(), "{n}");
        assert!(!o.check(&["k", "nope"], soon()).unwrap(), "{n}");
        assert_eq!(o.get("k", soon()).unwrap(), b"v1", "{n}");
        s.set("k", b"v2", soon()).unwrap();
        assert_eq!(o.get("k", soon()).unwrap(), b"v2", "{n}");
        assert!(s.delete("k", soon()).unwrap(), "{n}");
        assert!(!o.delete("k", soon()).unwrap(), "{n}");
        assert!(!o.check(&["k"], soon()).unwrap(), "{n}");
    });
}

#[test]
fn an_empty_value_is_a_value_and_a_large_one_arrives_whole() {
    each(|f| {
        f.store.set("empty", b"", soon()).unwrap();
        assert_eq!(f.other.get("empty", soon()).unwrap(), b"", "{}", f.name);
        assert_eq!(
            f.other.multi_get(&["empty", "empty"], soon()).unwrap(),
            [b"", b""],
            "{}",
            f.name
        );
        let large: Vec<u8> = (0..8usize << 20).map(|i| (i * 31 % 251) as u8).collect();
        f.store.set("large", &large, soon()).unwrap();
        assert!(f.other.get("large", soon()).unwrap() == large, "{}", f.name);
    });
}

#[test]
fn add_counts_from_zero_in_decimal_and_refuses_what_is_no_number() {
    each(|f| {
        let (s, n) = (&f.store, f.name);
        assert_eq!(s.add("n", 5, soon()).unwrap(), 5, "{n}");
        assert_eq!(f.other.add("n", -7, soon()).unwrap(), -2, "{n}");
        assert_eq!(s.get("n", soon()).unwrap(), b"-2", "{n}");
        s.set("n", b"12abc", soon()).unwrap();
        assert_eq!(s.add("n", 1, soon()).unwrap(), 13, "{n}");
        for (value, amount) in [("abc", 1), ("", 1), ("9223372036854775807", 1)] {
            s.set("n", value.as_bytes(), soon()).unwrap();
            let e = s.add("n", amount, soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{n}: {e}");
            assert!(e.to_string().contains("n'"), "{n}: {e}");
            assert_eq!(s.get("n", soon()).unwrap(), value.as_bytes(), "{n}: unchanged");
        }
    });
}

#[test]
fn compare_set_sets_on_a_match_or_when_absent_and_expected_empty() {
    each(|f| {
        let (s, n) = (&f.store, f.name);
        assert_eq!(
            s.compare_set("k", b"x", b"v", soon()).unwrap(),
            b"x",
            "{n}: absent, expected something"
        );
        assert!(!s.check(&["k"], soon()).unwrap(), "{n}: nothing is created");
        assert_eq!(
            s.compare_set("k", b"", b"v1", soon()).unwrap(),
            b"v1",
            "{n}: absent, expected empty"
        );
        assert_eq!(
            f.other.compare_set("k", b"x", b"v2", soon()).unwrap(),
            b"v1",
            "{n}: mismatch"
        );
        assert_eq!(
            f.other.compare_set("k", b"v1", b"v2", soon()).unwrap(),
            b"v2",
            "{n}: match"
        );
        assert_eq!(s.get("k", soon()).unwrap(), b"v2", "{n}");
    });
}

#[test]
fn append_multi_set_and_multi_get_work_on_several_values() {
    each(|f| {
        let (s, n) = (&f.store, f.name);
        s.append("k", b"ab", soon()).unwrap();
        f.other.append("k", b"c", soon()).unwrap();
        s.multi_set(&[("a", b"1"), ("b", b""), ("a", b"2")], soon())
            .unwrap();
        assert_eq!(
            f.other.multi_get(&["k", "b", "a"], soon()).unwrap(),
            [&b"abc"[..], b"", b"2"],
            "{n}"
        );
        s.set("big", &vec![7; 8 << 20], soon()).unwrap();
        let e = s.append("big", b"x", soon()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{n}: {e}");
        assert_eq!(s.get("big", soon()).unwrap().len(), 8 << 20, "{n}");
    });
}

#[test]
fn keys_are_counted_and_listed_sorted() {
    each(|f| {
        assert_eq!(f.store.num_keys(soon()).unwrap(), 0, "{}", f.name);
        assert!(f.store.list(soon()).unwrap().is_empty(), "{}", f.name);
        for key in ["b", "é/x", "a b", "c"] {
            f.store.set(key, b"", soon()).unwrap();
        }
        f.store.delete("c", soon()).unwrap();
        assert_eq!(f.other.num_keys(soon()).unwrap(), 3, "{}", f.name);
        assert_eq!(f.other.list(soon()).unwrap(), ["a b", "b", "é/x"], "{}", f.name);
    });
}

#[test]
fn calls_with_no_keys_end_at_once() {
    each(|f| {
        assert!(f.store.check(&[], soon()).unwrap(), "{}", f.name);
        f.store.wait(&[], soon()).unwrap();
        assert!(f.store.multi_get(&[], soon()).unwrap().is_empty(), "{}", f.name);
        f.store.multi_set(&[], soon()).unwrap();
        assert_eq!(f.store.num_keys(soon()).unwrap(), 0, "{}", f.name);
    });
}

#[test]
fn impossible_arguments_are_refused_and_named() {
    each(|f| {
        let s = &f.store;
        let (long, huge) = ("x".repeat(8193), vec![0; (8 << 20) + 1]);
        for e in [
            s.set("", b"", soon()).unwrap_err(),
            s.get("", soon()).unwrap_err(),
            s.check(&["a", ""], soon()).unwrap_err(),
            s.wait(&[&long], soon()).unwrap_err(),
            s.delete(&long, soon()).unwrap_err(),
            s.append("k", &huge, soon()).unwrap_err(),
            s.multi_set(&[("k", &huge)], soon()).unwrap_err(),
            s.compare_set("k", b"", &huge, soon()).unwrap_err(),
            s.wait(&vec!["k"; 131_073], soon()).unwrap_err(),
            s.barrier("b", 0, soon()).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{}: {e}", f.name);
            assert!(e.to_string().len() < 1000, "{}: {e}", f.name);
        }
        assert_eq!(s.num_keys(soon()).unwrap(), 0, "{}", f.name);
    });
}

#[test]
fn l40_every_kind_of_write_wakes_a_waiter() {
    type Write = fn(&dyn Store);
    let writes: [(&str, Write); 5] = [
        ("set", |s| s.set("k", b"v", soon()).unwrap()),
        ("add", |s| assert_eq!(s.add("k", 1, soon()).unwrap(), 1)),
        ("append", |s| s.append("k", b"v", soon()).unwrap()),
        ("multi_set", |s| {
            s.multi_set(&[("j", b""), ("k", b"v")], soon()).unwrap()
        }),
        ("compare_set", |s| {
            drop(s.compare_set("k", b"", b"v", soon()).unwrap())
        }),
    ];
    each(|f| {
        for (name, write) in writes {
            let waiter = f.store.clone();
            let thread = thread::spawn(move || waiter.wait(&["k"], soon()));
            f.blocked(1);
            write(&*f.other);
            thread
                .join()
                .unwrap()
                .unwrap_or_else(|e| panic!("{}: {name} must wake: {e}", f.name));
            f.store.delete("k", soon()).unwrap();
        }
    });
}

#[test]
fn l40_a_wait_for_two_keys_that_never_coexist_does_not_end() {
    each(|f| {
        let waiter = f.store.clone();
        let done = Arc::new(AtomicBool::new(false));
        let done_too = done.clone();
        let thread = thread::spawn(move || {
            let out = waiter.wait(&["p1", "p2"], soon());
            done_too.store(true, Ordering::SeqCst);
            out
        });
        f.blocked(1);
        // A store that counted keys down would be satisfied by the first round.
        for _ in 0..20 {
            for key in ["p1", "p2"] {
                f.other.set(key, b"", soon()).unwrap();
                f.other.delete(key, soon()).unwrap();
            }
        }
        f.blocked(1);
        assert!(!done.load(Ordering::SeqCst), "{}", f.name);
        f.other.multi_set(&[("p1", b""), ("p2", b"")], soon()).unwrap();
        thread.join().unwrap().unwrap();
    });
}

#[test]
fn get_and_multi_get_wait_for_their_keys() {
    each(|f| {
        let (a, b) = (f.store.clone(), f.store.clone());
        let one = thread::spawn(move || a.get("x", soon()));
        let two = thread::spawn(move || b.multi_get(&["x", "y"], soon()));
        f.blocked(2);
        f.other.set("x", b"1", soon()).unwrap();
        assert_eq!(one.join().unwrap().unwrap(), b"1", "{}", f.name);
        f.blocked(1);
        f.other.set("y", b"2", soon()).unwrap();
        assert_eq!(two.join().unwrap().unwrap(), [b"1", b"2"], "{}", f.name);
    });
}

#[test]
fn a_wait_ends_at_its_deadline_and_names_its_keys_as_the_caller_wrote_them() {
    let short = Duration::from_millis(200);
    each(|f| {
        let (s, n) = (&f.store, f.name);
        s.set("there", b"", soon()).unwrap();
        let text = times_out(n, short, || s.wait(&["there", "nope"], millis(200)));
        assert!(
            text.contains("store.wait") && text.contains("there'"),
            "{n}: {text}"
        );
        assert!(
            text.contains("missing 1 of 2") && text.contains("nope'"),
            "{n}: {text}"
        );
        assert!(!text.contains("'/"), "{n}: {text}");
        let text = times_out(n, short, || s.get("nope", millis(200)));
        assert!(
            text.contains("store.get") && text.contains("nope'"),
            "{n}: {text}"
        );
        let text = times_out(n, short, || s.multi_get(&["nope", "there"], millis(200)));
        assert!(text.contains("missing 1 of 2"), "{n}: {text}");
        let text = times_out(n, short, || s.barrier("b", 3, millis(200)));
        assert!(text.contains("b' for 3 callers; 1 of 3 arrived"), "{n}: {text}");
        // The store is as useful as before.
        s.wait(&["there"], soon()).unwrap();
        // A server is asked for some of many keys only, and the text says so.
        let many: Vec<String> = (0..100).map(|i| format!("many {i}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let text = times_out(n, short, || s.wait(&many, millis(200)));
        let known = ["missing 100 of 100: ", "missing 64 of the first 64: "];
        assert!(known.iter().any(|known| text.contains(known)), "{n}: {text}");
    });
}

#[test]
fn l41_a_wait_takes_its_time_out_and_not_a_whole_second_more() {
    each(|f| {
        for ms in [50, 200, 1000] {
            let takes_little_more = || {
                let (start, time) = (Instant::now(), Duration::from_millis(ms));
                times_out(f.name, time, || f.store.wait(&["nope"], millis(ms)));
                start.elapsed() < time + Duration::from_millis(500)
            };
            // One try may have to wait for a core, but not all of them.
            assert!((0..5).any(|_| takes_little_more()), "{}: {ms} ms", f.name);
        }
    });
}

#[test]
fn a_wait_whose_keys_exist_ends_well_even_at_its_deadline() {
    each(|f| {
        f.store.set("k", b"v", soon()).unwrap();
        // One try may lose the race against the deadline, but not all of them.
        assert!(
            (0..50).any(|_| f.store.wait(&["k"], millis(5)).is_ok()),
            "{}",
            f.name
        );
    });
}

#[test]
fn sixteen_threads_add_without_losing_one() {
    each(|f| {
        let seen: Vec<i64> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|i| {
                    let store = if i % 2 == 0 { &f.store } else { &f.other };
                    scope.spawn(move || {
                        (0..25)
                            .map(|_| store.add("n", 1, soon()).unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(
            seen.iter().collect::<BTreeSet<_>>().len(),
            400,
            "{}: each sum is returned once",
            f.name
        );
        assert_eq!(f.store.get("n", soon()).unwrap(), b"400", "{}", f.name);
    });
}

#[test]
fn a_barrier_lets_no_caller_through_before_the_last() {
    each(|f| {
        let is_last_there = AtomicBool::new(false);
        thread::scope(|scope| {
            let callers: Vec<_> = [&f.store, &f.other, &f.store]
                .into_iter()
                .map(|store| {
                    let is_last_there = &is_last_there;
                    scope.spawn(move || {
                        store.barrier("go", 4, soon()).unwrap();
                        is_last_there.load(Ordering::SeqCst)
                    })
                })
                .collect();
            // Counted, and where that can be seen blocked.
            let deadline = soon();
            while f.other.get("go", soon()).unwrap() != b"3" {
                assert!(
                    Instant::now() < deadline,
                    "{}: three callers should have come",
                    f.name
                );
                thread::sleep(Duration::from_millis(1));
            }
            f.blocked(3);
            is_last_there.store(true, Ordering::SeqCst);
            f.store.barrier("go", 4, soon()).unwrap();
            for caller in callers {
                assert!(caller.join().unwrap(), "{}: one was let through", f.name);
            }
        });
    });
}

#[test]
fn a_blocked_wait_does_not_delay_other_calls_of_the_same_handle() {
    each(|f| {
        thread::scope(|scope| {
            let store = &f.store;
            let waits: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| store.wait(&["late"], soon())))
                .collect();
            f.blocked(4);
            let start = Instant::now();
            for i in 0..20 {
                f.store.set("k", b"v", soon()).unwrap();
                assert_eq!(f.store.add("n", 1, soon()).unwrap(), i + 1, "{}", f.name);
            }
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{}: {:?}",
                f.name,
                start.elapsed()
            );
            f.store.set("late", b"", soon()).unwrap();
            for t in waits {
                t.join().unwrap().unwrap();
            }
        });
    });
}

#[test]
fn a_prefix_is_joined_with_a_slash_and_hides_the_other_keys() {
    let inner = Arc::new(InMemoryStore::new());
    let plain = PrefixStore::new(inner.clone(), "pfx");
    let slash = PrefixStore::new(inner.clone(), "pfx/");
    plain.set("kk", b"1", soon()).unwrap();
    slash.set("kk", b"2", soon()).unwrap();
    inner.set("pfx", b"", soon()).unwrap();
    assert_eq!(inner.list(soon()).unwrap(), ["pfx", "pfx//kk", "pfx/kk"]);
    assert_eq!(plain.list(soon()).unwrap(), ["/kk", "kk"]);
    assert_eq!(slash.list(soon()).unwrap(), ["kk"]);
    assert_eq!(
        (plain.num_keys(soon()).unwrap(), slash.num_keys(soon()).unwrap()),
        (2, 1)
    );
    let nested = PrefixStore::new(Arc::new(plain), "in");
    nested.barrier("b", 1, soon()).unwrap();
    assert_eq!(inner.get("pfx/in/b", soon()).unwrap(), b"1");
}
