//! Deadlines between processes: an `Instant` is Linux's monotonic clock, which all processes of a host share.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Nanoseconds of the monotonic clock at `at`; the past is now.
pub(crate) fn to_wire(at: Instant) -> u64 {
    let then = now().saturating_add(ftcore::time_left(at));
    u64::try_from(then.as_nanos()).unwrap_or(u64::MAX)
}

/// The instant of [`to_wire`]; one too far to represent counts as a year from now.
pub(crate) fn from_wire(nanoseconds: u64) -> Instant {
    ftcore::deadline_in(Duration::from_nanos(nanoseconds).saturating_sub(now()))
}

/// `at` and a bit; `at` itself where that cannot be represented.
pub(crate) fn later(at: Instant, by: Duration) -> Instant {
    at.checked_add(by).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_keeps_its_place_on_the_way_through_another_process() {
        let at = Instant::now() + Duration::from_secs(1000);
        let back = from_wire(to_wire(at));
        let off = at.max(back) - at.min(back);
        assert!(off < Duration::from_millis(500), "{off:?}");
        assert!(ftcore::time_left(from_wire(0)).is_zero());
        assert!(ftcore::time_left(from_wire(u64::MAX)) > Duration::from_secs(1 << 20));
    }
}
