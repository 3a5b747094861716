//! The report of a run: what its replicas did, what a kill cost, and whether all ended with the same parameters.
//!
//! Made from the events that the supervisor handed out, after the run; pure, so that it can be tested on a list. It is
//! shown as text (its `Display`) or as data (`--json`), and decides the exit code.

use std::collections::BTreeMap;

use oxccl::launch::{Commit, EventKind, Final, ReplicaState};
use oxccl_launch::{ExitSummary, Outcome, SupervisorEvent};
use serde::Serialize;

mod chaos;
mod subject;
mod text;

pub use chaos::{Cost, Gap, Times};

pub(crate) use text::{bytes, thousands};

/// What a report is about, known before the run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunFacts {
    /// The program's name.
    pub program: String,
    /// Replicas of the whole job.
    pub replicas: u32,
    /// Ranks of each replica.
    pub ranks: u32,
    /// Parameters of the model.
    pub parameters: u64,
    /// What data parallel would reduce in each step, in bytes: the gradients.
    pub gradient_bytes: u64,
    /// The seed.
    pub seed: u64,
    /// The longest stall that a death may cost a survivor, in milliseconds; a longer one is a problem.
    pub stall_limit_ms: Option<f64>,
}

/// A pause of a replica that was alive: the gap between two successive commits of one incarnation, less its inner compute.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stall {
    /// The replica that waited.
    pub replica: u32,
    /// Its incarnation.
    pub incarnation: u32,
    /// The commit before, in microseconds of the real-time clock.
    pub from_us: u64,
    /// The commit after.
    pub to_us: u64,
    /// The time between them, in milliseconds.
    pub gap_ms: f64,
    /// Inner compute within that time, in milliseconds.
    pub inner_ms: f64,
    /// The difference, not less than 0.
    pub stall_ms: f64,
    /// The step of the commit after.
    pub step: u64,
    /// The replica that died meanwhile, if one did.
    pub death_of: Option<u32>,
}

/// A process that ended before its time, and how its replica came back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Death {
    /// The replica.
    pub replica: u32,
    /// The rank that ended first.
    pub rank: u32,
    /// The incarnation that ended.
    pub incarnation: u32,
    /// How, in words: `SIGKILL`, `exit code 1`.
    pub exit: String,
    /// When it ended, in microseconds of the real-time clock.
    pub t_us: u64,
    /// When the next incarnation was started.
    pub restarted_us: Option<u64>,
    /// When that incarnation had its first successful commit.
    pub first_commit_us: Option<u64>,
    /// Time from the restart to that commit, in milliseconds.
    pub restart_to_commit_ms: Option<f64>,
    /// The step of the state that it fetched from a peer.
    pub healed_step: Option<u64>,
    /// The size of that state in bytes.
    pub healed_bytes: Option<u64>,
    /// How long fetching and loading it took, in milliseconds.
    pub healed_ms: Option<f64>,
    /// The longest pause of another replica in which this death fell.
    pub stall: Option<Stall>,
}

/// One rank of a replica over all its incarnations.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ReplicaFigures {
    /// The replica's index.
    pub replica: u32,
    /// The rank inside the replica.
    pub rank: u32,
    /// Processes that it had.
    pub incarnations: u32,
    /// Inner steps computed.
    pub inner_steps: u64,
    /// Successful commits.
    pub commits: u64,
    /// Attempts that did not commit and were repeated.
    pub failed_commits: u64,
    /// The last step, as the last incarnation reported it at its end.
    pub last_step: Option<u64>,
    /// Training loss at the end.
    pub train_loss: Option<f64>,
    /// Held-out loss at the end.
    pub heldout_loss: Option<f64>,
    /// Tokens (samples) per second: the mean over inner steps.
    pub tokens_per_s: f64,
    /// Bytes written to sockets.
    pub bytes_sent: u64,
    /// Bytes read from sockets.
    pub bytes_recv: u64,
    /// Inner compute in milliseconds, as far as commits reported it.
    pub inner_ms: f64,
    /// Time in quorums, reductions and votes, in milliseconds.
    pub sync_ms: f64,
    /// The longest pause between commits, in milliseconds.
    pub longest_stall_ms: f64,
    /// Hash of the global parameters at the end.
    pub hash: Option<String>,
}

