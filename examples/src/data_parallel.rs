//! Fault-tolerant data-parallel training of a candle model: the loop of `train_ddp`, and of `train_diloco --data-parallel`.
//!
//! Per step a quorum; then loss and gradients of this replica's batch on the state that it has after it, averaged with those of the other
//! contributors, and one step of AdamW on what a healing replica would take over (`Whole`).

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use checkpoint::StateDict;
use ddp::{Ddp, DdpConfig, Slot};
use diloco::optim::{AdamW, Optimizer};
use diloco::parameters_hash;
use ftcore::{Error, Result};
use manager::{Manager, Participation, State};
use oxccl::launch::{EventKind, EventSender, ReplicaState};
use oxccl_candle::{ParamSet, candle_error};

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

fn hash(params: &ParamSet) -> Result<String> {
    let values = (0..params.len())
        .map(|i| params.with_slice(i, <[f32]>::to_vec))
        .collect::<Result<Vec<_>>>()?;
    Ok(parameters_hash(
        params.names().zip(values.iter().map(Vec::as_slice)),
    ))
}

/// All gradients, in the order of the parameters.
pub(crate) fn gradients(params: &ParamSet, grads: &GradStore) -> Result<Vec<Vec<f32>>> {
    (0..params.len())
        .map(|i| params.with_grad(grads, i, <[f32]>::to_vec))
        .collect()
}

/// Trains to the last step of `config` and reports. `loss_of(step, ranks)` gives the loss of this rank's part of the replica's batch and how
/// many samples (or tokens) it had, `lr_at(step)` the learning rate, `evaluate` the held-out loss and accuracy at the end.
pub fn train(
    place: &mut Place,
    manager: InStep<Manager>,
    model: Model,
    config: DdpConfig,
    lr_at: impl Fn(u64) -> f32,
    mut loss_of: impl FnMut(u64, &Ranks) -> Result<(Tensor, usize)>,
    evaluate: impl FnOnce() -> Result<(f32, Option<f32>)>,
) -> Result<()> {
    let last = config.steps.unwrap_or(0);
    let slots: Vec<Slot> = (0..model.params.len())
        .map(|i| Slot::f32(model.params.numel(i)))
        .collect();
    let mut ddp = Ddp::new(manager, &slots, config)?;
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
    let mut recent = RecentLoss::default();
    if let Some(checkpoints) = &mut place.checkpoints
        && let Some(saved) = checkpoints.take(&mut recent)?
    {
        ddp.restore(&saved, &mut whole)?;
    }
    whole.events = place.events.clone();
    while !ddp.is_finished() && !ddp.is_drained() {
        place.step.store(ddp.current_step(), Ordering::Release);
        let (begun, mut computing) = (Instant::now(), Duration::ZERO);
        let compute = |whole: &mut Whole, now: &Participation| {
            let begun = Instant::now();
            place.step.store(now.step, Ordering::Release);
            let (loss, samples) = loss_of(whole.step, &place.ranks)?;
            let grads = loss
                .backward()
                .map_err(|e| candle_error("the backward pass", e))?;
            let mut value = loss
                .to_scalar::<f32>()
                .map_err(|e| candle_error("reading the loss", e))?;
            let params = &whole.model.params;
            params.check_grads(&grads)?;
            let mut gradients = gradients(params, &grads)?;
            place.ranks.average(&mut gradients, &mut value)?;
            recent.push(value);
            place.inner_step(begun, whole.step, value, samples);
            computing += begun.elapsed();
            Ok(gradients)
        };
        let report = ddp.step(&mut whole, compute, |whole, averages| {
            let Model { params, optimizer } = &mut whole.model;
            optimizer.lr = lr_at(whole.step);
            optimizer.begin_step();
            for (i, g) in averages.iter().enumerate() {
                params.with_slice_mut(i, |w| optimizer.update(i, w, g))??;
            }
            whole.step += 1;
            Ok(())
        })?;
        let (sync, traffic) = (begun.elapsed().saturating_sub(computing), ddp.traffic());
        place.committed(
            report.step,
            report.epoch,
            report.members,
            report.contributors,
            report.healed.as_ref(),
            sync,
            Some(hash(&whole.model.params)?),
            traffic,
        )?;
        let (step, is_last) = (ddp.current_step(), ddp.is_finished() || ddp.is_drained());
        if let Some(checkpoints) = place.checkpoints.as_ref().filter(|c| c.is_due(step, is_last)) {
            let state = ddp.save(&mut whole)?;
            checkpoints.offer(ddp.replica().manager(), step, state, &recent)?;
        }
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
        hash(&whole.model.params)?,
        held_out,
        recent.mean(),
        ddp.traffic(),
    )
}
