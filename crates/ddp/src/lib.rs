//! Fault-tolerant data parallel: bucketed gradient averaging over plain slices.
//!
//! Per step a quorum, then this replica's gradients go out in `buckets` as they are made ([`Ddp::step_with`]: overlap with
//! the backward pass, several dtypes, micro-batches, unused parameters) or all at once ([`Ddp::step`]); then a vote, and
//! on a yes the averages over whoever is there go to the caller's optimizer. A step that fails is done again with the
//! gradients that were kept; a replica that healed in it follows along without counting.

mod buckets;
mod feedback;

use std::sync::Arc;
use std::time::Duration;

use checkpoint::StateDict;
use ftcore::{Error, ErrorKind, Result, Tensor, Traffic, deadline_in, time_left};
use manager::{Healed, ManagedWork, Replica, State};

use buckets::BucketPlan;
pub use buckets::{Sink, Slot};
use feedback::{Feedback, Whole};
use quant::ErrorFeedback;

/// How gradients travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DdpConfig {
    /// Values in the first bucket of a dtype; small, so that communication starts early. In elements.
    pub first_bucket_elements: usize,
    /// Values in each further bucket. In elements.
    pub bucket_elements: usize,
    /// Micro-batches whose gradients are averaged into one step (gradient accumulation).
    pub micro_batches: u32,
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
            micro_batches: 1,
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
    plan: Option<BucketPlan>,
    feedback: Feedback,
    on_reduce: Option<Box<dyn FnMut(i64, i64) + Send>>,
}

impl<R: Replica> Ddp<R> {
    /// Errors: a bucket size or a number of micro-batches of zero.
    pub fn new(replica: R, config: DdpConfig) -> Result<Self> {
        if config.first_bucket_elements == 0 || config.bucket_elements == 0 {
            return Err(Error::invalid("bucket sizes must be at least one element"));
        }
        if config.micro_batches == 0 {
            return Err(Error::invalid("a step has at least one micro-batch"));
        }
        Ok(Self {
            replica,
            config,
            plan: None,
            feedback: Feedback::default(),
            on_reduce: None,
        })
    }

    /// Lets the steps keep and pay what `debts`, those of the quantised group under the replica, owe: they are part of the
    /// state that heals from then on. All replicas of a run do so, or none. Call it before the first step.
    #[must_use]
    pub fn with_error_feedback(mut self, debts: Arc<ErrorFeedback>) -> Self {
        self.feedback = Feedback::new(debts);
        self
    }

    /// `state` and what is owed, for a checkpoint on disk between two steps. Errors: those of `state`.
    pub fn save(&self, state: &mut dyn State) -> Result<StateDict> {
        let mut out = StateDict::new();
        let feedback = &self.feedback;
        let own = true;
        Whole { state, feedback, own }.save(&mut out)?;
        Ok(out)
    }

