//! SYCL through dpctl's calls, behind safe methods: devices, queues, events and USM memory.
//!
//! Handles are newtypes that nothing else can make; they delete what they own when they go. Memory that commands work on is a
//! [`Span`], whose owner the caller keeps until those commands are done. dpctl says what failed on standard error and returns
//! null, so errors here name the call and point there.

use std::any::Any;
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Duration;

use ftcore::{DType, Device, Error, ErrorKind, Result, Tensor};
use sycl_sys::{BackendType, DeviceRef, DeviceType, EventRef, EventStatus, IN_ORDER, Library, QueueRef};

/// dpctl and the SYCL runtime, opened by the first call. The first failure is kept: libraries do not appear while a program
/// runs.
pub(crate) fn sycl() -> Result<&'static Library> {
    static OPENED: OnceLock<Result<Library>> = OnceLock::new();
    OPENED
        .get_or_init(|| {
            // The C++ library takes C's standard output when it is loaded, which SYCL does and oneCCL logs through.
            oneccl_sys::output::keep_out_of_stdout();
            Ok(Library::open()?)
        })
        .as_ref()
        .map_err(Clone::clone)
}

fn refused(call: &str) -> Error {
    Error::new(
        ErrorKind::Backend,
        format!("SYCL: {call} failed; dpctl has written the reason to standard error"),
    )
}

/// Memory that a command works on: an address and a length in bytes.
///
/// INV-8: the one that enqueues work on a span keeps its owner (a tensor or a block) until that work is done, or leaks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: only numbers; what they stand for is used through the calls of this module.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// No memory. It is never given to a call.
    pub(crate) const EMPTY: Self = Self {
        at: std::ptr::null_mut(),
        bytes: 0,
    };

    /// Of memory that a [`Lent`](super::lent::Lent) or a tensor stands for.
    pub(super) fn new(at: *mut u8, bytes: usize) -> Self {
        Self { at, bytes }
    }

    /// Host memory that is read.
    pub(crate) fn reading(bytes: &[u8]) -> Self {
        Self::new(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Host memory that is written, or both.
    pub(crate) fn writing(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }

    /// The memory of a tensor, to read.
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self::new(tensor.as_ptr().cast_mut(), tensor.byte_len())
    }

    /// The length in bytes.
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// The address as a number, which identifies the block.
    pub(crate) fn address(self) -> usize {
        self.at as usize
    }

    /// As C takes it.
    pub(super) fn pointer(self) -> *mut c_void {
        self.at.cast()
    }

    /// Copies as many bytes as both have. Both are host memory.
    pub(crate) fn copy_to(self, to: Self) {
        // SAFETY: both spans are alive (see Span) and long enough; they may overlap.
        unsafe { std::ptr::copy(self.at, to.at, self.bytes.min(to.bytes)) };
    }

    /// The part that begins at byte `offset`; what would lie beyond the end is an error.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Result<Self> {
        match offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            // Within the allocation, or at its end for an empty part.
            true => Ok(Self::new(self.at.wrapping_add(offset), bytes)),
            false => Err(Error::new(
                ErrorKind::Internal,
                format!(
                    "bytes {offset} to {offset}+{bytes} of memory that has {}",
                    self.bytes
                ),
            )),
        }
    }
}