/// Bytes on the wire against what data parallel would have needed for the same inner steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Wire {
    /// Bytes written to sockets by all replicas of this machine.
    pub sent: u64,
    /// Bytes that a ring all-reduce of all gradients in every inner step would have written: 2 (n − 1) / n × bytes ×
    /// steps, for each replica.
    pub data_parallel: u64,
    /// `data_parallel / sent`; absent if nothing was sent.
    pub ratio: Option<f64>,
}

/// The whole report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// True if nothing is in `problems`.
    pub ok: bool,
    /// What went wrong, in sentences.
    pub problems: Vec<String>,
    /// The program.
    pub program: String,
    /// Replicas of the job.
    pub replicas: u32,
    /// Ranks of each replica.
    pub ranks: u32,
    /// Parameters of the model.
    pub parameters: u64,
    /// The seed.
    pub seed: u64,
    /// The first event, in microseconds of the real-time clock.
    pub started_us: u64,
    /// From the first event to the last, in seconds.
    pub wall_s: f64,
    /// Held-out loss with the global parameters at the end.
    pub heldout_loss: Option<f64>,
    /// Share of held-out samples classified right, where that is the task.
    pub heldout_accuracy: Option<f64>,
    /// Hash of the global parameters, if all replicas have the same.
    pub hash: Option<String>,
    /// The longest pause of any replica between two commits of one incarnation.
    pub longest_stall: Option<Stall>,
    /// What was allowed, in milliseconds.
    pub stall_limit_ms: Option<f64>,
    /// The deaths, in order of time.
    pub deaths: Vec<Death>,
    /// Bytes on the wire between replicas.
    pub wire: Wire,
    /// How fast steps were committed and what disturbances cost, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// The ranks of this machine, by replica and rank.
    pub figures: Vec<ReplicaFigures>,
}

/// What one incarnation of one replica reported.
#[derive(Debug, Default)]
struct Incarnation {
    spawned_us: Option<u64>,
    exited: Option<(u64, ExitSummary)>,
    /// The rank that brought the end of the replica's incarnation about; known of the rank that ended last.
    cause: Option<u32>,
    /// The first and the last inner step that it computed.
    steps: Option<(u64, u64)>,
    rate_sum: f64,
    rates: u64,
    commits: Vec<(u64, Commit)>,
    healed: Option<(u64, u64, f64)>,
    end: Option<Final>,
}

impl Incarnation {
    /// The gaps between commits.
    fn stalls(&self, replica: u32, incarnation: u32) -> Vec<Stall> {
        let mut stalls = Vec::new();
        let mut before: Option<u64> = None;
        for (t_us, commit) in &self.commits {
            let inner_ms = commit.inner_ms;
            if let Some(from_us) = before {
                let gap_ms = t_us.saturating_sub(from_us) as f64 / 1e3;
                stalls.push(Stall {
                    replica,
                    incarnation,
                    from_us,
                    to_us: *t_us,
                    gap_ms,
                    inner_ms,
                    stall_ms: (gap_ms - inner_ms).max(0.0),
                    step: commit.step,
                    death_of: None,
                });
            }
            before = Some(*t_us);
        }
        stalls
    }

    fn bytes(&self) -> (u64, u64) {
        let last = self
            .commits
            .last()
            .map(|(_, c)| (c.bytes_sent, c.bytes_recv))
            .unwrap_or_default();
        self.end.as_ref().map_or(last, |end| {
            (end.bytes_sent.max(last.0), end.bytes_recv.max(last.1))
        })
    }

    fn inner_steps(&self) -> u64 {
        let seen = self
            .steps
            .map_or(0, |(first, last)| last.saturating_sub(first) + 1);
        self.end.as_ref().map_or(seen, |end| end.inner_steps)
    }

    fn first_commit_us(&self) -> Option<u64> {
        self.commits.first().map(|(t, _)| *t)
    }
}

/// By replica and rank, then by incarnation.
type Incarnations = BTreeMap<(u32, u32), BTreeMap<u32, Incarnation>>;

