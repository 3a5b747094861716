//! One source of a state: its URL, connections to it, and requests whose answers are measured before they are kept.
//!
//! What a source sends, its URL included, is never our own wrong argument: the errors here are `Protocol`, `Corrupt`,
//! `PeerLost`, `Unavailable` or `NotFound`, and name it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use ftcore::{Error, ErrorKind, Result};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::HOST;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use identity::{Party, Role};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::FetchOptions;
use super::assembly::Slot;
use crate::manifest::Manifest;
use crate::server::body::write_chunks;
use crate::{DIGEST_HEADER, EPOCH_HEADER, LINEAGE_HEADER, MAX_WAIT, WAIT_HEADER};

/// What is kept of the text of an error answer.
const MAX_TEXT_BYTES: usize = 1 << 10;

/// Room for the head of an answer, and how much hyper reads at once.
const READ_BUFFER_BYTES: usize = 256 << 10;

/// The slowest transfer that is not given up, beyond the stall time.
const MIN_BYTES_PER_SECOND: u64 = 16 << 10;

/// Pause before a request that failed at once is made again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Which state is wanted; `None`: any.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) step: i64,
    pub(super) epoch: Option<i64>,
    pub(super) lineage: Option<String>,
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "step {}", self.step)?;
        if let Some(epoch) = self.epoch {
            write!(f, " of epoch {epoch}")?;
        }
        Ok(())
    }
}

/// A URL prefix taken apart.
#[derive(Debug)]
pub(super) struct Source {
    /// What errors call it, with its address.
    label: String,
    /// `host:port`, for the `Host` header and for errors.
    authority: String,
    host: String,
    port: u16,
    prefix: String,
    /// As whom it is called, and who it must be.
    party: Option<Arc<Party>>,
    expected: Option<Role>,
    is_secured: bool,
}

impl Source {
    /// `name` is what errors call it; that may be the URL itself.
    pub(super) fn parse(name: &str, url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            let whose = if name == url {
                String::new()
            } else {
                format!("{name}: ")
            };
            // It came from a peer and goes into logs.
            let shown: String = url.chars().take(MAX_TEXT_BYTES).collect();
            let what = format!(
                "{whose}'{}' is not the URL of a checkpoint server: {why}",
                shown.escape_debug()
            );
            Error::new(ErrorKind::Protocol, what)
        };
        let uri: Uri = url.parse().map_err(|e| wrong(&format!("{e}")))?;
        let is_secured = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("it begins neither with http:// nor with https://")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || uri.query().is_some() {
            return Err(wrong("no host, or a query"));
        }
        Ok(Self {
            label: if name == url {
                authority.as_str().to_owned()
            } else {
                format!("{name} at {authority}")
            },
            authority: authority.as_str().to_owned(),
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(if is_secured { 443 } else { 80 }),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            party: None,
            expected: None,
            is_secured,
        })
    }

    /// The source as `party` calls it, which must then be `expected`. Errors: `Unavailable` if only one side has credentials.
    pub(super) fn called_by(mut self, party: Option<Arc<Party>>, expected: Option<Role>) -> Result<Self> {
        let lacks = match (&party, self.is_secured) {
            (Some(_), true) | (None, false) => None,
            (Some(party), false) => Some(format!(
                "it offers its state without credentials, and this process has those of job {}",
                party.job()
            )),
            (None, true) => {
                Some("it asks for credentials, and this process has none (OXCCL_CREDENTIALS)".into())
            }
        };
        if let Some(text) = lacks {
            return Err(self.error(ErrorKind::Unavailable, text));
        }
        (self.party, self.expected) = (party, expected);
        Ok(self)
    }

    pub(super) fn label(&self) -> &str {
        &self.label
    }

    pub(super) fn error(&self, kind: ErrorKind, what: impl Into<String>) -> Error {
        Error::new(kind, what).with_peer_address(&self.label)
    }
}

/// An open connection with nothing in flight. Dropping it closes it.
#[derive(Debug)]
pub(super) struct Connection {
    sender: SendRequest<Empty<Bytes>>,
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    async fn open(source: &Source, stall: Duration) -> Result<Self> {
        let connect = TcpStream::connect((source.host.as_str(), source.port));
        let stream = timeout(stall, connect)
            .await
            .map_err(|_| source.error(ErrorKind::Unavailable, format!("no connection within {stall:?}")))?
            .map_err(|e| {
                source
                    .error(ErrorKind::Unavailable, format!("cannot connect: {e}"))
                    .with_source(e)
            })?;
        // Only a matter of latency.
        let _ = stream.set_nodelay(true);
        let Some(party) = &source.party else {
            return Self::over(source, stream).await;
        };
        let stream = timeout(stall, party.connect(stream, source.expected.as_ref()))
            .await
            .map_err(|_| {
                source.error(
                    ErrorKind::Unavailable,
                    format!("it proved nothing within {stall:?}"),
                )
            })?
            .map_err(|e| source.error(e.kind(), e.message()).with_source(e))?;
        Self::over(source, stream).await
    }

