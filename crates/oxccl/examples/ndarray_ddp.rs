//! Fault-tolerant data parallel with ndarray: `oxccl launch --replicas 2 -- target/debug/examples/ndarray_ddp`. The parameters stand in plain vectors; ndarray
//! computes on views of them, without a copy.

use ndarray::{ArrayView2, array};
use oxccl::prelude::*;

fn main() -> Result<()> {
    let place = ReplicaEnv::from_env()?; // set by `oxccl launch`
    let mut ddp = Ddp::new(place.join()?, &[Slot::f32(6)], DdpConfig::for_steps(300))?;
    let mut params = SliceParameters::new(vec![("weight".into(), vec![0.0; 6])]);
    let x = array![[1.0_f32, place.replica as f32, 0.5]]; // this replica's data: x W should be [3, 4]
    let gradients = |params: &mut SliceParameters, _: &_| {
        let weight = ArrayView2::from_shape((3, 2), params.get(0).unwrap_or_default());
        let error = x.dot(&weight.map_err(|e| Error::invalid(e.to_string()))?) - array![[3.0, 4.0]];
        Ok(vec![x.t().dot(&error).iter().copied().collect()])
    };
    let update = |params: &mut SliceParameters, mean: &[Vec<f32>]| params.descend(mean, 0.3);
    ddp.train(&mut params, gradients, update, |_| ())?;
    println!("parameters {:?}", params.get(0).unwrap_or_default());
    Ok(())
}
