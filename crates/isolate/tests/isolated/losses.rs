//! A library reports that rank 0 is lost, and its rank has heard nothing of why: the thread that waits for notice has not had its turn, and rank 0
//! is on another host, so that no rank sees its child. What the store has of it counts, and a store that does not say holds no rank up.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{
    Checked, Collective, DType, Error, ErrorKind, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp,
    Result, Store, SubmitOptions, Tensor,
};
use oxccl_isolate::IsolatedGroup;

use crate::rig::*;

pub(crate) const TESTS: &[(&str, fn())] = &[
    (
        "losses::l32_a_loss_that_a_library_reports_counts_as_what_the_lost_rank_said_before",
        explained,
    ),
    (
        "losses::a_loss_of_which_nobody_knows_more_stays_one_whatever_becomes_of_the_store",
        unexplained,
    ),
    (
        "losses::what_a_child_reported_before_its_own_end_is_not_lost_while_the_store_is_asked",
        ended_meanwhile,
    ),
    (
        "losses::a_rank_says_why_it_ends_before_its_child_does_however_long_that_takes",
        said_first,
    ),
];

/// What the store says to the one who asks for notice.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Notice {
    Answered,
    Refused,
    /// Not before the asker has given up.
    Late,
}

/// A rank's way to the store, and what happens when it says why it ends, just before that is there.
struct Remote(Arc<InMemoryStore>, Notice, Box<dyn Fn() + Send + Sync>);

fn is_notice(key: &str) -> bool {
    key.ends_with("/failure")
}

impl Remote {
    fn ask(&self, key: &str, op: &'static str, deadline: Instant) -> Result<()> {
        match self.1 {
            Notice::Refused if is_notice(key) => {
                let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
                Err(Error::new(ErrorKind::Unavailable, "no server is there").with_source(refused))
            }
            Notice::Late if is_notice(key) => {
                self.0.set("heard", b"", deadline)?;
                std::thread::sleep(ftcore::time_left(deadline));
                Err(Error::timeout("the server did not answer").with_op(op))
            }
            _ => Ok(()),
        }
    }
}

impl Store for Remote {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.0.set(key, value, deadline)
    }
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.ask(key, "store.get", deadline)?;
        self.0.get(key, deadline)
    }
    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.0.add(key, amount, deadline)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        if is_notice(key) {
            (self.2)();
        }
        self.0.compare_set(key, expected, desired, deadline)
    }
    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        keys.iter()
            .try_for_each(|key| self.ask(key, "store.check", deadline))?;
        self.0.check(keys, deadline)
    }
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        // Never heard in time.
        let keys: Vec<&str> = keys
            .iter()
            .map(|&key| if is_notice(key) { "never" } else { key })
            .collect();
        self.0.wait(&keys, deadline)
    }
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        self.0.delete(key, deadline)
    }
    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.0.append(key, value, deadline)
    }
    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let cards = self.0.multi_get(keys, deadline)?;
        Ok(cards.iter().map(|_| b"another host".to_vec()).collect())
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        self.0.multi_set(pairs, deadline)
    }
    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        self.0.num_keys(deadline)
    }
    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        self.0.list(deadline)
    }
    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        self.0.barrier(key, world_size, deadline)
    }
}

/// How rank 1 hears of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// By an operation whose caller takes the report itself.
    Blocking,
    Pending,
    /// By a split group's operation.
    Part,
    /// By no operation.
    Idle,
}

const WAYS: [Way; 4] = [Way::Blocking, Way::Pending, Way::Part, Way::Idle];

