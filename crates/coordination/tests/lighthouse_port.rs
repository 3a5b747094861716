//! The lighthouse's port, seen from outside: direct clients, pages, strangers and bad bytes.

#![allow(clippy::unwrap_used)] // Test code, outside of a #[test].

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::rig::*;
use ftcore::{Epoch, ErrorKind, Step};
use oxccl_coordination::{LighthouseClient, LighthouseConfig, LighthouseServer, ManagerServer, Member};

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

#[test]
fn l24_a_direct_call_that_timed_out_leaves_nothing_and_says_why() {
    let lighthouse = lighthouse(2);
    let tool = client(&lighthouse);
    timed_out_saying("min_replicas is 2", |deadline| {
        tool.quorum(&member("ghost"), deadline).unwrap_err()
    });
    until(&tool, "the ghost stops waiting", |s| s.waiting.is_empty());
    tool.leave("ghost", "test", soon()).unwrap();
    let (a, b) = (client(&lighthouse), client(&lighthouse));
    let other = std::thread::spawn(move || b.quorum(&member("b"), soon()).unwrap());
    let quorum = a.quorum(&member("a"), soon()).unwrap();
    assert_eq!(quorum.ids().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(other.join().unwrap(), quorum);
}

#[test]
fn l24_a_call_whose_connection_broke_is_withdrawn() {
    let lighthouse = lighthouse(2);
    let tool = client(&lighthouse);
    let line = Proxy::to(&lighthouse.address());
    let cut_off = LighthouseClient::connect(&line.url, soon()).unwrap();
    let call = std::thread::spawn(move || cut_off.quorum(&member("ghost"), soon()));
    until(&tool, "the ghost waits", |s| s.waiting.len() == 1);
    line.cut();
    until(&tool, "the ghost's call is withdrawn", |s| s.waiting.is_empty());
    assert_eq!(call.join().unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn l25_heartbeats_and_streams_of_replicas_that_never_asked_hold_up_no_running_job() {
    let lighthouse = lighthouse(1);
    let tool = client(&lighthouse);
    let ask = || {
        let quorum = tool.quorum(&member("a"), soon()).unwrap();
        quorum.ids().map(str::to_string).collect::<Vec<_>>()
    };
    assert_eq!(ask(), ["a"]);
    for stranger in ["x", "y", "z"] {
        tool.heartbeat(stranger, soon()).unwrap();
    }
    let _loading = ManagerServer::start(manager_config("loading:1", &lighthouse.address(), 1)).unwrap();
    until(&tool, "the loading one attaches", |s| s.attached == ["loading:1"]);
    let start = Instant::now();
    assert_eq!(ask(), ["a"]);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "the join time-out is 20 s"
    );
    let healthy = tool.status(soon()).unwrap().healthy;
    let healthy: Vec<_> = healthy.into_iter().map(|h| h.replica_id).collect();
    assert_eq!(healthy, ["a"]);
}

#[test]
fn a_waiting_direct_call_stays_healthy_longer_than_the_heartbeat_timeout() {
    let timeout = Duration::from_secs(2);
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        heartbeat_timeout: timeout,
        ..config(2)
    })
    .unwrap();
    let (a, b, tool) = (client(&lighthouse), client(&lighthouse), client(&lighthouse));
    let early = std::thread::spawn(move || a.quorum(&member("a"), soon()).unwrap());
    until(&tool, "a has waited for longer than the time-out", |s| {
        s.waiting.iter().any(|w| w.waiting_ms > 2500) && s.healthy.len() == 1
    });
    assert_eq!(b.quorum(&member("b"), soon()).unwrap(), early.join().unwrap());
}

#[test]
fn an_unusable_member_is_refused_with_a_reason() {
    let lighthouse = lighthouse(1);
    let tool = client(&lighthouse);
    let long = "x".repeat(300);
    let big = "x".repeat(2 << 20);
    for (member, text) in [
        (member(""), "1 to 256 bytes"),
        (member(&long), "replica_id has 300 bytes"),
        (
            Member {
                data: big,
                ..member("a")
            },
            "",
        ),
        (
            Member {
                last_quorum_id: Epoch::of_signed(-4),
                ..member("a")
            },
            "impossible quorum id -4",
        ),
        (
            Member {
                address: String::new(),
                step: Step(1 << 40),
                ..member("a")
            },
            "replica a: address is '', and should be",
        ),
    ] {
        let error = tool.quorum(&member, soon()).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_ne!(error.kind(), ErrorKind::Timeout, "{error}");
    }
    assert_eq!(tool.status(soon()).unwrap().healthy, []);
}