fn gather(events: &[SupervisorEvent]) -> (Incarnations, Option<Outcome>, Option<(u64, u64)>) {
    let mut incarnations = Incarnations::new();
    let mut outcome = None;
    let mut span: Option<(u64, u64)> = None;
    for event in events {
        let at = match event {
            SupervisorEvent::LighthouseUp { t_us, .. }
            | SupervisorEvent::LighthouseExited { t_us, .. }
            | SupervisorEvent::Spawned { t_us, .. }
            | SupervisorEvent::Exited { t_us, .. } => Some(*t_us),
            SupervisorEvent::Replica(e) => Some(e.t_us),
            SupervisorEvent::Finished(_) => None,
        };
        if let Some(t) = at {
            let (first, last) = span.unwrap_or((t, t));
            span = Some((first.min(t), last.max(t)));
        }
        match event {
            SupervisorEvent::Spawned {
                replica,
                rank,
                incarnation,
                t_us,
                ..
            } => {
                incarnations
                    .entry((*replica, *rank))
                    .or_default()
                    .entry(*incarnation)
                    .or_default()
                    .spawned_us = Some(*t_us);
            }
            SupervisorEvent::Exited {
                replica,
                rank,
                incarnation,
                status,
                signal,
                cause,
                t_us,
                ..
            } => {
                let exit = ExitSummary {
                    status: *status,
                    signal: *signal,
                };
                let incarnation = incarnations
                    .entry((*replica, *rank))
                    .or_default()
                    .entry(*incarnation)
                    .or_default();
                incarnation.exited = Some((*t_us, exit));
                incarnation.cause = *cause;
            }
            SupervisorEvent::Finished(end) => outcome = Some(end.clone()),
            SupervisorEvent::LighthouseUp { .. } | SupervisorEvent::LighthouseExited { .. } => {}
            SupervisorEvent::Replica(e) => {
                let incarnation = incarnations
                    .entry((e.replica, e.rank))
                    .or_default()
                    .entry(e.incarnation)
                    .or_default();
                match &e.kind {
                    EventKind::Step {
                        inner_step,
                        tokens_per_s,
                        ..
                    } => {
                        let (first, _) = incarnation.steps.unwrap_or((*inner_step, *inner_step));
                        incarnation.steps = Some((first, *inner_step));
                        if tokens_per_s.is_finite() {
                            incarnation.rate_sum += tokens_per_s;
                            incarnation.rates += 1;
                        }
                    }
                    EventKind::Commit(commit) => incarnation.commits.push((e.t_us, commit.clone())),
                    EventKind::Healed { step, bytes, ms } => incarnation.healed = Some((*step, *bytes, *ms)),
                    EventKind::Final(end) => incarnation.end = Some(end.clone()),
                    EventKind::Started { .. }
                    | EventKind::State { .. }
                    | EventKind::Quorum { .. }
                    | EventKind::ReduceBegin { .. }
                    | EventKind::Error { .. } => {}
                }
            }
        }
    }
    (incarnations, outcome, span)
}

impl Report {
    /// The report of a finished run from all its events. Needs no order between replicas, only within each.
    pub fn new(facts: &RunFacts, events: &[SupervisorEvent]) -> Self {
        let (incarnations, outcome, span) = gather(events);
        let (started_us, ended_us) = span.unwrap_or_default();
        let mut stalls: Vec<Stall> = incarnations
            .iter()
            .filter(|((_, rank), _)| *rank == 0)
            .flat_map(|((r, _), all)| all.iter().flat_map(|(l, incarnation)| incarnation.stalls(*r, *l)))
            .collect();
        let deaths = deaths(&incarnations, &mut stalls);
        let mut problems = Vec::new();
        match &outcome {
            None => problems.push("the run was not watched to its end".into()),
            Some(outcome) if !outcome.is_success() => {
                problems.push(format!(
                    "the run failed: {}",
                    outcome.to_string().replace("\n  ", "; ")
                ));
            }
            Some(_) => {}
        }
        if incarnations.is_empty() {
            problems.push("no replica was started".into());
        }
        for death in &deaths {
            if death.first_commit_us.is_none() {
                problems.push(format!(
                    "replica {} (incarnation {}) ended with {} and never committed again",
                    death.replica, death.incarnation, death.exit
                ));
            }
        }
        unequal_commits(&incarnations, &mut problems);
        let hash = common_end(&incarnations, &mut problems);
        let longest_stall = stalls
            .iter()
            .max_by(|a, b| a.stall_ms.total_cmp(&b.stall_ms))
            .cloned();
        // Only what a death cost is limited: a survivor may wait longer for a peer that is merely slow, also in the
        // very gap in which that peer then dies.
        if let Some(limit) = facts.stall_limit_ms {
            for (death, stall) in deaths.iter().filter_map(|d| Some((d, d.stall.as_ref()?))) {
                let since_death = stall.to_us.saturating_sub(death.t_us) as f64 / 1e3;
                let cost = stall.stall_ms.min(since_death);
                if cost > limit {
                    problems.push(format!(
                        "replica {} stalled for {cost:.0} ms before step {}; {limit:.0} ms are allowed",
                        stall.replica, stall.step
                    ));
                }
            }
        }
        let figures: Vec<ReplicaFigures> = incarnations
            .iter()
            .map(|(r, all)| figures(*r, all, &stalls))
            .collect();
        let last = incarnations
            .values()
            .filter_map(|all| all.values().next_back()?.end.as_ref())
            .next();
        Self {
            ok: problems.is_empty(),
            problems,
            program: facts.program.clone(),
            replicas: facts.replicas,
            ranks: facts.ranks,
            parameters: facts.parameters,
            seed: facts.seed,
            started_us,
            wall_s: ended_us.saturating_sub(started_us) as f64 / 1e6,
            heldout_loss: last.map(|end| end.heldout_loss),
            heldout_accuracy: last.and_then(|end| end.heldout_accuracy),
            hash,
            longest_stall,
            stall_limit_ms: facts.stall_limit_ms,
            wire: wire(facts, &figures),
            deaths,
            cost: None,
            figures,
        }
    }

