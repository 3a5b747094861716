//! The sum over all processes: `mpirun -n 2 target/debug/examples/all_reduce`, or under torchrun, srun, `oxccl launch`, or by hand (README).

use oxccl::prelude::*;

fn main() -> Result<()> {
    let world = World::from_env()?;
    let mut values = [world.rank() as f32 + 1.0; 4];
    world.group().all_reduce_slice(&mut values, ReduceOp::Sum)?;
    println!("rank {} of {} has {values:?}", world.rank(), world.world_size());
    world.shutdown(deadline_in(Duration::from_secs(10)))
}
