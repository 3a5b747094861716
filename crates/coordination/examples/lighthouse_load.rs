//! A load generator for a lighthouse, run by `cargo xtask bench-lighthouse`: N replicas in one process, on torchft's wire.
//!
//! Each replica has a connection of its own, as real ones do, asks for a quorum and asks for the next step as soon as it has its answer. A step takes
//! from the last answer of the step before to its own last answer. torchft's kind (`--clients torchft`) sends heartbeats and gets the full member list;
//! ours opens the attach stream, sends no heartbeats, and names the member list that it holds. Replies are scanned, not decoded: a replica decodes its
//! own on its own machine. The result is one line of JSON on standard output.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a tool that ends with the reason when something is wrong"
)]

use std::collections::BTreeMap;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ftcore::Credentials;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use identity::{ClientStream, Party, Role};
use prost::Message;
use prost::bytes::Bytes;
use protocol::Lineage;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, dead_code)]
mod torchft {
    tonic::include_proto!("torchft");
}
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, dead_code)]
mod oxccl {
    tonic::include_proto!("oxccl");
}

const QUORUM: &str = "/torchft.LighthouseService/Quorum";
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

/// Connects one replica over TLS.
#[derive(Clone)]
struct Connector(Arc<Party>);

impl Service<http::Uri> for Connector {
    type Response = TokioIo<ClientStream<TcpStream>>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: http::Uri) -> Self::Future {
        let party = self.0.clone();
        Box::pin(async move {
            let at = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(443));
            let stream = TcpStream::connect(at).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(
                party.connect(stream, Some(&Role::Lighthouse)).await?,
            ))
        })
    }
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

/// Calls for a quorum and gives the reply's length in bytes and as much of its beginning as is wanted: a client of torchft's or ours decodes the reply on
/// a machine of its own, so here it is only taken from the socket.
async fn call(
    channel: &mut Channel,
    message: torchft::LighthouseQuorumRequest,
    limit: Duration,
    wanted: usize,
) -> Result<(usize, Vec<u8>), String> {
    let message = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend_from_slice(
        &u32::try_from(message.len())
            .map_err(|e| e.to_string())?
            .to_be_bytes(),
    );
    framed.extend_from_slice(&message);
    let request = http::Request::post(QUORUM)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-timeout", format!("{}S", limit.as_secs()))
        .body(Body::new(Full::new(Bytes::from(framed))))
        .map_err(|e| e.to_string())?;
    std::future::poll_fn(|context| channel.poll_ready(context))
        .await
        .map_err(|e| e.to_string())?;
    let response = channel.call(request).await.map_err(|e| e.to_string())?;
    let (head, mut body) = response.into_parts();
    let (mut length, mut beginning, mut status) = (0, Vec::new(), Status::from_header_map(&head.headers));
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| e.to_string())?;
        if let Some(data) = frame.data_ref() {
            let missing = wanted.saturating_sub(beginning.len()).min(data.len());
            beginning.extend_from_slice(&data[..missing]);
            length += data.len();
        } else if let Some(trailers) = frame.trailers_ref() {
            status = Status::from_header_map(trailers);
        }
    }
    match status {
        Some(status) if status.code() == Code::Ok => {
            Ok((length, beginning.split_off(beginning.len().min(5))))
        }
        Some(status) => Err(format!("{}: {}", status.code(), status.message())),
        None => Err("the reply has no status".into()),
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

/// What a reply says: the quorum's id, its number of members if the list is in it, and the name of the list.
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
    over: AtomicBool,
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
        life: load.ours.then(|| format!("{i}-1700000000000000000")),
        ..torchft::QuorumMember::default()
    }
}

