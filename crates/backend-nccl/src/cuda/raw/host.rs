//! Page-locked host memory in blocks with one owner each.

use std::any::Any;
use std::ffi::c_uint;
use std::ptr::{self, NonNull};

use ftcore::{DType, Device, Result, Tensor};

use super::{Driver, failed};

/// Page-locked for every context of the process (`CU_MEMHOSTALLOC_PORTABLE`).
const PORTABLE: c_uint = 1;

/// A block. Not freed by itself: see [`Driver::free_host`].
#[derive(Debug)]
pub(crate) struct HostBlock {
    start: NonNull<u8>,
    bytes: usize,
}
// SAFETY: plain memory with one owner.
unsafe impl Send for HostBlock {}
// SAFETY: as above; nothing here reads or writes it through a shared reference.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Its length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Driver {
    /// A new block, zeroed. Takes about a millisecond per few megabytes, and may wait for the device.
    pub(crate) fn host_block(&self, bytes: usize) -> Result<HostBlock> {
        let mut memory = ptr::null_mut();
        // SAFETY: writes one pointer into the variable that this call borrows.
        let code = unsafe { (self.table.host_alloc)(&raw mut memory, bytes, PORTABLE) };
        self.check("cuMemHostAlloc", code)?;
        let start = NonNull::new(memory.cast::<u8>());
        let start = start.ok_or_else(|| failed("cuMemHostAlloc", 0, "returned null"))?;
        // SAFETY: freshly allocated, `bytes` long.
        unsafe { ptr::write_bytes(start.as_ptr(), 0, bytes) };
        Ok(HostBlock { start, bytes })
    }

    /// Frees a block that is no longer in use. Waits for the device.
    pub(crate) fn free_host(&self, block: &HostBlock) -> Result<()> {
        // SAFETY: made by `host_block`; its only owner gives it up with this call.
        let code = unsafe { (self.table.host_free)(block.start.as_ptr().cast()) };
        self.check("cuMemFreeHost", code)
    }
}

/// A tensor on the host over the beginning of `block`, which the owner that `keep` makes of it has from then on. The caller has checked
/// that it is long enough.
pub(crate) fn host_tensor(
    block: HostBlock,
    dtype: DType,
    shape: &[usize],
    keep: impl FnOnce(HostBlock) -> Box<dyn Any + Send + Sync>,
) -> Result<Tensor> {
    let start = block.start;
    // SAFETY: the owner gives the block back when the tensor goes, and nothing else uses it until then; blocks are aligned to pages
    // and were written to when they were made.
    unsafe { Tensor::from_raw(start, dtype, shape, None, Device::CPU, keep(block)) }
}
