//! An all-reduce that sends a quarter of the bytes: values travel as int8, sums are made in f32. Start it as `all_reduce`.

use oxccl::core::Registry;
use oxccl::prelude::*;
use oxccl::quant::Codec;

fn main() -> Result<()> {
    let options = WorldOptions {
        // What makes the world's group may put another one around it.
        make: Arc::new(|backend, device, options| {
            let group = Registry::global().create(backend, device, options)?;
            Ok(Box::new(QuantizedGroup::new(
                Arc::from(group),
                Codec::Int8B64,
                options.timeout,
            )?))
        }),
        ..WorldOptions::default()
    };
    let world = World::init(&Place::from_env()?, options, deadline_in(Duration::from_secs(30)))?;
    let wave = |rank: u32| (0..100_000).map(move |i| (i as f32 / 1e3 + rank as f32).sin());
    let mut values: Vec<f32> = wave(world.rank()).collect();
    world.group().all_reduce_slice(&mut values, ReduceOp::Sum)?;
    let exact = |i: usize| {
        (0..world.world_size())
            .filter_map(|r| wave(r).nth(i))
            .sum::<f32>()
    };
    let worst = (0..values.len())
        .step_by(1000)
        .map(|i| (values[i] - exact(i)).abs())
        .fold(0.0, f32::max);
    println!(
        "rank {}: {} bytes sent for {} of values, the worst error of 100 is {worst:.4}",
        world.rank(),
        world.group().traffic().sent,
        values.len() * 4
    );
    world.shutdown(deadline_in(Duration::from_secs(10)))
}