    /// 0 if nothing went wrong, else 1.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.ok)
    }
}

/// The incarnations that ended before their replica was done, each with the longest stall of another replica around it.
fn deaths(incarnations: &Incarnations, stalls: &mut [Stall]) -> Vec<Death> {
    let mut deaths = Vec::new();
    // The ranks of a replica end together, and the last event tells which of them is the cause.
    let ends = incarnations.iter().flat_map(|((replica, _), all)| {
        all.iter()
            .filter_map(|(index, incarnation)| Some((*replica, *index, incarnation.cause?)))
    });
    for (replica, index, rank) in ends {
        let Some(all) = incarnations.get(&(replica, rank)) else {
            continue;
        };
        let Some((t_us, exit)) = all.get(&index).and_then(|incarnation| incarnation.exited) else {
            continue;
        };
        let mut stall: Option<&Stall> = None;
        for s in stalls.iter_mut() {
            if s.replica != replica && s.from_us <= t_us && t_us <= s.to_us {
                s.death_of = Some(replica);
                stall = stall.filter(|longest| longest.stall_ms >= s.stall_ms).or(Some(s));
            }
        }
        // An incarnation that dies before it commits (a second kill while healing) passes the wait on to the next.
        let next = all.range(index + 1..).map(|(_, incarnation)| incarnation);
        let restarted_us = next.clone().next().and_then(|incarnation| incarnation.spawned_us);
        let back = next
            .clone()
            .find(|incarnation| incarnation.first_commit_us().is_some());
        let first_commit_us = back.and_then(Incarnation::first_commit_us);
        let healed = back.and_then(|incarnation| incarnation.healed);
        deaths.push(Death {
            replica,
            rank,
            incarnation: index,
            exit: exit.to_string(),
            t_us,
            restarted_us,
            first_commit_us,
            restart_to_commit_ms: restarted_us
                .zip(first_commit_us)
                .map(|(from, to)| to.saturating_sub(from) as f64 / 1e3),
            healed_step: healed.map(|(step, _, _)| step),
            healed_bytes: healed.map(|(_, bytes, _)| bytes),
            healed_ms: healed.map(|(_, _, ms)| ms),
            stall: stall.cloned(),
        });
    }
    deaths.sort_by_key(|death| death.t_us);
    deaths
}

/// Any two replicas that committed a step in an epoch must have had the same parameters then (INV-6). In another epoch it may be
/// another history: that of replicas that were all lost and went on from an earlier checkpoint, or of one that alone had
/// finished the step when it died. What stays unequal shows in the next step that is committed together.
fn unequal_commits(incarnations: &Incarnations, problems: &mut Vec<String>) {
    let mut first: BTreeMap<(u64, u64), (&str, u32, u32)> = BTreeMap::new();
    let mut unequal = 0;
    for ((replica, _), all) in incarnations {
        for (index, incarnation) in all {
            for (_, commit) in &incarnation.commits {
                let Some(hash) = commit.hash.as_deref() else {
                    continue;
                };
                let (other, r, l) = *first
                    .entry((commit.epoch, commit.step))
                    .or_insert((hash, *replica, *index));
                if other != hash {
                    unequal += 1;
                    if unequal == 1 {
                        problems.push(format!(
                            "parameters differ after step {}: replica {r} (incarnation {l}) has {}, replica {replica} (incarnation \
                             {index}) has {}",
                            commit.step,
                            short(other),
                            short(hash)
                        ));
                    }
                }
            }
        }
    }
    if unequal > 1 {
        problems.push(format!("parameters differ after {} further commits", unequal - 1));
    }
}

