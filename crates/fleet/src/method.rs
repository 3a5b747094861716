//! How a method lays its reductions into the time of computing.
//!
//! Data parallel sends gradients in buckets, each as soon as the backward pass has filled it, and waits for all of them before the next step
//! (`Ddp::step_with`); or all of them after it. DiLoCo asks [`Rounds`], the product's own order of sending and finishing, what is due after each inner step.

use std::fmt;
use std::str::FromStr;

use ftcore::{Error, Result, Step};
use protocol::training::{Due, RoundRules, Rounds, Sends};
use quant::{Codec, Slices};

use crate::cost::{Cost, Costs, Group, Operation};
use crate::units::{Bytes, Seconds};

/// Values of the first bucket of gradients, and of the others: the defaults of `DdpConfig`.
const BUCKETS: [u64; 2] = [1 << 18, LARGEST_BUCKET];
pub(crate) const LARGEST_BUCKET: u64 = 25 << 18;

/// How values travel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Format {
    /// As they are, 32 bits.
    F32,
    /// In a format of crate `quant`, scales included.
    Encoded(Codec),
}

impl Format {
    /// As options and the command call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Encoded(codec) => codec.name(),
        }
    }

    /// The bytes of so many values.
    pub fn bytes(self, values: u64) -> Bytes {
        match self {
            Self::F32 => Bytes(values.saturating_mul(4)),
            // Long slices: the length is the same but for the last block.
            Self::Encoded(codec) => Bytes((values as f64 * codec.bits() / 8.0).ceil() as u64),
        }
    }

    /// What an average of `values` values costs in `group`: an all-reduce, or the slices of a quantised one.
    pub fn average(self, costs: &Costs<'_>, group: &Group, values: u64) -> Result<Cost> {
        let ranks = group.len() as u64;
        let Self::Encoded(codec) = self else {
            return costs.of(group, Operation::AllReduce(self.bytes(values)));
        };
        let fits = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let slices = Slices::of(codec, fits(values), group.len());
        let part = if ranks == 2 {
            values
        } else {
            values.div_ceil(ranks.max(1))
        };
        let slice = part.min(slices.values as u64).max(1);
        let bytes = self.bytes(slice);
        let gather = costs.of(group, Operation::AllGather(bytes))?;
        let one = match ranks {
            2 => gather,
            _ => costs.of(group, Operation::AllToAll(bytes))?.then(gather),
        };
        let count = part as f64 / slice as f64;
        // As many as the group below carries at once, and as are under way at all.
        let each = one.next.max(one.time * (1.0 / slices.at_once as f64));
        let time = one.time + each * (count - 1.0).max(0.0);
        Ok(Cost {
            time,
            // A quantised operation begins when the one before has ended.
            next: time,
            sent: Bytes((one.sent.0 as f64 * count).ceil() as u64),
        })
    }

    /// The same in buckets of `bucket` values, each an operation of its own, one submitted behind the other.
    pub fn in_buckets(self, costs: &Costs<'_>, group: &Group, values: u64, bucket: u64) -> Result<Cost> {
        let bucket = bucket.max(1);
        let (count, rest) = (values / bucket, values % bucket);
        let mut all: Option<Cost> = None;
        for (size, times) in [(bucket, count), (rest, u64::from(rest > 0))] {
            if times == 0 {
                continue;
            }
            let one = self.average(costs, group, size)?;
            let next = one.next * times as f64;
            let sent = Bytes(one.sent.0.saturating_mul(times));
            let time = match all {
                Some(_) => next,
                None => one.time + one.next * (times - 1) as f64,
            };
            all = Some(all.unwrap_or_default().then(Cost { time, next, sent }));
        }
        Ok(all.unwrap_or_default())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "f32" => Ok(Self::F32),
            _ => s.parse().map(Self::Encoded),
        }
    }
}

