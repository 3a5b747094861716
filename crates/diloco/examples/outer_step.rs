//! What rounds of Streaming DiLoCo take of the training thread: the time in `after_inner_step`, as a share of the round. Two replicas as threads
//! over gloo with a lighthouse of their own; an inner step is a pause, as where a device computes, and changes a few values of each tensor.
//!
//! `cargo run --release -p oxccl-diloco --example outer_step [MILLION_PARAMETERS] [STEP_MS] [H] [P] [DELAY] [ROUNDS]`

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a measurement ends with its first error"
)]

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::GroupOptions;
use manager::{Manager, ManagerConfig};
use oxccl_diloco::{Diloco, DilocoConfig, Parameters as _, SliceParameters};

const REPLICAS: u8 = 2;
const LAYERS: usize = 16;

/// The time of each round in calls, of all rounds but the first two of each fragment, which find no memory of earlier ones, and a hash.
fn train(
    name: String,
    lighthouse: String,
    layer: usize,
    step: Duration,
    config: DilocoConfig,
) -> (Vec<Duration>, String) {
    let group = backend_gloo::GlooGroup::new(&name, GroupOptions::default()).unwrap();
    let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, lighthouse)).unwrap();
    let layers = (0..LAYERS).map(|l| (format!("layer.{l}.weight"), vec![0.0; layer]));
    let mut diloco = Diloco::new(manager, SliceParameters::new(layers.collect()), config.clone()).unwrap();
    let mut made = 0i64;
    diloco.begin(&mut made).unwrap();
    let mut rounds = Vec::new();
    let mut lost = Duration::ZERO;
    while !diloco.is_finished() {
        std::thread::sleep(step);
        made += 1;
        let params = diloco.params_mut();
        params
            .for_each_mut(|_, weights| weights.iter_mut().step_by(4096).for_each(|w| *w += 1.0))
            .unwrap();
        let begun = Instant::now();
        let committed = diloco.after_inner_step(&mut made).unwrap();
        lost += begun.elapsed();
        rounds.extend(committed.iter().map(|_| std::mem::take(&mut lost)));
    }
    diloco.finish(&mut made).unwrap();
    rounds.drain(..(2 * config.fragments).min(rounds.len()));
    (rounds, diloco.global_hash().unwrap())
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
    let millions = next(100);
    let step = Duration::from_millis(next(250));
    let config = DilocoConfig {
        sync_every: next(100),
        fragments: usize::try_from(next(4)).unwrap(),
        delay: next(1),
        ..DilocoConfig::for_rounds(0)
    };
    let measured = i64::try_from(next(6)).unwrap();
    let fragments = i64::try_from(config.fragments).unwrap();
    let config = DilocoConfig {
        rounds: Some(measured + 2 * fragments),
        ..config
    };
    let layer = usize::try_from(millions * 1_000_000).unwrap() / LAYERS;
    let round = step * u32::try_from(config.sync_every / config.fragments as u64).unwrap();
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: REPLICAS.into(),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let replicas: Vec<JoinHandle<_>> = (0..REPLICAS)
        .map(|r| {
            let (lighthouse, config) = (lighthouse.address(), config.clone());
            thread(move || train(format!("r{r}"), lighthouse, layer, step, config))
        })
        .collect();
    let ended: Vec<_> = replicas.into_iter().map(|r| r.join().unwrap()).collect();
    assert!(
        ended.iter().all(|(_, hash)| *hash == ended[0].1),
        "unequal parameters"
    );
    println!(
        "{millions} million parameters, H {}, P {}, delay {}, steps of {step:?}: a round lasts {round:?}",
        config.sync_every, config.fragments, config.delay
    );
    for (r, (mut rounds, _)) in ended.into_iter().enumerate() {
        rounds.sort();
        let share = |d: Duration| 100.0 * d.as_secs_f64() / round.as_secs_f64();
        let (median, most) = (rounds[rounds.len() / 2], rounds[rounds.len() - 1]);
        println!(
            "replica {r}: {} rounds, of each the median {median:.1?} in calls ({:.2} %), at most {most:.1?} ({:.2} %)",
            rounds.len(),
            share(median),
            share(most)
        );
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find(|line| line.starts_with("VmHWM"));
    println!("memory of both: {}", peak.unwrap_or("unknown"));
}
