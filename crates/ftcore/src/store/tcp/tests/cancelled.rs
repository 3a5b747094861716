//! Calls under a token, over links that are slow and to servers that do not answer: the look at the token costs a call nothing, and no call
//! waits past it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

use super::super::conn::Opening;
use super::super::link::{Watched, is_late};
use super::*;
use crate::agreement::{Agreement, Record};
use crate::engine::Place;
use crate::{Cancel, Collective, Epoch, Error, PrefixStore};

/// Far behind every deadline that may count.
const LONG: Duration = Duration::from_secs(60);

fn enough() -> Error {
    Error::new(ErrorKind::Aborted, "enough")
}

/// How much later over the slow link arrives whatever the server says.
const SLOW: Duration = Duration::from_millis(200);

#[test]
fn a_call_that_looks_at_its_token_ends_over_a_slow_link_and_takes_one_connection() {
    let server = server();
    let near = client(&server);
    near.set("k", b"v", soon()).unwrap();
    let (address, made) = far(&server, |_| SLOW);
    let base: Arc<dyn Store> = Arc::new(TcpStore::connect(&address, soon()).unwrap());
    let store = Cancel::default().over(&base);
    thread::scope(|scope| {
        let waits = scope.spawn(|| store.wait(&["later"], soon()));
        until("the first connection is in use", || server.waiting() == 1);
        // This one connects, is greeted, waits and fetches: each takes four turns.
        assert_eq!(store.get("k", soon()).unwrap(), b"v");
        assert_eq!(store.multi_get(&["k"], soon()).unwrap(), [b"v"]);
        near.set("later", b"", soon()).unwrap();
        waits.join().unwrap().unwrap();
    });
    assert_eq!(made.load(Ordering::SeqCst), 2, "calls gave connections up");
}

/// What the rank compares with one other through the store at `address`.
fn agreement(address: &str, rank: u32) -> (Agreement, Record) {
    let (world, epoch) = (2, Epoch(1));
    let place = Place { rank, world, epoch };
    let store = Arc::new(TcpStore::connect(address, soon()).unwrap());
    let record = Record::of(&Collective::Barrier, place);
    (Agreement::new(store, "x".into(), place), record)
}

