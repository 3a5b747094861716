//! What is asked of the kernels: [`BlockKernels`] with encoded bytes on the host, and [`DeviceBytes`] with encoded bytes on the device.

use std::ops::Range;
use std::sync::Arc;

use ftcore::{DType, Device, DeviceKind, Error, Result, Tensor};
use quant::{BlockKernels, Codec, DeviceBytes, Encoding, Piece};

use crate::kernels::{Kernels, known};

/// Those of every CUDA device; see the module.
pub(crate) struct CudaKernels;

fn on(device: &Device) -> Result<Arc<Kernels>> {
    match device.kind {
        DeviceKind::Cuda => Kernels::on(device.index),
        _ => Err(Error::invalid(format!("{device} is not a CUDA device"))),
    }
}

fn tensor_of(tensors: &[Tensor], index: usize) -> Result<&Tensor> {
    tensors
        .get(index)
        .ok_or_else(|| Error::invalid(format!("the operation has no tensor {index}")))
}

fn is_wide(dtype: DType) -> Result<bool> {
    match dtype {
        DType::F32 => Ok(true),
        DType::F16 | DType::BF16 => Ok(false),
        other => Err(Error::unsupported(format!(
            "{other} is not quantised: only f32, f16 and bf16 are"
        ))),
    }
}

impl BlockKernels for CudaKernels {
    fn zeros(&self, device: &Device, count: usize) -> Result<Tensor> {
        let kernels = on(device)?;
        let mut tensor = kernels.program.alloc(DType::F32, count)?;
        kernels.program.clear(&mut tensor)?;
        Ok(tensor)
    }

    fn gather(&self, tensors: &[Tensor], pieces: &[Piece]) -> Result<Tensor> {
        let first = tensor_of(tensors, pieces.first().map_or(0, |p| p.tensor))?;
        let kernels = on(first.device())?;
        let count = pieces.iter().map(|p| p.range.len()).sum();
        let mut values = kernels.program.alloc(DType::F32, count)?;
        let mut at = 0;
        for Piece { tensor, range } in pieces {
            let from = tensor_of(tensors, *tensor)?;
            if is_wide(from.dtype())? {
                kernels
                    .program
                    .copy((from, range.start * 4), (&mut values, at * 4), range.len() * 4)?;
            } else {
                kernels.widen(from, range, (&mut values, at))?;
            }
            at += range.len();
        }
        Ok(values)
    }

    fn scatter(&self, values: &Tensor, tensors: &mut [Tensor], pieces: &[Piece]) -> Result<()> {
        let kernels = on(values.device())?;
        let mut at = 0;
        for Piece { tensor, range } in pieces {
            let to = tensors
                .get_mut(*tensor)
                .ok_or_else(|| Error::invalid(format!("the operation has no tensor {tensor}")))?;
            if is_wide(to.dtype())? {
                kernels
                    .program
                    .copy((values, at * 4), (to, range.start * 4), range.len() * 4)?;
            } else {
                kernels.narrow((values, at), to, range)?;
            }
            at += range.len();
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
        let kernels = on(values.device())?;
        let length = codec.encoded_len(range.len());
        let mut encoded = kernels.program.alloc(DType::U8, length)?;
        let odd = kernels.encode(codec, how, (values, &range), (&mut encoded, 0))?;
        let begins = out.len();
        out.resize(begins + length, 0);
        let to = out.get_mut(begins..).unwrap_or_default();
        kernels.program.read(&mut [(&encoded, 0, to)])?;
        Ok(odd)
    }

    fn decode(
        &self,
        codec: Codec,
        bytes: &[u8],
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()> {
        let kernels = on(values.device())?;
        let mut encoded = kernels.program.alloc(DType::U8, bytes.len())?;
        kernels.program.write(bytes, &mut encoded, 0)?;
        kernels.decode(codec, (&encoded, 0), add, (values, &range))
    }

    fn divide(&self, values: &mut Tensor, range: Range<usize>, divisor: f32) -> Result<()> {
        on(values.device())?.divide(values, &range, divisor)
    }

    fn on_device(&self) -> Option<&dyn DeviceBytes> {
        Some(self)
    }
}

impl DeviceBytes for CudaKernels {
    fn room(&self, device: &Device, bytes: usize) -> Result<Tensor> {
        on(device)?.program.alloc(DType::U8, bytes)
    }

    fn pack(
        &self,
        header: &[u8],
        codec: Codec,
        how: Option<Encoding>,
        values: &Tensor,
        range: Range<usize>,
    ) -> Result<(Tensor, usize)> {
        let kernels = on(values.device())?;
        let length = header.len() + codec.encoded_len(range.len());
        let mut chunk = kernels.program.alloc(DType::U8, length)?;
        let odd = match how {
            Some(how) => kernels.encode(codec, how, (values, &range), (&mut chunk, header.len()))?,
            None => {
                kernels.program.clear(&mut chunk)?;
                0
            }
        };
        kernels.program.write(header, &mut chunk, 0)?;
        Ok((chunk, odd))
    }

    fn headers(&self, chunks: &[Tensor], bytes: usize) -> Result<Vec<Vec<u8>>> {
        let Some(first) = chunks.first() else {
            return Ok(Vec::new());
        };
        let mut headers = vec![vec![0; bytes]; chunks.len()];
        let mut parts: Vec<(&Tensor, usize, &mut [u8])> = chunks
            .iter()
            .zip(&mut headers)
            .map(|(chunk, header)| (chunk, 0, header.as_mut_slice()))
            .collect();
        on(first.device())?.program.read(&mut parts)?;
        Ok(headers)
    }

    fn unpack(
        &self,
        codec: Codec,
        (chunk, skip): (&Tensor, usize),
        add: bool,
        values: &mut Tensor,
        range: Range<usize>,
    ) -> Result<()> {
        on(values.device())?.decode(codec, (chunk, skip), add, (values, &range))
    }

    fn knows(&self, codec: Codec) -> bool {
        known(codec).is_some()
    }
}
