//! The ring of one group: the last operations of all its configurations, and what a reader needs besides to name them.
//!
//! A slot's words are written under its stamp: the number of the operation and its state, 0 while the slot is being written. A writer whose
//! slot was taken over by a later operation finds another number there and leaves it alone.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::summary::Summary;
use super::ticks::{Times, now};
use crate::{Configuration, Error};

/// Accepted, behind earlier ones.
pub(super) const QUEUED: u64 = 1;
/// Begun.
pub(super) const RUNNING: u64 = 2;
const DONE: u64 = 3;
const FAILED: u64 = 4;
const REFUSED: u64 = 5;

const STATE_BITS: u32 = 3;
const STATE: u64 = (1 << STATE_BITS) - 1;

/// Configurations and failures of a group that are remembered by name.
const REMEMBERED: usize = 32;

#[derive(Debug, Default)]
struct Slot {
    stamp: AtomicU64,
    epoch: AtomicU64,
    seq: AtomicU64,
    /// These three in ticks.
    submitted: AtomicU64,
    started: AtomicU64,
    ended: AtomicU64,
    summary: [AtomicU64; 6],
}

/// A configuration of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Configured {
    pub(super) epoch: u64,
    pub(super) name: String,
    pub(super) prefix: String,
    pub(super) rank: u32,
    pub(super) world: u32,
    /// In nanoseconds since 1970; in ticks as long as it is in the ring.
    pub(super) at: u64,
}

#[derive(Debug, Clone)]
struct Failure {
    index: u64,
    text: String,
}

#[derive(Debug, Default)]
struct Told {
    configurations: VecDeque<Configured>,
    failures: VecDeque<Failure>,
    /// The epoch whose first failure was told.
    failed: Option<u64>,
    /// The epoch of which a refusal is recorded.
    refused: Option<u64>,
}

/// An operation as the record has it; times in nanoseconds since 1970, 0 for what has not happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Operation {
    pub(super) index: u64,
    pub(super) epoch: u64,
    pub(super) seq: u64,
    pub(super) summary: Summary,
    pub(super) state: &'static str,
    pub(super) submitted: u64,
    pub(super) started: u64,
    pub(super) ended: u64,
    pub(super) reason: Option<String>,
}

/// What a group's ring holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) configurations: Vec<Configured>,
    /// Oldest first.
    pub(super) operations: Vec<Operation>,
    /// How many operations there were in all.
    pub(super) recorded: u64,
}

/// The last operations of one group.
#[derive(Debug)]
pub struct GroupRing {
    length: usize,
    slots: OnceLock<Box<[Slot]>>,
    next: AtomicU64,
    told: Mutex<Told>,
    /// The group is gone.
    closed: AtomicBool,
}

