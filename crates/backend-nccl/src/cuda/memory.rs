//! Device memory: blocks that free themselves without blocking, and the slots in which reductions leave their contributors.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{DType, Error, Event, Result, Tensor, deadline_in};

use super::event::CudaEvent;
use super::gpu::Gpu;
use super::lost;
use super::raw::{self, Pinned, Span, StreamHandle};

/// Owns a block. Freed in stream order after the last noted use, so dropping it never waits.
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
            if let Some(event) = gpu.last_use(self.span.start()) {
                gpu.driver.stream_wait(gpu.free_stream, event.handle())?;
            }
            gpu.driver.free(self.span, gpu.free_stream)
        });
        if let Err(error) = freed {
            lost::on_device(gpu, self.span, "device memory", error);
        }
    }
}

/// A tensor on `gpu` with undefined contents.
pub(crate) fn tensor(gpu: &Arc<Gpu>, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let bytes = shape
        .iter()
        .try_fold(dtype.size(), |a, &d| a.checked_mul(d))
        .filter(|b| isize::try_from(*b).is_ok())
        .ok_or_else(|| Error::invalid(format!("shape {shape:?} has more elements than fit in memory")))?;
    let block = Block::new(gpu, bytes)?;
    raw::tensor(block.span, dtype, shape, gpu.device(), Box::new(block))
}

fn same_length(from: usize, to: usize) -> Result<()> {
    if from == to {
        Ok(())
    } else {
        Err(Error::invalid(format!("{from} bytes cannot be copied into {to}")))
    }
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
            // The tensor may be dropped before the copy is done.
            gpu.note_use(span.start(), done.clone());
            // Read by the device itself, later.
            if gpu.driver.is_pinned(from) {
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

const SLOTS: usize = 4096;

/// Words on the device and their page-locked copies on the host, and the constants 0 and 1.
pub(crate) struct Slots {
    device: Span,
    constants: Span,
    host: Pinned,
    free: Mutex<Vec<usize>>,
}

/// One slot. Not freed by itself: the one that knows that the device is done gives it back.
#[derive(Debug)]
pub(crate) struct Slot(usize);

impl Slots {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let _inside = gpu.enter()?;
        let driver = gpu.driver;
        let word = size_of::<i32>();
        // Never freed: they live as long as the device.
        let device = driver.alloc(SLOTS * word, gpu.alloc_stream)?;
        let constants = driver.alloc(2 * word, gpu.alloc_stream)?;
        driver.fill(constants, 8, 1 << 32, gpu.alloc_stream)?;
        let host = driver.pinned(SLOTS)?;
        let until: Instant = deadline_in(Duration::from_secs(60));
        super::event::poll(until, "the set-up of the device", || {
            driver.stream_query(gpu.alloc_stream)
        })?;
        Ok(Self {
            device,
            constants,
            host,
            free: Mutex::new((0..SLOTS).rev().collect()),
        })
    }

    /// A free slot.
    pub(crate) fn take(&self) -> Result<Slot> {
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()
            .map(Slot)
            .ok_or_else(|| {
                Error::new(
                    ftcore::ErrorKind::Unavailable,
                    format!("{SLOTS} reductions are in flight on this device; wait for some of them first"),
                )
            })
    }

    /// The slot's device memory.
    pub(crate) fn span(&self, slot: &Slot) -> Result<Span> {
        self.device
            .part(slot.0 * size_of::<i32>(), size_of::<i32>())
            .ok_or_else(|| Error::invalid("a slot outside its page"))
    }

    /// Device memory that holds 1 (`true`) or 0.
    pub(crate) fn constant(&self, one: bool) -> Result<Span> {
        self.constants
            .part(usize::from(one) * size_of::<i32>(), size_of::<i32>())
            .ok_or_else(|| Error::invalid("a constant outside its page"))
    }

    /// Enqueues the copy to the host.
    pub(crate) fn fetch(&self, gpu: &Gpu, slot: &Slot, stream: StreamHandle) -> Result<()> {
        gpu.driver.copy_word(self.span(slot)?, &self.host, slot.0, stream)
    }

    /// The value that was fetched, once the copy is done.
    pub(crate) fn read(&self, slot: &Slot) -> u32 {
        u32::try_from(self.host.read(slot.0)).unwrap_or(0)
    }

    /// The device is done with it.
    pub(crate) fn give_back(&self, slot: Slot) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(slot.0);
    }
}
