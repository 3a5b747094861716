//! The Synapse runtime: `libSynapse.so` of the Intel Gaudi software.
//!
//! Handles are plain words here; the one that holds them decides when they end (`crate::device`). Statuses that are not
//! success become errors with the library's own words and code.

use std::ffi::{CStr, c_char, c_int, c_void};

use vendor::{Opened, functions};

use crate::ftcore::{Error, ErrorKind, Result};

type Status = c_int;

/// `synSuccess` and the few other statuses that mean something to the caller (`synStatus` in synapse_common_types.h).
const SUCCESS: Status = 0;
const BUSY: Status = 22;

/// `synDmaDir`.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(crate) enum Direction {
    HostToDevice = 0,
    DeviceToHost = 1,
    DeviceToDevice = 2,
}

functions! {
    #[allow(non_snake_case, reason = "fields are named as the C functions")]
    struct Table {
        required {
            synInitialize = "synInitialize": fn() -> Status;
            synDeviceGetCount = "synDeviceGetCount": fn(*mut u32) -> Status;
            synDeviceAcquire = "synDeviceAcquire": fn(*mut u32, *const c_char) -> Status;
            synDeviceAcquireByModuleId = "synDeviceAcquireByModuleId": fn(*mut u32, u32) -> Status;
            synDeviceGetName = "synDeviceGetName": fn(*mut c_char, c_int, u32) -> Status;
            synDeviceMalloc = "synDeviceMalloc": fn(u32, u64, u64, u32, *mut u64) -> Status;
            synDeviceFree = "synDeviceFree": fn(u32, u64, u32) -> Status;
            synHostMalloc = "synHostMalloc": fn(u32, u64, u32, *mut *mut c_void) -> Status;
            synMemCopyAsync = "synMemCopyAsync": fn(*mut c_void, u64, u64, u64, c_int) -> Status;
            synStreamCreateGeneric = "synStreamCreateGeneric": fn(*mut *mut c_void, u32, u32) -> Status;
            synStreamDestroy = "synStreamDestroy": fn(*mut c_void) -> Status;
            synStreamWaitEvent = "synStreamWaitEvent": fn(*mut c_void, *mut c_void, u32) -> Status;
            synStreamQuery = "synStreamQuery": fn(*mut c_void) -> Status;
            synEventCreate = "synEventCreate": fn(*mut *mut c_void, u32, u32) -> Status;
            synEventDestroy = "synEventDestroy": fn(*mut c_void) -> Status;
            synEventRecord = "synEventRecord": fn(*mut c_void, *mut c_void) -> Status;
            synEventQuery = "synEventQuery": fn(*mut c_void) -> Status;
        }
        optional {
            synDriverGetVersion = "synDriverGetVersion": fn(*mut c_char, c_int) -> Status;
            synStatusGetBriefDescription = "synStatusGetBriefDescription": fn(Status, *mut c_char, usize) -> Status;
        }
    }
}

/// A stream's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamHandle(usize);

impl StreamHandle {
    /// As the collectives take it.
    pub(super) fn pointer(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// An event's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventHandle(usize);

/// Host memory that the device may copy from and to. Lives as long as the process.
pub(crate) struct Staging {
    address: usize,
    bytes: usize,
}

impl Staging {
    /// The bytes; nothing else touches them while no copy is under way, which the holder of `&mut` sees to.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: synHostMalloc gave this many bytes, which are never freed; initialised when made.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }

    /// The address as copies take it.
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }
}

/// The opened runtime.
pub(crate) struct Synapse {
    table: Table,
    /// Where it was found.
    pub(crate) path: String,
}

fn text_of(buffer: &[u8]) -> String {
    CStr::from_bytes_until_nul(buffer)
        .map(|s| s.to_string_lossy().trim().to_string())
        .unwrap_or_default()
}

impl Synapse {
    /// Looks the functions up and initialises the runtime (a second time is harmless, the header says).
    pub(crate) fn new(library: &Opened) -> Result<Self> {
        // SAFETY: the symbols have the C signatures written here, as the published headers say.
        let table = unsafe { Table::look_up(library)? };
        let synapse = Self {
            table,
            path: library.path().display().to_string(),
        };
        // SAFETY: no arguments.
        synapse.check("synInitialize", unsafe { (synapse.table.synInitialize)() })?;
        Ok(synapse)
    }

