//! How long gradients are under way: the time in which at least one bucket of the attempt has been sent and has not come back.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{ReduceOp, Tensor};
use replica::{ManagedWork, Replica};

#[derive(Default)]
struct Clock {
    buckets: usize,
    since: Option<Instant>,
    total: Duration,
}

impl Clock {
    fn sent(&mut self, now: Instant) {
        self.buckets += 1;
        self.since.get_or_insert(now);
    }

    fn came_back(&mut self, now: Instant) {
        self.buckets = self.buckets.saturating_sub(1);
        if self.buckets == 0
            && let Some(since) = self.since.take()
        {
            self.total += now.saturating_duration_since(since);
        }
    }
}

/// The buckets of one attempt. Each attempt has its own, so that a late end of an earlier one does not count.
#[derive(Default)]
pub(crate) struct UnderWay(Arc<Mutex<Clock>>);

impl UnderWay {
    /// Sends a bucket to be averaged.
    pub(crate) fn send(&self, replica: &mut dyn Replica, bucket: Tensor) -> ManagedWork {
        let begun = Instant::now();
        let managed = replica.all_reduce(vec![bucket], ReduceOp::Avg);
        if let Ok(work) = managed.work() {
            self.with(|clock| clock.sent(begun));
            let clock = Self(self.0.clone());
            work.on_complete(move |_| clock.with(|clock| clock.came_back(Instant::now())));
        }
        managed
    }

    /// The time so far, of buckets that have come back.
    pub(crate) fn total(&self) -> Duration {
        self.with(|clock| clock.total)
    }

    fn with<T>(&self, f: impl FnOnce(&mut Clock) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_once_while_any_bucket_is_under_way_and_not_between_them() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut clock = Clock::default();
        clock.sent(at(10));
        clock.sent(at(20));
        clock.came_back(at(30));
        assert_eq!(clock.total, Duration::ZERO);
        clock.came_back(at(50));
        clock.sent(at(70));
        clock.came_back(at(75));
        assert_eq!(clock.total, Duration::from_millis(45));
    }
}
