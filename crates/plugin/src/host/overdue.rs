//! Operations that a plugin has not completed long after their deadline, per group.
//!
//! The plugin should have ended them itself. The group's first such operation fails with the plugin's name and is the group's failure until
//! the next `configure`: later operations are refused at once instead of each waiting in vain.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::engine::{Timed, arm};
use ftcore::{Error, ErrorKind, Result};

use super::operation::Pending;

/// How long after its deadline an operation may be reported: less than what a caller waits for that ([`ftcore::Work::wait_done`]).
const GRACE: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Default)]
pub(super) struct Overdue(Mutex<State>);

#[derive(Default)]
struct State {
    next: u64,
    /// Deadlines of what the plugin has, by the order of submission.
    waiting: BTreeMap<u64, (Instant, Weak<Pending>)>,
    /// When this is looked at next.
    armed: Option<Instant>,
    failure: Option<Error>,
}

impl Overdue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first operation that was not completed since the last `configure`.
    pub(super) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// As [`failure`](Self::failure), for the next call.
    pub(super) fn refusal(&self) -> Option<Error> {
        let first = self.failure()?;
        let text = format!("the group is poisoned: {first}");
        Some(Error::new(ErrorKind::Poisoned, text).with_source(first))
    }

    /// A configuration of its own has begun.
    pub(super) fn forget(&self) {
        self.lock().failure = None;
    }

    /// The plugin has `pending` until [`ended`](Self::ended) is called with the number. Errors: `Io` if deadlines cannot be watched.
    pub(super) fn begun(self: &Arc<Self>, pending: Weak<Pending>, deadline: Instant) -> Result<u64> {
        let at = deadline.checked_add(GRACE).unwrap_or(deadline);
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number, (at, pending));
        if state.armed.is_none_or(|armed| at < armed) {
            let whose: Weak<Self> = Arc::downgrade(self);
            arm(at, whose)?;
            state.armed = Some(at);
        }
        Ok(number)
    }

    pub(super) fn ended(&self, number: u64) {
        self.lock().waiting.remove(&number);
    }
}

impl Timed for Overdue {
    fn look(&self, now: Instant) -> Option<Instant> {
        let due: Vec<Weak<Pending>> = {
            let mut state = self.lock();
            if state.armed.is_some_and(|armed| armed != now) {
                // An earlier one was armed since, and looks on.
                return None;
            }
            let due = state.waiting.extract_if(.., |_, (at, _)| *at <= now);
            let due = due.map(|(_, (_, pending))| pending).collect();
            state.armed = state.waiting.values().map(|(at, _)| *at).min();
            due
        };
        // Outside the lock: callers are told, and may submit.
        for pending in due.iter().filter_map(Weak::upgrade) {
            if let Some(error) = pending.overdue(GRACE) {
                self.lock().failure.get_or_insert(error);
            }
        }
        self.lock().armed
    }
}
