//! Streaming DiLoCo with candle: `oxccl launch --replicas 2 -- target/debug/examples/candle_diloco`.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse, seq};
use oxccl::prelude::*;
use oxccl_candle::ParamSet;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let vars = VarBuilder::from_varmap(&map, DType::F32, cpu);
    let model = seq()
        .add(linear(2, 4, vars.pp("layer.0"))?)
        .add(linear(4, 1, vars.pp("layer.1"))?);
    let params = ParamSet::from_var_map(&map)?;
    let mut diloco = Diloco::new(place.join()?, params, DilocoConfig::for_rounds(10))?;
    let x = Tensor::new(&[[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]], cpu)?; // this replica's data
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu)?;
    let inner_step = |params: &mut ParamSet, step: &mut i64| {
        *step += 1;
        let gradients = params.gradients_of(model.forward(&x).and_then(|out| mse(&out, &y)))?;
        params.descend(&gradients, 0.05)
    };
    diloco.train(&mut 0, inner_step, |round| println!("{round}"))?;
    println!("global parameters {}", diloco.global_hash()?);
    Ok(())
}