async fn steps(load: Arc<Load>, seen: Arc<Seen>, mut channel: Channel, i: usize) {
    let (mut last, mut list, mut lineage) = (0, 0, Lineage::default());
    for step in 0..load.warmup + load.steps {
        let message = torchft::LighthouseQuorumRequest {
            requester: Some(member(&load, i, step, last, &lineage)),
            held_list: list,
        };
        // One replica counts the members, which takes the whole list; ours need the list's number, which is at the end, once.
        let wanted = if i == 0 || load.ours && list == 0 {
            usize::MAX
        } else {
            256
        };
        let (length, bytes) = match call(&mut channel, message, load.limit, wanted).await {
            Ok(reply) => reply,
            Err(why) => return seen.error(format!("replica {i}, step {step}: {why}")),
        };
        let now = u64::try_from(seen.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let Some(reply) = scan(&bytes) else {
            return seen.error(format!("replica {i}, step {step}: the reply is damaged"));
        };
        if let Some((count, latest)) = seen.answers.get(step) {
            latest.fetch_max(now, Ordering::Relaxed);
            count.fetch_add(1, Ordering::Relaxed);
        }
        seen.bytes.fetch_add(length as u64, Ordering::Relaxed);
        match reply.members {
            Some(members) if wanted == usize::MAX && members != load.replicas => {
                seen.incomplete.fetch_add(1, Ordering::Relaxed);
            }
            Some(_) => {}
            None => {
                seen.short.fetch_add(1, Ordering::Relaxed);
            }
        }
        if reply.quorum_id != last {
            *seen.ids.lock().unwrap().entry(reply.quorum_id).or_default() += 1;
        }
        last = reply.quorum_id;
        if load.ours {
            let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            lineage = lineage.after(number(last), number(step as u64));
            // A whole list that comes later is not looked through: the next one is asked for without a name, and is.
            list = if wanted == usize::MAX || reply.members.is_none() {
                reply.list
            } else {
                0
            };
        }
    }
}

async fn replica(load: Arc<Load>, seen: Arc<Seen>, channel: Channel, i: usize) {
    let id = member(&load, i, 0, 0, &Lineage::default()).replica_id;
    let mut background = Vec::new();
    if load.ours {
        let request = oxccl::AttachRequest {
            replica_id: id.clone(),
            address: String::new(),
            last_quorum_id: 0,
        };
        let mut client = oxccl::oxccl_lighthouse_client::OxcclLighthouseClient::new(channel.clone());
        let (seen, stream) = (seen.clone(), client.attach(request).await);
        background.push(tokio::spawn(async move {
            match stream {
                Ok(response) => {
                    let mut events = response.into_inner();
                    loop {
                        match events.message().await {
                            Ok(Some(event)) => seen.error(format!("replica {i} was told {event:?}")),
                            Ok(None) => break,
                            Err(status) => {
                                return seen
                                    .error(format!("replica {i}: its stream broke: {}", status.message()));
                            }
                        }
                    }
                }
                Err(status) => seen.error(format!("replica {i} could not attach: {}", status.message())),
            }
        }));
    }
    if !load.heartbeat.is_zero() {
        let (mut client, every, seen) = (
            torchft::lighthouse_service_client::LighthouseServiceClient::new(channel.clone()),
            load.heartbeat,
            seen.clone(),
        );
        background.push(tokio::spawn(async move {
            // torchft's loop: send, wait for the answer, sleep.
            loop {
                if client
                    .heartbeat(torchft::LighthouseHeartbeatRequest {
                        replica_id: id.clone(),
                    })
                    .await
                    .is_err()
                {
                    seen.beats_failed.fetch_add(1, Ordering::Relaxed);
                }
                tokio::time::sleep(every).await;
            }
        }));
    }
    steps(load.clone(), seen.clone(), channel, i).await;
    // It stays alive for the others until the run is over.
    while !seen.over.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    background.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn run(load: Arc<Load>) -> Result<String, String> {
    let start = Instant::now();
    let mut channels = Vec::new();
    while channels.len() < load.replicas {
        let n = OPENING.min(load.replicas - channels.len());
        let opening: Vec<_> = (channels.len()..channels.len() + n)
            .map(|i| {
                let party = load
                    .credentials
                    .as_ref()
                    .map(|c| Party::new(c, Role::Replica(name(i))));
                let plain = load.url.replacen("https://", "http://", 1);
                let endpoint = Endpoint::from_shared(plain).map(|e| {
                    let endpoint = e.tcp_nodelay(true).connect_timeout(Duration::from_secs(20));
                    if load.ours {
                        // As a manager server's; but thousands of them share a thread here, which may be late.
                        endpoint
                            .http2_keep_alive_interval(Duration::from_secs(2))
                            .keep_alive_timeout(Duration::from_secs(60))
                            .keep_alive_while_idle(true)
                    } else {
                        endpoint
                    }
                });
                tokio::spawn(async move {
                    let endpoint = endpoint.map_err(|e| e.to_string())?;
                    let channel = match party.transpose().map_err(|e| e.to_string())? {
                        None => endpoint.connect().await,
                        Some(party) => endpoint.connect_with_connector(Connector(party)).await,
                    };
                    channel.map_err(|e| format!("{e:?}"))
                })
            })
            .collect();
        for one in opening {
            channels.push(one.await.map_err(|e| e.to_string())??);
        }
    }
    let connecting = start.elapsed();
    let seen = Arc::new(Seen {
        start: Instant::now(),
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
        over: AtomicBool::new(false),
    });
    let replicas: Vec<_> = channels
        .into_iter()
        .enumerate()
        .map(|(i, channel)| tokio::spawn(replica(load.clone(), seen.clone(), channel, i)))
        .collect();
    let end = seen.start + load.limit;
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
    seen.over.store(true, Ordering::Relaxed);
    drop(replicas);
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
