//! What the interpreter and the system offer only as C: lent buffers and DLPack capsules, SIGINT, fork.

use std::ptr::NonNull;

use oxccl::core::{DType, Device, Result, Tensor};

pub(crate) mod buffer;
pub(crate) mod dlpack;
pub(crate) mod fork;
pub(crate) mod holder;
pub(crate) mod signal;

/// A tensor over memory that `holder` keeps: `count` elements of `dtype`, which the protocol that lent them says are there.
pub(crate) fn foreign_tensor(
    address: NonNull<u8>,
    dtype: DType,
    count: usize,
    device: Device,
    holder: holder::Holder,
) -> Result<Tensor> {
    // SAFETY: the lender's promise: that many elements, valid while the holder lives. That nothing else writes meanwhile is the user's to keep,
    // as with every other asynchronous operation on such memory; what is read then is undefined numbers, never other memory.
    unsafe { Tensor::from_raw(address, dtype, &[count], None, device, Box::new(holder)) }
}

/// True on the thread that the process began with.
pub(crate) fn is_main_thread() -> bool {
    // SAFETY: both only tell numbers.
    unsafe { libc::gettid() == libc::getpid() }
}
