//! Fault-tolerant data-parallel training of a candle model: the loop of `train_ddp`, and of `train_diloco --data-parallel`.
//!
//! Per step loss and gradients of this replica's batch, averaged with those of the other contributors, and one step of AdamW on what a
//! healing replica would take over (`Whole`). The backward pass goes in segments: the quorum is found, and the gradients of the last layers travel, while
//! those of the first ones are computed.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use checkpoint::StateDict;
use ddp::{Ddp, DdpConfig, Sink, StepReport};
use diloco::Parameters as _;
use diloco::optim::{AdamW, Optimizer};
use ftcore::{Error, Result, Step};
use manager::{Manager, State};
use oxccl::launch::{EventKind, EventSender, ReplicaState};
use oxccl_candle::{ParamSet, Segments, candle_error};

use crate::drive::note;
use crate::ranks::{InStep, Ranks};
use crate::replica::{Place, RecentLoss};

/// What is trained, besides the data.
pub struct Model {
    /// The parameters, which the loop updates in place.
    pub params: ParamSet,
    /// The optimizer.
    pub optimizer: AdamW,
}

/// Everything that a healing replica takes over.
struct Whole {
    model: Model,
    step: u64,
    events: EventSender,
}

impl State for Whole {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        let params = &self.model.params;
        for i in 0..params.len() {
            let name = format!("param/{}", params.name(i));
            params.with_slice(i, |w| out.insert_f32(name, &[w.len()], w))??;
        }
        out.insert_i64s("step", &[i64::try_from(self.step).unwrap_or(i64::MAX)])?;
        self.model.optimizer.save("optimizer", out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.events.send(EventKind::State {
            state: ReplicaState::Healing,
        });
        let params = &self.model.params;
        let values = (0..params.len())
            .map(|i| from.get_f32_shaped(&format!("param/{}", params.name(i)), &[params.numel(i)]))
            .collect::<Result<Vec<_>>>()?;
        let step = from
            .get_i64s("step")?
            .first()
            .and_then(|s| u64::try_from(*s).ok());
        self.step = step.ok_or_else(|| Error::invalid("step is missing or negative"))?;
        self.model.optimizer.load("optimizer", from)?;
        for (i, v) in values.iter().enumerate() {
            self.model.params.with_slice_mut(i, |w| w.copy_from_slice(v))?;
        }
        Ok(())
    }
}

/// The steps before this one are not timed: memory is new then, and replicas come one after the other.
const WARM_UP: i64 = 10;

/// What the steps took.
#[derive(Default)]
struct Times {
    /// Since the end of the last step of the warm-up.
    since: Option<Instant>,
    steps: u32,
    samples: usize,
    computing: Duration,
    pushing: Duration,
    reducing: Duration,
    waited: Duration,
}

impl Times {
    /// Counts a step that has committed, of `samples` on this replica.
    fn count(&mut self, report: &StepReport, samples: usize, computing: Duration, pushing: Duration) {
        if report.step + 1 == Step(WARM_UP) {
            self.since = Some(Instant::now());
        } else if self.since.is_some() {
            self.steps += 1;
            self.samples += samples;
            self.computing += computing;
            self.pushing += pushing;
            self.reducing += report.reducing;
            self.waited += report.waited;
        }
    }

    /// One line; nothing without steps.
    fn line(&self) -> Option<String> {
        let whole = self.since?.elapsed();
        let ms = |all: Duration| all.as_secs_f64() * 1e3 / f64::from(self.steps);
        let hidden = self.reducing.saturating_sub(self.waited);
        (self.steps > 0).then(|| {
            format!(
                "{:.1} samples/s in {} steps; of the {:.2} ms of one, {:.2} computing, {:.2} handing gradients over, {:.2} waiting for \
                 the rest; gradients were under way for {:.2} ms, {:.2} of them hidden",
                self.samples as f64 / whole.as_secs_f64(),
                self.steps,
                ms(whole),
                ms(self.computing),
                ms(self.pushing),
                ms(self.waited),
                ms(self.reducing),
                ms(hidden)
            )
        })
    }
}