macro_rules! handle {
    ($(#[$m:meta])* $name:ident($raw:ty) deleted by $delete:ident) => {
        $(#[$m])*
        #[derive(Debug)]
        pub(crate) struct $name($raw);
        // SAFETY: SYCL's objects may be used from any thread; this is their address.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
        impl Drop for $name {
            fn drop(&mut self) {
                if let Ok(library) = sycl() {
                    // SAFETY: the only owner of this reference; SYCL keeps what running commands need.
                    unsafe { (library.functions.$delete)(self.0) };
                }
            }
        }
    };
}

handle!(
    /// A device.
    DeviceHandle(DeviceRef) deleted by device_delete
);
handle!(
    /// A queue.
    Queue(QueueRef) deleted by queue_delete
);
handle!(
    /// A command that was enqueued.
    EventHandle(EventRef) deleted by event_delete
);

/// How many devices Level Zero knows: Intel's GPUs, each once (OpenCL may list them a second time).
pub(crate) fn count_of_gpus() -> Result<u32> {
    let kind = BackendType::LEVEL_ZERO.0 | DeviceType::GPU.0;
    // SAFETY: takes a number.
    let count = unsafe { (sycl()?.functions.device_count)(kind) };
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

impl DeviceHandle {
    /// The first device that fits SYCL's filter `selector` (`backend:kind:index`, each part optional).
    pub(crate) fn select(selector: &str) -> Result<Self> {
        let functions = &sycl()?.functions;
        let text = CString::new(selector).map_err(|_| Error::invalid("a device filter with a zero byte"))?;
        // SAFETY: a text that ends with a zero; the selector is deleted once, here.
        let device = unsafe {
            let filter = (functions.filter_selector)(text.as_ptr());
            if filter.is_null() {
                return Err(Error::invalid(format!(
                    "'{selector}' is not a filter for SYCL devices"
                )));
            }
            let device = (functions.device_from_selector)(filter);
            (functions.selector_delete)(filter);
            device
        };
        if device.is_null() {
            return Err(Error::unsupported(format!(
                "there is no SYCL device '{selector}'"
            )));
        }
        Ok(Self(device))
    }

    /// True for a CPU that runs SYCL.
    pub(crate) fn is_cpu(&self) -> bool {
        // SAFETY: a live device.
        sycl().is_ok_and(|l| unsafe { (l.functions.device_type)(self.0) } == DeviceType::CPU)
    }

    /// What it is called.
    pub(crate) fn name(&self) -> String {
        sycl().map_or_else(
            |_| String::new(),
            // SAFETY: a live device; the string is taken once.
            |l| unsafe { l.take_string((l.functions.device_name)(self.0)) },
        )
    }

    /// The driver's version; empty where it is not told.
    pub(crate) fn driver(&self) -> String {
        let Ok(l) = sycl() else { return String::new() };
        l.functions.device_driver.map_or_else(String::new, |f| {
            // SAFETY: as above.
            unsafe { l.take_string(f(self.0)) }
        })
    }

    /// True if both are the same device.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let equal = sycl().ok().and_then(|l| l.functions.device_equal);
        // SAFETY: both are alive.
        equal.is_some_and(|f| unsafe { f(self.0, other.0) } != 0)
    }
}

impl Queue {
    /// A new queue in the device's default context, whose commands run in order.
    pub(crate) fn new(device: &DeviceHandle) -> Result<Self> {
        // SAFETY: a live device, no error handler.
        let queue = unsafe { (sycl()?.functions.queue_for_device)(device.0, std::ptr::null(), IN_ORDER) };
        Self::made(queue, "making a queue")
    }

    fn made(queue: QueueRef, call: &str) -> Result<Self> {
        match queue.is_null() {
            true => Err(refused(call)),
            false => Ok(Self(queue)),
        }
    }

    /// Another handle to a queue that was made elsewhere.
    ///
    /// # Safety
    /// `queue` is a live `sycl::queue*` of the very SYCL runtime (`libsycl`) that dpctl uses in this process.
    pub(crate) unsafe fn copy_of(queue: *mut c_void) -> Result<Self> {
        if queue.is_null() {
            return Err(Error::invalid("a null queue"));
        }
        // SAFETY: the caller's promise.
        let copy = unsafe { (sycl()?.functions.queue_copy)(queue) };
        Self::made(copy, "copying a queue")
    }

    /// Its device.
    pub(crate) fn device(&self) -> Result<DeviceHandle> {
        // SAFETY: a live queue.
        let device = unsafe { (sycl()?.functions.queue_device)(self.0) };
        match device.is_null() {
            true => Err(refused("asking a queue for its device")),
            false => Ok(DeviceHandle(device)),
        }
    }

    /// The `sycl::queue*`, which is what oneCCL takes as a stream.
    pub(crate) fn pointer(&self) -> *mut c_void {
        self.0
    }

    fn event(event: EventRef, call: &str) -> Result<EventHandle> {
        match event.is_null() {
            true => Err(refused(call)),
            false => Ok(EventHandle(event)),
        }
    }

    /// The present end of the queue.
    pub(crate) fn barrier(&self) -> Result<EventHandle> {
        // SAFETY: a live queue.
        Self::event(unsafe { (sycl()?.functions.queue_barrier)(self.0) }, "a barrier")
    }

    /// Waits, for as long as it takes, until what is on the queue has been handed to the device, host tasks done: commands that are
    /// enqueued now go to the device at once, and their events can be relied on (see `raw::comm`).
    pub(crate) fn settle(&self) -> Result<()> {
        self.barrier()?.finish()
    }

    /// Later commands wait for `event`.
    pub(crate) fn wait_for(&self, event: &EventHandle) -> Result<EventHandle> {
        let list = [event.0];
        // SAFETY: a live queue and a live event; SYCL copies the list.
        let barrier = unsafe { (sycl()?.functions.queue_barrier_for)(self.0, list.as_ptr(), list.len()) };
        Self::event(barrier, "a barrier for an event")
    }

    /// Enqueues a copy of as many bytes as both have.
    pub(crate) fn copy(&self, from: Span, to: Span) -> Result<EventHandle> {
        let bytes = from.bytes.min(to.bytes);
        // SAFETY: both spans are alive (see Span); one of them may be host memory.
        let event = unsafe { (sycl()?.functions.queue_memcpy)(self.0, to.pointer(), from.pointer(), bytes) };
        Self::event(event, "a copy")
    }

    /// Enqueues filling `to` with zeros.
    pub(crate) fn zero(&self, to: Span) -> Result<EventHandle> {
        // SAFETY: the span is alive (see Span).
        let event = unsafe { (sycl()?.functions.queue_memset)(self.0, to.pointer(), 0, to.bytes) };
        Self::event(event, "filling memory")
    }

    /// Copies from the host; done when this returns.
    pub(crate) fn copy_in(&self, from: &[u8], to: Span) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        // `from` is borrowed until the copy is done; it is only read.
        self.copy(Span::reading(from), to)?.finish()
    }

    /// Copies to the host; done when this returns.
    pub(crate) fn copy_out(&self, from: Span, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        // `to` is borrowed until the copy is done.
        self.copy(from, Span::writing(to))?.finish()
    }
}

impl EventHandle {
    /// True once the command and all before it are done.
    pub(crate) fn is_done(&self) -> Result<bool> {
        // SAFETY: a live event.
        match unsafe { (sycl()?.functions.event_status)(self.0) } {
            EventStatus::COMPLETE => Ok(true),
            EventStatus::UNKNOWN => Err(refused("asking an event how far it is")),
            _ => Ok(false),
        }
    }

    /// Waits for as long as it takes: for borrowed memory, and for threads that may be given up.
    pub(crate) fn finish(&self) -> Result<()> {
        let mut pause = Duration::from_micros(2);
        for round in 0u32.. {
            if self.is_done()? {
                return Ok(());
            }
            match round {
                0..50 => std::thread::yield_now(),
                _ => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_micros(200));
                }
            }
        }
        Ok(())
    }
}

