//! Random kills and stops during a run (`--chaos SEED`): which process when is drawn from the seed.
//!
//! The plan is pure: it is asked what is due now, and never looks at a clock itself. [`Campaign`] carries it out through the supervisor and keeps
//! what was done for the report. The last replica that holds the state is
//! spared: without checkpoints nothing would be left. It begins with the first commit, and ends early enough for all replicas to be back before the run is over.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ftcore::Result;
use oxccl::launch::EventKind;
use oxccl_launch::{ProcessSignal, Supervisor, SupervisorEvent};
use serde::Serialize;

use crate::rng::Rng;

/// Options of a campaign.
#[derive(Debug, Clone, clap::Args)]
pub struct ChaosArgs {
    /// Kill or stop random ranks during the whole run, and kill the lighthouse, as this seed draws it. The report tells what it cost.
    #[arg(long, value_name = "SEED", conflicts_with_all = ["kill", "no_kill"])]
    pub chaos: Option<u64>,
    /// Milliseconds from one kill or stop of a rank to the next, on average: between half and one and a half times as many.
    #[arg(long, value_name = "MS", default_value_t = 5000, requires = "chaos", value_parser = clap::value_parser!(u64).range(1..))]
    pub chaos_every_ms: u64,
    /// Milliseconds from one kill of the lighthouse to the next; 0: never.
    #[arg(long, value_name = "MS", default_value_t = 60_000, requires = "chaos")]
    pub chaos_lighthouse_ms: u64,
    /// The longest that a rank is stopped.
    #[arg(long, value_name = "MS", default_value_t = 4000, requires = "chaos", value_parser = clap::value_parser!(u64).range(1..))]
    pub chaos_stop_ms: u64,
}

/// What was done to the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum What {
    /// SIGKILL of a rank.
    Kill {
        /// Its replica.
        replica: u32,
        /// The rank.
        rank: u32,
    },
    /// SIGSTOP of a rank, SIGCONT later.
    Stop {
        /// Its replica.
        replica: u32,
        /// The rank.
        rank: u32,
        /// For how long.
        ms: u64,
    },
    /// SIGKILL of the lighthouse.
    Lighthouse,
}

impl What {
    /// The replica that it hit.
    pub fn replica(&self) -> Option<u32> {
        match self {
            Self::Kill { replica, .. } | Self::Stop { replica, .. } => Some(*replica),
            Self::Lighthouse => None,
        }
    }
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kill { replica, rank } => write!(f, "kill of {replica}/{rank}"),
            Self::Stop { replica, rank, ms } => write!(f, "stop of {replica}/{rank} for {ms} ms"),
            Self::Lighthouse => f.write_str("kill of the lighthouse"),
        }
    }
}

/// One disturbance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Disturbance {
    /// When, in microseconds of the real-time clock.
    pub t_us: u64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What is due at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Disturb(What),
    Continue {
        replica: u32,
        rank: u32,
        incarnation: u32,
    },
}

/// When what happens; see the module.
#[derive(Debug)]
struct Plan {
    args: ChaosArgs,
    rng: Rng,
    next: Instant,
    next_lighthouse: Option<Instant>,
    stopped: Vec<(Instant, (u32, u32, u32))>,
    is_quiet: bool,
}

impl Plan {
    fn new(args: &ChaosArgs, seed: u64, now: Instant) -> Self {
        let lighthouse = args.chaos_lighthouse_ms;
        Self {
            args: args.clone(),
            rng: Rng::keyed(&[seed, 0xc4a05]),
            next: now + Duration::from_millis(args.chaos_every_ms),
            next_lighthouse: (lighthouse > 0).then(|| now + Duration::from_millis(lighthouse)),
            stopped: Vec::new(),
            is_quiet: false,
        }
    }

    /// When something is due next.
    fn next_due(&self) -> Option<Instant> {
        let stops = self.stopped.iter().map(|(at, _)| *at);
        let new = [Some(self.next), self.next_lighthouse];
        let new = new.into_iter().flatten().filter(|_| !self.is_quiet);
        stops.chain(new).min()
    }

