//! Connections: accept, parse one small request, look it up, answer.
//!
//! `serve` runs on the `ox-ckpt` thread until it is told to stop. Each connection is a task that holds a [`Pin`] on the snapshot that it
//! read last, which is what makes it a reader. Connections that ask for nothing cost little and make room for new ones (`guests`); an
//! answer holds one of a bounded number of permits for as long as its bytes are in memory.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blake3::Hash;
use ftcore::forked::Parents;
use ftcore::{Epoch, Step, accept_failure};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use identity::Acceptor;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::body::{Answer, Chunks, Held, parse_chunks};
use super::guests::{Busy, Guest, Guests};
use super::pace::Paced;
use super::serving::{Asked, Lookup, Part, Pin, Serving};
use super::{DIGEST_HEADER, EPOCH_HEADER, LINEAGE_HEADER, MAX_WAIT, TransportOptions, WAIT_HEADER};

/// Enough for any request of ours; what is longer is refused.
const MAX_REQUEST_BYTES: usize = 16 << 10;

/// Connections that may be open for each answer that may be in progress.
const OPEN_FOR_EACH_ANSWER: usize = 8;

/// Pause after a failed accept (out of file descriptors, say), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Limits {
    /// `/ckpt/{incarnation}`.
    pub(super) prefix: String,
    pub(super) options: TransportOptions,
    /// For the answers in progress.
    pub(super) permits: Arc<Semaphore>,
    /// Who may connect; `None`: any peer.
    acceptor: Option<Acceptor>,
}

impl Limits {
    /// `acceptor` makes what finds out who connects, with a limit of its own for those of whom that is not known yet.
    pub(super) fn new(
        prefix: String,
        options: TransportOptions,
        acceptor: impl FnOnce(usize) -> Option<Acceptor>,
    ) -> Self {
        let permits = options.max_connections.min(Semaphore::MAX_PERMITS);
        let acceptor = acceptor(options.max_connections.saturating_mul(OPEN_FOR_EACH_ANSWER) / 2);
        Self {
            prefix,
            options,
            acceptor,
            permits: Arc::new(Semaphore::new(permits)),
        }
    }
}

type Stop = watch::Receiver<Option<Instant>>;

/// Serves until `stop` holds a deadline, then lets answers end until then. Returns how many connections were cut off.
pub(super) async fn serve(
    listener: TcpListener,
    serving: Arc<Serving>,
    limits: Limits,
    mut stop: Stop,
) -> usize {
    let mut tasks = JoinSet::new();
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => Parents::new(listener),
        Err(e) => {
            tracing::error!("the checkpoint server cannot use its socket: {e}");
            return 0;
        }
    };
    let limits = Arc::new(limits);
    let guests = Guests::new(
        limits
            .options
            .max_connections
            .saturating_mul(OPEN_FOR_EACH_ANSWER),
    );
    let mut failing = false;
    loop {
        // Finished tasks are collected here, so the set holds little more than there are connections.
        while tasks.try_join_next().is_some() {}
        tokio::select! {
            () = stopping(&mut stop) => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    failing = false;
                    let Some(guest) = guests.admit(limits.acceptor.is_none()) else {
                        tracing::debug!(%peer, "checkpoint connection refused: all others are in the middle of an answer");
                        continue;
                    };
                    let (serving, limits, stop) = (Arc::clone(&serving), Arc::clone(&limits), stop.clone());
                    tasks.spawn(async move {
                        if let Err(e) = identified(stream, peer, &serving, &limits, &guest, stop).await {
                            tracing::debug!(%peer, "checkpoint connection ended: {e}");
                        }
                        serving.sweep();
                    });
                }
                Err(e) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!("the checkpoint server cannot accept: {}", accept_failure(&e));
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let all_ended = async { while tasks.join_next().await.is_some() {} };
    tokio::select! {
        () = all_ended => 0,
        () = deadline_passed(stop) => {
            let cut = tasks.len();
            tasks.shutdown().await;
            serving.sweep();
            cut
        }
    }
}

