//! The events of the dashboard: the same verdict as elsewhere, a bounded number of listeners, and nothing for none.

#![allow(clippy::unwrap_used)] // Test code, outside of a #[test].

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use ftcore::Step;

use crate::rig::*;
use oxccl_coordination::{ConnectionLimits, LighthouseConfig, LighthouseServer, Member, Why};
use rustix::net::{AddressFamily, SocketType, sockopt};

/// The most dashboards of a job.
const MOST: usize = 32;

fn page(url: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(socket_of(url)).unwrap();
    stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn metric(url: &str, name: &str) -> u64 {
    let text = page(url, "/metrics");
    let of = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(of).unwrap()
}

/// A dashboard: its head, and a line of its events.
struct Listener(BufReader<TcpStream>);

impl Listener {
    fn open(url: &str) -> (Self, String) {
        let mut stream = TcpStream::connect(socket_of(url)).unwrap();
        stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        write!(stream, "GET /events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut this = Self(BufReader::new(stream));
        let mut head = String::new();
        loop {
            let line = this.line();
            if line.trim().is_empty() {
                return (this, head);
            }
            head += &line;
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    /// The next picture.
    fn picture(&mut self) -> serde_json::Value {
        loop {
            let line = self.line();
            if let Some(data) = line.strip_prefix("data: ") {
                return serde_json::from_str(data).unwrap();
            }
        }
    }
}

#[test]
fn the_events_say_what_oxccl_why_says_and_what_happened() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let (mut listener, head) = Listener::open(&url);
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"),
        "{head}"
    );
    assert_eq!(listener.picture()["status"]["timeline"], serde_json::json!([]));
    let (a, tool) = (client(&lighthouse), client(&lighthouse));
    let call = std::thread::spawn(move || a.quorum(&member("a"), soon()).unwrap());
    until(&tool, "a waits", |s| s.waiting.len() == 1);
    let picture = loop {
        let picture = listener.picture();
        if picture["waiting"] == 1 {
            break picture;
        }
    };
    let told: Why = serde_json::from_value(picture["why"].clone()).unwrap();
    let own = tool.status(soon()).unwrap().explain();
    assert_eq!(
        (told.stuck, told.frees, told.replicas),
        (true, own.frees, own.replicas)
    );
    // Another replica; then both are known, with what they took.
    let b = client(&lighthouse);
    let quorum = b.quorum(&member("b"), soon()).unwrap();
    assert_eq!(call.join().unwrap(), quorum);
    let picture = loop {
        let picture = listener.picture();
        if picture["members"] == 2 {
            break picture;
        }
    };
    let first = &picture["status"]["timeline"][0];
    assert_eq!(
        (&first["what"], &first["joined"]),
        (&"quorum".into(), &serde_json::json!(["a", "b"]))
    );
    let rated: Vec<&str> = picture["throughput"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["replica_id"].as_str().unwrap())
        .collect();
    assert!(rated.contains(&"b"), "{picture}");
}

#[test]
fn nothing_is_made_without_a_listener_and_there_are_so_many_at_most() {
    let lighthouse = lighthouse(1);
    let url = lighthouse.address();
    let tool = client(&lighthouse);
    tool.quorum(&member("a"), soon()).unwrap();
    assert_eq!(metric(&url, "oxccl_lighthouse_events_total"), 0);
    let mut listeners: Vec<Listener> = (0..MOST).map(|_| Listener::open(&url).0).collect();
    for listener in &mut listeners {
        listener.picture();
    }
    assert_eq!(metric(&url, "oxccl_lighthouse_listeners"), MOST as u64);
    let refused = page(&url, "/events");
    assert!(
        refused.starts_with("HTTP/1.1 503") && refused.contains("32 dashboards"),
        "{refused}"
    );
    // What all of them are sent was made once: far fewer pictures than were read.
    for _ in 0..3 {
        listeners.iter_mut().for_each(|l| drop(l.picture()));
    }
    let made = metric(&url, "oxccl_lighthouse_events_total");
    assert!(
        made < 2 * MOST as u64,
        "{made} pictures for {MOST} listeners that read 4 each"
    );
    drop(listeners);
    let is = |name: &str, value: u64| {
        let until = soon();
        while metric(&url, name) != value {
            assert!(std::time::Instant::now() < until, "{name} is never {value}");
        }
    };
    is("oxccl_lighthouse_listeners", 0);
    // One more may be under way; then none comes any more, whatever happens, for longer than from one to the next.
    let (until, mut step) = (soon(), 0);
    loop {
        let made = metric(&url, "oxccl_lighthouse_events_total");
        let since = std::time::Instant::now();
        while since.elapsed() < Duration::from_millis(2500) {
            step += 1;
            let failed = Member {
                step: Step(step),
                commit_failures: 1,
                ..member("a")
            };
            tool.quorum(&failed, soon()).unwrap();
            std::thread::park_timeout(Duration::from_millis(100));
        }
        if metric(&url, "oxccl_lighthouse_events_total") == made {
            break;
        }
        assert!(
            std::time::Instant::now() < until,
            "pictures are made for no listener"
        );
    }
    // And it begins again with a picture of now.
    let (mut again, _) = Listener::open(&url);
    assert_eq!(again.picture()["status"]["participants"][0]["step"], step);
}

#[test]
fn a_listener_that_does_not_read_is_disconnected_and_holds_up_no_other() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(100),
        limits: ConnectionLimits {
            unread: Duration::from_secs(1),
            ..ConnectionLimits::lighthouse()
        },
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    // Many members with long texts make large pictures: more than the kernels hold for one that does not read.
    let tool = client(&lighthouse);
    std::thread::scope(|scope| {
        for i in 0..100 {
            let member = Member {
                address: format!("http://{}:1", "x".repeat(250)),
                ..member(&format!("r{i}-{}", "y".repeat(240)))
            };
            let client = &tool;
            scope.spawn(move || client.quorum(&member, soon()).unwrap());
        }
    });
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    // What its kernel takes in for it is little.
    sockopt::set_socket_recv_buffer_size(&socket, 2048).unwrap();
    rustix::net::connect(&socket, &socket_of(&url)).unwrap();
    let mut sleeper = TcpStream::from(socket);
    write!(sleeper, "GET /events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let (mut reader, _) = Listener::open(&url);
    let until = soon();
    while metric(&url, "oxccl_lighthouse_listeners") == 2 {
        reader.picture();
        assert!(std::time::Instant::now() < until, "it is never disconnected");
    }
    assert_eq!(metric(&url, "oxccl_lighthouse_listeners"), 1);
    assert_eq!(reader.picture()["members"], 100);
}
