//! The seam for device kernels: values on a device of another kind are quantised by the kernels that are linked in for it.
//!
//! The device is a stand-in: host memory that only these kernels look at.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ranks;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ftcore::{DType, Device, DeviceKind, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp, Result, Tensor};
use oxccl_quant::{BlockKernels, Codec, Encoding, Piece, QuantizeOptions, StaticBlockKernels, block_kernels};
use ranks::configured;

const KIND: &str = "standin";

static ENCODED: AtomicUsize = AtomicUsize::new(0);

fn device() -> Device {
    Device::new(DeviceKind::Named(KIND.into()), 0)
}

/// A tensor "on the device".
fn upload(values: &[f32]) -> Tensor {
    let mut memory = values.to_vec();
    let ptr = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
    let shape = [values.len()];
    // SAFETY: the vector lives in the owner and is reached through the tensor only.
    unsafe { Tensor::from_raw(ptr, DType::F32, &shape, None, device(), Box::new(memory)) }.unwrap()
}

fn view(tensor: &Tensor) -> &[f32] {
    // SAFETY: made by `upload`: that many floats of host memory, alive as long as the tensor.
    unsafe { std::slice::from_raw_parts(tensor.as_ptr().cast(), tensor.count()) }
}

fn view_mut(tensor: &mut Tensor) -> &mut [f32] {
    // SAFETY: as above; the borrow is the only access.
    unsafe { std::slice::from_raw_parts_mut(tensor.as_mut_ptr().cast(), tensor.count()) }
}

struct StandIn;

impl BlockKernels for StandIn {
    fn zeros(&self, _: &Device, count: usize) -> Result<Tensor> {
        Ok(upload(&vec![0.0; count]))
    }

    fn gather(&self, tensors: &[Tensor], pieces: &[Piece]) -> Result<Tensor> {
        let parts = pieces.iter().map(|p| &view(&tensors[p.tensor])[p.range.clone()]);
        Ok(upload(&parts.collect::<Vec<_>>().concat()))
    }

    fn scatter(&self, values: &Tensor, tensors: &mut [Tensor], pieces: &[Piece]) -> Result<()> {
        let mut rest = view(values);
        for p in pieces {
            let (part, behind) = rest.split_at(p.range.len());
            view_mut(&mut tensors[p.tensor])[p.range.clone()].copy_from_slice(part);
            rest = behind;
        }
        Ok(())
    }

    fn encode(
        &self,
        codec: Codec,
        how: Encoding,
        values: &Tensor,
        range: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<usize> {
        ENCODED.fetch_add(range.len(), Ordering::SeqCst);
        Ok(codec.encode_with(how, &view(values)[range], out))
    }

    fn decode(
        &self,
        codec: Codec,
        bytes: &[u8],
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()> {
        let to = &mut view_mut(values)[range];
        if add {
            codec.decode_add(bytes, to)
        } else {
            codec.decode(bytes, to)
        }
    }

    fn divide(&self, values: &mut Tensor, range: Range<usize>, divisor: f32) -> Result<()> {
        view_mut(values)[range].iter_mut().for_each(|v| *v /= divisor);
        Ok(())
    }
}

ftcore::inventory::submit! {
    StaticBlockKernels { kind: KIND, make: || Arc::new(StandIn), provider: "test" }
}

#[test]
fn values_on_another_device_are_reduced_by_its_kernels() {
    assert!(block_kernels(&device().kind).is_ok());
    for world in [2u32, 3] {
        let options = QuantizeOptions {
            codec: Codec::Int8B64.into(),
            ..QuantizeOptions::default()
        };
        let all = configured(world, &options, |rank, g, _| {
            let host = ranks::reduce(g, ranks::values(rank, 1000), ReduceOp::Avg, true)
                .unwrap()
                .0;
            let before = ENCODED.load(Ordering::SeqCst);
            let values = ranks::values(rank, 1000);
            // As one tensor, and in two parts.
            let work = g.all_reduce(upload(&values), ReduceOp::Avg).unwrap();
            let whole = work.take_tensor().unwrap();
            assert_eq!(*whole.device(), device());
            let parts = vec![upload(&values[..300]), upload(&values[300..])];
            let parts = g
                .all_reduce_coalesced(parts, ReduceOp::Avg)
                .unwrap()
                .take()
                .unwrap()
                .tensors;
            assert!(ENCODED.load(Ordering::SeqCst) > before);
            // The group below serves no such device: what is not quantised is refused.
            let refused = g.broadcast(upload(&values), 0).unwrap_err();
            assert!(matches!(
                refused.error.kind(),
                ErrorKind::Unsupported | ErrorKind::InvalidArgument
            ));
            assert!(g.capabilities().serves(&device().kind));
            let parts = [view(&parts[0]), view(&parts[1])].concat();
            (ranks::bits(&host), ranks::bits(view(&whole)), ranks::bits(&parts))
        });
        for (host, whole, parts) in &all {
            assert_eq!((whole, parts), (host, host), "the bits are the host kernels'");
            assert_eq!(host, &all[0].0);
        }
    }
}
