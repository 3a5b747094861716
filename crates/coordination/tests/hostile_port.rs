//! Strangers on the ports of a real lighthouse and a real manager server. Each holds on to its connection as well as it can; honest clients
//! are answered meanwhile, and the stranger is gone within the stated time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ftcore::Epoch;
use oxccl_coordination::{
    ConnectionLimits, LighthouseClient, LighthouseConfig, LighthouseServer, ManagerClient, ManagerServer,
    ManagerServerConfig,
};

use frames::{HEARTBEAT, PREFACE, SETTINGS, frame, greeting, owed, post};

#[path = "rig/frames.rs"]
mod frames;

/// Only a connection that is held for ever gets there.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// An honest call is answered long before this, however busy the machine is.
const HONEST: Duration = Duration::from_secs(10);

fn limits() -> ConnectionLimits {
    ConnectionLimits {
        greeting: Duration::from_millis(500),
        idle: Duration::from_secs(1),
        unread: Duration::from_millis(700),
        ..ConnectionLimits::lighthouse()
    }
}

/// Time-outs that no test reaches, except those that it sets.
fn patient() -> ConnectionLimits {
    ConnectionLimits {
        greeting: TIME_LIMIT * 10,
        idle: TIME_LIMIT * 10,
        unread: TIME_LIMIT * 2,
        ..ConnectionLimits::lighthouse()
    }
}

struct Ports {
    lighthouse: LighthouseServer,
    manager: ManagerServer,
}

impl Ports {
    fn open(limits: &ConnectionLimits) -> Self {
        let lighthouse = LighthouseServer::start(LighthouseConfig {
            bind: "127.0.0.1:0".into(),
            limits: limits.clone(),
            ..LighthouseConfig::default()
        })
        .unwrap();
        let manager = ManagerServer::start(ManagerServerConfig {
            replica_id: "honest:1".into(),
            lighthouse: lighthouse.address(),
            limits: limits.clone(),
            ..ManagerServerConfig::default()
        })
        .unwrap();
        Self { lighthouse, manager }
    }

    fn addresses(&self) -> [SocketAddr; 2] {
        [self.lighthouse.address(), self.manager.address()]
            .map(|url| url.strip_prefix("http://").unwrap().parse().unwrap())
    }

    /// New clients come, and are answered.
    fn serve_honest_clients(&self) {
        let deadline = Instant::now() + HONEST;
        let lighthouse = LighthouseClient::connect(&self.lighthouse.address(), deadline).unwrap();
        lighthouse.heartbeat("stranger:1", deadline).unwrap();
        lighthouse.status(deadline).unwrap();
        let manager = ManagerClient::connect(&self.manager.address(), deadline).unwrap();
        manager
            .report(Epoch(0), "a report of an epoch that never was", deadline)
            .unwrap();
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    stream
}

fn is_pause(e: &std::io::Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// Reads what there is; false once the server has closed the connection.
fn is_open(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 4096]) {
        Ok(0) => false,
        Ok(_) => true,
        Err(e) => is_pause(&e),
    }
}

/// Waits for the end of the connection, saying `more` again and again meanwhile.
fn is_let_go(stream: &mut TcpStream, more: &[u8]) -> bool {
    let end = Instant::now() + TIME_LIMIT;
    while Instant::now() < end {
        if !is_open(stream) {
            return true;
        }
        match stream.write(more) {
            Err(e) if !is_pause(&e) => return true,
            _ => {}
        }
    }
    false
}

#[test]
fn who_does_not_finish_its_greeting_is_gone_however_far_it_came_and_whatever_it_adds() {
    let ports = Ports::open(&ConnectionLimits {
        greeting: limits().greeting,
        ..patient()
    });
    let whole = greeting(&[0; 6]);
    for address in ports.addresses() {
        let beginnings: [(&[u8], &[u8]); 7] = [
            (b"", b""),
            (b"P", b""),
            (b"G", b""),
            (&PREFACE[..12], b""),
            (PREFACE, b""),
            (&whole[..whole.len() - 1], b""),
            // A header that never ends.
            (b"GET /status HTTP/1.1\r\nHost: x\r\nX: ", b"x"),
        ];
        let mut strangers: Vec<_> = beginnings
            .iter()
            .map(|(beginning, more)| {
                let mut stream = connect(address);
                stream.write_all(beginning).unwrap();
                (stream, beginning, more)
            })
            .collect();
        ports.serve_honest_clients();
        for (stream, beginning, more) in &mut strangers {
            assert!(
                is_let_go(stream, more),
                "{:?} holds its connection",
                String::from_utf8_lossy(beginning)
            );
        }
    }
}