    /// Takes over what [`save`](Self::save) gave on this replica, before the first step; the [`Replica`] must stand at the same step
    /// (`Manager::restore`). Errors: those of `state`; `InvalidArgument` for debts that are none.
    pub fn restore(&self, from: &StateDict, state: &mut dyn State) -> Result<()> {
        let feedback = &self.feedback;
        let own = true;
        Whole { state, feedback, own }.load(from)
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
    /// then and nothing was applied. `InvalidState` with several micro-batches, which `step_with` takes.
    pub fn step<S: State>(
        &mut self,
        state: &mut S,
        gradients: &[Vec<f32>],
        apply: impl FnOnce(&mut S, &[Vec<f32>]) -> Result<()>,
    ) -> Result<StepReport> {
        if self.config.micro_batches != 1 {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "this run accumulates micro-batches: use step_with",
            ));
        }
        let slots: Vec<Slot> = gradients.iter().map(|g| Slot::f32(g.len())).collect();
        let push_all = |_: &mut S, _: u32, sink: &mut Sink<'_>| {
            let mut all = gradients.iter().enumerate().rev();
            all.try_for_each(|(slot, g)| sink.push(slot, g))
        };
        self.run(state, &slots, false, push_all, |state, averages| {
            let averages = averages
                .into_iter()
                .map(|t| t.into_vec::<f32>().map_err(Error::from))
                .collect::<Result<Vec<_>>>()?;
            apply(state, &averages)
        })
    }

    /// One step whose gradients are made while earlier ones already travel. After the quorum (and healing),
    /// `compute(state, micro_batch, sink)` runs once per micro-batch and pushes the gradients of `slots` as the backward
    /// pass makes them, the last parameter's first; slots that it leaves out count as zero. `apply` gets the averages, a
    /// tensor per slot, as in [`step`](Self::step).
    ///
    /// A step that has to be done again sends the same gradients and does not compute anew. Errors: as
    /// [`step`](Self::step), and those of `compute`, after which the step cannot go on.
    pub fn step_with<S: State>(
        &mut self,
        state: &mut S,
        slots: &[Slot],
        compute: impl FnMut(&mut S, u32, &mut Sink<'_>) -> Result<()>,
        apply: impl FnOnce(&mut S, Vec<Tensor>) -> Result<()>,
    ) -> Result<StepReport> {
        self.run(state, slots, false, compute, apply)
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
            self.run(state, &[], true, |_, _, _| Ok(()), |_, _| Ok(()))?;
        }
        self.replica.leave(deadline_in(Duration::from_secs(5)))
    }

    fn run<S: State>(
        &mut self,
        state: &mut S,
        slots: &[Slot],
        closing: bool,
        mut compute: impl FnMut(&mut S, u32, &mut Sink<'_>) -> Result<()>,
        apply: impl FnOnce(&mut S, Vec<Tensor>) -> Result<()>,
    ) -> Result<StepReport> {
        let deadline = deadline_in(self.config.step_timeout);
        let plan = match self.plan.take().filter(|plan| plan.is_for(slots)) {
            Some(plan) => plan,
            None => BucketPlan::new(
                slots,
                self.config.first_bucket_elements,
                self.config.bucket_elements,
            )?,
        };
        let mut failed_attempts = 0;
        let mut healed = None;
        let mut kept: Option<Vec<Tensor>> = None;
        loop {
            let mut whole = Whole {
                state,
                feedback: &self.feedback,
                own: false,
            };
            let participation = self.replica.start_quorum(&mut whole, deadline)?;
            if participation.healed.is_some() {
                healed = participation.healed.clone();
            }
            let closing = closing || self.config.steps.is_some_and(|n| participation.step >= n);
            self.feedback.begin();
            let works = match &kept {
                _ if closing => Vec::new(),
                Some(buckets) => buckets
                    .iter()
                    .map(|b| {
                        self.replica
                            .allreduce(vec![buckets::copy(b)], ftcore::ReduceOp::Avg)
                    })
                    .collect(),
                None => {
                    let mut sink = Sink::new(&mut self.replica, &plan, self.config.micro_batches);
                    for micro_batch in 0..self.config.micro_batches {
                        if micro_batch > 0 {
                            sink.next_micro_batch();
                        }
                        compute(state, micro_batch, &mut sink)?;
                    }
                    let (works, buckets) = sink.finish()?;
                    kept = Some(buckets);
                    works
                }
            };
            if let Some(f) = self.on_reduce.as_mut().filter(|_| !closing) {
                f(participation.step, participation.epoch);
            }
            let averages = self.collect(works);
            let committed = match self.replica.should_commit(deadline) {
                Ok(yes) => yes,
                Err(e) if e.is_retryable() => false,
                Err(e) => return Err(e),
            };
            self.feedback.end(committed);
            if committed {
                let (averages, contributors) = averages.ok_or_else(|| {
                    Error::new(
                        ErrorKind::Internal,
                        "a step was committed although a reduction failed",
                    )
                })?;
                if !closing {
                    apply(state, plan.unpack(&averages)?)?;
                }
                self.plan = Some(plan);
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

    /// The reduced buckets and the least number of contributors, or `None` if any failed.
    fn collect(&mut self, works: Vec<ManagedWork>) -> Option<(Vec<Tensor>, u32)> {
        let mut buckets = Vec::with_capacity(works.len());
        let mut contributors = u32::MAX;
        for work in works {
            let bucket = work.take().and_then(|done| {
                contributors = contributors.min(done.contributors);
                done.into_tensor()
            });
            match bucket {
                Ok(bucket) => buckets.push(bucket),
                Err(e) => {
                    self.replica.report_error(e);
                    return None;
                }
            }
        }
        Some((buckets, if contributors == u32::MAX { 0 } else { contributors }))
    }
}
