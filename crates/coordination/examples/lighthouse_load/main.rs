//! A load generator for a lighthouse, run by `cargo xtask bench-lighthouse`: N replicas in one process, on torchft's wire.
//!
//! Each replica has a connection of its own, as real ones do, asks for a quorum and asks for the next step as soon as it has its answer. A step takes
//! from the last answer of the step before to its own last answer. torchft's kind (`--clients torchft`) sends heartbeats and gets the full member list;
//! ours opens the attach stream, sends no heartbeats, is content with its own part of a large quorum, and names what it holds. Replies are scanned, not
//! decoded, and HTTP/2 is spoken with little effort (`http2`): a replica works on its own machine. The result is one line of JSON on standard output; on
//! standard error a line says when the measured steps begin (`measured`) and end (`done`), as processor time is measured from outside.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a tool that ends with the reason when something is wrong"
)]

use std::collections::BTreeMap;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{Credentials, Epoch, Step};
use http2::{Connection, Heard};
use identity::{Party, Role};
use protocol::Lineage;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::time::Sleep;

mod http2;

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, dead_code)]
mod torchft {
    tonic::include_proto!("torchft");
}
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, dead_code)]
mod oxccl {
    tonic::include_proto!("oxccl");
}

const QUORUM: &str = "/torchft.LighthouseService/Quorum";
const HEARTBEAT: &str = "/torchft.LighthouseService/Heartbeat";
const ATTACH: &str = "/oxccl.OxcclLighthouse/Attach";
/// How long a replica may take to connect and to attach.
const OPEN: Duration = Duration::from_secs(20);
/// A replica of ours over whose connection nothing comes for so long pings the lighthouse, as its manager server does.
const PING: Duration = Duration::from_secs(2);
/// Connections that are opened at a time.
const OPENING: usize = 64;

/// What is asked of this run.
struct Load {
    url: String,
    /// With a job's folder each replica has a certificate of its own.
    credentials: Option<Arc<Credentials>>,
    replicas: usize,
    /// Steps before the measured ones.
    warmup: usize,
    steps: usize,
    ours: bool,
    heartbeat: Duration,
    /// How long the whole run may take.
    limit: Duration,
    /// After the steps, how long nothing but heartbeats (or the open streams) goes on.
    idle: Duration,
}

impl Load {
    fn read() -> Result<Self, String> {
        let mut values = BTreeMap::new();
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} has no value"))?;
            values.insert(name, value);
        }
        let mut take = |name: &str, default: &str| values.remove(name).unwrap_or_else(|| default.to_string());
        let number = |name: &str, text: String| {
            text.parse::<u64>()
                .map_err(|_| format!("{name}: '{text}' is not a number"))
        };
        let size =
            |name: &str, text: String| number(name, text).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let ours = match take("--clients", "ours").as_str() {
            "ours" => true,
            "torchft" => false,
            other => return Err(format!("--clients: '{other}' is neither ours nor torchft")),
        };
        let load = Self {
            url: take("--url", ""),
            credentials: match take("--credentials", "") {
                none if none.is_empty() => None,
                folder => Some(Credentials::load(folder.as_ref()).map_err(|e| e.to_string())?),
            },
            replicas: size("--replicas", take("--replicas", "64"))?,
            warmup: size("--warmup", take("--warmup", "3"))?,
            steps: size("--steps", take("--steps", "20"))?,
            ours,
            heartbeat: Duration::from_millis(number(
                "--heartbeat-ms",
                take("--heartbeat-ms", if ours { "0" } else { "100" }),
            )?),
            limit: Duration::from_secs(number("--limit-s", take("--limit-s", "120"))?),
            idle: Duration::from_secs(number("--idle-s", take("--idle-s", "0"))?),
        };
        match values.keys().next() {
            Some(name) => Err(format!("{name} is not an option")),
            None if load.replicas == 0 || load.steps == 0 => {
                Err("--replicas and --steps are at least 1".into())
            }
            None => Ok(load),
        }
    }
}

