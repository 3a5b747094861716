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
    way: Way,
    channel: Channel,
    runtime: Option<Runtime>,
}

/// As whom a program calls that has no place in the job of its own: with the credentials of its environment, if there are any.
fn tool() -> Result<Option<Arc<Party>>> {
    identity::credentials(None)?.map(|c| Party::tool(&c)).transpose()
}

impl Connection {
    /// `what` is at `url`, and what to do if it is not there.
    fn open(url: &str, way: Way, what: (&'static str, &'static str), deadline: Instant) -> Result<Arc<Self>> {
        let runtime = serve::runtime("ox-client", 1)?;
        match reach(runtime.handle(), url, way.clone(), what, deadline) {
            Ok(channel) => Ok(Arc::new(Self {
                url: url.to_string(),
                way,
                channel,
                runtime: Some(runtime),
            })),
            Err(error) => {
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    fn handle(&self) -> Result<Handle> {
        let gone = || Error::new(ErrorKind::InvalidState, "the client was shut down");
        self.runtime.as_ref().map(|r| r.handle().clone()).ok_or_else(gone)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
