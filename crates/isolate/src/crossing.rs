//! How tensors get to a child process and back.
//!
//! Host memory crosses in shared memory, and its events are trivial: work on the CPU is done before a call returns, so an
//! event that is not reached yet is waited for *before* the inputs are read. Device memory crosses where a crate brings both halves
//! for the kind ([`ftcore::Crossing`]): operations then work on device memory that both processes have open, the inputs are copied
//! there on the device in the order of the caller's stream, and the event behind those copies crosses with the operation, so that
//! no host waits (L09: elsewhere an event that does not really cross is silently empty). Results are copied back once the
//! child says that they are there: a stream of this process never waits for an event of a child, which may be killed.
//! Where device memory cannot cross, the tensors are staged through host memory on both sides, and a note says why.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{
    Accelerator, Crossing, Device, Error, Event, Result, Stream, Tensor, accelerator, crossing, deadline_in,
};

use crate::pool::Region;

/// How long copies on the device may take that nothing holds up.
const COPY_LIMIT: Duration = Duration::from_secs(10);

/// How tensors get to the child.
#[derive(Clone, Default)]
pub(crate) enum Mode {
    /// Host tensors, in shared memory.
    #[default]
    Host,
    /// Device tensors, in device memory that both processes have open.
    Shared(Arc<Shared>),
    /// Host tensors, which the child copies to its device and back.
    Landed,
}

/// A stream and the last event on it.
type Used = (Arc<dyn Stream>, Arc<dyn Event>);

/// What the parent needs for device memory.
pub(crate) struct Shared {
    pub(crate) crossing: Arc<dyn Crossing>,
    pub(crate) device: Device,
    accelerator: Arc<dyn Accelerator>,
    /// Streams for copies of inputs: one per operation whose stream has not got there yet.
    outgoing: Mutex<Vec<Used>>,
    /// For copies of results: it never waits for anything else.
    incoming: Arc<dyn Stream>,
    /// Memory that the child opens before anything else, to find out whether it can.
    probe: (Tensor, Vec<u8>),
}

/// The probe's size: one page.
pub(crate) const PROBE: usize = 4096;

impl Shared {
    /// Errors: why memory of `device` cannot cross, as far as this process can tell.
    fn new(device: &Device) -> Result<Self> {
        let crossing = crossing(&device.kind).ok_or_else(|| {
            Error::unsupported(format!(
                "no crate in this program can pass memory and events of {} between processes; isolate::open stages \
                 tensors through host memory instead",
                device.kind
            ))
        })?;
        let accelerator = accelerator(&device.kind)?;
        let incoming = accelerator.new_stream(device.index, true)?;
        let probe = crossing.create(device.index, PROBE)?;
        // Events are exported apart from memory.
        drop(crossing.mark(&*incoming)?);
        Ok(Self {
            crossing,
            device: device.clone(),
            accelerator,
            outgoing: Mutex::default(),
            incoming,
            probe,
        })
    }

    pub(crate) fn probe(&self) -> &[u8] {
        &self.probe.1
    }

    /// A stream on which nothing is left to do.
    pub(crate) fn stream(&self) -> Result<Arc<dyn Stream>> {
        let mut streams = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        let free = streams.iter().position(|(_, last)| last.query().unwrap_or(false));
        match free.map(|at| streams.swap_remove(at)) {
            Some((stream, _)) => Ok(stream),
            None => self.accelerator.new_stream(self.device.index, true),
        }
    }

    /// Takes the stream back, to be used again after `last`.
    pub(crate) fn give_back(&self, stream: Arc<dyn Stream>, last: Arc<dyn Event>) {
        let mut streams = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        streams.push((stream, last));
    }

    /// A region as a tensor like `tensor`, for a copy on the device.
    pub(crate) fn view(&self, region: &Region, tensor: &Tensor) -> Result<Tensor> {
        let whole = region.segment.device_memory()?;
        let shape = [tensor.count()];
        self.crossing
            .part(whole, region.offset, tensor.dtype(), &shape, Box::new(()))
    }

    /// Copies results back: from regions into tensors. They are there when this returns.
    pub(crate) fn bring_back(&self, list: &mut [(&Region, &mut Tensor)]) -> Result<()> {
        for (region, tensor) in list.iter_mut() {
            let from = self.view(region, tensor)?;
            self.crossing.copy(&from, tensor, &*self.incoming)?;
        }
        self.incoming.synchronize(deadline_in(COPY_LIMIT))
    }
}

impl Mode {
    /// For tensors on `device`, without staging. Errors: why not.
    pub(crate) fn direct(device: &Device) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self::Host);
        }
        Shared::new(device).map(|shared| Self::Shared(Arc::new(shared)))
    }
}

/// Orders an operation on host memory after the present end of `stream`, before its inputs are read.
pub(crate) fn order_after(stream: &dyn Stream, deadline: Instant) -> Result<()> {
    if !stream.device().is_cpu() {
        return Err(Error::unsupported(format!(
            "an isolated group on the CPU cannot order itself after a stream on {}",
            stream.device()
        )));
    }
    let event = stream.record()?;
    if event.query()? {
        Ok(())
    } else {
        event.synchronize(deadline)
    }
}

/// In the child: the point of a stream in the parent after which the inputs are there, as a stream that has come to it.
pub(crate) struct Arrival {
    pub(crate) device: Device,
    pub(crate) event: Arc<dyn Event>,
}

impl Stream for Arrival {
    fn device(&self) -> Device {
        self.device.clone()
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(self.event.clone())
    }

    fn wait(&self, _event: &dyn Event) -> Result<()> {
        Err(Error::unsupported(
            "nothing can be enqueued on a stream of another process",
        ))
    }

    fn query(&self) -> Result<bool> {
        self.event.query()
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.event.synchronize(deadline)
    }
}
