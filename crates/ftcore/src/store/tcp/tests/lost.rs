//! Servers that are not there, go away, come back or never answer: what the client makes of it.

use std::io::Write;
use std::net::TcpListener;
use std::thread;
use std::time::Instant;

use super::*;

#[test]
fn a_server_that_never_answers_costs_a_call_its_deadline_and_no_more() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let start = Instant::now();
    let e = TcpStore::connect(&address, millis(300)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
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
    // The first attempt meets a server that hangs up, some later ones nobody.
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
