//! Fault-tolerant data parallel with candle: `oxccl launch --replicas 2 -- target/debug/examples/candle_ddp 20000`.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear};
use oxccl::prelude::*;
use oxccl_candle::{ParamSet, candle_error};

fn main() -> Result<()> {
    let steps = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(100);
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let failed = |e| candle_error("the model", e);
    let model = linear(2, 1, VarBuilder::from_varmap(&map, DType::F32, cpu)).map_err(failed)?;
    let params = ParamSet::from_var_map(&map)?;
    let mut ddp = Ddp::new(place.join()?, &params.slots(), DdpConfig::for_steps(steps))?;
    let data = [[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]]; // this replica's
    let x = Tensor::new(&data, cpu).map_err(failed)?;
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu).map_err(failed)?;
    // What a replica that heals takes over: the parameters and the optimizer's momentum, all of them in one vector.
    let mut state = (params.clone(), vec![0.0_f32; params.total()]);
    let gradients = |(params, _): &mut (ParamSet, Vec<f32>), _: &_| {
        let loss = model.forward(&x).and_then(|out| candle_nn::loss::mse(&out, &y));
        let grads = loss.and_then(|loss| loss.backward()).map_err(failed)?;
        params.gradients(&grads)
    };
    // Called with the mean of the gradients once the step is committed: an optimizer of one's own goes here.
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
        let healed = if step.healed.is_some() { ", healed" } else { "" };
        if step.step % 1000 == 0 || step.healed.is_some() {
            println!("step {} by {} replicas{healed}", step.step, step.contributors)
        }
    })?;
    println!("parameters and momentum {:08x}", fingerprint(&state)?);
    Ok(())
}

/// The same on replicas whose state is equal bit for bit.
fn fingerprint((params, momentum): &(ParamSet, Vec<f32>)) -> Result<u32> {
    let add = |sum: u32, w: &f32| sum.rotate_left(5) ^ w.to_bits();
    (0..params.len()).try_fold(momentum.iter().fold(0, add), |sum, i| {
        params.with_slice(i, |weights| weights.iter().fold(sum, add))
    })
}
