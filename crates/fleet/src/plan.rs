//! Methods compared over given links, and the one to take.
//!
//! Each candidate is a layout of replicas, a method, and a format of what travels. Its figures come from `cost` and `method`; what deaths leave of
//! them from a formula that `simulate` is held against. Recommended is the candidate closest to plain data parallel that keeps the devices as busy
//! as is asked for; if none does, the one that keeps them busiest.

use ftcore::{Error, Result};
use quant::Codec;
use serde::Serialize;

use crate::cost::{Cost, Costs, Group};
use crate::links::Links;
use crate::method::{Buckets, Format, LARGEST_BUCKET, Method, Round, Workload, rounds};
use crate::simulate::{Fleet, lighthouse_call};
use crate::units::{Bytes, Seconds};

/// Inner steps between two exchanges that papers trained with: 2501.18512 has 30 and 100, 2311.08105 has 500.
const SYNC_EVERY: [u64; 3] = [30, 100, 500];
/// Inner steps of overlap: 2501.18512 advises 5 at most.
const DELAYS: [u64; 3] = [0, 1, 5];
/// A quantised data parallel job sends from each rank to each.
const MAX_QUANTISED: usize = 64;
/// Milliseconds of a vote within a replica, a round trip on its host.
const VOTE: f64 = 0.5e-3;

/// How replicas fail, and what follows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Failures {
    /// From one death of a host to the next, on average over the whole job; `None`: none.
    pub every: Option<Seconds>,
    /// From a death until a replica in the place of the dead one asks for a quorum.
    pub restart: Seconds,
    /// From a death until the lighthouse knows.
    pub notice: Seconds,
    /// What it takes the members to connect for a new epoch.
    pub reconnect: Seconds,
    /// What a replica that heals fetches, in bytes per parameter.
    pub state: u32,
}

/// What is to be trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The number of values.
    pub parameters: u64,
    /// The number of layers.
    pub layers: u32,
    /// Forward, backward and optimizer of one step on one rank.
    pub step: Seconds,
    /// Tokens of a rank in a step.
    pub tokens: u64,
    /// What a rank copies and computes for each value that it exchanges.
    pub per_value: Seconds,
    /// Values of a fragment that travel in one operation: `DilocoConfig::bucket_elements`.
    pub bucket: u64,
    /// Deaths.
    pub failures: Failures,
    /// The share of the devices' time that computing shall have.
    pub target: f64,
}

impl Job {
    fn check(&self) -> Result<()> {
        let text = if self.parameters == 0 || self.layers == 0 || self.tokens == 0 || self.bucket == 0 {
            "a model has at least one parameter and one layer, a step one token, and a bucket one value"
        } else if self.parameters > 1 << 50 {
            "more than 10^15 parameters"
        } else if self.step.get() <= 0.0 {
            "a step takes time: give what forward, backward and optimizer take"
        } else if !(self.target > 0.0 && self.target < 1.0) {
            "the target is a share between 0 and 1, such as 0.95"
        } else if self.failures.every.is_some_and(|every| every.get() <= 0.0) {
            "deaths without any time between them"
        } else {
            return Ok(());
        };
        Err(Error::invalid(text))
    }
}

/// One candidate and its figures.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// In words.
    pub method: String,
    /// H; 1 for data parallel.
    pub sync_every: u64,
    /// P; 1 for data parallel.
    pub fragments: u64,
    /// τ; 0 for data parallel.
    pub delay: u64,
    /// How values travel between replicas.
    pub format: String,
    /// Copies of the model.
    pub replicas: u32,
    /// What a replica is: a host, or a site.
    pub replica: &'static str,
    /// How the reduction between replicas goes.
    pub topology: &'static str,
    /// An inner step, with its share of waiting.
    pub step: Seconds,
    /// The same over the tokens of all ranks.
    pub per_token: Seconds,
    /// The share of time spent computing while none dies.
    pub computing: f64,
    /// What deaths leave of that.
    pub goodput: f64,
    /// Both.
    pub efficiency: f64,
    /// What leaves a host in an inner step, on average.
    pub sent: Bytes,
    /// The share of time in which the lighthouse answers calls.
    pub lighthouse: f64,
    /// All reductions of H inner steps, if each fragment were one operation.
    #[serde(skip)]
    as_one: Seconds,
    /// What `simulate` needs.
    #[serde(skip)]
    pub fleet: Fleet,
}

