//! Candle tensors as ftcore's, and operations on them in the order of candle's stream.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{Storage, Tensor};
use ftcore::{
    Collective, DType, Error, ErrorKind, ProcessGroup, ProcessGroupExt, Result, Stream, SubmitOptions, Work,
};

use crate::raw;

pub(crate) fn failed(text: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("candle: {text}"))
}

fn dtype_of(dtype: candle_core::DType) -> Result<DType> {
    use candle_core::DType as Theirs;
    Ok(match dtype {
        Theirs::U8 => DType::U8,
        Theirs::U32 => DType::U32,
        Theirs::I16 => DType::I16,
        Theirs::I32 => DType::I32,
        Theirs::I64 => DType::I64,
        Theirs::BF16 => DType::BF16,
        Theirs::F16 => DType::F16,
        Theirs::F32 => DType::F32,
        Theirs::F64 => DType::F64,
        Theirs::F8E4M3 => DType::F8E4M3,
        other => return Err(failed(&format!("{other:?} has no counterpart in ftcore"))),
    })
}

fn device_of(device: &candle_core::Device) -> Result<&candle_core::CudaDevice> {
    device.as_cuda_device().map_err(|_| {
        failed(&format!(
            "the tensor is on {:?}, not on a CUDA device",
            device.location()
        ))
    })
}

/// The stream on which candle works on `device`, for `SubmitOptions` and `Work::wait_on`. By default it is the calling thread's own
/// (`CU_STREAM_PER_THREAD`), which belongs to this thread: on another one, take it again.
///
/// Errors: `InvalidArgument` (not a CUDA device), what the driver says.
pub fn stream_of(device: &candle_core::Device) -> Result<Arc<dyn Stream>> {
    raw::stream(device_of(device)?)
}

/// The memory of a contiguous CUDA tensor, as ftcore's tensor; no copy, and the candle tensor's storage is kept until it is dropped. What
/// writes to it changes the candle tensor and every view of the same storage.
///
/// Errors: `InvalidArgument` (another device, a dtype that ftcore has not, strided).
pub fn lend(tensor: &Tensor) -> Result<ftcore::Tensor> {
    let device = device_of(tensor.device())?;
    let dtype = dtype_of(tensor.dtype())?;
    let (address, held, offset) = {
        let (storage, layout) = tensor.storage_and_layout();
        if !layout.is_contiguous() {
            let text = format!(
                "shape {:?} with strides {:?} is not contiguous",
                layout.dims(),
                layout.stride()
            );
            return Err(failed(&text));
        }
        let Storage::Cuda(storage) = &*storage else {
            return Err(failed("the storage is not on a CUDA device"));
        };
        let (address, held) = raw::storage(&storage.slice, device)?;
        (address, held, layout.start_offset() * dtype.size())
    };
    let bytes = tensor.elem_count() * dtype.size();
    if offset + bytes > held {
        return Err(failed(&format!(
            "{bytes} bytes at {offset} reach past a storage of {held}"
        )));
    }
    raw::tensor(
        address + offset as u64,
        dtype,
        tensor.dims(),
        raw::index_of(device)?,
        tensor.clone(),
    )
}

/// Submits `op`, whose tensors are [`lend`]ed and lie on `device`: it reads what candle has enqueued before, and whatever candle enqueues
/// afterwards (also freeing the memory) comes after it. The host waits for nothing; `Work` says how it ended. After a failure the contents
/// of the tensors are undefined, and memory that the device may still touch is kept for ever.
///
/// Errors: as [`ProcessGroupExt::run`]; the operation is lost with its loans, never the candle tensors.
pub fn submit(
    group: &dyn ProcessGroup,
    op: Collective,
    device: &candle_core::Device,
    deadline: Instant,
) -> Result<Work> {
    let stream = stream_of(device)?;
    let options = SubmitOptions {
        stream: Some(stream.clone()),
        ..SubmitOptions::by(deadline)
    };
    let work = group.run(op, options).map_err(|rejected| rejected.error)?;
    work.wait_on(&*stream)?;
    Ok(work)
}