    /// What is due now. `running` are the processes to draw from: replica, rank and incarnation.
    fn due(&mut self, now: Instant, running: &[(u32, u32, u32)]) -> Option<Due> {
        if let Some(at) = self.stopped.iter().position(|(at, _)| *at <= now) {
            let (_, (replica, rank, incarnation)) = self.stopped.swap_remove(at);
            return Some(Due::Continue {
                replica,
                rank,
                incarnation,
            });
        }
        if self.is_quiet {
            return None;
        }
        if self.next_lighthouse.is_some_and(|at| at <= now) {
            self.next_lighthouse = Some(now + Duration::from_millis(self.args.chaos_lighthouse_ms));
            return Some(Due::Disturb(What::Lighthouse));
        }
        if self.next > now {
            return None;
        }
        if running.is_empty() {
            self.next = now + Duration::from_millis(50);
            return None;
        }
        // Not at even times: what comes together, and where in a step it falls, is to be drawn, too.
        let every = self.args.chaos_every_ms;
        let drawn = self.rng.below(usize::try_from(every).unwrap_or(usize::MAX)) as u64;
        self.next = now + Duration::from_millis(every / 2 + drawn);
        let (replica, rank, incarnation) = *running.get(self.rng.below(running.len()))?;
        let is_stopped = self
            .stopped
            .iter()
            .any(|(_, of)| *of == (replica, rank, incarnation));
        if is_stopped || self.rng.below(2) == 0 {
            return Some(Due::Disturb(What::Kill { replica, rank }));
        }
        let longest = usize::try_from(self.args.chaos_stop_ms).unwrap_or(usize::MAX);
        let ms = 1 + self.rng.below(longest) as u64;
        self.stopped
            .push((now + Duration::from_millis(ms), (replica, rank, incarnation)));
        Some(Due::Disturb(What::Stop { replica, rank, ms }))
    }
}

/// A plan under way.
#[derive(Debug)]
pub struct Campaign {
    args: ChaosArgs,
    seed: u64,
    /// The run's steps.
    steps: i64,
    plan: Option<(Plan, Instant, u64)>,
    /// The replicas that committed a step in this incarnation, and so hold the state.
    holders: BTreeMap<u32, u32>,
    done: Vec<Disturbance>,
}

impl Campaign {
    /// The campaign that the options ask for, if they do, for a run of `steps` steps.
    pub fn new(args: &ChaosArgs, steps: i64) -> Option<Self> {
        Some(Self {
            seed: args.chaos?,
            args: args.clone(),
            steps,
            plan: None,
            holders: BTreeMap::new(),
            done: Vec::new(),
        })
    }

    /// When [`act`](Self::act) is to be called next, at the latest.
    pub fn next_due(&self) -> Option<Instant> {
        self.plan.as_ref()?.0.next_due()
    }

    /// Sees what happens in the run: it begins with the first commit after the initial synchronisation, and is quiet before the end.
    pub fn on_event(&mut self, event: &SupervisorEvent, now: Instant) {
        let SupervisorEvent::Replica(event) = event else {
            return;
        };
        let EventKind::Commit(commit) = &event.kind else {
            return;
        };
        if commit.step == 0 {
            return;
        }
        self.holders.insert(event.replica, event.incarnation);
        let (plan, begun, first) = self
            .plan
            .get_or_insert_with(|| (Plan::new(&self.args, self.seed, now), now, commit.step));
        let made = commit.step.saturating_sub(*first);
        let left = u64::try_from(self.steps).unwrap_or(0).saturating_sub(commit.step);
        let settle = Duration::from_millis(2 * self.args.chaos_every_ms);
        let per_step = begun.elapsed().as_secs_f64() / made.max(1) as f64;
        // A replica that dies in the last step could come back when all others have left.
        if made > 0 && left as f64 * per_step < settle.as_secs_f64() {
            plan.is_quiet = true;
        }
    }

    /// Does what is due.
    pub fn act(&mut self, supervisor: &Supervisor) {
        let Some((plan, ..)) = &mut self.plan else {
            return;
        };
        loop {
            let running = supervisor.running();
            let candidates = spare_last(&running, &self.holders);
            let Some(due) = plan.due(Instant::now(), &candidates) else {
                return;
            };
            if let Due::Disturb(What::Kill { replica, .. }) = due {
                self.holders.remove(&replica);
            }
            let done = match due {
                Due::Continue {
                    replica,
                    rank,
                    incarnation,
                } => {
                    // It may have been ended meanwhile.
                    drop(supervisor.signal(replica, rank, Some(incarnation), ProcessSignal::Continue));
                    continue;
                }
                Due::Disturb(what) => (what, disturb(supervisor, what)),
            };
            match done {
                (what, Ok(t_us)) => self.done.push(Disturbance { t_us, what }),
                // It died by itself in this very moment.
                (what, Err(error)) => tracing::warn!(%error, "no {what}"),
            }
        }
    }

