//! An operation as it comes in: read, checked, and its memory held as tensors.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use ftcore::{Collective, DType, Error, OpKind, ReduceOp, Result, Stream, SubmitOptions, Tensor};

use super::{breach, read_device};
use crate::abi::{self, Buffer, Growing};
use crate::{fault, text};

/// The host's memory, held for as long as this value lives.
struct Lent {
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: the ABI says that retain and release may be called from any thread.
unsafe impl Send for Lent {}
// SAFETY: as above; nothing is read through it.
unsafe impl Sync for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: gives back exactly the reference that was taken when this was made.
            unsafe { release(self.owner) }
        }
    }
}

/// An operation that came in.
pub(super) struct Incoming {
    pub(super) op: Collective,
    pub(super) options: SubmitOptions,
    /// Of the addresses in order: the backend must give back the same memory.
    pub(super) addresses: u64,
}

/// Mixes addresses in their order.
pub(super) fn mix(so_far: u64, tensor: &Tensor) -> u64 {
    so_far.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ tensor.as_ptr() as u64
}

/// Takes a reference to the memory of one buffer.
///
/// # Safety
/// The buffer keeps to the ABI.
pub(super) unsafe fn hold(buffer: &abi::Buffer) -> Result<Tensor> {
    let dtype = u8::try_from(buffer.dtype)
        .ok()
        .and_then(DType::from_code)
        .ok_or_else(|| {
            Error::unsupported(format!(
                "element type {} is not known to this plugin",
                buffer.dtype
            ))
        })?;
    // SAFETY: by the contract.
    let dims = unsafe { text::list(buffer.shape, buffer.shape_len, "dimensions") }.map_err(breach)?;
    // Few tensors have more than eight dimensions: no allocation for the rest.
    let mut few = [0usize; 8];
    let many: Vec<usize>;
    let wide = |d: u64| usize::try_from(d).unwrap_or(usize::MAX);
    let shape: &[usize] = match few.get_mut(..dims.len()) {
        Some(slots) => {
            for (slot, d) in slots.iter_mut().zip(dims) {
                *slot = wide(*d);
            }
            slots
        }
        None => {
            many = dims.iter().map(|d| wide(*d)).collect();
            &many
        }
    };
    let elements = shape.iter().try_fold(1usize, |a, d| a.checked_mul(*d));
    let fits = elements.is_some_and(|n| {
        n as u64 == buffer.count
            && n.checked_mul(dtype.size())
                .is_some_and(|b| b as u64 == buffer.bytes)
    });
    if !fits {
        return Err(breach(format!(
            "a buffer of {} bytes for {} elements of {dtype} in shape {shape:?}",
            buffer.bytes, buffer.count
        )));
    }
    let ptr = NonNull::new(buffer.ptr.cast::<u8>()).ok_or_else(|| breach("a buffer at address 0".into()))?;
    // SAFETY: by the contract.
    let device = unsafe { read_device(buffer.device) }?;
    if let Some(retain) = buffer.retain {
        // SAFETY: the host's own function for its own owner.
        unsafe { retain(buffer.owner) }
    }
    let lent = Lent {
        owner: buffer.owner,
        release: buffer.retain.and(buffer.release),
    };
    // SAFETY: the host lends this memory exclusively until the last reference is given back.
    unsafe { Tensor::from_raw(ptr, dtype, shape, None, device, Box::new(lent)) }
}

fn stride<T: Growing>(said: u64, what: &str) -> Result<usize> {
    let ok = said >= T::MINIMUM as u64 && said <= abi::LARGEST && said.is_multiple_of(8);
    if ok {
        Ok(usize::try_from(said).unwrap_or(0))
    } else {
        Err(breach(format!("a stride of {said} bytes between {what}")))
    }
}

