//! A tensor as a plugin sees it.

use ftcore::Tensor;

use crate::abi::{Buffer, Growing};
use crate::text;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("shapes cross the plugin ABI as 64-bit numbers without a copy");

/// A buffer without an owner: lent for one call.
pub(super) fn lend(tensor: &Tensor) -> Buffer {
    let mut b = Buffer::empty();
    b.ptr = tensor.as_ptr().cast_mut().cast();
    b.bytes = tensor.byte_len() as u64;
    b.count = tensor.count() as u64;
    b.dtype = u32::from(tensor.dtype().code());
    b.device.kind = text::lend(tensor.device().kind.name());
    b.device.index = tensor.device().index;
    // usize is u64 here, see the top.
    b.shape = tensor.shape().as_ptr().cast();
    b.shape_len = tensor.shape().len() as u64;
    b
}