    async fn over<S>(source: &Source, stream: S) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(READ_BUFFER_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|e| broken(source, "opening the connection", e))?;
        // Errors of the connection are also reported by the request that is in flight.
        let driver = tokio::spawn(async move { drop(driver.await) }).abort_handle();
        Ok(Self { sender, driver })
    }

    /// The head of the answer to `GET {prefix}{path}`, within `patience`.
    async fn get(
        &mut self,
        source: &Source,
        path: &str,
        headers: Vec<(&'static str, String)>,
        patience: Duration,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::get(format!("{}{path}", source.prefix)).header(HOST, &source.authority);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request
            .body(Empty::new())
            .map_err(|e| source.error(ErrorKind::Protocol, format!("a request for {path}: {e}")))?;
        let answer = async {
            self.sender.ready().await?;
            self.sender.send_request(request).await
        };
        timeout(patience, answer)
            .await
            .map_err(|_| {
                source.error(
                    ErrorKind::PeerLost,
                    format!("no answer for {path} within {patience:?}"),
                )
            })?
            .map_err(|e| broken(source, path, e))
    }
}

fn broken(source: &Source, what: &str, e: hyper::Error) -> Error {
    let (kind, text) = if e.is_parse() || e.is_parse_too_large() || e.is_parse_status() {
        (ErrorKind::Protocol, "the answer is not HTTP")
    } else {
        (ErrorKind::PeerLost, "the connection broke")
    };
    let cause = std::error::Error::source(&e).map_or(String::new(), |s| format!(" ({s})"));
    source
        .error(kind, format!("{what}: {text}: {e}{cause}"))
        .with_source(e)
}

/// Reads a body of at most `limit` bytes; what was announced is refused if larger and otherwise not relied on.
async fn read_body(
    source: &Source,
    path: &str,
    mut body: Incoming,
    limit: usize,
    stall: Duration,
) -> Result<Bytes> {
    let too_large = |n: u64| {
        source.error(
            ErrorKind::Protocol,
            format!("{path}: an answer of {n} bytes or more, {limit} are allowed"),
        )
    };
    if let Some(announced) = body.size_hint().exact().filter(|n| *n > limit as u64) {
        return Err(too_large(announced));
    }
    let slowest = Duration::from_secs(limit as u64 / MIN_BYTES_PER_SECOND);
    let end = Instant::now() + stall + slowest;
    // Exact for chunks of the usual size, which then waste nothing; beyond that memory follows the data.
    let mut all = BytesMut::with_capacity(limit.min(1 << 20));
    loop {
        let next = (Instant::now() + stall).min(end);
        let frame = timeout_at(next, body.frame()).await.map_err(|_| {
            source.error(
                ErrorKind::PeerLost,
                format!("{path}: stalled after {} bytes", all.len()),
            )
        })?;
        let Some(frame) = frame else {
            return Ok(all.freeze());
        };
        let frame = frame.map_err(|e| broken(source, &format!("{path} after {} bytes", all.len()), e))?;
        if let Ok(data) = frame.into_data() {
            if data.len() > limit.saturating_sub(all.len()) {
                return Err(too_large(all.len() as u64 + data.len() as u64));
            }
            all.extend_from_slice(&data);
        }
    }
}

async fn refusal(source: &Source, path: &str, answer: Response<Incoming>, stall: Duration) -> Error {
    let status = answer.status();
    let text = read_body(source, path, answer.into_body(), MAX_TEXT_BYTES, stall)
        .await
        .unwrap_or_default();
    // The text goes into logs: no control characters from a peer.
    let text: String = String::from_utf8_lossy(&text)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let kind = match status {
        StatusCode::NOT_FOUND | StatusCode::CONFLICT => ErrorKind::NotFound,
        StatusCode::SERVICE_UNAVAILABLE => ErrorKind::Unavailable,
        _ => ErrorKind::Protocol,
    };
    source.error(kind, format!("{path}: {} {text}", status.as_u16()))
}

