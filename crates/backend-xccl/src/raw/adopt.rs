//! Queues that the caller brings.

use std::ffi::c_void;

use ftcore::Result;

use super::sycl::Queue;
use crate::xpu::XpuStream;
use crate::xpu::stream::Core;

impl XpuStream {
    /// A stream over the caller's own `sycl::queue`, in order or not: a handle of its own is kept, so `queue` may be deleted.
    ///
    /// The queue's device must be one of those that count as `xpu` here. Operations may be ordered after it, and it after them;
    /// then `Stream::wait` and `Work::wait_on` block the host until the operation is enqueued, since later commands of the caller go to
    /// the queue without being seen here.
    ///
    /// Errors: `InvalidArgument` for null or a queue of another device; `Backend` with SYCL's refusal.
    ///
    /// # Safety
    /// `queue` is a live `sycl::queue*` in the default context of its device, made by the very SYCL runtime that dpctl's library
    /// uses in this process: the same `libsycl` file.
    pub unsafe fn adopt(queue: *mut c_void) -> Result<Self> {
        // SAFETY: the caller's promise.
        Self::over(unsafe { Queue::copy_of(queue)? })
    }

    /// As [`adopt`](Self::adopt), for a queue that was made here.
    pub(crate) fn adopt_own(core: &Core) -> Result<Self> {
        // SAFETY: the core keeps its queue alive, and it is dpctl's own.
        unsafe { Self::adopt(core.queue.pointer()) }
    }
}
