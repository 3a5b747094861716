//! One listening port for gRPC and HTTP/1, served from an own runtime with named threads.
//!
//! Whatever a stranger sends, a connection is bounded in memory and time ([`ConnectionLimits`]): `frames` reads along below hyper, `activity`
//! counts requests and answers above it, and `limits` the connections. When the [`Service`] is dropped or shut down, its connections
//! are closed with it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ftcore::forked::Parents;
use ftcore::identity::{is_insecure, may_listen};
use ftcore::{Error, ErrorKind, Result, accept_failure, host_address, join_address, split_address};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use identity::{Acceptor, Peer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::task::coop::has_budget_remaining;

mod activity;
pub(crate) mod answer;
mod frames;
mod limits;
mod line;
pub(crate) mod members;
mod requests;

use activity::{Activity, GOING, Guarded, Verdict};
use answer::Answers;
pub use limits::ConnectionLimits;
use limits::{Place, Port};
pub(crate) use line::{Line, Report};
use requests::Requests;

use crate::clock::{self, time_left};

/// How often a client pings its open HTTP/2 connection, and how long the answer may take.
pub(crate) const PING_INTERVAL: Duration = Duration::from_secs(2);
pub(crate) const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// How long hyper waits for the answer to a ping. It would give up a connection before it has read what came; [`Activity::verdict`] finds the silent.
const JUDGED_HERE: Duration = Duration::from_secs(24 * 3600);
/// Connections that wait to be accepted, as far as the kernel allows (net.core.somaxconn).
const BACKLOG: i32 = 4096;
/// Requests at once on a connection.
const MAX_STREAMS: u32 = 256;
/// The headers of a request or answer, in bytes; errors travel in them.
pub(crate) const MAX_HEADERS: u32 = 16 * 1024;
/// What a stream may hold of an answer that the peer does not take, in bytes, before the next part is asked for.
const MAX_SEND_BUFFER: usize = 64 * 1024;

/// A runtime with `threads` workers named `name`.
pub(crate) fn runtime(name: &'static str, threads: usize) -> Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .build()
        .map_err(|e| Error::io(format!("starting the threads {name}"), e))
}

/// How a port is closed to strangers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closure {
    /// Peers prove that they are of the job.
    Credentials,
    /// It listens on loopback only.
    Loopback,
    /// Not at all: the user allowed it.
    None,
}

impl Closure {
    pub(crate) fn new(has_credentials: bool, insecure: bool) -> Self {
        match has_credentials {
            true => Self::Credentials,
            false if is_insecure(insecure) => Self::None,
            false => Self::Loopback,
        }
    }
}

/// Listens on `bind` (`host:port`). Errors: `InvalidArgument` for an address that does not resolve, or that other machines reach where
/// `closure` forbids it; `Conflict` if it is in use.
pub(crate) fn listen(what: &str, bind: &str, closure: Closure) -> Result<TcpListener> {
    let (host, port) =
        split_address(bind).map_err(|e| Error::invalid(format!("{what}: bind address {}", e.message())))?;
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Error::invalid(format!("{what}: bind address '{bind}': {e}")).with_source(e))?
        .collect();
    if closure != Closure::Credentials {
        for address in &addresses {
            may_listen(what, *address, None, closure == Closure::None)?;
        }
    }
    let listener = TcpListener::bind(addresses.as_slice()).map_err(|e| match e.kind() {
        std::io::ErrorKind::AddrInUse => Error::new(
            ErrorKind::Conflict,
            format!("{what}: address {bind} is in use by another process"),
        )
        .with_source(e),
        std::io::ErrorKind::AddrNotAvailable => Error::new(
            ErrorKind::Unavailable,
            format!("{what}: {bind} is not an address of this machine"),
        )
        .with_source(e),
        _ => Error::io(format!("{what}: listening on {bind}"), e),
    })?;
    // The standard library's queue of 128 makes the replicas of a large job, which all come at once after a restart, wait for a second or more.
    rustix::net::listen(&listener, BACKLOG)
        .map_err(|e| Error::io(format!("{what}: listening on {bind}"), e.into()))?;
    listener
        .set_nonblocking(true)
        .map_err(|e| Error::io(format!("{what}: listening on {bind}"), e))?;
    Ok(listener)
}

/// The URL under which others reach `listener`: `host` if given, else its own address, else (it listens on all of
/// them) this machine's address towards the outside, which needs no name service.
pub(crate) fn url(listener: &TcpListener, host: Option<&str>, closure: Closure) -> Result<String> {
    let local = listener
        .local_addr()
        .map_err(|e| Error::io("reading the listening address", e))?;
    let host = match host {
        Some(h) => h.to_string(),
        None if local.ip().is_unspecified() => {
            let outward = host_address::outward(local.is_ipv4());
            outward.unwrap_or(Ipv4Addr::LOCALHOST.into()).to_string()
        }
        None => local.ip().to_string(),
    };
    let scheme = match closure {
        Closure::Credentials => "https",
        Closure::Loopback | Closure::None => "http",
    };
    Ok(format!("{scheme}://{}", join_address(&host, local.port())))
}