    /// The seed, and what was done.
    pub fn finish(self) -> (u64, Vec<Disturbance>) {
        (self.seed, self.done)
    }
}

/// The ranks of `running` but for which another replica, too, holds the state in its present incarnation.
fn spare_last(running: &[(u32, u32, u32)], holders: &BTreeMap<u32, u32>) -> Vec<(u32, u32, u32)> {
    let holds = |(replica, _, incarnation): &(u32, u32, u32)| holders.get(replica) == Some(incarnation);
    let has_other = |of: u32| running.iter().any(|r| r.0 != of && holds(r));
    running.iter().copied().filter(|r| has_other(r.0)).collect()
}

fn disturb(supervisor: &Supervisor, what: What) -> Result<u64> {
    match what {
        What::Kill { replica, rank } => supervisor.signal(replica, rank, None, ProcessSignal::Kill),
        What::Stop { replica, rank, .. } => supervisor.signal(replica, rank, None, ProcessSignal::Stop),
        What::Lighthouse => supervisor.signal_lighthouse(ProcessSignal::Kill),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: [(u32, u32, u32); 4] = [(0, 0, 0), (0, 1, 0), (1, 0, 2), (1, 1, 2)];

    /// What a plan does in so many seconds.
    fn course(seed: u64, seconds: u64) -> Vec<(u64, Due)> {
        let args = ChaosArgs {
            chaos: Some(seed),
            chaos_every_ms: 5000,
            chaos_lighthouse_ms: 60_000,
            chaos_stop_ms: 4000,
        };
        let begun = Instant::now();
        let mut plan = Plan::new(&args, seed, begun);
        let mut course = Vec::new();
        while let Some(at) = plan
            .next_due()
            .filter(|at| *at <= begun + Duration::from_secs(seconds))
        {
            let due = plan.due(at, &RUNNING).unwrap();
            course.push(((at - begun).as_millis() as u64, due));
        }
        course
    }

    #[test]
    fn a_seed_draws_the_same_kills_and_stops_and_every_stop_ends() {
        let one = course(1, 600);
        assert_eq!(one, course(1, 600));
        assert_ne!(one, course(2, 600));
        let count = |of: fn(&Due) -> bool| one.iter().filter(|(_, due)| of(due)).count();
        let kills = count(|d| matches!(d, Due::Disturb(What::Kill { .. })));
        let stops = count(|d| matches!(d, Due::Disturb(What::Stop { .. })));
        assert!(
            (100..140).contains(&(kills + stops)),
            "{kills} kills, {stops} stops"
        );
        assert!(kills > 30 && stops > 30, "{kills} kills, {stops} stops");
        assert_eq!(count(|d| matches!(d, Due::Disturb(What::Lighthouse))), 10);
        let ends = count(|d| matches!(d, Due::Continue { .. }));
        assert!(stops - ends <= 1, "{stops} stops, {ends} ends");
    }

    #[test]
    fn the_last_replica_that_holds_the_state_is_spared() {
        let of = |replicas: &[u32]| -> Vec<(u32, u32, u32)> {
            RUNNING.into_iter().filter(|r| replicas.contains(&r.0)).collect()
        };
        let both = [(0, 0), (1, 2)].into();
        assert_eq!(spare_last(&RUNNING, &both), RUNNING);
        // Replica 1 has not committed since it came back.
        let one = [(0, 0), (1, 1)].into();
        assert_eq!(spare_last(&RUNNING, &one), of(&[1]));
        assert_eq!(spare_last(&of(&[0]), &both), []);
    }

    #[test]
    fn a_quiet_plan_only_lets_go_on_what_it_stopped() {
        let args = ChaosArgs {
            chaos: Some(1),
            chaos_every_ms: 1,
            chaos_lighthouse_ms: 0,
            chaos_stop_ms: 10_000,
        };
        let begun = Instant::now();
        let mut plan = Plan::new(&args, 1, begun);
        let mut now = begun;
        while plan.stopped.is_empty() {
            now += Duration::from_millis(1);
            plan.due(now, &RUNNING);
        }
        plan.is_quiet = true;
        let at = plan.next_due().unwrap();
        assert_eq!(plan.due(now, &RUNNING), None);
        assert!(matches!(plan.due(at, &RUNNING), Some(Due::Continue { .. })));
        assert_eq!(plan.next_due(), None);
    }
}
