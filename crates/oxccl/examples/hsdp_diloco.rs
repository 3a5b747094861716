//! Streaming DiLoCo inside hybrid sharding: the ranks of a replica hold a part of the model each and take inner steps together; the replicas average
//! their parts, rank by rank: `oxccl launch --replicas 2 --ranks-per-replica 2 -- target/debug/examples/hsdp_diloco`.

use oxccl::core::DType;
use oxccl::prelude::*;

/// The parameters of the model.
const N: usize = 8;

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let world = World::from_env()?; // the ranks of this replica
    let (rank, n) = (world.rank() as usize, N / world.world_size() as usize);
    // This rank's part of two layers.
    let layers = ["layer.0.weight", "layer.1.weight"].map(|name| (name.to_string(), vec![0.0; n / 2]));
    let params = SliceParameters::new(layers.into());
    let mut diloco = Diloco::new(place.join()?, params, DilocoConfig::for_rounds(20))?;
    let target = place.replica as f32; // the replicas' data differ: together they go to the mean
    let inner_step = |params: &mut SliceParameters, step: &mut i64| {
        *step += 1;
        for layer in 0..params.len() {
            // The whole layer, gathered for the forward and the backward pass; then this rank's part of the mean gradient.
            let part = params.get(layer).unwrap_or_default();
            let (input, output) = (Tensor::from_slice(part), Tensor::zeros(DType::F32, N / 2));
            let whole = world.group().all_gather_into(input, output)?.take_tensor()?;
            let whole = whole.as_slice::<f32>()?.iter().zip(0u8..);
            let gradient: Vec<f32> = whole.map(|(w, i)| w - target - f32::from(i)).collect();
            let (input, output) = (Tensor::from_vec(gradient), Tensor::zeros(DType::F32, n / 2));
            let work = world.group().reduce_scatter_into(input, output, ReduceOp::Avg)?;
            let gradient = work.take_tensor()?;
            let gradient = gradient.as_slice::<f32>()?;
            params.write(layer, &mut |weights| {
                weights.iter_mut().zip(gradient).for_each(|(w, g)| *w -= 0.1 * g)
            })?;
        }
        Ok(())
    };
    diloco.train(&mut 0, inner_step, |round| println!("{round}"))?;
    println!("rank {rank} has {}", diloco.global_hash()?);
    world.shutdown(deadline_in(Duration::from_secs(30)))
}
