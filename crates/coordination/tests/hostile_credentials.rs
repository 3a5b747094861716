//! Strangers and forgers at a job with credentials, over real sockets. The job commits steps all the while, in one and the same epoch.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ftcore::{Credentials, Epoch, Error, ErrorKind, Step};
use identity::{ClientStream, Party, Role};
use oxccl_coordination::{
    CommitVote, ConnectionLimits, LighthouseClient, LighthouseConfig, LighthouseServer, ManagerClient,
    ManagerServer, ManagerServerConfig, Member, Order, OrderKind, QuorumRequest,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use frames::{HEARTBEAT, frame, greeting, owed, post};

#[path = "rig/frames.rs"]
mod frames;

/// Only a hang gets there.
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + TIME_LIMIT
}

fn credentials(folder: &std::path::Path, job: &str) -> Arc<Credentials> {
    identity::create(folder, Some(job)).unwrap();
    Credentials::load(folder).unwrap()
}

fn replica(name: &str) -> Role {
    Role::Replica(name.into())
}

/// Strangers have half a second, and heartbeats are too slow to help.
fn lighthouse(credentials: Vec<Arc<Credentials>>, min_replicas: usize) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas,
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(30),
        limits: limits(),
        credentials,
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn limits() -> ConnectionLimits {
    ConnectionLimits {
        connections: 256,
        per_address: 256,
        greeting: Duration::from_secs(2),
        idle: Duration::from_secs(5),
        unread: Duration::from_secs(3),
        ..ConnectionLimits::manager()
    }
}

/// A replica with a folder of its own, and the client of its rank.
struct Replica {
    id: String,
    server: ManagerServer,
    party: Arc<Party>,
    client: ManagerClient,
}

struct Job {
    dir: tempfile::TempDir,
    all: Arc<Credentials>,
    lighthouse: LighthouseServer,
    replicas: Vec<Replica>,
}

impl Job {
    fn start(names: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let all = credentials(&dir.path().join("all"), "demo");
        let lighthouse = lighthouse(vec![Arc::clone(&all)], names.len());
        let mut job = Self {
            dir,
            all,
            lighthouse,
            replicas: Vec::new(),
        };
        for name in names {
            let replica = job.replica(name);
            job.replicas.push(replica);
        }
        job
    }

    fn replica(&self, name: &str) -> Replica {
        let folder = self.dir.path().join(name);
        identity::issue(self.all.folder(), name, &folder).unwrap();
        let own = Credentials::load(&folder).unwrap();
        let id = format!("{name}:1");
        let server = ManagerServer::start(ManagerServerConfig {
            replica_id: id.clone(),
            lighthouse: self.lighthouse.address(),
            store_address: "store:1".into(),
            limits: limits(),
            credentials: Some(Arc::clone(&own)),
            ..ManagerServerConfig::default()
        })
        .unwrap();
        let party = Party::new(&own, replica(name)).unwrap();
        let client =
            ManagerClient::connect_as(Some(Arc::clone(&party)), Some(&id), &server.address(), soon())
                .unwrap();
        Replica {
            id,
            server,
            party,
            client,
        }
    }

    fn operator(&self) -> Arc<Party> {
        Party::new(&self.all, Role::Operator).unwrap()
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        let managers = self.replicas.iter().map(|r| r.server.address());
        managers
            .chain([self.lighthouse.address()])
            .map(|url| url.strip_prefix("https://").unwrap().parse().unwrap())
            .collect()
    }
}

/// One step of all replicas; the epoch.
fn commit(clients: &[ManagerClient], step: i64) -> Epoch {
    let ranks: Vec<JoinHandle<Epoch>> = clients
        .iter()
        .cloned()
        .map(|client| {
            std::thread::spawn(move || {
                let request = QuorumRequest {
                    step: Step(step),
                    ..QuorumRequest::default()
                };
                let quorum = client.quorum(&request, soon()).unwrap();
                let vote = CommitVote {
                    step: Step(step),
                    quorum_id: quorum.quorum_id,
                    vote: true,
                    ..CommitVote::default()
                };
                assert!(client.should_commit(&vote, soon()).unwrap());
                quorum.quorum_id
            })
        })
        .collect();
    let epochs: Vec<Epoch> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
    assert!(epochs.iter().all(|e| *e == epochs[0]), "{epochs:?}");
    epochs[0]
}

/// Commits steps until it is dropped, in one epoch or not at all.
struct Training {
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicI64>,
    thread: Option<JoinHandle<()>>,
}

