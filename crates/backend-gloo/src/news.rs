//! What the engine's thread has learnt about the peers, for whoever drives the lane or the mail: who is gone, and what was reported.
//!
//! The thread tells and rings; a driver looks at one flag in each turn, and takes the lock only once something has come.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use ftcore::Error;

use crate::queue::Shared;

/// What became of a peer.
#[derive(Debug, Clone)]
pub(crate) struct Fate {
    /// It said good-bye; otherwise it is lost.
    pub(crate) left: bool,
    /// Why, or how that showed.
    pub(crate) text: String,
}

/// What the engine's thread has learnt that the driver of the lane needs to know.
#[derive(Default)]
pub(crate) struct News {
    fates: Vec<(u32, Fate)>,
    report: Option<Error>,
}

impl Shared {
    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the driver of the lane what became of a peer.
    pub(crate) fn tell_fate(&self, rank: u32, fate: Fate) {
        let mut news = self.news();
        if news.fates.iter().any(|(r, _)| *r == rank) {
            return;
        }
        news.fates.push((rank, fate));
        drop(news);
        self.raise();
    }

    /// Tells the driver of the lane that another rank reports a loss: the group fails once the lane is free or blocked.
    pub(crate) fn tell_report(&self, report: Error) {
        self.news().report.get_or_insert(report);
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

    /// True if there is news, once.
    pub(crate) fn heed(&self) -> bool {
        self.attention.load(Ordering::Acquire) && self.attention.swap(false, Ordering::AcqRel)
    }

    /// True once any peer is gone or was reported.
    pub(crate) fn in_trouble(&self) -> bool {
        self.trouble.load(Ordering::Acquire)
    }

    pub(crate) fn fate(&self, rank: u32) -> Option<Fate> {
        let news = self.news();
        let found = news.fates.iter().find(|(r, _)| *r == rank);
        found.map(|(_, fate)| fate.clone())
    }

    /// All fates but the first `known`, in the order in which they were told.
    pub(crate) fn fates_from(&self, known: usize) -> Vec<(u32, Fate)> {
        self.news().fates.get(known..).unwrap_or_default().to_vec()
    }

    /// A loss that another rank reported.
    pub(crate) fn report(&self) -> Option<Error> {
        if !self.in_trouble() {
            return None;
        }
        self.news().report.clone()
    }
}
