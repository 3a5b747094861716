//! What the disturbances of a campaign cost: from each kill or stop to the next commit of the others, and where the time went.

use std::collections::BTreeMap;
use std::fmt;

use oxccl::launch::EventKind;
use oxccl_launch::SupervisorEvent;
use serde::Serialize;

use super::subject::subject;
use crate::campaign::{Disturbance, What};

/// How many of the longest times without a commit are told.
const LONGEST: usize = 12;

/// A distribution of times in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    /// How many.
    pub count: usize,
    /// The median.
    pub p50_ms: f64,
    /// 99 of 100 are not longer.
    pub p99_ms: f64,
    /// The longest.
    pub max_ms: f64,
}

impl Times {
    fn of(mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let last = ms.len().saturating_sub(1);
            ms.get((last as f64 * part).ceil() as usize)
                .copied()
                .unwrap_or(0.0)
        };
        Self {
            count: ms.len(),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            max_ms: at(1.0),
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            count,
            p50_ms,
            p99_ms,
            max_ms,
        } = self;
        write!(
            f,
            "p50 {p50_ms:.0} ms, p99 {p99_ms:.0} ms, longest {max_ms:.0} ms ({count})"
        )
    }
}

/// A time in which no replica committed a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gap {
    /// The step that ended it.
    pub step: u64,
    /// When it began, in seconds from the first commit.
    pub at_s: f64,
    /// How long it was.
    pub ms: f64,
    /// What was done to the run in it or in the two seconds before, each with how long before the end of the gap.
    pub after: Vec<String>,
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Cost {
    /// The seed of the campaign; `None` for an undisturbed run.
    pub seed: Option<u64>,
    /// SIGKILLs of ranks.
    pub kills: usize,
    /// SIGSTOPs of ranks.
    pub stops: usize,
    /// SIGKILLs of the lighthouse.
    pub lighthouse_kills: usize,
    /// Incarnations of replicas after their first.
    pub restarts: usize,
    /// States that replicas took over from others.
    pub heals: usize,
    /// Attempts at steps that did not commit, on rank 0 of each replica.
    pub retried: u64,
    /// Steps committed by the job, from the first commit on.
    pub steps: u64,
    /// From the first commit to the last.
    pub seconds: f64,
    /// Between two steps of the job.
    pub between_commits: Times,
    /// From a kill of a rank to the next commit of another replica.
    pub kill_to_commit: Times,
    /// From a stop likewise.
    pub stop_to_commit: Times,
    /// From a kill of the lighthouse to the next commit.
    pub lighthouse_to_commit: Times,
    /// From a replica's death to its first commit in a later incarnation.
    pub death_to_own_commit: Times,
    /// The longest times without a commit.
    pub longest: Vec<Gap>,
    /// All that was done.
    pub disturbances: Vec<Disturbance>,
}