/// Asks until the state is published there: the manifest, checked, and the connection for more. `said` keeps what
/// the source serves instead meanwhile. Runs until it has an answer or a reason to stop; the caller bounds it by the deadline.
pub(super) async fn ask_manifest(
    source: &Source,
    wanted: &Wanted,
    deadline: Instant,
    options: &FetchOptions,
    said: &Mutex<Option<String>>,
) -> Result<(Connection, Manifest)> {
    let mut refused = false;
    loop {
        let wait = deadline.saturating_duration_since(Instant::now()).min(MAX_WAIT);
        match ask_once(source, wanted, wait, options).await {
            Ok(Answer::Found(connection, manifest)) => return Ok((connection, *manifest)),
            Ok(Answer::NotYet(text)) => *said.lock().unwrap_or_else(PoisonError::into_inner) = Some(text),
            // One more try: the listener's queue may have been full, or an idle connection closed.
            Err(e) if matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::PeerLost) && !refused => {
                tracing::debug!("asking for a manifest again: {e}");
                refused = true;
            }
            Err(e) => return Err(e),
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

enum Answer {
    Found(Connection, Box<Manifest>),
    /// What is served instead, as the source says it.
    NotYet(String),
}

async fn ask_once(
    source: &Source,
    wanted: &Wanted,
    wait: Duration,
    options: &FetchOptions,
) -> Result<Answer> {
    let stall = options.stall_timeout;
    let mut connection = Connection::open(source, stall).await?;
    let path = format!("/{}/manifest", wanted.step);
    // A little less than the time that there is: what the source says at the end of the wait is to arrive before ours.
    let held = wait.saturating_sub(wait.min(RETRY_PAUSE * 4) / 2);
    let mut headers = vec![(WAIT_HEADER, held.as_millis().to_string())];
    headers.extend(wanted.epoch.map(|e| (EPOCH_HEADER, e.to_string())));
    headers.extend(wanted.lineage.clone().map(|l| (LINEAGE_HEADER, l)));
    // Hashing a large state takes the source a while the first time.
    let patience = wait + stall + Duration::from_secs(options.max_state_bytes >> 30);
    let answer = connection.get(source, &path, headers, patience).await?;
    if answer.status() == StatusCode::NOT_FOUND {
        let text = refusal(source, &path, answer, stall).await;
        return Ok(Answer::NotYet(text.message().to_owned()));
    }
    if answer.status() != StatusCode::OK {
        return Err(refusal(source, &path, answer, stall).await);
    }
    let json = read_body(
        source,
        &path,
        answer.into_body(),
        options.max_manifest_bytes,
        stall,
    )
    .await?;
    let manifest = Manifest::parse(&json, options.max_state_bytes).map_err(|e| {
        source
            .error(e.kind(), format!("{path}: {}", e.message()))
            .with_source(e)
    })?;
    // A source that does not know these headers, or lies.
    let id = manifest.id();
    if id.step != wanted.step
        || wanted.epoch.is_some_and(|e| e != id.epoch)
        || wanted.lineage.as_ref().is_some_and(|l| *l != id.lineage)
    {
        let lineage = wanted.lineage.as_deref().unwrap_or("any");
        return Err(source.error(
            ErrorKind::Corrupt,
            format!("{path}: the manifest is of {id}, asked for {wanted} (lineage: {lineage})"),
        ));
    }
    Ok(Answer::Found(connection, Box::new(manifest)))
}

/// How a request for chunks ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Comes back if it can be used again.
    pub(super) connection: Option<Connection>,
    /// The slots of the chunks that did not come, empty.
    pub(super) left: Vec<Slot>,
    pub(super) result: Result<()>,
}

/// Asks for the chunks of `slots`, in that order, and reads each into its slot. Every chunk whose length and hash fit goes to
/// `done` at once, so that what came before a failure is kept. `cancel` ends it with `Aborted`.
pub(super) async fn ask_chunks(
    source: &Source,
    connection: Option<Connection>,
    manifest: &Manifest,
    mut slots: Vec<Slot>,
    (stall, cancel): (Duration, &Notify),
    done: impl Fn(Slot),
) -> Ended {
    // The next one is at the end.
    slots.reverse();
    let (connection, result) = tokio::select! {
        read = read_chunks(source, connection, manifest, &mut slots, stall, done) => read,
        () = cancel.notified() => (None, Err(source.error(ErrorKind::Aborted, "no longer wanted"))),
    };
    for slot in &mut slots {
        slot.data.clear();
    }
    Ended {
        connection,
        left: slots,
        result,
    }
}

async fn read_chunks(
    source: &Source,
    connection: Option<Connection>,
    manifest: &Manifest,
    slots: &mut Vec<Slot>,
    stall: Duration,
    done: impl Fn(Slot),
) -> (Option<Connection>, Result<()>) {
    let mut connection = match connection {
        Some(c) => c,
        None => match Connection::open(source, stall).await {
            Ok(c) => c,
            Err(e) => {
                // It has answered before, so this is not a source that was never there.
                let what = format!("no new connection: {}", e.message());
                return (None, Err(source.error(ErrorKind::PeerLost, what).with_source(e)));
            }
        },
    };
    let list = write_chunks(slots.iter().rev().map(|s| s.index));
    let path = format!("/{}/chunk/{list}", manifest.step());
    let headers = vec![(DIGEST_HEADER, manifest.digest().to_hex().to_string())];
    let answer = match connection.get(source, &path, headers, stall).await {
        Ok(answer) => answer,
        Err(e) => return (None, Err(e)),
    };
    if answer.status() != StatusCode::OK {
        return (None, Err(refusal(source, &path, answer, stall).await));
    }
    let total: usize = slots.iter().map(|s| s.length).sum();
    match fill(
        source,
        &path,
        answer.into_body(),
        manifest,
        slots,
        total,
        stall,
        done,
    )
    .await
    {
        Ok(()) => (Some(connection), Ok(())),
        Err(e) => (None, Err(e)),
    }
}

#[allow(clippy::too_many_arguments, reason = "one caller; the parts of one request")]
async fn fill(
    source: &Source,
    path: &str,
    mut body: Incoming,
    manifest: &Manifest,
    slots: &mut Vec<Slot>,
    total: usize,
    stall: Duration,
    done: impl Fn(Slot),
) -> Result<()> {
    let longer = || {
        let what = format!("{path}: an answer of more than the {total} bytes that were asked for");
        source.error(ErrorKind::Protocol, what)
    };
    if body.size_hint().exact().is_some_and(|n| n > total as u64) {
        return Err(longer());
    }
    let end = Instant::now() + stall + Duration::from_secs(total as u64 / MIN_BYTES_PER_SECOND);
    let mut read = 0usize;
    loop {
        let next = (Instant::now() + stall).min(end);
        let frame = timeout_at(next, body.frame())
            .await
            .map_err(|_| source.error(ErrorKind::PeerLost, format!("{path}: stalled after {read} bytes")))?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|e| broken(source, &format!("{path} after {read} bytes"), e))?;
        let Ok(mut data) = frame.into_data() else { continue };
        read = read.saturating_add(data.len());
        while !data.is_empty() {
            let slot = slots.last_mut().ok_or_else(longer)?;
            let take = data.len().min(slot.length.saturating_sub(slot.data.len()));
            slot.data.extend_from_slice(&data.split_to(take));
            if slot.data.len() == slot.length {
                check(source, manifest, slot)?;
                if let Some(slot) = slots.pop() {
                    done(slot);
                }
            }
        }
    }
    match slots.last() {
        None => Ok(()),
        // An answer that ends in good order and is too short says that there is no more.
        Some(slot) => Err(wrong(source, manifest, slot)),
    }
}

