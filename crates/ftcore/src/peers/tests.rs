//! Ranks that meet over real sockets; what an engine would hear is kept in a list.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::record::Published;
use super::wire::{Hello, Setup};
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
        let peers = Peers::start(meet(c, &terms("same", false)).unwrap()).unwrap();
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
        let meeting = meet(&c, &terms("same", false)).unwrap();
        let id = meeting.id(&c, || Ok(vec![c.rank as u8 + 7; 128])).unwrap();
        (id, meeting.before)
    });
    assert!(met.iter().all(|(id, _)| *id == [7; 128]));
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
        let e = meet(&c, &terms(setup, false)).unwrap_err();
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
    for e in world(2, |c| meet(&c, &terms("same", true)).unwrap_err()) {
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
        let met = meet(&c, &terms("same", false));
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
        let e = meet(&c, &terms("same", false)).unwrap_err();
        assert_eq!((e.kind(), e.message()), (ErrorKind::Aborted, "enough"), "{e}");
        assert!(began.elapsed() < SOON / 2, "{:?}", began.elapsed());
    });
}

/// Rank 0's record.
fn published(c: &Configuration) -> Published {
    let record = c.store.get("p/3/x", deadline_in(SOON)).unwrap();
    Published::decode(&record).unwrap()
}

/// A connection that has greeted at rank 0's port as `rank` of `world`.
fn greets(c: &Configuration, rank: u32, world: u32) -> TcpStream {
    let published = published(c);
    let mut stream = TcpStream::connect((published.address, published.port)).unwrap();
    let hello = Hello {
        token: published.token,
        rank,
        world,
        epoch: 3,
        process: 7,
        setup: Setup::of("same"),
    };
    hello.write(&mut stream).unwrap();
    stream
}

#[test]
fn a_rank_that_has_gone_leaves_its_place_to_its_successor() {
    world(3, |c| {
        if c.rank == 1 {
            drop(greets(&c, 1, 3));
        }
        meet(&c, &terms("same", false)).unwrap();
    });
}

#[test]
fn half_a_frame_of_a_rank_that_has_gone_is_its_end() {
    world(2, |c| {
        if c.rank == 1 {
            let mut stream = greets(&c, 1, 2);
            Frame::read(&mut stream).unwrap().unwrap();
            stream.write_all(&[Kind::Failed as u8; 5]).unwrap();
            return;
        }
        let meeting = meet(&c, &terms("same", false)).unwrap();
        let (watch, until) = (meeting.watch(), deadline_in(SOON));
        let e = loop {
            match watch() {
                Some(e) => break e,
                None => assert!(!time_left(until).is_zero(), "it is waited for"),
            }
            std::thread::yield_now();
        };
        assert_eq!(
            (e.kind(), e.context().peer),
            (ErrorKind::PeerLost, Some(1)),
            "{e}"
        );
    });
}

#[test]
fn no_look_waits_for_the_rest_of_a_frame() {
    let frame = Frame::new(Kind::Failed, 1, 5 << 32 | 1, "no memory");
    let mut bytes = Vec::new();
    frame.write(&mut bytes).unwrap();
    world(2, |c| {
        let look = |n: usize| c.store.wait(&[&format!("{n} bytes")], deadline_in(SOON)).unwrap();
        if c.rank == 1 {
            let mut stream = greets(&c, 1, 2);
            Frame::read(&mut stream).unwrap().unwrap();
            for (n, part) in bytes.chunks(8).enumerate() {
                stream.write_all(part).unwrap();
                c.store
                    .set(&format!("{n} bytes"), b"1", deadline_in(SOON))
                    .unwrap();
                c.store
                    .wait(&[&format!("{n} looked at")], deadline_in(SOON))
                    .unwrap();
            }
            return;
        }
        let meeting = meet(&c, &terms("same", false)).unwrap();
        let watch = meeting.watch();
        let parts = bytes.chunks(8).count();
        for n in 0..parts - 1 {
            look(n);
            // Twice as long as it waits before it looks again.
            std::thread::sleep(Duration::from_millis(10));
            assert!(watch().is_none(), "of {n} parts");
            c.store
                .set(&format!("{n} looked at"), b"1", deadline_in(SOON))
                .unwrap();
        }
        look(parts - 1);
        let cancel = meeting.cancel(&c);
        let e = cancel.in_turns(deadline_in(SOON), |until| {
            std::thread::sleep(time_left(until));
            Err::<(), _>(Error::timeout("a turn"))
        });
        let e = e.unwrap_err();
        assert_eq!((e.kind(), e.context().peer), (ErrorKind::Backend, Some(1)), "{e}");
        assert!(e.to_string().contains("no memory"), "{e}");
        c.store
            .set(&format!("{} looked at", parts - 1), b"1", deadline_in(SOON))
            .unwrap();
    });
}

