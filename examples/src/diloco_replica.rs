//! One replica of `train_diloco`: a byte-level transformer on its shard of a text, under Streaming DiLoCo.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use ddp::DdpConfig;
use diloco::optim::{AdamW, Optimizer};
use diloco::{Backup, Diloco, DilocoConfig, OuterOptimizer, Pattern};
use ftcore::{Error, Result, Step};
use manager::{Manager, State};
use oxccl::launch::{EventKind, EventSender, ReplicaState};
use oxccl_candle::{ParamSet, candle_error};

use crate::data_parallel::{Model, train};
use crate::drive::NetArgs;
use crate::program::Training;
use crate::ranks::InStep;
use crate::replica::{Place, RecentLoss};
use crate::resume::CheckpointArgs;
use crate::text::{Sampler, Text};
use crate::transformer::{Gpt, GptConfig};

/// The text to train on and how.
#[derive(Debug, Clone, clap::Args)]
pub struct DilocoArgs {
    /// A text file of your own (any bytes); default: the Jargon File, which is built in.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Outer steps (rounds) to commit.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(i64).range(1..))]
    pub rounds: i64,
    /// H: inner steps in which every fragment is synchronised once.
    #[arg(long, default_value_t = 16)]
    pub sync_every: u64,
    /// P: fragments of the model, synchronised in turn.
    #[arg(long, default_value_t = 2)]
    pub fragments: usize,
    /// Tau: inner steps between sending a fragment and applying the result.
    #[arg(long, default_value_t = 1)]
    pub delay: u64,
    /// Alpha: share of the local value that is kept when a fragment is applied.
    #[arg(long, default_value_t = 0.5)]
    pub mixing: f32,
    /// Eager updates: a fragment's reduction overlaps with all inner steps of the next round. Needs --delay 0 --mixing 0.
    #[arg(long)]
    pub eager: bool,
    /// Where the backup copies of the parameters lie: host or device. No bit depends on it. (This model's parameters are in host memory,
    /// so that both are the same here.)
    #[arg(long, default_value_t = Backup::Host)]
    pub backup: Backup,
    /// Average the gradients after every inner step instead: the baseline that DiLoCo is compared with. Commits as many
    /// steps as DiLoCo makes inner ones.
    #[arg(long)]
    pub data_parallel: bool,
    /// Learning rate of the outer Nesterov optimizer.
    #[arg(long, default_value_t = 0.4)]
    pub outer_lr: f32,
    /// Momentum of the outer Nesterov optimizer.
    #[arg(long, default_value_t = 0.9)]
    pub outer_momentum: f32,
    /// Peak learning rate of the inner AdamW.
    #[arg(long, default_value_t = 2e-3)]
    pub lr: f32,
    /// Windows per batch and replica; its ranks share them.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
    /// Width of the model.
    #[arg(long, default_value_t = GptConfig::default().d_model)]
    pub d_model: usize,
    /// Blocks of the model.
    #[arg(long, default_value_t = GptConfig::default().layers)]
    pub layers: usize,
    /// Bytes per window.
    #[arg(long, default_value_t = GptConfig::default().seq)]
    pub seq: usize,
    /// Seed of weights and batches.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl DilocoArgs {
    fn config(&self) -> DilocoConfig {
        DilocoConfig {
            sync_every: self.sync_every,
            fragments: self.fragments,
            pattern: Pattern::Strided,
            delay: self.delay,
            mixing: self.mixing,
            eager: self.eager,
            outer: OuterOptimizer::Nesterov {
                lr: self.outer_lr,
                momentum: self.outer_momentum,
            },
            backup: self.backup,
            bucket_elements: 1 << 16,
            rounds: Some(self.rounds),
            round_timeout: Duration::from_secs(300),
        }
    }

    fn text(&self) -> Result<Text> {
        match &self.data {
            Some(path) => Text::open(path),
            None => Text::embedded(),
        }
    }

    fn sampler(&self, replicas: usize) -> Result<Sampler> {
        Sampler::new(self.text()?, replicas, self.batch, self.seq, self.seed)
    }

    fn model(&self) -> Result<Gpt> {
        let shape = GptConfig {
            d_model: self.d_model,
            layers: self.layers,
            seq: self.seq,
            ..GptConfig::default()
        };
        Gpt::new(shape, self.seed)
    }

    /// Warm-up over the first twentieth, then a cosine down to a tenth of the peak.
    fn lr_at(&self, step: u64) -> f32 {
        let total = self.inner_steps().max(1) as f32;
        let (t, warm) = (step as f32, total / 20.0);
        if t < warm {
            return self.lr * (t + 1.0) / (warm + 1.0);
        }
        let x = ((t - warm) / (total - warm)).min(1.0);
        self.lr * (0.1 + 0.9 * 0.5 * (1.0 + (std::f32::consts::PI * x).cos()))
    }
}

/// The inner loop's state: it travels to a healing replica with the parameters.
struct Inner {
    optimizer: AdamW,
    step: u64,
    events: EventSender,
}