impl Cost {
    /// From all events of a run, and what was done to it.
    pub fn new(seed: Option<u64>, disturbances: Vec<Disturbance>, events: &[SupervisorEvent]) -> Self {
        // Commits by replica, and the first time of each step.
        let mut by_replica: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        let mut steps: BTreeMap<u64, u64> = BTreeMap::new();
        let mut cost = Self {
            seed,
            ..Self::default()
        };
        let mut deaths: BTreeMap<u32, u64> = BTreeMap::new();
        let mut back = Vec::new();
        for event in events {
            match event {
                SupervisorEvent::Spawned {
                    rank: 0, incarnation, ..
                } => cost.restarts += usize::from(*incarnation > 0),
                SupervisorEvent::Exited {
                    replica,
                    status,
                    t_us,
                    ..
                } if *status != Some(0) => {
                    deaths.entry(*replica).or_insert(*t_us);
                }
                SupervisorEvent::Replica(e) => match &e.kind {
                    EventKind::Healed { .. } if e.rank == 0 => cost.heals += 1,
                    EventKind::Commit(commit) => {
                        if e.rank == 0 {
                            cost.retried += u64::from(commit.failed_attempts);
                        }
                        by_replica.entry(e.replica).or_default().push(e.t_us);
                        let at = steps.entry(commit.step).or_insert(e.t_us);
                        *at = e.t_us.min(*at);
                        if let Some(died) = deaths.get(&e.replica).copied().filter(|t| *t < e.t_us) {
                            deaths.remove(&e.replica);
                            back.push(ms(died, e.t_us));
                        }
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        by_replica.values_mut().for_each(|times| times.sort_unstable());
        let of_others = |d: &Disturbance| -> Option<f64> {
            let next = |times: &Vec<u64>| times.get(times.partition_point(|t| *t <= d.t_us)).copied();
            let others = by_replica.iter().filter(|(r, _)| Some(**r) != d.what.replica());
            let next = others.filter_map(|(_, times)| next(times)).min()?;
            Some(ms(d.t_us, next))
        };
        let times = |of: fn(&What) -> bool| {
            let chosen = disturbances.iter().filter(|d| of(&d.what));
            Times::of(chosen.filter_map(of_others).collect())
        };
        cost.kill_to_commit = times(|w| matches!(w, What::Kill { .. }));
        cost.stop_to_commit = times(|w| matches!(w, What::Stop { .. }));
        cost.lighthouse_to_commit = times(|w| matches!(w, What::Lighthouse));
        cost.death_to_own_commit = Times::of(back);
        let count = |of: fn(&What) -> bool| disturbances.iter().filter(|d| of(&d.what)).count();
        cost.kills = count(|w| matches!(w, What::Kill { .. }));
        cost.stops = count(|w| matches!(w, What::Stop { .. }));
        cost.lighthouse_kills = count(|w| matches!(w, What::Lighthouse));
        // The initial synchronisation is no work.
        steps.remove(&0);
        let moments: Vec<(u64, u64)> = steps.into_iter().collect();
        let (first, last) = (moments.first().copied(), moments.last().copied());
        if let (Some((first, from)), Some((last, to))) = (first, last) {
            cost.steps = last - first;
            cost.seconds = to.saturating_sub(from) as f64 / 1e6;
            let mut gaps: Vec<Gap> = moments
                .iter()
                .zip(moments.iter().skip(1))
                .map(|((_, begun), (step, ended))| Gap {
                    step: *step,
                    at_s: begun.saturating_sub(from) as f64 / 1e6,
                    ms: ms(*begun, *ended),
                    after: disturbances
                        .iter()
                        .filter(|d| (begun.saturating_sub(2_000_000)..*ended).contains(&d.t_us))
                        .map(|d| format!("{} {:.0} ms before", d.what, ms(d.t_us, *ended)))
                        .collect(),
                })
                .collect();
            cost.between_commits = Times::of(gaps.iter().map(|g| g.ms).collect());
            gaps.sort_by(|a, b| b.ms.total_cmp(&a.ms));
            gaps.truncate(LONGEST);
            cost.longest = gaps;
        }
        cost.disturbances = disturbances;
        cost
    }

    /// Steps per second.
    pub fn rate(&self) -> f64 {
        self.steps as f64 / self.seconds.max(1e-9)
    }
}

fn ms(from_us: u64, to_us: u64) -> f64 {
    to_us.saturating_sub(from_us) as f64 / 1e3
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = format!(
            "{} in {:.1} s, {:.2} each second; between them {}",
            self.steps,
            self.seconds,
            self.rate(),
            self.between_commits
        );
        subject(f, "steps", &steps)?;
        if let Some(seed) = self.seed {
            let done = format!(
                "{} kills and {} stops of ranks, {} kills of the lighthouse (seed {seed}); \
                 {} restarts, {} heals, {} attempts repeated",
                self.kills, self.stops, self.lighthouse_kills, self.restarts, self.heals, self.retried
            );
            subject(f, "disturbances", &done)?;
            for (name, to, times) in [
                ("kill", "to the others' next commit", &self.kill_to_commit),
                ("stop", "to the others' next commit", &self.stop_to_commit),
                (
                    "lighthouse",
                    "killed, to the next commit",
                    &self.lighthouse_to_commit,
                ),
                (
                    "death",
                    "to the replica's own next commit",
                    &self.death_to_own_commit,
                ),
            ] {
                subject(f, name, &format!("{to} {times}"))?;
            }
        }
        for gap in &self.longest {
            let after = match gap.after.is_empty() {
                true => "nothing".to_owned(),
                false => gap.after.join(", "),
            };
            let (ms, step, at_s) = (gap.ms, gap.step, gap.at_s);
            let text = format!("for {ms:.0} ms before step {step} ({at_s:.1} s): {after}");
            subject(f, "no commit", &text)?;
        }
        Ok(())
    }
}
