//! Data parallel with candle and an optimizer that keeps something of its own, which heals too:
//! `oxccl launch --replicas 2 -- target/debug/examples/candle_momentum 20000`.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
use oxccl::prelude::*;
use oxccl_candle::ParamSet;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(100), |n| n.parse())?;
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let model = linear(2, 1, VarBuilder::from_varmap(&map, DType::F32, cpu))?;
    let params = ParamSet::from_var_map(&map)?;
    let mut ddp = Ddp::new(place.join()?, &params.slots(), DdpConfig::for_steps(steps))?;
    let x = Tensor::new(&[[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]], cpu)?; // this replica's data
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu)?;
    // What a replica that heals takes over: the parameters and the optimizer's momentum, all of them in one vector.
    let mut state = (params.clone(), vec![0.0_f32; params.total()]);
    let gradients = |(params, _): &mut (ParamSet, Vec<f32>), _: &_| {
        params.gradients_of(model.forward(&x).and_then(|out| mse(&out, &y)))
    };
    // Called with the mean of the gradients once the step is committed.
    let update = |(params, momentum): &mut (ParamSet, Vec<f32>), mean: &[Vec<f32>]| {
        let mut momentum = momentum.iter_mut();
        params.update(mean, |_, weights, gradient| {
            for ((w, g), m) in weights.iter_mut().zip(gradient).zip(&mut momentum) {
                *m = 0.9 * *m + g;
                *w -= 0.01 * *m;
            }
        })
    };
    ddp.train(&mut state, gradients, update, |step| {
        if step.step.0 % 1000 == 0 || step.healed.is_some() {
            println!("{step}")
        }
    })?;
    println!("parameters {}, momentum {:?}", state.0.hash()?, state.1);
    Ok(())
}
