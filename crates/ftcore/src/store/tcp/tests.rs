//! The protocol over real sockets: golden conversations in both directions; in the modules, lost servers and hostile peers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

mod cancelled;
mod credentials;
mod epochs;
mod forked;
mod hostile;
mod lost;

use super::doors::Limits;
use super::server::{ANSWERS, listen};
use super::{TcpStore, TcpStoreServer};
use crate::store::Store;
use crate::{Credentials, ErrorKind, Result, deadline_in};

const HELLO: &str = "00 cef7853c 0d 01020304";

fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

fn millis(n: u64) -> Instant {
    deadline_in(Duration::from_millis(n))
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|b| !b.is_ascii_whitespace())
        .map(|b| (b as char).to_digit(16).expect("a hex digit") as u8)
        .collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// `u64 length + bytes` as hex.
fn text(s: &str) -> String {
    let body: String = s.bytes().map(|b| format!("{b:02x}")).collect();
    format!("{:02x}00000000000000 {body}", s.len())
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = soon();
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn with_limits(limits: Limits) -> Result<TcpStoreServer> {
    TcpStoreServer::start("127.0.0.1:0", listen("127.0.0.1:0")?, None, limits)
}

fn server() -> TcpStoreServer {
    TcpStoreServer::bind("127.0.0.1:0").unwrap()
}

fn client(server: &TcpStoreServer) -> TcpStore {
    TcpStore::connect(&server.local_addr().to_string(), soon()).unwrap()
}

/// A way to `server` over which the `n`th thing that it says on a connection arrives later by `delay(n)`, and how many connections were made over it.
fn far(server: &TcpStoreServer, delay: fn(usize) -> Duration) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let behind = server.local_addr();
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
    let pass = |mut from: TcpStream, mut to: TcpStream, delay: fn(usize) -> Duration| {
        thread::spawn(move || {
            let mut bytes = [0; 1024];
            for nth in 0.. {
                let Ok(n @ 1..) = from.read(&mut bytes) else { break };
                thread::sleep(delay(nth));
                if to.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
    };
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            count.fetch_add(1, Ordering::SeqCst);
            let there = TcpStream::connect(behind).unwrap();
            pass(near.try_clone().unwrap(), there.try_clone().unwrap(), |_| {
                Duration::ZERO
            });
            pass(there, near, delay);
        }
    });
    (address, made)
}

/// A peer that speaks in bytes.
struct Raw(TcpStream);

impl Raw {
    fn silent(server: &TcpStoreServer) -> Self {
        let stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self(stream)
    }

    fn greeted(server: &TcpStoreServer) -> Self {
        let mut raw = Self::silent(server);
        raw.say(HELLO);
        raw.hears("01020304");
        raw
    }

    fn say(&mut self, bytes: &str) {
        self.0.write_all(&hex(bytes)).unwrap();
    }

    fn hears(&mut self, bytes: &str) {
        let expected = hex(bytes);
        let mut got = vec![0; expected.len()];
        self.0.read_exact(&mut got).unwrap();
        assert_eq!(got, expected);
    }

    /// The server has closed the connection, and said nothing more before.
    fn ends_closed(mut self) {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => assert!(rest.is_empty(), "{rest:?}"),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
        }
    }
}

