//! What names an operation in errors, and whose it is.

use std::time::{Duration, Instant};

use super::machine::Channel;
use crate::flight_recorder::Summary;
use crate::{Collective, Configuration, DType, Epoch, Error, ErrorKind, OpKind};

/// How long the other ranks of a monitored barrier wait for what rank 0 says: only it knows who is missing.
const RANK_0_FIRST: Duration = Duration::from_secs(1);

/// Which rank of which configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// This rank.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
    /// The epoch.
    pub epoch: Epoch,
}

impl Place {
    /// Of a configuration.
    pub fn of(configuration: &Configuration) -> Self {
        Self {
            rank: configuration.rank,
            world: configuration.world_size,
            epoch: configuration.epoch,
        }
    }

    /// `error` with rank and epoch on it.
    pub fn name(self, error: Error) -> Error {
        error.with_rank(self.rank).with_epoch(self.epoch)
    }

    /// When an operation fails whose caller gave it until `deadline`.
    pub(super) fn due(self, label: &Label, deadline: Instant) -> Instant {
        match label.kind {
            OpKind::MonitoredBarrier if self.rank != 0 => deadline.checked_add(RANK_0_FIRST),
            _ => None,
        }
        .unwrap_or(deadline)
    }

    /// What an abort of this rank fails everything with.
    pub(super) fn aborted(self, reason: &str) -> Error {
        let text = format!("aborted by rank {}: {reason}", self.rank);
        self.name(Error::new(ErrorKind::Aborted, text))
    }

    /// What to abort a group below with, because of `failure`: the reason that this rank's abort was called with, else the failure's own words.
    pub fn reason(self, failure: &Error) -> &str {
        let text = failure.message();
        let own = format!("aborted by rank {}: ", self.rank);
        match failure.kind() {
            ErrorKind::Aborted => text.strip_prefix(&*own).unwrap_or(text),
            _ => text,
        }
    }
}

/// What is known of an operation besides its memory.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    /// The operation.
    pub kind: OpKind,
    /// The type and number of its elements.
    pub data: Option<(DType, usize)>,
    /// Of a message: its peer (of a receive from any: none) and tag.
    pub message: Option<(Option<u32>, u32)>,
    /// When it was submitted.
    pub submitted: Instant,
    /// What the flight recorder keeps of it.
    pub summary: Summary,
}

impl Label {
    /// Of an operation that is submitted now.
    pub fn of(op: &Collective) -> Self {
        Self {
            kind: op.kind(),
            data: op.dtype().map(|dtype| (dtype, op.count())),
            message: match op {
                Collective::Send { peer, tag, .. } => Some((Some(*peer), *tag)),
                Collective::Recv { peer, tag, .. } => Some((*peer, *tag)),
                _ => None,
            },
            submitted: Instant::now(),
            summary: Summary::of(op),
        }
    }

    /// What it is ordered with: collectives as one sequence, messages by peer, direction and tag, batches not at all.
    pub fn channel(&self) -> Channel {
        match (self.kind, self.message) {
            (OpKind::Batch, _) => Channel::Unordered,
            (kind, Some((peer, tag))) => Channel::Messages {
                send: kind == OpKind::Send,
                peer,
                tag,
            },
            _ => Channel::Collectives,
        }
    }

    /// `error` with the operation's name, number and data on it.
    pub(super) fn name(&self, number: u64, error: Error) -> Error {
        let error = error.with_op(self.kind.name()).with_seq(number);
        match self.data {
            Some((dtype, count)) => error.with_data(dtype, count),
            None => error,
        }
    }
}
