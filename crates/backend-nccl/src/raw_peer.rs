//! The same library called directly, for `examples/overhead.rs`: what a C program would do around one all-reduce, and nothing more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Device, Error, Event, Result, Store, Tensor};
use nccl_sys::{UniqueId, dtype, redop};

use crate::cuda::event::CudaEvent;
use crate::cuda::gpu::Gpu;
use crate::cuda::raw::Span;
use crate::cuda::stream::CudaStream;
use crate::raw::{Comm, Wish, nccl};

/// A blocking communicator and a stream, without anything around them.
#[doc(hidden)]
pub struct RawPeer {
    gpu: Arc<Gpu>,
    comm: Comm,
    stream: CudaStream,
}

impl RawPeer {
    /// Joins; the ranks meet through `store`.
    #[doc(hidden)]
    pub fn new(
        device: &Device,
        rank: u32,
        world: u32,
        store: &Arc<dyn Store>,
        deadline: Instant,
    ) -> Result<Self> {
        let nccl = nccl()?;
        let gpu = Gpu::open(device.index)?;
        let _inside = gpu.enter()?;
        let key = "overhead/raw";
        if rank == 0 {
            store.set(key, &nccl.unique_id()?.0, deadline)?;
        }
        let bytes = store.get(key, deadline)?;
        let id = <[u8; UniqueId::BYTES]>::try_from(bytes.as_slice());
        let id = UniqueId(id.map_err(|_| Error::invalid("not an id"))?);
        let wish = Wish {
            blocking: true,
            ..Wish::default()
        };
        let comm = Comm::init(nccl, id, rank, world, &wish)?;
        comm.settle(deadline, &|| None)?;
        Ok(Self {
            stream: CudaStream::new(&gpu, false)?,
            gpu,
            comm,
        })
    }

    /// One all-reduce of f32 in place: (until the event was seen, until the call returned).
    #[doc(hidden)]
    pub fn all_reduce(&self, tensor: &mut Tensor, deadline: Instant) -> Result<(Duration, Duration)> {
        let _inside = self.gpu.enter()?;
        let (span, count) = (Span::of(tensor), tensor.count());
        let began = Instant::now();
        self.comm.plain(|calls| {
            calls.all_reduce(
                span,
                span,
                count,
                dtype::FLOAT32,
                redop::SUM,
                self.stream.handle(),
            )
        })?;
        let done = CudaEvent::record(&self.gpu, self.stream.handle())?;
        let submitted = began.elapsed();
        // A C program would spin here, too.
        while !done.query()? {
            if Instant::now() > deadline {
                return Err(Error::timeout("the raw all-reduce did not end"));
            }
            std::thread::yield_now();
        }
        Ok((began.elapsed(), submitted))
    }
}
