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
//! What a quantised group owes of earlier rounds (`feedback`) follows the rounds: a commit keeps what the round changed, anything
//! else forgets it.
//!
//! Step 0 is the initial synchronisation: no data moves but the state of one replica, so that all start bitwise equal.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Device, Error, ErrorKind, ReduceOp, Result, Tensor, Traffic, deadline_in, time_left};
use manager::{Healed, ManagedWork, Participation, Replica, State};
use quant::ErrorFeedback;

use crate::backup::Keeper;
use crate::feedback::Feedback;
use crate::params::ParametersHash;
use crate::state::{Fragment, Whole};
use crate::{DilocoConfig, FragmentPlan, Parameters};

mod outer;
mod resume;

use resume::Resumed;

/// What a finished round was like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundReport {
    /// The step that was committed (0 is the initial synchronisation).
    pub step: i64,
    /// The epoch in which it was committed.
    pub epoch: i64,
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
    /// The parameters here are no longer what this round ended with: with eager updates the next round has begun, and in its quorum this
    /// replica has taken over another's state.
    pub superseded: bool,
}

/// The part that a round works on, kept until it commits.
struct Round {
    fragment: usize,
    /// The outer gradient, flat over the fragment's parameters: needed again if the round has to be repeated.
    gradient: Vec<f32>,
    works: Vec<ManagedWork>,
    participation: Participation,
}

/// DiLoCo over a [`Replica`] and [`Parameters`]. See the crate for the protocol.
pub struct Diloco<R, P> {
    replica: R,
    params: P,
    config: DilocoConfig,
    plan: FragmentPlan,
    fragments: Vec<Fragment>,
    feedback: Feedback,
    /// Inner steps made in the current round.
    count: u64,
    /// Why the state is of no step, if it was written in part only: a device failed.
    torn: Option<Error>,
    round: Option<Round>,
    resumed: Option<Resumed>,
    closing: bool,
    healed: Option<Healed>,
    sync: Duration,
    failed_attempts: u32,
    before_reduce: Option<Box<dyn FnMut(i64) + Send>>,
    on_reduce: Option<Box<dyn FnMut(i64, i64) + Send>>,
}

impl<R: Replica, P: Parameters> Diloco<R, P> {
    /// Takes over `params` (handles of them: the training loop goes on changing them between calls) and validates
    /// everything. `layer_of(name)` gives a parameter's layer, for the fragments. Memory for backup copies is taken here, all of it.
    ///
    /// Errors: `InvalidArgument` with what to change; why the parameters' device cannot have backup copies, if they are to lie there.
    pub fn new(
        replica: R,
        params: P,
        config: DilocoConfig,
        layer_of: &dyn Fn(&str) -> usize,
    ) -> Result<Self> {
        config.validate()?;
        let plan = FragmentPlan::by_layer(&params, config.fragments, config.pattern, layer_of)?;
        let keeper = Keeper::new(config.backup, &params)?;
        let mut fragments = Vec::with_capacity(plan.len());
        for f in 0..plan.len() {
            let copy = || keeper.copy(&params, plan.members(f));
            fragments.push(Fragment {
                global: copy()?,
                base: if config.eager { Some(copy()?) } else { None },
                optimizer: config.outer.build(),
            });
        }
        Ok(Self {
            replica,
            params,
            config,
            plan,
            fragments,
            feedback: Feedback::default(),
            count: 0,
            torn: None,
            round: None,
            resumed: None,
            closing: false,
            healed: None,
            sync: Duration::ZERO,
            failed_attempts: 0,
            before_reduce: None,
            on_reduce: None,
        })
    }

