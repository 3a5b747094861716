//! Streaming DiLoCo on plain slices: `oxccl launch --replicas 2 -- target/debug/examples/diloco`. Each replica takes steps of its own; the layers are averaged in
//! turns, each once in 16 steps, while the steps go on. Kill a replica while it runs: it heals.

use oxccl::prelude::*;

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let name = format!("replica{}", place.replica);
    let group = GlooGroup::new(name.clone(), GroupOptions::default())?;
    let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, place.lighthouse))?;
    let layers = ["layer.0.weight", "layer.1.weight"].map(|name| (name.to_string(), vec![0.0; 1000]));
    let config = DilocoConfig {
        sync_every: 16,
        rounds: Some(20),
        ..DilocoConfig::default()
    };
    let mut diloco = Diloco::new(manager, SliceParameters::new(layers.into()), config)?;

    let mut step = 0_i64; // what a replica that heals takes over besides: an optimizer's moments, the place in the data
    diloco.begin(&mut step)?;
    while !diloco.is_finished() {
        let target = place.replica as f32; // the replicas' data differ: together they go to the mean
        for layer in 0..2 {
            diloco.params_mut().write(layer, &mut |weights| {
                weights.iter_mut().for_each(|w| *w += 0.1 * (target - *w))
            })?;
        }
        step += 1;
        for round in diloco.after_inner_step(&mut step)? {
            println!(
                "round {} committed by {} replicas",
                round.step, round.contributors
            );
        }
    }
    diloco.finish(&mut step)?;
    println!("global parameters {}", diloco.global_hash()?);
    Ok(())
}
