//! The engine: rounds of one fragment each, overlapped with inner steps, that survive members dying in the middle.
//!
//! Inner steps are counted within a round of H / P steps. At count `H/P − τ` the round is *begun*: quorum (healing this
//! replica if it is behind), then the fragment's outer gradient `global − local` goes into an averaging all-reduce. At
//! count `H/P` it is *finished*: vote; on a yes the fragment's own outer optimizer moves the global copy and the local
//! parameters take `α · local + (1 − α) · global`. On a no nothing is applied: the round begins again at once in a new
//! quorum, with the outer gradient that was kept, until it commits (the parameters are as they were: L13).
//!
//! With *eager updates* (arXiv 2502.12996) a round is begun where the one before it is finished, and overlaps with all inner
//! steps up to the next: see [`DilocoConfig::eager`] for what the local parameters are meanwhile.
//!
//! What is due when, and what goes out, is decided by [`protocol::training::Rounds`], which knows no parameters, replicas or clock; here it is done. An error leaves what was due to
//! the next call.
//!
//! What a quantised group owes of earlier rounds (`feedback`) follows the rounds: a commit keeps what the round changed, anything
//! else forgets it.
//!
//! Step 0 is the initial synchronisation: no data moves but the state of one replica, so that all start bitwise equal.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    DType, Device, Epoch, Error, ErrorKind, ReduceOp, Result, Step, Traffic, deadline_in, time_left,
};
use protocol::training::{Due, Rounds, Sends};
use quant::ErrorFeedback;
use replica::{Healed, Participation, Replica, Spare, State, write_commit};

use crate::backup::Keeper;
use crate::params::ParametersHash;
use crate::state::{Fragment, Whole};
use crate::{DilocoConfig, FragmentPlan, Parameters};

use reduced::{Reduced, Scratch, Stepping};

mod outer;
mod reduced;
mod resume;

/// What a finished round was like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundReport {
    /// The step that was committed (0 is the initial synchronisation).
    pub step: Step,
    /// The epoch in which it was committed.
    pub epoch: Epoch,
    /// The members of that quorum.
    pub members: usize,
    /// How many replicas' outer gradients were averaged; 0 for rounds without data.
    pub contributors: u32,
    /// Attempts that did not commit before this one.
    pub failed_attempts: u32,
    /// The recovery of this replica in this round, if there was one.
    pub healed: Option<Healed>,
    /// Time spent in quorums, healing and waiting, over all attempts.
    pub sync: Duration,
    /// The parameters here are no longer what this round ended with: the next round has begun in the same call, and in its quorum this
    /// replica has taken over another's state.
    pub superseded: bool,
}

