//! The calling side of gRPC: channels that notice a cut-off peer, and a bridge for callers without a runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ftcore::forked::Parents;
use ftcore::{Credentials, Error, ErrorKind, Result, join_address, split_url};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use identity::{Party, Refusal, Role};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use crate::clock::{self, deadline_in, time_left};
use crate::serve::{PING_INTERVAL, PING_TIMEOUT};
use crate::wire::error_of;

/// The longest time-out that fits the header, and that a caller means.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// How long it may take to make a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// How long a connecting attempt, or the wait for the next one, may take.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A pause that grows with every failure and resets with a success.
#[derive(Debug)]
pub(crate) struct Backoff(Duration);

impl Backoff {
    const FIRST: Duration = Duration::from_millis(50);

    pub(crate) fn new() -> Self {
        Self(Self::FIRST)
    }

    pub(crate) fn reset(&mut self) {
        self.0 = Self::FIRST;
    }

    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
        now
    }
}

/// As whom this process calls a server, and who that must be. Without credentials, any process calls any other.
#[derive(Debug, Clone, Default)]
pub(crate) struct Way {
    pub(crate) party: Option<Arc<Party>>,
    /// `None`: any member of the job.
    pub(crate) expected: Option<Role>,
    /// The simulated host that calls.
    #[cfg(test)]
    pub(crate) host: Option<crate::simulation::Host>,
}

impl Way {
    pub(crate) fn new(party: Option<Arc<Party>>, expected: Option<Role>) -> Self {
        Self {
            party,
            expected,
            #[cfg(test)]
            host: None,
        }
    }

    /// A connection to `host:port`.
    pub(crate) async fn open(&self, host: &str, port: u16) -> Result<Line, BoxError> {
        #[cfg(test)]
        if let Some(own) = &self.host {
            return Ok(Box::new(own.connect(host).await?));
        }
        // Not tokio's, which would wait for an address that does not answer before it tries the host's next one.
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT));
        let uri = Uri::try_from(format!("http://{}", join_address(host, port)))?;
        let stream = Pin::new(Parents::new(connector.call(uri).await?.into_inner()));
        match &self.party {
            None => Ok(Box::new(stream)),
            Some(party) => Ok(Box::new(party.connect(stream, self.expected.as_ref()).await?)),
        }
    }

    /// A channel to `endpoint`, connected.
    pub(crate) async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, tonic::transport::Error> {
        endpoint.connect_with_connector(Connector(self.clone())).await
    }

    /// A channel to `endpoint` that connects with its first call. On a runtime.
    pub(crate) fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(Connector(self.clone()))
    }

    /// Checks that `url` is one for this way. Errors: `InvalidArgument` that says what is missing on which side.
    fn check(&self, url: &str) -> Result<()> {
        let why = match (
            &self.party,
            url.starts_with("https://"),
            url.starts_with("http://"),
        ) {
            (Some(_), true, _) | (None, _, true) => return Ok(()),
            (Some(party), _, true) => format!(
                "it is the URL of a server without credentials, and this process has those of job {}: start the server with them, and use its \
                 https:// URL",
                party.job()
            ),
            (None, true, _) => format!(
                "a server at https:// asks for credentials, and this process has none, so it made no call: set {} to their folder",
                Credentials::VARIABLE
            ),
            _ => "it begins neither with http:// nor with https://".into(),
        };
        Err(Error::invalid(format!("'{url}': {why}")))
    }
}

/// A connection, with TLS or without, of which a child that is forked off gets no copy.
pub(crate) type Line = Box<dyn Duplex>;

pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Makes the connections of a channel.
#[derive(Clone)]
struct Connector(Way);

impl Service<Uri> for Connector {
    type Response = TokioIo<Line>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let way = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.trim_start_matches('[').trim_end_matches(']');
            way.open(host, uri.port_u16().unwrap_or(443))
                .await
                .map(TokioIo::new)
        })
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An endpoint for `url` (`http://host:port`, `https://` with credentials). Errors: `InvalidArgument` for anything else.
pub(crate) fn endpoint(url: &str, way: &Way) -> Result<Endpoint> {
    let bad = |why: String| Error::invalid(format!("'{url}' is not a URL like http://host:29510: {why}"));
    way.check(url)?;
    split_url(url)?;
    if url.trim_end_matches('/').matches('/').count() != 2 {
        return Err(bad("there is a path behind the port".to_owned()));
    }
    // TLS is the connector's; what speaks over it is the same.
    let plain = url.replacen("https://", "http://", 1);
    let endpoint = Endpoint::from_shared(plain).map_err(|e| bad(e.to_string()))?;
    Ok(endpoint
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_timeout(CONNECT))
}

