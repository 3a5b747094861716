//! Fault-tolerant data parallel with candle: `oxccl launch --replicas 2 -- target/debug/examples/candle_ddp 6000`. Kill a replica while it runs: the other
//! one goes on, and the killed one is started again and takes its state over.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
use oxccl::prelude::*;
use oxccl_candle::ParamSet;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(100), |n| n.parse())?;
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let model = linear(2, 1, VarBuilder::from_varmap(&map, DType::F32, cpu))?;
    let mut params = ParamSet::from_var_map(&map)?; // what a replica that heals takes over
    let mut ddp = Ddp::new(place.join()?, &params.slots(), DdpConfig::for_steps(steps))?;
    let x = Tensor::new(&[[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]], cpu)?; // this replica's data
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu)?;
    let gradients =
        |params: &mut ParamSet, _: &_| params.gradients_of(model.forward(&x).and_then(|out| mse(&out, &y)));
    let update = |params: &mut ParamSet, mean: &[Vec<f32>]| params.descend(mean, 0.1);
    ddp.train(&mut params, gradients, update, |step| {
        if step.step.0 % 1000 == 0 || step.healed.is_some() {
            println!("{step}")
        }
    })?;
    println!("parameters {}", params.hash()?);
    Ok(())
}