/// `step 7 by 2 replicas, healed from replica rank 1 (800 bytes in 4 ms)`.
impl fmt::Display for RoundReport {
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

/// DiLoCo over a [`Replica`] and [`Parameters`]. See the crate for the protocol.
///
/// ```
/// # extern crate replica as oxccl_replica;
/// use ftcore::Result;
/// use oxccl_diloco::{Diloco, DilocoConfig, Parameters as _, SliceParameters};
/// use oxccl_replica::Replica;
///
/// /// Twenty rounds; the state beside the parameters is the number of inner steps.
/// fn train(replica: impl Replica, params: SliceParameters) -> Result<String> {
///     let mut diloco = Diloco::new(replica, params, DilocoConfig::for_rounds(20))?;
///     let inner_step = |params: &mut SliceParameters, step: &mut i64| {
///         *step += 1;
///         params.for_each_mut(|_, weights| weights.iter_mut().for_each(|w| *w += 0.1 * (1.0 - *w)))
///     };
///     diloco.train(&mut 0, inner_step, |round| println!("{round}"))?;
///     diloco.global_hash()
/// }
/// ```
pub struct Diloco<R, P> {
    replica: R,
    params: P,
    config: DilocoConfig,
    plan: FragmentPlan,
    fragments: Vec<Fragment>,
    /// What this replica's rank owes, of a group with error feedback.
    feedback: Option<Arc<ErrorFeedback>>,
    /// With the outer gradient of the round in flight, flat over the fragment's parameters.
    rounds: Rounds<Vec<f32>>,
    /// The reductions in flight: their outer step is made beside the inner steps, or where the round ends.
    stepping: Stepping,
    spare: Spare,
    scratch: Scratch,
    /// This replica's part in the round in flight.
    participation: Option<Participation>,
    /// Rounds that were committed in a call that ended with an error afterwards, or in this one.
    reports: Vec<RoundReport>,
    healed: Option<Healed>,
    sync: Duration,
    failed_attempts: u32,
    before_reduce: Option<Box<dyn FnMut(Step) + Send>>,
    on_reduce: Option<Box<dyn FnMut(Step, Epoch) + Send>>,
}

impl<R: Replica, P: Parameters> Diloco<R, P> {
    /// Takes over `params` (handles of them: the training loop goes on changing them between calls) and validates
    /// everything. The fragments are made of layers, which the parameters' names tell ([`FragmentPlan::by_name`]). Memory for backup copies is taken
    /// here, all of it.
    ///
    /// Errors: `InvalidArgument` with what to change; why the parameters' device cannot have backup copies, if they are to lie there.
    pub fn new(replica: R, params: P, config: DilocoConfig) -> Result<Self> {
        let plan = FragmentPlan::by_name(&params, config.fragments, config.pattern)?;
        Self::with_fragments(replica, params, config, plan)
    }

    /// As [`new`](Self::new), where `layer_of(name)` gives a parameter's layer. Errors: as there.
    pub fn with_layers(
        replica: R,
        params: P,
        config: DilocoConfig,
        layer_of: &dyn Fn(&str) -> usize,
    ) -> Result<Self> {
        let plan = FragmentPlan::by_layer(&params, config.fragments, config.pattern, layer_of)?;
        Self::with_fragments(replica, params, config, plan)
    }

    /// As [`new`](Self::new), with the fragments of `plan`; as many as [`DilocoConfig::fragments`] says. Errors: as there, and `InvalidArgument` for
    /// another number.
    pub fn with_fragments(replica: R, params: P, config: DilocoConfig, plan: FragmentPlan) -> Result<Self> {
        config.validate()?;
        if plan.len() != config.fragments {
            let text = format!(
                "{} fragments are given; DilocoConfig::fragments is {}",
                plan.len(),
                config.fragments
            );
            return Err(Error::invalid(text));
        }
        plan.check(&params)?;
        let keeper = Keeper::new(config.backup, &params)?;
        let mut fragments = Vec::with_capacity(plan.len());
        for f in 0..plan.len() {
            let copy = || keeper.copy(&params, plan.members(f));
            fragments.push(Fragment {
                global: copy()?,
                base: if config.eager { Some(copy()?) } else { None },
                optimizer: config.outer.build().into(),
            });
        }
        let rounds = Rounds::new(config.rules());
        Ok(Self {
            replica,
            params,
            config,
            plan,
            fragments,
            feedback: None,
            rounds,
            stepping: Stepping::default(),
            spare: Spare::default(),
            scratch: Scratch::default(),
            participation: None,
            reports: Vec::new(),
            healed: None,
            sync: Duration::ZERO,
            failed_attempts: 0,
            before_reduce: None,
            on_reduce: None,
        })
    }

    /// Lets the rounds keep and pay what `residuals`, those of the quantised group under the replica, owe: they are part of the
    /// state from then on. All replicas of a run do so, or none. Call it before `begin`.
    #[must_use]
    pub fn with_error_feedback(mut self, residuals: Arc<ErrorFeedback>) -> Self {
        self.feedback = Some(residuals);
        self
    }

    /// The parameters.
    pub fn params(&self) -> &P {
        &self.params
    }

    /// The parameters for an inner step.
    pub fn params_mut(&mut self) -> &mut P {
        &mut self.params
    }