/// The name of a replica.
fn name(i: usize) -> String {
    format!("replica_{i:05}")
}

/// Raises the limit of open files to the hard limit. Errors: the hard limit is below `wanted`.
fn raise_descriptors(wanted: usize) -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).map_err(|e| format!("raising the limit of open files: {e}"))?;
    match limit.maximum {
        Some(most) if most < wanted as u64 => Err(format!(
            "{wanted} open files are needed, the hard limit (ulimit -Hn) is {most}"
        )),
        _ => Ok(()),
    }
}

/// The fields of a message, as number and content; the content of a number is itself.
fn fields(mut bytes: &[u8], mut each: impl FnMut(u64, u64, &[u8])) -> Option<()> {
    fn varint(bytes: &mut &[u8]) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (first, rest) = bytes.split_first()?;
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
    // A field that is cut off is the end.
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        match key & 7 {
            0 => {
                let value = varint(&mut bytes)?;
                each(key >> 3, value, &[]);
            }
            1 => {
                let (value, rest) = bytes.split_first_chunk()?;
                each(key >> 3, u64::from_le_bytes(*value), &[]);
                bytes = rest;
            }
            5 => bytes = bytes.get(4..)?,
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                each(key >> 3, 0, bytes.get(..length).unwrap_or(bytes));
                bytes = bytes.get(length..).unwrap_or_default();
            }
            _ => return None,
        }
    }
    Some(())
}

/// What a reply says: the quorum's id, its number of members if the list or a part is in it, and the name of the list.
#[derive(Debug, Default, Clone, Copy)]
struct Reply {
    quorum_id: u64,
    members: Option<usize>,
    list: u64,
}

fn scan(bytes: &[u8]) -> Option<Reply> {
    let mut reply = Reply::default();
    fields(bytes, |number, value, content| match number {
        1 => {
            let mut members = 0;
            fields(content, |number, value, _| match number {
                1 => reply.quorum_id = value,
                2 => members += 1,
                _ => {}
            });
            reply.members = Some(members);
        }
        102 => {
            fields(content, |number, value, _| match number {
                1 => reply.quorum_id = value,
                10 => reply.members = usize::try_from(value).ok(),
                _ => {}
            });
        }
        100 => {
            fields(content, |number, value, _| {
                if number == 1 {
                    reply.quorum_id = value;
                }
            });
        }
        101 => reply.list = value,
        _ => {}
    })?;
    Some(reply)
}

/// What all replicas write to.
struct Seen {
    start: Instant,
    /// By step: how many have their answer, and when the last one came.
    answers: Vec<(AtomicUsize, AtomicU64)>,
    ids: Mutex<BTreeMap<u64, usize>>,
    errors: Mutex<Vec<String>>,
    failed: AtomicUsize,
    beats_failed: AtomicUsize,
    incomplete: AtomicUsize,
    short: AtomicUsize,
    bytes: AtomicU64,
}

impl Seen {
    fn error(&self, text: String) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        let mut errors = self.errors.lock().unwrap();
        if errors.len() < 3 {
            errors.push(text);
        }
    }
}

fn member(load: &Load, i: usize, step: usize, last: u64, lineage: &Lineage) -> torchft::QuorumMember {
    torchft::QuorumMember {
        replica_id: format!("{}:6e0d5cbe-8d83-4a2e-9f5e-{i:012}", name(i)),
        address: format!("http://host-{i:05}.cluster.local:40123"),
        store_address: format!("host-{i:05}.cluster.local:29500"),
        step: i64::try_from(step).unwrap_or(0),
        world_size: 1,
        last_quorum_id: if load.ours {
            i64::try_from(last).unwrap_or(0)
        } else {
            0
        },
        lineage: lineage.as_str().to_string(),
        incarnation: load.ours.then(|| format!("{i}-1700000000000000000")),
        ..torchft::QuorumMember::default()
    }
}

