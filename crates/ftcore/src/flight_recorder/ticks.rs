//! The recorder's clock. Three looks at the system's cost more than all else that a record does, so times are kept as the processor's
//! counter and become times when a record is read.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// The wall clock, in nanoseconds since 1970.
pub(super) fn unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// One moment by all clocks.
#[derive(Debug, Clone, Copy)]
struct Moment {
    ticks: u64,
    monotonic_ns: u64,
    unix_ns: u64,
}

/// Where ticks come from, and the first moment.
#[derive(Debug)]
struct Clock {
    is_counter: bool,
    began: Moment,
}

impl Clock {
    fn get() -> &'static Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        CLOCK.get_or_init(|| {
            let is_counter = has_counter();
            let began = moment(is_counter);
            Self { is_counter, began }
        })
    }
}

/// True where the kernel itself keeps time by the processor's counter: it has found that the counter is even, the same on all
/// cores and not stopped by sleep, and its `clock_gettime` reads it in this process.
fn has_counter() -> bool {
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64") && std::fs::read_to_string(source).is_ok_and(|name| name.trim() == "tsc")
}

fn read(is_counter: bool) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_counter {
        // SAFETY: every x86-64 has the instruction, and a process that may not use it could not read the time either (`has_counter`).
        return unsafe { std::arch::x86_64::_rdtsc() };
    }
    let _ = is_counter;
    monotonic_ns()
}

/// The clocks are read one after the other, and a thread may lose its core in between: the quickest of three readings counts.
fn moment(is_counter: bool) -> Moment {
    let reading = || {
        let before = read(is_counter);
        let (monotonic_ns, unix_ns) = (monotonic_ns(), unix_ns());
        let took = read(is_counter).saturating_sub(before);
        let ticks = before + took / 2;
        let moment = Moment {
            ticks,
            monotonic_ns,
            unix_ns,
        };
        (took, moment)
    };
    let [first, second, third] = [reading(), reading(), reading()];
    let quicker = |a: (u64, Moment), b: (u64, Moment)| if a.0 <= b.0 { a } else { b };
    quicker(quicker(first, second), third).1
}

/// Now, in ticks.
pub(super) fn now() -> u64 {
    read(Clock::get().is_counter)
}

/// From ticks to nanoseconds of the wall clock since 1970 that do not go back within a process: between the first look at the clock and
/// this value's making.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    began_unix_ns: u64,
    began_ticks: u64,
    /// So many nanoseconds are so many ticks.
    rate: (u64, u64),
}

impl Times {
    pub(super) fn new() -> Self {
        let clock = Clock::get();
        let (began, now) = (clock.began, moment(clock.is_counter));
        Self {
            began_unix_ns: began.unix_ns,
            began_ticks: began.ticks,
            rate: (
                now.monotonic_ns.saturating_sub(began.monotonic_ns),
                now.ticks.saturating_sub(began.ticks).max(1),
            ),
        }
    }

    /// 0 for 0, which is no time.
    pub(super) fn unix_ns(self, ticks: u64) -> u64 {
        if ticks == 0 {
            return 0;
        }
        let since = u128::from(ticks.saturating_sub(self.began_ticks)) * u128::from(self.rate.0)
            / u128::from(self.rate.1);
        self.began_unix_ns
            .saturating_add(u64::try_from(since).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_the_times_at_which_they_were_read() {
        let before = unix_ns();
        let ticks: Vec<u64> = (0..1000).map(|_| now()).collect();
        let after = unix_ns();
        let times = Times::new();
        let told: Vec<u64> = ticks.iter().map(|&t| times.unix_ns(t)).collect();
        assert!(told.is_sorted(), "{told:?}");
        // Wide: the wall clock may be set or slewed meanwhile, and a busy machine may stop this thread anywhere.
        let slack = 1_000_000_000;
        for at in told {
            assert!(before - slack < at && at < after + slack, "{before} {at} {after}");
        }
        assert_eq!(times.unix_ns(0), 0);
    }

    #[test]
    fn a_counter_of_any_rate_is_understood() {
        let times = Times {
            began_unix_ns: 1000,
            began_ticks: 70,
            rate: (3_000_000_000, 9_000_000_000),
        };
        assert_eq!(
            [70, 73, 370, 9_000_000_070].map(|t| times.unix_ns(t)),
            [1000, 1001, 1100, 3_000_001_000]
        );
        // A tick of another core, before the first.
        assert_eq!(times.unix_ns(60), 1000);
    }
}
