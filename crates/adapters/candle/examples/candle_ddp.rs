//! Fault-tolerant data parallel with candle: `oxccl launch --replicas 2 -- target/debug/examples/candle_ddp`.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear};
use oxccl::prelude::*;
use oxccl_candle::{ParamSet, candle_error};

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let failed = |e| candle_error("the model", e);
    let model = linear(2, 1, VarBuilder::from_varmap(&map, DType::F32, cpu)).map_err(failed)?;
    let mut params = ParamSet::from_var_map(&map)?;
    let mut ddp = Ddp::new(place.join()?, &params.slots(), DdpConfig::for_steps(100))?;
    let data = [[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]]; // this replica's
    let x = Tensor::new(&data, cpu).map_err(failed)?;
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu).map_err(failed)?;
    let gradients = |params: &mut ParamSet, _: &_| {
        let loss = model.forward(&x).and_then(|out| candle_nn::loss::mse(&out, &y));
        let grads = loss.and_then(|loss| loss.backward()).map_err(failed)?;
        params.gradients(&grads)
    };
    let update = |params: &mut ParamSet, mean: &[Vec<f32>]| {
        params.update(mean, |_, w, g| {
            w.iter_mut().zip(g).for_each(|(w, g)| *w -= 0.1 * g)
        })
    };
    ddp.train(&mut params, gradients, update, |_| ())?;
    let bits: Vec<Vec<f32>> = (0..params.len())
        .map(|i| params.with_slice(i, <[f32]>::to_vec))
        .collect::<Result<_>>()?;
    println!("parameters {bits:?}");
    Ok(())
}
