//! Quantised groups of CUDA tensors: over NCCL, with encoded bytes that stay on the device, over gloo with device kernels, and over gloo
//! behind `ftcore::Staged`. All give the bits of a quantised group of host tensors.

use std::sync::Arc;
use std::time::Duration;

use backend_gloo::GlooGroup;
use backend_nccl::{CudaAccelerator, NcclGroup};
use ftcore::{
    Accelerator, Collective, Configuration, DType, Device, DeviceKind, Epoch, Error, ErrorKind, GroupOptions,
    InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Staged, Store, SubmitOptions, Tensor,
    deadline_in,
};
use libtest_mimic::Trial;
use oxccl_quant_cuda::FORMATS;
use quant::{Accuracy, Codec, Moves, QuantizeOptions, QuantizedGroup, Rounding};

use crate::trial;
use crate::values::*;

const SOON: Duration = Duration::from_secs(20);

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for codec in FORMATS {
        for world in [2, 3] {
            trials.push(trial(
                format!("nccl_group_has_the_host_s_bits::{codec}::world{world}"),
                move || same_bits(codec, world, over_nccl),
            ));
        }
        trials.push(trial(
            format!("gloo_group_of_device_tensors_has_the_host_s_bits::{codec}"),
            move || same_bits(codec, 2, over_gloo),
        ));
    }
    trials.push(trial("staged_group_has_the_host_s_bits", || {
        same_bits(Codec::Int4B64, 3, staged)
    }));
    trials.push(trial(
        "l09_a_quantised_operation_comes_after_the_caller_s_stream",
        in_order,
    ));
    trials.push(trial("an_nccl_group_refuses_what_it_cannot_quantise", refusals));
    trials
}

fn device(rank: u32) -> Device {
    Device::new(DeviceKind::Cuda, rank % CudaAccelerator.count().max(1))
}

type Make = fn(u32, QuantizeOptions) -> Result<Box<dyn ProcessGroup>, Error>;

fn over_nccl(rank: u32, options: QuantizeOptions) -> Result<Box<dyn ProcessGroup>, Error> {
    let nccl = NcclGroup::new("quantised", &device(rank), &GroupOptions::default())?;
    Ok(Box::new(QuantizedGroup::with_options(Arc::new(nccl), options)?))
}

fn over_gloo(_rank: u32, options: QuantizeOptions) -> Result<Box<dyn ProcessGroup>, Error> {
    let gloo = GlooGroup::new("quantised", GroupOptions::default())?;
    Ok(Box::new(QuantizedGroup::with_options(Arc::new(gloo), options)?))
}

fn staged(rank: u32, options: QuantizeOptions) -> Result<Box<dyn ProcessGroup>, Error> {
    let gloo = GlooGroup::new("quantised", GroupOptions::default())?;
    let host = Arc::new(QuantizedGroup::with_options(Arc::new(gloo), options)?);
    Ok(Box::new(Staged::new(host, &device(rank), SOON)?))
}