/// What PyTorch's client and server say to each other: (client, server).
fn conversation() -> Vec<(String, String)> {
    let k = text("/k");
    let pair = |c: String, s: &str| (c, s.to_owned());
    vec![
        pair(HELLO.into(), "01020304"),
        pair(format!("01 {k} {} 0d 01000000", text("v1")), "01000000"),
        pair(format!("06 0100000000000000 {k}"), "00"),
        pair(format!("03 {k}"), &text("v1")),
        pair(format!("04 {} 0500000000000000", text("/n")), "0500000000000000"),
        pair(format!("03 {}", text("/n")), &text("5")),
        pair(format!("05 0200000000000000 {k} {}", text("/zz")), "01"),
        pair(format!("05 0100000000000000 {k}"), "00"),
        pair(format!("02 {k} {} {}", text("v1"), text("v2")), &text("v2")),
        pair(format!("02 {k} {} {}", text("v1"), text("v3")), &text("v2")),
        pair(
            format!("02 {} {} {}", text("/q"), text("x"), text("y")),
            &text("x"),
        ),
        pair(format!("09 {k} {} 03 {k}", text("+z")), &text("v2+z")),
        pair(
            format!(
                "0b 0200000000000000 {} {} {} {}",
                text("/a"),
                text("1"),
                text("/b"),
                text("2")
            ),
            "",
        ),
        pair(
            format!("0a 0300000000000000 {} {} {k}", text("/b"), text("/a")),
            &[text("2"), text("1"), text("v2+z")].join(""),
        ),
        pair("07".into(), "0400000000000000"),
        pair(
            "11".into(),
            &[
                "0400000000000000".into(),
                text("/a"),
                text("/b"),
                text("/k"),
                text("/n"),
            ]
            .join(""),
        ),
        pair(format!("08 {}", text("/a")), "0100000000000000"),
        pair(format!("08 {}", text("/a")), "0000000000000000"),
        pair(format!("03 {}", text("/a")), "0000000000000000"),
        pair(format!("12 {} 0100000000000000", text("/bar")), "00"),
        pair(format!("03 {}", text("/bar")), &text("1")),
        pair(
            format!(
                "0e {} {} 0e {} {}",
                text("/q"),
                text("i1"),
                text("/q"),
                text("i2")
            ),
            "",
        ),
        pair(format!("10 {}", text("/q")), "0200000000000000"),
        pair(format!("06 0100000000000000 {}", text("/q")), "00"),
        pair(
            format!("0f {}", text("/q")),
            &["0200000000000000".into(), text("i1")].join(""),
        ),
        pair(
            format!("0f {}", text("/q")),
            &["0100000000000000".into(), text("i2")].join(""),
        ),
        pair(format!("0f {}", text("/q")), "0000000000000000"),
        pair("0c".into(), "01"),
    ]
}

#[test]
fn the_server_answers_pytorchs_bytes_with_pytorchs_bytes() {
    let server = server();
    let mut raw = Raw::silent(&server);
    for (client, reply) in conversation() {
        raw.say(&client);
        raw.hears(&reply);
    }
}

#[test]
fn the_conversation_does_not_depend_on_how_it_is_cut_into_segments() {
    let all = conversation();
    let (said, heard): (Vec<String>, Vec<String>) = all.into_iter().unzip();
    let (said, heard) = (hex(&said.join("")), heard.join(""));
    for size in [1, 2, 3, 7, said.len()] {
        let server = server();
        let mut raw = Raw::silent(&server);
        for piece in said.chunks(size) {
            raw.0.write_all(piece).unwrap();
        }
        raw.hears(&heard);
    }
}

#[test]
fn a_wait_blocks_its_own_connection_only_and_is_cancelled_by_cancel_wait() {
    let server = server();
    let (mut waiter, mut other) = (Raw::greeted(&server), Raw::greeted(&server));
    waiter.say(&format!("06 0100000000000000 {}", text("/nope")));
    until("the wait is pending", || server.waiting() == 1);
    other.say("07");
    other.hears("0000000000000000");
    waiter.say("0c");
    waiter.hears("01");
    until("the wait is gone", || server.waiting() == 0);
    // A barrier as well; it leaves its count.
    waiter.say(&format!("12 {} 0200000000000000", text("/b")));
    until("the barrier is pending", || server.waiting() == 1);
    waiter.say("0c");
    waiter.hears("01");
    other.say(&format!("12 {} 0200000000000000", text("/b")));
    other.hears("00");
    // Cancelled or not, the connection works.
    waiter.say(&format!("06 0100000000000000 {}", text("/late")));
    until("the wait is pending", || server.waiting() == 1);
    other.say(&format!("01 {} {}", text("/late"), text("")));
    waiter.hears("00");
}

