//! How fast each replica is, between its calls for a quorum; kept only while a dashboard is open.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ftcore::Step;
use protocol::Quorum;
use serde::{Deserialize, Serialize};

/// Over this time at least, and twice as long at most, steps are counted.
const WINDOW: Duration = Duration::from_secs(5);
/// A replica that has not asked for so long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(120);

/// How fast a replica is, as the dashboard shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Throughput {
    pub(crate) replica_id: String,
    /// Steps in a second, of late.
    pub(crate) steps_per_s: f64,
    /// From the last quorum to its next call: what it took for its part of the step. None before its second call.
    pub(crate) own_s: Option<f64>,
    /// How long that call waited for the others.
    pub(crate) waits_s: Option<f64>,
}

#[derive(Debug, Clone)]
struct Rate {
    /// Where the steps of the present window, and of the next one, are counted from.
    from: (Instant, Step),
    next: (Instant, Step),
    step: Step,
    asked: Instant,
    told: Option<Instant>,
    own: Option<Duration>,
    waits: Option<Duration>,
}

#[derive(Debug, Default)]
pub(crate) struct Rates(HashMap<String, Rate>);

impl Rates {
    /// A replica asks for the quorum of `step`.
    pub(crate) fn asks(&mut self, id: &str, step: Step, now: Instant) {
        let Some(rate) = self.0.get_mut(id) else {
            let at = (now, step);
            let rate = Rate {
                from: at,
                next: at,
                step,
                asked: now,
                told: None,
                own: None,
                waits: None,
            };
            self.0.insert(id.to_string(), rate);
            return;
        };
        if step < rate.step || step > rate.step + 1 {
            // It begins anew, or healed: those are not its steps.
            (rate.from, rate.next) = ((now, step), (now, step));
        } else if now.saturating_duration_since(rate.next.0) >= WINDOW {
            (rate.from, rate.next) = (rate.next, (now, step));
        }
        rate.step = step;
        rate.asked = now;
        rate.own = rate.told.map(|told| now.saturating_duration_since(told));
    }

    /// A quorum is delivered.
    pub(crate) fn tells(&mut self, quorum: &Quorum, now: Instant) {
        for member in &quorum.participants {
            if let Some(rate) = self.0.get_mut(&member.replica_id) {
                rate.told = Some(now);
                rate.waits = Some(now.saturating_duration_since(rate.asked));
            }
        }
    }

    /// In order of the ids.
    pub(crate) fn list(&mut self, now: Instant) -> Vec<Throughput> {
        self.0
            .retain(|_, rate| now.saturating_duration_since(rate.asked) < FORGOTTEN);
        let of = |(id, rate): (&String, &Rate)| {
            let (since, first) = rate.from;
            let time = now.saturating_duration_since(since).as_secs_f64();
            Throughput {
                replica_id: id.clone(),
                steps_per_s: (rate.step - first) as f64 / time.max(1e-3),
                own_s: rate.own.map(|d| d.as_secs_f64()),
                waits_s: rate.waits.map(|d| d.as_secs_f64()),
            }
        };
        let mut list: Vec<Throughput> = self.0.iter().map(of).collect();
        list.sort_by(|a, b| a.replica_id.cmp(&b.replica_id));
        list
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.0 = HashMap::new();
    }
}

#[cfg(test)]
mod tests {
    use protocol::Member;

    use super::*;

    #[test]
    fn the_slow_replica_shows_in_its_own_time_and_the_fast_one_in_its_wait() {
        let mut rates = Rates::default();
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let member = |id: &str| Member {
            replica_id: id.into(),
            ..Member::default()
        };
        let quorum = Quorum {
            participants: vec![member("fast"), member("slow")],
            ..Quorum::default()
        };
        // Each step takes 100 ms; the fast one is back after 20.
        for step in 0..200 {
            let start = u64::try_from(step).unwrap() * 100;
            rates.asks("fast", Step(step), at(start + 20));
            rates.asks("slow", Step(step), at(start + 100));
            rates.tells(&quorum, at(start + 100));
        }
        let list = rates.list(at(20_000));
        let [fast, slow] = list.as_slice() else {
            panic!("{list:?}")
        };
        for one in [fast, slow] {
            assert!((one.steps_per_s - 10.0).abs() < 0.3, "{one:?}");
        }
        let close = |a: Option<f64>, b: f64| a.is_some_and(|a| (a - b).abs() < 1e-6);
        assert!(close(fast.own_s, 0.02) && close(fast.waits_s, 0.08), "{fast:?}");
        assert!(close(slow.own_s, 0.1) && close(slow.waits_s, 0.0), "{slow:?}");
        // A state that was fetched is no progress of its own.
        rates.asks("fast", Step(900), at(20_020));
        assert_eq!(rates.list(at(20_100))[0].steps_per_s, 0.0);
        rates.asks("fast", Step(200), at(20_200));
        // One that stands still gets slower by the second, and is forgotten at last.
        let mut slow = |at| rates.list(at).remove(1).steps_per_s;
        assert!(slow(at(40_000)) < 4.0);
        assert_eq!(rates.list(at(200_000)), []);
    }
}