    /// The replica, to ask for its step or traffic.
    pub fn replica(&self) -> &R {
        &self.replica
    }

    /// Calls `f(step)` right before a round's all-reduces are handed to the group, at every attempt. With a quantised group that rounds
    /// at random, `f` is `QuantizedGroup::start_round`: what is drawn then follows from the step alone, and a round that is done again, or a
    /// run that goes on after it was stopped, sends the same bytes.
    pub fn before_reduce(&mut self, f: impl FnMut(Step) + Send + 'static) {
        self.before_reduce = Some(Box::new(f));
    }

    /// Calls `f(step, epoch)` whenever a round's all-reduce has been handed to the group, for progress displays.
    pub fn on_reduce(&mut self, f: impl FnMut(Step, Epoch) + Send + 'static) {
        self.on_reduce = Some(Box::new(f));
    }

    /// Bytes moved so far.
    pub fn traffic(&self) -> Traffic {
        self.replica.traffic()
    }

    /// The number of committed rounds, the initial synchronisation included.
    pub fn step(&self) -> Step {
        self.replica.current_step()
    }

    /// Where the backup copies lie: host memory, or the parameters' device.
    pub fn backup_device(&self) -> &Device {
        self.fragments
            .first()
            .map_or(&Device::CPU, |fragment| fragment.global.device())
    }

    /// A hash over the global parameters: bitwise equal on all replicas of the same step.
    ///
    /// Errors: those of a device that holds the copies; `InvalidState` if the state is of no step.
    pub fn global_hash(&self) -> Result<String> {
        self.rounds.check_state()?;
        let mut hash = ParametersHash::default();
        for (i, fragment, slot) in self.slots() {
            fragment.global.read(slot, &mut |values| {
                hash.add(self.params.name(i), values);
                Ok(())
            })?;
        }
        Ok(hash.finish())
    }

    /// Where the global copy of each parameter is, in the order of the parameters: its number, fragment and slot.
    fn slots(&self) -> Vec<(usize, &Fragment, usize)> {
        let mut all = Vec::with_capacity(self.params.len());
        for (f, fragment) in self.fragments.iter().enumerate() {
            let members = self.plan.members(f).iter().enumerate();
            all.extend(members.map(|(slot, &i)| (i, fragment, slot)));
        }
        all.sort_by_key(|(i, _, _)| *i);
        all
    }

    /// Runs `f` with the parameters set to the global ones (what one evaluates and ships), then puts the local ones back.
    ///
    /// Errors: those of a device that holds parameters or copies; if the local ones cannot be put back, the state is of no step.
    /// `InvalidState` if it is already.
    pub fn with_global<T>(&mut self, f: impl FnOnce(&P) -> T) -> Result<T> {
        self.rounds.check_state()?;
        let mut locals = Vec::with_capacity(self.params.len());
        for i in 0..self.params.len() {
            self.params.read(i, &mut |v| locals.push(v.to_vec()))?;
        }
        let result = self.show_global(None).map(|()| f(&self.params));
        for (i, values) in locals.iter().enumerate() {
            let back = self.params.write(i, &mut |p| p.copy_from_slice(values));
            self.rounds.written(back)?;
        }
        result
    }

    /// Sets the parameters to the global ones, of all fragments but one.
    fn show_global(&mut self, but: Option<usize>) -> Result<()> {
        for (n, fragment) in self.fragments.iter().enumerate().filter(|(n, _)| Some(*n) != but) {
            for (slot, &i) in self.plan.members(n).iter().enumerate() {
                let params = &mut self.params;
                fragment.global.read(slot, &mut |values| {
                    params.write(i, &mut |p| p.copy_from_slice(values))
                })?;
            }
        }
        Ok(())
    }

    /// The number of the fragment of round `step`.
    fn fragment_at(&self, step: Step) -> usize {
        usize::try_from(step.0 - 1).unwrap_or(0) % self.plan.len().max(1)
    }

