//! The calling side of gRPC: channels that notice a cut-off peer, and a bridge for callers without a runtime.

use std::future::Future;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, time_left};
use tokio::runtime::Handle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use crate::serve::{PING_INTERVAL, PING_TIMEOUT};
use crate::wire::error_of;

/// The longest time-out that fits the header, and that anybody means.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

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

/// An endpoint for `url` (`http://host:port`). Errors: `InvalidArgument` for anything else.
pub(crate) fn endpoint(url: &str) -> Result<Endpoint> {
    let bad = |why: String| Error::invalid(format!("'{url}' is not a URL like http://host:29510: {why}"));
    if !url.starts_with("http://") {
        return Err(bad("it does not begin with http://".into()));
    }
    let endpoint = Endpoint::from_shared(url.to_string()).map_err(|e| bad(e.to_string()))?;
    Ok(endpoint
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_timeout(Duration::from_secs(10)))
}

/// Connects on `handle`'s threads, trying again until `deadline`, and waits for it. The channel reconnects by itself later.
///
/// Errors: `InvalidArgument` for the URL; `Unavailable` with the URL, the time waited and the last failure; `hint` says what to do about it.
pub(crate) fn reach(
    handle: &Handle,
    url: &str,
    what: &'static str,
    hint: &'static str,
    deadline: Instant,
) -> Result<Channel> {
    let start = Instant::now();
    let endpoint = endpoint(url)?;
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
                match tokio::time::timeout_at(deadline.into(), endpoint.connect()).await {
                    Ok(Ok(channel)) => return Ok(channel),
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
        .max(Instant::now())
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

/// The deadline of a call that nobody waits for.
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
            "lighthouse",
            "start it",
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