/// Connects on `handle`'s threads, trying again until `deadline` or until the server refuses who this process is, and waits for it. The channel
/// reconnects by itself later.
///
/// Errors: `InvalidArgument` for the URL; `Unavailable` with the URL, the time waited and the last failure; `hint` says what to do about it.
pub(crate) fn reach(
    handle: &Handle,
    url: &str,
    way: Way,
    (what, hint): (&'static str, &'static str),
    deadline: Instant,
) -> Result<Channel> {
    let start = clock::now();
    let endpoint = endpoint(url, &way)?;
    let unreached = move |url: &str, last: &str| {
        let waited = start.elapsed().as_secs_f64();
        let text = format!("cannot reach the {what} at {url} within {waited:.1} s ({last}); {hint}");
        Error::new(ErrorKind::Unavailable, text)
    };
    let attempts = {
        let url = url.to_string();
        async move {
            let mut backoff = Backoff::new();
            let mut last = String::from("no answer");
            loop {
                match tokio::time::timeout_at(deadline.into(), way.connect(&endpoint)).await {
                    Ok(Ok(channel)) => return Ok(channel),
                    Ok(Err(e)) if Refusal::is_in(&e) => {
                        let text = format!("the {what} at {url}: {}", cause(&e));
                        return Err(Error::new(ErrorKind::Unavailable, text));
                    }
                    Ok(Err(e)) => last = chain(&e),
                    Err(_) => {}
                }
                let pause = backoff.next();
                if time_left(deadline) <= pause {
                    return Err(unreached(&url, &last));
                }
                tokio::time::sleep(pause).await;
            }
        }
    };
    wait_for(handle, "connect", deadline, attempts).map_err(|e| match e.kind() {
        // The runtime's threads found no core to say it themselves.
        ErrorKind::Timeout => unreached(url, "no answer"),
        _ => e,
    })
}

/// An error with its causes, each said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(c) = cause {
        let more = c.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = c.source();
    }
    text
}

/// The innermost cause of an error.
pub(crate) fn cause(error: &dyn std::error::Error) -> String {
    let innermost = std::iter::successors(Some(error), |e| e.source()).last();
    innermost.map_or_else(String::new, ToString::to_string)
}

/// One call with a deadline, which the server is told as well (`grpc-timeout`).
pub(crate) async fn call<T, R, F>(
    op: &'static str,
    url: &str,
    deadline: Instant,
    message: T,
    rpc: impl FnOnce(Request<T>) -> F,
) -> Result<R>
where
    F: Future<Output = Result<Response<R>, Status>>,
{
    let left = time_left(deadline).min(LONGEST);
    if left.is_zero() {
        return Err(Error::timeout("the deadline had passed before the call")
            .with_op(op)
            .with_peer_address(url));
    }
    let mut request = Request::new(message);
    request.set_timeout(left);
    match tokio::time::timeout_at(deadline.into(), rpc(request)).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(error_of(&status, op, url, deadline)),
        Err(_) => Err(
            Error::timeout(format!("no answer within {:.1} s", left.as_secs_f64()))
                .with_op(op)
                .with_peer_address(url),
        ),
    }
}

/// Runs `future` on `handle`'s threads and waits for it, from any thread, with or without a runtime of its own. The
/// future keeps the deadline itself; a little grace lets its better error through.
pub(crate) fn wait_for<T: Send + 'static>(
    handle: &Handle,
    op: &'static str,
    deadline: Instant,
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let task = handle.spawn(async move {
        let _ = sender.send(future.await);
    });
    let until = deadline
        .max(clock::now())
        .checked_add(Duration::from_secs(1))
        .unwrap_or(deadline);
    receiver.recv_timeout(time_left(until)).unwrap_or_else(|e| {
        task.abort();
        Err(match e {
            std::sync::mpsc::RecvTimeoutError::Timeout => Error::timeout("the deadline passed").with_op(op),
            std::sync::mpsc::RecvTimeoutError::Disconnected => {
                Error::new(ErrorKind::InvalidState, "it was shut down during the call").with_op(op)
            }
        })
    })
}

/// The deadline of a call that is not waited for.
pub(crate) fn background_deadline() -> Instant {
    deadline_in(Duration::from_secs(5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_not_reached_is_named_even_if_no_thread_of_the_runtime_gets_to_say_so() {
        let runtime = crate::serve::runtime("ox-starved", 1).unwrap();
        let (release, held) = std::sync::mpsc::channel::<()>();
        runtime.spawn(async move {
            let _ = held.recv();
        });
        let deadline = deadline_in(Duration::from_millis(50));
        let e = reach(
            runtime.handle(),
            "http://127.0.0.1:9",
            Way::default(),
            ("lighthouse", "start it"),
            deadline,
        )
        .unwrap_err();
        drop(release);
        assert_eq!(e.kind(), ErrorKind::Unavailable);
        let text = e.to_string();
        assert!(
            text.contains("http://127.0.0.1:9") && text.contains("start it"),
            "{text}"
        );
    }
}
