//! What the tests share: servers on loopback, waiting on conditions, and a proxy that can cut or freeze a connection.

#![allow(dead_code)] // Each test file uses its part.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Test code, outside of a #[test].

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use oxccl_coordination::{
    LighthouseClient, LighthouseConfig, LighthouseServer, LighthouseStatus, ManagerClient, ManagerServer,
    ManagerServerConfig, Member, PushEvent, QuorumRequest, QuorumResult, WatchGuard,
};

/// Generous: only a hang reaches it.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn soon() -> Instant {
    Instant::now() + TIME_LIMIT
}

/// Deaths must be noticed by evidence: heartbeats are too slow to help.
pub(crate) fn config(min_replicas: usize) -> LighthouseConfig {
    LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas,
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(30),
        ..LighthouseConfig::default()
    }
}

pub(crate) fn lighthouse(min_replicas: usize) -> LighthouseServer {
    LighthouseServer::start(config(min_replicas)).unwrap()
}

/// A replica: a manager server, and the client of its rank 0 with its watch.
pub(crate) struct Replica {
    pub(crate) server: ManagerServer,
    pub(crate) client: ManagerClient,
    pub(crate) events: Receiver<PushEvent>,
    pub(crate) watch: WatchGuard,
    pub(crate) last: Epoch,
}

/// Where the replica's store would be.
pub(crate) fn store_of(id: &str) -> String {
    format!("store-of-{}:1", id.replace(':', "-"))
}

pub(crate) fn manager_config(id: &str, lighthouse: &str, world_size: u32) -> ManagerServerConfig {
    ManagerServerConfig {
        replica_id: id.into(),
        lighthouse: lighthouse.into(),
        store_address: store_of(id),
        world_size,
        ..ManagerServerConfig::default()
    }
}

pub(crate) fn watched(client: &ManagerClient, rank: u32) -> (WatchGuard, Receiver<PushEvent>) {
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let watch = client.watch(
        rank,
        Arc::new(move |event| {
            let _ = sender.lock().unwrap().send(event);
        }),
    );
    (watch, events)
}

impl Replica {
    pub(crate) fn start(id: &str, lighthouse: &str) -> Self {
        let server = ManagerServer::start(manager_config(id, lighthouse, 1)).unwrap();
        let client = ManagerClient::connect(&server.address(), soon()).unwrap();
        let (watch, events) = watched(&client, 0);
        Self {
            server,
            client,
            events,
            watch,
            last: Epoch(0),
        }
    }

    pub(crate) fn request(&self, step: i64) -> QuorumRequest {
        QuorumRequest {
            step: Step(step),
            init_sync: true,
            last_quorum_id: self.last,
            ..QuorumRequest::default()
        }
    }

    /// The next abort of `epoch`.
    pub(crate) fn abort_of(&self, epoch: Epoch) -> (String, Vec<String>) {
        loop {
            match self.events.recv_timeout(TIME_LIMIT).expect("no abort came") {
                PushEvent::AbortEpoch {
                    quorum_id,
                    reason,
                    departed,
                } if quorum_id == epoch => {
                    return (reason, departed);
                }
                _ => {}
            }
        }
    }
}

/// All replicas ask at the same time, again after retryable errors, until all have an answer.
pub(crate) fn quorum(replicas: &mut [&mut Replica], step: i64) -> Vec<QuorumResult> {
    let calls: Vec<JoinHandle<Result<QuorumResult>>> = replicas
        .iter()
        .map(|r| {
            let (client, request, deadline) = (r.client.clone(), r.request(step), soon());
            std::thread::spawn(move || {
                loop {
                    match client.quorum(&request, deadline) {
                        Err(e) if e.is_retryable() && Instant::now() < deadline => {
                            std::thread::park_timeout(Duration::from_millis(20));
                        }
                        other => return other,
                    }
                }
            })
        })
        .collect();
    let results: Vec<_> = calls.into_iter().map(|c| c.join().unwrap().unwrap()).collect();
    for (replica, result) in replicas.iter_mut().zip(&results) {
        replica.last = result.quorum_id;
    }
    results
}

