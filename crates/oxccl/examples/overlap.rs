//! Communication beside computing: tensors are given away, and come back with the result. Start it as `all_reduce`.

use oxccl::prelude::*;

fn main() -> Result<()> {
    let world = World::from_env()?;
    let mut works = Vec::new();
    for layer in 0..4 {
        // Computed while the layers before it travel.
        let gradient = vec![(world.rank() + layer) as f32; 1 << 16];
        works.push(
            world
                .group()
                .all_reduce(Tensor::from_vec(gradient), ReduceOp::Avg)?,
        );
    }
    for (layer, work) in works.iter().enumerate() {
        work.wait(deadline_in(Duration::from_secs(10)))?;
        let mean = work.take_tensor()?;
        println!(
            "rank {}: layer {layer} has {:?}",
            world.rank(),
            mean.as_slice::<f32>()?.first()
        );
    }
    world.shutdown(deadline_in(Duration::from_secs(10)))
}
