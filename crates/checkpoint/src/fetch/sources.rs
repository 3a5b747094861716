//! One source of a state: its URL, connections to it, and requests whose answers are measured before they are kept.
//!
//! What a source sends, its URL included, is never our own wrong argument: the errors here are `Protocol`, `Corrupt`,
//! `PeerLost`, `Unavailable` or `NotFound`, and name it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blake3::{Hash, Hasher};
use bytes::BytesMut;
use ftcore::forked::Parents;
use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use hyper::{StatusCode, Uri};
use identity::{Party, Role};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::FetchOptions;
use super::assembly::Slot;
use super::http::{Broken, Head, Wire};
use crate::manifest::Manifest;
use crate::server::body::write_chunks;
use crate::{DIGEST_HEADER, EPOCH_HEADER, LINEAGE_HEADER, MAX_WAIT, WAIT_HEADER};

/// What is kept of the text of an error answer.
const MAX_TEXT_BYTES: usize = 1 << 10;

/// What is read of a chunk, or of a text, before it is looked at: fits a core's cache, so that it is hashed from there.
const READ_BYTES: usize = 256 << 10;

/// A chunk is hashed in pieces of this size as it arrives, which must be a power of two for the hash to be fast.
const HASH_BYTES: usize = 128 << 10;

/// The slowest transfer that is not given up, beyond the stall time.
const MIN_BYTES_PER_SECOND: u64 = 16 << 10;

/// Pause before a request that failed at once is made again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Which state is wanted; `None`: any.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) step: Step,
    pub(super) epoch: Option<Epoch>,
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
pub(super) struct Connection(Wire);

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
        let stream = Pin::new(Parents::new(stream));
        let Some(party) = &source.party else {
            return Ok(Self(Wire::over(stream)));
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
        Ok(Self(Wire::over(stream)))
    }

    /// The head of the answer to `GET {prefix}{path}`, within `answer_limit`.
    async fn get(
        &mut self,
        source: &Source,
        path: &str,
        headers: &[(&str, String)],
        answer_limit: Duration,
    ) -> Result<Head> {
        let whole = format!("{}{path}", source.prefix);
        let asked = self.0.get(&source.authority, &whole, headers);
        let answer = timeout(answer_limit, asked).await.map_err(|_| {
            source.error(
                ErrorKind::PeerLost,
                format!("no answer for {path} within {answer_limit:?}"),
            )
        })?;
        answer.map_err(|e| match e {
            Broken::Strange(text) => source.error(
                ErrorKind::Protocol,
                format!("{path}: the answer is not HTTP: {text}"),
            ),
            Broken::Lost(e) => broken(source, path, e),
        })
    }
}

fn broken(source: &Source, what: &str, e: std::io::Error) -> Error {
    source
        .error(ErrorKind::PeerLost, format!("{what}: the connection broke: {e}"))
        .with_source(e)
}

/// Reads a body of at most `limit` bytes; what was announced is refused if larger and otherwise not relied on.
async fn read_body(
    source: &Source,
    path: &str,
    (connection, head): (&mut Connection, Head),
    limit: usize,
    stall: Duration,
) -> Result<BytesMut> {
    if let Some(announced) = head.length.filter(|n| *n > limit as u64) {
        return Err(source.error(
            ErrorKind::Protocol,
            format!("{path}: an answer of {announced} bytes, {limit} are allowed"),
        ));
    }
    let slowest = Duration::from_secs(limit as u64 / MIN_BYTES_PER_SECOND);
    let end = Instant::now() + stall + slowest;
    // Memory follows the data.
    let mut all = BytesMut::new();
    loop {
        let next = (Instant::now() + stall).min(end);
        let read = timeout_at(next, connection.0.read(&mut all, READ_BYTES)).await;
        let read = read.map_err(|_| {
            source.error(
                ErrorKind::PeerLost,
                format!("{path}: stalled after {} bytes", all.len()),
            )
        })?;
        match read {
            Ok(0) => return Ok(all),
            Ok(_) => {}
            Err(e) => return Err(broken(source, &format!("{path} after {} bytes", all.len()), e)),
        }
    }
}