impl GroupRing {
    pub(super) fn new(length: usize) -> Self {
        Self {
            length: length.max(1),
            slots: OnceLock::new(),
            next: AtomicU64::new(0),
            told: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, index: u64) -> Option<&Slot> {
        let slots = self
            .slots
            .get_or_init(|| (0..self.length).map(|_| Slot::default()).collect());
        slots.get((index % self.length as u64) as usize)
    }

    /// The slot of an operation, if it has not been taken over, and its state.
    fn own(&self, index: u64) -> Option<(&Slot, u64)> {
        let slot = self.slot(index)?;
        let stamp = slot.stamp.load(Ordering::Relaxed);
        (stamp >> STATE_BITS == index + 1).then_some((slot, stamp & STATE))
    }

    pub(super) fn configured(&self, c: &Configuration) {
        let mut told = self.told();
        if told.configurations.len() == REMEMBERED {
            told.configurations.pop_front();
        }
        told.configurations.push_back(Configured {
            epoch: c.epoch.0,
            name: c.name.clone(),
            prefix: c.prefix.clone(),
            rank: c.rank,
            world: c.world_size,
            at: now(),
        });
    }

    /// Records an operation; its index.
    pub(super) fn begin(&self, summary: &Summary, epoch: u64, seq: u64, state: u64) -> u64 {
        let at = now();
        let started = if state == RUNNING { at } else { 0 };
        self.write(summary, (epoch, seq), state, [at, started, 0])
    }

    fn write(&self, summary: &Summary, (epoch, seq): (u64, u64), state: u64, times: [u64; 3]) -> u64 {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(slot) = self.slot(index) else {
            return index;
        };
        let stamp = (index + 1) << STATE_BITS;
        slot.stamp.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        let [submitted, started, ended] = times;
        slot.epoch.store(epoch, Ordering::Relaxed);
        slot.seq.store(seq, Ordering::Relaxed);
        slot.submitted.store(submitted, Ordering::Relaxed);
        slot.started.store(started, Ordering::Relaxed);
        slot.ended.store(ended, Ordering::Relaxed);
        for (word, value) in slot.summary.iter().zip(summary.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        slot.stamp.store(stamp | state, Ordering::Release);
        index
    }

    pub(super) fn start(&self, index: u64) {
        if let Some((slot, QUEUED)) = self.own(index) {
            slot.started.store(now(), Ordering::Relaxed);
            slot.stamp
                .store((index + 1) << STATE_BITS | RUNNING, Ordering::Release);
        }
    }

    pub(super) fn answered(&self, index: u64) {
        if let Some((slot, _)) = self.own(index) {
            slot.ended.store(now(), Ordering::Relaxed);
        }
    }

    /// As [`failed`](Self::failed), if there is a failure.
    pub(super) fn end(&self, index: u64, failure: Option<&Error>) -> Option<String> {
        if let Some((slot, QUEUED | RUNNING)) = self.own(index) {
            if slot.ended.load(Ordering::Relaxed) == 0 {
                slot.ended.store(now(), Ordering::Relaxed);
            }
            let state = if failure.is_some() { FAILED } else { DONE };
            slot.stamp
                .store((index + 1) << STATE_BITS | state, Ordering::Release);
            if let Some(error) = failure {
                return self.failed(index, slot.epoch.load(Ordering::Relaxed), error);
            }
        }
        None
    }

    /// As [`failed`](Self::failed); only the first refusal of a configuration is recorded.
    pub(super) fn refused(&self, summary: &Summary, epoch: u64, seq: u64, error: &Error) -> Option<String> {
        if self.told().refused.replace(epoch) == Some(epoch) {
            return None;
        }
        let at = now();
        let index = self.write(summary, (epoch, seq), REFUSED, [at, 0, at]);
        self.failed(index, epoch, error)
    }

    /// Remembers why. The text, if this is the first failure of its configuration: then the record is to be written.
    fn failed(&self, index: u64, epoch: u64, error: &Error) -> Option<String> {
        let text = error.to_string();
        let mut told = self.told();
        if told.failures.len() == REMEMBERED {
            told.failures.pop_front();
        }
        let first = told.failed.replace(epoch) != Some(epoch);
        told.failures.push_back(Failure {
            index,
            text: text.clone(),
        });
        first.then_some(text)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// True if nothing was ever submitted.
    pub(super) fn is_empty(&self) -> bool {
        self.next.load(Ordering::Relaxed) == 0
    }

    /// What it holds. Operations that change while this looks are left out.
    pub(super) fn snapshot(&self) -> Snapshot {
        let (mut configurations, failures) = {
            let told = self.told();
            (told.configurations.clone(), told.failures.clone())
        };
        let slots = self.slots.get().map_or(&[][..], |slots| slots);
        let times = Times::new();
        configurations.iter_mut().for_each(|c| c.at = times.unix_ns(c.at));
        let mut operations: Vec<Operation> = slots.iter().filter_map(|slot| read(slot, times)).collect();
        operations.sort_unstable_by_key(|o| o.index);
        for operation in &mut operations {
            let reason = failures.iter().rfind(|f| f.index == operation.index);
            operation.reason = reason.map(|f| f.text.clone());
        }
        Snapshot {
            configurations: configurations.into(),
            operations,
            recorded: self.next.load(Ordering::Relaxed),
        }
    }
}

fn read(slot: &Slot, times: Times) -> Option<Operation> {
    let stamp = slot.stamp.load(Ordering::Acquire);
    let words = slot.summary.each_ref().map(|word| word.load(Ordering::Relaxed));
    let [epoch, seq, submitted, started, ended] = [
        &slot.epoch,
        &slot.seq,
        &slot.submitted,
        &slot.started,
        &slot.ended,
    ]
    .map(|w| w.load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    // A state that went on meanwhile is the same operation, whose other words have not changed.
    let same = slot.stamp.load(Ordering::Relaxed) >> STATE_BITS == stamp >> STATE_BITS;
    let index = (stamp >> STATE_BITS).checked_sub(1).filter(|_| same)?;
    let (state, over) = match stamp & STATE {
        QUEUED => ("queued", false),
        RUNNING => ("running", false),
        DONE => ("done", true),
        FAILED => ("failed", true),
        REFUSED => ("refused", true),
        _ => return None,
    };
    Some(Operation {
        index,
        epoch,
        seq,
        summary: Summary::decode(words)?,
        state,
        submitted: times.unix_ns(submitted),
        started: times.unix_ns(started),
        ended: if over { times.unix_ns(ended) } else { 0 },
        reason: None,
    })
}
