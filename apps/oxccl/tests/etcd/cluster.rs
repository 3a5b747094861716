//! A real etcd of three members on loopback, and lighthouses as processes of their own.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oxccl::coordination::{LighthouseClient, LighthouseStatus};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Generous: only a hang reaches it.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Instant {
    Instant::now() + TIME_LIMIT
}

/// Asks `done` again until it gives something.
pub(crate) fn wait_until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = soon();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {TIME_LIMIT:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn free_ports<const N: usize>() -> [u16; N] {
    let held = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    held.each_ref().map(|l| l.local_addr().unwrap().port())
}

/// A process that is killed and collected when it is dropped.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// SIGSTOP, and waits until it stands: on a busy machine its other threads go on until one of them has had a core.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let status = format!("/proc/{}/stat", self.0.id());
        wait_until("a process that was stopped stands", || {
            let stat = std::fs::read_to_string(&status).ok()?;
            let (_, rest) = stat.rsplit_once(") ")?;
            rest.starts_with('T').then_some(())
        });
    }

    /// SIGKILL, and collects it.
    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Three members of etcd, with the heartbeat and election times of a fast network.
pub(crate) struct Cluster {
    folder: TempDir,
    clients: [u16; 3],
    peers: [u16; 3],
    members: Vec<Option<Process>>,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        let [a, b, c, d, e, f] = free_ports();
        let mut cluster = Self {
            folder: tempfile::tempdir().unwrap(),
            clients: [a, b, c],
            peers: [d, e, f],
            members: vec![None, None, None],
        };
        for member in 0..3 {
            cluster.start_member(member);
        }
        for member in 0..3 {
            cluster.wait_for(member);
        }
        cluster
    }

    fn start_member(&mut self, member: usize) {
        let program = std::env::var("OXCCL_ETCD_PATH").expect("OXCCL_ETCD_PATH: the row `etcd` sets it");
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let all: Vec<String> = (0..3).map(|i| format!("m{i}={}", url(self.peers[i]))).collect();
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join(format!("etcd-{member}.log")))
            .unwrap();
        let (client, peer) = (url(self.clients[member]), url(self.peers[member]));
        let mut command = Command::new(program);
        command
            .args(["--name", &format!("m{member}"), "--data-dir"])
            .arg(self.folder.path().join(format!("etcd-{member}")))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args([
                "--initial-cluster",
                &all.join(","),
                "--initial-cluster-state",
                "new",
            ])
            .args(["--heartbeat-interval", "20", "--election-timeout", "200"])
            .args(["--logger", "zap", "--log-level", "error"])
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.members[member] = Some(Process::start(&mut command));
    }

    /// Until `member` answers with what the majority has.
    fn wait_for(&self, member: usize) {
        wait_until("etcd answers", || {
            self.ask(member, "/v3/kv/range", r#"{"key":"AA=="}"#)
        });
    }

    pub(crate) fn kill(&mut self, member: usize) {
        self.members[member] = None;
    }

    pub(crate) fn restart(&mut self, member: usize) {
        self.start_member(member);
        self.wait_for(member);
    }

    /// For `--etcd`.
    pub(crate) fn addresses(&self) -> String {
        self.clients.map(|port| format!("127.0.0.1:{port}")).join(",")
    }

    /// One call over etcd's JSON gateway.
    fn ask(&self, member: usize, path: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.clients[member])).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(answer)
    }

    /// The revision of the key whose name in base64 this is; `None` if it is not there.
    pub(crate) fn revision(&self, key: &str) -> Option<i64> {
        let body = format!(r#"{{"key":"{key}"}}"#);
        let answer = wait_until("etcd answers", || self.ask(0, "/v3/kv/range", &body));
        let (_, rest) = answer.split_once(r#""mod_revision":""#)?;
        rest.split_once('"')?.0.parse().ok()
    }

    /// Writes a key; it and the value are in base64.
    pub(crate) fn put(&self, key: &str, value: &str) {
        let body = format!(r#"{{"key":"{key}","value":"{value}"}}"#);
        wait_until("etcd answers", || self.ask(0, "/v3/kv/put", &body));
    }

    /// Removes a key; it is in base64.
    pub(crate) fn delete(&self, key: &str) {
        let body = format!(r#"{{"key":"{key}"}}"#);
        wait_until("etcd answers", || self.ask(0, "/v3/kv/deleterange", &body));
    }
}

/// The network between one lighthouse and the members of etcd.
pub(crate) struct Link {
    path: Arc<Passage>,
    addresses: Vec<String>,
}

/// Whether anything passes.
#[derive(Default)]
struct Passage {
    is_cut: Mutex<bool>,
    changed: Condvar,
}

impl Passage {
    /// Waits while the path is cut.
    fn pass(&self) {
        let cut = self.is_cut.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(cut, |cut| *cut));
    }
}

impl Link {
    /// A link to each member of `cluster`, over which everything passes.
    pub(crate) fn to(cluster: &Cluster) -> Self {
        let path = Arc::<Passage>::default();
        let relayed = |member: u16| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let path = Arc::clone(&path);
            std::thread::spawn(move || {
                for client in listener.incoming().map_while(Result::ok) {
                    path.pass();
                    let Ok(member) = TcpStream::connect(("127.0.0.1", member)) else {
                        continue;
                    };
                    for (from, to) in [(&client, &member), (&member, &client)] {
                        let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                        let path = Arc::clone(&path);
                        std::thread::spawn(move || relay(from, to, &path));
                    }
                }
            });
            address
        };
        Self {
            addresses: cluster.clients.into_iter().map(relayed).collect(),
            path,
        }
    }

    /// For `--etcd`.
    pub(crate) fn addresses(&self) -> String {
        self.addresses.join(",")
    }

    /// From now on nothing passes, and no end hears of it. What is sent meanwhile arrives when the link is mended.
    pub(crate) fn cut(&self, is_cut: bool) {
        *self.path.is_cut.lock().unwrap_or_else(PoisonError::into_inner) = is_cut;
        self.path.changed.notify_all();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.cut(false);
    }
}

/// Passes bytes on until an end closes.
fn relay(mut from: TcpStream, mut to: TcpStream, path: &Passage) {
    let mut some = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut some) {
        path.pass();
        if to.write_all(&some[..n]).is_err() {
            break;
        }
    }
    path.pass();
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A lighthouse as users start it.
pub(crate) struct Lighthouse {
    pub(crate) url: String,
    bind: String,
    arguments: Vec<String>,
    log: PathBuf,
    pub(crate) process: Process,
}

impl Lighthouse {
    /// Starts one on a free port of loopback with `arguments`, and waits until it listens.
    pub(crate) fn start(log: &Path, arguments: &[&str]) -> Self {
        let [port] = free_ports();
        let bind = format!("127.0.0.1:{port}");
        let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_string()).collect();
        let log = log.join(format!("lighthouse-{port}.log"));
        let process = run(&bind, &arguments, &log);
        let lighthouse = Self {
            url: format!("http://{bind}"),
            bind,
            arguments,
            log,
            process,
        };
        lighthouse.wait();
        lighthouse
    }

    /// Starts it again at the same address; says when it listened.
    pub(crate) fn restart(&mut self) -> Instant {
        self.process.kill();
        self.process = run(&self.bind, &self.arguments, &self.log);
        self.wait()
    }

    fn wait(&self) -> Instant {
        wait_until("the lighthouse listens", || {
            TcpStream::connect(&self.bind).ok().map(|_| Instant::now())
        })
    }

    pub(crate) fn client(&self) -> LighthouseClient {
        LighthouseClient::connect(&self.url, soon()).unwrap()
    }

    pub(crate) fn status(&self) -> LighthouseStatus {
        self.try_status().unwrap()
    }

    /// `None` from one that stopped leading while it was asked.
    pub(crate) fn try_status(&self) -> Option<LighthouseStatus> {
        self.client().status(soon()).ok()
    }

    /// What it has logged, for failures.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

fn run(bind: &str, arguments: &[String], log: &Path) -> Process {
    let log = File::options().create(true).append(true).open(log).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxccl"));
    command
        .args(["lighthouse", "--bind", bind, "--min-replicas", "2"])
        // Deaths must be noticed by evidence: heartbeats are too slow to help.
        .args(["--join-timeout-ms", "40000", "--heartbeat-timeout-ms", "40000"])
        .args(arguments)
        .env_remove("OXCCL_LOG")
        .stdout(Stdio::null())
        .stderr(log);
    Process::start(&mut command)
}

/// `count` lighthouses that share `job`.
pub(crate) fn lighthouses(cluster: &Cluster, job: &str, count: usize) -> Vec<Lighthouse> {
    let addresses = cluster.addresses();
    (0..count)
        .map(|_| lighthouse_over(&addresses, cluster, job))
        .collect()
}

/// One of `job` that reaches `cluster` at these addresses.
pub(crate) fn lighthouse_over(addresses: &str, cluster: &Cluster, job: &str) -> Lighthouse {
    Lighthouse::start(cluster.folder.path(), &["--etcd", addresses, "--job", job])
}

/// For clients of them all.
pub(crate) fn list(lighthouses: &[Lighthouse]) -> String {
    let urls: Vec<&str> = lighthouses.iter().map(|l| l.url.as_str()).collect();
    urls.join(",")
}

/// The one that leads, once exactly one does and all others follow it.
pub(crate) fn leading(lighthouses: &[Lighthouse]) -> usize {
    wait_until("one leads, and the others follow it", || {
        let standings: Option<Vec<LighthouseStatus>> =
            lighthouses.iter().map(Lighthouse::try_status).collect();
        let standings = standings?;
        let leads = standings.iter().position(|s| s.leads)?;
        let url = &lighthouses[leads].url;
        let followed = |(i, s): (usize, &LighthouseStatus)| i == leads || s.leader.as_ref() == Some(url);
        standings.iter().enumerate().all(followed).then_some(leads)
    })
}
