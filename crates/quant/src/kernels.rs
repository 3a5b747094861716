//! The seam for device kernels: whatever turns a device's values into the bytes of a format, and back.
//!
//! Where the group below moves host memory, a device encodes first and copies the few bytes that come out; where it moves the device's own
//! memory only, they stay there ([`DeviceBytes`]). The host's kernels are [`Codec`](crate::Codec) itself; a crate that brings a device
//! submits a [`StaticBlockKernels`].

use std::ops::Range;
use std::sync::Arc;

use ftcore::float_mode::DefaultMode;
use ftcore::{DType, Device, DeviceKind, Element, Error, Result, Tensor};
use half::{bf16, f16};

use crate::codec::{Codec, Encoding};

/// A part of one of an operation's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The tensor's place in [`Collective::tensors`](ftcore::Collective::tensors).
    pub tensor: usize,
    /// The elements.
    pub range: Range<usize>,
}

/// Conversions on one device. All kernels give the same bytes for the same values, and the same values for the same bytes, as the
/// host's do; the calls return once their outputs are there. Errors: `InvalidArgument` for tensors or ranges that do not fit.
pub trait BlockKernels: Send + Sync {
    /// A new f32 tensor of `count` zeros on `device`.
    fn zeros(&self, device: &Device, count: usize) -> Result<Tensor>;
    /// The values of `pieces` of `tensors` (f32, f16 or bf16) one after the other as a new f32 tensor on their device.
    fn gather(&self, tensors: &[Tensor], pieces: &[Piece]) -> Result<Tensor>;
    /// The inverse of [`gather`](Self::gather), rounding to nearest even where the tensors are narrower.
    fn scatter(&self, values: &Tensor, tensors: &mut [Tensor], pieces: &[Piece]) -> Result<()>;
    /// Appends the encoding of `range` of the f32 tensor `values` to `out`. Returns how many values are not finite in it.
    fn encode(
        &self,
        codec: Codec,
        how: Encoding,
        values: &Tensor,
        range: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<usize>;
    /// Decodes `bytes` into `range` of the f32 tensor `values`, or adds to it.
    fn decode(
        &self,
        codec: Codec,
        bytes: &[u8],
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()>;
    /// Divides `range` of the f32 tensor `values`.
    fn divide(&self, values: &mut Tensor, range: Range<usize>, divisor: f32) -> Result<()>;
    /// Encoded bytes in the device's memory. Provided: none, and the group below must move host memory.
    fn on_device(&self) -> Option<&dyn DeviceBytes> {
        None
    }
}

/// Chunks that stay on the device: u8 tensors of a header and the encoded values behind it. As [`BlockKernels`], the calls return
/// once their outputs are there.
pub trait DeviceBytes: Send + Sync {
    /// A tensor of `bytes` bytes on `device`, for a chunk to arrive in; what is in it is undefined.
    fn room(&self, device: &Device, bytes: usize) -> Result<Tensor>;
    /// `header` and behind it the encoding of `range` of the f32 tensor `values`, or with `how` absent as many zeros. Returns how many values are not
    /// finite in it, too.
    fn pack(
        &self,
        header: &[u8],
        codec: Codec,
        how: Option<Encoding>,
        values: &Tensor,
        range: Range<usize>,
    ) -> Result<(Tensor, usize)>;
    /// The first `bytes` bytes of every chunk.
    fn headers(&self, chunks: &[Tensor], bytes: usize) -> Result<Vec<Vec<u8>>>;
    /// Decodes what lies behind the first bytes, as many as are named, of the chunk `from` into `range` of the f32 tensor `values`, or adds to it.
    fn unpack(
        &self,
        codec: Codec,
        from: (&Tensor, usize),
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()>;
    /// The formats that these kernels know.
    fn knows(&self, codec: Codec) -> bool;
}

/// Kernels for a device kind that are linked in. Submit one with `ftcore::inventory::submit!`.
pub struct StaticBlockKernels {
    /// The device kind's name; not `cpu`.
    pub kind: &'static str,
    /// Makes them. Several providers of one kind: the one whose `provider` sorts first is used.
    pub make: fn() -> Arc<dyn BlockKernels>,
    /// Who provides them, for messages.
    pub provider: &'static str,
}

ftcore::inventory::collect!(StaticBlockKernels);

/// The kernels for values on devices of `kind`.
///
/// Errors: `Unsupported` if none are linked in.
pub fn block_kernels(kind: &DeviceKind) -> Result<Arc<dyn BlockKernels>> {
    if *kind == DeviceKind::Cpu {
        return Ok(Arc::new(HostKernels));
    }
    let found = ftcore::inventory::iter::<StaticBlockKernels>
        .into_iter()
        .filter(|k| k.kind == kind.name())
        .min_by_key(|k| k.provider);
    found.map(|k| (k.make)()).ok_or_else(|| {
        Error::unsupported(format!(
            "values on '{kind}' cannot be quantised: no kernels for that kind of device are linked in; copy them to the host first"
        ))
    })
}

/// The kinds of devices, besides the host, that kernels are linked in for.
pub(crate) fn device_kinds() -> impl Iterator<Item = &'static str> {
    ftcore::inventory::iter::<StaticBlockKernels>
        .into_iter()
        .map(|k| k.kind)
}

/// The host's.
struct HostKernels;

fn outside(range: &Range<usize>, count: usize) -> Error {
    Error::invalid(format!(
        "elements {} to {} of a tensor of {count}",
        range.start, range.end
    ))
}

fn part<T: Element>(tensor: &Tensor, range: Range<usize>) -> Result<&[T]> {
    let all = tensor.as_slice::<T>()?;
    let count = all.len();
    all.get(range.clone()).ok_or_else(|| outside(&range, count))
}

fn part_mut<T: Element>(tensor: &mut Tensor, range: Range<usize>) -> Result<&mut [T]> {
    let count = tensor.count();
    tensor
        .as_mut_slice::<T>()?
        .get_mut(range.clone())
        .ok_or_else(|| outside(&range, count))
}

fn no_tensor(index: usize) -> Error {
    Error::invalid(format!("the operation has no tensor {index}"))
}

fn not_a_float(dtype: DType) -> Error {
    Error::unsupported(format!("{dtype} is not quantised: only f32, f16 and bf16 are"))
}

/// In the thread's own mode for floats, so not inlined: see [`DefaultMode`].
#[inline(never)]
fn divide_here(values: &mut [f32], divisor: f32) {
    values.iter_mut().for_each(|v| *v /= divisor);
}

impl BlockKernels for HostKernels {
    fn zeros(&self, _: &Device, count: usize) -> Result<Tensor> {
        Ok(Tensor::zeros(DType::F32, count))
    }

    fn gather(&self, tensors: &[Tensor], pieces: &[Piece]) -> Result<Tensor> {
        let mut values = Vec::with_capacity(pieces.iter().map(|p| p.range.len()).sum());
        for Piece { tensor, range } in pieces {
            let tensor = tensors.get(*tensor).ok_or_else(|| no_tensor(*tensor))?;
            let range = range.clone();
            match tensor.dtype() {
                DType::F32 => values.extend_from_slice(part::<f32>(tensor, range)?),
                DType::F16 => values.extend(part::<f16>(tensor, range)?.iter().map(|v| v.to_f32())),
                DType::BF16 => values.extend(part::<bf16>(tensor, range)?.iter().map(|v| v.to_f32())),
                other => return Err(not_a_float(other)),
            }
        }
        Ok(Tensor::from_vec(values))
    }

    fn scatter(&self, values: &Tensor, tensors: &mut [Tensor], pieces: &[Piece]) -> Result<()> {
        let mut rest = values.as_slice::<f32>()?;
        for Piece { tensor, range } in pieces {
            let tensor = tensors.get_mut(*tensor).ok_or_else(|| no_tensor(*tensor))?;
            let (from, behind) = rest
                .split_at_checked(range.len())
                .ok_or_else(|| outside(range, rest.len()))?;
            rest = behind;
            let range = range.clone();
            match tensor.dtype() {
                DType::F32 => part_mut::<f32>(tensor, range)?.copy_from_slice(from),
                DType::F16 => {
                    for (to, v) in part_mut::<f16>(tensor, range)?.iter_mut().zip(from) {
                        *to = f16::from_f32(*v);
                    }
                }
                DType::BF16 => {
                    for (to, v) in part_mut::<bf16>(tensor, range)?.iter_mut().zip(from) {
                        *to = bf16::from_f32(*v);
                    }
                }
                other => return Err(not_a_float(other)),
            }
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
        Ok(codec.encode_with(how, part::<f32>(values, range)?, out))
    }

    fn decode(
        &self,
        codec: Codec,
        bytes: &[u8],
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()> {
        let to = part_mut::<f32>(values, range)?;
        if add {
            codec.decode_add(bytes, to)
        } else {
            codec.decode(bytes, to)
        }
    }

    fn divide(&self, values: &mut Tensor, range: Range<usize>, divisor: f32) -> Result<()> {
        let values = part_mut::<f32>(values, range)?;
        let _mode = DefaultMode::set();
        divide_here(values, divisor);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::ErrorKind;

    #[test]
    fn pieces_of_all_float_types_are_gathered_and_scattered_in_order() {
        let kernels = block_kernels(&DeviceKind::Cpu).unwrap();
        let mut tensors = vec![
            Tensor::from_vec(vec![1.0f32, 2.0, 3.0]),
            Tensor::from_vec([4.0f32, 5.0].map(f16::from_f32).to_vec()),
            Tensor::from_vec([6.0f32, 7.0].map(bf16::from_f32).to_vec()),
        ];
        let piece = |tensor, range| Piece { tensor, range };
        let pieces = [piece(2, 1..2), piece(0, 1..3), piece(1, 0..2)];
        let values = kernels.gather(&tensors, &pieces).unwrap();
        assert_eq!(values.as_slice::<f32>().unwrap(), [7.0, 2.0, 3.0, 4.0, 5.0]);
        let new = Tensor::from_vec(vec![0.5f32, 0.25, -1.0, 1e9, -0.125]);
        kernels.scatter(&new, &mut tensors, &pieces).unwrap();
        assert_eq!(tensors[0].as_slice::<f32>().unwrap(), [1.0, 0.25, -1.0]);
        assert_eq!(
            tensors[1].as_slice::<f16>().unwrap(),
            [f16::INFINITY, f16::from_f32(-0.125)]
        );
        assert_eq!(tensors[2].as_slice::<bf16>().unwrap()[1], bf16::from_f32(0.5));
        assert!(kernels.gather(&tensors, &[piece(3, 0..1)]).is_err());
        assert!(kernels.gather(&tensors, &[piece(0, 0..4)]).is_err());
    }

    #[test]
    fn a_device_without_kernels_is_unsupported_by_name() {
        let e = block_kernels(&DeviceKind::Hpu).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains("hpu"), "{e}");
    }
}
