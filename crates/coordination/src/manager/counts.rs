//! What the ranks of a replica have counted: each tells it with its votes, and the manager server shows all of them under `/metrics`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ftcore::Step;

use crate::exposition::{Exposition, Kind};
use crate::wire::torchft;

/// What a rank has counted since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankCounts {
    /// The step of its state.
    pub step: Step,
    /// Quorums that it got, and how long it waited for them.
    pub quorums: Timed,
    /// Epochs for which its group was connected, and how long that took.
    pub configures: Timed,
    /// States that it fetched, and how long that took.
    pub heals: Timed,
    /// Votes of its replica, and how long they took.
    pub votes: Timed,
    /// Steps that committed, and how long they took from the call for a quorum to the decision.
    pub commits: Timed,
    /// Attempts at a step that did not commit, likewise.
    pub discards: Timed,
    /// Collectives that it submitted.
    pub collectives: u64,
    /// Bytes of the tensors in them.
    pub collective_bytes: u64,
    /// Bytes that its group sent to other replicas, and received; 0 over backends that do not tell.
    pub sent_bytes: u64,
    /// See `sent_bytes`.
    pub received_bytes: u64,
    /// Bytes of the states that it fetched.
    pub heal_bytes: u64,
    /// Failures: the first of each attempt.
    pub failures: u64,
}

/// How often something happened, and how long it took in all.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timed {
    /// How often.
    pub count: u64,
    /// In all.
    pub time: Duration,
}

impl Timed {
    /// It happened once more.
    pub fn add(&mut self, took: Duration) {
        self.count = self.count.saturating_add(1);
        self.time = self.time.saturating_add(took);
    }
}

