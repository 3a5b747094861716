//! Fault-tolerant data parallel: bucketed gradient averaging over plain slices.
//!
//! Per step a quorum, in which a replica that is behind heals; then this replica computes its gradients on the state that it has now, and they
//! go out in `buckets` as they are made ([`Ddp::step_with`]: overlap with the backward pass, several dtypes, micro-batches, unused
//! parameters) or all at once ([`Ddp::step`]); then a vote, and on a yes the averages over the contributors go to the caller's optimizer.
//!
//! Gradients belong to a state: a step that fails is done again with those that were kept, unless the replica healed
//! meanwhile. What an attempt sends, and when the run is over, [`protocol::training::Steps`] decides; here it is done. A replica that does not contribute computes nothing and follows along with zeros.

mod buckets;
mod sampler;
mod state;
mod under_way;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use buckets::{BucketPlan, average};
pub use buckets::{Sink, Slot};
use ftcore::{Epoch, Error, ErrorKind, Result, Step, Tensor, Traffic, deadline_in, time_left};
use protocol::training::{Sends, Share, Steps};
use quant::ErrorFeedback;
use replica::StateDict;
use replica::{Healed, ManagedWork, Participation, Replica, Spare, State, write_commit};
pub use sampler::{Part, Sampler};
use state::Whole;
use under_way::UnderWay;

/// How gradients travel.
///
/// ```
/// use std::time::Duration;
///
/// use oxccl_ddp::DdpConfig;
///
/// let config = DdpConfig {
///     bucket_elements: 1 << 20, // 4 MiB of f32 to an all-reduce
///     step_timeout: Duration::from_secs(60),
///     ..DdpConfig::for_steps(1000)
/// };
/// assert_eq!(config.steps, Some(1000));
/// ```
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
    /// A replica's samples follow from its place among the contributors ([`Sampler`]). A step that is done again with other contributors
    /// then computes its gradients anew; otherwise it sends those that it has.
    pub samples_by_contributor: bool,
    /// [`Ddp::step_with`] asks for the quorum and begins to compute at once; the first full bucket, or [`Sink::participation`], waits for it. Default true.
    ///
    /// The step's time then does not contain that of the quorum. The results are the same: who is behind heals in the same step, and computes in vain
    /// for once; what peers heal from is a snapshot after the forward and backward pass, so `compute` must leave alone what replicas share.
    /// The quorum comes first, as without this, in a replica's first step and where an attempt is repeated, with
    /// [`samples_by_contributor`](Self::samples_by_contributor), with error feedback, and in [`Ddp::step`], which hands its quorum to `compute`.
    pub overlap_quorum: bool,
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
            samples_by_contributor: false,
            overlap_quorum: true,
            step_timeout: Duration::from_secs(600),
        }
    }
}

impl DdpConfig {
    /// The usual values, for a run of so many steps.
    pub fn for_steps(steps: i64) -> Self {
        Self {
            steps: Some(steps),
            ..Self::default()
        }
    }
}

/// What a committed step was like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepReport {
    /// The step that was committed.
    pub step: Step,
    /// The epoch in which it was committed.
    pub epoch: Epoch,
    /// The members of that quorum.
    pub members: usize,
    /// How many replicas' gradients were averaged; 0 in the closing round.
    pub contributors: u32,
    /// Attempts that did not commit before this one.
    pub failed_attempts: u32,
    /// The recovery of this replica in this step, if there was one.
    pub healed: Option<Healed>,
    /// How long gradients were under way in the attempt that committed: the time with at least one bucket sent that had not come back.
    pub reducing: Duration,
    /// How long the step stood still for them once the last gradient was made. The rest of `reducing` was hidden behind the backward pass.
    pub waited: Duration,
}

/// `step 7 by 2 replicas, healed from replica rank 1 (800 bytes in 4 ms)`.
impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_commit(
            f,
            self.step,
            self.contributors,
            self.failed_attempts,
            self.healed.as_ref(),
        )
    }
}

/// What a step is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    /// `compute` is told the quorum, and gives all gradients at once.
    All,
    /// It pushes them as they are made, and may begin before there is a quorum.
    Buckets,
    /// The closing round has no data.
    Closing,
}