/// How replicas learn from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Gradients are averaged in every step.
    Ddp {
        /// They leave during the backward pass.
        overlap: bool,
    },
    /// Parameters are averaged fragment by fragment.
    Diloco {
        /// H: inner steps between two exchanges of a fragment.
        sync_every: u64,
        /// P: fragments.
        fragments: u64,
        /// τ: inner steps between sending and applying.
        delay: u64,
    },
}

impl Method {
    /// Errors: `InvalidArgument` for rounds that `DilocoConfig` refuses too.
    pub fn check(&self, layers: u32) -> Result<()> {
        let Self::Diloco {
            sync_every,
            fragments,
            delay,
        } = *self
        else {
            return Ok(());
        };
        let text = if sync_every == 0 || fragments == 0 || !sync_every.is_multiple_of(fragments) {
            format!(
                "H = {sync_every} inner steps in P = {fragments} fragments: H must be a multiple of P, both at least 1"
            )
        } else if fragments > u64::from(layers) {
            format!("{layers} layers cannot fill {fragments} fragments; use at most {layers}")
        } else if delay >= sync_every / fragments {
            format!(
                "τ = {delay}: it must be less than H / P = {}",
                sync_every / fragments
            )
        } else {
            return Ok(());
        };
        Err(Error::invalid(text))
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ddp { overlap: true } => f.write_str("DDP"),
            Self::Ddp { overlap: false } => f.write_str("DDP, no overlap"),
            Self::Diloco {
                sync_every,
                fragments,
                delay,
            } => write!(f, "DiLoCo H={sync_every} P={fragments} τ={delay}"),
        }
    }
}

/// What is trained, and how long computing takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// The number of values.
    pub parameters: u64,
    /// The number of equal layers.
    pub layers: u32,
    /// An inner step of a replica: forward, backward, optimizer, and what the ranks of the replica exchange.
    pub step: Seconds,
    /// What an answer of the lighthouse takes, which a round begins with.
    pub quorum: Seconds,
    /// What the vote takes, with which a round ends.
    pub vote: Seconds,
    /// What a rank copies and computes for each value that it exchanges, while nothing else goes on.
    pub per_value: Seconds,
}

/// A method's rounds in the steady state, each fragment once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    /// Inner steps.
    pub steps: u64,
    /// All of it.
    pub time: Seconds,
    /// Computing.
    pub computing: Seconds,
    /// What leaves the first host.
    pub sent: Bytes,
    /// All reductions, hidden or not.
    pub reduction: Seconds,
}

impl Round {
    /// The share of time spent computing.
    pub fn efficiency(&self) -> f64 {
        match self.time.get() > 0.0 {
            true => self.computing.get() / self.time.get(),
            false => 1.0,
        }
    }
}

/// The rounds of `method`; `average` says what the average of so many values costs.
///
/// Errors: those of [`Method::check`] and of `average`.
pub fn rounds(
    method: Method,
    work: &Workload,
    mut average: impl FnMut(u64) -> Result<Cost>,
) -> Result<Round> {
    method.check(work.layers)?;
    match method {
        Method::Ddp { overlap } => {
            let buckets = Buckets::new(work.parameters, &mut average)?;
            // The quorum is asked for beside the forward pass (`DdpConfig::overlap_quorum`).
            let ends = if overlap {
                buckets.behind_backward(work.step, work.layers, work.quorum)
            } else {
                work.step.max(work.quorum) + buckets.cost.time
            };
            Ok(Round {
                steps: 1,
                time: ends + work.vote + work.handling(work.parameters),
                computing: work.step,
                sent: buckets.cost.sent,
                reduction: buckets.cost.time,
            })
        }
        Method::Diloco {
            sync_every,
            fragments,
            delay,
        } => diloco(work, (sync_every, fragments, delay), average),
    }
}

impl Workload {
    /// What the values of an exchange cost a rank itself.
    pub(crate) fn handling(&self, values: u64) -> Seconds {
        self.per_value * values as f64
    }
}

/// Gradients on their way: the values of each bucket and its cost, one after the other.
pub(crate) struct Buckets {
    all: Vec<(u64, Cost)>,
    /// Of all of them.
    pub(crate) cost: Cost,
}

