//! Waiting on the host for a device whose events can only be asked.

use std::time::{Duration, Instant};

use crate::{Error, Result, time_left};

/// Polls `ready` until it says true: without sleeping at first, then ever longer, at most half a millisecond.
///
/// Errors: what `ready` says; `Timeout` that names `what` was not reached.
pub fn poll(deadline: Instant, what: &str, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut pause = Duration::from_micros(5);
    for round in 0u32.. {
        if ready()? {
            return Ok(());
        }
        if time_left(deadline).is_zero() {
            return Err(Error::timeout(format!("{what} was not reached by the deadline")));
        }
        if round < 20 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(pause.min(time_left(deadline)));
            pause = (pause * 2).min(Duration::from_micros(500));
        }
    }
    Ok(())
}