#[test]
fn the_pages_show_the_quorum_and_need_no_network() {
    let lighthouse = lighthouse(1);
    let tool = client(&lighthouse);
    let quorum = tool
        .quorum(
            &Member {
                step: Step(3),
                ..member("<b>a</b>")
            },
            soon(),
        )
        .unwrap();
    let status = tool.status(soon()).unwrap();
    assert_eq!(status.quorum_id, quorum.quorum_id.signed());
    assert_eq!(
        (
            status.participants[0].replica_id.as_str(),
            status.participants[0].step
        ),
        ("<b>a</b>", 3)
    );
    assert_eq!(status.reason, "no replica is asking for a quorum");
    let html = page(&lighthouse.address(), "/");
    assert!(
        html.starts_with("HTTP/1.1 200") && html.contains("oxccl lighthouse"),
        "{html}"
    );
    assert!(
        !html.contains("http://") && !html.contains("https://"),
        "nothing is loaded from elsewhere"
    );
    assert!(
        !html.contains("innerHTML"),
        "ids from the network are never markup"
    );
    let metrics = page(&lighthouse.address(), "/metrics");
    for line in [
        format!("oxccl_lighthouse_quorum_id {}", quorum.quorum_id),
        "oxccl_lighthouse_quorums_total 1".into(),
        "oxccl_lighthouse_participants 1".into(),
        "oxccl_lighthouse_spare_replicas 0".into(),
        "oxccl_lighthouse_evicted_replicas 0".into(),
        "# TYPE oxccl_lighthouse_joins_total counter".into(),
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in {metrics}");
    }
    assert!(
        page(&lighthouse.address(), "/replica/a/kill").starts_with("HTTP/1.1 404"),
        "l38"
    );
}

#[test]
fn bad_bytes_on_the_port_change_nothing() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let with = |tail: &[u8]| [preface.clone(), tail.to_vec()].concat();
    let mut noise = 0x9E37_79B9_7F4A_7C15u64;
    let random: Vec<u8> = (0..8192)
        .map(|_| {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            noise.to_le_bytes()[0]
        })
        .collect();
    for bytes in [
        Vec::new(),
        b"\0".to_vec(),
        random.clone(),
        preface[..10].to_vec(),
        with(&[0xff; 64]),
        with(&random),
        // A frame that announces 16 MiB.
        with(&[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]),
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n".to_vec(),
        [b"GET / HTTP/1.1\r\nA: ".to_vec(), vec![b'x'; 200_000]].concat(),
        b"POST /torchft.LighthouseService/Quorum HTTP/1.1\r\nHost: x\r\nContent-Type: application/grpc\r\nContent-Length: 5\r\n\r\n\0\xff\xff\xff\xff".to_vec(),
    ] {
        for url in [&url, &a.server.address()] {
            let mut stream = TcpStream::connect(socket_of(url)).unwrap();
            // The server may close early; that is its answer.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
            let mut answer = Vec::new();
            let closed = stream.read_to_end(&mut answer);
            assert!(closed.is_ok() || closed.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset));
        }
    }
    let again = quorum(&mut [&mut a, &mut b], 1);
    assert_eq!((again[0].quorum_id, again[0].replica_world_size), (epoch, 2));
}