impl State for Inner {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("inner/step", &[i64::try_from(self.step).unwrap_or(i64::MAX)])?;
        self.optimizer.save("inner", out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.events.send(EventKind::State {
            state: ReplicaState::Healing,
        });
        let step = from
            .get_i64s("inner/step")?
            .first()
            .and_then(|s| u64::try_from(*s).ok());
        self.step = step.ok_or_else(|| Error::invalid("inner/step is missing or negative"))?;
        self.optimizer.load("inner", from)
    }
}

impl Training for DilocoArgs {
    const PROGRAM: &'static str = "train_diloco";
    const ABOUT: &'static str =
        "Fault-tolerant Streaming DiLoCo on real text: trains, kills a replica, heals it, reports";
    const EXAMPLES: &'static str = "\
  train_diloco                      the whole show, in about a minute
  train_diloco --replicas 3 --kill 0@10
  train_diloco --ranks-per-replica 2 --kill 1/1@20
  train_diloco --no-kill --data book.txt --rounds 80
  oxccl launch --credentials job1 --lighthouse https://HOST:29510 --total-replicas 2 --first-replica 0 -- train_diloco replica --bind 0.0.0.0:0";

    fn to_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        if let Some(path) = &self.data {
            args.extend(["--data".to_string(), path.display().to_string()]);
        }
        if self.eager {
            args.push("--eager".to_string());
        }
        if self.data_parallel {
            args.push("--data-parallel".to_string());
        }
        let pairs: [(&str, String); 14] = [
            ("--rounds", self.rounds.to_string()),
            ("--sync-every", self.sync_every.to_string()),
            ("--fragments", self.fragments.to_string()),
            ("--delay", self.delay.to_string()),
            ("--mixing", self.mixing.to_string()),
            ("--backup", self.backup.to_string()),
            ("--outer-lr", self.outer_lr.to_string()),
            ("--outer-momentum", self.outer_momentum.to_string()),
            ("--lr", self.lr.to_string()),
            ("--batch", self.batch.to_string()),
            ("--d-model", self.d_model.to_string()),
            ("--layers", self.layers.to_string()),
            ("--seq", self.seq.to_string()),
            ("--seed", self.seed.to_string()),
        ];
        args.extend(pairs.into_iter().flat_map(|(k, v)| [k.to_string(), v]));
        args
    }

    fn trajectory(&self) -> Result<Vec<String>> {
        let mut words = self.to_args().into_iter().peekable();
        let mut options = Vec::new();
        while let Some(name) = words.next() {
            match words.next_if(|value| !value.starts_with("--")) {
                // Where copies lie decides nothing of what is computed.
                Some(_) if name == "--backup" => {}
                // The text is known by what it says, wherever its file stands.
                Some(_) if name == "--data" => options.push(format!("--data {}", self.text()?.fingerprint())),
                Some(value) => options.push(format!("{name} {value}")),
                None => options.push(name),
            }
        }
        Ok(options)
    }

    fn check(&self, replicas: usize, ranks: usize) -> Result<usize> {
        self.config().validate()?;
        self.sampler(replicas)?.batch(0, 0)?.part(0, ranks)?;
        let model = self.model()?;
        diloco::FragmentPlan::by_name(model.params(), self.fragments, Pattern::Strided)?;
        Ok(model.params().total())
    }

    fn steps(&self) -> i64 {
        if self.data_parallel {
            i64::try_from(self.inner_steps()).unwrap_or(i64::MAX)
        } else {
            self.rounds
        }
    }

    fn inner_steps(&self) -> u64 {
        self.config().round_steps() * self.rounds.unsigned_abs()
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn replica(&self, net: &NetArgs, checkpoints: &CheckpointArgs) -> Result<()> {
        let mut place = Place::take(net)?;
        let identity = self.identity(net, place.env.ranks)?;
        let manager = place.manager(net, checkpoints, &identity, self.steps())?;
        if self.data_parallel {
            run_data_parallel(self, place, manager)
        } else {
            run(self, place, manager)
        }
    }
}

/// How many batches the held-out loss is the mean of.
const HELD_OUT_BATCHES: usize = 16;
/// Weight decay of the inner AdamW.
const WEIGHT_DECAY: f32 = 0.05;

fn run_data_parallel(args: &DilocoArgs, mut place: Place, manager: InStep<Manager>) -> Result<()> {
    let shard = place.env.replica as usize;
    let sampler = args.sampler(place.env.replicas as usize)?;
    let model = args.model()?;
    let config = DdpConfig {
        steps: Some(args.steps()),
        step_timeout: Duration::from_secs(300),
        ..DdpConfig::default()
    };
    let params = model.params().clone();
    let optimizer = AdamW::new(args.lr, WEIGHT_DECAY);
    train(
        &mut place,
        manager,
        Model { params, optimizer },
        config,
        |step| args.lr_at(step),
        |step, ranks, segments| {
            let batch = sampler.batch(shard, step)?.part(ranks.rank(), ranks.size())?;
            Ok((model.loss_in(segments, &batch)?, batch.tokens().len()))
        },
        || Ok((model.mean_loss(&sampler.held_out(HELD_OUT_BATCHES)?)?, None)),
    )
}

