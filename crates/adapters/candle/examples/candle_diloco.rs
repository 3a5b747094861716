//! Streaming DiLoCo with candle: `oxccl launch --replicas 2 -- target/debug/examples/candle_diloco`.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear, seq};
use oxccl::prelude::*;
use oxccl_candle::{ParamSet, candle_error};

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let failed = |e| candle_error("the model", e);
    let layer = |inputs, outputs, name| {
        linear(
            inputs,
            outputs,
            VarBuilder::from_varmap(&map, DType::F32, cpu).pp(name),
        )
    };
    let model = seq()
        .add(layer(2, 4, "layer.0").map_err(failed)?)
        .add(layer(4, 1, "layer.1").map_err(failed)?);
    let params = ParamSet::from_var_map(&map)?;
    let mut diloco = Diloco::new(place.join()?, params, DilocoConfig::for_rounds(10))?;
    let data = [[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]]; // this replica's
    let x = Tensor::new(&data, cpu).map_err(failed)?;
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu).map_err(failed)?;
    let inner_step = |params: &mut ParamSet, step: &mut i64| {
        *step += 1;
        let loss = model.forward(&x).and_then(|out| candle_nn::loss::mse(&out, &y));
        let grads = params.gradients(&loss.and_then(|loss| loss.backward()).map_err(failed)?)?;
        params.update(&grads, |_, w, g| {
            w.iter_mut().zip(g).for_each(|(w, g)| *w -= 0.05 * g)
        })
    };
    diloco.train(&mut 0, inner_step, |_| ())?;
    println!("global parameters {}", diloco.global_hash()?);
    Ok(())
}