async fn refusal(
    source: &Source,
    path: &str,
    (connection, head): (&mut Connection, Head),
    stall: Duration,
) -> Error {
    let status = head.status;
    let text = read_body(source, path, (connection, head), MAX_TEXT_BYTES, stall)
        .await
        .unwrap_or_default();
    // The text goes into logs: no control characters from a peer.
    let text: String = String::from_utf8_lossy(&text)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let kind = match StatusCode::from_u16(status) {
        Ok(StatusCode::NOT_FOUND | StatusCode::CONFLICT) => ErrorKind::NotFound,
        Ok(StatusCode::SERVICE_UNAVAILABLE) => ErrorKind::Unavailable,
        _ => ErrorKind::Protocol,
    };
    source.error(kind, format!("{path}: {status} {text}"))
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
    let answer_limit = wait + stall + Duration::from_secs(options.max_state_bytes >> 30);
    let head = connection.get(source, &path, &headers, answer_limit).await?;
    if head.status == StatusCode::NOT_FOUND {
        let text = refusal(source, &path, (&mut connection, head), stall).await;
        return Ok(Answer::NotYet(text.message().to_owned()));
    }
    if head.status != StatusCode::OK {
        return Err(refusal(source, &path, (&mut connection, head), stall).await);
    }
    let limit = options.max_manifest_bytes;
    let json = read_body(source, &path, (&mut connection, head), limit, stall).await?;
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
    let head = match connection.get(source, &path, &headers, stall).await {
        Ok(head) => head,
        Err(e) => return (None, Err(e)),
    };
    if head.status != StatusCode::OK {
        let refused = refusal(source, &path, (&mut connection, head), stall).await;
        return (None, Err(refused));
    }
    match fill(
        source,
        &path,
        (&mut connection, head),
        manifest,
        slots,
        stall,
        done,
    )
    .await
    {
        Ok(()) => (Some(connection).filter(|c| c.0.is_reusable()), Ok(())),
        Err(e) => (None, Err(e)),
    }
}

/// Reads the body into the slots, the last one first.
async fn fill(
    source: &Source,
    path: &str,
    (connection, head): (&mut Connection, Head),
    manifest: &Manifest,
    slots: &mut Vec<Slot>,
    stall: Duration,
    done: impl Fn(Slot),
) -> Result<()> {
    let total = slots.iter().map(|s| s.length as u64).sum::<u64>();
    let strange = |what: &str| {
        let what = format!("{path}: an answer of {what} the {total} bytes that were asked for");
        source.error(ErrorKind::Protocol, what)
    };
    if head.length.ok_or_else(|| strange("unknown length instead of"))? > total {
        return Err(strange("more than"));
    }
    let end = Instant::now() + stall + Duration::from_secs(total / MIN_BYTES_PER_SECOND);
    let mut read = 0usize;
    while let Some(slot) = slots.last_mut() {
        let mut hashing = Hashing::default();
        while slot.data.len() < slot.length {
            let next = (Instant::now() + stall).min(end);
            let limit = READ_BYTES.min(slot.length.saturating_sub(slot.data.len()));
            let more = timeout_at(next, connection.0.read(&mut slot.data, limit)).await;
            let more = more
                .map_err(|_| {
                    source.error(ErrorKind::PeerLost, format!("{path}: stalled after {read} bytes"))
                })?
                .map_err(|e| broken(source, &format!("{path} after {read} bytes"), e))?;
            if more == 0 {
                // An answer that ends in good order and is too short says that there is no more.
                return Err(wrong(source, manifest, slot));
            }
            read = read.saturating_add(more);
            hashing.follow(&slot.data);
        }
        if manifest.chunk_hash(slot.index) != Some(hashing.finish(&slot.data)) {
            return Err(wrong(source, manifest, slot));
        }
        if let Some(slot) = slots.pop() {
            done(slot);
        }
    }
    Ok(())
}

/// The hash of a chunk while it arrives: what came is in the core's cache still.
#[derive(Default)]
struct Hashing {
    hasher: Hasher,
    hashed: usize,
}

impl Hashing {
    /// `data` is what was given before and what has come since.
    fn follow(&mut self, data: &[u8]) {
        self.take(data, data.len() - data.len() % HASH_BYTES);
    }

    fn finish(mut self, data: &[u8]) -> Hash {
        self.take(data, data.len());
        self.hasher.finalize()
    }

    fn take(&mut self, data: &[u8], end: usize) {
        if let Some(new) = data.get(self.hashed..end) {
            self.hasher.update(new);
            self.hashed = end;
        }
    }
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
