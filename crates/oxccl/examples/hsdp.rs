//! Hybrid sharding: the ranks of a replica hold a part of the model each, and replicas average their parts, fault-tolerantly:
//! `oxccl launch --replicas 2 --ranks-per-replica 2 -- target/debug/examples/hsdp 5000`. Kill a process while it runs: its replica is started again and takes its
//! state over, rank by rank.

use oxccl::core::DType;
use oxccl::prelude::*;

/// The parameters of the model.
const N: usize = 8;

fn main() -> Result<()> {
    let steps = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(200);
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let world = World::from_env()?; // the ranks of this replica
    let (rank, n) = (world.rank() as usize, N / world.world_size() as usize);
    let mut ddp = Ddp::new(place.join()?, &[Slot::f32(n)], DdpConfig::for_steps(steps))?;
    let mut part = vec![0.0_f32; n]; // this rank's parameters: what it takes over from the same rank of another replica
    let mut sample = place.replica as usize;
    let gradients = |part: &mut Vec<f32>, _: &_| {
        let (input, output) = (Tensor::from_slice(part), Tensor::zeros(DType::F32, N));
        let model = world.group().all_gather_into(input, output)?.take_tensor()?;
        sample += 3; // this rank's data: points of a plane, one coordinate each
        let at = (sample + rank * n) % N;
        let mut gradient = vec![0.0; N];
        gradient[at] = model.as_slice::<f32>()?[at] - at as f32;
        let (input, output) = (Tensor::from_vec(gradient), Tensor::zeros(DType::F32, n));
        let mine = world.group().reduce_scatter_into(input, output, ReduceOp::Avg)?;
        Ok(vec![mine.take_tensor()?.as_slice()?.to_vec()])
    };
    let update = |part: &mut Vec<f32>, mean: &[Vec<f32>]| {
        part.iter_mut().zip(&mean[0]).for_each(|(w, g)| *w -= g);
        Ok(())
    };
    ddp.train(&mut part, gradients, update, |step| {
        if step.step.0 % 100 == 0 || step.healed.is_some() {
            println!("{step}")
        }
    })?;
    println!("rank {rank} has {part:.2?}");
    world.shutdown(deadline_in(Duration::from_secs(30)))
}