/// Candidates, and the one to take.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// All, the closest to data parallel first.
    pub estimates: Vec<Estimate>,
    /// The place of the one to take.
    pub recommended: usize,
    /// Why that one.
    pub reason: String,
    /// What else would help.
    pub hint: Option<String>,
    /// What the figures take for granted.
    pub assumptions: Vec<String>,
}

impl Plan {
    /// The one to take.
    pub fn best(&self) -> Option<&Estimate> {
        self.estimates.get(self.recommended)
    }
}

/// Copies of the model: which hosts each has.
struct Layout {
    replica: &'static str,
    of: Vec<Vec<usize>>,
}

/// Compares methods. Errors: `InvalidArgument` for a job that makes no sense; those of [`Costs::of`].
pub fn plan(links: &Links, job: &Job) -> Result<Plan> {
    job.check()?;
    let costs = Costs::new(links);
    let mut estimates = data_parallel(links, job, &costs)?;
    let hosts = links.hosts().len();
    let mut layouts = Vec::new();
    if hosts > 1 {
        layouts.push(Layout {
            replica: "host",
            of: (0..hosts).map(|h| vec![h]).collect(),
        });
    }
    let sites = links.sites();
    if sites.len() > 1 && sites.len() < hosts && sites.iter().map(|(_, of)| of.len()).sum::<usize>() == hosts
    {
        layouts.push(Layout {
            replica: "site",
            of: sites.into_iter().map(|(_, of)| of).collect(),
        });
    }
    for layout in &layouts {
        estimates.extend(diloco(links, job, &costs, layout)?);
    }
    // Stable: what comes first among equals stays there.
    estimates.sort_by_key(|e| (e.sync_every, format_order(&e.format), e.delay, e.fragments));
    let enough = estimates.iter().position(|e| e.efficiency >= job.target);
    let busiest = || {
        let all = estimates.iter().enumerate();
        // Of equals the first.
        all.fold((0, 0.0), |best, (i, e)| {
            if e.efficiency > best.1 + 1e-9 {
                (i, e.efficiency)
            } else {
                best
            }
        })
        .0
    };
    let recommended = enough.unwrap_or_else(busiest);
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let reason = match (enough, estimates.get(recommended)) {
        (Some(_), _) => format!(
            "the closest to plain data parallel that keeps the devices computing for {}",
            percent(job.target)
        ),
        (None, Some(best)) => format!(
            "none reaches {}; this one comes to {}, the most",
            percent(job.target),
            percent(best.efficiency)
        ),
        (None, None) => "there is none".to_string(),
    };
    let hint = estimates
        .get(recommended)
        .and_then(|best| larger_buckets(best, job));
    Ok(Plan {
        estimates,
        recommended,
        reason,
        hint,
        assumptions: assumptions(links, job),
    })
}

/// Small buckets wait for each other's last rounds where ways are long.
fn larger_buckets(best: &Estimate, job: &Job) -> Option<String> {
    let as_is: Seconds = best.fleet.reductions.iter().copied().sum();
    (best.sync_every > 1 && as_is.get() > 1.5 * best.as_one.get()).then(|| {
        format!(
            "its reductions take {as_is} in each {} inner steps in buckets of {} values, and {} with a fragment in one: raise \
             DilocoConfig::bucket_elements (--bucket)",
            best.sync_every, job.bucket, best.as_one
        )
    })
}

fn format_order(name: &str) -> usize {
    ["f32", "bf16", "int8-b64", "int4-h128"]
        .iter()
        .position(|n| *n == name)
        .unwrap_or(9)
}

/// One group of all ranks; a host is a replica of the protocol, since it dies as a whole.
fn data_parallel(links: &Links, job: &Job, costs: &Costs<'_>) -> Result<Vec<Estimate>> {
    let group = Group::all(links);
    let hosts = u32::try_from(links.hosts().len()).unwrap_or(u32::MAX);
    let mut formats = vec![Format::F32];
    if (2..=MAX_QUANTISED).contains(&group.len()) {
        formats.extend([Codec::Bf16, Codec::Int8B64].map(Format::Encoded));
    }
    let mut estimates = Vec::new();
    for format in formats {
        let method = Method::Ddp { overlap: true };
        let work = workload(links, job, job.step, hosts);
        let round = rounds(method, &work, |values| format.average(costs, &group, values))?;
        let size = (hosts, "host");
        estimates.push(estimate(
            links,
            job,
            (method, format),
            size,
            &group,
            &work,
            &round,
        ));
    }
    Ok(estimates)
}

