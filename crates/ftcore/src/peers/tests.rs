//! Ranks that meet over real sockets; what an engine would hear is kept in a list.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};

use super::record::Published;
use super::*;
use crate::{Cancel, Configuration, Epoch, InMemoryStore, Store, deadline_in};

const SOON: Duration = Duration::from_secs(20);

fn terms(setup: &str, one_per_process: bool) -> Terms {
    Terms {
        backend: "x",
        setup: setup.to_string(),
        one_per_process,
        credentials: None,
        door: Door::default(),
    }
}

/// `body` as each rank of a world.
fn world<T: Send>(world: u32, body: impl Fn(Configuration) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let configuration = |rank| Configuration {
        store: store.clone(),
        prefix: "p".into(),
        name: "n".into(),
        epoch: Epoch(3),
        rank,
        world_size: world,
        deadline: deadline_in(SOON),
        cancel: Default::default(),
    };
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let configuration = configuration(rank);
                scope.spawn(move || body(configuration))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank that is connected, and what it has heard.
struct Rank {
    peers: Arc<Peers>,
    heard: Arc<Mutex<Vec<Notice>>>,
    moved: Arc<Condvar>,
}

impl Rank {
    fn connect(c: &Configuration) -> Self {
        let peers = Peers::start(meet(c, &terms("same", false), None).unwrap()).unwrap();
        let (heard, moved) = (Arc::<Mutex<Vec<Notice>>>::default(), Arc::<Condvar>::default());
        let (list, bell) = (heard.clone(), moved.clone());
        let listener = move |notice| {
            lock(&list).push(notice);
            bell.notify_all();
        };
        peers.tell(Arc::new(listener)).unwrap();
        Self { peers, heard, moved }
    }

    /// The first failure that it hears of.
    fn failure(&self) -> Error {
        let heard = lock(&self.heard);
        let nothing = |heard: &mut Vec<Notice>| !heard.iter().any(|n| matches!(n, Notice::Failed(_)));
        let (heard, late) = self.moved.wait_timeout_while(heard, SOON, nothing).unwrap();
        assert!(!late.timed_out(), "nothing was heard");
        let failures = heard.iter().filter_map(|notice| match notice {
            Notice::Failed(error) => Some(error.clone()),
            Notice::Released(_) => None,
        });
        failures.into_iter().next().unwrap()
    }
}

#[test]
fn what_rank_0_gives_out_comes_to_all_in_an_order_of_processes() {
    let met = world(3, |c| {
        let gift = (c.rank == 0).then(|| vec![7; 128]);
        let meeting = meet(&c, &terms("same", false), gift).unwrap();
        (meeting.gift.clone(), meeting.before)
    });
    assert!(met.iter().all(|(gift, _)| *gift == Some(vec![7; 128])));
    // All are in this process: by rank.
    assert_eq!(
        met.iter().map(|(_, before)| *before).collect::<Vec<_>>(),
        [None, Some(0), Some(1)]
    );
}

#[test]
fn ranks_that_are_set_up_in_other_ways_all_hear_both_ways() {
    for e in world(3, |c| {
        // One of them comes when the others have their answer.
        if c.rank == 1 {
            c.store.wait(&["refused"], deadline_in(SOON)).unwrap();
        }
        let setup = ["ours 1.0", "ours 1.0", "ours 2.0"][c.rank as usize];
        let e = meet(&c, &terms(setup, false), None).unwrap_err();
        c.store.set("refused", b"1", deadline_in(SOON)).unwrap();
        e
    }) {
        assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
        for part in ["rank 2", "ours 2.0", "ours 1.0"] {
            assert!(e.to_string().contains(part), "{e}");
        }
    }
}

#[test]
fn ranks_of_one_process_are_refused_where_the_library_takes_one() {
    for e in world(2, |c| meet(&c, &terms("same", true), None).unwrap_err()) {
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.to_string().contains("ranks 0 and 1 are in one process"), "{e}");
    }
}

#[test]
fn a_second_process_with_a_taken_rank_is_told_so() {
    // The last one comes when one of the two has its answer.
    let answers = world(4, |mut c| {
        if c.rank == 3 {
            c.store.wait(&["told"], deadline_in(SOON)).unwrap();
        }
        c.world_size = 3;
        c.rank = [0, 1, 1, 2][c.rank as usize];
        let met = meet(&c, &terms("same", false), None);
        if met.is_err() {
            c.store.set("told", b"1", deadline_in(SOON)).unwrap();
        }
        met.err()
    });
    let told: Vec<Error> = answers.into_iter().flatten().collect();
    let [e] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!(
        (e.kind(), e.context().peer),
        (ErrorKind::InvalidArgument, Some(1)),
        "{e}"
    );
    assert!(e.to_string().contains("rank 1 is here already"), "{e}");
}