#[test]
fn ranks_agree_on_what_they_call_over_a_slow_link() {
    let server = server();
    let (address, _) = far(&server, |_| SLOW);
    let agree = |rank| {
        let (agreement, record) = agreement(&address, rank);
        agreement.post(&record, 0, soon())?;
        agreement.compare(0, soon())
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| agree(1));
        agree(0).unwrap();
        other.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_that_says_its_call_to_a_mute_server_ends_with_its_group() {
    let (address, is_asked) = mute();
    let (agreement, record) = agreement(&address, 0);
    let begun = Instant::now();
    let error = thread::scope(|scope| {
        let posting = scope.spawn(|| agreement.post(&record, 0, deadline_in(LONG)).unwrap_err());
        is_asked.recv_timeout(LONG).unwrap();
        agreement.end(enough());
        posting.join().unwrap()
    });
    assert_eq!(error.message(), "enough");
    assert!(begun.elapsed() < LONG / 2, "it waited for its deadline");
}

/// A server that greets and never says anything else; each time it is asked for something, it says so.
fn mute() -> (String, mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (asked, is_asked) = mpsc::channel();
    thread::spawn(move || {
        while let Ok((mut peer, _)) = listener.accept() {
            let asked = asked.clone();
            thread::spawn(move || {
                let mut greeting = [0; 10];
                peer.read_exact(&mut greeting).unwrap();
                peer.write_all(&greeting[6..]).unwrap();
                let mut request = [0; 1024];
                while let Ok(1..) = peer.read(&mut request) {
                    let _ = asked.send(());
                }
            });
        }
    });
    (address, is_asked)
}

#[test]
fn every_call_ends_with_the_reason_of_its_token_when_the_server_is_mute() {
    type Run = fn(&dyn Store, Instant) -> Result<()>;
    let calls: [(&str, Run); 13] = [
        ("set", |s, end| s.set("k", b"v", end)),
        ("get", |s, end| s.get("k", end).map(drop)),
        ("add", |s, end| s.add("k", 1, end).map(drop)),
        ("compare_set", |s, end| {
            s.compare_set("k", b"", b"v", end).map(drop)
        }),
        ("check", |s, end| s.check(&["k"], end).map(drop)),
        ("wait", |s, end| s.wait(&["k", "l"], end)),
        ("delete", |s, end| s.delete("k", end).map(drop)),
        ("append", |s, end| s.append("k", b"v", end)),
        ("multi_get", |s, end| s.multi_get(&["k"], end).map(drop)),
        ("multi_set", |s, end| s.multi_set(&[("k", b"v")], end)),
        ("num_keys", |s, end| s.num_keys(end).map(drop)),
        ("list", |s, end| s.list(end).map(drop)),
        ("barrier", |s, end| s.barrier("k", 2, end)),
    ];
    let (address, is_asked) = mute();
    let base: Arc<dyn Store> = Arc::new(TcpStore::connect(&address, soon()).unwrap());
    for ((name, call), from_above) in calls.into_iter().flat_map(|call| [(call, true), (call, false)]) {
        // The way of a configuration: a store of prefixes, under a token of its own and that of what is above.
        let (above, below) = (Cancel::default(), Cancel::default());
        let store = above.over(&base);
        let store = below.over(&(Arc::new(PrefixStore::new(store, "p")) as Arc<dyn Store>));
        let begun = Instant::now();
        let error = thread::scope(|scope| {
            let calling = scope.spawn(|| call(&*store, deadline_in(LONG)).unwrap_err());
            is_asked.recv_timeout(LONG).unwrap();
            let ended = if from_above { &above } else { &below };
            ended.cancel(enough());
            calling.join().unwrap()
        });
        assert_eq!(
            (error.kind(), error.message()),
            (ErrorKind::Aborted, "enough"),
            "{name}"
        );
        assert!(begun.elapsed() < LONG / 2, "{name} waited for its deadline");
    }
}

#[test]
fn a_token_that_is_settled_ends_no_call() {
    let server = server();
    let base: Arc<dyn Store> = Arc::new(client(&server));
    let cancel = Cancel::default();
    let store = cancel.over(&base);
    cancel.settle();
    cancel.cancel(enough());
    let error = store.get("missing", millis(200)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    store.set("k", b"v", soon()).unwrap();
    assert_eq!(store.get("k", soon()).unwrap(), b"v");
}

/// A listener with a store that has connected to it once; that connection is closed again.
fn met_once() -> (TcpListener, u16, TcpStore) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let store = thread::scope(|scope| {
        let connecting = scope.spawn(|| TcpStore::connect(&format!("127.0.0.1:{port}"), soon()).unwrap());
        drop(greet(&listener));
        connecting.join().unwrap()
    });
    (listener, port, store)
}

fn greet(listener: &TcpListener) -> TcpStream {
    let (mut peer, _) = listener.accept().unwrap();
    let mut greeting = [0; 10];
    peer.read_exact(&mut greeting).unwrap();
    peer.write_all(&greeting[6..]).unwrap();
    peer
}

/// From now on there is no room for connections to `listener`, as long as the one given back is not accepted: the kernel goes on trying.
fn fill(listener: &TcpListener, port: u16) -> TcpStream {
    rustix::net::listen(listener, 0).unwrap();
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

/// The local ports of this machine's sockets that are connecting to `port`.
fn connecting_to(port: u16) -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let to = format!("0100007F:{port:04X}");
    let lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines
        .filter(|line| line.get(2) == Some(&to.as_str()) && line.get(3) == Some(&"02"))
        .map(|line| line[1].to_owned())
        .collect()
}

#[test]
fn connecting_and_greeting_end_with_the_reason_of_a_token() {
    // One server takes no connections any more, the other does, and says nothing.
    for is_full in [true, false] {
        let (listener, port, store) = met_once();
        let _filler = is_full.then(|| fill(&listener, port));
        let cancel = Cancel::default();
        let store = cancel.over(&(Arc::new(store) as Arc<dyn Store>));
        let begun = Instant::now();
        let error = thread::scope(|scope| {
            let calling = scope.spawn(|| store.num_keys(deadline_in(LONG)).unwrap_err());
            let _peer = match is_full {
                true => {
                    until("it connects", || !connecting_to(port).is_empty());
                    None
                }
                false => Some(listener.accept().unwrap()),
            };
            cancel.cancel(enough());
            calling.join().unwrap()
        });
        assert_eq!(
            (error.kind(), error.message()),
            (ErrorKind::Aborted, "enough"),
            "full: {is_full}"
        );
        assert!(begun.elapsed() < LONG / 2, "full: {is_full}");
    }
}

#[test]
fn an_attempt_to_connect_that_takes_longer_than_a_call_is_continued_by_the_next() {
    let (listener, port, store) = met_once();
    let filler = fill(&listener, port);
    let mut attempts = BTreeSet::new();
    for _ in 0..3 {
        let e = store.num_keys(millis(50)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(e.to_string().contains("connection attempt"), "{e}");
        attempts.extend(connecting_to(port));
    }
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    // Once there is room the kernel's next try gets through.
    drop((listener.accept().unwrap(), filler));
    thread::scope(|scope| {
        let calling = scope.spawn(|| store.num_keys(soon()));
        let mut peer = greet(&listener);
        peer.read_exact(&mut [0; 1]).unwrap();
        peer.write_all(&hex("0300000000000000")).unwrap();
        assert_eq!(calling.join().unwrap().unwrap(), 3);
    });
}

#[test]
fn an_address_that_does_not_answer_holds_up_none_behind_it() {
    let server = server();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    let _filler = fill(&listener, silent.port());
    // In calls that are much shorter than an attempt, too: each goes on where the last one stopped.
    for slice in [Duration::from_secs(5), Duration::from_millis(50)] {
        let mut opening = Opening::to(vec![silent, server.local_addr()], None);
        let until = deadline_in(Duration::from_secs(5));
        loop {
            match opening.end(deadline_in(slice), &Watched::default()) {
                Ok(_) => break,
                Err(missed) => {
                    assert!(is_late(&missed.error), "{}", missed.error);
                    assert!(Instant::now() < until, "not reached in slices of {slice:?}");
                    opening = *missed.opening.expect("it goes on");
                }
            }
        }
    }
}

#[test]
fn an_address_that_refuses_or_says_something_else_is_passed_over_at_once() {
    let server = server();
    let refuses = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = vec![refuses, other.local_addr().unwrap(), server.local_addr()];
    let answers = thread::spawn(move || other.accept().unwrap().0.write_all(b"HTTP/1.1"));
    let opening = Opening::to(addresses, None);
    assert!(opening.end(soon(), &Watched::default()).is_ok());
    answers.join().unwrap().unwrap();
    let opening = Opening::to(vec![refuses, refuses], None);
    let missed = opening.end(soon(), &Watched::default()).err().unwrap();
    assert_eq!(missed.error.kind(), std::io::ErrorKind::ConnectionRefused);
}
