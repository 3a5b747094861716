//! The time as the present runtime has it: the system's, but for the simulation, whose runtime has a clock of its own.
//!
//! What is compared with a timer of the runtime, or given to the state machines, comes from here and not from `Instant::now`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// What is left until `deadline`; zero once it has passed.
pub(crate) fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(now())
}

/// The instant after `timeout`; one that is too long ends in a year.
pub(crate) fn deadline_in(timeout: Duration) -> Instant {
    let now = now();
    now.checked_add(timeout)
        .unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600))
}

/// The wall clock, since 1970.
pub(crate) fn wall() -> Duration {
    #[cfg(test)]
    if let Some(wall) = crate::simulation::wall() {
        return wall;
    }
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