impl Training {
    fn begin(job: &Job) -> Self {
        let clients: Vec<_> = job.replicas.iter().map(|r| r.client.clone()).collect();
        let (stop, committed) = (Arc::<AtomicBool>::default(), Arc::<AtomicI64>::default());
        let (stopped, steps) = (Arc::clone(&stop), Arc::clone(&committed));
        let epoch = commit(&clients, 0);
        let thread = std::thread::spawn(move || {
            let mut step = 1;
            while !stopped.load(Ordering::SeqCst) {
                assert_eq!(
                    commit(&clients, step),
                    epoch,
                    "a stranger ended the epoch at step {step}"
                );
                steps.store(step, Ordering::SeqCst);
                step += 1;
            }
        });
        Self {
            stop,
            committed,
            thread: Some(thread),
        }
    }

    /// Steps go on after this call as before.
    fn goes_on(&self) {
        let (now, end) = (self.committed.load(Ordering::SeqCst), soon());
        while self.committed.load(Ordering::SeqCst) < now + 3 {
            assert!(Instant::now() < end, "no step commits any more");
            assert!(!self.thread.as_ref().unwrap().is_finished(), "the job ended");
            std::thread::yield_now();
        }
    }

    fn end(mut self) {
        self.goes_on();
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn member(id: &str) -> Member {
    Member {
        replica_id: id.into(),
        address: "http://127.0.0.1:1".into(),
        store_address: "store:1".into(),
        step: Step(i64::MAX - 1),
        last_quorum_id: Epoch::of_signed(i64::MAX - 1),
        world_size: 1,
        ..Member::default()
    }
}

fn is_refused(error: &Error, parts: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "'{part}' is not in: {error}");
    }
}

#[test]
fn a_replica_speaks_for_itself_only_at_the_lighthouse() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let b = &job.replicas[1];
    let forger = LighthouseClient::connect_as(
        Some(Arc::clone(&job.replicas[0].party)),
        &job.lighthouse.address(),
        soon(),
    )
    .unwrap();
    let tool = LighthouseClient::connect_as(Some(job.operator()), &job.lighthouse.address(), soon()).unwrap();
    for (who, client) in [
        ("replica 'a' of job demo", &forger),
        ("the operator of job demo", &tool),
    ] {
        let both = [who, "'b:1'"];
        is_refused(&client.quorum(&member(&b.id), soon()).unwrap_err(), &both);
        is_refused(&client.heartbeat(&b.id, soon()).unwrap_err(), &both);
        is_refused(&client.leave(&b.id, "forged", soon()).unwrap_err(), &both);
        is_refused(&client.failed(&b.id, "forged", soon()).unwrap_err(), &both);
        // Nor for one that does not exist.
        is_refused(
            &client.quorum(&member("c:1"), soon()).unwrap_err(),
            &[who, "'c:1'"],
        );
        client.status(soon()).unwrap();
    }
    // A manager server under another's name does not even start.
    let own = Credentials::load(&job.dir.path().join("a")).unwrap();
    let e = ManagerServer::start(ManagerServerConfig {
        replica_id: "b:2".into(),
        lighthouse: job.lighthouse.address(),
        credentials: Some(own),
        ..ManagerServerConfig::default()
    })
    .unwrap_err();
    assert!(
        e.message().contains("replica 'b'") && e.message().contains("replica 'a'"),
        "{e}"
    );
    let status = tool.status(soon()).unwrap();
    assert_eq!(status.participants.len(), 2, "{status:?}");
    training.end();
}

#[test]
fn a_replica_gives_no_orders_at_the_lighthouse_not_even_for_itself() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let url = job.lighthouse.address();
    let own = Arc::clone(&job.replicas[0].party);
    let forger = LighthouseClient::connect_as(Some(own), &url, soon()).unwrap();
    for kind in [OrderKind::Drain, OrderKind::Evict, OrderKind::Kill] {
        for id in ["a:1", "b:1"] {
            let reason = "forged".into();
            let refused = forger.operate(id, Order { kind, reason }, soon()).unwrap_err();
            is_refused(&refused, &["replica 'a' of job demo", "operator"]);
        }
    }
    let status = forger.status(soon()).unwrap();
    assert_eq!(
        (status.draining.len(), status.evicted.len()),
        (0, 0),
        "{status:?}"
    );
    training.end();
}