/// Fault-tolerant data parallel over a [`Replica`].
///
/// ```
/// # extern crate replica as oxccl_replica;
/// use ftcore::Result;
/// use oxccl_ddp::{Ddp, DdpConfig, Slot};
/// use oxccl_replica::Replica;
///
/// /// A hundred steps on weights of eight elements.
/// fn train(replica: impl Replica, mut weights: Vec<f32>) -> Result<Vec<f32>> {
///     let mut ddp = Ddp::new(replica, &[Slot::f32(8)], DdpConfig::for_steps(100))?;
///     let gradients = |weights: &mut Vec<f32>, _: &_| Ok(vec![weights.iter().map(|w| w - 1.0).collect()]);
///     let update = |weights: &mut Vec<f32>, mean: &[Vec<f32>]| {
///         weights.iter_mut().zip(&mean[0]).for_each(|(w, g)| *w -= 0.1 * g);
///         Ok(())
///     };
///     ddp.train(&mut weights, gradients, update, |step| println!("{step}"))?;
///     Ok(weights)
/// }
/// ```
pub struct Ddp<R> {
    replica: R,
    config: DdpConfig,
    plan: BucketPlan,
    spare: Spare,
    /// Memory of the step before: its buckets,
    buckets: Vec<Tensor>,
    /// and the averages that it applied, as far as they do not lie in what is spare.
    averages: Vec<Tensor>,
    /// What this replica's rank owes, of a group with error feedback.
    feedback: Option<Arc<ErrorFeedback>>,
    steps: Steps<Vec<Tensor>>,
    on_reduce: Option<Box<dyn FnMut(Step, Epoch) + Send>>,
}

impl<R: Replica> Ddp<R> {
    /// `slots` are the gradients of the model, the same on every replica. Errors: a slot that holds no gradients; a bucket size or a number of
    /// micro-batches of zero.
    pub fn new(replica: R, slots: &[Slot], config: DdpConfig) -> Result<Self> {
        if config.first_bucket_elements == 0 || config.bucket_elements == 0 {
            return Err(Error::invalid("bucket sizes must be at least one element"));
        }
        if config.micro_batches == 0 {
            return Err(Error::invalid("a step has at least one micro-batch"));
        }
        let plan = BucketPlan::new(slots, config.first_bucket_elements, config.bucket_elements)?;
        Ok(Self {
            steps: Steps::new(config.steps.map(Step), config.samples_by_contributor),
            replica,
            config,
            plan,
            spare: Spare::default(),
            buckets: Vec::new(),
            averages: Vec::new(),
            feedback: None,
            on_reduce: None,
        })
    }

    /// Lets the steps keep and pay what `residuals`, those of the quantised group under the replica, owe: they are part of the
    /// state that heals from then on. All replicas of a run do so, or none. Call it before the first step.
    #[must_use]
    pub fn with_error_feedback(mut self, residuals: Arc<ErrorFeedback>) -> Self {
        self.feedback = Some(residuals);
        self
    }

    fn whole<'a>(&'a mut self, state: &'a mut dyn State, own: bool) -> Whole<'a> {
        Whole {
            state,
            feedback: self.feedback.as_deref(),
            plan: &mut self.plan,
            steps: &mut self.steps,
            own,
        }
    }

    /// `state` and what is owed, for a checkpoint on disk between two steps. Errors: those of `state`; `InvalidState` if it is of no step.
    pub fn save(&mut self, state: &mut dyn State) -> Result<StateDict> {
        let mut out = StateDict::new();
        self.whole(state, true).save(&mut out)?;
        Ok(out)
    }

    /// Takes over what [`save`](Self::save) gave on this replica, before the first step; the [`Replica`] must stand at the same step
    /// (`Manager::restore`). Errors: those of `state`, which leave one of no step; `InvalidArgument` for residuals that are none; `InvalidState` once
    /// there was a step.
    pub fn restore(&mut self, from: &StateDict, state: &mut dyn State) -> Result<()> {
        self.steps.may_restore()?;
        self.whole(state, true).load(from)
    }

