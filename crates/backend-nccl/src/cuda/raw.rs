//! The CUDA driver API as a table of functions opened at run time, behind safe methods.
//!
//! Only what the backend needs. Every method takes handles that this module made (newtypes whose fields nothing else sees) and
//! device memory as [`Span`]s, so the unsafe part ends here. Contexts are the devices' primary ones, retained for ever.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};

use ftcore::{DType, Device, Error, ErrorKind, Result, Tensor};

mod foreign;
mod handles;
mod host;
pub(crate) mod program;
mod table;

pub(crate) use handles::{Context, EventHandle, Function, IpcHandle, Span, StreamHandle};
pub(crate) use host::{HostBlock, host_tensor};
use table::Table;
use vendor::{Opened, Symbols};

/// Page-locked host memory that is never freed: a few kilobytes per device, for results that the host reads.
pub(crate) struct Pinned(NonNull<i32>, usize);
// SAFETY: plain memory; slots are handed out to one owner at a time (see `slots`).
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The value at `index`, as the device left it.
    pub(crate) fn read(&self, index: usize) -> i32 {
        if index >= self.1 {
            return 0;
        }
        // SAFETY: within the allocation; written by the device only before the event that the reader waited for.
        unsafe { ptr::read_volatile(self.0.as_ptr().add(index)) }
    }
}

const NOT_READY: c_int = 600;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const EVENT_INTERPROCESS: c_uint = 4;
const IPC_LAZY_PEER_ACCESS: c_uint = 1;
const POINTER_MEMORY_TYPE: c_int = 2;

/// What the backend asks about a device; the numbers are the driver's.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(crate) enum Attribute {
    ComputeMajor = 75,
    ComputeMinor = 76,
    MemoryPools = 115,
}

/// An error for a failed driver call.
fn failed(call: &str, code: i32, text: &str) -> Error {
    let kind = match code {
        // Out of memory, and everything that leaves the context unusable, is the library's affair.
        _ if call == "cuInit" => ErrorKind::Unsupported,
        _ => ErrorKind::Backend,
    };
    Error::new(kind, format!("CUDA driver: {call}: {text}")).with_code(i64::from(code))
}

/// The driver.
pub(crate) struct Driver {
    table: Table,
    version: u32,
    path: String,
}

