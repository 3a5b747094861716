//! One opened device: its streams, its memory, and what still uses that. Opened once per process and index, and kept.
//!
//! SYCL's `free` may wait for everything that any queue still has to do. So blocks that are given up are kept and used again,
//! and what is too much is freed by a thread of its own.

use std::any::Any;
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use ftcore::registry::Unavailable;
use ftcore::{Device, DeviceKind, Error, Event, Result};

use super::driver::{ENV_DEVICES, selectors};
use super::stream::Core;
use crate::raw::sycl::{DeviceHandle, Queue, Span, Usm, alloc, free};

/// A device.
pub(crate) struct Xpu {
    pub(crate) index: u32,
    handle: DeviceHandle,
    pub(crate) name: String,
    /// SYCL's CPU device, which stands in for a GPU.
    pub(crate) is_cpu: bool,
    /// Allocations are made and freed in its context; nothing is enqueued on it.
    memory: Queue,
    /// Blocks that is not in use.
    kept: Mutex<Vec<(Usm, Span)>>,
    /// To the thread that frees.
    too_much: OnceLock<Option<Sender<Span>>>,
    /// What goes once its last use is over.
    later: Mutex<Vec<Later>>,
    /// All blocks by their addresses, with the copies that may still use them.
    blocks: Mutex<HashMap<usize, Vec<Arc<dyn Event>>>>,
    streams: Mutex<Vec<Weak<Core>>>,
    default_stream: OnceLock<Arc<Core>>,
}

/// Blocks that is not in use are kept up to so many bytes per device.
const KEPT_BYTES: usize = 512 << 20;
/// From here on blocks are multiples of this size.
const LARGE: usize = 1 << 20;
/// Below, of this.
const SMALL_UNIT: usize = 4 << 10;

/// Something that a command may still use.
struct Later {
    until: Vec<Arc<dyn Event>>,
    what: Leftover,
}

/// True while one of them is not reached. What fails to tell is past being used: its queue is broken.
fn are_pending(events: &[Arc<dyn Event>]) -> bool {
    events.iter().any(|e| matches!(e.query(), Ok(false)))
}

