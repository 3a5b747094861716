//! What stands behind the port: the task that answers while this lighthouse leads, and a refusal that names the leading one while it does not.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ftcore::{Error, ErrorKind};
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;

use super::actor::Lighthouse;
use crate::wire::{elsewhere, oxccl};

/// What this lighthouse does at present.
#[derive(Debug, Clone)]
pub(crate) enum Role {
    /// It answers. Without etcd it always does.
    Leads(Lighthouse),
    /// It refuses, and names the leading one if that is known.
    Follows { leader: Option<String> },
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Frontend {
    role: watch::Receiver<Role>,
    incarnation: Arc<str>,
}

impl Frontend {
    pub(crate) fn new(role: watch::Receiver<Role>, incarnation: &str) -> Self {
        Self {
            role,
            incarnation: incarnation.into(),
        }
    }

    /// The leading one's address, if this lighthouse follows and knows it; the second is whether this one leads.
    pub(crate) fn standing(&self) -> (Option<String>, bool) {
        match &*self.role.borrow() {
            Role::Leads(_) => (None, true),
            Role::Follows { leader } => (leader.clone(), false),
        }
    }

    /// The task that answers. Errors: `Unavailable` while this lighthouse does not lead.
    pub(crate) fn leading(&self) -> Result<Lighthouse, Error> {
        let leader = match &*self.role.borrow() {
            Role::Leads(lighthouse) => return Ok(lighthouse.clone()),
            Role::Follows { leader } => leader.clone(),
        };
        let text = match leader {
            Some(leader) => format!("this lighthouse does not lead the job: {leader} does"),
            None => "this lighthouse does not lead the job, and no other one is known to at present".into(),
        };
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    /// As [`Frontend::leading`], for a call.
    pub(crate) fn answering(&self) -> Result<Lighthouse, Status> {
        self.leading().map_err(|e| elsewhere(&e))
    }

    /// How this lighthouse stands, at once and when that changes, until it does not lead.
    pub(crate) fn follow(&self) -> Standings {
        Standings {
            roles: WatchStream::new(self.role.clone()),
            incarnation: self.incarnation.clone(),
            over: false,
        }
    }
}

/// See [`Frontend::follow`].
pub(crate) struct Standings {
    roles: WatchStream<Role>,
    incarnation: Arc<str>,
    over: bool,
}

impl Stream for Standings {
    type Item = Result<oxccl::Standing, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.roles).poll_next(context) {
            Poll::Ready(Some(role)) => {
                let leads = matches!(role, Role::Leads(_));
                self.over = !leads;
                Poll::Ready(Some(Ok(oxccl::Standing {
                    incarnation: self.incarnation.to_string(),
                    leads,
                })))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}
