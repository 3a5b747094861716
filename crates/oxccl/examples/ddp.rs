//! Fault-tolerant data parallel on plain slices: `oxccl launch --replicas 2 -- target/debug/examples/ddp`. Kill a replica while it runs: the other one
//! goes on, and the killed one is started again and takes its state over.

use oxccl::prelude::*;

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let mut ddp = Ddp::new(place.join()?, &[Slot::f32(2)], DdpConfig::for_steps(500))?;
    let mut line = vec![0.0_f32; 2]; // a and b of y = a x + b: what a replica that heals takes over
    let mut x = place.replica as f32;
    let gradients = |line: &mut Vec<f32>, _: &_| {
        x = (x + 0.37) % 1.0; // this replica's data: points of y = 2 x + 1
        let error = line[0] * x + line[1] - (2.0 * x + 1.0);
        Ok(vec![vec![error * x, error]])
    };
    let update = |line: &mut Vec<f32>, mean: &[Vec<f32>]| {
        line.iter_mut().zip(&mean[0]).for_each(|(w, g)| *w -= 0.5 * g);
        Ok(())
    };
    ddp.train(&mut line, gradients, update, |_| ())?;
    println!("after 500 steps y = {:.3} x + {:.3}", line[0], line[1]);
    Ok(())
}
