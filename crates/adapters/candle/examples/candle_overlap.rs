//! Data parallel with candle whose gradients travel while the backward pass still computes others:
//! `oxccl launch --replicas 2 -- target/debug/examples/candle_overlap 20000`.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
use oxccl::ddp::Sink;
use oxccl::prelude::*;
use oxccl_candle::{ParamSet, Segments, candle_error};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(100), |n| n.parse())?;
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let (map, cpu) = (VarMap::new(), &Device::Cpu);
    let vars = VarBuilder::from_varmap(&map, DType::F32, cpu);
    let (first, last) = (linear(2, 8, vars.pp("first"))?, linear(8, 1, vars.pp("last"))?);
    let mut params = ParamSet::from_var_map(&map)?;
    let mut ddp = Ddp::new(place.join()?, &params.slots(), DdpConfig::for_steps(steps))?;
    let x = Tensor::new(&[[1.0_f32, 0.0], [0.0, 1.0 + place.replica as f32]], cpu)?; // this replica's data
    let y = Tensor::new(&[[3.0_f32], [4.0]], cpu)?;
    while !ddp.is_finished() {
        let gradients = |params: &mut ParamSet, _: u32, sink: &mut Sink<'_>| {
            let mut segments = Segments::new();
            let hidden = first.forward(&x).and_then(|h| segments.cut(&h.tanh()?)); // the last layer begins a graph of its own
            let loss = hidden.and_then(|h| mse(&last.forward(&h)?, &y));
            let loss = loss.map_err(|e| candle_error("the loss", e))?;
            params.backward(&loss, segments, |i, gradient| sink.push(i, gradient))
        };
        let step = ddp.step_with(&mut params, gradients, |params, mean| {
            for (i, gradient) in mean.iter().enumerate() {
                let gradient = gradient.as_slice::<f32>()?;
                params.with_slice_mut(i, |w| w.iter_mut().zip(gradient).for_each(|(w, g)| *w -= 0.1 * g))?;
            }
            Ok(())
        })?;
        if step.step.0 % 1000 == 0 || step.healed.is_some() {
            println!("{step}")
        }
    }
    ddp.finish(&mut params)?;
    println!("parameters {}", params.hash()?);
    Ok(())
}