    /// Lets the rounds keep and pay what `debts`, those of the quantised group under the replica, owe: they are part of the
    /// state from then on. All replicas of a run do so, or none. Call it before `begin`.
    #[must_use]
    pub fn with_error_feedback(mut self, debts: Arc<ErrorFeedback>) -> Self {
        self.feedback = Feedback::new(debts);
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
    pub fn before_reduce(&mut self, f: impl FnMut(i64) + Send + 'static) {
        self.before_reduce = Some(Box::new(f));
    }

    /// Calls `f(step, epoch)` whenever a round's all-reduce has been handed to the group, for progress displays.
    pub fn on_reduce(&mut self, f: impl FnMut(i64, i64) + Send + 'static) {
        self.on_reduce = Some(Box::new(f));
    }

    /// Bytes moved so far.
    pub fn traffic(&self) -> Traffic {
        self.replica.traffic()
    }

    /// The number of committed rounds, the initial synchronisation included.
    pub fn step(&self) -> i64 {
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
    /// Errors: only those of a device that holds the copies.
    pub fn global_hash(&self) -> Result<String> {
        let mut hash = ParametersHash::default();
        for (i, fragment, slot) in self.homes() {
            fragment.global.read(slot, &mut |values| {
                hash.add(self.params.name(i), values);
                Ok(())
            })?;
        }
        Ok(hash.finish())
    }

    /// Where the global copy of each parameter is, in the order of the parameters: its number, fragment and slot.
    fn homes(&self) -> Vec<(usize, &Fragment, usize)> {
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
    /// Errors: only those of a device that holds parameters or copies; if the local ones cannot be put back, the state is of no step.
    pub fn with_global<T>(&mut self, f: impl FnOnce(&P) -> T) -> Result<T> {
        let mut locals = Vec::with_capacity(self.params.len());
        for i in 0..self.params.len() {
            self.params.read(i, &mut |v| locals.push(v.to_vec()))?;
        }
        let result = self.show_global().map(|()| f(&self.params));
        for (i, values) in locals.iter().enumerate() {
            let back = self.params.write(i, &mut |p| p.copy_from_slice(values));
            if let Err(e) = &back {
                self.torn = Some(e.clone());
            }
            back?;
        }
        result
    }

    /// Sets the parameters to the global ones.
    fn show_global(&mut self) -> Result<()> {
        for (n, fragment) in self.fragments.iter().enumerate() {
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
    fn fragment_at(&self, step: i64) -> usize {
        usize::try_from(step - 1).unwrap_or(0) % self.plan.len().max(1)
    }

    fn whole<'a>(&'a mut self, inner: &'a mut dyn State, own: bool) -> Whole<'a, P> {
        Whole {
            params: &mut self.params,
            plan: &self.plan,
            outer: self.config.outer,
            fragments: &mut self.fragments,
            count: &mut self.count,
            feedback: &self.feedback,
            bucket_elements: self.config.bucket_elements,
            own,
            torn: &mut self.torn,
            inner,
        }
    }

    /// Joins the job: the initial synchronisation of a new one, healing into a running one, or the place where a restored one
    /// was stopped. Call once, before the first inner step. Returns the committed rounds (several if this replica healed and
    /// had no inner steps to make).
    pub fn begin(&mut self, inner: &mut dyn State) -> Result<Vec<RoundReport>> {
        match self.resumed.take() {
            Some(Resumed { gradient: Some(kept) }) => {
                let step = self.step();
                let participation = self.quorum(inner, deadline_in(self.config.round_timeout))?;
                self.send(participation, Some((step, kept)))?;
            }
            Some(_) if self.step() > 0 => return Ok(Vec::new()),
            _ => self.begin_round(inner)?,
        }
        let mut reports = Vec::new();
        while self.is_due() {
            reports.push(self.finish_round(inner)?);
            // Healed at the end of its source's round: the next one begins there.
            if self.config.eager && self.step() > 1 && !self.is_finished() {
                self.begin_round(inner)?;
            }
        }
        Ok(reports)
    }

    /// How many inner steps into a round its fragment is sent.
    fn send_at(&self) -> u64 {
        self.config.round_steps() - self.config.delay
    }

    /// True if the round in flight has nothing left to overlap with.
    fn is_due(&self) -> bool {
        match &self.round {
            // The initial synchronisation and the closing round have no inner steps; neither has what follows the
            // last round.
            Some(round) if round.gradient.is_empty() => true,
            Some(round) if self.config.eager && self.config.rounds == Some(round.participation.step) => true,
            Some(_) => self.count >= self.config.round_steps(),
            None => false,
        }
    }

    /// True if the next [`after_inner_step`](Self::after_inner_step) may wait for other replicas.
    pub fn next_step_syncs(&self) -> bool {
        let next = self.count + 1;
        next >= self.config.round_steps() || (self.round.is_none() && next >= self.send_at())
    }

    /// To be called after every inner step. Begins and finishes rounds as they fall due; returns the reports of the rounds
    /// that committed in this call: at most one, or two at the end of a run with eager updates.
    ///
    /// Errors: only what cannot be retried, or a round that did not commit within `round_timeout`.
    pub fn after_inner_step(&mut self, inner: &mut dyn State) -> Result<Vec<RoundReport>> {
        self.count += 1;
        let mut reports = Vec::new();
        if self.config.eager {
            if self.count < self.config.round_steps() {
                return Ok(reports);
            }
            if self.round.is_some() {
                reports.push(self.finish_round(inner)?);
            }
            self.count = 0;
            self.begin_round(inner)?;
            if let Some(finished) = reports.last_mut() {
                finished.superseded = self.healed.is_some();
            }
        } else if self.round.is_none() && self.count >= self.send_at() {
            self.begin_round(inner)?;
        }
        if self.is_due() {
            reports.push(self.finish_round(inner)?);
        }
        Ok(reports)
    }

    /// True once the configured number of rounds is done and closed; only `finish` is left to call.
    pub fn is_finished(&self) -> bool {
        self.config.rounds.is_some_and(|last| self.step() > last)
    }

    /// Ends the run: a closing round without data, in which a replica that is behind still heals, so that all end
    /// bitwise equal; then says good-bye. Without `DilocoConfig::rounds`, all replicas must call it after the same round.
    pub fn finish(&mut self, inner: &mut dyn State) -> Result<()> {
        while self.round.is_some() {
            self.finish_round(inner)?;
        }
        // A replica that healed right into the closing round has been through it already.
        if self.config.rounds.is_none_or(|last| self.step() <= last + 1) {
            self.closing = true;
            self.begin_round(inner)?;
            self.finish_round(inner)?;
        }
        self.replica.leave(deadline_in(Duration::from_secs(5)))
    }

    fn quorum(&mut self, inner: &mut dyn State, deadline: Instant) -> Result<Participation> {
        self.check_whole()?;
        let begun = Instant::now();
        let mut whole = Whole {
            params: &mut self.params,
            plan: &self.plan,
            outer: self.config.outer,
            fragments: &mut self.fragments,
            count: &mut self.count,
            feedback: &self.feedback,
            bucket_elements: self.config.bucket_elements,
            own: false,
            torn: &mut self.torn,
            inner,
        };
        let participation = self.replica.start_quorum(&mut whole, deadline)?;
        // A recovery that failed is a lost vote for the replica; with half of it written nobody may go on from here (INV-5).
        self.check_whole()?;
        if participation.healed.is_some() {
            self.healed = participation.healed.clone();
        }
        self.sync += begun.elapsed();
        Ok(participation)
    }

    /// Errors: `InvalidState` if the state here is of no step.
    fn check_whole(&self) -> Result<()> {
        let Some(why) = &self.torn else {
            return Ok(());
        };
        let text = format!(
            "this replica's state was written in part only and is of no step ({}): start the replica again, so that it heals",
            why.message()
        );
        Err(Error::new(ErrorKind::InvalidState, text).with_source(why.clone()))
    }

    /// Quorum, then the outer gradient of the step's fragment goes out.
    fn begin_round(&mut self, inner: &mut dyn State) -> Result<()> {
        let participation = self.quorum(inner, deadline_in(self.config.round_timeout))?;
        self.send(participation, None)
    }

    /// Hands the gradient of the participation's step to the group. `kept` is the step and gradient of an earlier
    /// attempt, used again if that is still the step and this replica did not heal.
    fn send(&mut self, participation: Participation, kept: Option<(i64, Vec<f32>)>) -> Result<()> {
        let step = participation.step;
        if step == 0 || self.closing || self.config.rounds.is_some_and(|last| step > last) {
            self.round = Some(Round {
                fragment: 0,
                gradient: Vec::new(),
                works: Vec::new(),
                participation,
            });
            return Ok(());
        }
        let fragment = self.fragment_at(step);
        let (gradient, is_new) = match kept {
            Some((of, g)) if step == of && participation.healed.is_none() && !g.is_empty() => (g, false),
            _ => (self.outer_gradient(fragment)?, true),
        };
        self.feedback.begin(fragment);
        if let Some(f) = &mut self.before_reduce {
            f(step);
        }
        let works = gradient
            .chunks(self.config.bucket_elements)
            .map(|bucket| {
                self.replica
                    .allreduce(vec![Tensor::from_slice(bucket)], ReduceOp::Avg)
            })
            .collect();
        if let Some(f) = &mut self.on_reduce {
            f(step, participation.epoch);
        }
        let share = if participation.contributes {
            1.0 / participation.replica_world_size.max(1) as f32
        } else {
            0.0
        };
        let own: Option<Vec<f32>> =
            (self.config.eager && is_new).then(|| gradient.iter().map(|g| g * share).collect());
        self.round = Some(Round {
            fragment,
            gradient,
            works,
            participation,
        });
        let Some(own) = own else {
            return Ok(());
        };
        let ahead = self.look_ahead(fragment, &own);
        if let Err(e) = &ahead {
            self.torn = Some(e.clone());
        }
        ahead
    }

    /// Waits, votes and applies; repeats the round in a new quorum until it commits.
    fn finish_round(&mut self, inner: &mut dyn State) -> Result<RoundReport> {
        let deadline = deadline_in(self.config.round_timeout);
        loop {
            let Some(mut round) = self.round.take() else {
                return Err(Error::new(ErrorKind::InvalidState, "no round is in flight"));
            };
            let begun = Instant::now();
            let step = round.participation.step;
            let mean = collect(&mut round, &mut self.replica);
            let committed = match self.replica.should_commit(deadline) {
                Ok(yes) => yes,
                Err(e) if e.is_retryable() => false,
                Err(e) => return Err(e),
            };
            self.feedback.end(committed);
            self.sync += begun.elapsed();
            match (committed, mean) {
                (true, Some((mean, contributors))) => {
                    self.apply(round.fragment, &mean)?;
                    return Ok(self.report(&round.participation, contributors));
                }
                (true, None) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        "a step was committed although a reduction failed",
                    ));
                }
                (false, _) => {}
            }
            self.failed_attempts += 1;
            if time_left(deadline).is_zero() {
                return Err(Error::timeout(format!(
                    "step {step} did not commit in {} attempts within {:?}",
                    self.failed_attempts, self.config.round_timeout
                )));
            }
            let gradient = std::mem::take(&mut round.gradient);
            let participation = self.quorum(inner, deadline)?;
            // A replica that healed here may stand before the end of its source's round. The others wait for nobody's
            // inner steps, so it too goes straight to the end of the round.
            self.send(participation, Some((step, gradient)))?;
        }
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
}

/// The mean outer gradient and the least number of contributors, or `None` if any bucket failed.
fn collect<R: Replica>(round: &mut Round, replica: &mut R) -> Option<(Vec<f32>, u32)> {
    let mut mean = Vec::with_capacity(round.gradient.len());
    let mut contributors = u32::MAX;
    for work in round.works.drain(..) {
        let bucket = work.take().and_then(|done| {
            contributors = contributors.min(done.contributors);
            done.into_tensor()?.into_vec::<f32>().map_err(Error::from)
        });
        match bucket {
            Ok(values) => mean.extend(values),
            Err(e) => {
                replica.report_error(e);
                return None;
            }
        }
    }
    if mean.len() != round.gradient.len() {
        let text = format!(
            "the buckets returned {} of {} values",
            mean.len(),
            round.gradient.len()
        );
        replica.report_error(Error::new(ErrorKind::Internal, text));
        return None;
    }
    Some((mean, if contributors == u32::MAX { 0 } else { contributors }))
}