impl From<Timed> for torchft::Timed {
    fn from(t: Timed) -> Self {
        Self {
            count: t.count,
            time_ns: u64::try_from(t.time.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl From<Option<torchft::Timed>> for Timed {
    fn from(t: Option<torchft::Timed>) -> Self {
        let t = t.unwrap_or_default();
        Self {
            count: t.count,
            time: Duration::from_nanos(t.time_ns),
        }
    }
}

impl From<RankCounts> for torchft::RankCounts {
    fn from(c: RankCounts) -> Self {
        Self {
            step: c.step.0,
            quorums: Some(c.quorums.into()),
            configures: Some(c.configures.into()),
            heals: Some(c.heals.into()),
            votes: Some(c.votes.into()),
            commits: Some(c.commits.into()),
            discards: Some(c.discards.into()),
            collectives: c.collectives,
            collective_bytes: c.collective_bytes,
            sent_bytes: c.sent_bytes,
            received_bytes: c.received_bytes,
            heal_bytes: c.heal_bytes,
            failures: c.failures,
        }
    }
}

impl From<torchft::RankCounts> for RankCounts {
    fn from(c: torchft::RankCounts) -> Self {
        Self {
            step: Step(c.step),
            quorums: c.quorums.into(),
            configures: c.configures.into(),
            heals: c.heals.into(),
            votes: c.votes.into(),
            commits: c.commits.into(),
            discards: c.discards.into(),
            collectives: c.collectives,
            collective_bytes: c.collective_bytes,
            sent_bytes: c.sent_bytes,
            received_bytes: c.received_bytes,
            heal_bytes: c.heal_bytes,
            failures: c.failures,
        }
    }
}

/// What a manager server has counted, and what its ranks told last.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) quorum_calls: AtomicU64,
    pub(crate) votes: AtomicU64,
    pub(crate) reports: AtomicU64,
    ranks: Mutex<BTreeMap<u32, RankCounts>>,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counts {
    /// A rank of a replica of `world_size` tells what it has counted.
    pub(crate) fn tell(&self, rank: u32, world_size: u32, counts: RankCounts) {
        // What comes over the network makes no room for ranks that there are not.
        if rank < world_size {
            let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
            ranks.insert(rank, counts);
        }
    }

    /// For Prometheus. `replica` is the replica's name, which all its incarnations have.
    pub(crate) fn text(&self, replica: &str, world_size: u32) -> String {
        let mut text = Exposition::default();
        let own = [("replica", replica)];
        let name = "oxccl_manager_ranks";
        text.family(Kind::Gauge, name, "Ranks of the replica.");
        text.sample(name, &own, world_size);
        for (name, help, counter) in [
            (
                "oxccl_manager_quorum_calls_total",
                "Calls of ranks for a quorum.",
                &self.quorum_calls,
            ),
            ("oxccl_manager_votes_total", "Votes of ranks.", &self.votes),
            (
                "oxccl_manager_reports_total",
                "Failures that ranks reported.",
                &self.reports,
            ),
        ] {
            text.family(Kind::Counter, name, help);
            text.sample(name, &own, counter.load(Ordering::Relaxed));
        }
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ranks: Vec<(String, RankCounts)> = ranks.into_iter().map(|(r, c)| (r.to_string(), c)).collect();
        let step = "oxccl_rank_step";
        text.family(Kind::Gauge, step, "The step of the rank's state.");
        for (rank, counts) in &ranks {
            text.sample(step, &[("replica", replica), ("rank", rank)], counts.step);
        }
        for (name, help, of) in COUNTERS {
            text.family(Kind::Counter, name, help);
            for (rank, counts) in &ranks {
                text.sample(name, &[("replica", replica), ("rank", rank)], of(counts));
            }
        }
        for (name, help, of) in SUMMARIES {
            text.family(Kind::Summary, name, help);
            for (rank, counts) in &ranks {
                let (labels, timed) = ([("replica", replica), ("rank", rank.as_str())], of(counts));
                text.sample(&format!("{name}_sum"), &labels, timed.time.as_secs_f64());
                text.sample(&format!("{name}_count"), &labels, timed.count);
            }
        }
        text.into_text()
    }
}

/// Name, meaning, and where it stands.
type Family<T> = (&'static str, &'static str, fn(&RankCounts) -> T);

const COUNTERS: &[Family<u64>] = &[
    (
        "oxccl_rank_collectives_total",
        "Collectives that the rank submitted.",
        |c| c.collectives,
    ),
    (
        "oxccl_rank_collective_bytes_total",
        "Bytes of the tensors in the rank's collectives.",
        |c| c.collective_bytes,
    ),
    (
        "oxccl_rank_sent_bytes_total",
        "Bytes that the rank's group sent to other replicas.",
        |c| c.sent_bytes,
    ),
    (
        "oxccl_rank_received_bytes_total",
        "Bytes that the rank's group received from other replicas.",
        |c| c.received_bytes,
    ),
    (
        "oxccl_rank_heal_bytes_total",
        "Bytes of the states that the rank fetched.",
        |c| c.heal_bytes,
    ),
    (
        "oxccl_rank_failures_total",
        "Failures of the rank, the first of each attempt at a step.",
        |c| c.failures,
    ),
    ("oxccl_rank_commits_total", "Steps that committed.", |c| {
        c.commits.count
    }),
    (
        "oxccl_rank_discards_total",
        "Attempts at a step that did not commit.",
        |c| c.discards.count,
    ),
    ("oxccl_rank_heals_total", "States that the rank fetched.", |c| {
        c.heals.count
    }),
];

const SUMMARIES: &[Family<Timed>] = &[
    (
        "oxccl_rank_quorum_seconds",
        "Time that the rank waited for a quorum.",
        |c| c.quorums,
    ),
    (
        "oxccl_rank_configure_seconds",
        "Time in which the rank's group was connected for a new epoch.",
        |c| c.configures,
    ),
    (
        "oxccl_rank_heal_seconds",
        "Time in which the rank fetched and applied a state.",
        |c| c.heals,
    ),
    ("oxccl_rank_vote_seconds", "Time of a vote.", |c| c.votes),
    (
        "oxccl_rank_step_seconds",
        "Time of a step that committed, from the call for a quorum to the decision.",
        |c| c.commits,
    ),
    (
        "oxccl_rank_discarded_step_seconds",
        "Time of an attempt at a step that did not commit.",
        |c| c.discards,
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_the_wire_and_show_by_rank() {
        let mut told = RankCounts {
            step: Step(41),
            collectives: 7,
            collective_bytes: 4096,
            sent_bytes: 5,
            received_bytes: 6,
            heal_bytes: 8,
            failures: 9,
            ..RankCounts::default()
        };
        let times = [
            &mut told.quorums,
            &mut told.configures,
            &mut told.heals,
            &mut told.votes,
            &mut told.commits,
            &mut told.discards,
        ];
        for (nth, timed) in (1..).zip(times) {
            timed.add(Duration::from_millis(250 * nth));
        }
        let counts = Counts::default();
        counts.tell(1, 2, torchft::RankCounts::from(told).into());
        counts.tell(2, 2, told);
        count(&counts.votes);
        let text = counts.text("a", 2);
        for line in [
            "oxccl_manager_votes_total{replica=\"a\"} 1",
            "oxccl_rank_step{replica=\"a\",rank=\"1\"} 41",
            "oxccl_rank_collective_bytes_total{replica=\"a\",rank=\"1\"} 4096",
            "oxccl_rank_quorum_seconds_sum{replica=\"a\",rank=\"1\"} 0.25",
            "oxccl_rank_step_seconds_sum{replica=\"a\",rank=\"1\"} 1.25",
            "oxccl_rank_step_seconds_count{replica=\"a\",rank=\"1\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
        }
        assert!(!text.contains("rank=\"2\""), "there is no such rank: {text}");
    }
}