/// Reads every element of an array of growing structs.
///
/// # Safety
/// `first` points to `count` structs that keep to the ABI, `stride` bytes apart.
unsafe fn each<T: Growing, R>(
    first: *const T,
    count: u64,
    said: u64,
    what: &str,
    mut take: impl FnMut(&T) -> Result<R>,
) -> Result<Vec<R>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let stride = stride::<T>(said, what)?;
    if first.is_null() || count > text::MOST {
        return Err(breach(format!("{count} {what} at {first:p}")));
    }
    (0..usize::try_from(count).unwrap_or(0))
        .map(|i| {
            // SAFETY: by the contract the array has `count` elements of `stride` bytes.
            let element = unsafe { abi::read(first.byte_add(i * stride)) }.map_err(breach)?;
            take(&element)
        })
        .collect()
}

/// Reads an operation and takes a reference to each of its buffers. On an error none is kept.
///
/// # Safety
/// The operation keeps to the ABI.
pub(super) unsafe fn read(operation: *const abi::Operation) -> Result<Incoming> {
    // SAFETY: by the contract.
    let o = unsafe { abi::read(operation) }.map_err(breach)?;
    // SAFETY: by the contract; a stream handle is one of ours.
    let mut addresses = 0;
    // SAFETY: by the contract; a stream handle is one of ours.
    let (op, stream) = unsafe { (collective(&o, true, &mut addresses)?, stream(o.stream)) };
    let options = SubmitOptions {
        deadline: Some(fault::deadline(o.timeout_ms)),
        contribute: o.contribute != 0,
        stream,
    };
    Ok(Incoming {
        op,
        options,
        addresses,
    })
}

/// # Safety
/// `handle` is null or a stream handle that this plugin gave out and that was not given back.
unsafe fn stream(handle: *mut c_void) -> Option<Arc<dyn Stream>> {
    // SAFETY: by the contract.
    unsafe { handle.cast::<Arc<dyn Stream>>().as_ref() }.cloned()
}

fn reduction(o: &abi::Operation) -> Result<ReduceOp> {
    Ok(match o.reduce {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Avg,
        2 => ReduceOp::Product,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::Band,
        6 => ReduceOp::Bor,
        7 => ReduceOp::Bxor,
        8 => ReduceOp::PremulSum(o.factor),
        n => {
            return Err(Error::unsupported(format!(
                "reduction {n} is not known to this plugin"
            )));
        }
    })
}

fn pairs(tensors: Vec<Tensor>) -> Result<Vec<(Tensor, Tensor)>> {
    if !tensors.len().is_multiple_of(2) {
        return Err(breach("an odd number of buffers for pairs".into()));
    }
    let mut pairs = Vec::with_capacity(tensors.len() / 2);
    let mut rest = tensors.into_iter();
    while let (Some(a), Some(b)) = (rest.next(), rest.next()) {
        pairs.push((a, b));
    }
    Ok(pairs)
}