#[test]
fn a_thousand_connections_without_a_request_are_in_nobodys_way_and_are_closed_in_time() {
    let ports = Ports::open(&ConnectionLimits {
        idle: limits().idle,
        ..patient()
    });
    for address in ports.addresses() {
        let mut strangers: Vec<TcpStream> = (0..1000)
            .map(|n| {
                let mut stream = connect(address);
                match n % 2 {
                    0 => stream.write_all(&greeting(&[])).unwrap(),
                    // One request, and then nothing.
                    _ => stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap(),
                }
                stream
            })
            .collect();
        ports.serve_honest_clients();
        let end = Instant::now() + TIME_LIMIT;
        while !strangers.is_empty() {
            assert!(Instant::now() < end, "{} connections are held", strangers.len());
            strangers.retain_mut(|s| {
                s.set_nonblocking(true).unwrap();
                is_open(s)
            });
            std::thread::yield_now();
        }
        // The stream to the lighthouse is an open request: the manager server is not taken for idle.
        ports.serve_honest_clients();
    }
}

#[test]
fn a_request_that_is_never_whole_is_ended_and_its_connection_with_it() {
    let ports = Ports::open(&ConnectionLimits {
        greeting: limits().greeting,
        idle: limits().idle,
        ..patient()
    });
    for address in ports.addresses() {
        let mut stream = connect(address);
        let path = match address == ports.addresses()[0] {
            true => HEARTBEAT,
            false => "/torchft.ManagerService/ShouldCommit",
        };
        let request = [
            greeting(&[]),
            frame(1, 4, 1, &post(path)),
            // A message of 1000 bytes is announced, and one comes.
            frame(0, 0, 1, &[0, 0, 0, 3, 0xe8, 7]),
        ]
        .concat();
        stream.write_all(&request).unwrap();
        ports.serve_honest_clients();
        // It answers pings all the while, so that nothing but the request is at fault.
        let mut buffer = Vec::new();
        let end = Instant::now() + TIME_LIMIT;
        let gone = loop {
            if Instant::now() >= end {
                break false;
            }
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes) {
                Ok(0) => break true,
                Ok(n) => buffer.extend_from_slice(&bytes[..n]),
                Err(e) if is_pause(&e) => continue,
                Err(_) => break true,
            }
            if stream.write_all(&owed(&mut buffer)).is_err() {
                break true;
            }
        };
        assert!(gone, "half a request holds its connection");
    }
}

#[test]
fn who_takes_nothing_of_its_answers_is_gone_although_it_answers_pings() {
    let ports = Ports::open(&ConnectionLimits {
        unread: limits().unread,
        ..patient()
    });
    let address = ports.addresses()[0];
    let mut stream = connect(address);
    // A window of 0 for every stream; then requests whose answers do not fit.
    let no_window = [0, 4, 0, 0, 0, 0];
    stream.write_all(&greeting(&no_window)).unwrap();
    for n in 0..50u32 {
        let id = 2 * n + 1;
        stream.write_all(&frame(1, 4, id, &post(HEARTBEAT))).unwrap();
        // An empty message.
        stream.write_all(&frame(0, 1, id, &[0; 5])).unwrap();
    }
    ports.serve_honest_clients();
    let mut buffer = Vec::new();
    let end = Instant::now() + TIME_LIMIT;
    let gone = loop {
        if Instant::now() >= end {
            break false;
        }
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) => break true,
            Ok(n) => buffer.extend_from_slice(&bytes[..n]),
            Err(e) if is_pause(&e) => continue,
            Err(_) => break true,
        }
        if stream.write_all(&owed(&mut buffer)).is_err() {
            break true;
        }
    };
    assert!(gone, "answers that are not taken are kept");
}