impl Buckets {
    /// Of so many values, where `average` says what a bucket costs.
    pub(crate) fn new(values: u64, mut average: impl FnMut(u64) -> Result<Cost>) -> Result<Self> {
        let (mut left, mut all) = (values, Vec::new());
        let mut total = Cost::default();
        let mut known: Option<(u64, Cost)> = None;
        while left > 0 {
            let [first, rest] = BUCKETS;
            let own = left.min(if all.is_empty() { first } else { rest });
            left -= own;
            let cost = match known.filter(|(values, _)| *values == own) {
                Some((_, cost)) => cost,
                None => average(own)?,
            };
            known = Some((own, cost));
            let time = if all.is_empty() { cost.time } else { cost.next };
            total = total.then(Cost { time, ..cost });
            all.push((own, cost));
        }
        Ok(Self { all, cost: total })
    }

    /// When a step and its buckets end, if each leaves as soon as the backward pass has filled it and the line is free.
    pub(crate) fn behind_backward(&self, step: Seconds, layers: u32, quorum: Seconds) -> Seconds {
        let layers = f64::from(layers.max(1));
        let values = self.all.iter().map(|(values, _)| *values).sum::<u64>().max(1) as f64;
        let (mut line, mut filled) = (quorum, 0.0);
        for (n, (own, cost)) in self.all.iter().enumerate() {
            filled += *own as f64;
            let layer = (filled / values * layers).ceil();
            let there = step * (1.0 / 3.0 + 2.0 / 3.0 * layer / layers);
            // What is there while another one is under way is sent ahead.
            let behind = line + cost.next;
            line = match n > 0 && line > there {
                true => behind,
                false => line.max(there) + cost.time,
            };
        }
        line.max(step)
    }
}

