//! Two replicas of a burn model, threads of this program for once, train with data parallel and then with Streaming DiLoCo. At the end both hold
//! the same bits: `cargo run --manifest-path crates/adapters/burn/Cargo.toml --example two_replicas`.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use oxccl::coordination::{LighthouseConfig, LighthouseServer};
use oxccl::prelude::*;
use oxccl_burn::ParamSet;

/// x W + b.
#[derive(Module, Debug)]
struct Linear {
    weight: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

/// The mean square of the error on this replica's data.
fn loss(model: &Linear, replica: u32, device: &Device) -> Tensor<1> {
    let x = Tensor::<2>::from_data([[1.0, 0.0, 0.5], [0.0, 1.0 + replica as f32, 1.0]], device);
    let y = Tensor::<2>::from_data([[3.0, 4.0], [5.0, 6.0]], device);
    let error = x.matmul(model.weight.val()) + model.bias.val().unsqueeze() - y;
    (error.clone() * error).mean()
}

fn data_parallel(place: &ReplicaEnv, model: Linear, device: &Device) -> Result<ParamSet<Linear>> {
    let mut params = ParamSet::new(model)?;
    let mut ddp = Ddp::new(place.join()?, &params.slots(), DdpConfig::for_steps(50))?;
    let gradients = |params: &mut ParamSet<Linear>, _: &_| {
        let loss = loss(params.module(), place.replica, device);
        params.gradients(&loss.backward())
    };
    let update = |params: &mut ParamSet<Linear>, mean: &[Vec<f32>]| params.descend(mean, 0.1);
    ddp.train(&mut params, gradients, update, |_| ())?;
    Ok(params)
}

fn diloco(place: &ReplicaEnv, params: ParamSet<Linear>, device: &Device) -> Result<String> {
    let config = DilocoConfig {
        fragments: 1, // one layer
        ..DilocoConfig::for_rounds(4)
    };
    let mut diloco = Diloco::new(place.join()?, params, config)?;
    let inner_step = |params: &mut ParamSet<Linear>, step: &mut i64| {
        *step += 1;
        let loss = loss(params.module(), place.replica, device);
        let grads = params.gradients(&loss.backward())?;
        params.descend(&grads, 0.05)
    };
    diloco.train(&mut 0, inner_step, |_| ())?;
    diloco.global_hash()
}

/// A replica's life: the hash of its data parallel run, and that of DiLoCo.
fn replica(place: ReplicaEnv, second: String) -> Result<[String; 2]> {
    let device = Device::flex().autodiff();
    // The replicas begin apart: data parallel lets them start with the state of one of them.
    let start = place.replica as f32;
    let model = Linear {
        weight: Param::from_data([[start, 0.1], [0.2, start], [0.3, 0.4]], &device),
        bias: Param::from_data([start, 0.0], &device),
    };
    let params = data_parallel(&place, model, &device)?;
    let mut bits = Vec::new();
    for i in 0..params.len() {
        params.read(i, &mut |values| {
            bits.push((params.name(i).to_owned(), values.to_vec()))
        })?;
    }
    let hash = oxccl::diloco::parameters_hash(
        bits.iter()
            .map(|(name, values)| (name.as_str(), values.as_slice())),
    );
    let place = ReplicaEnv {
        lighthouse: second,
        ..place
    };
    Ok([hash, diloco(&place, params, &device)?])
}

fn main() -> Result<()> {
    // A lighthouse for each run.
    let lighthouse = || {
        LighthouseServer::start(LighthouseConfig {
            bind: "127.0.0.1:0".into(),
            min_replicas: 2,
            ..LighthouseConfig::default()
        })
    };
    let (first, second) = (lighthouse()?, lighthouse()?);
    let run = |number| {
        let place = ReplicaEnv {
            lighthouse: first.address(),
            replica: number,
            replicas: 2,
            incarnation: 0,
            rank: 0,
            ranks: 1,
            store: None,
        };
        replica(place, second.address())
    };
    let hashes = std::thread::scope(|scope| {
        let threads = [0, 1].map(|number| scope.spawn(move || run(number)));
        threads.map(|thread| {
            let gone = |_| Error::new(ErrorKind::Internal, "a replica panicked");
            thread.join().map_err(gone).and_then(|hashes| hashes)
        })
    });
    let [one, two] = hashes;
    let (one, two) = (one?, two?);
    println!(
        "data parallel {} and {}\ndiloco {} and {}",
        one[0], two[0], one[1], two[1]
    );
    if one != two {
        return Err(Error::new(
            ErrorKind::Mismatch,
            "the replicas hold different parameters",
        ));
    }
    println!("bitwise equal");
    Ok(())
}
