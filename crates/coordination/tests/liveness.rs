//! How the lighthouse knows that a replica lives: by its stream, by its connections, and by heartbeats only where it has no stream.

#![allow(clippy::unwrap_used)] // Test code, outside of a #[test].

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::rig::*;
use oxccl_coordination::{LighthouseClient, LighthouseConfig, LighthouseServer, LighthouseStatus};
use rustix::process::{Pid, Signal, kill_process};

/// Names the lighthouse for [`a_process_of_a_replica`].
const LIGHTHOUSE: &str = "OXCCL_TEST_LIGHTHOUSE";
/// Long before the heartbeat time-out of 30 s that the rig sets.
const LONG_BEFORE: Duration = Duration::from_secs(15);

fn is_healthy(status: &LighthouseStatus, id: &str) -> bool {
    status.healthy.iter().any(|h| h.replica_id == id)
}

fn heartbeats(lighthouse: &LighthouseServer) -> u64 {
    let mut stream = TcpStream::connect(socket_of(&lighthouse.address())).unwrap();
    stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix("oxccl_lighthouse_heartbeats_total "));
    line.unwrap().trim().parse().unwrap()
}

/// Members of one quorum that have no streams, and whose clients stay.
fn quorum_of_clients(clients: &[(&str, LighthouseClient)]) {
    let calls: Vec<_> = clients
        .iter()
        .map(|(id, client)| {
            let (client, member) = (client.clone(), member(id));
            std::thread::spawn(move || client.quorum(&member, soon()).unwrap())
        })
        .collect();
    for call in calls {
        assert_eq!(call.join().unwrap().participants.len(), clients.len());
    }
}

#[test]
fn a_client_without_a_stream_is_gone_soon_after_all_its_connections_broke() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(3),
        ..config(1)
    })
    .unwrap();
    let line = Proxy::to(&lighthouse.address());
    let through = || LighthouseClient::connect(&line.url, soon()).unwrap();
    let (first, second) = (through(), client(&lighthouse));
    let clients = [("a", client(&lighthouse)), ("b", through()), ("c", first)];
    quorum_of_clients(&clients);
    // c has another connection, b has none.
    second.heartbeat("c", soon()).unwrap();
    let cut = Instant::now();
    line.cut();
    let tool = client(&lighthouse);
    let status = until(&tool, "b is gone", |s| !is_healthy(s, "b"));
    assert!(cut.elapsed() < LONG_BEFORE, "{:?}", cut.elapsed());
    assert!(is_healthy(&status, "c"), "{status:?}");
    assert!(
        status
            .aborted
            .is_some_and(|why| why.contains("b is gone: its connections broke")),
        "its epoch is over"
    );
}

#[test]
fn a_replica_with_an_open_stream_sends_no_heartbeats_and_outlives_one_that_is_silent() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        heartbeat_timeout: Duration::from_secs(2),
        ..config(1)
    })
    .unwrap();
    let tool = client(&lighthouse);
    let mut replica = Replica::start("a:1", &lighthouse.address());
    until(&tool, "a attaches", |s| s.attached == ["a:1"]);
    let silent = client(&lighthouse);
    let call = {
        let silent = silent.clone();
        std::thread::spawn(move || silent.quorum(&member("silent"), soon()).unwrap())
    };
    quorum(&mut [&mut replica], 0);
    call.join().unwrap();
    let before = heartbeats(&lighthouse);
    let status = until(&tool, "the silent one is gone", |s| !is_healthy(s, "silent"));
    assert!(is_healthy(&status, "a:1"), "{status:?}");
    // One of the silent one's may have been on its way. With a heartbeat each 100 ms there would be twenty.
    let after = heartbeats(&lighthouse);
    assert!(after - before <= 2, "{before} heartbeats, then {after}");
}

/// Not a test: the process of a replica, which another test starts, stops and kills.
#[test]
#[ignore = "a process for another test"]
fn a_process_of_a_replica() {
    let Ok(url) = std::env::var(LIGHTHOUSE) else {
        return;
    };
    let mut replica = Replica::start("b:1", &url);
    quorum(&mut [&mut replica], 0);
    // Until the parent closes it.
    let _ = std::io::stdin().read(&mut [0]);
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_stopped_process_with_an_open_stream_is_found_after_the_heartbeat_timeout() {
    let heartbeat_timeout = Duration::from_secs(5);
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        heartbeat_timeout,
        ..config(1)
    })
    .unwrap();
    let mut a = Replica::start("a:1", &lighthouse.address());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "liveness::a_process_of_a_replica", "--ignored"])
        .env(LIGHTHOUSE, lighthouse.address())
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let process = Process(command.spawn().unwrap());
    let epoch = quorum(&mut [&mut a], 0)[0].quorum_id;
    let tool = client(&lighthouse);
    until(&tool, "b is attached", |s| s.attached.len() == 2);
    let stopped = Instant::now();
    kill_process(Pid::from_child(&process.0), Signal::STOP).unwrap();
    assert_eq!(a.abort_of(epoch).1, ["b:1"]);
    assert!(
        stopped.elapsed() < heartbeat_timeout * 2,
        "{:?}",
        stopped.elapsed()
    );
    assert_eq!(quorum(&mut [&mut a], 0)[0].replica_ids, ["a:1"]);
}