    fn whole<'a>(&'a mut self, inner: &'a mut dyn State, own: bool) -> Whole<'a, P> {
        Whole {
            params: &mut self.params,
            plan: &self.plan,
            outer: self.config.outer,
            fragments: &mut self.fragments,
            rounds: &mut self.rounds,
            feedback: self.feedback.as_deref(),
            bucket_elements: self.config.bucket_elements,
            own,
            inner,
        }
    }

    /// Joins the job: the initial synchronisation of a new one, healing into a running one, or the place where a restored one
    /// was stopped. Call it once, before the first inner step. Returns the committed rounds (several if this replica healed and
    /// had no inner steps to make).
    ///
    /// Errors: those of [`after_inner_step`](Self::after_inner_step); after one that can be retried, call it again. `InvalidState` if the run
    /// has begun.
    pub fn begin(&mut self, inner: &mut dyn State) -> Result<Vec<RoundReport>> {
        self.rounds.begin()?;
        self.drive(inner)?;
        self.rounds.begun();
        Ok(std::mem::take(&mut self.reports))
    }

    /// True if the next [`after_inner_step`](Self::after_inner_step) may wait for other replicas.
    pub fn next_step_syncs(&self) -> bool {
        self.rounds.next_step_syncs()
    }

    /// The whole run: [`begin`](Self::begin), inner steps until it [is finished](Self::is_finished), then [`finish`](Self::finish); a replica that an
    /// operator drains leaves instead. `inner_step` makes one step on the parameters; `committed` gets the report of each round.
    ///
    /// Errors: `InvalidArgument` without `DilocoConfig::rounds`, as the run would not end; those of `inner_step` and of the calls above. An error
    /// ends the run: a program that goes on after one that can be retried makes the calls itself.
    pub fn train<S: State>(
        &mut self,
        inner: &mut S,
        mut inner_step: impl FnMut(&mut P, &mut S) -> Result<()>,
        mut committed: impl FnMut(&RoundReport),
    ) -> Result<()> {
        if self.config.rounds.is_none() {
            return Err(Error::invalid(
                "the run would not end: set DilocoConfig::rounds, or call begin, after_inner_step and finish",
            ));
        }
        self.begin(inner)?.iter().for_each(&mut committed);
        while !self.is_finished() {
            if self.is_drained() {
                return self.leave();
            }
            inner_step(&mut self.params, inner)?;
            self.after_inner_step(inner)?.iter().for_each(&mut committed);
        }
        self.finish(inner)
    }

    /// To be called after every inner step. Begins and finishes rounds as they fall due; returns the reports of the rounds
    /// that committed: at most one, or two at the end of a run with eager updates.
    ///
    /// Errors: a quorum that did not come about, or a round that did not commit within `round_timeout`: nothing is lost then, and the next call
    /// goes on with what was due and counts no inner step, so make none before it. `InvalidState` before `begin`, after the last round, or if
    /// the state is of no step. What else cannot be retried.
    pub fn after_inner_step(&mut self, inner: &mut dyn State) -> Result<Vec<RoundReport>> {
        self.rounds.check_state()?;
        self.replica.progress();
        self.rounds.inner_step()?;
        self.drive(inner)?;
        Ok(std::mem::take(&mut self.reports))
    }

    /// True once the configured number of rounds is done, or the others have closed the run; only `finish` is left to call.
    pub fn is_finished(&self) -> bool {
        self.rounds.is_finished()
    }

    /// True once an operator has told this replica to drain, the round with which it was told has committed and none is in flight: only
    /// [`leave`](Self::leave) is left to call.
    pub fn is_drained(&self) -> bool {
        self.replica.draining() && self.participation.is_none()
    }

    /// Leaves between two rounds, while the other replicas go on. Inner steps that no round has sent yet are lost. Errors: `InvalidState`
    /// before `begin`, or if it has left; those of the group's end, after which it may be called again.
    pub fn leave(&mut self) -> Result<()> {
        self.rounds.leave()?;
        self.replica.leave(deadline_in(Duration::from_secs(5)))?;
        self.rounds.left();
        Ok(())
    }