/// Which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usm {
    /// On the device.
    Device,
    /// On the host, and the device reads and writes it.
    Host,
    /// Moves between both.
    Shared,
}

/// New memory in the context of `queue`.
pub(crate) fn alloc(kind: Usm, bytes: usize, queue: &Queue) -> Result<Span> {
    let functions = &sycl()?.functions;
    let (call, f) = match kind {
        Usm::Device => ("malloc_device", functions.malloc_device),
        Usm::Host => ("malloc_host", functions.malloc_host),
        Usm::Shared => ("malloc_shared", functions.malloc_shared),
    };
    // SAFETY: a live queue; zero bytes would give null.
    let at = unsafe { f(bytes.max(1), queue.0) };
    match at.is_null() {
        true => Err(Error::new(
            ErrorKind::Backend,
            format!("SYCL: {call} has no {bytes} bytes to give"),
        )),
        false => Ok(Span::new(at.cast(), bytes)),
    }
}

/// Frees what [`alloc`] gave. The caller owns it and no command uses it any more.
pub(crate) fn free(span: Span, queue: &Queue) {
    if let Ok(library) = sycl() {
        // SAFETY: the owner frees it once, after its last use.
        unsafe { (library.functions.free)(span.pointer(), queue.0) };
    }
}

/// A tensor over the whole of `span`, which `owner` keeps. Host and shared memory may be given the CPU as its device.
pub(crate) fn tensor(
    span: Span,
    dtype: DType,
    shape: &[usize],
    device: Device,
    owner: Box<dyn Any + Send + Sync>,
) -> Result<Tensor> {
    let pointer = NonNull::new(span.at).ok_or_else(|| refused("an allocation"))?;
    // SAFETY: the owner frees the block when the tensor goes; SYCL aligns allocations for every type; nothing else has
    // the address.
    unsafe { Tensor::from_raw(pointer, dtype, shape, None, device, owner) }
}

/// The library in words.
pub(crate) fn describe() -> Option<String> {
    let library = sycl().ok()?;
    let version = match library.version.as_str() {
        "" => String::new(),
        version => format!(" (SYCL {version})"),
    };
    Some(format!("dpctl{version} from {}", library.file.display()))
}
