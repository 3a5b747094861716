//! Quantised collectives on CUDA tensors. Linking this crate gives the device kind `cuda` its [`BlockKernels`]: values are encoded and
//! decoded where they are, and over NCCL the encoded bytes stay on the device.
//!
//! `kernels` holds the CUDA C source, NVRTC, which compiles it for the device at hand when it is first needed, and the calls;
//! `tensors` says what is done with them. The bytes are those of [`Codec`], bit for bit.
//!
//! Environment: `OXCCL_NVRTC_PATH` (the library `libnvrtc.so`, or the folder that holds it).

mod kernels;
mod tensors;

use std::sync::Arc;

use ftcore::Result;
use quant::{BlockKernels, Codec, StaticBlockKernels};

/// The formats that have kernels.
pub const FORMATS: [Codec; 3] = [Codec::Int8B64, Codec::Int8B32, Codec::MxE4M3];

ftcore::inventory::submit! {
    StaticBlockKernels {
        kind: "cuda",
        make: || Arc::new(tensors::CudaKernels) as Arc<dyn BlockKernels>,
        provider: "oxccl-quant-cuda",
    }
}

/// Compiles the kernels for an architecture such as `sm_90` without a device; the machine code's bytes, and what NVRTC is.
///
/// Errors: `Unsupported` if NVRTC is missing or does not know the architecture, `Backend` with its log.
pub fn compile(architecture: &str) -> Result<(Vec<u8>, String)> {
    let nvrtc = kernels::nvrtc::get()?;
    Ok((nvrtc.compile(kernels::SOURCE, architecture)?, nvrtc.describe()))
}
