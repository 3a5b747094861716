//! USM memory: blocks that are given back without blocking, tensors over them, and copies.

use std::sync::Arc;

use ftcore::{DType, Device, Error, Result, Tensor, same_length};

use super::device::Xpu;
use super::event::XpuEvent;
use super::stream::{Core, XpuStream};
use crate::raw::sycl::{self, Span, Usm};

/// Owns memory of a device. Given back after its last noted use, so dropping it never waits.
pub(crate) struct Block {
    xpu: Arc<Xpu>,
    kind: Usm,
    /// All of it.
    whole: Span,
    /// As much as was asked for.
    span: Span,
}

impl Block {
    pub(crate) fn new(xpu: &Arc<Xpu>, kind: Usm, bytes: usize) -> Result<Self> {
        let whole = xpu.alloc(kind, bytes)?;
        Ok(Self {
            xpu: xpu.clone(),
            kind,
            whole,
            span: whole.part(0, bytes)?,
        })
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.xpu.free(self.kind, self.whole);
    }
}

/// A tensor with undefined contents. Host memory is the CPU's to name; the other kinds are the device's.
pub(crate) fn tensor(xpu: &Arc<Xpu>, kind: Usm, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let block = Block::new(xpu, kind, Tensor::bytes_of(dtype, shape)?)?;
    let device = match kind {
        Usm::Host => Device::CPU,
        Usm::Device | Usm::Shared => xpu.device(),
    };
    sycl::tensor(block.span, dtype, shape, device, Box::new(block))
}

/// Notes that `tensor` is in use until `event`. Memory that is not one of ours could be freed by its owner before: then this waits.
fn note_use(core: &Core, tensor: &Tensor, event: &Arc<XpuEvent>) -> Result<()> {
    if core.xpu.note_use(Span::of(tensor), event.clone()) {
        return Ok(());
    }
    match event.settled().transpose()?.flatten() {
        Some(event) => event.finish(),
        None => Ok(()),
    }
}

/// Copies host bytes into a tensor in the order of `core`; `from` may be reused when this returns, the copy is under way.
pub(crate) fn copy_in(core: &Arc<Core>, from: &[u8], to: &mut Tensor) -> Result<()> {
    same_length(from.len(), to.byte_len())?;
    if from.is_empty() {
        return Ok(());
    }
    // A copy of its own that the queue may read whenever it gets there.
    let mut source = tensor(&core.xpu, Usm::Host, DType::U8, &[from.len()])?;
    source.bytes_mut().copy_from_slice(from);
    let queue = core.command()?;
    let event = queue.copy(Span::of(&source), Span::of(to))?;
    let event = Arc::new(XpuEvent::recorded(event, None));
    core.xpu.hold(Box::new(source), event.clone());
    note_use(core, to, &event)
}

impl XpuStream {
    /// Copies one tensor of this device to another in the order of the stream; returns before it is done.
    ///
    /// Errors: `InvalidArgument` if the sizes differ or a tensor is elsewhere; what a failed operation says for which the stream
    /// waits.
    pub fn copy(&self, from: &Tensor, to: &mut Tensor) -> Result<()> {
        let core = &self.0;
        same_length(from.byte_len(), to.byte_len())?;
        for tensor in [from, &*to] {
            // Host memory could be looked at while the copy is under way.
            if *tensor.device() != core.xpu.device() {
                let text = format!(
                    "a tensor on {} in a copy on {}",
                    tensor.device(),
                    core.xpu.device()
                );
                return Err(Error::invalid(text));
            }
        }
        if from.byte_len() == 0 {
            return Ok(());
        }
        let event = core.command()?.copy(Span::of(from), Span::of(to))?;
        let event = Arc::new(XpuEvent::recorded(event, None));
        note_use(core, from, &event)?;
        note_use(core, to, &event)
    }
}

/// Copies a tensor to the host in the order of `core`; the bytes are there when this returns.
pub(crate) fn copy_out(core: &Arc<Core>, from: &Tensor, to: &mut [u8]) -> Result<()> {
    same_length(from.byte_len(), to.len())?;
    if to.is_empty() {
        return Ok(());
    }
    let queue = core.command()?;
    if core.is_foreign {
        // There may be host tasks on it, behind which no copy to borrowed memory can be told to be done.
        queue.settle()?;
    }
    queue.copy_out(Span::of(from), to)
}
