//! One replica of `train_ddp`: a small classifier on the real 8×8 digits, under fault-tolerant data parallel.

use std::time::Duration;

use ddp::DdpConfig;
use diloco::optim::AdamW;
use ftcore::Result;
use oxccl_candle::candle_error;

use crate::data_parallel::{Model, train};
use crate::digits::{Digits, Mlp, MlpConfig};
use crate::drive::NetArgs;
use crate::program::Training;
use crate::replica::Place;
use crate::resume::CheckpointArgs;

/// How to train.
#[derive(Debug, Clone, clap::Args)]
pub struct DdpArgs {
    /// Steps to commit.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(i64).range(1..))]
    pub steps: i64,
    /// Images per batch and replica; its ranks share them.
    #[arg(long, default_value_t = 32)]
    pub batch: usize,
    /// The classifier.
    #[command(flatten)]
    pub model: MlpConfig,
    /// Learning rate of AdamW.
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f32,
    /// Seed of weights, split and batches.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl Training for DdpArgs {
    const PROGRAM: &'static str = "train_ddp";
    const ABOUT: &'static str =
        "Fault-tolerant data parallel on the 8x8 digits: trains, kills a replica, heals it, reports";
    const EXAMPLES: &'static str = "\
  train_ddp
  train_ddp --replicas 3 --kill 0@100
  train_ddp --ranks-per-replica 2 --kill 1/1@100
  oxccl launch --credentials job1 --lighthouse https://HOST:29510 --total-replicas 2 --first-replica 0 -- train_ddp replica --bind 0.0.0.0:0";

    fn to_args(&self) -> Vec<String> {
        let pairs: [(&str, String); 6] = [
            ("--steps", self.steps.to_string()),
            ("--batch", self.batch.to_string()),
            ("--hidden", self.model.hidden.to_string()),
            ("--layers", self.model.layers.to_string()),
            ("--lr", self.lr.to_string()),
            ("--seed", self.seed.to_string()),
        ];
        pairs.into_iter().flat_map(|(k, v)| [k.to_string(), v]).collect()
    }

    fn trajectory(&self) -> Result<Vec<String>> {
        // More steps only go on for longer.
        let args = self.to_args();
        let pairs = args
            .chunks(2)
            .filter(|pair| pair.first().is_none_or(|k| k != "--steps"));
        Ok(pairs.map(|pair| pair.join(" ")).collect())
    }

    fn check(&self, replicas: usize, ranks: usize) -> Result<usize> {
        let batch =
            Digits::embedded(self.seed)?.batch(replicas.saturating_sub(1), replicas, 0, self.batch)?;
        if ranks > 1 {
            batch.part(0, ranks)?;
        }
        Ok(Mlp::new(self.model, self.seed)?.params().total())
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

    fn replica(&self, net: &NetArgs, checkpoints: &CheckpointArgs) -> Result<()> {
        run(self, net, checkpoints)
    }
}

fn run(args: &DdpArgs, net: &NetArgs, checkpoints: &CheckpointArgs) -> Result<()> {
    let mut place = Place::take(net)?;
    let (shard, replicas) = (place.env.replica as usize, place.env.replicas as usize);
    let digits = Digits::embedded(args.seed)?;
    let model = Mlp::new(args.model, args.seed)?;
    let identity = args.identity(net, place.env.ranks)?;
    let manager = place.manager(net, checkpoints, &identity, args.steps)?;
    // Two buckets or more, so that a step has an inside to be killed in. What leaves last is hidden behind nothing: a sixteenth.
    let defaults = DdpConfig::default();
    let bucket = (model.params().total() / 16).clamp(1 << 12, defaults.bucket_elements);
    let config = DdpConfig {
        first_bucket_elements: bucket / 4,
        bucket_elements: bucket,
        steps: Some(args.steps),
        step_timeout: Duration::from_secs(300),
        ..defaults
    };
    let optimizer = AdamW::new(args.lr, 0.01);
    let params = model.params().clone();
    train(
        &mut place,
        manager,
        Model { params, optimizer },
        config,
        |_| args.lr,
        |step, ranks, segments| {
            let batch = digits.batch(shard, replicas, step, args.batch)?;
            let batch = if ranks.are_several() {
                batch.part(ranks.rank(), ranks.size())?
            } else {
                batch
            };
            Ok((model.loss_in(segments, &batch)?, batch.len()))
        },
        || {
            let test = digits.test();
            let held_out = model
                .loss(test)?
                .to_scalar::<f32>()
                .map_err(|e| candle_error("reading the loss", e))?;
            Ok((held_out, Some(model.accuracy(test)?)))
        },
    )
}
