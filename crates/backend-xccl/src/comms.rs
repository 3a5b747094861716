//! The communicators of one configuration: how they are completed, split and ended.

use std::sync::Arc;

use ftcore::Result;

use crate::link::Link;
use crate::raw::comm::Comm;
use crate::xpu::comm::Side;

/// The communicators of one configuration.
#[derive(Debug)]
pub(crate) struct Comms {
    pub(crate) collectives: Link,
    /// `None` in a world of one, and where the library has no messages.
    messages: Option<Link>,
}

impl Comms {
    /// Of a world of one.
    pub(crate) fn alone() -> Self {
        Self {
            collectives: Link::ALONE,
            messages: None,
        }
    }

    /// Adds the communicator for messages to one that is for collectives from now on, if messages work there. A call of all its ranks.
    pub(crate) fn complete(made: Comm, on: Option<&Arc<Side>>) -> Result<Self> {
        let side = on.map(|side| side.sibling()).transpose()?;
        if made.world() == 1 {
            made.destroy()?;
            return Ok(Self::alone());
        }
        let messages = match &side {
            Some(side) if !side.has_messages() => None,
            _ => made.split(Some(0), made.rank(), made.rank(), made.world())?,
        };
        Ok(Self {
            collectives: Link::over(made, side.clone()),
            messages: messages.map(|made| Link::over(made, side)),
        })
    }

    /// What messages go over.
    pub(crate) fn messages(&self) -> &Link {
        self.messages.as_ref().unwrap_or(&self.collectives)
    }

    /// The communicators of the ranks with this `color`, in which this one is `rank` of `world`. A call of all ranks.
    pub(crate) fn split(&self, color: Option<u32>, rank: u32, world: u32) -> Result<Option<Self>> {
        let Some(parent) = self.collectives.comm() else {
            return Ok(color.map(|_| Self::alone()));
        };
        let made = parent.split(color, rank, rank, world)?;
        made.map(|made| Self::complete(made, self.collectives.side()))
            .transpose()
    }

    /// Ends them. Blocks until all ranks do the same.
    pub(crate) fn destroy(self) {
        let links = [self.messages, Some(self.collectives)].into_iter().flatten();
        for comm in links.filter_map(Link::into_comm) {
            if let Err(error) = comm.destroy() {
                tracing::warn!(%error, "a communicator was not destroyed");
            }
        }
    }
}
