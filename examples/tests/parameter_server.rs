//! The parameter server as a user runs it: workers that come, go and die.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use ftcore::{Store, TcpStore};

const PROGRAM: &str = env!("CARGO_BIN_EXE_parameter_server");

/// Ended with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A new server, and its address.
fn server() -> (Server, String) {
    let server = Command::new(PROGRAM)
        .arg("serve")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut server = Server(server);
    let mut address = String::new();
    BufReader::new(server.0.stdout.take().unwrap())
        .read_line(&mut address)
        .unwrap();
    (server, address.trim().to_owned())
}

fn worker(address: &str, steps: &str) -> Command {
    let mut worker = Command::new(PROGRAM);
    worker.args(["work", address, steps]);
    worker
}

#[test]
fn workers_come_and_go_and_one_that_dies_costs_neither_the_server_nor_the_others_anything() {
    let (mut server, address) = server();
    let address = address.as_str();
    let mut said = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let mut ends = || said.next().unwrap().unwrap();
    // Long enough for the others to come and go beside it.
    let mut dies = worker(address, "1000000000").spawn().unwrap();
    let beside = worker(address, "50").output().unwrap();
    assert!(beside.status.success(), "{beside:?}");
    assert!(ends().contains("ends: Err("), "the worker has left");
    dies.kill().unwrap();
    dies.wait().unwrap();
    assert!(ends().contains("ends: Err("));
    let last = worker(address, "100").output().unwrap();
    assert!(last.status.success(), "{last:?}");
    let text = String::from_utf8(last.stdout).unwrap();
    let value: f32 = text.trim().strip_prefix("session 3: ").unwrap().parse().unwrap();
    assert!((value - 3.0).abs() < 0.1, "what all of them trained: {text}");
    assert!(server.0.try_wait().unwrap().is_none());
}

#[test]
fn a_worker_that_dies_as_soon_as_it_has_a_number_stops_none_that_come_behind_it() {
    let (_server, address) = server();
    let soon = ftcore::deadline_in(std::time::Duration::from_secs(30));
    let store = TcpStore::connect(&address, soon).unwrap();
    assert_eq!(store.add("workers", 1, soon).unwrap(), 1);
    let next = worker(&address, "10").output().unwrap();
    assert!(next.status.success(), "{next:?}");
    assert!(next.stdout.starts_with(b"session 2: "), "{next:?}");
}