#[test]
fn who_reads_nothing_at_all_is_gone() {
    let ports = Ports::open(&limits());
    let [lighthouse, _] = ports.addresses();
    // Pages over HTTP/1, one request behind the other; requests over HTTP/2 whose answers fill the socket.
    let pages = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100);
    let mut calls = Vec::new();
    for n in 0..2000u32 {
        calls.extend(frame(6, 0, 0, &n.to_be_bytes().repeat(2)));
    }
    for (beginning, more) in [(Vec::new(), pages), (greeting(&[]), calls)] {
        let mut stream = connect(lighthouse);
        stream.write_all(&beginning).unwrap();
        let end = Instant::now() + TIME_LIMIT;
        let mut gone = false;
        while !gone && Instant::now() < end {
            gone = match stream.write(&more) {
                Err(e) => !is_pause(&e),
                Ok(_) => false,
            };
        }
        assert!(gone, "who never reads keeps its connection");
        ports.serve_honest_clients();
    }
}

#[test]
fn endless_frames_that_ask_for_nothing_end_the_connection_after_a_bounded_number() {
    let ports = Ports::open(&patient());
    let request = post(HEARTBEAT);
    type Next = Box<dyn Fn(u32) -> Vec<u8>>;
    let floods: Vec<(&str, Next)> = vec![
        (
            "settings",
            Box::new(|_| frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9])),
        ),
        ("ping", Box::new(|n| frame(6, 0, 0, &u64::from(n).to_be_bytes()))),
        ("priority", Box::new(|n| frame(2, 0, 2 * n + 1, &[0, 0, 0, 0, 9]))),
        ("unknown", Box::new(|_| frame(0x77, 0, 0, &[]))),
        (
            "requests that are reset at once",
            Box::new(move |n| {
                let id = 2 * n + 1;
                [frame(1, 4, id, &request), frame(3, 0, id, &8u32.to_be_bytes())].concat()
            }),
        ),
    ];
    for address in ports.addresses() {
        for (name, next) in &floods {
            let mut stream = connect(address);
            stream.write_all(&greeting(&[])).unwrap();
            let end = Instant::now() + TIME_LIMIT;
            let mut sent = 0;
            let gone = loop {
                if Instant::now() >= end {
                    break false;
                }
                let many: Vec<u8> = (sent..sent + 100).flat_map(next).collect();
                sent += 100;
                let mut rest = many.as_slice();
                let mut broken = false;
                while !rest.is_empty() && !broken && Instant::now() < end {
                    broken |= !is_open(&mut stream);
                    match stream.write(rest) {
                        Ok(n) => rest = &rest[n..],
                        Err(e) => broken |= !is_pause(&e),
                    }
                }
                if broken {
                    break true;
                }
            };
            assert!(gone, "{name}: {sent} were taken");
            // 4,000 at once and 1,000 a second afterwards, and what the sockets hold.
            assert!(sent < 200_000, "{name}: {sent} were taken");
            ports.serve_honest_clients();
        }
    }
}

#[test]
fn one_address_gets_no_more_than_its_share_of_the_connections() {
    let ports = Ports::open(&ConnectionLimits {
        connections: 40,
        per_address: 30,
        ..patient()
    });
    let [lighthouse, _] = ports.addresses();
    let strangers = (0..50).map(|_| {
        let mut stream = connect(lighthouse);
        stream.write_all(&greeting(&[])).unwrap();
        stream.set_read_timeout(Some(HONEST)).unwrap();
        stream
    });
    let held = strangers.map(|mut s| (is_open(&mut s), s)).collect::<Vec<_>>();
    let open = held.iter().filter(|(open, _)| *open).count();
    // The manager server has one of them.
    assert_eq!(open, 29);
    let from_elsewhere = std::net::Ipv4Addr::new(127, 0, 0, 2);
    let mut other = connect_from(from_elsewhere, lighthouse);
    other
        .write_all(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    other.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

fn connect_from(from: std::net::Ipv4Addr, to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((from, 0))).unwrap();
    connect(&socket, &to).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(HONEST)).unwrap();
    stream
}
