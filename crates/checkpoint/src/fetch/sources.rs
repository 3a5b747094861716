//! One source of a state: its URL, connections to it, and requests whose answers are measured before they are kept.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use ftcore::{Error, ErrorKind, Result};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::HOST;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::FetchOptions;
use crate::manifest::Manifest;
use crate::{DIGEST_HEADER, MAX_WAIT, WAIT_HEADER};

/// What is kept of the text of an error answer.
const MAX_TEXT_BYTES: usize = 1 << 10;

/// Room for the head of an answer, and how much hyper reads at once.
const READ_BUFFER_BYTES: usize = 256 << 10;

/// The slowest transfer that is not given up, beyond the stall time.
const MIN_BYTES_PER_SECOND: u64 = 16 << 10;

/// Pause before a request that failed at once is made again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A URL prefix taken apart.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) url: String,
    /// `host:port`, for the `Host` header and for errors.
    authority: String,
    host: String,
    port: u16,
    prefix: String,
}

impl Source {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let wrong =
            |why: &str| Error::invalid(format!("'{url}' is not the URL of a checkpoint server: {why}"));
        let uri: Uri = url.parse().map_err(|e| wrong(&format!("{e}")))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong("it does not begin with http://"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || uri.query().is_some() {
            return Err(wrong("no host, or a query"));
        }
        Ok(Self {
            url: url.to_owned(),
            authority: authority.as_str().to_owned(),
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }

    fn error(&self, kind: ErrorKind, what: impl Into<String>) -> Error {
        Error::new(kind, what).with_peer_address(&self.authority)
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
        header: (&'static str, String),
        patience: Duration,
    ) -> Result<Response<Incoming>> {
        let request = Request::get(format!("{}{path}", source.prefix))
            .header(HOST, &source.authority)
            .header(header.0, header.1)
            .body(Empty::new())
            .map_err(|e| source.error(ErrorKind::Internal, format!("a request for {path}: {e}")))?;
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

/// Asks until the step is published there: the manifest, checked, and the connection for more.
/// Runs until it has an answer or a reason to stop; the caller bounds it by the deadline.
pub(super) async fn ask_manifest(
    source: &Source,
    step: i64,
    deadline: Instant,
    options: &FetchOptions,
) -> Result<(Connection, Manifest)> {
    let mut refused = false;
    loop {
        let wait = deadline.saturating_duration_since(Instant::now()).min(MAX_WAIT);
        match ask_once(source, step, wait, options).await {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
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

/// `None` if the step is not published yet.
async fn ask_once(
    source: &Source,
    step: i64,
    wait: Duration,
    options: &FetchOptions,
) -> Result<Option<(Connection, Manifest)>> {
    let stall = options.stall_timeout;
    let mut connection = Connection::open(source, stall).await?;
    let path = format!("/{step}/manifest");
    let header = (WAIT_HEADER, wait.as_millis().to_string());
    // Hashing a large state takes the source a while the first time.
    let patience = wait + stall + Duration::from_secs(options.max_state_bytes >> 30);
    let answer = connection.get(source, &path, header, patience).await?;
    if answer.status() == StatusCode::NOT_FOUND {
        return Ok(None);
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
    if manifest.step() != step {
        return Err(source.error(
            ErrorKind::Corrupt,
            format!("{path}: the manifest is of step {}", manifest.step()),
        ));
    }
    Ok(Some((connection, manifest)))
}

/// Chunk `index` of `manifest`, its length and hash checked. The connection comes back if it can be used again.
pub(super) async fn ask_chunk(
    source: &Source,
    connection: Option<Connection>,
    manifest: &Arc<Manifest>,
    index: usize,
    stall: Duration,
) -> (Option<Connection>, Result<Bytes>) {
    let mut connection = match connection {
        Some(c) => c,
        None => match Connection::open(source, stall).await {
            Ok(c) => c,
            Err(e) => {
                // It has answered before, so this is not a source that was never there.
                let what = format!("no new connection for chunk {index}: {}", e.message());
                return (None, Err(source.error(ErrorKind::PeerLost, what).with_source(e)));
            }
        },
    };
    let (Some(hash), Some(length)) = (manifest.chunk_hash(index), manifest.chunk_len(index)) else {
        let what = format!("chunk {index} of {}", manifest.chunk_count());
        return (Some(connection), Err(source.error(ErrorKind::Internal, what)));
    };
    let path = format!("/{}/chunk/{index}", manifest.step());
    let body = async {
        let header = (DIGEST_HEADER, manifest.digest().to_hex().to_string());
        let answer = connection.get(source, &path, header, stall).await?;
        if answer.status() != StatusCode::OK {
            return Err(refusal(source, &path, answer, stall).await);
        }
        read_body(source, &path, answer.into_body(), length, stall).await
    };
    let body = match body.await {
        Ok(body) => body,
        Err(e) => return (None, Err(e)),
    };
    let found = blake3::hash(&body);
    let result = if body.len() == length && found == hash {
        Ok(body)
    } else {
        let (count, step) = (manifest.chunk_count(), manifest.step());
        let what = format!(
            "step {step}, chunk {index} of {count}: {} bytes with hash {found}, the manifest says {length} bytes with {hash}",
            body.len()
        );
        Err(source.error(ErrorKind::Corrupt, what))
    };
    (Some(connection), result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart_and_wrong_ones_named() {
        let s = Source::parse("http://[::1]:81/ckpt/ab/").unwrap();
        assert_eq!(
            (s.host.as_str(), s.port, s.prefix.as_str()),
            ("::1", 81, "/ckpt/ab")
        );
        assert_eq!(s.authority, "[::1]:81");
        for wrong in [
            "",
            "<n/a>",
            "https://a/b",
            "http://",
            "a:1/b",
            "http://a/b?c=d",
            "http:///x",
        ] {
            let e = Source::parse(wrong).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{wrong}");
            assert!(e.message().contains(&format!("'{wrong}'")), "{e}");
        }
    }
}
