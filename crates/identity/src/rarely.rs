//! A line of the log that a flood of its causes does not become a flood of.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A line comes at most this often, with the number of those that did not.
const EVERY: Duration = Duration::from_secs(1);

/// Lets one event a second through, and counts the others.
#[derive(Debug, Default)]
pub struct Rarely(Mutex<(Option<Instant>, u64)>);

impl Rarely {
    /// The number of events that were held back since the last one that was not; `None` if this one is to be held back.
    pub fn pass(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if state
            .0
            .is_some_and(|at| now.saturating_duration_since(at) < EVERY)
        {
            state.1 += 1;
            return None;
        }
        state.0 = Some(now);
        Some(std::mem::take(&mut state.1))
    }
}
