//! Fault-tolerant data parallel on plain slices: `oxccl launch --replicas 2 -- target/debug/examples/ddp`. Kill a replica while it runs: the other one
//! goes on, and the killed one is started again and takes its state over.

use oxccl::prelude::*;

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let name = format!("replica{}", place.replica);
    let group = GlooGroup::new(name.clone(), GroupOptions::default())?;
    let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, place.lighthouse))?;
    let config = DdpConfig {
        steps: Some(500),
        ..DdpConfig::default()
    };
    let mut ddp = Ddp::new(manager, &[Slot::f32(2)], config)?;

    let mut line = vec![0.0_f32; 2]; // what a replica that heals takes over: a and b of y = a x + b
    let mut x = place.replica as f32;
    while !ddp.is_finished() {
        x = (x + 0.37) % 1.0; // this replica's data: points of y = 2 x + 1
        let gradient = |line: &mut Vec<f32>, _: &_| {
            let error = line[0] * x + line[1] - (2.0 * x + 1.0);
            Ok(vec![vec![error * x, error]])
        };
        ddp.step(&mut line, gradient, |line, mean| {
            line.iter_mut()
                .zip(&mean[0])
                .for_each(|(value, g)| *value -= 0.5 * g);
            Ok(())
        })?;
    }
    let steps = ddp.current_step();
    ddp.finish(&mut line)?;
    println!("after {steps} steps y = {:.3} x + {:.3}", line[0], line[1]);
    Ok(())
}