#[test]
fn connecting_to_rank_0_ends_with_the_reason_of_the_token() {
    // No room for another connection: the kernel goes on trying.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let full = listener.local_addr().unwrap();
    let _filler = TcpStream::connect(full).unwrap();
    let published = Published {
        token: [7; wire::TOKEN],
        port: full.port(),
        host: crate::host_address::identity(),
        address: full.ip(),
        gift: None,
    };
    world(1, |mut c| {
        (c.rank, c.world_size) = (1, 2);
        c.store
            .set("p/3/x", published.encode().as_bytes(), deadline_in(SOON))
            .unwrap();
        // Not before it was looked at while the connection is being made.
        let looks = AtomicU32::new(0);
        c.cancel = Cancel::watching(move || {
            let looked = looks.fetch_add(1, Ordering::Relaxed);
            (looked > 2).then(|| Error::new(ErrorKind::Aborted, "enough"))
        });
        let began = Instant::now();
        let e = meet(&c, &terms("same", false), None).unwrap_err();
        assert_eq!((e.kind(), e.message()), (ErrorKind::Aborted, "enough"), "{e}");
        assert!(began.elapsed() < SOON / 2, "{:?}", began.elapsed());
    });
}

#[test]
fn the_first_failure_is_heard_by_all_and_blamed_on_its_rank() {
    let heard = world(3, |c| {
        let rank = Rank::connect(&c);
        c.store.barrier("connected", 3, deadline_in(SOON)).unwrap();
        let heard = match c.rank {
            2 => {
                rank.peers.report(&Error::timeout("no peer came"));
                rank.peers.report(&Error::new(ErrorKind::Backend, "later"));
                None
            }
            _ => Some(rank.failure()),
        };
        c.store.barrier("heard", 3, deadline_in(SOON)).unwrap();
        rank.peers.close();
        heard
    });
    for e in heard.into_iter().flatten() {
        assert_eq!((e.kind(), e.context().peer), (ErrorKind::Timeout, Some(2)), "{e}");
        assert!(
            e.message().starts_with("rank 2 reports: ") && e.message().ends_with("no peer came"),
            "{e}"
        );
    }
}

#[test]
fn a_connection_that_ends_is_a_death_unless_its_rank_has_left() {
    for leaves in [false, true] {
        world(3, |c| {
            let rank = Rank::connect(&c);
            c.store.barrier("connected", 3, deadline_in(SOON)).unwrap();
            if c.rank == 1 {
                if leaves {
                    rank.peers.leave();
                }
                return rank.peers.close();
            }
            if leaves {
                // Only what is said after it ends the others' wait, and it is of another rank.
                if c.rank == 0 {
                    while rank.peers.left() != [1] {
                        std::thread::yield_now();
                    }
                    rank.peers
                        .report(&Error::new(ErrorKind::Aborted, "aborted by rank 0: enough"));
                } else {
                    let e = rank.failure();
                    assert_eq!(e.message(), "aborted by rank 0: enough");
                    assert_eq!((e.kind(), e.context().peer), (ErrorKind::Aborted, Some(0)));
                }
            } else {
                let e = rank.failure();
                assert_eq!(
                    (e.kind(), e.context().peer),
                    (ErrorKind::PeerLost, Some(1)),
                    "{e}"
                );
            }
            c.store.barrier("heard", 2, deadline_in(SOON)).unwrap();
        });
    }
}

#[test]
fn a_barrier_opens_once_all_have_entered_and_rank_0_knows_who_has_not() {
    world(3, |c| {
        let rank = Rank::connect(&c);
        rank.peers.barrier(1, deadline_in(SOON)).unwrap();
        if c.rank == 2 {
            c.store.wait(&["rank 0 knows"], deadline_in(SOON)).unwrap();
        }
        if c.rank == 0 {
            while rank.peers.awaited(2) != "the barrier, which ranks 0, 2 have not entered" {
                std::thread::yield_now();
            }
            c.store.set("rank 0 knows", b"1", deadline_in(SOON)).unwrap();
        }
        rank.peers.barrier(2, deadline_in(SOON)).unwrap();
        // The number may come again.
        rank.peers.barrier(1, deadline_in(SOON)).unwrap();
    });
}

#[test]
fn a_barrier_that_one_enters_and_goes_on_is_told_when_it_opens() {
    world(2, |c| {
        let rank = Rank::connect(&c);
        let opened = rank.peers.enter(9);
        assert!(!opened || c.rank == 0);
        let heard = lock(&rank.heard);
        let nothing = |heard: &mut Vec<Notice>| !opened && heard.is_empty();
        let (heard, late) = rank.moved.wait_timeout_while(heard, SOON, nothing).unwrap();
        assert!(!late.timed_out(), "nothing was heard");
        assert!(opened || matches!(heard.as_slice(), [Notice::Released(9)]));
        drop(heard);
        c.store.barrier("heard", 2, deadline_in(SOON)).unwrap();
    });
}

#[test]
fn no_rank_waits_for_a_barrier_that_cannot_open() {
    world(3, |c| {
        let rank = Rank::connect(&c);
        c.store.barrier("connected", 3, deadline_in(SOON)).unwrap();
        if c.rank == 1 {
            return rank.peers.close();
        }
        let e = rank.peers.barrier(1, deadline_in(2 * SOON)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
        // The engine knew why before.
        let heard = rank.failure();
        assert_eq!(heard.context().peer, Some(1), "{heard}");
        c.store.barrier("in vain", 2, deadline_in(SOON)).unwrap();
    });
    world(2, |c| {
        let rank = Rank::connect(&c);
        if c.rank == 0 {
            let e = rank
                .peers
                .barrier(1, deadline_in(Duration::from_millis(20)))
                .unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
            assert!(e.to_string().contains("rank 1 has not entered"), "{e}");
        }
        c.store.barrier("late", 2, deadline_in(SOON)).unwrap();
    });
}
