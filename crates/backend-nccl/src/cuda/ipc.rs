//! Memory and events that cross between processes, for groups in child processes: the driver's IPC handles.
//!
//! Stream-ordered memory has no such handles, so shared memory is made by `cuMemAlloc`; its end waits for the device, so it runs on a
//! thread of its own. Events that cross are made for it and used again with their handles; the other side keeps what it opened.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ftcore::{
    Crossing, DType, DeviceKind, Error, Event, Result, StaticCrossing, Stream, Tensor, same_length,
};

use super::accelerator::handle_of;
use super::event::{CudaEvent, Origin};
use super::gpu::Gpu;
use super::lost;
use super::raw::{self, EventHandle, IpcHandle, Span};
use crate::threads::in_background;

/// Opened events that are kept; more than other processes ever have in flight.
const KEPT: usize = 4096;

/// How `cuda` crosses.
#[derive(Debug, Clone, Copy, Default)]
struct CudaCrossing;

ftcore::inventory::submit! {
    StaticCrossing {
        kind: "cuda",
        make: || Arc::new(CudaCrossing),
    }
}

/// Memory that another process may open, or another process's. Its end is not waited for.
struct Shared {
    gpu: Arc<Gpu>,
    span: Span,
    own: bool,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let (gpu, span, own) = (self.gpu.clone(), self.span, self.own);
        in_background("ox-cuda-free", move || {
            let freed = gpu.enter().and_then(|_inside| gpu.driver.unshare(span, own));
            if let Err(error) = freed {
                lost::on_device(gpu.device(), span, "shared device memory", error);
            }
        });
    }
}

fn whole(gpu: &Arc<Gpu>, span: Span, own: bool) -> Result<Tensor> {
    let shared = Shared {
        gpu: gpu.clone(),
        span,
        own,
    };
    raw::tensor(span, DType::U8, &[span.bytes()], gpu.device(), Box::new(shared))
}

/// A part's owner: the whole that it lies in, and what the caller gave.
struct PartOf(
    #[allow(dead_code, reason = "kept for its drop")] Arc<Tensor>,
    #[allow(dead_code, reason = "kept for its drop")] Box<dyn Any + Send + Sync>,
);

/// Events of other processes that were opened here, by handle and device. Never closed: the other side uses them again.
static OPENED: Mutex<Option<HashMap<(u32, IpcHandle), EventHandle>>> = Mutex::new(None);

impl Crossing for CudaCrossing {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn create(&self, index: u32, bytes: usize) -> Result<(Tensor, Vec<u8>)> {
        let gpu = Gpu::open(index)?;
        let _inside = gpu.enter()?;
        let tensor = whole(&gpu, gpu.driver.alloc_shared(bytes)?, true)?;
        let handle = gpu.driver.export(Span::of(&tensor))?;
        Ok((tensor, handle.bytes().to_vec()))
    }

    fn open(&self, index: u32, handle: &[u8], bytes: usize) -> Result<Tensor> {
        let gpu = Gpu::open(index)?;
        let _inside = gpu.enter()?;
        whole(&gpu, gpu.driver.import(IpcHandle::of(handle)?, bytes)?, false)
    }

    fn part(
        &self,
        whole: &Arc<Tensor>,
        offset: usize,
        dtype: DType,
        shape: &[usize],
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Tensor> {
        let bytes = Tensor::bytes_of(dtype, shape).ok();
        let part = bytes.and_then(|bytes| Span::of(whole).part(offset, bytes));
        let part = part.filter(|_| offset.is_multiple_of(dtype.size()));
        let part = part.ok_or_else(|| {
            Error::invalid(format!(
                "{shape:?} elements of {dtype} at byte {offset} do not lie in {} shared bytes",
                whole.byte_len()
            ))
        })?;
        let owner = Box::new(PartOf(whole.clone(), owner));
        raw::tensor(part, dtype, shape, whole.device().clone(), owner)
    }

    fn copy(&self, from: &Tensor, to: &mut Tensor, stream: &dyn Stream) -> Result<()> {
        same_length(from.byte_len(), to.byte_len())?;
        let (gpu, handle) = handle_of(stream)?;
        if let Some(other) = [from.device(), to.device()]
            .into_iter()
            .find(|d| **d != gpu.device())
        {
            return Err(Error::invalid(format!(
                "the stream is on {}, a tensor on {other}",
                gpu.device()
            )));
        }
        let _inside = gpu.enter()?;
        gpu.driver.copy(Span::of(from), Span::of(to), handle)
    }

    fn mark(&self, stream: &dyn Stream) -> Result<(Arc<dyn Event>, Vec<u8>)> {
        let (gpu, handle) = handle_of(stream)?;
        let _inside = gpu.enter()?;
        let (event, name) = gpu.take_shared_event()?;
        let event = CudaEvent::record_on(&gpu, event, Origin::Shared(name), handle)?;
        Ok((event, name.bytes().to_vec()))
    }

    fn open_mark(&self, index: u32, handle: &[u8]) -> Result<Arc<dyn Event>> {
        let gpu = Gpu::open(index)?;
        let _inside = gpu.enter()?;
        let name = IpcHandle::of(handle)?;
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let map = opened.get_or_insert_with(HashMap::new);
        let event = match map.get(&(index, name)) {
            Some(event) => *event,
            None => {
                if map.len() >= KEPT {
                    return Err(Error::invalid(format!(
                        "{KEPT} different events of other processes are open here already, and none is closed: who makes \
                         them has to use its own again"
                    )));
                }
                let event = gpu.driver.import_event(name)?;
                map.insert((index, name), event);
                event
            }
        };
        Ok(CudaEvent::opened(&gpu, event))
    }
}
