//! One opened device: its context, its kernels and its caches. Opened once per process and index, and kept.

use std::collections::{BTreeMap, HashMap};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ftcore::{Device, DeviceKind, Error, Event, Result};

use super::driver::driver;
use super::event::CudaEvent;
use super::kernels::{self, Kernel};
use super::pinned;
use super::raw::{Attribute, Context, Driver, EventHandle, Function, IpcHandle, Span, StreamHandle};
use super::slots::Slots;

/// Events kept for reuse; making one costs a microsecond and sometimes a lock of the driver.
const CACHED_EVENTS: usize = 1024;

/// A device.
pub(crate) struct Gpu {
    pub(crate) index: u32,
    pub(crate) driver: &'static Driver,
    context: Context,
    /// (major, minor) of the compute capability.
    pub(crate) capability: (i32, i32),
    pub(crate) name: String,
    /// Allocations are enqueued here and nothing else is, so that waiting for one never waits for a collective.
    pub(crate) alloc_stream: StreamHandle,
    /// Blocks are freed here, after the events of their last uses.
    pub(crate) free_stream: StreamHandle,
    events: Mutex<Vec<EventHandle>>,
    /// Those that other processes may wait for. Never destroyed: they have them open.
    shared_events: Mutex<Vec<(EventHandle, IpcHandle)>>,
    /// Blocks for tensors, by their addresses.
    blocks: Mutex<BTreeMap<u64, Uses>>,
    functions: OnceLock<Result<Vec<Function>>>,
    slots: OnceLock<Slots>,
    /// Page-locked host memory for later use.
    pub(crate) pinned: pinned::Cache,
}

/// What may still use a block.
struct Uses {
    /// The byte after the last.
    end: u64,
    /// Copies that may still be under way, on whatever streams.
    until: Vec<Arc<CudaEvent>>,
}

/// A device that is current on this thread. When this is dropped, the one that was before is so again: a caller's own code may count
/// on it.
#[must_use]
pub(crate) struct Entered {
    driver: &'static Driver,
    before: Option<Context>,
    /// It belongs to its thread.
    here: PhantomData<*const ()>,
}

