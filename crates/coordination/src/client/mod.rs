//! The calling side for code without a runtime: every call blocks until its answer or its deadline.
//!
//! A client has one thread (`ox-client`) that drives its connection; it may be used from several threads at once.

use std::sync::Arc;
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};
use identity::Party;
use tokio::runtime::{Handle, Runtime};
use tonic::transport::Channel;

use crate::channel::{Way, reach};
use crate::serve;

mod lighthouse;
mod manager;

pub use lighthouse::LighthouseClient;
pub use manager::{CommitVote, ManagerClient, PushEvent, QuorumRequest, WatchGuard};

/// A connection and the thread that drives it.
#[derive(Debug)]
struct Connection {
    url: String,
    channel: Channel,
    thread: Thread,
}

/// As whom a program calls that has no place in the job of its own: with the credentials of its environment, if there are any.
fn tool() -> Result<Option<Arc<Party>>> {
    identity::credentials(None)?.map(|c| Party::tool(&c)).transpose()
}

impl Connection {
    /// `what` is at `url`, and what to do if it is not there.
    fn open(url: &str, way: Way, what: (&'static str, &'static str), deadline: Instant) -> Result<Arc<Self>> {
        let thread = Thread::start()?;
        let channel = reach(&thread.handle()?, url, way, what, deadline)?;
        Ok(Arc::new(Self {
            url: url.to_string(),
            channel,
            thread,
        }))
    }

    fn handle(&self) -> Result<Handle> {
        self.thread.handle()
    }
}

/// The thread that drives a client. Dropping it ends it without waiting.
#[derive(Debug)]
struct Thread(Option<Runtime>);

impl Thread {
    fn start() -> Result<Self> {
        serve::runtime("ox-client", 1).map(|runtime| Self(Some(runtime)))
    }

    fn handle(&self) -> Result<Handle> {
        let gone = || Error::new(ErrorKind::InvalidState, "the client was shut down");
        self.0.as_ref().map(|r| r.handle().clone()).ok_or_else(gone)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
