//! Ranks that meet strangers, garbage, or nothing where rank 0 should be (INV-10).

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use super::kit::*;
use super::{Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const KEY: &str = "errors/1/nccl";
const TOKEN: &str = "07070707070707070707070707070707";
/// Bytes of a greeting.
const HELLO: usize = 180;

/// Rank 0's record as it would stand in the store.
fn record(port: u16) -> String {
    format!("2 {TOKEN} {port} nowhere 127.0.0.1")
}

/// Rank 1 of 2 against whatever `zero` does at the port of the record.
fn against(zero: impl FnOnce(TcpListener) + Send, kind: ErrorKind, words: &[&str]) -> Outcome {
    against_over(Arc::new(InMemoryStore::new()), zero, kind, words)
}

fn against_over(
    store: Arc<dyn Store>,
    zero: impl FnOnce(TcpListener) + Send,
    kind: ErrorKind,
    words: &[&str],
) -> Outcome {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    store.set(KEY, record(port).as_bytes(), deadline_in(SOON))?;
    let group = group(1, GroupOptions::default())?;
    std::thread::scope(|scope| {
        scope.spawn(move || zero(listener));
        let e = group
            .configure(configuration(&store, 1, 2, 1, Duration::from_millis(600)))
            .err()
            .ok_or("configure succeeded")?;
        says(&e, kind, words)
    })
}

fn unreachable() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    store.set(KEY, record(port).as_bytes(), deadline_in(SOON))?;
    let e = group(1, GroupOptions::default())?
        .configure(configuration(&store, 1, 2, 1, Duration::from_millis(600)))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, e.kind(), &["cannot be reached", "phase: control connections"])
}

fn closes() -> Outcome {
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            // The whole greeting: what is left unread would make a reset of the end.
            let _ = std::io::Read::read_exact(&mut stream, &mut [0; HELLO]);
        }
    };
    against(zero, ErrorKind::PeerLost, &["rank 0 closed"])
}

fn answers_garbage() -> Outcome {
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(&[0xEE; 64]);
            let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
            std::thread::sleep(Duration::from_millis(300));
        }
    };
    against(zero, ErrorKind::Protocol, &["kind 238"])
}

fn answers_something_else() -> Outcome {
    // A barrier's frame, where only "go on" or "refused" may stand.
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            let mut frame = vec![6u8];
            frame.extend([0; 16]);
            let _ = stream.write_all(&frame);
            let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
            std::thread::sleep(Duration::from_millis(300));
        }
    };
    against(zero, ErrorKind::Protocol, &["something else"])
}

fn says_nothing() -> Outcome {
    let zero = |listener: TcpListener| {
        let kept = listener.accept();
        std::thread::sleep(Duration::from_secs(3));
        drop(kept);
    };
    against(zero, ErrorKind::Timeout, &["has not let any rank go on"])
}

fn garbage_in_the_store() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    store.set(KEY, b"\xff\xfe nonsense", deadline_in(SOON))?;
    let e = group(1, GroupOptions::default())?
        .configure(configuration(&store, 1, 2, 1, SOON))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, ErrorKind::Protocol, &[KEY, "is not rank 0's address"])
}

/// Lets rank 1 go on, and then says nothing more.
fn lets_go_on(listener: TcpListener) {
    if let Ok((mut stream, _)) = listener.accept() {
        let mut frame = vec![1u8];
        frame.extend([0; 16]);
        let _ = stream.write_all(&frame);
        // Until rank 1 has ended.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    }
}

fn no_id() -> Outcome {
    against(
        lets_go_on,
        ErrorKind::Timeout,
        &["phase: id", "rank 0 has not given its id"],
    )
}

fn an_id_that_is_none() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    store.set(&format!("{KEY}/{TOKEN}/id"), b"too short", deadline_in(SOON))?;
    let words = ["rank 0's unique id has 9 bytes, not 128"];
    against_over(store, lets_go_on, ErrorKind::Protocol, &words)
}