fn diloco(
    work: &Workload,
    (sync_every, fragments, delay): (u64, u64, u64),
    mut average: impl FnMut(u64) -> Result<Cost>,
) -> Result<Round> {
    let layers = u64::from(work.layers);
    let mut costs: Vec<(u64, Cost)> = Vec::new();
    let mut of_fragments = Vec::new();
    for fragment in 0..fragments {
        // Strided: layer l is of fragment l mod P.
        let own = layers / fragments + u64::from(fragment < layers % fragments);
        let values = (u128::from(work.parameters) * u128::from(own) / u128::from(layers.max(1))) as u64;
        let cost = match costs.iter().find(|(known, _)| *known == values) {
            Some((_, cost)) => *cost,
            None => {
                let cost = average(values)?;
                costs.push((values, cost));
                cost
            }
        };
        of_fragments.push(cost);
    }
    let mut rounds = Rounds::<()>::new(RoundRules {
        round_steps: sync_every / fragments,
        delay,
        eager: false,
        last: None,
    });
    let handled = work.handling(work.parameters / fragments.max(1));
    let (mut now, mut arrives, mut step) = (Seconds::ZERO, Seconds::ZERO, 0i64);
    let mut marks = Vec::new();
    rounds.begin()?;
    let mut has_begun = false;
    // One period to settle, one to measure.
    while marks.len() < 2 {
        while let Some(due) = rounds.due() {
            match due {
                Due::Send => {
                    now = now + work.quorum;
                    arrives = now;
                    if rounds.joined(Step(step))? != Sends::Nothing {
                        rounds.keep(Step(step), ());
                        let fragment = u64::try_from(step).unwrap_or(0) % fragments;
                        let cost = of_fragments.get(fragment as usize);
                        arrives = now + cost.map_or(Seconds::ZERO, |c| c.time);
                    }
                    rounds.sent();
                }
                Due::Finish => {
                    now = now.max(arrives) + work.vote + handled;
                    rounds.applied(Ok(()))?;
                    step += 1;
                    let done = u64::try_from(step).unwrap_or(0);
                    if done > fragments && (done - 1).is_multiple_of(fragments) {
                        marks.push(now);
                    }
                }
            }
        }
        if !has_begun {
            rounds.begun();
            has_begun = true;
        }
        if marks.len() < 2 {
            rounds.inner_step()?;
            now = now + work.step;
        }
    }
    let time = match marks.as_slice() {
        [first, second, ..] => *second - *first,
        _ => now,
    };
    Ok(Round {
        steps: sync_every,
        time,
        computing: work.step * sync_every as f64,
        sent: of_fragments.iter().map(|c| c.sent).sum(),
        reduction: of_fragments.iter().map(|c| c.time).sum(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn work(step: f64) -> Workload {
        Workload {
            parameters: 1_200,
            layers: 12,
            step: Seconds::new(step).unwrap(),
            quorum: Seconds::ZERO,
            vote: Seconds::ZERO,
            per_value: Seconds::ZERO,
        }
    }

    fn takes(seconds: f64) -> impl FnMut(u64) -> Result<Cost> {
        move |values| {
            let time = Seconds::new(seconds * values as f64 / 1_200.0)?;
            Ok(Cost {
                time,
                next: time,
                sent: Bytes(4 * values),
            })
        }
    }

    fn efficiency(method: Method, step: f64, reduction: f64) -> f64 {
        rounds(method, &work(step), takes(reduction))
            .unwrap()
            .efficiency()
    }

    fn diloco(sync_every: u64, fragments: u64, delay: u64) -> Method {
        Method::Diloco {
            sync_every,
            fragments,
            delay,
        }
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    }

    #[test]
    fn data_parallel_waits_for_all_of_it_or_for_what_the_backward_pass_does_not_hide() {
        near(efficiency(Method::Ddp { overlap: false }, 1.0, 1.0), 0.5);
        // So few values are one bucket, which the backward pass has filled at its end.
        near(efficiency(Method::Ddp { overlap: true }, 1.0, 1.0), 0.5);
    }

    #[test]
    fn buckets_leave_while_the_backward_pass_goes_on() {
        let values = 16 * (25 << 18);
        let cost = |each: f64| {
            move |values: u64| {
                let time = Seconds::new(each * values as f64 / f64::from(25 << 18))?;
                Ok(Cost {
                    time,
                    next: time,
                    sent: Bytes(values),
                })
            }
        };
        let ends = |each, layers| {
            let buckets = Buckets::new(values, cost(each)).unwrap();
            assert_eq!(buckets.cost.sent, Bytes(values));
            buckets
                .behind_backward(Seconds::new(1.0).unwrap(), layers, Seconds::ZERO)
                .get()
        };
        // Little enough: only the last bucket is left to send. It is not quite full, as the first one is small.
        near(ends(0.01, 100), 1.0 + 0.01 * 24.0 / 25.0);
        // Too much: all of it behind the forward pass and the first layer of the backward pass.
        near(ends(1.0, 100), 1.0 / 3.0 + 2.0 / 300.0 + 16.0);
    }

    #[test]
    fn diloco_waits_once_a_round_for_what_the_delay_does_not_hide() {
        near(efficiency(diloco(10, 1, 0), 1.0, 2.0), 10.0 / 12.0);
        near(efficiency(diloco(10, 1, 1), 1.0, 2.0), 10.0 / 11.0);
        near(efficiency(diloco(10, 1, 2), 1.0, 2.0), 1.0);
        // Two fragments, one second each.
        near(efficiency(diloco(10, 2, 0), 1.0, 2.0), 10.0 / 12.0);
        near(efficiency(diloco(10, 2, 1), 1.0, 2.0), 1.0);
    }

    #[test]
    fn rounds_that_the_product_refuses_are_refused() {
        for (method, text) in [
            (diloco(10, 3, 0), "multiple"),
            (diloco(10, 5, 2), "less than"),
            (diloco(26, 13, 0), "12 layers"),
            (diloco(0, 1, 0), "at least 1"),
        ] {
            let e = rounds(method, &work(1.0), takes(1.0)).unwrap_err();
            assert!(e.message().contains(text), "{e}");
        }
    }
}