    fn check(&self, function: &str, status: Status) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut buffer = [0u8; 256];
        let words = self.table.synStatusGetBriefDescription.map(|describe| {
            // SAFETY: the buffer has the size given, its last byte stays zero.
            unsafe { describe(status, buffer.as_mut_ptr().cast(), buffer.len() - 1) };
            text_of(&buffer)
        });
        let words = words
            .filter(|w| !w.is_empty())
            .unwrap_or_else(|| "no description".to_string());
        Err(
            Error::new(ErrorKind::Backend, format!("{function} failed: {words}"))
                .with_code(i64::from(status)),
        )
    }

    /// True or false for success or busy, an error for the rest.
    fn done(&self, function: &str, status: Status) -> Result<bool> {
        if status == BUSY {
            return Ok(false);
        }
        self.check(function, status).map(|()| true)
    }

    /// The driver's version, if the library says it.
    pub(crate) fn driver_version(&self) -> Option<String> {
        let function = self.table.synDriverGetVersion?;
        let mut buffer = [0u8; 256];
        // SAFETY: the buffer has the size given, its last byte stays zero.
        let status = unsafe { function(buffer.as_mut_ptr().cast(), buffer.len() as c_int - 1) };
        (status == SUCCESS)
            .then(|| text_of(&buffer))
            .filter(|v| !v.is_empty())
    }