#[test]
fn an_address_in_use_and_a_lighthouse_that_is_not_there_are_said_so() {
    let lighthouse = lighthouse(1);
    let taken = socket_of(&lighthouse.address()).to_string();
    let error = LighthouseServer::start(LighthouseConfig {
        bind: taken.clone(),
        ..config(1)
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.to_string().contains(&taken), "{error}");
    let url = lighthouse.address();
    lighthouse.shutdown(soon()).unwrap();
    let mut lost = manager_config("a:1", &url, 1);
    lost.connect_timeout = Duration::from_millis(400);
    let start = Instant::now();
    let error = ManagerServer::start(lost).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for part in [
        url.as_str(),
        " within ",
        "is the lighthouse running? start it with `oxccl lighthouse`",
    ] {
        assert!(error.to_string().contains(part), "{part} is not in {error}");
    }
    assert!(start.elapsed() < Duration::from_secs(10));
    for bad in [
        "",
        "127.0.0.1:1",
        "ftp://h:1",
        "https://x:1",
        "http://",
        "http://h",
        "http://h:port",
        "http://:1",
        "http://h:1/x",
    ] {
        for list in [bad.to_owned(), format!("http://127.0.0.1:9,{bad}")] {
            let error =
                LighthouseClient::connect(&list, Instant::now() + Duration::from_millis(300)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{list}: {error}");
        }
    }
    let zero = LighthouseServer::start(LighthouseConfig {
        min_replicas: 0,
        ..config(1)
    })
    .unwrap_err();
    assert_eq!(zero.kind(), ErrorKind::InvalidArgument);
    let few = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(1),
        ..config(2)
    })
    .unwrap_err();
    assert_eq!(few.kind(), ErrorKind::InvalidArgument);
    assert!(few.to_string().contains("initial_replicas is 1"), "{few}");
}

#[test]
fn a_shut_down_lighthouse_serves_nobody_any_more() {
    let lighthouse = lighthouse(2);
    let tool = client(&lighthouse);
    let waiting = client(&lighthouse);
    let call = std::thread::spawn(move || waiting.quorum(&member("a"), soon()));
    until(&tool, "a waits", |s| s.waiting.len() == 1);
    lighthouse.shutdown(soon()).unwrap();
    assert_eq!(call.join().unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(
        tool.heartbeat("a", soon()).unwrap_err().kind(),
        ErrorKind::Unavailable
    );
}

#[test]
fn a_wait_of_hundreds_of_replicas_is_told_in_an_error_that_arrives() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(500),
        ..config(1)
    })
    .unwrap();
    let tool = client(&lighthouse);
    let clients: Vec<_> = (0..10).map(|_| client(&lighthouse)).collect();
    std::thread::scope(|scope| {
        for i in 0..320 {
            let client = clients[i % clients.len()].clone();
            let id = format!("replica-{i:03}-{}", "x".repeat(50));
            scope.spawn(move || client.quorum(&member(&id), soon()));
        }
        until(&tool, "all wait", |s| s.waiting.len() == 320);
        timed_out_saying(", and 305 more", |deadline| {
            tool.quorum(&member("last"), deadline).unwrap_err()
        });
        lighthouse.shutdown(soon()).unwrap();
    });
}

#[test]
fn a_replica_that_its_servers_give_up_is_out_at_once_and_the_others_are_told_why() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let url = lighthouse.address();
    let (mut a, mut b) = (Replica::start("a:1", &url), Replica::start("b:1", &url));
    let epoch = quorum(&mut [&mut a, &mut b], 0)[0].quorum_id;
    let tool = client(&lighthouse);
    tool.failed("b:1", "rank 1 died", soon()).unwrap();
    for told in [&a, &b] {
        let (reason, departed) = told.abort_of(epoch);
        assert_eq!(departed, ["b:1"]);
        assert!(reason.contains("rank 1 died"), "{reason}");
    }
    // Its server lives and sends heartbeats; the time-outs are 20 and 30 s.
    let start = Instant::now();
    assert_eq!(quorum(&mut [&mut a], 0)[0].replica_ids, ["a:1"]);
    assert!(start.elapsed() < Duration::from_secs(10));
    // Its ranks are back: it waits for the others' next step, and is taken in.
    let back = std::thread::spawn(move || quorum(&mut [&mut b], 0));
    until(&tool, "b waits", |s| {
        s.waiting.iter().any(|w| w.replica_id == "b:1")
    });
    assert_eq!(quorum(&mut [&mut a], 0)[0].replica_ids, ["a:1", "b:1"]);
    assert_eq!(back.join().unwrap()[0].replica_ids, ["a:1", "b:1"]);
}
