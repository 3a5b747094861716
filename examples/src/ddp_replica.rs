//! One replica of `train_ddp`: a small classifier on the real 8×8 digits, under fault-tolerant data parallel.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use ddp::{Ddp, DdpConfig};
use diloco::optim::{AdamW, Optimizer};
use diloco::parameters_hash;
use ftcore::{Error, Result};
use manager::State;
use oxccl::launch::{EventKind, EventSender, ReplicaState};
use oxccl_candle::{ParamSet, candle_error};

use crate::digits::{Digits, Mlp};
use crate::drive::NetArgs;
use crate::program::Training;
use crate::replica::{Place, RecentLoss};

/// How to train.
#[derive(Debug, Clone, clap::Args)]
pub struct DdpArgs {
    /// Steps to commit.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(i64).range(1..))]
    pub steps: i64,
    /// Images per batch and replica.
    #[arg(long, default_value_t = 32)]
    pub batch: usize,
    /// Learning rate of AdamW.
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f32,
    /// Seed of weights, split and batches.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Everything that a healing replica takes over.
struct Whole {
    params: ParamSet,
    optimizer: AdamW,
    step: u64,
    events: EventSender,
}

impl State for Whole {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        for i in 0..self.params.len() {
            let name = format!("param/{}", self.params.name(i));
            self.params
                .with_slice(i, |w| out.insert_f32(name, &[w.len()], w))??;
        }
        out.insert_i64s("step", &[i64::try_from(self.step).unwrap_or(i64::MAX)])?;
        self.optimizer.save("optimizer", out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.events.send(EventKind::State {
            state: ReplicaState::Healing,
        });
        let values = (0..self.params.len())
            .map(|i| from.get_f32_shaped(&format!("param/{}", self.params.name(i)), &[self.params.numel(i)]))
            .collect::<Result<Vec<_>>>()?;
        let step = from
            .get_i64s("step")?
            .first()
            .and_then(|s| u64::try_from(*s).ok());
        self.step = step.ok_or_else(|| Error::invalid("step is missing or negative"))?;
        self.optimizer.load("optimizer", from)?;
        for (i, v) in values.iter().enumerate() {
            self.params.with_slice_mut(i, |w| w.copy_from_slice(v))?;
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

impl Training for DdpArgs {
    const PROGRAM: &'static str = "train_ddp";
    const ABOUT: &'static str =
        "Fault-tolerant data parallel on the 8x8 digits: trains, kills a replica, heals it, reports";
    const EXAMPLES: &'static str = "\
  train_ddp
  train_ddp --replicas 3 --kill 0@100
  oxccl launch --lighthouse http://HOST:29510 --total-replicas 2 --first-replica 0 -- train_ddp replica";

    fn to_args(&self) -> Vec<String> {
        let pairs: [(&str, String); 4] = [
            ("--steps", self.steps.to_string()),
            ("--batch", self.batch.to_string()),
            ("--lr", self.lr.to_string()),
            ("--seed", self.seed.to_string()),
        ];
        pairs.into_iter().flat_map(|(k, v)| [k.to_string(), v]).collect()
    }

    fn check(&self, replicas: usize) -> Result<usize> {
        Digits::embedded(self.seed)?.batch(replicas.saturating_sub(1), replicas, 0, self.batch)?;
        Ok(Mlp::new(self.seed)?.params().total())
    }

    fn steps(&self) -> i64 {
        self.steps
    }

    fn inner_steps(&self) -> u64 {
        self.steps.unsigned_abs()
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn replica(&self, net: &NetArgs) -> Result<()> {
        run(self, net)
    }
}

fn run(args: &DdpArgs, net: &NetArgs) -> Result<()> {
    let mut place = Place::take()?;
    let (shard, replicas) = (place.env.replica as usize, place.env.replicas as usize);
    let digits = Digits::embedded(args.seed)?;
    let model = Mlp::new(args.seed)?;
    let manager = place.manager(net)?;
    // Two buckets or more, so that a step has an inside to be killed in.
    let config = DdpConfig {
        first_bucket_elements: 1 << 10,
        bucket_elements: 1 << 12,
        steps: Some(args.steps),
        step_timeout: Duration::from_secs(300),
    };
    let mut ddp = Ddp::new(manager, config)?;
    let events = place.events.clone();
    ddp.on_reduce(move |step, epoch| {
        let (step, epoch) = (
            u64::try_from(step).unwrap_or(0),
            u64::try_from(epoch).unwrap_or(0),
        );
        events.send(EventKind::ReduceBegin { step, epoch });
    });
    let mut whole = Whole {
        params: model.params().clone(),
        optimizer: AdamW::new(args.lr, 0.01),
        step: 0,
        events: place.events.clone(),
    };
    let mut recent = RecentLoss::default();
    while !ddp.is_finished() {
        let begun = Instant::now();
        let batch = digits.batch(shard, replicas, whole.step, args.batch)?;
        let loss = model.loss(&batch)?;
        let grads = loss
            .backward()
            .map_err(|e| candle_error("the backward pass", e))?;
        let value = loss
            .to_scalar::<f32>()
            .map_err(|e| candle_error("reading the loss", e))?;
        whole.params.check_grads(&grads)?;
        let gradients = (0..whole.params.len())
            .map(|i| whole.params.with_grad(&grads, i, <[f32]>::to_vec))
            .collect::<Result<Vec<_>>>()?;
        recent.push(value);
        place.inner_step(begun, whole.step, value, batch.len());
        place.step.store(ddp.current_step(), Ordering::Release);
        let synced = Instant::now();
        let report = ddp.step(&mut whole, &gradients, |whole, averages| {
            whole.optimizer.begin_step();
            for (i, g) in averages.iter().enumerate() {
                whole
                    .params
                    .with_slice_mut(i, |w| whole.optimizer.update(i, w, g))??;
            }
            whole.step += 1;
            Ok(())
        })?;
        let (sync, hash, traffic) = (synced.elapsed(), hash(&whole.params)?, ddp.traffic());
        let (members, counted) = (report.members, report.contributors);
        place.committed(
            report.step,
            report.epoch,
            members,
            counted,
            report.healed.as_ref(),
            sync,
            hash,
            traffic,
        )?;
    }
    ddp.finish(&mut whole)?;
    let test = digits.test();
    let held_out = model
        .loss(test)?
        .to_scalar::<f32>()
        .map_err(|e| candle_error("reading the loss", e))?;
    let accuracy = model.accuracy(test)?;
    place.finished(
        args.steps,
        hash(&whole.params)?,
        (held_out, Some(accuracy)),
        recent.mean(),
        ddp.traffic(),
    )
}