#[test]
fn a_rank_that_hears_half_a_verdict_ends_with_the_reason_of_the_token() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let published = Published {
        token: [7; wire::TOKEN],
        port: listener.local_addr().unwrap().port(),
        host: crate::host_address::identity(),
        address: listener.local_addr().unwrap().ip(),
    };
    world(2, |c| {
        if c.rank == 0 {
            let record = published.encode();
            c.store
                .set("p/3/x", record.as_bytes(), deadline_in(SOON))
                .unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; Hello::BYTES]).unwrap();
            stream.write_all(&[Kind::Ready as u8, 0, 0]).unwrap();
            c.store.set("half", b"1", deadline_in(SOON)).unwrap();
            return c.store.wait(&["heard"], deadline_in(SOON)).unwrap();
        }
        let (told, store) = (Cancel::default(), c.store.clone());
        let cancel = told.clone();
        let c = Configuration { cancel, ..c };
        std::thread::scope(|scope| {
            let meeting = scope.spawn(|| meet(&c, &terms("same", false)).unwrap_err());
            store.wait(&["half"], deadline_in(SOON)).unwrap();
            told.cancel(Error::new(ErrorKind::Aborted, "enough"));
            let e = meeting.join().unwrap();
            assert_eq!((e.kind(), e.message()), (ErrorKind::Aborted, "enough"), "{e}");
        });
        store.set("heard", b"1", deadline_in(SOON)).unwrap();
    });
}

#[test]
fn a_rank_0_that_cannot_take_part_ends_no_other_rank_s_run() {
    let wrong = Terms {
        door: Door {
            host: Some("x".to_string()),
            is_insecure: true,
        },
        ..terms("same", false)
    };
    let told = world(2, |c| meet(&c, &wrong).unwrap_err());
    let kinds: Vec<ErrorKind> = told.iter().map(Error::kind).collect();
    assert_eq!(
        kinds,
        [ErrorKind::InvalidArgument, ErrorKind::Protocol],
        "{told:?}"
    );
    for e in told {
        assert!(
            e.to_string().contains("OXCCL_X_HOST=x is not an IP address"),
            "{e}"
        );
    }
}

#[test]
fn rank_0_is_reached_at_an_address_of_ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let sixth = Terms {
        door: Door {
            host: Some("::1".to_string()),
            is_insecure: true,
        },
        ..terms("same", false)
    };
    world(2, |c| {
        if c.rank == 1 {
            // As a rank of another host does it.
            let published = published(&c);
            assert_eq!(published.address, IpAddr::from(Ipv6Addr::LOCALHOST));
            drop(TcpStream::connect((published.address, published.port)).unwrap());
        }
        meet(&c, &sixth).unwrap();
    });
}

/// A store that takes rank 0's record, and answers no call to change it until rank 1 has heard.
struct Slow {
    inner: Arc<dyn Store>,
    sets: AtomicU32,
    /// How long it was to be asked, and whether rank 1 has heard meanwhile.
    asked: Mutex<Option<(Duration, bool)>>,
}

fn not_here<T>() -> Result<T> {
    Err(Error::unsupported("no call of a meeting"))
}

impl Store for Slow {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        if self.sets.fetch_add(1, Ordering::Relaxed) == 0 {
            return self.inner.set(key, value, deadline);
        }
        let limit = time_left(deadline);
        let heard = self.inner.wait(&["rank 1 has heard"], deadline_in(SOON)).is_ok();
        *lock(&self.asked) = Some((limit, heard));
        Err(Error::timeout("too late"))
    }
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.inner.get(key, deadline)
    }
    fn add(&self, _: &str, _: i64, _: Instant) -> Result<i64> {
        not_here()
    }
    fn compare_set(&self, _: &str, _: &[u8], _: &[u8], _: Instant) -> Result<Vec<u8>> {
        not_here()
    }
    fn check(&self, _: &[&str], _: Instant) -> Result<bool> {
        not_here()
    }
    fn wait(&self, _: &[&str], _: Instant) -> Result<()> {
        not_here()
    }
    fn delete(&self, _: &str, _: Instant) -> Result<bool> {
        not_here()
    }
    fn append(&self, _: &str, _: &[u8], _: Instant) -> Result<()> {
        not_here()
    }
    fn multi_get(&self, _: &[&str], _: Instant) -> Result<Vec<Vec<u8>>> {
        not_here()
    }
    fn multi_set(&self, _: &[(&str, &[u8])], _: Instant) -> Result<()> {
        not_here()
    }
    fn num_keys(&self, _: Instant) -> Result<i64> {
        not_here()
    }
    fn list(&self, _: Instant) -> Result<Vec<String>> {
        not_here()
    }
    fn barrier(&self, _: &str, _: u32, _: Instant) -> Result<()> {
        not_here()
    }
}