/// Trains to the last step of `config` and reports. `loss_of(step, ranks, segments)` gives the loss of this rank's part of the replica's batch
/// and how many samples (or tokens) it had, `lr_at(step)` the learning rate, `evaluate` the held-out loss and accuracy at the end.
pub fn train(
    place: &mut Place,
    manager: InStep<Manager>,
    model: Model,
    config: DdpConfig,
    lr_at: impl Fn(u64) -> f32,
    mut loss_of: impl FnMut(u64, &Ranks, &mut Segments) -> Result<(Tensor, usize)>,
    evaluate: impl FnOnce() -> Result<(f32, Option<f32>)>,
) -> Result<()> {
    let last = Step(config.steps.unwrap_or(0));
    let mut ddp = Ddp::new(manager, &model.params.slots(), config)?;
    if let Some(residuals) = place.residuals.take() {
        ddp = ddp.with_error_feedback(residuals);
    }
    ddp.on_reduce(place.reduce_begun());
    let mut whole = Whole {
        model,
        step: 0,
        // Only taking over a peer's state is healing.
        events: EventSender::disabled(),
    };
    let (mut recent, mut times) = (RecentLoss::default(), Times::default());
    if let Some(checkpoints) = &mut place.checkpoints
        && let Some(saved) = checkpoints.take(&mut recent)?
    {
        ddp.restore(&saved, &mut whole)?;
    }
    whole.events = place.events.clone();
    while !ddp.is_finished() && !ddp.is_drained() {
        place.step.store(ddp.current_step().0, Ordering::Release);
        let (begun, mut computing, mut pushing) = (Instant::now(), Duration::ZERO, Duration::ZERO);
        let mut samples = 0;
        let compute = |whole: &mut Whole, _: u32, sink: &mut Sink<'_>| {
            let begun = Instant::now();
            place
                .step
                .store(i64::try_from(whole.step).unwrap_or(-1), Ordering::Release);
            let mut segments = Segments::new();
            let (loss, of) = loss_of(whole.step, &place.ranks, &mut segments)?;
            let mut value = loss
                .to_scalar::<f32>()
                .map_err(|e| candle_error("reading the loss", e))?;
            let mut push = |i, gradient: &[f32]| {
                let begun = Instant::now();
                let pushed = sink.push(i, gradient);
                pushing += begun.elapsed();
                pushed
            };
            let params = &whole.model.params;
            if place.ranks.are_several() {
                // They average among themselves first, all of it at once.
                let mut gradients = vec![Vec::new(); params.len()];
                params.backward(&loss, segments, |i, gradient| {
                    if let Some(own) = gradients.get_mut(i) {
                        *own = gradient.to_vec();
                    }
                    Ok(())
                })?;
                place.ranks.average(&mut gradients, &mut value)?;
                let mut all = gradients.iter().enumerate().rev();
                all.try_for_each(|(i, gradient)| push(i, gradient))?;
            } else {
                params.backward(&loss, segments, push)?;
            }
            recent.push(value);
            let took = begun.elapsed().saturating_sub(pushing);
            place.inner_step(took, whole.step, value, of);
            (samples, computing) = (of, computing + took);
            Ok(())
        };
        let report = ddp.step_with(&mut whole, compute, |whole, averages| {
            let Model { params, optimizer } = &mut whole.model;
            optimizer.lr = lr_at(whole.step);
            optimizer.begin_step();
            for (i, g) in averages.iter().enumerate() {
                let g = g.as_slice::<f32>()?;
                params.with_slice_mut(i, |w| optimizer.update(i, w, g))??;
            }
            whole.step += 1;
            Ok(())
        })?;
        let (sync, traffic) = (begun.elapsed().saturating_sub(computing), ddp.traffic());
        let hash = Some(whole.model.params.hash()?);
        place.committed((&report).into(), sync, hash, traffic)?;
        times.count(&report, samples, computing, pushing);
        let (step, is_last) = (ddp.current_step(), ddp.is_finished() || ddp.is_drained());
        if let Some(checkpoints) = place.checkpoints.as_ref().filter(|c| c.is_due(step, is_last)) {
            let state = ddp.save(&mut whole)?;
            checkpoints.offer(ddp.replica().manager(), step, state, &recent)?;
        }
    }
    if let Some(line) = times.line().filter(|_| place.ranks.is_first()) {
        note!("replica {}: {line}", place.env.replica);
    }
    let (state, step) = if ddp.is_finished() {
        ddp.finish(&mut whole)?;
        (ReplicaState::Done, last)
    } else {
        ddp.leave()?;
        (ReplicaState::Drained, ddp.current_step())
    };
    let held_out = evaluate()?;
    place.finished(
        state,
        step,
        whole.model.params.hash()?,
        held_out,
        recent.mean(),
        ddp.traffic(),
    )
}
