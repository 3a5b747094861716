//! Fault-tolerant data parallel: bucketed gradient averaging over plain slices.
//!
//! Per step: [`Ddp::step`] takes this replica's gradients, averages them with whoever is there (small first bucket, then
//! buckets of a fixed size, packed across tensors so that none is left out: L04), votes, and on a yes hands the
//! averages to the caller's optimizer. A step that fails is done again with the gradients that were kept; a replica that
//! healed in it follows along without counting.

use std::time::Duration;

use ftcore::{Error, ErrorKind, ReduceOp, Result, Tensor, Traffic, deadline_in, time_left};
use manager::{Healed, ManagedWork, Participation, Replica, State};

/// How gradients travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DdpConfig {
    /// Values in the first bucket; small, so that communication starts early. In elements.
    pub first_bucket_elements: usize,
    /// Values in each further bucket. In elements.
    pub bucket_elements: usize,
    /// The number of steps of the run, after which it is closed (see [`Ddp::finish`]). `None`: the training loop
    /// decides, the same on every replica.
    pub steps: Option<i64>,
    /// How long a step may take, retries included.
    pub step_timeout: Duration,
}

impl Default for DdpConfig {
    /// 1 MiB, then 25 MiB of f32.
    fn default() -> Self {
        Self {
            first_bucket_elements: 1 << 18,
            bucket_elements: 25 << 18,
            steps: None,
            step_timeout: Duration::from_secs(600),
        }
    }
}

/// What a committed step was like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepReport {
    /// The step that was committed.
    pub step: i64,
    /// The epoch in which it was committed.
    pub epoch: i64,
    /// The members of that quorum.
    pub members: usize,
    /// How many replicas' gradients were averaged; 0 in the closing round.
    pub contributors: u32,
    /// Attempts that did not commit before this one.
    pub failed_attempts: u32,
    /// The recovery of this replica in this step, if there was one.
    pub healed: Option<Healed>,
}

/// Fault-tolerant data parallel over a [`Replica`].
pub struct Ddp<R> {
    replica: R,
    config: DdpConfig,
    on_reduce: Option<Box<dyn FnMut(i64, i64) + Send>>,
}

impl<R: Replica> Ddp<R> {
    /// Errors: a bucket size of zero.
    pub fn new(replica: R, config: DdpConfig) -> Result<Self> {
        if config.first_bucket_elements == 0 || config.bucket_elements == 0 {
            return Err(Error::invalid("bucket sizes must be at least one element"));
        }
        Ok(Self {
            replica,
            config,
            on_reduce: None,
        })
    }

    /// Calls `f(step, epoch)` whenever a step's gradients have been handed to the group.
    pub fn on_reduce(&mut self, f: impl FnMut(i64, i64) + Send + 'static) {
        self.on_reduce = Some(Box::new(f));
    }

    /// The replica, to ask for its step or traffic.
    pub fn replica(&self) -> &R {
        &self.replica
    }

    /// Bytes moved so far.
    pub fn traffic(&self) -> Traffic {
        self.replica.traffic()
    }

    /// The number of committed steps.
    pub fn current_step(&self) -> i64 {
        self.replica.current_step()
    }

    /// Averages `gradients` (one vector per parameter, in the same order and sizes on every replica) and calls `apply`
    /// with the averages and the state once the step has committed. `state` is what a healing replica takes over; if this
    /// replica heals in this step, `apply` gets the averages of the others, to go on from the state it just took. If it
    /// heals right into the end of the run, `apply` is not called.
    ///
    /// Errors: what cannot be retried, or a step that did not commit within `step_timeout`; the gradients are unchanged
    /// then and nothing was applied.
    pub fn step<S: State>(
        &mut self,
        state: &mut S,
        gradients: &[Vec<f32>],
        apply: impl FnOnce(&mut S, &[Vec<f32>]) -> Result<()>,
    ) -> Result<StepReport> {
        self.run(state, gradients, false, apply)
    }

    /// True once the configured number of steps is done; only `finish` is left to call.
    pub fn is_finished(&self) -> bool {
        self.config.steps.is_some_and(|n| self.current_step() >= n)
    }