#[test]
fn a_request_behind_a_pending_wait_is_answered_after_it() {
    let server = server();
    let (mut waiter, mut other) = (Raw::greeted(&server), Raw::greeted(&server));
    waiter.say(&format!("06 0100000000000000 {} 0d 05060708", text("/late")));
    until("the wait is pending", || server.waiting() == 1);
    other.say(&format!("01 {} {}", text("/late"), text("")));
    waiter.hears("00 05060708");
}

#[test]
fn a_waiter_that_disconnects_leaves_nothing_behind() {
    let server = server();
    for opcode in [
        "06 0100000000000000 02000000000000002f78",
        "12 02000000000000002f79 0900000000000000",
    ] {
        let mut raw = Raw::greeted(&server);
        raw.say(opcode);
        until("the wait is pending", || server.waiting() == 1);
        drop(raw);
        until("the wait is gone", || server.waiting() == 0);
        until("the connection is gone", || server.connections() == 0);
    }
}

#[test]
fn each_push_to_a_queue_wakes_one_blocked_consumer() {
    let server = server();
    let (mut a, mut b, mut producer) = (
        Raw::greeted(&server),
        Raw::greeted(&server),
        Raw::greeted(&server),
    );
    let wait = format!("06 0100000000000000 {}", text("/q"));
    a.say(&wait);
    until("the first waits", || server.waiting() == 1);
    b.say(&wait);
    until("the second waits", || server.waiting() == 2);
    producer.say(&format!("0e {} {}", text("/q"), text("i1")));
    a.hears("00");
    assert_eq!(server.waiting(), 1);
    producer.say(&format!("0e {} {}", text("/q"), text("i2")));
    b.hears("00");
}

/// A server that plays a fixed part: reads exactly what is expected and answers; `None` closes the connection.
fn scripted(script: Vec<(String, Option<String>)>) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let thread = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut hello = [0; 10];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(hello[..6], hex("00 cef7853c 0d"));
        stream.write_all(&hello[6..]).unwrap();
        for (expected, reply) in script {
            let ping = expected.strip_suffix("PING");
            let expected = hex(ping.unwrap_or(&expected));
            let mut got = vec![0; expected.len()];
            stream.read_exact(&mut got).unwrap();
            assert_eq!(got, expected);
            if ping.is_some() {
                let mut ping = [0; 5];
                stream.read_exact(&mut ping).unwrap();
                assert_eq!(ping[0], 13);
                stream.write_all(&ping[1..]).unwrap();
            }
            match reply {
                Some(reply) => stream.write_all(&hex(&reply)).unwrap(),
                None => return,
            }
        }
        // Nothing beyond the script.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "{rest:?}");
    });
    (address, thread)
}

