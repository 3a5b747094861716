//! One listening port for gRPC and HTTP/1, served from an own runtime with named threads.
//!
//! Every connection is bounded (streams, header time, pings that find a cut-off peer) and so is their number. When the
//! [`Service`] is dropped or shut down, its connections are closed with it.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ftcore::{Error, ErrorKind, Result, time_left};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

/// How often an open HTTP/2 connection is pinged, and how long the answer may take.
pub(crate) const PING_INTERVAL: Duration = Duration::from_secs(2);
pub(crate) const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a new connection may take to say its first byte, or the head of an HTTP/1 request.
const FIRST_BYTES: Duration = Duration::from_secs(10);
const MAX_CONNECTIONS: usize = 4096;
const MAX_STREAMS: u32 = 256;

/// A runtime with `threads` workers named `name`.
pub(crate) fn runtime(name: &'static str, threads: usize) -> Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .build()
        .map_err(|e| Error::io(format!("starting the threads {name}"), e))
}

/// Listens on `bind` (`host:port`). Errors: `InvalidArgument` for an address that does not resolve, `Conflict` if it is
/// in use.
pub(crate) fn listen(what: &str, bind: &str) -> Result<TcpListener> {
    let addresses: Vec<SocketAddr> = bind
        .to_socket_addrs()
        .map_err(|e| Error::invalid(format!("{what}: bind address '{bind}': {e}")).with_source(e))?
        .collect();
    let listener = TcpListener::bind(addresses.as_slice()).map_err(|e| match e.kind() {
        std::io::ErrorKind::AddrInUse => Error::new(
            ErrorKind::Conflict,
            format!("{what}: address {bind} is in use by another process"),
        )
        .with_source(e),
        _ => Error::io(format!("{what}: listening on {bind}"), e),
    })?;
    listener
        .set_nonblocking(true)
        .map_err(|e| Error::io(format!("{what}: listening on {bind}"), e))?;
    Ok(listener)
}

/// The URL under which others reach `listener`: `host` if given, else its own address, else (it listens on all of
/// them) this machine's name.
pub(crate) fn url(listener: &TcpListener, host: Option<&str>) -> Result<String> {
    let local = listener
        .local_addr()
        .map_err(|e| Error::io("reading the listening address", e))?;
    let host = match host {
        Some(h) => h.to_string(),
        None if local.ip().is_unspecified() => {
            rustix::system::uname().nodename().to_string_lossy().into_owned()
        }
        None => local.ip().to_string(),
    };
    let bracketed = host.contains(':') && !host.starts_with('[');
    Ok(if bracketed {
        format!("http://[{host}]:{}", local.port())
    } else {
        format!("http://{host}:{}", local.port())
    })
}

/// A running service. Dropping it closes everything without waiting.
#[derive(Debug)]
pub(crate) struct Service {
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
    closed: Option<oneshot::Receiver<()>>,
}

impl Service {
    /// Serves `routes` on `listener` from `runtime`. `grace` is what calls under way may still take in a [shut-down](Self::shutdown).
    pub(crate) fn start(
        runtime: Runtime,
        listener: TcpListener,
        routes: Router,
        grace: Duration,
    ) -> Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let (close, closed) = oneshot::channel();
        let listener = {
            let _guard = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(|e| Error::io("listening", e))?
        };
        runtime.spawn(accept(listener, routes, stopped, close, grace));
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

async fn accept(
    listener: tokio::net::TcpListener,
    routes: Router,
    mut stopped: watch::Receiver<bool>,
    close: oneshot::Sender<()>,
    grace: Duration,
) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            a = listener.accept() => a,
            Some(_) = connections.join_next() => continue,
            _ = stopped.wait_for(|s| *s) => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                if connections.len() >= MAX_CONNECTIONS {
                    tracing::warn!(%peer, "connection refused: {MAX_CONNECTIONS} are open");
                    continue;
                }
                connections.spawn(connection(stream, peer, routes.clone(), stopped.clone()));
            }
            Err(error) => {
                // Out of descriptors, most likely: the next attempt would fail at once.
                tracing::warn!(%error, "a connection could not be accepted");
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

async fn connection(stream: TcpStream, peer: SocketAddr, routes: Router, mut stopped: watch::Receiver<bool>) {
    // Without the guard that it gives, which cannot be held over the wait for the last answers.
    let mut stop = std::pin::pin!(async {
        let _ = stopped.wait_for(|s| *s).await;
    });
    let _ = stream.set_nodelay(true);
    // Who connects and says nothing is not kept.
    let mut first = [0];
    let spoke = tokio::select! {
        read = tokio::time::timeout(FIRST_BYTES, stream.peek(&mut first)) => matches!(read, Ok(Ok(1..))),
        () = stop.as_mut() => false,
    };
    if spoke {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(FIRST_BYTES)
            .max_buf_size(64 * 1024);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(16 * 1024);
        let served = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
        let mut served = std::pin::pin!(served);
        let ended = tokio::select! {
            ended = served.as_mut() => ended,
            () = stop.as_mut() => {
                served.as_mut().graceful_shutdown();
                served.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%peer, error, "connection ended");
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