impl Driver {
    /// Opens `path` and initialises the driver. `Unsupported` says what is missing.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // SAFETY: the driver's initialisers ask nothing of the caller.
        let opened = unsafe { Opened::new(path, Symbols::Own) }
            .map_err(|e| Error::unsupported(format!("the CUDA driver was not found: {e}")))?;
        // SAFETY: the signatures are those of the driver API's public documentation for these names.
        let table = unsafe { Table::look_up(&opened) }.map_err(|e| {
            Error::unsupported(format!("{e}: a CUDA driver of version 11.2 or later is needed"))
        })?;
        let mut driver = Self {
            table,
            version: 0,
            path: path.display().to_string(),
        };
        // SAFETY: takes flags that must be 0.
        driver.check("cuInit", unsafe { (driver.table.init)(0) })?;
        let mut version = 0;
        // SAFETY: writes one int into the variable that this call borrows.
        driver.check("cuDriverGetVersion", unsafe {
            (driver.table.driver_version)(&raw mut version)
        })?;
        driver.version = u32::try_from(version).unwrap_or(0);
        Ok(driver)
    }

    /// The version (1000 × major + 10 × minor) and the file.
    pub(crate) fn describe(&self) -> String {
        format!(
            "CUDA driver {}.{} ({})",
            self.version / 1000,
            self.version % 1000 / 10,
            self.path
        )
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = ptr::null();
        // SAFETY: writes one pointer to a static string, or null for an unknown code.
        let known = unsafe { (self.table.error_string)(code, &raw mut text) } == 0 && !text.is_null();
        let words = if known {
            // SAFETY: not null; static, ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            "unknown error".to_string()
        };
        Err(failed(call, code, &words))
    }

    /// The number of devices.
    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut n = 0;
        // SAFETY: writes one int into the variable that this call borrows.
        self.check("cuDeviceGetCount", unsafe {
            (self.table.device_count)(&raw mut n)
        })?;
        Ok(u32::try_from(n).unwrap_or(0))
    }

    fn device(&self, index: u32) -> Result<c_int> {
        let mut device = 0;
        let index = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: writes one int into the variable that this call borrows.
        self.check("cuDeviceGet", unsafe {
            (self.table.device_get)(&raw mut device, index)
        })?;
        Ok(device)
    }

    /// The device's name.
    pub(crate) fn device_name(&self, index: u32) -> Result<String> {
        let mut name = [0u8; 256];
        let device = self.device(index)?;
        // SAFETY: writes at most 256 bytes, ending with a zero.
        let code = unsafe { (self.table.device_name)(name.as_mut_ptr().cast(), 256, device) };
        self.check("cuDeviceGetName", code)?;
        Ok(CStr::from_bytes_until_nul(&name)
            .map(|s| s.to_string_lossy().into_owned())
            .unwrap_or_default())
    }

    /// One attribute of a device.
    pub(crate) fn attribute(&self, index: u32, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        let device = self.device(index)?;
        // SAFETY: writes one int into the variable that this call borrows.
        let code = unsafe { (self.table.device_attribute)(&raw mut value, attribute as c_int, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// The device's primary context; retained once more and never released.
    pub(crate) fn context(&self, index: u32) -> Result<Context> {
        let mut context = ptr::null_mut();
        let device = self.device(index)?;
        // SAFETY: writes one handle into the variable that this call borrows.
        let code = unsafe { (self.table.context_retain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Context(context))
    }

    /// Makes `context` current on the calling thread.
    pub(crate) fn set_current(&self, context: Context) -> Result<()> {
        // SAFETY: contexts are never released.
        self.check("cuCtxSetCurrent", unsafe { (self.table.context_set)(context.0) })
    }

    /// The calling thread's current context, if it has one.
    pub(crate) fn current(&self) -> Result<Option<Context>> {
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle into the variable that this call borrows.
        self.check("cuCtxGetCurrent", unsafe {
            (self.table.context_get)(&raw mut context)
        })?;
        Ok((!context.is_null()).then_some(Context(context)))
    }

    /// The device of the calling thread's current context.
    pub(crate) fn current_device(&self) -> Result<u32> {
        let mut device = 0;
        // SAFETY: writes one int; fails without a current context.
        self.check("cuCtxGetDevice", unsafe {
            (self.table.context_device)(&raw mut device)
        })?;
        Ok(u32::try_from(device).unwrap_or(0))
    }

    /// Waits for everything in the current context, for as long as it takes.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: takes nothing; fails without a current context.
        self.check("cuCtxSynchronize", unsafe { (self.table.context_synchronize)() })
    }

    /// A stream in the current context that does not order itself with the default stream.
    pub(crate) fn stream(&self, high_priority: bool) -> Result<StreamHandle> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two ints into the variable that this call borrows.
        let code = unsafe { (self.table.priority_range)(&raw mut least, &raw mut greatest) };
        self.check("cuCtxGetStreamPriorityRange", code)?;
        let priority = if high_priority { greatest } else { least };
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle into the variable that this call borrows.
        let code = unsafe { (self.table.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, priority) };
        self.check("cuStreamCreateWithPriority", code)?;
        Ok(StreamHandle(stream))
    }

    /// Gives a stream up; what is queued on it still runs.
    pub(crate) fn destroy_stream(&self, stream: StreamHandle) {
        // SAFETY: made by `stream`, destroyed once, by its only owner. The default stream is refused by the driver.
        let _ = unsafe { (self.table.stream_destroy)(stream.0) };
    }

    /// True if the stream is empty.
    pub(crate) fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the handle's owner is alive.
        self.ready("cuStreamQuery", unsafe { (self.table.stream_query)(stream.0) })
    }

    fn ready(&self, call: &str, code: c_int) -> Result<bool> {
        match code {
            NOT_READY => Ok(false),
            code => self.check(call, code).map(|()| true),
        }
    }

    /// Later work of `stream` waits for `event`.
    pub(crate) fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: both owners are alive; the driver keeps what it needs of the event.
        self.check("cuStreamWaitEvent", unsafe {
            (self.table.stream_wait)(stream.0, event.0, 0)
        })
    }

    /// An event without a clock.
    pub(crate) fn event(&self) -> Result<EventHandle> {
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle into the variable that this call borrows.
        let code = unsafe { (self.table.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(EventHandle(event))
    }

    /// An event that another process can open, and its handle there.
    pub(crate) fn shared_event(&self) -> Result<(EventHandle, IpcHandle)> {
        let mut event = ptr::null_mut();
        let flags = EVENT_DISABLE_TIMING | EVENT_INTERPROCESS;
        // SAFETY: writes one handle into the variable that this call borrows.
        let code = unsafe { (self.table.event_create)(&raw mut event, flags) };
        self.check("cuEventCreate", code)?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: made above, for this; writes 64 bytes.
        let code = unsafe { (self.table.ipc_export_event)(&raw mut handle, event) };
        match self.check("cuIpcGetEventHandle", code) {
            Ok(()) => Ok((EventHandle(event), handle)),
            Err(error) => {
                self.destroy_event(EventHandle(event));
                Err(error)
            }
        }
    }

    /// Another process's event. Never closed.
    pub(crate) fn import_event(&self, handle: IpcHandle) -> Result<EventHandle> {
        let mut event = ptr::null_mut();
        // SAFETY: the driver checks the handle; writes one handle.
        let code = unsafe { (self.table.ipc_import_event)(&raw mut event, handle) };
        self.check("cuIpcOpenEventHandle", code)?;
        Ok(EventHandle(event))
    }

    /// Device memory that another process can open.
    pub(crate) fn alloc_shared(&self, bytes: usize) -> Result<Span> {
        let mut address = 0;
        // SAFETY: writes one address into the variable that this call borrows.
        let code = unsafe { (self.table.alloc)(&raw mut address, bytes) };
        self.check("cuMemAlloc", code)?;
        Ok(Span { address, bytes })
    }

    /// The handle by which another process opens `span`, the whole of what `alloc_shared` made.
    pub(crate) fn export(&self, span: Span) -> Result<IpcHandle> {
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: the block is alive (see Span); writes 64 bytes.
        let code = unsafe { (self.table.ipc_export)(&raw mut handle, span.address) };
        self.check("cuIpcGetMemHandle", code)?;
        Ok(handle)
    }

    /// The memory of a handle, of which the other process says that it is `bytes` long.
    pub(crate) fn import(&self, handle: IpcHandle, bytes: usize) -> Result<Span> {
        let mut address = 0;
        // SAFETY: the driver checks the handle; writes one address.
        let code = unsafe { (self.table.ipc_import)(&raw mut address, handle, IPC_LAZY_PEER_ACCESS) };
        self.check("cuIpcOpenMemHandle", code)?;
        let span = Span { address, bytes };
        let (mut base, mut length) = (0, 0);
        // SAFETY: opened above; writes an address and a length.
        let code = unsafe { (self.table.address_range)(&raw mut base, &raw mut length, address) };
        let found = self.check("cuMemGetAddressRange", code);
        if found.is_ok() && base == address && length >= bytes {
            return Ok(span);
        }
        let closed = self.unshare(span, false);
        found.and(closed)?;
        Err(Error::invalid(format!(
            "another process says that its memory has {bytes} bytes; it has {length}"
        )))
    }

    /// Frees what `alloc_shared` made (`own`), or lets go of what `import` opened. Waits for the device.
    pub(crate) fn unshare(&self, span: Span, own: bool) -> Result<()> {
        if own {
            // SAFETY: made by `alloc_shared`, freed once by its only owner.
            return self.check("cuMemFree", unsafe { (self.table.free)(span.address) });
        }
        // SAFETY: opened by `import`, closed once by its only owner.
        self.check("cuIpcCloseMemHandle", unsafe {
            (self.table.ipc_close)(span.address)
        })
    }

    /// Marks the present end of `stream`.
    pub(crate) fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: both owners are alive.
        self.check("cuEventRecord", unsafe {
            (self.table.event_record)(event.0, stream.0)
        })
    }

    /// True if the event was reached.
    pub(crate) fn event_query(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the handle's owner is alive.
        self.ready("cuEventQuery", unsafe { (self.table.event_query)(event.0) })
    }

    /// Frees an event that is no longer referred to.
    pub(crate) fn destroy_event(&self, event: EventHandle) {
        // SAFETY: made by `event`, destroyed once, by its only owner.
        let _ = unsafe { (self.table.event_destroy)(event.0) };
    }

    /// Device memory, usable by work that comes after this point of `stream`.
    pub(crate) fn alloc(&self, bytes: usize, stream: StreamHandle) -> Result<Span> {
        let mut address = 0;
        // SAFETY: writes one address into the variable that this call borrows.
        let code = unsafe { (self.table.alloc_async)(&raw mut address, bytes.max(1), stream.0) };
        self.check("cuMemAllocAsync", code)?;
        Ok(Span { address, bytes })
    }

    /// Frees it after this point of `stream`.
    pub(crate) fn free(&self, span: Span, stream: StreamHandle) -> Result<()> {
        // SAFETY: made by `alloc` and freed once by its only owner, ordered after its last use.
        self.check("cuMemFreeAsync", unsafe {
            (self.table.free_async)(span.address, stream.0)
        })
    }

    /// Page-locked host memory of `count` words.
    pub(crate) fn pinned(&self, count: usize) -> Result<Pinned> {
        let mut memory = ptr::null_mut();
        // SAFETY: writes one pointer into the variable that this call borrows.
        let code = unsafe { (self.table.host_alloc)(&raw mut memory, count * size_of::<i32>(), 0) };
        self.check("cuMemHostAlloc", code)?;
        let memory =
            NonNull::new(memory.cast::<i32>()).ok_or_else(|| failed("cuMemHostAlloc", 0, "returned null"))?;
        // SAFETY: freshly allocated, `count` words.
        unsafe { ptr::write_bytes(memory.as_ptr(), 0, count) };
        Ok(Pinned(memory, count))
    }

    /// True if the driver copies this host memory without staging it first.
    pub(crate) fn is_pinned(&self, memory: &[u8]) -> bool {
        let mut kind: c_uint = 0;
        // SAFETY: writes one word; fails for memory that the driver does not know.
        let code = unsafe {
            (self.table.pointer_attribute)(
                (&raw mut kind).cast(),
                POINTER_MEMORY_TYPE,
                memory.as_ptr() as u64,
            )
        };
        code == 0
    }

    /// Enqueues a copy from the host. Pageable memory is staged before this returns; pinned memory is read later.
    pub(crate) fn copy_in(&self, from: &[u8], to: Span, stream: StreamHandle) -> Result<()> {
        let bytes = from.len().min(to.bytes);
        // SAFETY: `to` is alive (see Span); the caller keeps pinned memory until the copy is done.
        let code = unsafe { (self.table.copy_in)(to.address, from.as_ptr().cast(), bytes, stream.0) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    /// Enqueues a copy to the host; the caller does not let go of `to` before it is done.
    pub(crate) fn copy_out(&self, from: Span, to: &mut [u8], stream: StreamHandle) -> Result<()> {
        let bytes = to.len().min(from.bytes);
        // SAFETY: as above.
        let code = unsafe { (self.table.copy_out)(to.as_mut_ptr().cast(), from.address, bytes, stream.0) };
        self.check("cuMemcpyDtoHAsync", code)
    }

    /// Enqueues a copy of one word into pinned memory.
    pub(crate) fn copy_word(
        &self,
        from: Span,
        to: &Pinned,
        index: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if index >= to.1 || from.bytes < size_of::<i32>() {
            return Err(Error::invalid("a slot outside its page"));
        }
        // SAFETY: within both allocations; pinned memory is never freed.
        let code = unsafe {
            (self.table.copy_out)(
                to.0.as_ptr().add(index).cast(),
                from.address,
                size_of::<i32>(),
                stream.0,
            )
        };
        self.check("cuMemcpyDtoHAsync", code)
    }

    /// Enqueues a copy on the device.
    pub(crate) fn copy(&self, from: Span, to: Span, stream: StreamHandle) -> Result<()> {
        if from.bytes == 0 || from == to {
            return Ok(());
        }
        let bytes = from.bytes.min(to.bytes);
        // SAFETY: both spans are alive (see Span).
        self.check("cuMemcpyDtoDAsync", unsafe {
            (self.table.copy)(to.address, from.address, bytes, stream.0)
        })
    }

    /// Enqueues filling `to` with a value of `size` bytes (1, 2, 4 or 8), given by its bits.
    pub(crate) fn fill(&self, to: Span, size: usize, bits: u64, stream: StreamHandle) -> Result<()> {
        let count = to.bytes / size.max(1);
        if count == 0 {
            return Ok(());
        }
        let (low, high) = (bits as u32, (bits >> 32) as u32);
        let t = &self.table;
        // SAFETY: `to` is alive (see Span) and has `count` values of `size` bytes.
        let code = unsafe {
            match size {
                1 => (t.set8)(to.address, bits as u8, count, stream.0),
                2 => (t.set16)(to.address, bits as u16, count, stream.0),
                4 => (t.set32)(to.address, low, count, stream.0),
                _ if low == high => (t.set32)(to.address, low, count * 2, stream.0),
                // Two passes over words that are eight bytes apart: first the low halves, then the high ones.
                _ => match (t.set_2d32)(to.address, 8, low, 1, count, stream.0) {
                    0 => (t.set_2d32)(to.address + 4, 8, high, 1, count, stream.0),
                    code => code,
                },
            }
        };
        self.check("cuMemsetAsync", code)
    }

    /// Compiles PTX for the current context's device and finds its functions.
    pub(crate) fn functions(&self, ptx: &str, names: &[String]) -> Result<Vec<Function>> {
        let source = CString::new(ptx).map_err(|_| Error::invalid("PTX with a zero byte"))?;
        // SAFETY: a text that ends with a zero.
        unsafe { self.functions_of(source.as_ptr().cast(), names) }
    }

    /// Loads what is at `image`, PTX or machine code, on the current context's device and finds its functions.
    ///
    /// # Safety
    /// A whole image: a text that ends with a zero, or a file that says how long it is.
    unsafe fn functions_of(&self, image: *const c_void, names: &[String]) -> Result<Vec<Function>> {
        let mut module = ptr::null_mut();
        // SAFETY: the caller's promise; modules are never unloaded.
        let code = unsafe { (self.table.module_load)(&raw mut module, image) };
        self.check("cuModuleLoadData", code)?;
        names
            .iter()
            .map(|name| {
                let name =
                    CString::new(name.as_str()).map_err(|_| Error::invalid("a name with a zero byte"))?;
                let mut function = ptr::null_mut();
                // SAFETY: writes one handle into the variable that this call borrows.
                let code = unsafe { (self.table.module_function)(&raw mut function, module, name.as_ptr()) };
                self.check("cuModuleGetFunction", code)?;
                Ok(Function(function))
            })
            .collect()
    }

    /// Enqueues one of our kernels: its arguments are 64-bit words (addresses and counts), as all our kernels take them.
    pub(crate) fn launch(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        arguments: &mut [u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let mut pointers: Vec<*mut c_void> = arguments
            .iter_mut()
            .map(|a| ptr::from_mut(a).cast::<c_void>())
            .collect();
        // SAFETY: the kernels' parameters are exactly these 64-bit words (see `kernels`), copied before the call returns;
        // the spans behind the addresses are alive.
        let code = unsafe {
            (self.table.launch)(
                function.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0,
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", code)
    }
}

/// A tensor over device memory that `owner` keeps; `span` is the whole of it.
pub(crate) fn tensor(
    span: Span,
    dtype: DType,
    shape: &[usize],
    device: Device,
    owner: Box<dyn Any + Send + Sync>,
) -> Result<Tensor> {
    let pointer = NonNull::new(span.address as *mut u8)
        .ok_or_else(|| failed("cuMemAllocAsync", 0, "returned a null address"))?;
    // SAFETY: the owner frees the block when the tensor goes; the driver aligns allocations to 256 bytes; nothing else
    // has the address.
    unsafe { Tensor::from_raw(pointer, dtype, shape, None, device, owner) }
}