/// Ready once a stop was asked for, or no handle is left that could.
async fn stopping(stop: &mut Stop) {
    let _ = stop.wait_for(Option::is_some).await;
}

/// Ready once the stop's deadline has passed. A drop after a shutdown may move it forward.
async fn deadline_passed(mut stop: Stop) {
    loop {
        let deadline = stop.borrow_and_update().unwrap_or_else(Instant::now);
        tokio::select! {
            () = tokio::time::sleep_until(deadline.into()) => return,
            changed = stop.changed() => if changed.is_err() { return },
        }
    }
}

/// Finds out who has connected, if it matters, and serves the connection.
async fn identified(
    stream: TcpStream,
    peer: SocketAddr,
    serving: &Arc<Serving>,
    limits: &Arc<Limits>,
    guest: &Guest,
    mut stop: Stop,
) -> Result<(), String> {
    // Only a matter of latency.
    let _ = stream.set_nodelay(true);
    let stall = limits.options.stall_timeout;
    // Below TLS: it watches what goes out.
    let paced = move |stream| Paced::new(stream, stall);
    let Some(acceptor) = &limits.acceptor else {
        return connection(paced(stream), serving, limits, guest, stop).await;
    };
    let deadline = Instant::now() + limits.options.greeting_timeout;
    let proved = tokio::select! {
        proved = acceptor.accept(stream, peer, deadline, paced) => proved,
        () = guest.asked_to_go() => None,
        () = stopping(&mut stop) => None,
    };
    let Some((stream, _)) = proved else {
        return Err("it did not prove that it is of the job".into());
    };
    guest.is_member();
    connection(stream, serving, limits, guest, stop).await
}

async fn connection<S>(
    stream: S,
    serving: &Arc<Serving>,
    limits: &Arc<Limits>,
    guest: &Guest,
    mut stop: Stop,
) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let pin: Arc<Mutex<Option<Pin>>> = Arc::default();
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let (serving, limits, pin) = (Arc::clone(serving), Arc::clone(limits), Arc::clone(&pin));
        let busy = guest.busy();
        async move { Ok::<_, Infallible>(answer(&request, &serving, &limits, &pin, busy).await) }
    });
    let io = TokioIo::new(stream);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.options.idle_timeout)
        .max_buf_size(MAX_REQUEST_BYTES)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    let said = |e: hyper::Error| e.to_string();
    let greeting = tokio::time::sleep(limits.options.greeting_timeout);
    tokio::select! {
        ended = connection.as_mut() => return ended.map_err(said),
        () = guest.asked_to_go() => return Err("it had no request for longest, and made room".into()),
        () = unless_greeted(greeting, guest) => return Err("it sent no request in time".into()),
        () = stopping(&mut stop) => {}
    }
    connection.as_mut().graceful_shutdown();
    connection.await.map_err(said)
}

/// Ready after `time` if the first request has not come by then.
async fn unless_greeted(time: tokio::time::Sleep, guest: &Guest) {
    time.await;
    if guest.greeted() {
        std::future::pending::<()>().await;
    }
}