    /// Ends the run: a closing round without data, in which a replica that is behind still heals, so that all end
    /// bitwise equal; then leaves. Without `DilocoConfig::rounds`, all replicas must call it after the same round; one that comes back in the closing
    /// round is told ([`is_finished`](Self::is_finished)).
    ///
    /// Errors: those of [`after_inner_step`](Self::after_inner_step); after one that can be retried, call it again. `InvalidState` if the run
    /// has ended.
    pub fn finish(&mut self, inner: &mut dyn State) -> Result<()> {
        self.rounds.close()?;
        self.drive(inner)?;
        self.replica.leave(deadline_in(Duration::from_secs(5)))?;
        self.rounds.left();
        Ok(())
    }

    /// Does what is due. Each round has its own time limit.
    fn drive(&mut self, inner: &mut dyn State) -> Result<()> {
        let mut deadline = deadline_in(self.config.round_timeout);
        while let Some(due) = self.rounds.due() {
            match due {
                Due::Send => self.send(inner, deadline)?,
                Due::Finish => {
                    if self.finish_attempt(deadline)? {
                        if self.is_drained() && self.rounds.may_leave() {
                            // No round begins that this replica would leave in the middle.
                            return Ok(());
                        }
                        deadline = deadline_in(self.config.round_timeout);
                    }
                }
            }
        }
        Ok(())
    }

    fn quorum(&mut self, inner: &mut dyn State, deadline: Instant) -> Result<(Participation, Sends)> {
        let begun = Instant::now();
        let is_last = self.rounds.is_last(self.replica.current_step());
        self.replica.set_last(is_last);
        // A round that a replica misses costs more than a transfer that the others wait for.
        self.replica.set_joins_at_once(true);
        let mut whole = Whole {
            params: &mut self.params,
            plan: &self.plan,
            outer: self.config.outer,
            fragments: &mut self.fragments,
            rounds: &mut self.rounds,
            feedback: self.feedback.as_deref(),
            bucket_elements: self.config.bucket_elements,
            own: false,
            inner,
        };
        let participation = self.replica.start_quorum(&mut whole, deadline);
        if self.rounds.drops_inherited() {
            let dropped = self.start_at_global();
            self.rounds.written(dropped)?;
        }
        let participation = participation?;
        if participation.closes {
            self.rounds.closes_with(participation.step);
        }
        let sends = self.rounds.joined(participation.step)?;
        if participation.healed.is_some() {
            self.healed = participation.healed.clone();
            self.reports
                .iter_mut()
                .for_each(|report| report.superseded = true);
        }
        self.sync += begun.elapsed();
        Ok((participation, sends))
    }

    /// Quorum, then the outer gradient of the step's fragment goes out.
    fn send(&mut self, inner: &mut dyn State, deadline: Instant) -> Result<()> {
        let (participation, sends) = self.quorum(inner, deadline)?;
        self.stepping = Stepping::default();
        if sends != Sends::Nothing {
            self.reduce(&participation, sends == Sends::Fresh)?;
        }
        self.participation = Some(participation);
        self.rounds.sent();
        Ok(())
    }

