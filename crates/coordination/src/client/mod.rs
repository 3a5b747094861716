//! The calling side for code without a runtime: every call blocks until its answer or its deadline.
//!
//! A client has one thread (`ox-client`) that drives its connection; it may be used from several threads at once.

use std::sync::Arc;
use std::time::Instant;

use ftcore::Result;
use identity::Party;
use tokio::runtime::{Handle, Runtime};
use tonic::transport::Channel;

use crate::channel::{Way, reach};
use crate::serve;

mod lighthouse;
mod manager;

pub use lighthouse::LighthouseClient;
pub use manager::{Cancel, CommitVote, ManagerClient, PushEvent, QuorumRequest, WatchGuard};

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
        let channel = reach(&thread.handle, url, way, what, deadline)?;
        Ok(Arc::new(Self {
            url: url.to_string(),
            channel,
            thread,
        }))
    }

    /// On the present runtime, and connected with the first call.
    #[cfg(test)]
    fn lazily(url: &str, way: &Way) -> Result<Arc<Self>> {
        let channel = way.connect_lazily(&crate::channel::endpoint(url, way)?);
        let thread = Thread {
            handle: Handle::current(),
            runtime: None,
        };
        Ok(Arc::new(Self {
            url: url.to_string(),
            channel,
            thread,
        }))
    }

    fn handle(&self) -> &Handle {
        &self.thread.handle
    }
}

/// The thread that drives a client. Dropping it ends it without waiting.
#[derive(Debug)]
struct Thread {
    handle: Handle,
    /// `None` after the end, or where the thread is the caller's.
    runtime: Option<Runtime>,
}

impl Thread {
    fn start() -> Result<Self> {
        serve::runtime("ox-client", 1).map(|runtime| Self {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
        })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