#[test]
fn other_replicas_neither_vote_nor_end_anything_at_a_manager_server() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let b = &job.replicas[1];
    let connect = |party: Arc<Party>| {
        ManagerClient::connect_as(Some(party), Some(&b.id), &b.server.address(), soon()).unwrap()
    };
    for (who, party) in [
        ("replica 'a' of job demo", Arc::clone(&job.replicas[0].party)),
        ("the operator of job demo", job.operator()),
    ] {
        let forger = connect(party);
        let both = [who, "'b:1'"];
        let vote = CommitVote {
            step: Step(3),
            ..CommitVote::default()
        };
        is_refused(
            &forger.quorum(&QuorumRequest::default(), soon()).unwrap_err(),
            &both,
        );
        is_refused(&forger.should_commit(&vote, soon()).unwrap_err(), &both);
        is_refused(&forger.give_up(&vote, "forged", soon()).unwrap_err(), &both);
        is_refused(&forger.report(Epoch(1), "forged", soon()).unwrap_err(), &both);
        is_refused(&forger.leave(0, soon()).unwrap_err(), &both);
        // A stream of its own, whose end would be a death.
        let watch = forger.watch(0, Arc::new(|_| ()));
        training.goes_on();
        drop(watch);
        // What a replica that heals asks, it may ask.
        forger.checkpoint_metadata(0, soon()).unwrap();
    }
    let a = connect(Arc::clone(&job.replicas[0].party));
    is_refused(
        &a.kill("forged", soon()).unwrap_err(),
        &["replica 'a'", "operator"],
    );
    is_refused(
        &b.client.kill("forged", soon()).unwrap_err(),
        &["replica 'b'", "operator"],
    );
    training.end();
    // The operator's word does end it, with the reason.
    connect(job.operator())
        .kill("the machine is needed", soon())
        .unwrap();
    let e = b.client.quorum(&QuorumRequest::default(), soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("the machine is needed"), "{e}");
}

#[test]
fn callers_without_credentials_or_with_anothers_are_told_what_is_missing() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let other = credentials(&job.dir.path().join("other"), "demo");
    let stranger = Party::new(&other, Role::Operator).unwrap();
    let short = || Instant::now() + Duration::from_secs(1);
    for url in [job.lighthouse.address(), job.replicas[0].server.address()] {
        // A refusal is not tried again until the deadline: it would stay one.
        let late = Instant::now() + Duration::from_secs(3600);
        let e = LighthouseClient::connect_as(Some(Arc::clone(&stranger)), &url, late).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unavailable);
        assert!(e.message().contains("certificate is not of job demo"), "{e}");
        assert!(e.message().contains(&url) && e.message().contains("other"), "{e}");
        assert!(!e.message().contains("is the lighthouse running"), "{e}");
        let twice = format!("{url},{url}");
        let e = LighthouseClient::connect_as(Some(Arc::clone(&stranger)), &twice, late).unwrap_err();
        assert!(e.message().contains("certificate is not of job demo"), "{e}");
        let e = LighthouseClient::connect_as(None, &url, short()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().contains("OXCCL_CREDENTIALS"), "{e}");
        // Without TLS, whatever its URL says.
        let plain = url.replace("https://", "http://");
        let e = LighthouseClient::connect_as(None, &plain, short())
            .and_then(|client| client.heartbeat("a:1", soon()))
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        let text = e.to_string();
        assert!(
            text.contains("asks for the credentials of job demo") && text.contains("OXCCL_CREDENTIALS"),
            "{e}"
        );
        assert!(!text.contains("http2"), "{e}");
        let e = LighthouseClient::connect_as(Some(job.operator()), &plain, short()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().contains("without credentials"), "{e}");
    }
    // A member that answers in the place of the lighthouse is not it.
    let url = job.replicas[0].server.address();
    let late = Instant::now() + Duration::from_secs(3600);
    let e = LighthouseClient::connect_as(Some(job.operator()), &url, late).unwrap_err();
    assert!(e.message().contains("proves to be replica 'a'"), "{e}");
    training.end();
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    stream
}

fn is_open(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 4096]) {
        Ok(n) => n > 0,
        Err(e) => matches!(
            e.kind(),
            IoKind::WouldBlock | IoKind::TimedOut | IoKind::Interrupted
        ),
    }
}

/// The first flight of an honest caller, which any stranger can send too.
fn client_hello() -> Vec<u8> {
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = identity::server_name("demo").try_into().unwrap();
    let mut caller = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    caller.write_tls(&mut hello).unwrap();
    hello
}