fn check(source: &Source, manifest: &Manifest, slot: &Slot) -> Result<()> {
    if manifest.chunk_hash(slot.index) == Some(blake3::hash(&slot.data)) {
        return Ok(());
    }
    Err(wrong(source, manifest, slot))
}

fn wrong(source: &Source, manifest: &Manifest, slot: &Slot) -> Error {
    let (count, id, found) = (manifest.chunk_count(), manifest.id(), blake3::hash(&slot.data));
    let expected = manifest
        .chunk_hash(slot.index)
        .map_or_else(|| "no such chunk".to_owned(), |h| h.to_hex().to_string());
    let what = format!(
        "{id}, chunk {} of {count}: {} bytes with hash {found}, the manifest says {} bytes with {expected}",
        slot.index,
        slot.data.len(),
        slot.length
    );
    source.error(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart_and_wrong_ones_named() {
        let s = Source::parse("r0", "http://[::1]:81/ckpt/ab/").unwrap();
        assert_eq!(
            (s.host.as_str(), s.port, s.prefix.as_str()),
            ("::1", 81, "/ckpt/ab")
        );
        assert_eq!((s.authority.as_str(), s.label()), ("[::1]:81", "r0 at [::1]:81"));
        assert_eq!(
            Source::parse("http://a:1/x", "http://a:1/x").unwrap().label(),
            "a:1"
        );
        for wrong in [
            "",
            "<n/a>",
            "ftp://a/b",
            "http://",
            "a:1/b",
            "http://a/b?c=d",
            "http:///x",
        ] {
            let e = Source::parse("replica 'r0'", wrong).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{wrong}");
            assert!(e.message().contains(&format!("'{wrong}'")), "{e}");
            assert!(e.message().contains("replica 'r0'"), "{e}");
        }
    }
}
