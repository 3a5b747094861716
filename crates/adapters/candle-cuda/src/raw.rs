//! Addresses and stream handles of candle, as ftcore takes them. The only unsafe part.

use std::ptr::NonNull;
use std::sync::Arc;

use backend_nccl::CudaAccelerator;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice};
use ftcore::{DType, Device, DeviceKind, Error, Result, Stream};

use crate::loan::failed;

/// The index of the device, as the driver counts.
pub(crate) fn index_of(device: &CudaDevice) -> Result<u32> {
    let ordinal = device.cuda_stream().context().ordinal();
    u32::try_from(ordinal).map_err(|_| Error::invalid(format!("there is no cuda:{ordinal}")))
}

/// The stream on which candle works. By default that is the calling thread's own.
pub(crate) fn stream(device: &CudaDevice) -> Result<Arc<dyn Stream>> {
    let stream = device.cuda_stream();
    let (index, handle) = (index_of(device)?, stream.cu_stream() as usize);
    // SAFETY: candle's stream lies in the primary context of its device, and the owner keeps it.
    unsafe { CudaAccelerator.stream_from_handle(index, handle, Box::new(stream)) }
}

/// The first byte of a storage and the size of what it holds, in bytes. What candle has under way on its stream comes before any use.
pub(crate) fn storage(slice: &CudaStorageSlice, device: &CudaDevice) -> Result<(u64, usize)> {
    let stream = device.cuda_stream();
    fn of<T>(
        slice: &CudaSlice<T>,
        stream: &Arc<candle_core::cuda_backend::cudarc::driver::CudaStream>,
    ) -> (u64, usize) {
        // The guard tells cudarc of a use on this stream; ours is ordered by the stream itself.
        let (address, _guard) = slice.device_ptr(stream);
        (address, std::mem::size_of_val(slice).max(slice.num_bytes()))
    }
    Ok(match slice {
        CudaStorageSlice::U8(s) => of(s, &stream),
        CudaStorageSlice::U32(s) => of(s, &stream),
        CudaStorageSlice::I16(s) => of(s, &stream),
        CudaStorageSlice::I32(s) => of(s, &stream),
        CudaStorageSlice::I64(s) => of(s, &stream),
        CudaStorageSlice::BF16(s) => of(s, &stream),
        CudaStorageSlice::F16(s) => of(s, &stream),
        CudaStorageSlice::F32(s) => of(s, &stream),
        CudaStorageSlice::F64(s) => of(s, &stream),
        CudaStorageSlice::F8E4M3(s) => of(s, &stream),
        _ => return Err(failed("this storage has no counterpart in ftcore")),
    })
}

/// A tensor over `count` elements at `address`, which lie in the storage of `owner`.
pub(crate) fn tensor(
    address: u64,
    dtype: DType,
    shape: &[usize],
    index: u32,
    owner: candle_core::Tensor,
) -> Result<ftcore::Tensor> {
    let start = NonNull::new(address as *mut u8).ok_or_else(|| failed("the tensor has no memory"))?;
    let device = Device::new(DeviceKind::Cuda, index);
    // SAFETY: the candle tensor keeps its storage for as long as the owner lives; the caller checked that the elements lie within;
    // the driver aligns allocations, and candle's offsets are whole elements. Whatever else works on the memory does so on candle's
    // stream, after which the group orders itself and which is ordered after the group (`submit`).
    unsafe { ftcore::Tensor::from_raw(start, dtype, shape, None, device, Box::new(owner)) }
}
