//! Streaming DiLoCo on plain slices: `oxccl launch --replicas 2 -- target/debug/examples/diloco`. Each replica takes steps of its own; the layers are
//! averaged in turns, while the steps go on. Kill a replica while it runs: it heals.

use oxccl::prelude::*;

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let layers = ["layer.0.weight", "layer.1.weight"].map(|name| (name.to_string(), vec![0.0; 1000]));
    let params = SliceParameters::new(layers.into());
    let mut diloco = Diloco::new(place.join()?, params, DilocoConfig::for_rounds(20))?;
    let target = place.replica as f32; // the replicas' data differ: together they go to the mean
    let inner_step = |params: &mut SliceParameters, step: &mut i64| {
        *step += 1;
        params.for_each_mut(|_, weights| weights.iter_mut().for_each(|w| *w += 0.1 * (target - *w)))
    };
    let mut step = 0; // what a replica that heals takes over besides: moments, the place in the data
    diloco.train(&mut step, inner_step, |round| println!("{round}"))?;
    println!("global parameters {}", diloco.global_hash()?);
    Ok(())
}