enum Leftover {
    /// A block that its owner gave up.
    Block(Usm, Span),
    /// Host memory that is being read.
    Held(#[allow(dead_code, reason = "held for its Drop")] Box<dyn Any + Send>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Xpu {
    /// The device `index`, opened at the first call.
    pub(crate) fn open(index: u32) -> Result<Arc<Self>> {
        static OPENED: Mutex<Option<HashMap<u32, Arc<Xpu>>>> = Mutex::new(None);
        let mut opened = lock(&OPENED);
        let map = opened.get_or_insert_with(HashMap::new);
        if let Some(xpu) = map.get(&index) {
            return Ok(xpu.clone());
        }
        let xpu = Arc::new(Self::new(index)?);
        map.insert(index, xpu.clone());
        Ok(xpu)
    }

    fn new(index: u32) -> Result<Self> {
        let list = selectors()?;
        let selector = list.get(index as usize).ok_or_else(|| match list.len() {
            0 => Error::from(Unavailable::NoDevice {
                device: format!(
                    "xpu:{index}: Level Zero sees no GPU ({ENV_DEVICES}=cpu takes SYCL's CPU device, for tests)"
                ),
            }),
            count => Error::unsupported(format!(
                "there is no xpu:{index}; the last of them is xpu:{}",
                count - 1
            )),
        })?;
        let handle = DeviceHandle::select(selector)?;
        let is_cpu = handle.is_cpu();
        let name = match is_cpu {
            true => format!("{} (SYCL's CPU device, a stand-in)", handle.name()),
            false => handle.name(),
        };
        let memory = Queue::new(&handle)?;
        Ok(Self {
            index,
            handle,
            name,
            is_cpu,
            memory,
            kept: Mutex::default(),
            too_much: OnceLock::new(),
            later: Mutex::default(),
            blocks: Mutex::default(),
            streams: Mutex::default(),
            default_stream: OnceLock::new(),
        })
    }

    /// The device among those that count here.
    pub(crate) fn of(handle: &DeviceHandle) -> Result<Arc<Self>> {
        let count = u32::try_from(selectors()?.len()).unwrap_or(u32::MAX);
        for index in 0..count {
            let xpu = Self::open(index)?;
            if xpu.handle.is_same(handle) {
                return Ok(xpu);
            }
        }
        Err(Error::invalid(format!(
            "the queue is on {}, which is none of the {count} xpu device(s) of this program",
            handle.name()
        )))
    }

    /// As ftcore names it.
    pub(crate) fn device(&self) -> Device {
        Device::new(DeviceKind::Xpu, self.index)
    }

    /// The driver's version.
    pub(crate) fn driver(&self) -> String {
        self.handle.driver()
    }

    /// A new queue.
    pub(crate) fn queue(&self) -> Result<Queue> {
        Queue::new(&self.handle)
    }

    pub(crate) fn remember(&self, core: &Arc<Core>) {
        let mut streams = lock(&self.streams);
        streams.retain(|s| s.strong_count() > 0);
        streams.push(Arc::downgrade(core));
    }

    /// The device's own stream: SYCL knows no "current" one.
    pub(crate) fn default_stream(self: &Arc<Self>) -> Result<Arc<Core>> {
        if let Some(core) = self.default_stream.get() {
            return Ok(core.clone());
        }
        let core = Core::new(self, self.queue()?, false);
        Ok(self.default_stream.get_or_init(|| core).clone())
    }

    /// Waits for everything that was enqueued on streams of this device.
    pub(crate) fn synchronize(&self, deadline: Instant) -> Result<()> {
        let streams: Vec<Arc<Core>> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
        for core in streams {
            core.record()?.synchronize(deadline)?;
        }
        Ok(())
    }

    /// At least so many bytes with undefined contents, as a block that goes to [`free`](Self::free) whole.
    pub(crate) fn alloc(self: &Arc<Self>, kind: Usm, bytes: usize) -> Result<Span> {
        self.reap();
        let unit = if bytes < LARGE { SMALL_UNIT } else { LARGE };
        let size = bytes.max(1).checked_next_multiple_of(unit).unwrap_or(bytes);
        let kept = {
            let mut kept = lock(&self.kept);
            let fits =
                |(k, s): &(Usm, Span)| *k == kind && (size..=size.saturating_mul(2)).contains(&s.bytes());
            let found = kept.iter().position(fits);
            found.map(|at| kept.swap_remove(at).1)
        };
        let span = match kept {
            Some(span) => span,
            None => alloc(kind, size, &self.memory)?,
        };
        lock(&self.blocks).insert(span.address(), Vec::new());
        Ok(span)
    }

    /// Takes a block back after its last noted use; does not wait for it.
    pub(crate) fn free(self: &Arc<Self>, kind: Usm, span: Span) {
        let uses = lock(&self.blocks).remove(&span.address()).unwrap_or_default();
        if are_pending(&uses) {
            lock(&self.later).push(Later {
                until: uses,
                what: Leftover::Block(kind, span),
            });
        } else {
            self.keep_block(kind, span);
        }
    }

    fn keep_block(self: &Arc<Self>, kind: Usm, span: Span) {
        {
            let mut kept = lock(&self.kept);
            let bytes: usize = kept.iter().map(|(_, s)| s.bytes()).sum();
            if bytes + span.bytes() <= KEPT_BYTES {
                kept.push((kind, span));
                return;
            }
        }
        let thread = self.too_much.get_or_init(|| {
            let (sender, receiver) = channel();
            let xpu = self.clone();
            let body = move || receiver.into_iter().for_each(|span| free(span, &xpu.memory));
            let made = std::thread::Builder::new()
                .name("ox-xpu-free".to_string())
                .spawn(body);
            made.ok().map(|_| sender)
        });
        if thread.as_ref().is_none_or(|t| t.send(span).is_err()) {
            free(span, &self.memory);
        }
    }

    /// Notes that the block that begins with `span` is in use until `event`. False if it is not one of ours: then nothing is noted.
    #[must_use]
    pub(crate) fn note_use(&self, span: Span, event: Arc<dyn Event>) -> bool {
        let mut blocks = lock(&self.blocks);
        let Some(uses) = blocks.get_mut(&span.address()) else {
            return false;
        };
        uses.retain(|e| matches!(e.query(), Ok(false)));
        uses.push(event);
        true
    }

    /// Keeps `source` until `event`.
    pub(crate) fn hold(&self, source: Box<dyn Any + Send>, event: Arc<dyn Event>) {
        lock(&self.later).push(Later {
            until: vec![event],
            what: Leftover::Held(source),
        });
    }

    /// Lets go of what is not used any more.
    fn reap(self: &Arc<Self>) {
        let over: Vec<Later> = {
            let mut later = lock(&self.later);
            let (still, over) = std::mem::take(&mut *later)
                .into_iter()
                .partition(|l| are_pending(&l.until));
            *later = still;
            over
        };
        // Outside the lock: what was held may free memory itself.
        for l in over {
            if let Leftover::Block(kind, span) = l.what {
                self.keep_block(kind, span);
            }
        }
    }
}