/// Rank 0 does `act`, then rank 1's library (of these orders) sees it as lost: what rank 1 hears of it, and its group's failure.
fn heard(
    orders: &str,
    way: Way,
    notice: Notice,
    act: impl FnOnce(&IsolatedGroup, &InMemoryStore),
) -> (Error, Error) {
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let group = IsolatedGroup::new(odd(orders)).unwrap();
            let mut configuration = configuration(&store, 1, 1, 2);
            configuration.store = Arc::new(Remote(store.clone(), notice, Box::new(|| {})));
            group.configure(configuration).unwrap();
            let tensor = || Tensor::zeros(DType::U8, 1);
            let begin = |group: &dyn ProcessGroup| group.all_reduce(tensor(), ReduceOp::Sum).unwrap();
            let begun = || store.set("begun", b"", soon()).unwrap();
            let (own, failure) = match way {
                Way::Blocking => {
                    begun();
                    let tensors = vec![tensor()];
                    let op = Collective::AllReduce {
                        tensors,
                        op: ReduceOp::Sum,
                    };
                    let options = SubmitOptions::default();
                    let op = Checked::new(op, &group.info(), group.capabilities(), &options).unwrap();
                    let failed = group.execute(op, options).unwrap_err();
                    (failed.error, group.error())
                }
                Way::Pending => {
                    let work = begin(&group);
                    begun();
                    (work.wait(soon()).unwrap_err(), group.error())
                }
                Way::Part => {
                    let part = group.split(Some(0), 1, soon()).unwrap().unwrap();
                    let work = begin(&*part);
                    begun();
                    (work.wait(soon()).unwrap_err(), part.error())
                }
                Way::Idle => {
                    begun();
                    eventually("the group's failure", || group.error().is_some());
                    (group.error().unwrap(), group.error())
                }
            };
            (own, failure.unwrap())
        });
        let group = IsolatedGroup::new(odd("hang")).unwrap();
        group.configure(configuration(&store, 1, 0, 2)).unwrap();
        store.wait(&["begun"], soon()).unwrap();
        act(&group, &store);
        store.set("lose", b"", soon()).unwrap();
        other.join().unwrap()
    })
}

fn orders_of(way: Way) -> &'static str {
    match way {
        Way::Idle => "lose idle",
        _ => "lose",
    }
}

fn explained() {
    for way in WAYS {
        let (own, failure) = heard(orders_of(way), way, Notice::Answered, |group, store| {
            group.abort("it ends");
            eventually("rank 0's word", || {
                store.list(soon()).unwrap().iter().any(|key| is_notice(key))
            });
        });
        for error in [own, failure] {
            assert_eq!(error.kind(), ErrorKind::Aborted, "{way:?}: {error}");
            assert!(error.to_string().contains("it ends"), "{way:?}: {error}");
        }
    }
}

fn unexplained() {
    for way in WAYS {
        for notice in [Notice::Answered, Notice::Refused, Notice::Late] {
            let begun = Instant::now();
            let (own, failure) = heard(orders_of(way), way, notice, |_, _| {});
            for error in [own, failure] {
                assert_eq!(
                    (error.kind(), error.context().peer),
                    (ErrorKind::PeerLost, Some(0)),
                    "{way:?}, {notice:?}: {error}"
                );
                assert!(
                    error.to_string().contains("closed the connection"),
                    "{way:?}, {notice:?}: {error}"
                );
            }
            // Two children start in it, and the operation's own deadline is a minute away or more.
            assert!(begun.elapsed() < Duration::from_secs(20), "{way:?}, {notice:?}");
        }
    }
}

fn ended_meanwhile() {
    let (own, _) = heard("lose and exit", Way::Pending, Notice::Late, |_, _| {});
    assert_eq!(own.kind(), ErrorKind::PeerLost, "{own}");
}

/// What the other ranks' libraries see of the end of a child is then never earlier than what its rank has said.
fn said_first() {
    for next in ["abort", "drop"] {
        let store = Arc::new(InMemoryStore::new());
        let (child, seen) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(None)));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let group = IsolatedGroup::new(odd("hang")).unwrap();
                group.configure(configuration(&store, 1, 1, 2)).unwrap();
                let work = group
                    .all_reduce(Tensor::zeros(DType::U8, 1), ReduceOp::Sum)
                    .unwrap();
                work.wait(soon()).unwrap_err()
            });
            let look = {
                let (child, seen) = (child.clone(), seen.clone());
                move || {
                    // Longer than what pending work waits for its failure.
                    std::thread::sleep(Duration::from_millis(200));
                    let state = state_of(child.load(Ordering::SeqCst)).filter(|&state| state != 'Z');
                    seen.lock().unwrap().get_or_insert(state);
                }
            };
            let group = IsolatedGroup::new(odd("hang")).unwrap();
            let mut configuration = configuration(&store, 1, 0, 2);
            configuration.store = Arc::new(Remote(store.clone(), Notice::Answered, Box::new(look)));
            group.configure(configuration).unwrap();
            child.store(group.child_pid().unwrap(), Ordering::SeqCst);
            let work = group
                .all_reduce(Tensor::zeros(DType::U8, 1), ReduceOp::Sum)
                .unwrap();
            match next {
                "abort" => group.abort("it ends"),
                _ => drop(group),
            }
            assert!(work.wait(soon()).is_err());
            let heard = other.join().unwrap();
            assert_eq!(heard.kind(), ErrorKind::Aborted, "{next}: {heard}");
        });
        let seen = seen.lock().unwrap().take();
        assert!(matches!(seen, Some(Some(_))), "{next}: {seen:?}");
    }
}