    /// Ends the run: a closing round without data, in which a replica that is behind still heals, so that all end
    /// bitwise equal; then says good-bye. Without `DdpConfig::steps`, all replicas must call it after the same step.
    pub fn finish<S: State>(&mut self, state: &mut S) -> Result<()> {
        // A replica that healed right into the closing round has been through it already.
        if self.config.steps.is_none_or(|n| self.current_step() <= n) {
            self.run(state, &[], true, |_, _| Ok(()))?;
        }
        self.replica.leave(deadline_in(Duration::from_secs(5)))
    }

    fn run<S: State>(
        &mut self,
        state: &mut S,
        gradients: &[Vec<f32>],
        closing: bool,
        apply: impl FnOnce(&mut S, &[Vec<f32>]) -> Result<()>,
    ) -> Result<StepReport> {
        let deadline = deadline_in(self.config.step_timeout);
        let mut failed_attempts = 0;
        let mut healed = None;
        loop {
            let participation = self.replica.start_quorum(state, deadline)?;
            if participation.healed.is_some() {
                healed = participation.healed.clone();
            }
            let closing = closing || self.config.steps.is_some_and(|n| participation.step >= n);
            let gradients = if closing { &[] } else { gradients };
            let works = if closing {
                Vec::new()
            } else {
                self.submit(gradients, &participation)
            };
            let averages = self.collect(gradients, works);
            let committed = match self.replica.should_commit(deadline) {
                Ok(yes) => yes,
                Err(e) if e.is_retryable() => false,
                Err(e) => return Err(e),
            };
            if committed {
                let (averages, contributors) = averages.ok_or_else(|| {
                    Error::new(
                        ErrorKind::Internal,
                        "a step was committed although a reduction failed",
                    )
                })?;
                if !closing {
                    apply(state, &averages)?;
                }
                return Ok(StepReport {
                    step: participation.step,
                    epoch: participation.epoch,
                    members: participation.members.len(),
                    contributors,
                    failed_attempts,
                    healed,
                });
            }
            failed_attempts += 1;
            if time_left(deadline).is_zero() {
                return Err(Error::timeout(format!(
                    "step {} did not commit in {failed_attempts} attempts within {:?}",
                    participation.step, self.config.step_timeout
                )));
            }
        }
    }

    fn submit(&mut self, gradients: &[Vec<f32>], participation: &Participation) -> Vec<ManagedWork> {
        let total: usize = gradients.iter().map(Vec::len).sum();
        let mut works = Vec::new();
        let mut bucket = Vec::with_capacity(self.config.first_bucket_elements.min(total));
        let mut room = self.config.first_bucket_elements;
        for gradient in gradients {
            let mut rest = gradient.as_slice();
            // A tensor may span buckets: what does not fit goes on in the next one.
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(room));
                bucket.extend_from_slice(now);
                room -= now.len();
                rest = later;
                if room == 0 {
                    works.push(
                        self.replica
                            .allreduce(vec![Tensor::from_vec(std::mem::take(&mut bucket))], ReduceOp::Avg),
                    );
                    room = self.config.bucket_elements;
                }
            }
        }
        if !bucket.is_empty() {
            works.push(
                self.replica
                    .allreduce(vec![Tensor::from_vec(bucket)], ReduceOp::Avg),
            );
        }
        if let Some(f) = &mut self.on_reduce {
            f(participation.step, participation.epoch);
        }
        works
    }

    fn collect(&mut self, gradients: &[Vec<f32>], works: Vec<ManagedWork>) -> Option<(Vec<Vec<f32>>, u32)> {
        let mut flat = Vec::new();
        let mut contributors = u32::MAX;
        for work in works {
            let bucket = work.take().and_then(|done| {
                contributors = contributors.min(done.contributors);
                done.into_tensor()?.into_vec::<f32>().map_err(Error::from)
            });
            match bucket {
                Ok(values) => flat.extend(values),
                Err(e) => {
                    self.replica.report_error(e);
                    return None;
                }
            }
        }
        let mut rest = flat.as_slice();
        let mut averages = Vec::with_capacity(gradients.len());
        for gradient in gradients {
            let (part, tail) = rest.split_at_checked(gradient.len())?;
            averages.push(part.to_vec());
            rest = tail;
        }
        Some((averages, if contributors == u32::MAX { 0 } else { contributors }))
    }
}