/// One replica on its way through the steps.
struct Replica {
    load: Arc<Load>,
    seen: Arc<Seen>,
    i: usize,
    connection: Connection,
    /// The streams of its event stream, its call and its heartbeat, as far as they are open.
    events: Option<u32>,
    asking: Option<u32>,
    beating: Option<u32>,
    step: usize,
    last: u64,
    list: u64,
    lineage: Lineage,
}

impl Replica {
    /// Connects, and opens the event stream of ours, as its manager server does when it starts.
    async fn open(load: Arc<Load>, seen: Arc<Seen>, i: usize) -> Result<Self, String> {
        let authority = load
            .url
            .split("://")
            .last()
            .unwrap_or_default()
            .trim_end_matches('/');
        let stream = TcpStream::connect(authority)
            .await
            .map_err(|e| format!("connecting: {e}"))?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        let line: Box<dyn http2::Line> = match &load.credentials {
            None => Box::new(stream),
            Some(credentials) => {
                let party = Party::new(credentials, Role::Replica(name(i))).map_err(|e| e.to_string())?;
                let stream = party.connect(stream, Some(&Role::Lighthouse)).await;
                Box::new(stream.map_err(|e| format!("connecting: {e}"))?)
            }
        };
        let mut replica = Self {
            connection: Connection::new(line, authority),
            load,
            seen,
            i,
            events: None,
            asking: None,
            beating: None,
            step: 0,
            last: 0,
            list: 0,
            lineage: Lineage::default(),
        };
        if replica.load.ours {
            let request = oxccl::AttachRequest {
                replica_id: replica.member().replica_id,
                address: String::new(),
                last_quorum_id: 0,
            };
            let events = replica.connection.call(ATTACH, None, &request, 0, true);
            match replica.connection.heard().await {
                Ok(Heard::Begun(id)) if id == events => replica.events = Some(events),
                Ok(other) => return Err(format!("attaching: {other:?}; the lighthouse's log says more")),
                Err(error) => return Err(format!("attaching: {error}")),
            }
        }
        Ok(replica)
    }

    fn member(&self) -> torchft::QuorumMember {
        member(&self.load, self.i, self.step, self.last, &self.lineage)
    }

    fn ask(&mut self) {
        let message = torchft::LighthouseQuorumRequest {
            requester: Some(self.member()),
            held_list: self.list,
            unanswered: false,
            part: self.load.ours.then_some(torchft::PartRequest { init_sync: true }),
        };
        let seconds = Some(self.load.limit.as_secs());
        let wanted = self.wanted();
        self.asking = Some(self.connection.call(QUORUM, seconds, &message, wanted, false));
    }

    /// One replica counts the members, which takes the whole list; ours need the list's number, which is at the end, once. No part is longer.
    fn wanted(&self) -> usize {
        if self.i == 0 || self.load.ours && self.list == 0 {
            usize::MAX
        } else {
            4096
        }
    }

    fn beat(&mut self) {
        let message = torchft::LighthouseHeartbeatRequest {
            replica_id: self.member().replica_id,
        };
        self.beating = Some(self.connection.call(HEARTBEAT, None, &message, 0, false));
    }

