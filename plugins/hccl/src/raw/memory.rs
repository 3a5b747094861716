//! Device memory as tensors.

use std::any::Any;
use std::ptr::NonNull;

use crate::ftcore::{DType, Device, DeviceKind, Error, Result, Tensor};
use crate::raw::hccl::Span;
use crate::runtime::Runtime;

/// An allocation; retired when its tensor is dropped, unless a copy may still touch it.
struct Allocation {
    runtime: &'static Runtime,
    address: u64,
    bytes: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.runtime.is_suspect(self.address, self.bytes) {
            return self.runtime.retire(self.address, self.bytes);
        }
        let bytes = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        match at(self.address, DType::U8, &[bytes], Box::new(())) {
            Ok(lost) => lost.leak("a copy that has not ended may still use it"),
            Err(error) => tracing::warn!(%error, bytes, "device memory is lost and not counted"),
        }
    }
}

/// The device that all memory of this plugin is on.
pub(crate) const DEVICE: Device = Device::new(DeviceKind::Hpu, 0);

/// A tensor in device memory with undefined contents.
pub(crate) fn tensor(runtime: &'static Runtime, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let bytes = shape
        .iter()
        .try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim))
        .filter(|bytes| isize::try_from(*bytes).is_ok())
        .and_then(|bytes| u64::try_from(bytes).ok())
        .ok_or_else(|| Error::invalid(format!("shape {shape:?} of {dtype} does not fit in memory")))?;
    let (address, bytes) = runtime.allocate(bytes)?;
    let owner = Allocation {
        runtime,
        address,
        bytes,
    };
    at(address, dtype, shape, Box::new(owner))
}

/// An allocation as a tensor, for as long as `owner` lives.
fn at(address: u64, dtype: DType, shape: &[usize], owner: Box<dyn Any + Send + Sync>) -> Result<Tensor> {
    let pointer = usize::try_from(address)
        .ok()
        .and_then(|a| NonNull::new(a as *mut u8))
        .ok_or_else(|| Error::invalid("the driver's address does not fit a pointer"))?;
    // SAFETY: the allocation is its owner's alone, large enough, aligned to 128 bytes, and lives as long as its owner; it
    // is never dereferenced on the host since its device is not the CPU.
    unsafe { Tensor::from_raw(pointer, dtype, shape, None, DEVICE, owner) }
}

/// Where a tensor's data is. The pointer stays valid while the tensor lives.
pub(crate) fn span(tensor: &Tensor) -> Span {
    Span {
        address: tensor.as_ptr() as usize as u64,
        count: tensor.count(),
        dtype: tensor.dtype(),
    }
}