fn run(args: &DilocoArgs, mut place: Place, manager: InStep<Manager>) -> Result<()> {
    let shard = place.env.replica as usize;
    let sampler = args.sampler(place.env.replicas as usize)?;
    let model = args.model()?;
    let params: ParamSet = model.params().clone();
    let mut inner = Inner {
        optimizer: AdamW::new(args.lr, WEIGHT_DECAY),
        step: 0,
        // Only taking over a peer's state is healing.
        events: EventSender::disabled(),
    };
    let mut diloco = Diloco::new(manager, params, args.config())?;
    if let Some(residuals) = place.residuals.take() {
        diloco = diloco.with_error_feedback(residuals);
    }
    diloco.on_reduce(place.reduce_begun());
    let mut recent = RecentLoss::default();
    if let Some(checkpoints) = &mut place.checkpoints
        && let Some(saved) = checkpoints.take(&mut recent)?
    {
        diloco.restore(&saved, &mut inner)?;
    }
    inner.events = place.events.clone();
    let mut reports = diloco.begin(&mut inner)?;
    loop {
        let has_committed = !reports.is_empty();
        for r in reports.drain(..) {
            let traffic = diloco.traffic();
            // What is here now is of another step, if that was healed over.
            let hash = if r.superseded {
                None
            } else {
                Some(diloco.global_hash()?)
            };
            place.committed((&r).into(), r.sync, hash, traffic)?;
        }
        let (step, is_last) = (diloco.step(), diloco.is_finished() || diloco.is_drained());
        if let Some(checkpoints) = place.checkpoints.as_ref()
            && has_committed
            && checkpoints.is_due(step, is_last)
        {
            let state = diloco.save(&mut inner)?;
            checkpoints.offer(diloco.replica().manager(), step, state, &recent)?;
        }
        if is_last {
            break;
        }
        let begun = Instant::now();
        let ranks = place.ranks.clone();
        let batch = sampler
            .batch(shard, inner.step)?
            .part(ranks.rank(), ranks.size())?;
        let loss = model.loss(&batch)?;
        let grads = loss
            .backward()
            .map_err(|e| candle_error("the backward pass", e))?;
        let mut value = loss
            .to_scalar::<f32>()
            .map_err(|e| candle_error("reading the loss", e))?;
        let params = diloco.params_mut();
        params.check_grads(&grads)?;
        inner.optimizer.lr = args.lr_at(inner.step);
        inner.optimizer.begin_step();
        if ranks.are_several() {
            let mut means = params.gradients(&grads)?;
            ranks.average(&mut means, &mut value)?;
            for (i, g) in means.iter().enumerate() {
                params.with_slice_mut(i, |w| inner.optimizer.update(i, w, g))??;
            }
        } else {
            for i in 0..params.len() {
                params.with_slice_mut_and_grad(&grads, i, |w, g| inner.optimizer.update(i, w, g))??;
            }
        }
        inner.step += 1;
        recent.push(value);
        place.inner_step(begun.elapsed(), inner.step, value, batch.tokens().len());
        place.step.store(diloco.step().0, Ordering::Release);
        let syncs = diloco.next_step_syncs();
        if syncs {
            place.events.send(EventKind::State {
                state: ReplicaState::Waiting,
            });
        }
        reports.extend(diloco.after_inner_step(&mut inner)?);
        if syncs {
            place.events.send(EventKind::State {
                state: ReplicaState::Training,
            });
        }
    }
    let (state, rounds) = if diloco.is_finished() {
        diloco.finish(&mut inner)?;
        (ReplicaState::Done, Step(args.rounds))
    } else {
        diloco.leave()?;
        (ReplicaState::Drained, diloco.step())
    };
    let held_out = sampler.held_out(HELD_OUT_BATCHES)?;
    let held_out = diloco.with_global(|_| model.mean_loss(&held_out))??;
    let traffic = diloco.traffic();
    place.finished(
        state,
        rounds,
        diloco.global_hash()?,
        (held_out, None),
        recent.mean(),
        traffic,
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DilocoArgs,
    }

    fn parse(words: &[&str]) -> Result<DilocoArgs, clap::Error> {
        Line::try_parse_from([&["train_diloco"], words].concat()).map(|line| line.args)
    }

    #[test]
    fn where_backup_copies_lie_reaches_the_replicas_and_is_no_other_run() {
        let (host, device) = (parse(&[]).unwrap(), parse(&["--backup", "device"]).unwrap());
        assert_eq!(
            (host.config().backup, device.config().backup),
            (Backup::Host, Backup::Device)
        );
        let words = device.to_args();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_eq!(parse(&words).unwrap().config(), device.config());
        // A run that was stopped goes on with its copies in another place.
        assert_eq!(host.trajectory().unwrap(), device.trajectory().unwrap());
        assert!(!host.trajectory().unwrap().concat().contains("backup"));
        let Err(e) = parse(&["--backup", "disk"]) else {
            panic!("there is no such place")
        };
        assert!(e.to_string().contains("there are host and device"), "{e}");
    }
}