    /// Calls `f(step, epoch)` whenever a step's gradients have been handed to the group.
    pub fn on_reduce(&mut self, f: impl FnMut(Step, Epoch) + Send + 'static) {
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

    /// The number of committed steps; after [`finish`](Self::finish) its closing round is one of them.
    pub fn current_step(&self) -> Step {
        self.replica.current_step()
    }

    /// One step. After the quorum, and after healing if this replica is behind, `compute` gives the gradients of the state as it is then, one
    /// vector per slot in the order of the slots; `apply` gets the averages over the contributors and the state once the step has
    /// committed. `state` is what a healing replica takes over.
    ///
    /// `compute` runs again in a later attempt at the step if this replica healed meanwhile, or if its place among the contributors is another
    /// one; otherwise the same gradients are sent again. It does not run where this replica does not contribute: one that has just
    /// healed gets the averages of the others, to go on from the state that it took. If it heals right into the end of the run, `apply` does not
    /// run either, the step is the closing round, and only [`finish`](Self::finish) is left to call.
    ///
    /// Errors: what cannot be retried, a quorum that did not come about, or a step that did not commit within `step_timeout`; nothing was
    /// applied then, and the step may be called again. Those of `compute`. Those of `apply`: the step has committed by then, so that the state
    /// is of no step, and every later call is `InvalidState` until the replica is started again. `InvalidState` with several
    /// micro-batches, which `step_with` takes.
    pub fn step<S: State>(
        &mut self,
        state: &mut S,
        mut compute: impl FnMut(&mut S, &Participation) -> Result<Vec<Vec<f32>>>,
        apply: impl FnOnce(&mut S, &[Vec<f32>]) -> Result<()>,
    ) -> Result<StepReport> {
        if self.config.micro_batches != 1 {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "this run accumulates micro-batches: use step_with",
            ));
        }
        let slots = self.plan.len();
        let push_all = |state: &mut S, _: u32, sink: &mut Sink<'_>| {
            let gradients = compute(state, sink.participation()?)?;
            if gradients.len() != slots {
                let text = format!(
                    "{} gradients were computed; there are {slots} slots",
                    gradients.len()
                );
                return Err(Error::invalid(text));
            }
            let mut all = gradients.iter().enumerate().rev();
            all.try_for_each(|(slot, g)| sink.push(slot, g))
        };
        self.run(state, Run::All, push_all, |state, averages| {
            let averages = averages
                .into_iter()
                .map(|t| t.into_vec::<f32>().map_err(Error::from))
                .collect::<Result<Vec<_>>>()?;
            apply(state, &averages)?;
            Ok(averages.into_iter().map(Tensor::from_vec).collect())
        })
    }

    /// The whole run: [`step`](Self::step) until it [is finished](Self::is_finished), then [`finish`](Self::finish); a replica that an operator
    /// drains leaves instead. `committed` gets the report of each step.
    ///
    /// Errors: `InvalidArgument` without `DdpConfig::steps`, as the run would not end; those of `step` and `finish`. An error ends the run: a program
    /// that goes on after one that can be retried makes the calls itself.
    pub fn train<S: State>(
        &mut self,
        state: &mut S,
        mut compute: impl FnMut(&mut S, &Participation) -> Result<Vec<Vec<f32>>>,
        mut apply: impl FnMut(&mut S, &[Vec<f32>]) -> Result<()>,
        mut committed: impl FnMut(&StepReport),
    ) -> Result<()> {
        if self.config.steps.is_none() {
            return Err(Error::invalid(
                "the run would not end: set DdpConfig::steps, or call step and finish",
            ));
        }
        while !self.is_finished() {
            if self.is_drained() {
                return self.leave();
            }
            committed(&self.step(state, &mut compute, &mut apply)?);
        }
        self.finish(state)
    }

    /// One step whose gradients are made while earlier ones already travel: `compute(state, micro_batch, sink)` runs once per micro-batch
    /// and pushes the gradients as the backward pass makes them; slots that it leaves out count as zero. Buckets are dealt for the last
    /// parameter's first; after the first step, for the order in which they came in it, on average over the contributors.
    /// `apply` gets the averages, a tensor per slot, in the memory that they were reduced in. Both run where and when, and errors are as, in [`step`](Self::step).
    pub fn step_with<S: State>(
        &mut self,
        state: &mut S,
        compute: impl FnMut(&mut S, u32, &mut Sink<'_>) -> Result<()>,
        apply: impl FnOnce(&mut S, &[Tensor]) -> Result<()>,
    ) -> Result<StepReport> {
        self.run(state, Run::Buckets, compute, |state, averages| {
            apply(state, &averages)?;
            Ok(averages)
        })
    }

    /// True once the configured number of steps is done, or the others have closed the run; only `finish` is left to call.
    pub fn is_finished(&self) -> bool {
        self.steps.is_finished(self.current_step())
    }

    /// True once an operator has told this replica to drain and the step with which it was told has committed: only [`leave`](Self::leave)
    /// is left to call.
    pub fn is_drained(&self) -> bool {
        self.replica.draining() && self.steps.is_running()
    }

    /// Leaves between two steps, while the other replicas go on. Errors: `InvalidState` if it has left; those of the group's end, after which it may be
    /// called again.
    pub fn leave(&mut self) -> Result<()> {
        if self.steps.has_left() {
            return self.steps.check();
        }
        self.steps.close()?;
        self.replica.leave(deadline_in(Duration::from_secs(5)))?;
        self.steps.left();
        Ok(())
    }

    /// Ends the run: a closing round without data, in which a replica that is behind still heals, so that all end
    /// bitwise equal; then leaves. Without `DdpConfig::steps`, all replicas must call it after the same step; one that comes back in that round is told
    /// ([`is_finished`](Self::is_finished)). After an error that can be retried it may be called again.
    ///
    /// Errors: those of [`step`](Self::step); `InvalidState` if the run has ended already.
    pub fn finish<S: State>(&mut self, state: &mut S) -> Result<()> {
        if self.steps.has_left() {
            return self.steps.check();
        }
        if self.steps.closing_is_due(self.current_step()) {
            self.run(state, Run::Closing, |_, _, _| Ok(()), |_, averages| Ok(averages))?;
        }
        self.steps.close()?;
        self.replica.leave(deadline_in(Duration::from_secs(5)))?;
        self.steps.left();
        Ok(())
    }

    /// `apply` gives its tensors back, for the next step.
    fn run<S: State>(
        &mut self,
        state: &mut S,
        kind: Run,
        mut compute: impl FnMut(&mut S, u32, &mut Sink<'_>) -> Result<()>,
        apply: impl FnOnce(&mut S, Vec<Tensor>) -> Result<Vec<Tensor>>,
    ) -> Result<StepReport> {
        self.steps.begin(kind == Run::Closing)?;
        let deadline = deadline_in(self.config.step_timeout);
        let mut failed_attempts = 0;
        let mut healed = None;
        loop {
            let step = self.replica.current_step();
            let is_last = self.steps.is_last(step);
            self.replica.set_last(is_last);
            let overlaps = kind == Run::Buckets && !is_last && failed_attempts == 0 && self.may_overlap();
            let clock = UnderWay::default();
            let mut under_way = None;
            if overlaps && self.replica.begin_quorum(deadline)? {
                let (works, buckets) = match self.gradients(kind, None, state, &clock, &mut compute) {
                    Ok(made) => made,
                    Err(error) => {
                        // What was sent of it belongs to no step.
                        self.replica.abandon_quorum();
                        return Err(error);
                    }
                };
                // Forgotten if this replica heals now.
                self.steps.keep_ahead(step, buckets);
                under_way = works;
            }
            let mut whole = Whole {
                state,
                feedback: self.feedback.as_deref(),
                plan: &mut self.plan,
                steps: &mut self.steps,
                own: false,
            };
            let participation = self.replica.start_quorum(&mut whole, deadline)?;
            let share = Share {
                step: participation.step,
                contributor_rank: participation
                    .contributor_rank
                    .filter(|_| participation.contributes),
                contributors: participation.contributors,
            };
            if participation.closes {
                self.steps.closes_with(participation.step);
            }
            let sends = self.steps.joined(&share)?;
            if participation.healed.is_some() {
                healed = participation.healed.clone();
            }
            let closing = sends == Sends::Nothing;
            if let Some(feedback) = &self.feedback {
                feedback.begin("gradients");
            }
            let works = match sends {
                Sends::Again if under_way.is_some() => under_way.take().unwrap_or_default(),
                Sends::Nothing => Vec::new(),
                Sends::Zeros => {
                    let learns = self.learns(kind);
                    self.plan.send_zeros(&mut self.replica, learns, &clock)
                }
                Sends::Again => {
                    let again = |b| average(&mut self.spare, &mut self.replica, &clock, b);
                    self.steps.kept().into_iter().flatten().map(again).collect()
                }
                Sends::Fresh => {
                    let part = Some(participation.clone());
                    let (works, buckets) = self.gradients(kind, part, state, &clock, &mut compute)?;
                    self.steps.keep(&share, buckets);
                    works.unwrap_or_default()
                }
            };
            if let Some(f) = self.on_reduce.as_mut().filter(|_| !closing) {
                f(participation.step, participation.epoch);
            }
            let begun = Instant::now();
            let averages = self.collect(works);
            let waited = begun.elapsed();
            let committed = match self.replica.should_commit(deadline) {
                Ok(yes) => yes,
                Err(e) if e.is_retryable() => false,
                Err(e) => return Err(e),
            };
            if let Some(feedback) = &self.feedback {
                feedback.end(committed);
            }
            if committed {
                // The step has advanced: what goes wrong from here on leaves a state that is of no step.
                let applied = averages
                    .ok_or_else(reduction_missing)
                    .and_then(|(mut averages, n)| {
                        if !closing {
                            let positions = self.plan.positions(&mut averages);
                            let room = std::mem::take(&mut self.averages);
                            let in_place = kind == Run::Buckets;
                            let (gradients, lent) = self.plan.unpack(averages, room, in_place)?;
                            positions.map_or(Ok(()), |means| self.plan.learn(&means))?;
                            self.averages = apply(state, gradients)?;
                            self.spare.keep(lent.whole_again(&mut self.averages));
                        }
                        Ok(n)
                    });
                self.buckets = self.steps.take_kept().unwrap_or_default();
                let contributors = self.steps.applied(applied)?;
                return Ok(StepReport {
                    step: participation.step,
                    epoch: participation.epoch,
                    members: participation.members.len(),
                    contributors,
                    failed_attempts,
                    healed,
                    reducing: clock.total(),
                    waited,
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

    /// Whether a step may begin before its quorum stands. A new replica heals at its first quorum. The state that error feedback owes changes with
    /// what is sent, and so does a share of the data that follows from the quorum.
    fn may_overlap(&self) -> bool {
        self.config.overlap_quorum
            && self.steps.is_running()
            && !self.config.samples_by_contributor
            && self.feedback.is_none()
    }

    /// Whether the step tells the order in which gradients come: the same on all replicas, since it follows from the state. All at once have none,
    /// and what error feedback owes is of buckets that stay as they are.
    fn learns(&self, kind: Run) -> bool {
        kind == Run::Buckets && self.plan.is_new() && self.feedback.is_none()
    }

    /// Computes the gradients of a step and sends them as they are made, if they count: what is under way then, and the buckets. Without a
    /// `participation` the quorum was begun.
    fn gradients<S: State>(
        &mut self,
        kind: Run,
        participation: Option<Participation>,
        state: &mut S,
        clock: &UnderWay,
        compute: &mut impl FnMut(&mut S, u32, &mut Sink<'_>) -> Result<()>,
    ) -> Result<(Option<Vec<ManagedWork>>, Vec<Tensor>)> {
        let (n, learns) = (self.config.micro_batches, self.learns(kind));
        let (plan, room) = (&self.plan, std::mem::take(&mut self.buckets));
        let sends = (&mut self.spare, clock);
        let mut sink = Sink::new(&mut self.replica, plan, sends, participation, n, room, learns);
        for micro_batch in 0..n {
            if micro_batch > 0 {
                sink.next_micro_batch();
            }
            compute(state, micro_batch, &mut sink)?;
        }
        sink.finish()
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

fn reduction_missing() -> Error {
    Error::new(
        ErrorKind::Internal,
        "a step was committed although a reduction failed",
    )
}