/// Who is served, and with what.
pub(crate) enum Served<A> {
    /// All that connect.
    All(Arc<A>),
    /// The members of these jobs, each job with its own; a request's [`Line`] knows its [`Peer`].
    Jobs(Acceptor, HashMap<String, Arc<A>>),
}

/// A running service. Dropping it closes everything without waiting.
#[derive(Debug)]
pub(crate) struct Service {
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
    closed: Option<oneshot::Receiver<()>>,
}

impl Service {
    /// Serves what is `served` on `listener` from `runtime`, within `limits`. `grace` is what calls under way may still take in a [shut-down](Self::shutdown).
    pub(crate) fn start<A: Answers>(
        runtime: Runtime,
        listener: TcpListener,
        served: Served<A>,
        limits: ConnectionLimits,
        grace: Duration,
    ) -> Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let (close, closed) = oneshot::channel();
        let listener = {
            let _guard = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(|e| Error::io("listening", e))?
        };
        let listener = Parents::new(listener);
        runtime.spawn(accept(
            Listener::System(listener),
            Arc::new(served),
            Port::new(limits),
            stopped,
            close,
            grace,
        ));
        Ok(Self {
            runtime: Some(runtime),
            stop,
            closed: Some(closed),
        })
    }

    /// To run something on the service's threads. `None` after the shutdown.
    pub(crate) fn handle(&self) -> Option<Handle> {
        self.runtime.as_ref().map(|r| r.handle().clone())
    }

    /// Closes the port, lets calls under way end within the grace, and closes all connections. Errors: `Timeout` if that took longer; it goes
    /// on regardless.
    pub(crate) fn shutdown(mut self, what: &str, deadline: Instant) -> Result<()> {
        let _ = self.stop.send(true);
        let (Some(handle), Some(closed)) = (self.handle(), self.closed.take()) else {
            return Ok(());
        };
        let (done, wait) = std::sync::mpsc::sync_channel(1);
        handle.spawn(async move {
            let _ = closed.await;
            let _ = done.send(());
        });
        wait.recv_timeout(time_left(deadline))
            .map_err(|_| Error::timeout(format!("{what} did not close its connections in time")))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Where connections come from.
enum Listener {
    System(Parents<tokio::net::TcpListener>),
    #[cfg(test)]
    Simulated(crate::simulation::Listener),
}

/// A connection that has come.
enum Accepted {
    System(TcpStream),
    #[cfg(test)]
    Simulated(crate::simulation::End),
}

impl Listener {
    async fn accept(&mut self) -> std::io::Result<(Accepted, SocketAddr)> {
        match self {
            Self::System(listener) => listener
                .accept()
                .await
                .map(|(s, peer)| (Accepted::System(s), peer)),
            #[cfg(test)]
            Self::Simulated(listener) => listener
                .accept()
                .await
                .map(|(s, peer)| (Accepted::Simulated(s), peer)),
        }
    }
}

/// Serves all that connect to a simulated listener, for as long as this is polled.
#[cfg(test)]
pub(crate) async fn serve_simulated<A: Answers>(
    listener: crate::simulation::Listener,
    answers: Arc<A>,
    limits: ConnectionLimits,
    stopped: watch::Receiver<bool>,
) {
    let (close, _closed) = oneshot::channel();
    let (listener, served) = (Listener::Simulated(listener), Arc::new(Served::All(answers)));
    accept(
        listener,
        served,
        Port::new(limits),
        stopped,
        close,
        Duration::ZERO,
    )
    .await;
}

async fn accept<A: Answers>(
    mut listener: Listener,
    served: Arc<Served<A>>,
    port: Arc<Port>,
    mut stopped: watch::Receiver<bool>,
    close: oneshot::Sender<()>,
    grace: Duration,
) {
    let mut connections = JoinSet::new();
    let mut failing = false;
    loop {
        let accepted = tokio::select! {
            // What has ended makes room before what comes is counted.
            biased;
            _ = stopped.wait_for(|s| *s) => break,
            Some(_) = connections.join_next() => continue,
            a = listener.accept() => a,
        };
        match accepted {
            Ok((stream, peer)) => {
                failing = false;
                match port.admit(peer, connections.len()) {
                    Ok(place) => {
                        let activity = Activity::new(port.clone(), peer);
                        connections.spawn(identified(
                            stream,
                            peer,
                            place,
                            activity,
                            Arc::clone(&served),
                            stopped.clone(),
                        ));
                    }
                    Err(why) => port.say(peer, &why),
                }
            }
            Err(error) => {
                // Out of descriptors, most likely: the next attempt would fail at once, and is not worth another line.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!("connections cannot be accepted: {}", accept_failure(&error));
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(grace, ended).await;
    connections.shutdown().await;
    let _ = close.send(());
}

/// Finds out who has connected, if it matters, and serves the connection.
async fn identified<A: Answers>(
    stream: Accepted,
    address: SocketAddr,
    _place: Place,
    activity: Arc<Activity>,
    served: Arc<Served<A>>,
    mut stopped: watch::Receiver<bool>,
) {
    let stream = match (stream, served.as_ref()) {
        (Accepted::System(stream), _) => stream,
        #[cfg(test)]
        (Accepted::Simulated(stream), Served::All(routes)) => {
            return connection(stream, None, activity, routes.clone(), stopped).await;
        }
        #[cfg(test)]
        (Accepted::Simulated(_), Served::Jobs(..)) => return,
    };
    let _ = stream.set_nodelay(true);
    // A child that is forked off gets no copy: it would hide the end of this process from the caller.
    let kept = |stream| Pin::new(Parents::new(stream));
    let (acceptor, jobs) = match served.as_ref() {
        Served::All(routes) => {
            return connection(kept(stream), None, activity, routes.clone(), stopped).await;
        }
        Served::Jobs(acceptor, jobs) => (acceptor, jobs),
    };
    let deadline = clock::now() + activity.greeting();
    let proved = tokio::select! {
        proved = acceptor.accept(stream, address, deadline, kept) => proved,
        _ = stopped.wait_for(|s| *s) => None,
    };
    if let Some((stream, peer)) = proved
        && let Some(routes) = jobs.get(&peer.job)
    {
        connection(stream, Some(peer), activity, routes.clone(), stopped).await;
    }
}

/// Serves a connection for as long as it may stay.
async fn connection<S, A: Answers>(
    stream: S,
    peer: Option<Peer>,
    activity: Arc<Activity>,
    routes: Arc<A>,
    mut stopped: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut requests = Requests::default();
    let mut builder = auto::Builder::new(requests.begun());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(activity.greeting())
        .max_buf_size(64 * 1024);
    // What hyper limits by itself: streams that the peer or an error resets before they are looked at, and CONTINUATION frames.
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(activity.ping_interval())
        .keep_alive_timeout(JUDGED_HERE)
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buf_size(MAX_SEND_BUFFER)
        .max_header_list_size(MAX_HEADERS);
    let line = Arc::new(Line::new(peer));
    let service = service_fn(|request: Request<Incoming>| {
        let (routes, line, open) = (Arc::clone(&routes), Arc::clone(&line), activity.begin());
        async move {
            let request = request.map(|body| open.bounded(body));
            let answer = routes.answer(request, line).await;
            Ok::<_, Infallible>(answer.map(|body| open.answer(body)))
        }
    });
    let guarded = TokioIo::new(Guarded::new(stream, Arc::clone(&activity)));
    let mut served = std::pin::pin!(builder.serve_connection(guarded, service));
    let mut going: Option<Instant> = None;
    let mut stopping = false;
    // A caller wants to know that all that has come is read.
    let (mut is_asked, mut looks) = (false, false);
    loop {
        if std::mem::take(&mut looks) {
            // The runtime looks at the sockets before this task goes on: until then it has not seen all that has come.
            tokio::task::yield_now().await;
        }
        let now = clock::now();
        let wake = match (going, activity.verdict(now)) {
            (_, Verdict::Goes(why)) => {
                activity.say(&why);
                line.ended(false);
                return;
            }
            // Also of one that was asked to go and had just begun a request.
            (_, Verdict::Stays(until)) => until,
            (Some(until), Verdict::Idle) if until <= now => {
                line.ended(false);
                return;
            }
            (Some(until), Verdict::Idle) => until,
            (None, Verdict::Idle) => {
                served.as_mut().graceful_shutdown();
                let until = now + GOING;
                going = Some(until);
                until
            }
        };
        tokio::select! {
            // First, so that all that has come is read before the next verdict: on a busy server this task may be late.
            biased;
            ended = poll_fn(|context| match requests.poll(served.as_mut(), context) {
                Poll::Ready(ended) => Poll::Ready(Some(ended)),
                // A connection that is full reads nothing, and one without budget may have more to read.
                Poll::Pending if is_asked && !activity.is_full() && has_budget_remaining() => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            }) => {
                let Some(ended) = ended else {
                    is_asked = false;
                    line.has_read();
                    continue;
                };
                if let Err(error) = ended {
                    tracing::debug!(error, "connection ended");
                }
                line.ended(!stopping && going.is_none() && activity.is_ended_by_peer());
                return;
            }
            _ = stopped.wait_for(|s| *s), if !stopping => {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
            () = line.is_asked(), if !is_asked => (is_asked, looks) = (true, true),
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }
}

/// An unknown gRPC method is told so in gRPC, an unknown page is a 404.
pub(crate) async fn unknown(headers: HeaderMap) -> Response {
    let grpc = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| v.starts_with("application/grpc"));
    if grpc {
        tonic::Status::unimplemented("this server has no such method").into_http()
    } else {
        (StatusCode::NOT_FOUND, "there is no such page\n").into_response()
    }
}
