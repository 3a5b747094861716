//! The flight recorder: what the groups of this process did last, kept at all times and written when something goes wrong.
//!
//! Every group that carries operations out itself has a [`GroupRing`] of the last operations, over all its configurations; groups around
//! other groups have none, so each operation is recorded once. [`Lifecycle`](crate::lifecycle::Lifecycle) gives each configuration a
//! [`Recorder`]; the engine says when an operation is accepted ([`Recorder::queued`]), and its [`Completer`](crate::Completer) when
//! it starts and how it ends. The first failure of a configuration writes a file if `OXCCL_FLIGHT_RECORDER_DIR` names a folder; [`dump`]
//! writes one at any time. `oxccl trace` reads them.
//!
//! A record costs 60 to 90 ns, no lock and no allocation (docs/benchmarks/index.md): slots are atomics under a stamp, and a reader that
//! sees a stamp change under it leaves that slot out.

mod environment;
mod files;
mod json;
mod ring;
mod summary;
mod ticks;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use environment::read_environment;
pub use files::{dump, dump_to, record_text};
pub use ring::GroupRing;
pub use summary::Summary;

use crate::{Configuration, Error, ErrorKind};

/// The recorder of one configuration of a group.
#[derive(Debug)]
pub struct Recorder {
    ring: Arc<GroupRing>,
    epoch: u64,
    /// The number of the next collective, and of the next message.
    next: [AtomicU64; 2],
}

impl Recorder {
    /// Of `configuration`, in `ring`.
    pub(crate) fn new(ring: Arc<GroupRing>, configuration: &Configuration) -> Self {
        ring.configured(configuration);
        Self {
            ring,
            epoch: configuration.epoch.0,
            next: [AtomicU64::new(1), AtomicU64::new(1)],
        }
    }

    /// The number of an operation among the collectives or the messages of its configuration: the engine's own, or the next.
    fn number(&self, summary: &Summary, own: Option<u64>) -> u64 {
        let [collectives, messages] = &self.next;
        match own {
            Some(seq) => {
                collectives.store(seq.wrapping_add(1), Ordering::Relaxed);
                seq
            }
            None if summary.kind.is_p2p() => messages.fetch_add(1, Ordering::Relaxed),
            None => collectives.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// An operation was accepted. `own`: its number among the collectives, where the engine counts them itself; call it in the order of
    /// these numbers.
    pub fn queued(&self, summary: &Summary, own: Option<u64>) -> Entry {
        let seq = self.number(summary, own);
        let index = self.ring.begin(summary, self.epoch, seq, ring::QUEUED);
        Entry {
            ring: self.ring.clone(),
            index,
        }
    }

    /// As [`queued`](Self::queued), for an operation that starts at once on the caller's thread. To be ended by [`ended`](Self::ended), or made
    /// an [`entry`](Self::entry).
    pub fn started(&self, summary: &Summary, own: Option<u64>) -> Running {
        let seq = self.number(summary, own);
        Running(self.ring.begin(summary, self.epoch, seq, ring::RUNNING))
    }

    /// That operation has ended. `failure`: why, if it failed.
    pub fn ended(&self, running: Running, failure: Option<&Error>) {
        write_first(self.ring.end(running.0, failure));
    }

    /// That operation goes on elsewhere.
    pub fn entry(&self, running: Running) -> Entry {
        Entry {
            ring: self.ring.clone(),
            index: running.0,
        }
    }

    /// An operation was refused. Kept if that is because the group had failed: a rank that came too late. Only the first one of a
    /// configuration is: a caller may try again and again.
    pub fn refused(&self, summary: &Summary, error: &Error) {
        if error.kind() != ErrorKind::Poisoned {
            return;
        }
        let [collectives, messages] = &self.next;
        let next = match summary.kind.is_p2p() {
            true => messages.load(Ordering::Relaxed),
            false => collectives.load(Ordering::Relaxed),
        };
        write_first(self.ring.refused(summary, self.epoch, next, error));
    }
}

/// A recorded operation that runs on its caller's thread.
#[derive(Debug)]
#[must_use = "it stays in the record as running"]
pub struct Running(u64);

/// A recorded operation that has not ended, in the hands of its [`Completer`](crate::Completer).
#[derive(Debug)]
pub struct Entry {
    ring: Arc<GroupRing>,
    index: u64,
}

impl Entry {
    /// It has begun.
    pub(crate) fn started(&self) {
        self.ring.start(self.index);
    }

    /// The driver has answered; its caller may be told later, after earlier ones.
    pub(crate) fn answered(&self) {
        self.ring.answered(self.index);
    }

    /// Its caller is told.
    pub(crate) fn ended(&self, failure: Option<&Error>) {
        write_first(self.ring.end(self.index, failure));
    }
}

/// Has the record written after the first failure of a configuration, if this is one.
fn write_first(failure: Option<String>) {
    if let Some(why) = failure {
        files::after_failure(&why);
    }
}

/// A ring for a new group; none if the recorder is off.
pub(crate) fn ring() -> Option<Arc<GroupRing>> {
    let length = environment::said().length;
    (length > 0).then(|| files::register(GroupRing::new(length)))
}

// They run an engine, whose locks are shuttle's there.
#[cfg(not(feature = "shuttle"))]
#[cfg(test)]
mod tests;
