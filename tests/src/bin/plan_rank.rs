//! A replica of a real run whose efficiency `oxccl plan` foresees: manager, lighthouse and gloo as they are, computing that is slept.
//!
//! usage: `plan_rank RANK WORLD FIRST_ADDRESS OWN_ADDRESS STEP_MS ELEMENTS LAYERS METHOD`, one process on each host; rank 0 serves the lighthouse. METHOD is
//! `ddp`, `ddp-overlap` or `diloco:H:P:TAU:FORMAT`. Prints how many inner steps were measured and how many microseconds they took.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "test support: a failure here is a failed test"
)]

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use coordination::{LighthouseConfig, LighthouseServer};
use ddp::{Ddp, DdpConfig, Sink, Slot};
use diloco::{Backup, Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters};
use ftcore::{GroupOptions, ProcessGroup, Result, Tensor};
use manager::{Manager, ManagerConfig};
use quant::{Codec, QuantizeOptions, QuantizedGroup};

const PORT: u16 = 29_510;
/// Where rank 0 hears that another one has ended.
const ENDS_PORT: u16 = 29_511;
/// DDP: steps before the measured ones, and those.
const STEPS: [u64; 2] = [3, 15];

struct Run {
    name: String,
    lighthouse: String,
    own: String,
    world: u32,
    step: Duration,
    elements: usize,
    layers: usize,
}

fn manager(run: &Run, codec: Option<Codec>) -> Result<Manager> {
    let options = GroupOptions {
        net_name: Some(run.own.clone()),
        ..GroupOptions::default()
    };
    let mut group: Arc<dyn ProcessGroup> = Arc::new(GlooGroup::new(&run.name, options)?);
    if let Some(codec) = codec {
        let options = QuantizeOptions {
            codec: codec.into(),
            ..QuantizeOptions::default()
        };
        group = Arc::new(QuantizedGroup::with_options(group, options)?);
    }
    let mut config = ManagerConfig::new(&run.name, &run.lighthouse);
    config.bind = format!("{}:0", run.own);
    config.min_replicas = run.world;
    Manager::new(group, config)
}

fn parameters(run: &Run) -> SliceParameters {
    let of_layer = |i| {
        (
            format!("layer.{i}.weight"),
            vec![0.5f32; run.elements / run.layers],
        )
    };
    SliceParameters::new((0..run.layers).map(of_layer).collect())
}

/// Inner steps, and their time.
fn data_parallel(run: &Run, overlap: bool) -> Result<(u64, Duration)> {
    let size = run.elements / run.layers;
    let slots = vec![Slot::f32(size); run.layers];
    let mut ddp = Ddp::new(manager(run, None)?, &slots, DdpConfig::default())?;
    let mut params = parameters(run);
    let gradient = vec![0.25f32; size];
    let mut begun = Instant::now();
    for step in 0..STEPS[0] + STEPS[1] {
        if step == STEPS[0] {
            begun = Instant::now();
        }
        let compute = |_: &mut SliceParameters, _: u32, sink: &mut Sink<'_>| {
            // The forward pass, or all of it.
            let forward = if overlap { run.step / 3 } else { run.step };
            std::thread::sleep(forward);
            for layer in (0..run.layers).rev() {
                if overlap {
                    std::thread::sleep((run.step - forward) / run.layers as u32);
                }
                sink.push(layer, &gradient)?;
            }
            Ok(())
        };
        ddp.step_with(&mut params, compute, |_: &mut SliceParameters, _: &[Tensor]| {
            Ok(())
        })?;
    }
    let time = begun.elapsed();
    ddp.finish(&mut params)?;
    Ok((STEPS[1], time))
}

fn streaming(run: &Run, rounds: [u64; 3], codec: Option<Codec>) -> Result<(u64, Duration)> {
    let [sync_every, fragments, delay] = rounds;
    let config = DilocoConfig {
        sync_every,
        fragments: fragments as usize,
        delay,
        mixing: 0.0,
        outer: OuterOptimizer::Sgd { lr: 1.0 },
        backup: Backup::Host,
        ..DilocoConfig::default()
    };
    let mut diloco = Diloco::new(manager(run, codec)?, parameters(run), config)?;
    let mut inner = 0i64;
    diloco.begin(&mut inner)?;
    let mut step = |diloco: &mut Diloco<Manager, SliceParameters>| {
        std::thread::sleep(run.step);
        inner += 1;
        // Something to send.
        diloco
            .params_mut()
            .write(0, &mut |values| values.iter_mut().for_each(|v| *v += 1.0))?;
        diloco
            .after_inner_step(&mut inner)
            .map(|reports| reports.len() as u64)
    };
    // One period, and then two: from the end of a round to the end of a round.
    let mut ended = 0;
    while ended < fragments {
        ended += step(&mut diloco)?;
    }
    let begun = Instant::now();
    while ended < 3 * fragments {
        ended += step(&mut diloco)?;
    }
    let time = begun.elapsed();
    diloco.finish(&mut inner)?;
    Ok((2 * sync_every, time))
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [rank, world, first, own, step, elements, layers, method] = arguments.as_slice() else {
        panic!("usage: plan_rank RANK WORLD FIRST_ADDRESS OWN_ADDRESS STEP_MS ELEMENTS LAYERS METHOD");
    };
    let world: u32 = world.parse().unwrap();
    let ends = (rank == "0").then(|| TcpListener::bind(format!("{own}:{ENDS_PORT}")).unwrap());
    let lighthouse = (rank == "0").then(|| {
        LighthouseServer::start(LighthouseConfig {
            bind: format!("{own}:{PORT}"),
            min_replicas: world as usize,
            ..LighthouseConfig::default()
        })
        .unwrap()
    });
    let run = Run {
        name: format!("replica{rank}"),
        lighthouse: format!("http://{first}:{PORT}"),
        own: own.clone(),
        world,
        step: Duration::from_millis(step.parse().unwrap()),
        elements: elements.parse().unwrap(),
        layers: layers.parse().unwrap(),
    };
    let measured = match method.split(':').collect::<Vec<_>>().as_slice() {
        ["ddp"] => data_parallel(&run, false),
        ["ddp-overlap"] => data_parallel(&run, true),
        ["diloco", h, p, tau, format] => {
            let codec = (*format != "f32").then(|| format.parse().unwrap());
            streaming(&run, [h, p, tau].map(|n| n.parse().unwrap()), codec)
        }
        _ => panic!("no method: {method}"),
    };
    let (steps, time) = measured.unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    println!("{steps} {}", time.as_micros());
    // A replica may have to repeat its closing round: the lighthouse ends with the last one.
    match ends {
        Some(ends) => (1..world).for_each(|_| drop(ends.accept().unwrap())),
        None => drop(TcpStream::connect(format!("{first}:{ENDS_PORT}")).unwrap()),
    }
    drop(lighthouse);
}
