//! Groups of some of the ranks: the even and the odd ones, each with a sum of its own. Start it as `all_reduce`, with four processes.

use oxccl::prelude::*;

fn main() -> Result<()> {
    let world = World::from_env()?;
    let (rank, deadline) = (world.rank(), deadline_in(Duration::from_secs(30)));
    let of = |first| (first..world.world_size()).step_by(2).collect::<Vec<u32>>();
    // A call of all ranks, with the same lists. A rank in no list gets none.
    let partition = [of(0), of(1)]
        .into_iter()
        .filter(|ranks| !ranks.is_empty())
        .collect::<Vec<_>>();
    if let Some(group) = world.split_group(&partition, &GroupSpec::default(), deadline)? {
        let mut sum = [rank];
        group.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
        println!(
            "rank {rank} is rank {} of its group, whose ranks add up to {}",
            group.info().rank,
            sum[0]
        );
        group.shutdown(deadline)?;
    }
    world.shutdown(deadline)
}