/// NCCL keeps a thread and a port for an id until all ranks have come: none is made before they are here.
fn no_id_for_ranks_that_do_not_come() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let e = group(0, GroupOptions::default())?
        .configure(configuration(&store, 0, 2, 1, Duration::from_millis(300)))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, ErrorKind::Timeout, &["rank 1 of 2 did not come"])?;
    let is_left = || -> Result<bool, std::io::Error> {
        let mut names = std::fs::read_dir("/proc/self/task")?
            // A thread may end while it is looked at.
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        Ok(names.any(|name| name.trim() == "ox-standin-hub"))
    };
    let until = deadline_in(Duration::from_secs(5));
    while is_left()? {
        check(Instant::now() < until, || {
            "the library still waits for ranks".into()
        })?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn wrong_host() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let e = group(0, GroupOptions::default())?
        .configure(configuration(&store, 0, 2, 1, SOON))
        .err()
        .ok_or("configure succeeded")?;
    says(
        &e,
        ErrorKind::InvalidArgument,
        &["OXCCL_NCCL_HOST", "not-an-address"],
    )
}

/// Strangers at rank 0's port hold no rank up: one that says nothing, one that says nonsense, one that goes at once.
fn strangers() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let store = &store;
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || -> Outcome {
            let group = group(0, GroupOptions::default())?;
            group.configure(configuration(store, 0, 2, 1, SOON))?;
            sum_works(0, &group)
        });
        let by = deadline_in(SOON);
        store.wait(&[KEY], by)?;
        let text = String::from_utf8_lossy(&store.get(KEY, by)?).into_owned();
        let port: u16 = text.split(' ').nth(2).ok_or("no port")?.parse()?;
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        drop(connect()?);
        connect()?.write_all(&[0x55; 200])?;
        // In the right form, and of another job: the token is not rank 0's.
        let mut other = b"oxpeers\x00\x01\x00\x00\x00".to_vec();
        other.resize(HELLO, 0);
        connect()?.write_all(&other)?;
        let silent = connect()?;
        let group = group(1, GroupOptions::default())?;
        group.configure(configuration(store, 1, 2, 1, SOON))?;
        sum_works(1, &group)?;
        drop(silent);
        zero.join().map_err(|_| "a panic")?
    })
}

/// Rank 0 does not come at all.
fn no_rank_zero() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let e = group(1, GroupOptions::default())?
        .configure(configuration(&store, 1, 2, 1, Duration::from_millis(300)))
        .err()
        .ok_or("configure succeeded")?;
    says(
        &e,
        ErrorKind::Timeout,
        &["rank 0 of 2 has not published", "phase: rendezvous"],
    )
}

/// Rank 0's record says why it cannot be met.
fn refused_in_the_store() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    store.set(KEY, b"0 38654705663 no sockets here", deadline_in(SOON))?;
    let e = group(1, GroupOptions::default())?
        .configure(configuration(&store, 1, 2, 1, TIME_LIMIT))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, e.kind(), &["rank 0 reports: no sockets here"])
}

/// An abort ends each wait of the meeting: for rank 0's record, for the others, for rank 0's verdict.
fn aborted() -> Outcome {
    let ends = |rank: u32, store: &Arc<dyn Store>| -> Outcome {
        let group = group(rank, GroupOptions::default())?;
        let e = std::thread::scope(|scope| {
            let configuring = scope.spawn(|| group.configure(configuration(store, rank, 2, 1, TIME_LIMIT)));
            // Until `configure` is under way an abort finds nothing to end.
            while !configuring.is_finished() {
                std::thread::sleep(Duration::from_millis(20));
                group.abort("enough");
            }
            configuring.join().map_err(|_| "a panic")
        })?;
        says(&e.err().ok_or("they met")?, ErrorKind::Aborted, &["configure"])
    };
    let empty: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ends(1, &empty)?;
    ends(0, &empty)?;
    let silent: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    silent.set(KEY, record(port).as_bytes(), deadline_in(SOON))?;
    ends(1, &silent)
}

/// A store whose call fails, once; then it serves.
struct Failing {
    inner: InMemoryStore,
    call: &'static str,
    failed: std::sync::atomic::AtomicBool,
}