#[test]
fn the_client_says_pytorchs_bytes_and_understands_the_replies() {
    let (k, n) = (text("/k"), text("/n"));
    let line = |c: String, s: &str| (c, Some(s.to_owned()));
    let (address, thread) = scripted(vec![
        line(format!("01 {k} {} PING", text("v1")), ""),
        line(format!("06 0100000000000000 {k}"), "00"),
        line(format!("03 {k}"), &text("v1")),
        line(format!("04 {n} 0500000000000000"), "0500000000000000"),
        line(format!("05 0200000000000000 {k} {}", text("/zz")), "01"),
        line(format!("02 {k} {} {}", text("v1"), text("v2")), &text("v2")),
        line("07".into(), "0500000000000000"),
        line(format!("08 {}", text("/a")), "0100000000000000"),
        line(format!("09 {k} {} PING", text("+z")), ""),
        line(format!("06 0200000000000000 {k} {n}"), "00"),
        line(
            format!("0a 0200000000000000 {k} {n}"),
            &format!("{}{}", text("v2+z"), text("5")),
        ),
        line(
            format!("0b 0200000000000000 {k} {} {n} {} PING", text("1"), text("2")),
            "",
        ),
        line(
            "11".into(),
            &format!("0300000000000000 {n} {} {k}", text("init/")),
        ),
        line(format!("12 {k} 0100000000000000"), "00"),
        line(format!("06 0100000000000000 {}", text("/nope")), ""),
        line("0c".into(), "01"),
        // Empty and not there any more: waited for again.
        line(format!("06 0100000000000000 {k}"), "00"),
        line(format!("03 {k}"), "0000000000000000"),
        line(format!("05 0100000000000000 {k}"), "01"),
        line(format!("06 0100000000000000 {k}"), "00"),
        line(format!("03 {k}"), &text("back")),
    ]);
    let s = TcpStore::connect(&address, soon()).unwrap();
    s.set("k", b"v1", soon()).unwrap();
    assert_eq!(s.get("k", soon()).unwrap(), b"v1");
    assert_eq!(s.add("n", 5, soon()).unwrap(), 5);
    assert!(!s.check(&["k", "zz"], soon()).unwrap());
    assert_eq!(s.compare_set("k", b"v1", b"v2", soon()).unwrap(), b"v2");
    assert_eq!(s.num_keys(soon()).unwrap(), 5);
    assert!(s.delete("a", soon()).unwrap());
    s.append("k", b"+z", soon()).unwrap();
    assert_eq!(s.multi_get(&["k", "n"], soon()).unwrap(), [&b"v2+z"[..], b"5"]);
    s.multi_set(&[("k", b"1"), ("n", b"2")], soon()).unwrap();
    assert_eq!(s.list(soon()).unwrap(), ["k", "n"]);
    s.barrier("k", 1, soon()).unwrap();
    assert_eq!(
        s.wait(&["nope"], millis(100)).unwrap_err().kind(),
        ErrorKind::Timeout
    );
    assert_eq!(s.get("k", soon()).unwrap(), b"back");
    drop(s);
    thread.join().unwrap();
}

#[test]
fn a_wait_that_ends_while_it_is_cancelled_has_ended_well() {
    let (address, thread) = scripted(vec![
        (format!("06 0100000000000000 {}", text("/k")), Some(String::new())),
        ("0c".into(), Some("00 01".into())),
        ("07".into(), Some("0100000000000000".into())),
    ]);
    let s = TcpStore::connect(&address, soon()).unwrap();
    s.wait(&["k"], millis(50)).unwrap();
    assert_eq!(s.num_keys(soon()).unwrap(), 1);
    drop(s);
    thread.join().unwrap();
}

#[test]
fn a_port_in_use_is_a_conflict_that_says_what_to_do() {
    let server = server();
    let address = server.local_addr().to_string();
    let e = TcpStoreServer::bind(&address).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Conflict);
    assert!(
        e.to_string().contains(&address) && e.to_string().contains("port 0"),
        "{e}"
    );
    assert_eq!(
        TcpStoreServer::bind("nonsense").unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
}

#[test]
fn shutdown_frees_the_port_and_ends_pending_waits_and_drop_does_not_block() {
    let server = server();
    let address = server.local_addr();
    let mut waiter = Raw::greeted(&server);
    waiter.say(&format!("06 0100000000000000 {}", text("/k")));
    until("the wait is pending", || server.waiting() == 1);
    server.shutdown();
    waiter.ends_closed();
    assert_eq!((server.waiting(), server.connections()), (0, 0));
    let mut next = TcpStoreServer::bind(&address.to_string()).unwrap();
    server.shutdown();

    // A wait that does not end costs the drop all its time. Once is enough without: the machine may have no core just then.
    let drops_at_once = (0..5).any(|_| {
        let again = std::mem::replace(&mut next, self::server());
        let mut waiter = Raw::greeted(&again);
        waiter.say(&format!("06 0100000000000000 {}", text("/k")));
        until("the wait is pending", || again.waiting() == 1);
        let start = Instant::now();
        drop(again);
        let took = start.elapsed();
        waiter.ends_closed();
        took < ANSWERS
    });
    assert!(drops_at_once, "every drop took {ANSWERS:?}");
}