fn diloco(links: &Links, job: &Job, costs: &Costs<'_>, layout: &Layout) -> Result<Vec<Estimate>> {
    let replicas = u32::try_from(layout.of.len()).unwrap_or(u32::MAX);
    let heads: Vec<usize> = layout
        .of
        .iter()
        .filter_map(|hosts| hosts.first().copied())
        .collect();
    let group = Group::one_of_each(&heads);
    let step = inner_step(links, job, costs, layout)?;
    let work = workload(links, job, step, replicas);
    // By values and format: the cost in buckets, and as one operation.
    let mut known: Vec<((u64, &'static str), [Cost; 2])> = Vec::new();
    let mut estimates = Vec::new();
    let formats = [
        Format::F32,
        Format::Encoded(Codec::Int8B64),
        Format::Encoded(Codec::Int4Hadamard { seed: 0 }),
    ];
    for sync_every in SYNC_EVERY {
        for fragments in fragment_counts(sync_every, job.layers) {
            for (format, delay) in formats.iter().flat_map(|f| DELAYS.map(|delay| (*f, delay))) {
                let method = Method::Diloco {
                    sync_every,
                    fragments,
                    delay,
                };
                if method.check(job.layers).is_err() {
                    continue;
                }
                let mut as_one = Seconds::ZERO;
                let round = rounds(method, &work, |values| {
                    let key = (values, format.name());
                    let both = match known.iter().find(|(k, _)| *k == key) {
                        Some((_, both)) => *both,
                        None => {
                            let one = format.average(costs, &group, values)?;
                            let both = [format.in_buckets(costs, &group, values, job.bucket)?, one];
                            known.push((key, both));
                            both
                        }
                    };
                    let [in_buckets, one] = both;
                    as_one = as_one.max(one.time);
                    Ok(in_buckets)
                })?;
                let size = (replicas, layout.replica);
                let mut found = estimate(links, job, (method, format), size, &group, &work, &round);
                found.as_one = as_one * fragments as f64;
                estimates.push(found);
            }
        }
    }
    Ok(estimates)
}

/// One fragment; about three layers each, as 2501.18512 has them; and a layer each, where `sync_every` can be dealt so.
fn fragment_counts(sync_every: u64, layers: u32) -> Vec<u64> {
    let layers = u64::from(layers);
    let dealt = |most: u64| {
        (1..=most.max(1))
            .rev()
            .find(|p| sync_every.is_multiple_of(*p))
            .unwrap_or(1)
    };
    let mut counts = vec![1, dealt(layers.div_ceil(3)), dealt(layers)];
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// A step of the slowest replica: its ranks average their gradients during the backward pass.
fn inner_step(links: &Links, job: &Job, costs: &Costs<'_>, layout: &Layout) -> Result<Seconds> {
    let mut slowest = job.step;
    let mut seen: Vec<u32> = Vec::new();
    for hosts in &layout.of {
        if let [host] = hosts.as_slice() {
            let ranks = links.hosts().get(*host).map_or(1, |h| h.ranks);
            if seen.contains(&ranks) {
                continue;
            }
            seen.push(ranks);
        }
        let group = Group::of_hosts(links, hosts);
        let buckets = Buckets::new(job.parameters, |values| {
            Format::F32.average(costs, &group, values)
        })?;
        slowest = slowest.max(buckets.behind_backward(job.step, job.layers, Seconds::ZERO));
    }
    Ok(slowest)
}

/// The way to the lighthouse and back.
fn to_lighthouse(links: &Links) -> Seconds {
    let last = links.hosts().len().saturating_sub(1);
    links.between(0, last).delay * 2.0
}

fn workload(links: &Links, job: &Job, step: Seconds, replicas: u32) -> Workload {
    Workload {
        parameters: job.parameters,
        layers: job.layers,
        step,
        quorum: lighthouse_call(replicas) * f64::from(replicas) + to_lighthouse(links),
        vote: Seconds::new(VOTE).unwrap_or_default(),
        per_value: job.per_value,
    }
}

fn estimate(
    links: &Links,
    job: &Job,
    (method, format): (Method, Format),
    (replicas, replica): (u32, &'static str),
    group: &Group,
    work: &Workload,
    round: &Round,
) -> Estimate {
    let (sync_every, fragments, delay) = match method {
        Method::Ddp { .. } => (1, 1, 0),
        Method::Diloco {
            sync_every,
            fragments,
            delay,
        } => (sync_every, fragments, delay),
    };
    let state = Bytes(job.parameters.saturating_mul(u64::from(job.failures.state)));
    let fleet = Fleet {
        replicas,
        method,
        work: *work,
        reductions: vec![round.reduction * (1.0 / fragments as f64); fragments as usize],
        hidden: (work.step + round.reduction) - (round.time - work.vote - work.handling(job.parameters)),
        death_every: job.failures.every,
        restart: job.failures.restart,
        notice: job.failures.notice,
        reconnect: job.failures.reconnect,
        heal: links.slowest().time(state),
        call: None,
        rounds: 1000,
        seed: 1,
    };
    let steps = round.steps.max(1) as f64;
    let step = round.time * (1.0 / steps);
    let ranks = f64::from(links.world());
    // What ranks of a replica wait for each other is no computing either.
    let computing = round.efficiency() * job.step.get() / work.step.get();
    let goodput = goodput(&fleet, round);
    let of_reduction = match method {
        Method::Ddp { .. } => format.bytes(job.parameters.min(LARGEST_BUCKET)),
        Method::Diloco { .. } => format.bytes((job.parameters / fragments).min(job.bucket)),
    };
    let calls = lighthouse_call(replicas).get() * f64::from(replicas) * fragments as f64;
    Estimate {
        method: method.to_string(),
        sync_every,
        fragments,
        delay,
        format: format.name().to_string(),
        replicas,
        replica,
        topology: group.algorithm(of_reduction),
        step,
        per_token: step * (1.0 / (ranks * job.tokens as f64)),
        computing,
        goodput,
        efficiency: computing * goodput,
        sent: Bytes((round.sent.0 as f64 / steps) as u64),
        lighthouse: (calls / round.time.get()).min(1.0),
        as_one: Seconds::ZERO,
        fleet,
    }
}

/// What deaths leave. One in a reduction costs all replicas that reduction; the rounds in which a replica goes or comes cost a new epoch each, and those
/// in which one comes the transfer of its state, since members wait for a member that heals; and the job lacks a replica until then.
pub(crate) fn goodput(fleet: &Fleet, round: &Round) -> f64 {
    let Some(every) = fleet.death_every else {
        return 1.0;
    };
    let fragments = fleet.reductions.len().max(1) as f64;
    let reduction = round.reduction.get() / fragments;
    let wall = round.time.get() / fragments;
    let quorum = fleet.work.quorum.get();
    let rate = 1.0 / every.get();
    // Several deaths in one round are one wait.
    let waits = (1.0 - (-wall * rate).exp()) / wall;
    let in_reduction = (reduction / wall).min(1.0) * (reduction / 2.0 + fleet.notice.get() + quorum);
    let asked_again = match fleet.method {
        // The quorum is asked for at once, so its epoch is under way all the time.
        Method::Ddp { .. } => quorum,
        Method::Diloco { .. } => 0.0,
    };
    // An epoch without the dead one, and one with the replica in its place.
    let epochs = 2.0 * fleet.reconnect.get() + asked_again;
    let all_wait = rate * in_reduction + waits * (epochs + fleet.heal.get());
    let one_is_away = fleet.restart.get() + fleet.heal.get() + 1.5 * wall;
    (1.0 - rate * one_is_away / f64::from(fleet.replicas)).max(0.0) / (1.0 + all_wait)
}

fn assumptions(links: &Links, job: &Job) -> Vec<String> {
    let percent = 100.0 * crate::links::PAYLOAD;
    let mut all = vec![
        format!("links: {percent:.1} % of a line is payload (MTU 1500); one connection fills it unless packets are lost"),
        "collectives: the rounds of the gloo backend, hosts before the network between them; their arithmetic costs nothing".to_string(),
        "data parallel: buckets of gradients (1 MiB, then 25 MiB of f32) leave during the backward pass, two thirds of a step; layers are equal".to_string(),
        format!(
            "DiLoCo: the rounds of the product, a fragment in buckets of {} values, which wait for each other's last rounds; ranks of a replica average \
             gradients in every step in f32",
            job.bucket
        ),
        format!("what a rank does itself for a value that it exchanges: {}", job.per_value),
        "the model fits each rank; what a method costs in loss is not weighed: H = 30 to 500, τ ≤ 5 and 4 bits are what papers trained with".to_string(),
        format!(
            "lighthouse: {} for a call at this size, as measured on two cores (docs/benchmarks/tolerance.md)",
            lighthouse_call(u32::try_from(links.hosts().len()).unwrap_or(u32::MAX))
        ),
    ];
    if let Some(every) = job.failures.every {
        let f = &job.failures;
        all.push(format!(
            "deaths: one host of the job each {every} on average, at any moment; known after {}, a new epoch after {} more; another replica asks \
             after {} and fetches {} bytes per parameter",
            f.notice, f.reconnect, f.restart, f.state
        ));
    }
    all
}
