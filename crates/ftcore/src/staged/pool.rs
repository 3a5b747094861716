//! Host buffers of staged operations, used again by later ones of the same type and length.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Accelerator, DType, Device, Result, Tensor};

/// Host memory that is kept for later operations, in bytes for each group.
const KEPT_BYTES: usize = 256 << 20;

/// Host buffers that are used again.
#[derive(Default)]
pub(super) struct Pool(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    buffers: BTreeMap<(DType, usize), Vec<Tensor>>,
    bytes: usize,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A host tensor of `like`'s type and shape, with undefined contents.
    pub(super) fn take(
        &self,
        accelerator: &dyn Accelerator,
        device: &Device,
        like: &Tensor,
    ) -> Result<Tensor> {
        let found = {
            let mut kept = self.lock();
            let key = (like.dtype(), like.count());
            let found = kept.buffers.get_mut(&key).and_then(Vec::pop);
            kept.bytes -= found.as_ref().map_or(0, Tensor::byte_len);
            found
        };
        match found {
            Some(tensor) => tensor.reshape(like.shape()),
            None => accelerator.alloc_host(device.index, like.dtype(), like.shape()),
        }
    }

    /// Takes a buffer back that nothing touches any more; one too many is freed.
    pub(super) fn put(&self, tensor: Tensor) {
        let mut kept = self.lock();
        if kept.bytes + tensor.byte_len() <= KEPT_BYTES {
            kept.bytes += tensor.byte_len();
            let key = (tensor.dtype(), tensor.count());
            kept.buffers.entry(key).or_default().push(tensor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceKind, accelerator};

    #[test]
    fn a_buffer_serves_again_for_the_same_type_and_length_in_any_shape() {
        let cpu = accelerator(&DeviceKind::Cpu).unwrap();
        let pool = Pool::default();
        let like = |shape: &[usize]| Tensor::zeros(DType::F32, 12).reshape(shape).unwrap();
        let first = pool.take(&*cpu, &Device::CPU, &like(&[12])).unwrap();
        let address = first.as_ptr();
        pool.put(first);
        let other = pool
            .take(&*cpu, &Device::CPU, &Tensor::zeros(DType::I32, 12))
            .unwrap();
        assert_ne!(other.as_ptr(), address, "another type");
        let again = pool.take(&*cpu, &Device::CPU, &like(&[3, 4])).unwrap();
        assert_eq!((again.as_ptr(), again.shape()), (address, &[3usize, 4][..]));
        let third = pool.take(&*cpu, &Device::CPU, &like(&[12])).unwrap();
        assert_ne!(third.as_ptr(), address, "one buffer was given to two");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let pool = Pool::default();
        let large = KEPT_BYTES / 2 + 1;
        pool.put(Tensor::zeros(DType::U8, large));
        pool.put(Tensor::zeros(DType::U8, large));
        assert_eq!(pool.lock().bytes, large);
    }
}
