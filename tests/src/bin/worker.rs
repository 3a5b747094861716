//! A replica that trains a toy problem for real: least squares by SGD, under DiLoCo or data parallel.
//!
//! usage: `worker MODE LIGHTHOUSE NAME SHARD ROUNDS [WIDTH]`
//! MODE is `diloco`, `streaming` or `ddp`. It prints a line for everything that a test wants to know (`oxccl_tests::Said`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "test support: a failure here is a failed test"
)]

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use checkpoint::StateDict;
use ddp::{Ddp, DdpConfig, Slot};
use diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters, parameters_hash};
use ftcore::{GroupOptions, Result};
use manager::{Manager, ManagerConfig, Participation, State};

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A closed pipe means that the test is gone; the kill comes on its own.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// xorshift64*: the same data for the same (seed, step) on every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    }
}

/// Gradient of ‖x·w − x·w*‖² for one random x per layer of the toy model.
fn gradient(params: &SliceParameters, shard: u64, step: u64) -> Vec<Vec<f32>> {
    let mut noise = Noise((shard + 1) * 0x9E37_79B9 + step * 0x85EB_CA6B + 1);
    (0..params.len())
        .map(|i| {
            let w = params.get(i).unwrap();
            let x: Vec<f32> = w.iter().map(|_| noise.next()).collect();
            let error: f32 = w
                .iter()
                .zip(&x)
                .enumerate()
                .map(|(k, (w, x))| (w - (k % 7) as f32) * x)
                .sum();
            x.iter().map(|x| 2.0 * error * x).collect()
        })
        .collect()
}

/// The training loop's own state: where it is in its data.
struct Position {
    step: u64,
}

impl State for Position {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("position/step", &[self.step as i64])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.step = from.get_i64s("position/step")?[0] as u64;
        say(&format!("healed {}", self.step));
        Ok(())
    }
}

fn hash(params: &SliceParameters) -> String {
    parameters_hash((0..params.len()).map(|i| (params.name(i), params.get(i).unwrap())))
}

fn run(args: &[String]) -> Result<()> {
    let [mode, lighthouse, name, shard, rounds, rest @ ..] = args else {
        return Err(ftcore::Error::invalid(
            "usage: worker MODE LIGHTHOUSE NAME SHARD ROUNDS [WIDTH]",
        ));
    };
    let (shard, rounds): (u64, i64) = (shard.parse().unwrap(), rounds.parse().unwrap());
    let width: usize = rest.first().map_or(3001, |w| w.parse().unwrap());
    let params = SliceParameters::new(
        (0..4)
            .map(|l| (format!("layer{l}.w"), vec![0.1 * l as f32; width + 13 * l]))
            .collect(),
    );
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default())?;
    let mut config = ManagerConfig::new(name, lighthouse);
    config.timeout = Duration::from_secs(20);
    say("started");
    let manager = Manager::new(Arc::new(group), config)?;
    let mut position = Position { step: 0 };
    if mode == "ddp" {
        let slots: Vec<Slot> = (0..params.len()).map(|i| Slot::f32(params.count(i))).collect();
        let mut ddp = Ddp::new(
            manager,
            &slots,
            DdpConfig {
                first_bucket_elements: 1000,
                bucket_elements: 4000,
                steps: Some(rounds),
                ..Default::default()
            },
        )?;
        ddp.on_reduce(|step, _| say(&format!("reducing {step}")));
        let mut model = (params, position);
        while !ddp.is_finished() {
            let compute = |(params, position): &mut (SliceParameters, Position), _: &Participation| {
                Ok(gradient(params, shard, position.step))
            };
            let report = ddp.step(&mut model, compute, |(params, position), average| {
                for (i, g) in average.iter().enumerate() {
                    params.write(i, &mut |w| w.iter_mut().zip(g).for_each(|(w, g)| *w -= 1e-3 * g))?;
                }
                position.step += 1;
                Ok(())
            })?;
            say(&format!(
                "committed {} {} {} {}",
                report.step,
                report.epoch,
                report.contributors,
                hash(&model.0)
            ));
        }
        ddp.finish(&mut model)?;
        say(&format!("finished {}", hash(&model.0)));
        return Ok(());
    }
    let streaming = mode == "streaming";
    let config = DilocoConfig {
        sync_every: if streaming { 8 } else { 4 },
        fragments: if streaming { 2 } else { 1 },
        delay: u64::from(streaming),
        mixing: if streaming { 0.5 } else { 0.0 },
        outer: OuterOptimizer::Nesterov {
            lr: 0.7,
            momentum: 0.9,
        },
        bucket_elements: 2000,
        rounds: Some(rounds),
        round_timeout: Duration::from_secs(60),
        ..Default::default()
    };
    let layer = |name: &str| {
        name.bytes()
            .find(u8::is_ascii_digit)
            .map_or(0, |d| usize::from(d - b'0'))
    };
    let mut diloco = Diloco::with_layers(manager, params, config, &layer)?;
    diloco.on_reduce(|step, _| say(&format!("reducing {step}")));
    let mut reports = diloco.begin(&mut position)?;
    loop {
        for report in reports.drain(..) {
            say(&format!(
                "committed {} {} {} {}",
                report.step,
                report.epoch,
                report.contributors,
                diloco.global_hash()?
            ));
        }
        if diloco.is_finished() {
            break;
        }
        let gradients = gradient(diloco.params(), shard, position.step);
        for (i, g) in gradients.iter().enumerate() {
            diloco
                .params_mut()
                .write(i, &mut |w| w.iter_mut().zip(g).for_each(|(w, g)| *w -= 1e-3 * g))?;
        }
        position.step += 1;
        reports.extend(diloco.after_inner_step(&mut position)?);
    }
    diloco.finish(&mut position)?;
    say(&format!("finished {}", diloco.global_hash()?));
    Ok(())
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("OXCCL_LOG").unwrap_or_else(|_| "error".into()),
        )
        .init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(&format!("failed {e}"));
            ExitCode::FAILURE
        }
    }
}
