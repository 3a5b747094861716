//! The device kind `hpu`: what the layers above ask of a device, over Synapse. One device per process, so index 0 only.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::ftcore::{Accelerator, DType, DeviceKind, Error, Result, Stream, Tensor, deadline_in, poll};
use crate::raw::memory::{self, DEVICE};
use crate::raw::synapse::{Direction, Staging};
use crate::runtime::{Runtime, libraries, runtime};
use crate::stream::HpuStream;

/// Host memory is copied in pieces of this size.
const PIECE: usize = 4 << 20;
/// A piece that has not arrived by then never will.
const COPY_TIME: Duration = Duration::from_secs(60);

/// Answers for the device kind `hpu`.
#[derive(Debug, Clone, Copy, Default)]
pub struct HpuAccelerator;

/// A stream for copies and the host memory that they go through.
struct Copier {
    stream: HpuStream,
    staging: Staging,
}

/// The idle copier. It is taken out for a copy and not put back when that has failed: its memory, which the device may still touch, is
/// never used again (INV-8).
static COPIER: Mutex<Option<Copier>> = Mutex::new(None);

impl Copier {
    fn new(runtime: &'static Runtime) -> Result<Self> {
        Ok(Self {
            stream: HpuStream::new(runtime)?,
            staging: runtime.libraries.synapse.staging(runtime.device, PIECE)?,
        })
    }

    /// Runs `copy` with a copier whose stream comes after the present end of `stream`.
    fn with(stream: &dyn Stream, copy: impl FnOnce(&'static Runtime, &mut Self) -> Result<()>) -> Result<()> {
        let runtime = runtime()?;
        let before = stream.record()?;
        let idle = COPIER.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut copier = idle.map_or_else(|| Self::new(runtime), Ok)?;
        let ordered = copier.stream.wait_for(&*before, deadline_in(COPY_TIME));
        if ordered.is_ok() {
            copy(runtime, &mut copier)?;
        }
        *COPIER.lock().unwrap_or_else(PoisonError::into_inner) = Some(copier);
        ordered
    }

    /// One copy, finished when this returns. If it fails the device may still be at it: its memory there is never used again either.
    fn piece(&self, runtime: &Runtime, from: u64, to: u64, bytes: usize, direction: Direction) -> Result<()> {
        let synapse = &runtime.libraries.synapse;
        synapse.copy(self.stream.handle(), from, to, bytes as u64, direction)?;
        let done = self.stream.synchronize(deadline_in(COPY_TIME));
        done.inspect_err(|_| {
            let on_device = match direction {
                Direction::DeviceToHost => from,
                Direction::HostToDevice | Direction::DeviceToDevice => to,
            };
            runtime.suspect(on_device, bytes as u64);
        })
    }
}

fn only_first(index: u32) -> Result<()> {
    if index == 0 {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "there is no hpu:{index}: a process has one Gaudi, hpu:0; choose the module with OXCCL_HCCL_MODULE_ID"
    )))
}

fn same_length(host: usize, tensor: &Tensor) -> Result<()> {
    if *tensor.device() != DEVICE {
        return Err(Error::invalid(format!(
            "the tensor is on {}, not on {DEVICE}",
            tensor.device()
        )));
    }
    if host != tensor.byte_len() {
        return Err(Error::invalid(format!(
            "{host} bytes on the host and {} on the device do not match",
            tensor.byte_len()
        )));
    }
    Ok(())
}

impl Accelerator for HpuAccelerator {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Hpu
    }

    /// 1 if the machine has any: a process gets one.
    fn count(&self) -> u32 {
        libraries()
            .and_then(|l| l.synapse.device_count())
            .map_or(0, |count| count.min(1))
    }

    fn current(&self) -> Result<u32> {
        Ok(0)
    }

    fn set(&self, index: u32) -> Result<()> {
        only_first(index)
    }

    /// One stream that all threads share.
    fn current_stream(&self, index: u32) -> Result<Arc<dyn Stream>> {
        static CURRENT: Mutex<Option<Arc<HpuStream>>> = Mutex::new(None);
        only_first(index)?;
        let mut slot = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = match &*slot {
            Some(stream) => stream.clone(),
            None => slot.insert(Arc::new(HpuStream::new(runtime()?)?)).clone(),
        };
        Ok(stream)
    }

    fn synchronize(&self, index: u32, deadline: Instant) -> Result<()> {
        only_first(index)?;
        let runtime = runtime()?;
        poll(deadline, "the end of all streams", || runtime.idle())
    }

    fn name(&self, index: u32) -> Result<String> {
        only_first(index)?;
        let runtime = runtime()?;
        runtime.libraries.synapse.device_name(runtime.device)
    }

    fn new_stream(&self, index: u32, high_priority: bool) -> Result<Arc<dyn Stream>> {
        only_first(index)?;
        if high_priority {
            return Err(Error::unsupported("Synapse has no streams of higher priority"));
        }
        Ok(Arc::new(HpuStream::new(runtime()?)?))
    }

    fn alloc(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        only_first(index)?;
        memory::tensor(runtime()?, dtype, shape)
    }

    fn copy_in(&self, from: &[u8], to: &mut Tensor, stream: &dyn Stream) -> Result<()> {
        same_length(from.len(), to)?;
        if from.is_empty() {
            return Ok(());
        }
        let mut address = memory::span(to).address;
        Copier::with(stream, |runtime, copier| {
            for piece in from.chunks(PIECE) {
                if let Some(to) = copier.staging.bytes().get_mut(..piece.len()) {
                    to.copy_from_slice(piece);
                }
                let staged = copier.staging.address();
                copier.piece(runtime, staged, address, piece.len(), Direction::HostToDevice)?;
                address += piece.len() as u64;
            }
            Ok(())
        })
    }

    fn copy_out(&self, from: &Tensor, to: &mut [u8], stream: &dyn Stream) -> Result<()> {
        same_length(to.len(), from)?;
        if to.is_empty() {
            return Ok(());
        }
        let mut address = memory::span(from).address;
        Copier::with(stream, |runtime, copier| {
            for piece in to.chunks_mut(PIECE) {
                let staged = copier.staging.address();
                copier.piece(runtime, address, staged, piece.len(), Direction::DeviceToHost)?;
                if let Some(from) = copier.staging.bytes().get(..piece.len()) {
                    piece.copy_from_slice(from);
                }
                address += piece.len() as u64;
            }
            Ok(())
        })
    }
}
