//! The watch stream of a rank, and its process: how the server learns that a rank is gone.
//!
//! A killed process's sockets are closed by its kernel, so the stream breaks at once; whether that was a death or a broken
//! connection is told by a descriptor of the process, where server and rank share a host.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use protocol::AbortEpoch;
use protocol::replica::ReplicaEvent;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::runtime::Handle;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;

use super::actor::Manager;
use crate::wire::oxccl;

/// The events for one rank. Its end, however it comes, is told to the actor.
pub(crate) struct Watched {
    events: WatchStream<Option<AbortEpoch>>,
    kills: WatchStream<Option<String>>,
    manager: Manager,
    rank: u32,
    watch: u64,
    process: Option<OwnedFd>,
    grace: Duration,
    runtime: Handle,
}

impl Watched {
    /// Tells the actor of the stream. `process` is the rank's, if it runs where this server does: when the stream ends, the end of
    /// the process is looked for as long as `grace`. Call it on a runtime.
    pub(crate) fn begin(manager: &Manager, rank: u32, process: Option<i64>, grace: Duration) -> Self {
        let watch = manager.ticket();
        manager.tell(ReplicaEvent::Watched { rank, watch });
        Self {
            // Begins with the last abort, so that none is lost while a watcher reconnects.
            events: WatchStream::new(manager.aborts()),
            kills: WatchStream::new(manager.kills()),
            manager: manager.clone(),
            rank,
            watch,
            process: process.and_then(open_process),
            grace,
            runtime: Handle::current(),
        }
    }
}

/// True if the process ended within `limit`. It closes its sockets a little before that shows.
fn has_ended(process: &OwnedFd, limit: Duration) -> bool {
    let mut look = [PollFd::new(process, PollFlags::IN)];
    let limit = Timespec::try_from(limit).ok();
    matches!(poll(&mut look, limit.as_ref()), Ok(1..))
}

/// A descriptor that becomes readable when the process ends.
fn open_process(number: i64) -> Option<OwnedFd> {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl Drop for Watched {
    fn drop(&mut self) {
        let (rank, watch) = (self.rank, self.watch);
        self.manager.tell(ReplicaEvent::Unwatched { rank, watch });
        if let Some(process) = self.process.take() {
            let (manager, grace) = (self.manager.clone(), self.grace);
            // On a thread for blocking calls, and only now: a process has no event that the runtime could wait for safely.
            self.runtime.spawn_blocking(move || {
                if has_ended(&process, grace) {
                    manager.tell(ReplicaEvent::Ended { rank, watch });
                }
            });
        }
    }
}

impl Stream for Watched {
    type Item = Result<oxccl::ManagerEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while let Poll::Ready(Some(kill)) = Pin::new(&mut self.kills).poll_next(context) {
            if let Some(reason) = kill {
                let event = Some(oxccl::manager_event::Event::Kill(oxccl::Kill { reason }));
                return Poll::Ready(Some(Ok(oxccl::ManagerEvent { event })));
            }
        }
        loop {
            match Pin::new(&mut self.events).poll_next(context) {
                Poll::Ready(Some(Some(abort))) => {
                    let event = Some(oxccl::manager_event::Event::AbortEpoch(abort.into()));
                    return Poll::Ready(Some(Ok(oxccl::ManagerEvent { event })));
                }
                Poll::Ready(Some(None)) => {}
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