#[test]
fn a_verdict_is_told_to_the_ranks_that_are_here_before_a_store_that_does_not_answer() {
    world(2, |mut c| {
        if c.rank == 1 {
            let e = meet(&c, &terms("same", true)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
            return c.store.set("rank 1 has heard", b"1", deadline_in(SOON)).unwrap();
        }
        let slow = Arc::new(Slow {
            inner: c.store.clone(),
            sets: AtomicU32::new(0),
            asked: Mutex::default(),
        });
        c.store = slow.clone();
        meet(&c, &terms("same", true)).unwrap_err();
        let (limit, heard) = lock(&slow.asked).take().unwrap();
        assert!(heard, "rank 1 was not told");
        assert!(limit < SOON / 2, "it is asked for {limit:?}");
    });
}

/// Limits are a process's: what this test says is played by one of its own.
#[test]
fn a_limit_on_descriptors_that_is_met_at_any_point_of_a_meeting_is_raised_or_named() {
    const CHILD: &str = "OXCCL_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        let name =
            "peers::tests::a_limit_on_descriptors_that_is_met_at_any_point_of_a_meeting_is_raised_or_named";
        let told = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&told.stdout);
        return assert!(told.status.success() && text.contains("1 passed"), "{text}");
    }
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // All are taken but a few of the lowest, so that nothing shows that the limit is near.
    let all_but = |room, maximum| {
        let current = Some(1024);
        setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
        let mut taken: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        taken.drain(..room);
        taken
    };
    let mut met = 0;
    for room in 0..8 {
        let taken = all_but(room, maximum);
        world(2, |c| {
            let rank = Rank::connect(&c);
            rank.peers.barrier(1, deadline_in(SOON)).unwrap();
            c.store.barrier("over", 2, deadline_in(SOON)).unwrap();
        });
        met += u32::from(getrlimit(Resource::Nofile).current == maximum);
        drop(taken);
    }
    assert!(met > 3, "the limit was met {met} times only");
    let taken = all_but(0, Some(1024));
    for e in world(2, |c| meet(&c, &terms("same", false)).unwrap_err()) {
        for part in ["rank 0 cannot listen", "RLIMIT_NOFILE"] {
            assert!(e.to_string().contains(part), "{e}");
        }
    }
    drop(taken);
}

#[test]
fn a_rank_that_waits_for_the_id_hears_why_there_is_none_and_of_its_deadline() {
    for e in world(2, |c| {
        let meeting = meet(&c, &terms("same", false)).unwrap();
        let failed = meeting.id(&c, || Err(Error::new(ErrorKind::Backend, "no id today")));
        let e = failed.unwrap_err();
        if c.rank == 0 {
            meeting.fail(&e);
        }
        c.store.barrier("heard", 2, deadline_in(SOON)).unwrap();
        e
    }) {
        assert!(e.to_string().contains("no id today"), "{e}");
    }
    let e = hear_id(&InMemoryStore::new(), deadline_in(Duration::from_millis(30))).unwrap_err();
    assert!(e.to_string().contains("phase: id"), "{e}");
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
fn the_reason_of_an_abort_is_heard_as_it_was_given() {
    // It names a rank itself: what this rank's engine put before it comes off once, and the one that hears puts it there again.
    let text = "aborted by rank 0: aborted by rank 0: enough";
    world(2, |c| {
        let rank = Rank::connect(&c);
        match c.rank {
            0 => rank.peers.report(&Error::new(ErrorKind::Aborted, text)),
            _ => assert_eq!(rank.failure().message(), text),
        }
        c.store.barrier("heard", 2, deadline_in(SOON)).unwrap();
    });
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
