//! Kernels that another crate brings: machine code that the driver loads, launched with 64-bit words on a stream of its own.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use ftcore::{DType, Error, Result, Tensor};

use super::{Function, Span};
use crate::cuda::event::CudaEvent;
use crate::cuda::gpu::Gpu;
use crate::cuda::memory::{self, await_copy};
use crate::cuda::raw::StreamHandle;

/// Threads of a block.
const THREADS: u32 = 256;

/// Kernels on one device, with a stream on which they run. Every call but [`launch`](Self::launch) returns once the device is done.
pub struct CudaProgram {
    gpu: Arc<Gpu>,
    functions: Vec<(String, Function)>,
    stream: StreamHandle,
}

impl CudaProgram {
    /// (major, minor) of the compute capability of device `index`. Errors: `Unsupported` (no driver, no such device).
    pub fn capability(index: u32) -> Result<(u32, u32)> {
        let (major, minor) = Gpu::open(index)?.capability;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Loads `image`, a CUBIN or a PTX text that ends with a zero, on device `index`, and finds the kernels `names`. It stays loaded as long as the
    /// process lives. Errors: `Unsupported` (no driver, no such device), `Backend` with the driver's words.
    ///
    /// # Safety
    /// `image` is what a compiler has made for this device.
    pub unsafe fn load(index: u32, image: &[u8], names: &[&str]) -> Result<Self> {
        let gpu = Gpu::open(index)?;
        let _inside = gpu.enter()?;
        let owned: Vec<String> = names.iter().map(|n| (*n).to_string()).collect();
        // SAFETY: the caller's promise.
        let functions = unsafe { gpu.driver.functions_of(image.as_ptr().cast::<c_void>(), &owned) }?;
        Ok(Self {
            stream: gpu.driver.stream(false)?,
            functions: owned.into_iter().zip(functions).collect(),
            gpu: gpu.clone(),
        })
    }

    /// Enqueues `kernel` with at least `threads` threads, as far as a grid of 2048 blocks of 256 goes.
    ///
    /// Errors: `Unsupported` if there is no such kernel, `Backend` with the driver's words.
    ///
    /// # Safety
    /// The kernel takes exactly these words, works with any grid, and what is behind them that is memory is alive, and used by
    /// no other thread, until [`finish`](Self::finish) has returned.
    pub unsafe fn launch(&self, kernel: &str, threads: usize, words: &mut [u64]) -> Result<()> {
        let found = self.functions.iter().find(|(name, _)| name == kernel);
        let (_, function) =
            found.ok_or_else(|| Error::unsupported(format!("there is no kernel {kernel}")))?;
        let blocks = threads.div_ceil(THREADS as usize).clamp(1, 2048) as u32;
        let _inside = self.gpu.enter()?;
        self.gpu
            .driver
            .launch(*function, blocks, THREADS, words, self.stream)
    }

    /// Waits for what was launched; whatever may go wrong, the device works on none of it any more when this returns.
    pub fn finish(&self) -> Result<()> {
        let _inside = self.gpu.enter()?;
        let done = CudaEvent::record(&self.gpu, self.stream);
        await_copy(&self.gpu, self.stream, done, Duration::from_micros(20))
    }

    /// A tensor on the device with undefined contents.
    pub fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        memory::tensor(&self.gpu, dtype, &[count])
    }

    /// Makes all bytes of `tensor` zero.
    pub fn clear(&self, tensor: &mut Tensor) -> Result<()> {
        let span = self.part(tensor, 0, tensor.byte_len())?;
        let _inside = self.gpu.enter()?;
        self.gpu.driver.fill(span, 1, 0, self.stream)?;
        self.finish()
    }

    /// Copies host bytes to byte `at` of `to`. Errors: `InvalidArgument` if they do not fit.
    pub fn write(&self, from: &[u8], to: &mut Tensor, at: usize) -> Result<()> {
        let span = self.part(to, at, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        let _inside = self.gpu.enter()?;
        self.gpu.driver.copy_in(from, span, self.stream)?;
        self.finish()
    }

    /// Copies the bytes from `at` on of each tensor to the host, in one wait. Errors: `InvalidArgument` if there are not as many.
    pub fn read(&self, parts: &mut [(&Tensor, usize, &mut [u8])]) -> Result<()> {
        let _inside = self.gpu.enter()?;
        let mut enqueued = Ok(());
        for (from, at, to) in parts.iter_mut().filter(|(_, _, to)| !to.is_empty()) {
            let span = self.part(from, *at, to.len());
            enqueued = span.and_then(|span| self.gpu.driver.copy_out(span, to, self.stream));
            if enqueued.is_err() {
                break;
            }
        }
        self.finish().and(enqueued)
    }

    /// Copies `bytes` bytes from byte `at` of one tensor of the device to byte `to_at` of another.
    pub fn copy(
        &self,
        (from, at): (&Tensor, usize),
        (to, to_at): (&mut Tensor, usize),
        bytes: usize,
    ) -> Result<()> {
        let (from, to) = (self.part(from, at, bytes)?, self.part(to, to_at, bytes)?);
        let _inside = self.gpu.enter()?;
        self.gpu.driver.copy(from, to, self.stream)?;
        self.finish()
    }

    fn part(&self, tensor: &Tensor, at: usize, bytes: usize) -> Result<Span> {
        if *tensor.device() != self.gpu.device() {
            let text = format!("{tensor:?} is not on {}", self.gpu.device());
            return Err(Error::invalid(text));
        }
        Span::of(tensor).part(at, bytes).ok_or_else(|| {
            Error::invalid(format!(
                "{bytes} bytes from {at} on of a tensor of {}",
                tensor.byte_len()
            ))
        })
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        if let Ok(_inside) = self.gpu.enter() {
            self.gpu.driver.destroy_stream(self.stream);
        }
        self.stream = StreamHandle(ptr::null_mut());
    }
}
