//! What a step of data parallel takes beside the backward pass: two replicas as threads over gloo with a lighthouse of their own; the backward pass
//! is a pause for each layer, as where a device computes, and its gradients are pushed as they are made.
//!
//! `cargo run --release -p oxccl-ddp --example step_cost [MILLION_PARAMETERS] [COMPUTE_MS] [STEPS]`

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a measurement ends with its first error"
)]

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, Result, Tensor};
use manager::{Manager, ManagerConfig};
use oxccl_ddp::{Ddp, DdpConfig, Sink, Slot};
use replica::{State, StateDict};

const REPLICAS: u8 = 2;
const LAYERS: u32 = 16;

/// The number of steps; the model itself is never read.
struct Steps(i64);

impl State for Steps {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("steps", &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_i64s("steps")?[0];
        Ok(())
    }
}

/// Of each step but the first ones: its time beside the pauses, and the part of it that the gradients took to be pushed.
fn train(
    name: String,
    lighthouse: String,
    layer: usize,
    compute: Duration,
    steps: usize,
) -> Vec<(Duration, Duration)> {
    let group = backend_gloo::GlooGroup::new(&name, GroupOptions::default()).unwrap();
    let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, lighthouse)).unwrap();
    let slots = vec![Slot::f32(layer); LAYERS as usize];
    let mut ddp = Ddp::new(manager, &slots, DdpConfig::default()).unwrap();
    let gradient = vec![1.0f32; layer];
    let mut state = Steps(0);
    let mut times = Vec::new();
    for _ in 0..steps + 3 {
        let begun = Instant::now();
        let (mut pausing, mut pushing) = (Duration::ZERO, Duration::ZERO);
        let backward = |_: &mut Steps, _: u32, sink: &mut Sink<'_>| {
            (0..slots.len()).rev().try_for_each(|slot| {
                let begun = Instant::now();
                std::thread::sleep(compute / LAYERS);
                pausing += begun.elapsed();
                let begun = Instant::now();
                sink.push(slot, &gradient)?;
                pushing += begun.elapsed();
                Ok(())
            })
        };
        let apply = |steps: &mut Steps, averages: &[Tensor]| {
            assert!(
                averages
                    .iter()
                    .all(|a| a.as_slice::<f32>().is_ok_and(|a| a[0] == 1.0))
            );
            steps.0 += 1;
            Ok(())
        };
        ddp.step_with(&mut state, backward, apply).unwrap();
        times.push((begun.elapsed() - pausing, pushing));
    }
    ddp.finish(&mut state).unwrap();
    times.split_off(3)
}

fn thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::Builder::new()
        .name("ox-replica".into())
        .spawn(body)
        .unwrap()
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|a| a.parse::<u64>().unwrap());
    let mut next = |or| numbers.next().unwrap_or(or);
    let (millions, compute) = (next(25), Duration::from_millis(next(200)));
    let steps = usize::try_from(next(20)).unwrap().max(1);
    let layer = usize::try_from(millions * 1_000_000 / u64::from(LAYERS))
        .unwrap()
        .max(1);
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: REPLICAS.into(),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let replicas: Vec<JoinHandle<_>> = (0..REPLICAS)
        .map(|r| {
            let lighthouse = lighthouse.address();
            thread(move || train(format!("r{r}"), lighthouse, layer, compute, steps))
        })
        .collect();
    println!("{millions} million parameters in {LAYERS} layers, {compute:?} of computing, {steps} steps");
    for (r, replica) in replicas.into_iter().enumerate() {
        let (mut whole, mut pushing): (Vec<_>, Vec<_>) = replica.join().unwrap().into_iter().unzip();
        whole.sort();
        pushing.sort();
        let (whole, pushing) = (whole[steps / 2], pushing[steps / 2]);
        println!(
            "replica {r}: the median step takes {whole:.2?} beside computing, {pushing:.2?} of it to push gradients"
        );
    }
}
