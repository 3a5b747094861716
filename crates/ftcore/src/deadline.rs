//! Deadlines as instants: passed down unchanged, never restarted at each level.

use std::time::{Duration, Instant};

/// The instant `timeout` from now; a time-out too long to represent counts as a year.
pub fn deadline_in(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout)
        .unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600))
}

/// What is left until `deadline`; zero once it has passed.
pub fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// `by` after `at`; `at` itself where that cannot be represented.
pub fn later(at: Instant, by: Duration) -> Instant {
    at.checked_add(by).unwrap_or(at)
}