/// A quorum of exactly these; asked again (as training would, with a failed step) while members are still missing.
pub(crate) fn quorum_of(replicas: &mut [&mut Replica], step: i64) -> Vec<QuorumResult> {
    let until = soon();
    loop {
        let results = quorum(replicas, step);
        let complete = |r: &QuorumResult| r.replica_world_size as usize == replicas.len();
        if results.iter().all(complete) && results.iter().all(|r| r.quorum_id == results[0].quorum_id) {
            return results;
        }
        assert!(Instant::now() < until, "no common quorum: {results:?}");
    }
}

pub(crate) fn member(id: &str) -> Member {
    Member {
        replica_id: id.into(),
        address: format!(
            "http://{}:1",
            id.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
        ),
        store_address: "store:1".into(),
        world_size: 1,
        ..Member::default()
    }
}

pub(crate) fn client(lighthouse: &LighthouseServer) -> LighthouseClient {
    LighthouseClient::connect(&lighthouse.address(), soon()).unwrap()
}

/// Waits until the lighthouse's state is as wished.
pub(crate) fn until(
    client: &LighthouseClient,
    what: &str,
    wish: impl Fn(&LighthouseStatus) -> bool,
) -> LighthouseStatus {
    let end = soon();
    loop {
        let status = client.status(soon()).unwrap();
        if wish(&status) {
            return status;
        }
        assert!(Instant::now() < end, "never happened: {what}; {status:?}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// Makes calls that can only time out, until one was told in time what was missing: the server answers a fifth of the time before the deadline,
/// 400 ms at most, and on a starved machine that may not be enough to cross it.
pub(crate) fn timed_out_saying(text: &str, call: impl Fn(Instant) -> Error) {
    let end = soon();
    loop {
        let error = call(Instant::now() + Duration::from_secs(2));
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        if error.to_string().contains(text) {
            return;
        }
        assert!(Instant::now() < end, "no call was told '{text}': {error}");
    }
}

pub(crate) fn socket_of(url: &str) -> SocketAddr {
    url.strip_prefix("http://").unwrap().parse().unwrap()
}

/// Forwards bytes between a port of its own and `target`, until it is told to cut or to freeze.
pub(crate) struct Proxy {
    pub(crate) url: String,
    frozen: Arc<AtomicBool>,
    loses: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub(crate) fn to(url: &str) -> Self {
        let target = socket_of(url);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (frozen, open) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let loses = Arc::new(AtomicBool::new(false));
        let (frozen_there, loses_there, open_there) = (frozen.clone(), loses.clone(), open.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else {
                    continue;
                };
                // Before a byte crosses: who has seen one may cut this connection.
                let ends = [&near, &far].map(|end| end.try_clone().unwrap());
                open_there.lock().unwrap().extend(ends);
                for (mut from, mut to, is_call) in [
                    (near.try_clone().unwrap(), far.try_clone().unwrap(), true),
                    (far.try_clone().unwrap(), near.try_clone().unwrap(), false),
                ] {
                    let (frozen, loses) = (frozen_there.clone(), loses_there.clone());
                    std::thread::spawn(move || {
                        let (mut bytes, mut has_lost) = ([0; 4096], false);
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            if is_call && loses.swap(false, Ordering::SeqCst) {
                                let _ = from.shutdown(Shutdown::Both);
                                break;
                            }
                            if frozen.load(Ordering::SeqCst) {
                                has_lost = true;
                                continue;
                            }
                            // What follows a gap would be taken for something else: it may be of a connection that was made while all was cut.
                            if has_lost || to.write_all(&bytes[..n]).is_err() {
                                let _ = from.shutdown(Shutdown::Both);
                                break;
                            }
                        }
                        // A frozen line says nothing about its ends.
                        if !frozen.load(Ordering::SeqCst) {
                            let _ = to.shutdown(Shutdown::Both);
                        }
                    });
                }
            }
        });
        Self {
            url,
            frozen,
            loses,
            open,
        }
    }

    /// The next bytes that a caller sends are lost, and their connection breaks.
    pub(crate) fn lose_next(&self) {
        self.loses.store(true, Ordering::SeqCst);
    }

    /// Resets all connections.
    pub(crate) fn cut(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Swallows everything from now on; both ends stay open.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::SeqCst);
    }

    /// Resets all connections and forwards everything from now on.
    pub(crate) fn thaw(&self) {
        self.cut();
        self.frozen.store(false, Ordering::SeqCst);
    }
}