    /// Hands the outer gradient of the participation's step to the group: a new one, or the one that was kept.
    fn reduce(&mut self, participation: &Participation, is_new: bool) -> Result<()> {
        let step = participation.step;
        let fragment = self.fragment_at(step);
        if is_new {
            let values = self.outer_gradient(fragment)?;
            self.rounds.keep(step, values);
        }
        if let Some(feedback) = &self.feedback {
            feedback.begin(&format!("fragment.{fragment}"));
        }
        if let Some(f) = &mut self.before_reduce {
            f(step);
        }
        let values = self.rounds.kept().map_or(&[][..], Vec::as_slice);
        let mut works = Vec::with_capacity(values.len().div_ceil(self.config.bucket_elements));
        for bucket in values.chunks(self.config.bucket_elements) {
            let mut copy = self.spare.take(&self.replica, DType::F32, bucket.len());
            copy.as_mut_slice()?.copy_from_slice(bucket);
            works.push(self.replica.all_reduce(vec![copy], ReduceOp::Avg));
        }
        if self.config.eager && is_new {
            // Before anything that may fail and be called again: the repetition sends the gradient that was kept and does not come here, and the next
            // round's gradient begins where this one looks ahead to. The step beside takes copies of what this leaves as it is.
            let share = own_share(participation);
            let own: Vec<f32> = values.iter().map(|g| g * share).collect();
            let ahead = self.look_ahead(fragment, &own);
            self.rounds.written(ahead)?;
        }
        let values = self.rounds.kept().map_or(0, Vec::len);
        let overlaps = self.config.delay > 0 || self.config.eager;
        self.stepping = match self.fragments.get(fragment).filter(|_| overlaps) {
            Some(state) => Stepping::beside(works, values, state, &mut self.scratch)?,
            None => Stepping::Later(works),
        };
        if let Some(f) = &mut self.on_reduce {
            f(step, participation.epoch);
        }
        Ok(())
    }

    /// Waits for what was sent, votes, and applies it on a yes. On a no the round is to be done again; true if it was committed.
    fn finish_attempt(&mut self, deadline: Instant) -> Result<bool> {
        let begun = Instant::now();
        let reduced = self.collect();
        let vote = self.replica.should_commit(deadline);
        self.sync += begun.elapsed();
        let committed = matches!(vote, Ok(true));
        if let Some(feedback) = &self.feedback {
            feedback.end(committed);
        }
        let Some(participation) = self.participation.take().filter(|_| committed) else {
            self.rounds.lost();
            self.failed_attempts += 1;
            return match vote {
                Err(e) if !e.is_retryable() => Err(e),
                _ if time_left(deadline).is_zero() => Err(Error::timeout(format!(
                    "step {} did not commit in {} attempts within {:?}",
                    self.step(),
                    self.failed_attempts,
                    self.config.round_timeout
                ))),
                _ => Ok(false),
            };
        };
        // The step has advanced: what goes wrong from here on leaves a state that is of no step.
        let applied = match reduced {
            Some(reduced) => {
                let contributors = reduced.contributors;
                self.outer_step(self.fragment_at(participation.step), reduced)
                    .map(|()| contributors)
            }
            None => Err(Error::new(
                ErrorKind::Internal,
                "a step was committed although a reduction failed",
            )),
        };
        let gradient = self.rounds.take_kept();
        self.scratch.keep(gradient.into_iter());
        let contributors = self.rounds.applied(applied)?;
        let report = self.report(&participation, contributors);
        self.reports.push(report);
        Ok(true)
    }

    fn report(&mut self, participation: &Participation, contributors: u32) -> RoundReport {
        RoundReport {
            step: participation.step,
            epoch: participation.epoch,
            members: participation.members.len(),
            contributors,
            failed_attempts: std::mem::take(&mut self.failed_attempts),
            healed: self.healed.take(),
            sync: std::mem::take(&mut self.sync),
            superseded: false,
        }
    }

    /// What came of the round's reductions, or `None` if any failed.
    fn collect(&mut self) -> Option<Reduced> {
        let expected = self.rounds.kept().map_or(0, Vec::len);
        match std::mem::take(&mut self.stepping).end(expected, &mut self.scratch) {
            Ok(mut reduced) => {
                self.spare.keep(std::mem::take(&mut reduced.buckets));
                Some(reduced)
            }
            Err(error) => {
                self.replica.report_error(error);
                None
            }
        }
    }
}

/// This replica's part of the mean that is on its way.
fn own_share(participation: &Participation) -> f32 {
    if participation.contributes {
        1.0 / participation.contributors.max(1) as f32
    } else {
        0.0
    }
}