/// # Safety
/// As [`read`].
unsafe fn collective(o: &abi::Operation, batches: bool, addresses: &mut u64) -> Result<Collective> {
    let kind = OpKind::ALL
        .get(o.kind as usize)
        .copied()
        .ok_or_else(|| Error::unsupported(format!("operation {} is not known to this plugin", o.kind)))?;
    // SAFETY: by the contract.
    let held = |b: &Buffer| {
        // SAFETY: by the contract.
        let tensor = unsafe { hold(b) }?;
        *addresses = mix(*addresses, &tensor);
        Ok(tensor)
    };
    // SAFETY: by the contract.
    let mut tensors = unsafe { each(o.buffers, o.buffer_count, o.buffer_stride, "buffers", held) }?;
    let splits = |first, count| -> Result<Vec<usize>> {
        // SAFETY: by the contract.
        let list = unsafe { text::list::<u64>(first, count, "splits") }.map_err(breach)?;
        Ok(list
            .iter()
            .map(|s| usize::try_from(*s).unwrap_or(usize::MAX))
            .collect())
    };
    let one = |tensors: &mut Vec<Tensor>| {
        let tensor = tensors.pop();
        tensor.ok_or_else(|| breach(format!("{kind} with too few buffers")))
    };
    let op = match kind {
        OpKind::AllReduce => Collective::AllReduce {
            tensors: std::mem::take(&mut tensors),
            op: reduction(o)?,
        },
        OpKind::Broadcast => Collective::Broadcast {
            tensors: std::mem::take(&mut tensors),
            root: o.root,
        },
        OpKind::Reduce => Collective::Reduce {
            tensor: one(&mut tensors)?,
            op: reduction(o)?,
            root: o.root,
        },
        OpKind::AllGather | OpKind::Gather => {
            if tensors.is_empty() {
                return Err(breach(format!("{kind} without buffers")));
            }
            let input = tensors.remove(0);
            let outputs = std::mem::take(&mut tensors);
            match kind {
                OpKind::AllGather => Collective::AllGather { input, outputs },
                _ => Collective::Gather {
                    input,
                    outputs,
                    root: o.root,
                },
            }
        }
        OpKind::Scatter => {
            let output = one(&mut tensors)?;
            Collective::Scatter {
                inputs: std::mem::take(&mut tensors),
                output,
                root: o.root,
            }
        }
        OpKind::ReduceScatter => {
            let output = one(&mut tensors)?;
            Collective::ReduceScatter {
                inputs: std::mem::take(&mut tensors),
                output,
                op: reduction(o)?,
            }
        }
        OpKind::AllGatherInto => Collective::AllGatherInto {
            pairs: pairs(std::mem::take(&mut tensors))?,
        },
        OpKind::AllGatherInPlace => Collective::AllGatherInPlace {
            tensors: std::mem::take(&mut tensors),
        },
        OpKind::ReduceScatterInPlace => Collective::ReduceScatterInPlace {
            tensors: std::mem::take(&mut tensors),
            op: reduction(o)?,
        },
        OpKind::ReduceScatterInto => Collective::ReduceScatterInto {
            pairs: pairs(std::mem::take(&mut tensors))?,
            op: reduction(o)?,
        },
        OpKind::AllToAll => {
            let inputs = o.input_count as usize;
            if inputs > tensors.len() {
                return Err(breach(format!("{inputs} inputs in {} buffers", tensors.len())));
            }
            let outputs = tensors.split_off(inputs);
            Collective::AllToAll {
                inputs: std::mem::take(&mut tensors),
                outputs,
            }
        }
        OpKind::AllToAllInto => {
            let output = one(&mut tensors)?;
            Collective::AllToAllInto {
                input: one(&mut tensors)?,
                output,
                input_splits: splits(o.input_splits, o.input_split_count)?,
                output_splits: splits(o.output_splits, o.output_split_count)?,
            }
        }
        OpKind::Send => Collective::Send {
            tensor: one(&mut tensors)?,
            peer: o.peer,
            tag: o.tag,
        },
        OpKind::Recv => Collective::Recv {
            tensor: one(&mut tensors)?,
            peer: (o.peer != abi::NONE).then_some(o.peer),
            tag: o.tag,
        },
        OpKind::Barrier => Collective::Barrier,
        OpKind::MonitoredBarrier => Collective::MonitoredBarrier {
            wait_all: o.wait_all != 0,
        },
        OpKind::Batch if batches => {
            // SAFETY: by the contract.
            let read = |child: &abi::Operation| unsafe { collective(child, false, addresses) };
            // SAFETY: by the contract.
            let ops = unsafe {
                each(
                    o.children,
                    o.child_count,
                    o.child_stride,
                    "parts of a batch",
                    read,
                )
            }?;
            Collective::Batch { ops }
        }
        kind => {
            return Err(Error::unsupported(format!(
                "{kind} is not known to this plugin, here"
            )));
        }
    };
    if !tensors.is_empty() {
        return Err(breach(format!("{kind} with {} buffers too many", tensors.len())));
    }
    Ok(op)
}