    /// Takes in what came, and asks for the next step. Errors: this replica cannot go on.
    fn hear(&mut self, heard: Heard, timer: Pin<&mut Sleep>) -> Result<(), String> {
        match heard {
            Heard::Answer(id, length, bytes) if Some(id) == self.asking => {
                self.asking = None;
                self.answered(length, &bytes)?;
                if self.step < self.load.warmup + self.load.steps {
                    self.ask();
                }
            }
            Heard::Refused(id) if Some(id) == self.asking => {
                return Err(format!(
                    "step {}: the call was refused; the lighthouse's log says more",
                    self.step
                ));
            }
            Heard::Answer(id, ..) | Heard::Refused(id) if Some(id) == self.beating => {
                self.beating = None;
                if matches!(heard, Heard::Refused(_)) {
                    self.seen.beats_failed.fetch_add(1, Ordering::Relaxed);
                }
                // torchft's loop: send, wait for the answer, sleep.
                timer.reset((Instant::now() + self.load.heartbeat).into());
            }
            Heard::Part(id) if Some(id) == self.events => {
                self.seen.error(format!("replica {} was told something", self.i))
            }
            Heard::Answer(id, ..) | Heard::Refused(id) if Some(id) == self.events => {
                return Err("its event stream broke".into());
            }
            _ => {}
        }
        Ok(())
    }

