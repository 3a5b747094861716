//! Sources that are processes of their own, and one of them is killed with SIGKILL while it sends.
//!
//! The child is this test program once more, started for the one test that serves when it is told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{Epoch, ErrorKind, Step};
use oxccl_checkpoint::{CheckpointSource, Fetch, FetchOptions, HttpTransport, Kept, Snapshot};

use crate::fake_source::state;

const ROLE: &str = "OXCCL_TEST_HEALING_ROLE";
const LONG: Duration = Duration::from_secs(120);
/// 16 MiB.
const KIB: usize = 16 << 10;

/// Serves until its parent closes the pipe. Does nothing in an ordinary run of the tests.
#[test]
fn child_that_serves() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    server.publish(Snapshot::with_chunk_bytes(Step(5), Epoch(9), &state(KIB, 3.0), 64 << 10).unwrap());
    println!("\nserving {}", server.metadata());
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

struct Source {
    child: Child,
    url: String,
}

impl Source {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed_source::child_that_serves", "--nocapture"])
            .env(ROLE, "source")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let url = lines
            .map_while(Result::ok)
            .find_map(|l| l.strip_prefix("serving ").map(str::to_owned))
            .expect("the child does not serve");
        Self { child, url }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What becomes of connections whose bytes have been counted.
enum Then {
    GoOn,
    /// What is still in the buffers of a source that was killed is lost, as with its machine: there may be all that it has.
    End,
}

/// Passes connections on to `to` and counts what comes back; calls `after` once that is more than `bytes`. Returns its URL.
fn counted(to: &str, bytes: u64, after: impl FnOnce() -> Then + Send + 'static) -> (String, Arc<AtomicU64>) {
    let rest = to.strip_prefix("http://").unwrap();
    let (address, path) = rest.split_once('/').unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/{path}", listener.local_addr().unwrap());
    let (address, seen) = (address.to_owned(), Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&seen);
    let after = Arc::new(Mutex::new(Some(after)));
    let ended = Arc::new(AtomicBool::new(false));
    std::thread::spawn(move || {
        for inward in listener.incoming() {
            let Ok(inward) = inward else { return };
            // Once the source is dead nothing answers: so the connection ends as it would without us between.
            let Ok(outward) = TcpStream::connect(&address) else {
                continue;
            };
            let (mut from, mut to) = (inward.try_clone().unwrap(), outward.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let (count, after, ended) = (Arc::clone(&count), Arc::clone(&after), Arc::clone(&ended));
            std::thread::spawn(move || {
                let (mut from, mut to) = (outward, inward);
                let mut buffer = vec![0; 64 << 10];
                while let Ok(n) = from.read(&mut buffer) {
                    let over = n == 0 || ended.load(Ordering::SeqCst);
                    if over || to.write_all(&buffer[..n]).is_err() {
                        break;
                    }
                    if count.fetch_add(n as u64, Ordering::SeqCst) + n as u64 > bytes
                        && let Some(after) = after.lock().unwrap().take()
                        && let Then::End = after()
                    {
                        ended.store(true, Ordering::SeqCst);
                    }
                }
                let _ = to.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (url, seen)
}

/// Sends SIGKILL to the process; it is collected by its owner.
fn kill(pid: u32) -> Then {
    let status = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
    assert!(status.unwrap().success());
    Then::End
}

fn fetch(urls: &[&String]) -> ftcore::Result<oxccl_checkpoint::Fetched> {
    let sources = urls.iter().map(|u| CheckpointSource::at(u.as_str())).collect();
    Fetch::step(Step(5), sources).run(Instant::now() + LONG, &FetchOptions::default())
}

#[test]
fn a_source_killed_in_the_middle_of_a_transfer_costs_no_more_than_what_it_had_not_sent() {
    let (dies, lives) = (Source::start(), Source::start());
    let pid = dies.child.id();
    let killed = Arc::new(std::sync::Barrier::new(2));
    let (through, sent) = counted(&dies.url, 2 << 20, {
        let killed = Arc::clone(&killed);
        move || {
            let then = kill(pid);
            killed.wait();
            then
        }
    });
    // It goes on after its first bytes once the other is dead: else it might bring everything before.
    let (other, sent_by_other) = counted(&lives.url, 0, move || {
        killed.wait();
        Then::GoOn
    });
    let fetched = fetch(&[&through, &other]).unwrap();
    assert_eq!(fetched.state, state(KIB, 3.0));
    let total = (KIB as u64) << 10;
    let (first, second) = (sent.load(Ordering::SeqCst), sent_by_other.load(Ordering::SeqCst));
    assert!(
        first > 2 << 20,
        "the first source was killed before it sent anything: {first}"
    );
    // Started over, it would be everything again from the second one.
    assert!(
        second < total,
        "{second} of {total} bytes from the one that lives"
    );
    let kept: u64 = fetched.received.iter().map(|r| r.1).sum();
    assert!(kept >= total, "{kept}");
}

#[test]
fn the_only_source_killed_in_the_middle_is_a_lost_peer_long_before_the_deadline() {
    let dies = Source::start();
    let pid = dies.child.id();
    let (through, _) = counted(&dies.url, 2 << 20, move || kill(pid));
    let begun = Instant::now();
    let e = fetch(&[&through]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
    assert!(e.message().contains("chunks received"), "{e}");
    assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
}

#[test]
fn what_came_before_all_sources_died_is_not_fetched_again() {
    let (dies, lives) = (Source::start(), Source::start());
    let pid = dies.child.id();
    let (through, _) = counted(&dies.url, 8 << 20, move || kill(pid));
    let kept = Kept::default();
    let fetch = |url: &str| {
        let mut fetch = Fetch::step(Step(5), vec![CheckpointSource::at(url)]);
        fetch.kept = kept.clone();
        fetch.run(Instant::now() + LONG, &FetchOptions::default())
    };
    fetch(&through).unwrap_err();
    let fetched = fetch(&lives.url).unwrap();
    assert_eq!(fetched.state, state(KIB, 3.0));
    // Some chunks were still on their way when it died.
    assert!(fetched.reused_bytes >= 4 << 20, "{}", fetched.reused_bytes);
    let received: u64 = fetched.received.iter().map(|r| r.1).sum();
    assert!(received < (KIB as u64) << 10, "{received}");
    // A fetch that succeeded leaves nothing behind.
    assert_eq!(fetch(&lives.url).unwrap().reused_bytes, 0);
}
