//! The thread that keeps the deadlines of all engines of the process. It calls no library, so it is never held up by one, and it ends
//! when nothing is armed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use super::sync::spawn;
use crate::Result;

/// What is looked at when an instant has come.
pub trait Timed: Send + Sync {
    /// `at` has come: does what is due, without blocking. When to look again.
    fn look(&self, at: Instant) -> Option<Instant>;
}

struct Alarm {
    at: Instant,
    whose: Weak<dyn Timed>,
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Alarm {}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

struct Clock {
    alarms: Mutex<Alarms>,
    changed: Condvar,
}

struct Alarms {
    heap: BinaryHeap<Reverse<Alarm>>,
    running: bool,
}

static CLOCK: Clock = Clock {
    alarms: Mutex::new(Alarms {
        heap: BinaryHeap::new(),
        running: false,
    }),
    changed: Condvar::new(),
};

/// Has `whose` looked at when `at` has come. Errors: `Io` if the thread cannot be started.
pub fn arm(at: Instant, whose: Weak<dyn Timed>) -> Result<()> {
    let mut alarms = CLOCK.alarms.lock().unwrap_or_else(PoisonError::into_inner);
    let first = alarms.heap.peek().is_none_or(|Reverse(alarm)| at < alarm.at);
    alarms.heap.push(Reverse(Alarm { at, whose }));
    if !alarms.running {
        spawn("ox-clock", keep)?;
        alarms.running = true;
    } else if first {
        CLOCK.changed.notify_one();
    }
    Ok(())
}

fn keep() {
    let mut alarms = CLOCK.alarms.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let Some(Reverse(first)) = alarms.heap.peek() else {
            alarms.running = false;
            return;
        };
        let (at, now) = (first.at, Instant::now());
        if at > now && first.whose.strong_count() > 0 {
            let waited = CLOCK.changed.wait_timeout(alarms, at.duration_since(now));
            alarms = waited.unwrap_or_else(PoisonError::into_inner).0;
            continue;
        }
        let Some(Reverse(Alarm { at, whose })) = alarms.heap.pop() else {
            continue;
        };
        drop(alarms);
        let again = whose.upgrade().and_then(|timed| timed.look(at));
        alarms = CLOCK.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = again {
            alarms.heap.push(Reverse(Alarm { at, whose }));
        }
    }
}
