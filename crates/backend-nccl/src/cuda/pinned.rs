//! Page-locked host memory for copies to and from a device. Making and freeing it is dear and waits for the device, so blocks are kept
//! and serve again; a device without more of it gives ordinary memory, with a warning.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ftcore::{DType, Error, Result, Tensor};

use super::gpu::Gpu;
use super::lost;
use super::raw::{HostBlock, host_tensor};
use crate::threads::in_background;

/// Bytes that are kept per device for later use.
const KEPT: usize = 256 << 20;
const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// Blocks that are not in use, by length.
#[derive(Default)]
pub(crate) struct Cache(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    blocks: BTreeMap<usize, Vec<HostBlock>>,
    bytes: usize,
}

/// The length of the block that `bytes` get: few different ones, so that blocks serve again.
fn class(bytes: usize) -> Option<usize> {
    if bytes <= MIB {
        Some(bytes.max(PAGE).next_power_of_two())
    } else {
        bytes.checked_next_multiple_of(MIB)
    }
}

impl Cache {
    fn take(&self, class: usize) -> Option<HostBlock> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let block = kept.blocks.get_mut(&class).and_then(Vec::pop)?;
        kept.bytes -= block.bytes();
        Some(block)
    }

    /// One too many comes back.
    fn put(&self, block: HostBlock) -> Option<HostBlock> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes + block.bytes() > KEPT {
            return Some(block);
        }
        kept.bytes += block.bytes();
        kept.blocks.entry(block.bytes()).or_default().push(block);
        None
    }
}

/// A tensor's owner: gives the block back.
struct Lent {
    gpu: Arc<Gpu>,
    block: Option<HostBlock>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let surplus = self.block.take().and_then(|block| self.gpu.pinned.put(block));
        let Some(block) = surplus else { return };
        let gpu = self.gpu.clone();
        in_background("ox-cuda-free", move || {
            let freed = gpu.enter().and_then(|_inside| gpu.driver.free_host(&block));
            if let Err(error) = freed {
                lost::on_host(block, error);
            }
        });
    }
}

/// A tensor on the host, page-locked for `gpu`, with undefined contents.
pub(crate) fn tensor(gpu: &Arc<Gpu>, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().try_fold(1usize, |a, &d| a.checked_mul(d));
    let bytes = count.and_then(|c| c.checked_mul(dtype.size()));
    let fits = bytes.filter(|b| isize::try_from(*b).is_ok());
    let (Some(count), Some(bytes), Some(class)) = (count, fits, fits.and_then(class)) else {
        let text = format!("shape {shape:?} has more elements than fit in memory");
        return Err(Error::invalid(text));
    };
    if bytes == 0 {
        return Tensor::zeros(dtype, count).reshape(shape);
    }
    let _inside = gpu.enter()?;
    let block = match gpu.pinned.take(class) {
        Some(block) => block,
        None => match gpu.driver.host_block(class) {
            Ok(block) => block,
            Err(error) => {
                tracing::warn!(bytes = class, %error, "no page-locked memory: copies to and from the device are slower");
                return Tensor::zeros(dtype, count).reshape(shape);
            }
        },
    };
    let gpu = gpu.clone();
    host_tensor(block, dtype, shape, |block| {
        Box::new(Lent {
            gpu,
            block: Some(block),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_lengths_serve_all_requests_without_much_waste() {
        assert_eq!(class(1), Some(PAGE));
        assert_eq!(class(5000), Some(8192));
        assert_eq!(class(MIB), Some(MIB));
        assert_eq!(class(5 * MIB + 1), Some(6 * MIB));
        assert_eq!(class(usize::MAX - 1), None);
    }
}
