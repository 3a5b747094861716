//! What the engine's thread has learnt about the peers, for the drivers of the executor and of the channels: who is gone, and what was reported.
//!
//! The thread tells and rings; a driver looks at one flag in each turn, and takes the lock only once something has come.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use ftcore::Error;

use crate::peer::Fate;
use crate::queue::Shared;

/// What the engine's thread has learnt that the driver of the executor needs to know.
#[derive(Default)]
pub(crate) struct Notices {
    fates: Vec<(u32, Fate)>,
    report: Option<Error>,
}

impl Shared {
    fn notices(&self) -> MutexGuard<'_, Notices> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the driver of the executor what became of a peer.
    pub(crate) fn tell_fate(&self, rank: u32, fate: Fate) {
        let mut notices = self.notices();
        if notices.fates.iter().any(|(r, _)| *r == rank) {
            return;
        }
        notices.fates.push((rank, fate));
        drop(notices);
        self.raise();
    }

    /// Tells the driver of the executor that another rank reports a loss: the group fails once the executor is free or blocked.
    pub(crate) fn tell_report(&self, report: Error) {
        self.notices().report.get_or_insert(report);
        self.raise();
    }

    /// The engine's thread has read every control connection as far as it goes.
    pub(crate) fn looked(&self) {
        self.looks.fetch_add(1, Ordering::AcqRel);
    }

    /// How often it has.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Acquire)
    }

    fn raise(&self) {
        self.trouble.store(true, Ordering::Release);
        self.attention.store(true, Ordering::Release);
        self.alarm();
    }

    /// True if there is notices, once.
    pub(crate) fn heed(&self) -> bool {
        self.attention.load(Ordering::Acquire) && self.attention.swap(false, Ordering::AcqRel)
    }

    /// True once any peer is gone or was reported.
    pub(crate) fn in_trouble(&self) -> bool {
        self.trouble.load(Ordering::Acquire)
    }

    pub(crate) fn fate(&self, rank: u32) -> Option<Fate> {
        let notices = self.notices();
        let found = notices.fates.iter().find(|(r, _)| *r == rank);
        found.map(|(_, fate)| fate.clone())
    }

    /// All fates but the first `known`, in the order in which they were told.
    pub(crate) fn fates_from(&self, known: usize) -> Vec<(u32, Fate)> {
        self.notices().fates.get(known..).unwrap_or_default().to_vec()
    }

    /// A loss that another rank reported.
    pub(crate) fn report(&self) -> Option<Error> {
        if !self.in_trouble() {
            return None;
        }
        self.notices().report.clone()
    }
}
