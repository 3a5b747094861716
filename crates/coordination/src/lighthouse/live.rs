//! What the dashboard is told while it is open: server-sent events, each of them the whole picture.
//!
//! It costs the lighthouse nothing without a listener: a task looks at the state while there are listeners, once a second and when something
//! happens, encodes what it sees once, and all listeners are sent those same bytes. There are [`MAX_LISTENERS`] at most. A listener that is slow
//! gets the newest picture when it is ready for one, and none in between; one that takes nothing is disconnected as any other reader is
//! ([`ConnectionLimits::unread`](crate::ConnectionLimits)).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use serde::Serialize;
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;

use super::frontend::Frontend;
use super::rates::Throughput;
use super::status::{LighthouseStatus, known};
use super::why::Why;

/// Dashboards that are open at once.
pub(crate) const MAX_LISTENERS: usize = 32;
/// Replicas of each list; the page says how many more there are.
const MAX_SHOWN: usize = 200;
/// From one picture to the next: if something happens, and if nothing does.
const SOON: Duration = Duration::from_millis(200);
const AT_LEAST: Duration = Duration::from_secs(1);

/// One for each job.
pub(crate) struct Live {
    frontend: Frontend,
    state: Mutex<State>,
    /// The newest event; empty while no listener is there.
    newest: watch::Sender<Bytes>,
    published: AtomicU64,
}

#[derive(Default)]
struct State {
    listeners: usize,
    /// The task runs.
    publishes: bool,
}

/// What an event holds.
#[derive(Serialize)]
struct Picture {
    /// As under `/status`, with 200 replicas at most in each list.
    status: LighthouseStatus,
    /// What `oxccl why` says, with lists as long.
    why: Why,
    throughput: Vec<Throughput>,
    /// How long the lists are.
    members: usize,
    healthy: usize,
    waiting: usize,
}

impl Live {
    pub(crate) fn new(frontend: Frontend) -> Arc<Self> {
        Arc::new(Self {
            frontend,
            state: Mutex::default(),
            newest: watch::Sender::new(Bytes::new()),
            published: AtomicU64::new(0),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who listens, and how many events there were.
    pub(crate) fn counts(&self) -> (usize, u64) {
        (self.state().listeners, self.published.load(Ordering::Relaxed))
    }

    /// One more listener; none if there are too many. On the service's runtime.
    pub(crate) fn listen(self: &Arc<Self>) -> Option<Listener> {
        let mut state = self.state();
        if state.listeners >= MAX_LISTENERS {
            return None;
        }
        state.listeners += 1;
        if !std::mem::replace(&mut state.publishes, true) {
            tokio::spawn(Arc::clone(self).publish());
        }
        drop(state);
        Some(Listener {
            events: WatchStream::new(self.newest.subscribe()),
            live: Arc::clone(self),
        })
    }

    /// Sends pictures for as long as there are listeners.
    async fn publish(self: Arc<Self>) {
        while self.goes_on() {
            let watched = self.frontend.leading().ok();
            if let Some(lighthouse) = &watched {
                lighthouse.watched.set(true);
            }
            if let Some(event) = self.look().await {
                self.newest.send_replace(event);
                self.published.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(SOON).await;
            let rest = tokio::time::sleep(AT_LEAST - SOON);
            match &watched {
                Some(lighthouse) => tokio::select! {
                    () = lighthouse.watched.changed() => {}
                    () = rest => {}
                },
                None => rest.await,
            }
        }
        if let Ok(lighthouse) = self.frontend.leading() {
            lighthouse.watched.set(false);
        }
    }

    fn goes_on(&self) -> bool {
        let mut state = self.state();
        state.publishes = state.listeners > 0;
        if !state.publishes {
            // The next listener shall not begin with an old picture.
            self.newest.send_replace(Bytes::new());
        }
        state.publishes
    }

    async fn look(&self) -> Option<Bytes> {
        let mut look = known(&self.frontend).await?;
        let mut why = look.status.explain();
        why.replicas.truncate(MAX_SHOWN);
        why.notes.truncate(MAX_SHOWN);
        let status = &mut look.status;
        let (members, healthy, waiting) = (
            status.participants.len(),
            status.healthy.len(),
            status.waiting.len(),
        );
        status.participants.truncate(MAX_SHOWN);
        status.healthy.truncate(MAX_SHOWN);
        status.waiting.truncate(MAX_SHOWN);
        status.attached.truncate(MAX_SHOWN);
        status.spares.truncate(MAX_SHOWN);
        status.draining.truncate(MAX_SHOWN);
        status.evicted.truncate(MAX_SHOWN);
        look.throughput.truncate(MAX_SHOWN);
        let picture = Picture {
            status: look.status,
            why,
            throughput: look.throughput,
            members,
            healthy,
            waiting,
        };
        // JSON has no line breaks in it unless it is asked for.
        let text = serde_json::to_string(&picture).ok()?;
        Some(Bytes::from(format!("data: {text}\n\n")))
    }
}

/// An open dashboard.
pub(crate) struct Listener {
    events: WatchStream<Bytes>,
    live: Arc<Live>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.live.state();
        state.listeners = state.listeners.saturating_sub(1);
    }
}

impl Stream for Listener {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            return match Pin::new(&mut self.events).poll_next(context) {
                Poll::Ready(Some(event)) if event.is_empty() => continue,
                Poll::Ready(Some(event)) => Poll::Ready(Some(Ok(event))),
                Poll::Ready(None) => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            };
        }
    }
}