impl Entered {
    fn into(driver: &'static Driver, context: Context) -> Result<Self> {
        let now = driver.current()?;
        if now != Some(context) {
            driver.set_current(context)?;
        }
        Ok(Self {
            driver,
            // Without one, it cannot be missed: the device stays current, and the next entry finds it so.
            before: now.filter(|c| *c != context),
            here: PhantomData,
        })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before
            && let Err(error) = self.driver.set_current(before)
        {
            tracing::warn!(%error, "the thread's CUDA device could not be made current again");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// The device `index`, opened at the first call.
    pub(crate) fn open(index: u32) -> Result<Arc<Self>> {
        static OPENED: Mutex<Option<HashMap<u32, Arc<Gpu>>>> = Mutex::new(None);
        let mut opened = lock(&OPENED);
        let map = opened.get_or_insert_with(HashMap::new);
        if let Some(gpu) = map.get(&index) {
            return Ok(gpu.clone());
        }
        let gpu = Arc::new(Self::new(index)?);
        map.insert(index, gpu.clone());
        Ok(gpu)
    }

    fn new(index: u32) -> Result<Self> {
        let driver = driver()?;
        let count = driver.device_count()?;
        if index >= count {
            return Err(Error::unsupported(format!(
                "there is no cuda:{index}; the driver sees {count} device{}",
                if count == 1 { "" } else { "s" }
            )));
        }
        let name = driver.device_name(index)?;
        if driver.attribute(index, Attribute::MemoryPools)? == 0 {
            return Err(Error::unsupported(format!(
                "cuda:{index} ({name}) has no memory pools, without which memory cannot be freed without blocking"
            )));
        }
        let capability = (
            driver.attribute(index, Attribute::ComputeMajor)?,
            driver.attribute(index, Attribute::ComputeMinor)?,
        );
        let context = driver.context(index)?;
        let _inside = Entered::into(driver, context)?;
        Ok(Self {
            index,
            driver,
            context,
            capability,
            name,
            alloc_stream: driver.stream(false)?,
            free_stream: driver.stream(false)?,
            events: Mutex::default(),
            shared_events: Mutex::default(),
            blocks: Mutex::default(),
            functions: OnceLock::new(),
            slots: OnceLock::new(),
            pinned: pinned::Cache::default(),
        })
    }

    /// As ftcore names it.
    pub(crate) fn device(&self) -> Device {
        Device::new(DeviceKind::Cuda, self.index)
    }

    /// Makes the device current on the calling thread while the guard lives; every entry from outside begins with this.
    pub(crate) fn enter(&self) -> Result<Entered> {
        Entered::into(self.driver, self.context)
    }

    /// Makes the device current on the calling thread and leaves it so.
    pub(crate) fn make_current(&self) -> Result<()> {
        self.driver.set_current(self.context)
    }

    /// True if the chip computes in FP8 by itself and NCCL reduces it there: compute capability 9.0 and up.
    pub(crate) fn native_fp8(&self) -> bool {
        self.capability >= (9, 0)
    }

    pub(crate) fn take_event(&self) -> Result<EventHandle> {
        let cached = lock(&self.events).pop();
        match cached {
            Some(event) => Ok(event),
            None => self.driver.event(),
        }
    }

    pub(crate) fn put_event(&self, event: EventHandle) {
        let mut events = lock(&self.events);
        if events.len() < CACHED_EVENTS {
            events.push(event);
        } else {
            drop(events);
            self.driver.destroy_event(event);
        }
    }

    /// An event that another process can open, and the handle by which it does.
    pub(crate) fn take_shared_event(&self) -> Result<(EventHandle, IpcHandle)> {
        let cached = lock(&self.shared_events).pop();
        match cached {
            Some(event) => Ok(event),
            None => self.driver.shared_event(),
        }
    }

    pub(crate) fn put_shared_event(&self, event: EventHandle, name: IpcHandle) {
        lock(&self.shared_events).push((event, name));
    }

    /// Enters a block, so that its uses are noted.
    pub(crate) fn add_block(&self, span: Span) {
        let uses = Uses {
            end: span.end(),
            until: Vec::new(),
        };
        lock(&self.blocks).insert(span.start(), uses);
    }

    /// Notes that the block in which `span` lies, maybe as the part that another tensor has, is in use until `event`. False if that is not
    /// one of ours: then nothing is noted.
    #[must_use]
    pub(crate) fn note_use(&self, span: Span, event: &Arc<CudaEvent>) -> bool {
        let mut blocks = lock(&self.blocks);
        let last = blocks.range_mut(..=span.start()).next_back();
        let Some((_, uses)) = last.filter(|(_, uses)| span.end() <= uses.end) else {
            return false;
        };
        uses.until.retain(|e| !matches!(e.query(), Ok(true)));
        uses.until.push(event.clone());
        true
    }

    /// Forgets a block; the copies that may still use it.
    pub(crate) fn remove_block(&self, span: Span) -> Vec<Arc<CudaEvent>> {
        let uses = lock(&self.blocks).remove(&span.start());
        uses.map(|uses| uses.until).unwrap_or_default()
    }

    /// The result slots.
    pub(crate) fn slots(&self) -> Result<&Slots> {
        if let Some(slots) = self.slots.get() {
            return Ok(slots);
        }
        let _inside = self.enter()?;
        // A failure is not kept: memory that is missing now may be there at the next try.
        let made = Slots::new(self.driver, self.alloc_stream)?;
        Ok(self.slots.get_or_init(|| made))
    }

    /// Compiles the kernels if that was not done yet.
    pub(crate) fn prepare(&self) -> Result<()> {
        self.function(Kernel::Bool).map(drop)
    }

    fn function(&self, kernel: Kernel) -> Result<Function> {
        let functions = self.functions.get_or_init(|| {
            let names: Vec<String> = kernels::all().into_iter().map(Kernel::name).collect();
            self.driver.functions(&kernels::source(), &names)
        });
        let functions = functions.as_ref().map_err(Clone::clone)?;
        let place = kernels::all().iter().position(|k| *k == kernel);
        place
            .and_then(|i| functions.get(i))
            .copied()
            .ok_or_else(|| Error::unsupported(format!("there is no kernel {}", kernel.name())))
    }

    /// Enqueues `kernel` over `count` elements of `a` and `b`.
    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        a: Span,
        b: Span,
        count: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        const THREADS: u32 = 256;
        // Enough blocks to fill a large chip; each thread takes several elements beyond that.
        let blocks = count.div_ceil(THREADS as usize).min(2048) as u32;
        let mut arguments = [a.start(), b.start(), count as u64];
        self.driver
            .launch(self.function(kernel)?, blocks, THREADS, &mut arguments, stream)
    }
}