#[test]
fn strangers_hold_nothing_whatever_they_begin() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let hello = client_hello();
    let mut huge = vec![0x16, 3, 1, 0x40, 0];
    huge.extend([1, 0xff, 0xff, 0xff]);
    let beginnings: Vec<Vec<u8>> = vec![
        vec![],
        vec![0x16],
        hello[..1].to_vec(),
        hello[..hello.len() / 2].to_vec(),
        hello.clone(),
        [hello.clone(), hello.clone()].concat(),
        // A handshake message of 16 MiB is announced.
        huge,
        b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        vec![0x80; 100],
    ];
    for address in job.addresses() {
        let mut strangers: Vec<TcpStream> = beginnings
            .iter()
            .map(|beginning| {
                let mut stream = connect(address);
                stream.write_all(beginning).unwrap();
                stream
            })
            .collect();
        training.goes_on();
        let end = soon();
        // Each adds a byte now and then.
        while !strangers.is_empty() {
            assert!(Instant::now() < end, "{} hold their connections", strangers.len());
            strangers.retain_mut(|s| {
                let _ = s.write(&[0]);
                is_open(s)
            });
        }
    }
    training.end();
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_flood_of_half_handshakes_keeps_no_member_out_and_takes_bounded_memory() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let hello = client_hello();
    let before = resident_bytes();
    let mut held = std::collections::VecDeque::new();
    for n in 0..3000 {
        for address in job.addresses() {
            let mut stream = TcpStream::connect(address).unwrap();
            let _ = match n % 3 {
                0 => stream.write(&hello),
                1 => stream.write(&hello[..20]),
                _ => stream.write(&[0x16, 3, 1, 0x40, 0]),
            };
            held.push_back(stream);
        }
        while held.len() > 600 {
            held.pop_front();
        }
        if n % 500 == 0 {
            // New members get in between them.
            let url = job.lighthouse.address();
            LighthouseClient::connect_as(Some(job.operator()), &url, soon())
                .unwrap()
                .status(soon())
                .unwrap();
        }
    }
    training.goes_on();
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 128 << 20, "{} MiB", grown >> 20);
    training.end();
}

/// A connection on which this member has proved who it is.
async fn member_of(party: &Party, address: SocketAddr) -> ClientStream<tokio::net::TcpStream> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    party.connect(stream, None).await.unwrap()
}

#[test]
fn a_member_that_takes_nothing_of_its_answers_is_gone_in_time_and_the_job_goes_on() {
    let job = Job::start(&["a", "b"]);
    let training = Training::begin(&job);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let addresses = job.addresses();
    let (manager_of_b, lighthouse) = (addresses[1], addresses[2]);
    // Calls that replica a may make: its own heartbeat, and where the state of rank 0 is.
    let heartbeat = b"\0\0\0\0\x05\x0a\x03a:1".as_slice();
    let calls = [
        (lighthouse, HEARTBEAT, heartbeat),
        (
            manager_of_b,
            "/torchft.ManagerService/CheckpointMetadata",
            b"\0\0\0\0\0".as_slice(),
        ),
    ];
    for (address, path, message) in calls {
        let gone = runtime.block_on(async {
            let mut stream = member_of(&job.replicas[0].party, address).await;
            // A window of 0 for every stream; then calls whose answers do not fit.
            let mut asks = greeting(&[0, 4, 0, 0, 0, 0]);
            for id in (1..100).step_by(2) {
                asks.extend(frame(1, 4, id, &post(path)));
                asks.extend(frame(0, 1, id, message));
            }
            stream.write_all(&asks).await.unwrap();
            // It answers pings all the while, so that nothing but its answers is at fault.
            let answers_pings = async {
                let (mut bytes, mut buffer) = ([0; 4096], Vec::new());
                while let Ok(n @ 1..) = stream.read(&mut bytes).await {
                    buffer.extend_from_slice(&bytes[..n]);
                    if stream.write_all(&owed(&mut buffer)).await.is_err() {
                        break;
                    }
                }
            };
            tokio::time::timeout(TIME_LIMIT, answers_pings).await.is_ok()
        });
        assert!(gone, "answers to {path} that a member does not take are kept");
        training.goes_on();
    }
    // The operator asks for pages, and reads nothing at all.
    let gone = runtime.block_on(async {
        let mut stream = member_of(&job.operator(), lighthouse).await;
        let pages = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100);
        let asks = async { while stream.write_all(&pages).await.is_ok() {} };
        tokio::time::timeout(TIME_LIMIT, asks).await.is_ok()
    });
    assert!(gone, "a member that reads nothing keeps its connection");
    training.end();
}