    fn answered(&mut self, length: usize, bytes: &[u8]) -> Result<(), String> {
        let (seen, load) = (&self.seen, &self.load);
        let now = u64::try_from(seen.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let reply = scan(bytes).ok_or_else(|| format!("step {}: the reply is damaged", self.step))?;
        if let Some((count, latest)) = seen.answers.get(self.step) {
            latest.fetch_max(now, Ordering::Relaxed);
            let is_last = count.fetch_add(1, Ordering::Relaxed) + 1 == load.replicas;
            if is_last && self.step + 1 == load.warmup {
                eprintln!("measured");
            } else if is_last && self.step + 1 == load.warmup + load.steps {
                eprintln!("done");
            }
        }
        seen.bytes.fetch_add(length as u64, Ordering::Relaxed);
        let whole = length <= self.wanted();
        match reply.members {
            Some(members) if whole && members != load.replicas => {
                seen.incomplete.fetch_add(1, Ordering::Relaxed);
            }
            Some(_) => {}
            None => {
                seen.short.fetch_add(1, Ordering::Relaxed);
            }
        }
        if reply.quorum_id != self.last {
            *seen.ids.lock().unwrap().entry(reply.quorum_id).or_default() += 1;
        }
        self.last = reply.quorum_id;
        if load.ours {
            let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            self.lineage = self
                .lineage
                .after(Epoch(self.last), Step(number(self.step as u64)));
            // A whole list that comes later is not looked through: the next one is asked for without a name, and is.
            self.list = if whole { reply.list } else { 0 };
        }
        self.step += 1;
        Ok(())
    }

    /// Goes through the steps once `go` says so, and stays alive for the others until the run is over.
    async fn run(mut self, mut go: watch::Receiver<bool>) -> Result<(), String> {
        let mut timer = std::pin::pin!(tokio::time::sleep(PING));
        let (mut waits, mut received) = (true, self.connection.received);
        loop {
            tokio::select! {
                biased;
                heard = self.connection.heard() => self.hear(heard.map_err(|e| e.to_string())?, timer.as_mut())?,
                _ = go.wait_for(|go| *go), if waits => {
                    waits = false;
                    self.ask();
                    if !self.load.heartbeat.is_zero() {
                        self.beat();
                    }
                }
                () = timer.as_mut(), if self.beating.is_none() => {
                    if !waits && !self.load.heartbeat.is_zero() {
                        self.beat();
                        continue;
                    }
                    if self.load.ours && self.connection.received == received {
                        self.connection.ping();
                    }
                    received = self.connection.received;
                    timer.as_mut().reset((Instant::now() + PING).into());
                }
            }
        }
    }
}

async fn run(load: Arc<Load>) -> Result<String, String> {
    let start = Instant::now();
    let seen = Arc::new(Seen {
        start,
        answers: (0..load.warmup + load.steps)
            .map(|_| Default::default())
            .collect(),
        ids: Mutex::default(),
        errors: Mutex::default(),
        failed: AtomicUsize::new(0),
        beats_failed: AtomicUsize::new(0),
        incomplete: AtomicUsize::new(0),
        short: AtomicUsize::new(0),
        bytes: AtomicU64::new(0),
    });
    let (go, waits) = watch::channel(false);
    for first in (0..load.replicas).step_by(OPENING) {
        let opening: Vec<_> = (first..load.replicas.min(first + OPENING))
            .map(|i| {
                let (load, seen, waits) = (load.clone(), seen.clone(), waits.clone());
                let (tell, opened) = oneshot::channel();
                tokio::spawn(async move {
                    let open = tokio::time::timeout(OPEN, Replica::open(load, seen.clone(), i)).await;
                    let replica =
                        match open.unwrap_or_else(|_| Err(format!("it did not attach within {OPEN:?}"))) {
                            Ok(replica) => replica,
                            Err(why) => {
                                let _ = tell.send(Err(why));
                                return;
                            }
                        };
                    let _ = tell.send(Ok(()));
                    if let Err(why) = replica.run(waits).await {
                        seen.error(format!("replica {i}: {why}"));
                    }
                });
                (i, opened)
            })
            .collect();
        for (i, opened) in opening {
            let opened = opened.await.map_err(|e| e.to_string()).and_then(|opened| opened);
            opened.map_err(|why| format!("replica {i}: {why}"))?;
        }
    }
    let connecting = start.elapsed();
    go.send_replace(true);
    let end = Instant::now() + load.limit;
    let done = || {
        seen.answers.last().is_some_and(|(count, _)| {
            count.load(Ordering::Relaxed) + seen.failed.load(Ordering::Relaxed) >= load.replicas
        })
    };
    while !done() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if !load.idle.is_zero() {
        eprintln!("idle");
        tokio::time::sleep(load.idle).await;
        eprintln!("over");
    }
    let complete: Vec<u64> = seen
        .answers
        .iter()
        .take_while(|(count, _)| count.load(Ordering::Relaxed) == load.replicas)
        .map(|(_, latest)| latest.load(Ordering::Relaxed))
        .collect();
    let mut times: Vec<u64> = complete
        .windows(2)
        .skip(load.warmup.saturating_sub(1))
        .map(|w| w[1].saturating_sub(w[0]))
        .collect();
    let result = serde_json::json!({
        "replicas": load.replicas,
        "clients": if load.ours { "ours" } else { "torchft" },
        "steps": complete.len(),
        "asked": load.warmup + load.steps,
        "times_ns": times,
        "quorum_ids": seen.ids.lock().unwrap().len(),
        "incomplete_replies": seen.incomplete.load(Ordering::Relaxed),
        "short_replies": seen.short.load(Ordering::Relaxed),
        "reply_bytes": seen.bytes.load(Ordering::Relaxed),
        "failed": seen.failed.load(Ordering::Relaxed),
        "heartbeats_failed": seen.beats_failed.load(Ordering::Relaxed),
        "errors": *seen.errors.lock().unwrap(),
        "connecting_ms": u64::try_from(connecting.as_millis()).unwrap_or(u64::MAX),
    });
    times.sort_unstable();
    if let (Some(median), Some(worst)) = (times.get(times.len() / 2), times.last()) {
        eprintln!(
            "{} replicas: p50 {:.2} ms, max {:.2} ms",
            load.replicas,
            *median as f64 / 1e6,
            *worst as f64 / 1e6
        );
    }
    Ok(result.to_string())
}

fn main() -> ExitCode {
    let load = match Load::read().and_then(|load| raise_descriptors(load.replicas + 64).map(|()| load)) {
        Ok(load) => Arc::new(load),
        Err(why) => {
            eprintln!("lighthouse_load: {why}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("ox-load")
        .enable_all()
        .build()
        .expect("a runtime");
    let result = runtime.block_on(async {
        tokio::spawn(run(load))
            .await
            .map_err(|e| e.to_string())
            .and_then(|r| r)
    });
    runtime.shutdown_background();
    match result {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("lighthouse_load: {why}");
            ExitCode::FAILURE
        }
    }
}
