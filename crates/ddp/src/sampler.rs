//! Which samples a step takes, and which of them this replica does, so that none is repeated or lost when members change.
//!
//! Everything follows from a *cursor*: how many samples committed steps have taken so far. It belongs to the state that heals. A step takes
//! the window that begins at the cursor, a batch for each contributor; each takes its own part of it, by its index among the contributors; and
//! once the step has committed the cursor goes on by the window. A lost vote leaves the cursor where it is, so that the next attempt takes
//! the same samples, dealt to the replicas that contribute then; a replica that heals takes the cursor over.

use std::ops::Range;

use ftcore::{Error, Result};

/// A seeded order of a data set that any number of replicas go through together.
///
/// A data epoch goes through each sample once, in an order of its own. A window ends where the data epoch ends: the last one of an epoch may
/// be smaller than a batch for each contributor, and is dealt so that the parts differ by one sample at most; some may be empty.
///
/// ```
/// use oxccl_ddp::{Ddp, Sampler};
/// use ftcore::Result;
/// use replica::{Participation, Replica, State};
/// # trait Model: State {
/// #     fn cursor(&self) -> u64;
/// #     fn set_cursor(&mut self, cursor: u64);
/// #     fn gradients(&mut self, samples: &[u64], weight: f32) -> Result<Vec<Vec<f32>>>;
/// #     fn apply(&mut self, averages: &[Vec<f32>]) -> Result<()>;
/// # }
///
/// /// The cursor is saved and loaded with the model; `DdpConfig::samples_by_contributor` is on.
/// fn train<R: Replica, M: Model>(ddp: &mut Ddp<R>, model: &mut M) -> Result<()> {
///     let sampler = Sampler::new(7, 50_000, 32)?;
///     while !ddp.is_finished() {
///         let compute = |model: &mut M, now: &Participation| {
///             let place = (now.contributor_rank.unwrap_or(0), now.contributors);
///             let own = sampler.part(model.cursor(), place)?;
///             model.gradients(&own.samples, own.weight)
///         };
///         let report = ddp.step(model, compute, |model, averages| model.apply(averages))?;
///         model.set_cursor(sampler.advance(model.cursor(), report.contributors));
///     }
///     ddp.finish(model)
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sampler {
    seed: u64,
    samples: u64,
    batch: u64,
}

/// What one contributor takes in a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Numbers of samples, below the size of the data set.
    pub samples: Vec<u64>,
    /// What to multiply the mean gradient of these samples with, so that the average over the contributors is the mean over the step's
    /// samples: 1, unless the parts differ in size.
    pub weight: f32,
}

impl Sampler {
    /// The order of `samples` samples under `seed`, with batches of `batch` for each contributor: the same on all replicas. Errors: no samples,
    /// or batches without any.
    pub fn new(seed: u64, samples: u64, batch: u64) -> Result<Self> {
        if samples == 0 || batch == 0 {
            let text =
                format!("a data set of {samples} samples in batches of {batch} gives nothing to train on");
            return Err(Error::invalid(text));
        }
        Ok(Self { seed, samples, batch })
    }

    /// The data epoch that the next step is in.
    pub fn epoch(&self, cursor: u64) -> u64 {
        cursor / self.samples
    }

    /// Where the cursor stands after a step to which so many replicas contributed. Without any it stays.
    pub fn advance(&self, cursor: u64, contributors: u32) -> u64 {
        let wanted = self.batch.saturating_mul(u64::from(contributors));
        let left = self.samples - cursor % self.samples;
        cursor.saturating_add(wanted.min(left))
    }

    /// What contributor number `place.0` of `place.1` takes in the step that begins at `cursor`.
    ///
    /// Errors: `InvalidArgument` for a place that does not exist.
    pub fn part(&self, cursor: u64, place: (u32, u32)) -> Result<Part> {
        let (contributor, contributors) = place;
        if contributor >= contributors {
            let text = format!("there is no contributor {contributor} among {contributors}");
            return Err(Error::invalid(text));
        }
        let window = self.advance(cursor, contributors) - cursor;
        let own = own_part(window, u64::from(contributor), u64::from(contributors));
        let weight = (own.end - own.start) as f64 * f64::from(contributors) / window.max(1) as f64;
        let (epoch, at) = (self.epoch(cursor), cursor % self.samples);
        Ok(Part {
            samples: own.map(|i| self.sample(epoch, at + i)).collect(),
            weight: weight as f32,
        })
    }

    /// The sample at `position` of a data epoch: a permutation, by a Feistel network over the next even power of two, whose numbers beyond
    /// the data set are passed through it again.
    fn sample(&self, epoch: u64, position: u64) -> u64 {
        let bits = u64::BITS - (self.samples - 1).leading_zeros();
        let half = bits.div_ceil(2).max(1);
        let mask = (1u64 << half) - 1;
        let key = mix(self.seed ^ mix(epoch));
        let mut x = position;
        loop {
            let (mut left, mut right) = (x >> half, x & mask);
            for round in 0..8 {
                (left, right) = (right, left ^ (mix(right ^ mix(key ^ round)) & mask));
            }
            x = left << half | right;
            if x < self.samples {
                return x;
            }
        }
    }
}

/// Part `i` of `n` of so many samples: all of one size, or the first ones larger by one.
fn own_part(samples: u64, i: u64, n: u64) -> Range<u64> {
    let (each, more) = (samples / n, samples % n);
    let from = i * each + i.min(more);
    from..from + each + u64::from(i < more)
}

/// The finaliser of splitmix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