impl Failing {
    fn at(&self, call: &str, keys: &[&str]) -> Result<(), Error> {
        let meant = call == self.call && keys.iter().any(|k| k.starts_with("errors/"));
        if meant && !self.failed.swap(true, std::sync::atomic::Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "the store is gone"));
        }
        Ok(())
    }
}

impl Store for Failing {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), Error> {
        self.at("set", &[key])?;
        self.inner.set(key, value, deadline)
    }
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, Error> {
        self.at("get", &[key])?;
        self.inner.get(key, deadline)
    }
    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64, Error> {
        self.inner.add(key, amount, deadline)
    }
    fn compare_set(&self, key: &str, old: &[u8], new: &[u8], deadline: Instant) -> Result<Vec<u8>, Error> {
        self.inner.compare_set(key, old, new, deadline)
    }
    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool, Error> {
        self.inner.check(keys, deadline)
    }
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<(), Error> {
        self.inner.wait(keys, deadline)
    }
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool, Error> {
        self.inner.delete(key, deadline)
    }
    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), Error> {
        self.inner.append(key, value, deadline)
    }
    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>, Error> {
        self.inner.multi_get(keys, deadline)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<(), Error> {
        self.inner.multi_set(pairs, deadline)
    }
    fn num_keys(&self, deadline: Instant) -> Result<i64, Error> {
        self.inner.num_keys(deadline)
    }
    fn list(&self, deadline: Instant) -> Result<Vec<String>, Error> {
        self.inner.list(deadline)
    }
    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<(), Error> {
        self.inner.barrier(key, world_size, deadline)
    }
}

/// The store fails one call of the meeting: that rank says so, the other one at its deadline at the latest, and the next meeting works.
fn store_fails() -> Outcome {
    for call in ["set", "get"] {
        let store: Arc<dyn Store> = Arc::new(Failing {
            inner: InMemoryStore::new(),
            call,
            failed: std::sync::atomic::AtomicBool::new(false),
        });
        ranks(2, |rank| {
            let group = group(rank, GroupOptions::default())?;
            let c = configuration(&store, rank, 2, 1, Duration::from_millis(600));
            let e = group.configure(c).err().ok_or("they met")?;
            let affected = u32::from(call != "set");
            match rank == affected {
                true => says(&e, ErrorKind::Unavailable, &["the store is gone", "configure"])?,
                false => says(&e, ErrorKind::Timeout, &["phase:"])?,
            }
            store.barrier("both failed", 2, deadline_in(SOON))?;
            next_epoch(rank, &group, &store)?;
            store.barrier("both go on", 2, deadline_in(SOON))?;
            Ok(())
        })?;
    }
    Ok(())
}

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("meet_no_rank_at_rank_0_s_address", &[], unreachable),
        scenario("meet_a_rank_0_that_closes", &[], closes),
        scenario("meet_a_rank_0_that_answers_garbage", &[], answers_garbage),
        scenario(
            "meet_a_rank_0_that_answers_something_else",
            &[],
            answers_something_else,
        ),
        scenario("meet_a_rank_0_that_says_nothing", &[], says_nothing),
        scenario("meet_a_rank_0_without_an_id", &[], no_id),
        scenario("meet_a_rank_0_whose_id_is_none", &[], an_id_that_is_none),
        scenario(
            "meet_no_rank_and_leave_nothing_in_the_library",
            &[],
            no_id_for_ranks_that_do_not_come,
        )
        .on_the_stand_in(),
        scenario("meet_garbage_in_the_store", &[], garbage_in_the_store),
        scenario("meet_strangers_at_rank_0_s_port", &[], strangers),
        scenario("meet_no_rank_who_has_published_an_address", &[], no_rank_zero),
        scenario(
            "meet_a_rank_0_that_says_in_the_store_why_it_cannot",
            &[],
            refused_in_the_store,
        ),
        scenario("meet_no_rank_and_be_aborted", &[], aborted),
        scenario("meet_through_a_store_that_fails", &[], store_fails),
        scenario(
            "meet_an_address_that_is_none_is_refused",
            &[("OXCCL_NCCL_HOST", "not-an-address")],
            wrong_host,
        ),
    ]
}
