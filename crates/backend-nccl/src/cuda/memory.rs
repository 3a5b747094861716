//! Device memory: blocks that free themselves without blocking, tensors over them, and copies.

use std::sync::Arc;
use std::time::Duration;

use ftcore::{DType, Event, Result, Tensor, deadline_in, same_length};

use super::event::CudaEvent;
use super::gpu::Gpu;
use super::lost;
use super::raw::{self, Span, StreamHandle};

/// Owns a block. Freed in stream order after all noted uses, so dropping it never waits.
pub(crate) struct Block {
    gpu: Arc<Gpu>,
    span: Span,
}

impl Block {
    /// A new block, ready for use on every stream when this returns.
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let _inside = gpu.enter()?;
        let span = gpu.driver.alloc(bytes, gpu.alloc_stream)?;
        let block = Self {
            gpu: gpu.clone(),
            span,
        };
        // Only allocations are on that stream: this is microseconds.
        CudaEvent::record(gpu, gpu.alloc_stream)?.synchronize(deadline_in(Duration::from_secs(60)))?;
        gpu.add_block(span);
        Ok(block)
    }

    /// A block for work on `stream` only.
    pub(crate) fn on(gpu: &Arc<Gpu>, bytes: usize, stream: StreamHandle) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            span: gpu.driver.alloc(bytes, stream)?,
        })
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let gpu = &self.gpu;
        let freed = gpu.enter().and_then(|_inside| {
            for copy in gpu.remove_block(self.span) {
                gpu.driver.stream_wait(gpu.free_stream, copy.handle())?;
            }
            gpu.driver.free(self.span, gpu.free_stream)
        });
        if let Err(error) = freed {
            lost::on_device(gpu.device(), self.span, "device memory", error);
        }
    }
}

/// A tensor on `gpu` with undefined contents.
pub(crate) fn tensor(gpu: &Arc<Gpu>, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let block = Block::new(gpu, Tensor::bytes_of(dtype, shape)?)?;
    raw::tensor(block.span, dtype, shape, gpu.device(), Box::new(block))
}

/// Copies host bytes into a tensor in the order of `stream`; `from` may be reused when this returns.
pub(crate) fn copy_in(gpu: &Arc<Gpu>, from: &[u8], to: &mut Tensor, stream: StreamHandle) -> Result<()> {
    same_length(from.len(), to.byte_len())?;
    if from.is_empty() {
        return Ok(());
    }
    let _inside = gpu.enter()?;
    let span = Span::of(to);
    gpu.driver.copy_in(from, span, stream)?;
    match CudaEvent::record(gpu, stream) {
        Ok(done) => {
            // The tensor may be dropped before the copy is done; memory that is not ours would be freed by its owner then.
            let noted = gpu.note_use(span, &done);
            // Pinned: read by the device itself, later.
            if !noted || gpu.driver.is_pinned(from) {
                await_copy(gpu, stream, Ok(done), Duration::from_micros(20))?;
            }
            Ok(())
        }
        failed => await_copy(gpu, stream, failed, Duration::from_micros(20)),
    }
}

/// How often in a row a stream does nothing but fail before its device counts as lost, which works on nothing any more.
const LOST: u32 = 50;

/// Waits until a copy on `stream` is done. The host's memory is borrowed, so this cannot be cut short: not by a deadline, and not because
/// `done`, the event behind the copy, could not be had or asked. In that case the stream is asked, and the error told when it is through.
pub(crate) fn await_copy(
    gpu: &Gpu,
    stream: StreamHandle,
    done: Result<Arc<CudaEvent>>,
    longest: Duration,
) -> Result<()> {
    let mut pause = Duration::from_micros(1);
    let mut rest = || {
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest);
    };
    let asked = done.and_then(|done| {
        while !done.query()? {
            rest();
        }
        Ok(())
    });
    let Err(error) = asked else { return Ok(()) };
    let mut failed = 0;
    while failed < LOST {
        match gpu.driver.stream_query(stream) {
            Ok(true) => break,
            Ok(false) => failed = 0,
            Err(_) => failed += 1,
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Err(error)
}

/// Copies a tensor to the host in the order of `stream`; the bytes are there when this returns.
pub(crate) fn copy_out(gpu: &Arc<Gpu>, from: &Tensor, to: &mut [u8], stream: StreamHandle) -> Result<()> {
    same_length(from.byte_len(), to.len())?;
    if to.is_empty() {
        return Ok(());
    }
    let _inside = gpu.enter()?;
    gpu.driver.copy_out(Span::of(from), to, stream)?;
    let done = CudaEvent::record(gpu, stream);
    await_copy(gpu, stream, done, Duration::from_micros(200))
}