#[test]
fn jobs_of_one_lighthouse_do_not_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let jobs = ["red", "blue"].map(|id| credentials(&dir.path().join(id), id));
    let state_file = dir.path().join("state");
    let config = || LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        state_file: Some(state_file.clone()),
        credentials: jobs.to_vec(),
        ..LighthouseConfig::default()
    };
    let lighthouse = LighthouseServer::start(config()).unwrap();
    // The same replica id in both.
    let clients = jobs.each_ref().map(|job| {
        let party = Party::new(job, replica("a")).unwrap();
        LighthouseClient::connect_as(Some(party), &lighthouse.address(), soon()).unwrap()
    });
    let mut ids = Vec::new();
    for (n, client) in clients.iter().enumerate() {
        let mut own = member("a:1");
        (own.step, own.last_quorum_id) = (Step(0), Epoch(0));
        own.address = format!("https://job-{n}:1");
        let quorum = client.quorum(&own, soon()).unwrap();
        assert_eq!(quorum.participants.len(), 1, "{quorum:?}");
        assert_eq!(quorum.participants[0].address, own.address);
        ids.push(quorum.quorum_id);
    }
    for (n, client) in clients.iter().enumerate() {
        let status = client.status(soon()).unwrap();
        assert_eq!(status.participants.len(), 1);
        assert_eq!(status.participants[0].address, format!("https://job-{n}:1"));
        assert_eq!(status.quorum_id, ids[n].signed());
    }
    for job in ["red", "blue"] {
        assert!(dir.path().join(format!("state.{job}")).exists());
    }
    assert!(!state_file.exists());
    drop(lighthouse);
    let twice = LighthouseConfig {
        credentials: vec![Arc::clone(&jobs[0]), Arc::clone(&jobs[0])],
        state_file: None,
        ..config()
    };
    let e = LighthouseServer::start(twice).unwrap_err();
    assert!(e.message().contains("two credentials are of a job red"), "{e}");
}

#[test]
fn a_death_is_seen_at_once_over_tls() {
    let mut job = Job::start(&["a", "b"]);
    let clients: Vec<_> = job.replicas.iter().map(|r| r.client.clone()).collect();
    let epoch = commit(&clients, 0);
    let (sender, events) = std::sync::mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let _watch = clients[0].watch(
        0,
        Arc::new(move |event| {
            let _ = sender.lock().unwrap().send(event);
        }),
    );
    let begun = Instant::now();
    drop(job.replicas.remove(1).server);
    let event = events.recv_timeout(TIME_LIMIT).unwrap();
    let oxccl_coordination::PushEvent::AbortEpoch {
        quorum_id, departed, ..
    } = event
    else {
        panic!("{event:?}");
    };
    assert_eq!((quorum_id, departed), (epoch, vec!["b:1".to_string()]));
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "the heartbeat time-out is 30 s"
    );
}

#[test]
fn without_credentials_a_server_listens_beyond_loopback_only_if_it_is_told_to() {
    let config = |insecure| LighthouseConfig {
        bind: "0.0.0.0:0".into(),
        insecure,
        ..LighthouseConfig::default()
    };
    let e = LighthouseServer::start(config(false)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    for part in ["0.0.0.0:0", "--insecure", "OXCCL_CREDENTIALS"] {
        assert!(e.message().contains(part), "{e}");
    }
    let open = LighthouseServer::start(config(true)).unwrap();
    assert!(open.address().starts_with("http://"));
    let manager = |insecure| {
        ManagerServer::start(ManagerServerConfig {
            replica_id: "a:1".into(),
            lighthouse: "http://127.0.0.1:1".into(),
            bind: "0.0.0.0:0".into(),
            connect_timeout: Duration::from_millis(50),
            insecure,
            ..ManagerServerConfig::default()
        })
        .unwrap_err()
    };
    assert_eq!(manager(false).kind(), ErrorKind::InvalidArgument);
    // It listens, and finds no lighthouse.
    assert_eq!(manager(true).kind(), ErrorKind::Unavailable);
    let dir = tempfile::tempdir().unwrap();
    let closed = LighthouseServer::start(LighthouseConfig {
        credentials: vec![credentials(&dir.path().join("job"), "demo")],
        ..config(false)
    })
    .unwrap();
    assert!(closed.address().starts_with("https://"));
}
