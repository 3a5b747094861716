//! The calling side for code without a runtime: every call blocks until its answer or its deadline.
//!
//! A client has one thread (`ox-client`) that drives its connection; it may be used from several threads at once.

use std::sync::Arc;
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};
use tokio::runtime::{Handle, Runtime};
use tonic::transport::Channel;

use crate::channel::reach;
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

impl Connection {
    fn open(url: &str, what: &'static str, hint: &'static str, deadline: Instant) -> Result<Arc<Self>> {
        let thread = Thread::start()?;
        let channel = reach(&thread.handle()?, url, what, hint, deadline)?;
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