/// The hash that all replicas ended with; what keeps there from being one is a problem.
fn common_end(incarnations: &Incarnations, problems: &mut Vec<String>) -> Option<String> {
    let mut ends: Vec<(String, &Final)> = Vec::new();
    let has_ranks = incarnations.keys().any(|(_, rank)| *rank > 0);
    for ((replica, rank), all) in incarnations {
        let replica = match has_ranks {
            true => format!("{replica}/{rank}"),
            false => replica.to_string(),
        };
        match all
            .values()
            .next_back()
            .and_then(|incarnation| incarnation.end.as_ref())
        {
            // It left before the others ended.
            Some(end) if end.state == ReplicaState::Drained => {}
            Some(end) => ends.push((replica, end)),
            None => problems.push(format!("replica {replica} did not report its end")),
        }
    }
    for (replica, end) in &ends {
        if !end.heldout_loss.is_finite() {
            problems.push(format!(
                "replica {replica}: the held-out loss is {}",
                end.heldout_loss
            ));
        }
    }
    let (first, rest) = ends.split_first()?;
    let drained = |all: &BTreeMap<u32, Incarnation>| {
        let end = all
            .values()
            .next_back()
            .and_then(|incarnation| incarnation.end.as_ref());
        end.is_some_and(|end| end.state == ReplicaState::Drained)
    };
    let mut equal = ends.len() == incarnations.values().filter(|all| !drained(all)).count();
    for (replica, end) in rest {
        if end.step != first.1.step {
            equal = false;
            problems.push(format!(
                "replica {} ended at step {}, replica {replica} at step {}",
                first.0, first.1.step, end.step
            ));
        }
        if end.hash != first.1.hash {
            equal = false;
            problems.push(format!(
                "parameters differ at the end: replica {} has {}, replica {replica} has {}",
                first.0,
                short(&first.1.hash),
                short(&end.hash)
            ));
        }
    }
    equal.then(|| first.1.hash.clone())
}

fn short(hash: &str) -> String {
    hash.chars().take(16).collect()
}

fn figures(
    (replica, rank): (u32, u32),
    all: &BTreeMap<u32, Incarnation>,
    stalls: &[Stall],
) -> ReplicaFigures {
    let end = all
        .values()
        .next_back()
        .and_then(|incarnation| incarnation.end.as_ref());
    let mut f = ReplicaFigures {
        replica,
        rank,
        incarnations: u32::try_from(all.len()).unwrap_or(u32::MAX),
        last_step: end.map(|end| end.step),
        train_loss: end.map(|end| end.train_loss),
        heldout_loss: end.map(|end| end.heldout_loss),
        hash: end.map(|end| end.hash.clone()),
        longest_stall_ms: stalls
            .iter()
            .filter(|s| s.replica == replica)
            .map(|s| s.stall_ms)
            .fold(0.0, f64::max),
        ..ReplicaFigures::default()
    };
    let (mut rate_sum, mut rates) = (0.0, 0);
    for incarnation in all.values() {
        f.inner_steps += incarnation.inner_steps();
        let (sent, received) = incarnation.bytes();
        f.bytes_sent += sent;
        f.bytes_recv += received;
        rate_sum += incarnation.rate_sum;
        rates += incarnation.rates;
        for (_, commit) in &incarnation.commits {
            f.commits += 1;
            f.failed_commits += u64::from(commit.failed_attempts);
            f.inner_ms += commit.inner_ms;
            f.sync_ms += commit.sync_ms;
        }
    }
    f.tokens_per_s = if rates > 0 { rate_sum / rates as f64 } else { 0.0 };
    f
}

fn wire(facts: &RunFacts, figures: &[ReplicaFigures]) -> Wire {
    let n = f64::from(facts.replicas.max(1));
    let per_step = 2.0 * (n - 1.0) / n * facts.gradient_bytes as f64;
    let sent = figures.iter().map(|f| f.bytes_sent).sum();
    let data_parallel = (figures.iter().map(|f| f.inner_steps).sum::<u64>() as f64 * per_step) as u64;
    Wire {
        sent,
        data_parallel,
        ratio: (sent > 0).then(|| data_parallel as f64 / sent as f64),
    }
}

#[cfg(test)]
#[path = "report/tests.rs"]
mod tests;