/// Runs `body` as so many ranks with configured groups, each on a thread; what they return.
fn ranks<T: Send>(
    world: u32,
    (make, options): (Make, &QuantizeOptions),
    body: impl Fn(u32, &dyn ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (store, body) = (&store, &body);
                scope.spawn(move || {
                    let group = make(rank, options.clone()).unwrap();
                    let configuration = Configuration {
                        store: store.clone(),
                        prefix: "quantised".to_string(),
                        name: "quantised".to_string(),
                        epoch: Epoch(1),
                        rank,
                        world_size: world,
                        deadline: deadline_in(SOON),
                        cancel: Default::default(),
                    };
                    group.configure(configuration).unwrap();
                    store.barrier("configured", world, deadline_in(SOON)).unwrap();
                    let made = body(rank, &*group);
                    store.barrier("done", world, deadline_in(SOON)).unwrap();
                    made
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// One rank's values, in a type.
fn own(rank: u32, dtype: DType, count: usize) -> Vec<u8> {
    let mut random = Random(u64::from(rank) << 32 | count as u64);
    let values = (0..count).map(|_| (random.next() >> 40) as f32 / 8_388_608.0 - 1.0);
    match dtype {
        DType::F32 => values.flat_map(f32::to_ne_bytes).collect(),
        DType::F16 => values
            .flat_map(|v| half::f16::from_f32(v).to_ne_bytes())
            .collect(),
        _ => values
            .flat_map(|v| half::bf16::from_f32(v).to_ne_bytes())
            .collect(),
    }
}

fn tensor_on(device: &Device, dtype: DType, bytes: &[u8]) -> Tensor {
    if !device.is_cpu() {
        let mut tensor = CudaAccelerator
            .alloc(device.index, dtype, &[bytes.len() / dtype.size()])
            .unwrap();
        let stream = CudaAccelerator.new_stream(device.index, false).unwrap();
        CudaAccelerator.copy_in(bytes, &mut tensor, &*stream).unwrap();
        stream.synchronize(deadline_in(SOON)).unwrap();
        return tensor;
    }
    let mut tensor = Tensor::zeros(dtype, bytes.len() / dtype.size());
    tensor.bytes_mut().copy_from_slice(bytes);
    tensor
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    if tensor.device().is_cpu() {
        return tensor.bytes().to_vec();
    }
    let mut bytes = vec![0; tensor.byte_len()];
    let stream = CudaAccelerator.new_stream(tensor.device().index, false).unwrap();
    CudaAccelerator.copy_out(tensor, &mut bytes, &*stream).unwrap();
    bytes
}

fn run(
    group: &dyn ProcessGroup,
    op: Collective,
    options: SubmitOptions,
) -> Result<(Vec<Tensor>, u32), Error> {
    let done = group.run(op, options).map_err(|r| r.error)?.take()?;
    Ok((done.tensors, done.contributors))
}

/// What one rank's calls leave: every output's bytes, and the contributors that were counted.
fn calls(rank: u32, world: u32, group: &dyn ProcessGroup, at: &Device) -> Vec<(Vec<u8>, u32)> {
    let n = world as usize;
    let mut seen = Vec::new();
    let mut go = |op: Collective, contribute: bool| {
        let options = SubmitOptions {
            contribute,
            ..SubmitOptions::by(deadline_in(SOON))
        };
        let (tensors, contributors) = run(group, op, options).unwrap();
        seen.extend(tensors.iter().map(|t| (bytes_of(t), contributors)));
    };
    for (count, op) in [(1, ReduceOp::Sum), (200_003, ReduceOp::Avg), (0, ReduceOp::Sum)] {
        let tensors = vec![tensor_on(at, DType::F32, &own(rank, DType::F32, count))];
        go(Collective::AllReduce { tensors, op }, true);
    }
    // Several tensors of narrower types, in one reduction; then rank 1 abstains, then all do.
    let narrow = |dtype| {
        [70, 8192, 3]
            .map(|count| tensor_on(at, dtype, &own(rank, dtype, count)))
            .into()
    };
    for (dtype, contributes) in [(DType::F16, true), (DType::BF16, rank != 1), (DType::F16, false)] {
        let op = ReduceOp::Avg;
        go(
            Collective::AllReduce {
                tensors: narrow(dtype),
                op,
            },
            contributes,
        );
    }
    let part = 9000;
    let input = tensor_on(at, DType::F32, &own(rank, DType::F32, part * n));
    let output = tensor_on(at, DType::F32, &own(9, DType::F32, part));
    go(
        Collective::ReduceScatterInto {
            pairs: vec![(input, output)],
            op: ReduceOp::Sum,
        },
        true,
    );
    let inputs = (0..n)
        .map(|_| tensor_on(at, DType::BF16, &own(rank, DType::BF16, 77)))
        .collect();
    let output = tensor_on(at, DType::BF16, &own(9, DType::BF16, 77));
    let op = ReduceOp::Avg;
    go(Collective::ReduceScatter { inputs, output, op }, true);
    seen
}

fn same_bits(codec: Codec, world: u32, make: Make) {
    let all = [
        (Accuracy::Economic, Rounding::Nearest),
        (Accuracy::Best, Rounding::Stochastic { key: 5 }),
    ];
    for (accuracy, rounding) in all {
        let options = QuantizeOptions {
            codec: codec.into(),
            accuracy,
            rounding,
            timeout: SOON,
            ..QuantizeOptions::default()
        };
        let host = ranks(world, (over_gloo, &options), |rank, group| {
            calls(rank, world, group, &Device::CPU)
        });
        let device = ranks(world, (make, &options), |rank, group| {
            calls(rank, world, group, &device(rank))
        });
        for (rank, (host, device)) in host.iter().zip(&device).enumerate() {
            assert_eq!(host.len(), device.len());
            for (call, (host, device)) in host.iter().zip(device).enumerate() {
                let what = format!("{accuracy:?}, rank {rank}, output {call}");
                assert_eq!(host.1, device.1, "{what}: contributors");
                same(&what, &host.0, &device.0);
            }
        }
    }
}

/// The values are written by the caller's stream, which still has work before it.
fn in_order() {
    let options = QuantizeOptions {
        codec: Codec::Int8B64.into(),
        ..QuantizeOptions::default()
    };
    let sums = ranks(2, (over_nccl, &options), |rank, group| {
        let index = device(rank).index;
        let stream = CudaAccelerator.new_stream(index, false).unwrap();
        let count = 4 << 20;
        let mut tensor = CudaAccelerator.alloc(index, DType::F32, &[count]).unwrap();
        let mut pinned = CudaAccelerator.alloc_host(index, DType::F32, &[count]).unwrap();
        for value in [1e9f32, 63.5] {
            pinned.as_mut_slice::<f32>().unwrap().fill(value);
            CudaAccelerator
                .copy_in(pinned.bytes(), &mut tensor, &*stream)
                .unwrap();
        }
        let submit = SubmitOptions {
            stream: Some(stream),
            ..SubmitOptions::by(deadline_in(SOON))
        };
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Sum,
        };
        bytes_of(&run(group, op, submit).unwrap().0[0])
    });
    for sum in sums {
        let wrong = sum
            .as_chunks::<4>()
            .0
            .iter()
            .find(|b| f32::from_ne_bytes(**b) != 127.0);
        assert_eq!(wrong, None);
    }
}

fn refusals() {
    let with = |options| over_nccl(0, options).err().unwrap();
    let plain = QuantizeOptions::default;
    for (options, word) in [
        (
            QuantizeOptions {
                codec: Codec::Int4B64.into(),
                ..plain()
            },
            "int4-b64",
        ),
        (
            QuantizeOptions {
                error_feedback: true,
                ..plain()
            },
            "residuals",
        ),
        (
            QuantizeOptions {
                moves: Moves::Quantized,
                ..plain()
            },
            "bit for bit",
        ),
    ] {
        let e = with(options);
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(
            e.to_string().contains(word) && e.to_string().contains("Staged"),
            "{e}"
        );
    }
}