async fn answer<B>(
    request: &Request<B>,
    serving: &Serving,
    limits: &Limits,
    pin: &Mutex<Option<Pin>>,
    busy: Busy,
) -> Response<Answer> {
    if request.method() != Method::GET {
        return text(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("only GET is answered, not {}", request.method()),
        );
    }
    let (asked, part) = match parse(request.uri().path(), &limits.prefix, request.headers()) {
        Ok(what) => what,
        Err(why) => return text(StatusCode::BAD_REQUEST, why),
    };
    let wait = wait_of(request.headers());
    let until = tokio::time::Instant::now() + wait;
    let mut changes = serving.subscribe();
    let (snapshot, reader) = loop {
        match serving.lookup(&asked, part.digest()) {
            Lookup::Found(snapshot, reader) => break (snapshot, reader),
            Lookup::Other(why) => return text(StatusCode::CONFLICT, why),
            Lookup::Closed => return text(StatusCode::SERVICE_UNAVAILABLE, "shutting down".into()),
            Lookup::NotYet(why) => {
                // Subscribed before the look-up: no change can fall between the two.
                match tokio::time::timeout_at(until, changes.changed()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return text(StatusCode::SERVICE_UNAVAILABLE, "shutting down".into()),
                    Err(_) => {
                        let why = format!("{why}: not published within {} ms", wait.as_millis());
                        return text(StatusCode::NOT_FOUND, why);
                    }
                }
            }
        }
    };
    // From here on this connection is a reader of that snapshot; an earlier one is let go.
    let earlier = pin.lock().unwrap_or_else(PoisonError::into_inner).replace(reader);
    drop(earlier);
    // Hashing takes long the first time; the other connections go on meanwhile.
    let hashed = tokio::task::spawn_blocking(move || {
        let json = snapshot.manifest_json();
        (snapshot, json)
    });
    let (snapshot, json) = match hashed.await {
        Ok(hashed) => hashed,
        Err(e) => return text(StatusCode::INTERNAL_SERVER_ERROR, format!("hashing failed: {e}")),
    };
    let (body, kind) = match part {
        Part::Manifest => (
            Answer::text(json).holding(Held::new(None, busy)),
            "application/json",
        ),
        Part::Chunks(indices, _) => {
            let Some(chunks) = Chunks::of(&snapshot, indices) else {
                return text(
                    StatusCode::RANGE_NOT_SATISFIABLE,
                    format!("step {} has not all of these chunks", asked.step),
                );
            };
            // Others that wait for theirs go on in turn: a peer that has one must read it, or loses it (`pace`).
            let Ok(permit) = Arc::clone(&limits.permits).acquire_owned().await else {
                return text(StatusCode::SERVICE_UNAVAILABLE, "shutting down".into());
            };
            let body = Answer::chunks(chunks).holding(Held::new(Some(permit), busy));
            (body, "application/octet-stream")
        }
    };
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// `{prefix}/{step}/manifest` or `{prefix}/{step}/chunk/{list}`.
fn parse(path: &str, prefix: &str, headers: &HeaderMap) -> Result<(Asked, Part), String> {
    let rest = path
        .strip_prefix(prefix)
        .and_then(|r| r.strip_prefix('/'))
        .ok_or("no such path here: it belongs to another server, or to an earlier incarnation of this one")?;
    let mut pieces = rest.split('/');
    let mut next = || pieces.next().unwrap_or_default();
    let step = next()
        .parse::<i64>()
        .map_err(|e| format!("the step in the path: {e}"))?;
    let part = match next() {
        "manifest" => Part::Manifest,
        "chunk" => {
            let indices = parse_chunks(next())?;
            let digest = match headers.get(DIGEST_HEADER) {
                Some(hex) => {
                    Some(Hash::from_hex(hex.as_bytes()).map_err(|e| format!("{DIGEST_HEADER}: {e}"))?)
                }
                None => None,
            };
            Part::Chunks(indices, digest)
        }
        _ => return Err("only {step}/manifest and {step}/chunk/{list} are served".into()),
    };
    if pieces.next().is_some() {
        return Err("only {step}/manifest and {step}/chunk/{list} are served".into());
    }
    let epoch = match headers.get(EPOCH_HEADER) {
        Some(text) => Some(
            text.to_str()
                .ok()
                .and_then(|t| t.parse().ok())
                .map(Epoch::of_signed)
                .ok_or_else(|| format!("{EPOCH_HEADER} is not a number"))?,
        ),
        None => None,
    };
    let lineage = headers
        .get(LINEAGE_HEADER)
        .map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned());
    let asked = Asked {
        step: Step(step),
        epoch,
        lineage,
    };
    Ok((asked, part))
}

/// A header that is not a number counts as none: the answer then comes at once.
fn wait_of(headers: &HeaderMap) -> Duration {
    let ms = headers
        .get(WAIT_HEADER)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse::<u64>().ok());
    Duration::from_millis(ms.unwrap_or(0)).min(MAX_WAIT)
}

fn text(status: StatusCode, text: String) -> Response<Answer> {
    let mut response = Response::new(Answer::text(text));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