    /// How many devices this machine shows.
    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a pointer to a live u32.
        let status = unsafe { (self.table.synDeviceGetCount)(&raw mut count) };
        self.check("synDeviceGetCount", status).map(|()| count)
    }

    /// Takes the device of module `module`, or any free one.
    pub(crate) fn acquire(&self, module: Option<u32>) -> Result<u32> {
        let mut device = 0;
        match module {
            Some(module) => {
                // SAFETY: a pointer to a live u32.
                let status = unsafe { (self.table.synDeviceAcquireByModuleId)(&raw mut device, module) };
                self.check("synDeviceAcquireByModuleId", status)?;
            }
            None => {
                // SAFETY: as above; a null bus address means any device.
                let status = unsafe { (self.table.synDeviceAcquire)(&raw mut device, std::ptr::null()) };
                self.check("synDeviceAcquire", status)?;
            }
        }
        Ok(device)
    }

    /// What the device is called.
    pub(crate) fn device_name(&self, device: u32) -> Result<String> {
        let mut buffer = [0u8; 256];
        // SAFETY: the buffer has the size given, its last byte stays zero.
        let status = unsafe {
            (self.table.synDeviceGetName)(buffer.as_mut_ptr().cast(), buffer.len() as c_int - 1, device)
        };
        self.check("synDeviceGetName", status).map(|()| text_of(&buffer))
    }

    /// `bytes` of device memory (at least one); the address.
    pub(crate) fn allocate(&self, device: u32, bytes: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: a pointer to a live u64; no wish for an address, flags are zero as documented.
        let status = unsafe { (self.table.synDeviceMalloc)(device, bytes, 0, 0, &raw mut address) };
        self.check("synDeviceMalloc", status)?;
        if address == 0 {
            return Err(Error::new(ErrorKind::Backend, "synDeviceMalloc gave no address"));
        }
        Ok(address)
    }

    /// Gives device memory back. Nothing may use it any more.
    pub(crate) fn free(&self, device: u32, address: u64) -> Result<()> {
        // SAFETY: the address is one of `allocate`, whose tensor is gone (`crate::memory`).
        let status = unsafe { (self.table.synDeviceFree)(device, address, 0) };
        self.check("synDeviceFree", status)
    }

    /// Host memory of `bytes` for copies, zeroed, for as long as the process lives.
    pub(crate) fn staging(&self, device: u32, bytes: usize) -> Result<Staging> {
        let mut buffer: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pointer to a live pointer.
        let status = unsafe { (self.table.synHostMalloc)(device, bytes as u64, 0, &raw mut buffer) };
        self.check("synHostMalloc", status)?;
        if buffer.is_null() {
            return Err(Error::new(ErrorKind::Backend, "synHostMalloc gave no address"));
        }
        // SAFETY: `bytes` bytes were just given to us.
        unsafe { std::ptr::write_bytes(buffer.cast::<u8>(), 0, bytes) };
        Ok(Staging {
            address: buffer as usize,
            bytes,
        })
    }

    /// Enqueues a copy. Both ranges stay valid until the stream has done it (INV-8: the callers own or leak them).
    pub(crate) fn copy(
        &self,
        stream: StreamHandle,
        from: u64,
        to: u64,
        bytes: u64,
        direction: Direction,
    ) -> Result<()> {
        // SAFETY: as documented on this method.
        let status =
            unsafe { (self.table.synMemCopyAsync)(stream.pointer(), from, bytes, to, direction as c_int) };
        self.check("synMemCopyAsync", status)
    }

    /// A new stream.
    pub(crate) fn create_stream(&self, device: u32) -> Result<StreamHandle> {
        let mut stream: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pointer to a live handle.
        let status = unsafe { (self.table.synStreamCreateGeneric)(&raw mut stream, device, 0) };
        self.check("synStreamCreateGeneric", status)?;
        Ok(StreamHandle(stream as usize))
    }

    /// Ends an idle stream; false if it is busy (it then stays).
    pub(crate) fn destroy_stream(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the handle is live and this is its last use, unless the answer is busy.
        let status = unsafe { (self.table.synStreamDestroy)(stream.pointer()) };
        self.done("synStreamDestroy", status)
    }

    /// Lets later work of `stream` wait for what `event` has recorded now.
    pub(crate) fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: both handles are live.
        let status = unsafe { (self.table.synStreamWaitEvent)(stream.pointer(), event.0 as *mut c_void, 0) };
        self.check("synStreamWaitEvent", status)
    }

    /// True if nothing is left to do on `stream`.
    pub(crate) fn stream_idle(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the handle is live.
        let status = unsafe { (self.table.synStreamQuery)(stream.pointer()) };
        self.done("synStreamQuery", status)
    }

    /// A new event that has recorded the present end of `stream`.
    pub(crate) fn record(&self, device: u32, stream: StreamHandle) -> Result<EventHandle> {
        let mut event: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pointer to a live handle.
        let status = unsafe { (self.table.synEventCreate)(&raw mut event, device, 0) };
        self.check("synEventCreate", status)?;
        // SAFETY: both handles are live; no other thread knows the event yet.
        let status = unsafe { (self.table.synEventRecord)(event, stream.pointer()) };
        if let Err(e) = self.check("synEventRecord", status) {
            self.destroy_event(EventHandle(event as usize));
            return Err(e);
        }
        Ok(EventHandle(event as usize))
    }

    /// True once `event` is reached.
    pub(crate) fn reached(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the handle is live.
        let status = unsafe { (self.table.synEventQuery)(event.0 as *mut c_void) };
        self.done("synEventQuery", status)
    }

    /// Ends an event; does not block, the header says, even if it was not reached.
    pub(crate) fn destroy_event(&self, event: EventHandle) {
        // SAFETY: the handle is live and this is its last use.
        let status = unsafe { (self.table.synEventDestroy)(event.0 as *mut c_void) };
        if let Err(error) = self.check("synEventDestroy", status) {
            tracing::debug!(%error, "an event was not destroyed");
        }
    }
}
