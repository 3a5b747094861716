//! Servers that are not there, go away, come back or never answer: what the client makes of it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use super::super::link::{Link, TimeLimit};
use super::*;

#[test]
fn a_server_that_never_answers_costs_a_call_its_deadline_and_no_more() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let start = Instant::now();
    let e = TcpStore::connect(&address, millis(300)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    assert!(
        e.to_string().contains(&address) && e.to_string().contains("greeting"),
        "{e}"
    );
    assert!(
        (300..10_000).contains(&start.elapsed().as_millis()),
        "{:?}",
        start.elapsed()
    );

    let silence = |said: &str| (said.to_owned(), Some(String::new()));
    let wait = format!("06 0100000000000000 {}", text("/k"));
    for script in [vec![silence("07")], vec![silence(&wait), silence("0c")]] {
        let waits = script.len() == 2;
        let (address, thread) = scripted(script);
        let s = TcpStore::connect(&address, soon()).unwrap();
        let start = Instant::now();
        let out = if waits {
            s.wait(&["k"], millis(200))
        } else {
            s.num_keys(millis(200)).map(drop)
        };
        assert_eq!(out.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(
            (200..1200).contains(&start.elapsed().as_millis()),
            "{:?}",
            start.elapsed()
        );
        thread.join().unwrap();
    }
}

#[test]
fn calls_in_short_slices_get_through_to_a_server_that_greets_late() {
    let server = server();
    let near = client(&server);
    // Only the greeting of each connection is answered late.
    let greets_late = |nth| Duration::from_millis(if nth == 0 { 300 } else { 0 });
    let (address, _) = far(&server, greets_late);
    let store = TcpStore::connect(&address, soon()).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| store.wait(&["later"], soon()));
        until("the first connection is in use", || server.waiting() == 1);
        let until = soon();
        let mut late = 0;
        // An answer needs next to nothing of a slice, a greeting several.
        while let Err(e) = store.check(&["k"], millis(100)) {
            assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
            late += 1;
            if Instant::now() > until {
                break;
            }
        }
        near.set("later", b"", soon()).unwrap();
        waits.join().unwrap().unwrap();
        assert!(Instant::now() < until && late > 0, "{late} calls were late");
    });
}

#[test]
fn a_greeting_that_takes_longer_than_a_call_is_waited_for_by_the_next() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let store = thread::scope(|scope| {
        let connecting = scope.spawn(|| TcpStore::connect(&address, soon()).unwrap());
        let (mut first, _) = listener.accept().unwrap();
        let mut greeting = [0; 10];
        first.read_exact(&mut greeting).unwrap();
        first.write_all(&greeting[6..]).unwrap();
        connecting.join().unwrap()
    });
    // The first connection is closed. The next one is not answered.
    for _ in 0..3 {
        let e = store.num_keys(millis(50)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(e.to_string().contains("greeting"), "{e}");
    }
    let second = listener.accept().unwrap();
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "a third connection");
    // It is closed without an answer, and no other server is there.
    drop((second, listener));
    let e = store.num_keys(millis(300)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
}

#[test]
fn an_unreachable_server_is_named_with_the_time_waited() {
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let start = Instant::now();
    let e = TcpStore::connect(&free, millis(300)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
    let message = e.to_string();
    assert!(
        message.contains(&free) && message.contains("in 0.3 s"),
        "{message}"
    );
    assert!(
        (300..10_000).contains(&start.elapsed().as_millis()),
        "{:?}",
        start.elapsed()
    );
    for malformed in ["", "host", ":1", "host:0", "host:99999", "::1:80", "host:port"] {
        let e = TcpStore::connect(malformed, soon()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{malformed}");
    }
}

#[test]
fn connect_waits_for_a_server_that_comes_up_later() {
    let early = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = early.local_addr().unwrap().to_string();
    let for_thread = address.clone();
    let thread = thread::spawn(move || TcpStore::connect(&for_thread, soon()));
    // The first attempt meets a server that hangs up, some later ones none.
    drop(early.accept().unwrap());
    drop(early);
    let _server = TcpStoreServer::bind(&address).unwrap();
    let store = thread.join().unwrap().unwrap();
    store.set("k", b"v", soon()).unwrap();
}

#[test]
fn a_host_name_and_ipv6_brackets_are_addresses_too() {
    let server = server();
    let store = TcpStore::connect(&format!("localhost:{}", server.port()), soon()).unwrap();
    assert_eq!(store.num_keys(soon()).unwrap(), 0);
    // Not every machine has IPv6.
    if let Ok(server) = TcpStoreServer::bind("[::1]:0") {
        TcpStore::connect(&format!("[::1]:{}", server.port()), soon())
            .unwrap()
            .num_keys(soon())
            .unwrap();
    }
}

#[test]
fn what_is_not_a_store_server_is_a_protocol_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let thread = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        stream
    });
    let e = TcpStore::connect(&address, soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
    thread.join().unwrap();
}

#[test]
fn both_ends_of_a_connection_find_out_that_the_machine_of_the_other_is_gone() {
    let server = server();
    let client = Link::begin(&server.local_addr(), TimeLimit::Until(soon())).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    for link in [client, Link::new(accepted, TimeLimit::Forever).unwrap()] {
        let socket: &TcpStream = link.socket();
        assert!(rustix::net::sockopt::socket_keepalive(socket).unwrap());
    }
}

#[test]
fn an_idle_connection_that_broke_is_replaced() {
    let first = server();
    let store = client(&first);
    store.set("k", b"1", soon()).unwrap();
    let address = first.local_addr().to_string();
    first.shutdown();
    let second = TcpStoreServer::bind(&address).unwrap();
    assert_eq!(store.add("n", 1, soon()).unwrap(), 1);
    assert!(!store.check(&["k"], soon()).unwrap());
    second.shutdown();
    let start = Instant::now();
    let e = store.get("k", millis(300)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    assert!(
        (300..1500).contains(&start.elapsed().as_millis()),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_wait_is_made_again_when_its_server_comes_back() {
    let first = server();
    let address = first.local_addr().to_string();
    let store = client(&first);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("k", soon()));
        until("the wait is pending", || first.waiting() == 1);
        first.shutdown();
        let second = TcpStoreServer::bind(&address).unwrap();
        client(&second).set("k", b"v", soon()).unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"v");
    });
}

#[test]
fn an_add_whose_connection_broke_is_not_made_twice() {
    let (address, thread) = scripted(vec![(format!("04 {} 0100000000000000", text("/n")), None)]);
    let store = TcpStore::connect(&address, soon()).unwrap();
    let e = store.add("n", 1, millis(500)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    assert!(e.to_string().contains("may have been done"), "{e}");
    thread.join().unwrap();
}

#[test]
fn requests_that_have_come_are_answered_although_the_server_ends_at_once() {
    const PINGS: usize = 5000;
    let server = server();
    let first = client(&server);
    let mut last = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    let set = format!("01 {} {}", text("/done"), text("1"));
    let pings = "0d 05060708".repeat(PINGS);
    last.write_all(&hex(&format!("{HELLO} {set} {pings}"))).unwrap();
    first.wait(&["done"], soon()).unwrap();
    drop(server);
    let mut answers = Vec::new();
    last.read_to_end(&mut answers).unwrap();
    assert_eq!(answers.len(), 4 * (1 + PINGS));
}
