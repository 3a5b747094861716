//! A device kind of a plugin, as an `Accelerator` of this program.
//!
//! Streams and events are handles of the plugin; a stream is found again by its address ([`stream_handle`]), because a
//! `Stream` cannot be asked what it is.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use ftcore::{
    Accelerator, DType, Device, DeviceKind, Error, Event, Result, Stream, Tensor, register_accelerator,
};

use super::buffer;
use super::library::{Library, guarded};
use crate::abi::{self, DeviceTable, Growing};
use crate::fault;
use crate::text::{self, Collected};

/// A device kind of an opened plugin.
pub(super) type Devices = &'static Table;

pub(super) struct Table {
    library: &'static Library,
    kind: DeviceKind,
    table: DeviceTable,
}

// SAFETY: the ABI says that the table may be used from any thread as long as the process lives.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

type Key = (*const Library, DeviceKind);

struct Tables(BTreeMap<Key, Devices>);

// SAFETY: the pointers are compared, never followed.
unsafe impl Send for Tables {}

static TABLES: Mutex<Tables> = Mutex::new(Tables(BTreeMap::new()));

/// The plugin's table of `kind`, which it hands out once.
pub(super) fn table(library: &'static Library, index: u32, kind: &DeviceKind) -> Result<Devices> {
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (std::ptr::from_ref(library), kind.clone());
    if let Some(known) = tables.0.get(&key) {
        return Ok(known);
    }
    let f = library.need(library.table.device, "device kinds")?;
    let mut table = DeviceTable::empty();
    // SAFETY: the plugin's own function and context; the table is ours.
    library.call(|fault| unsafe { f(library.table.ctx, index, &raw mut table, fault) })?;
    // SAFETY: our own struct; `read` only believes the size.
    let table = unsafe { abi::read(&raw const table) }.map_err(|e| super::breach(&library.shown(), e))?;
    let table = &*Box::leak(Box::new(Table {
        library,
        kind: kind.clone(),
        table,
    }));
    tables.0.insert(key, table);
    Ok(table)
}

/// The plugin's table of `kind`, if it brings that kind.
pub(super) fn find(library: &'static Library, kind: &DeviceKind) -> Option<Devices> {
    let index = library.devices.iter().position(|k| k == kind)?;
    table(library, u32::try_from(index).ok()?, kind).ok()
}

/// Makes the kind known to this program.
pub(super) fn register(library: &'static Library, index: u32, kind: &DeviceKind) -> Result<()> {
    register_accelerator(Arc::new(PluginAccelerator(table(library, index, kind)?)))
}

struct PluginAccelerator(Devices);

struct PluginStream {
    devices: Devices,
    index: u32,
    handle: *mut c_void,
}

struct PluginEvent {
    devices: Devices,
    handle: *mut c_void,
}

/// Memory that the plugin has allocated.
struct Allocation {
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: the ABI says that handles may be used from any thread.
unsafe impl Send for PluginStream {}
// SAFETY: as above.
unsafe impl Sync for PluginStream {}
// SAFETY: as above.
unsafe impl Send for PluginEvent {}
// SAFETY: as above.
unsafe impl Sync for PluginEvent {}
// SAFETY: as above: `release` may be called from any thread.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: once; the tensor over this memory is gone.
            guarded((), || unsafe { release(self.owner) });
        }
    }
}

impl Table {
    fn call(&self, run: impl FnOnce(*mut c_void, *mut abi::Fault) -> i32) -> Result<()> {
        self.library.call(|fault| run(self.table.ctx, fault))
    }
}

/// Plugin streams that are alive: address of the `PluginStream` to (its table's address, the plugin's handle).
static STREAMS: RwLock<BTreeMap<usize, (usize, usize)>> = RwLock::new(BTreeMap::new());

fn new_stream(devices: Devices, index: u32, handle: *mut c_void) -> Arc<dyn Stream> {
    let stream = Arc::new(PluginStream {
        devices,
        index,
        handle,
    });
    let table = std::ptr::from_ref(devices) as usize;
    let mut alive = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
    alive.insert(Arc::as_ptr(&stream) as usize, (table, handle as usize));
    stream
}

impl Drop for PluginStream {
    fn drop(&mut self) {
        let mut alive = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
        alive.remove(&(std::ptr::from_ref(self) as usize));
        drop(alive);
        if let Some(release) = self.devices.table.stream_release {
            // SAFETY: once, the plugin's own handle.
            guarded((), || unsafe { release(self.devices.table.ctx, self.handle) });
        }
    }
}

/// The plugin's handle of a stream of `devices`; none for any other stream.
pub(super) fn stream_handle(devices: Devices, stream: &dyn Stream) -> Option<*mut c_void> {
    let at = std::ptr::from_ref(stream).cast::<()>() as usize;
    let alive = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    let (table, handle) = alive.get(&at)?;
    (*table == std::ptr::from_ref(devices) as usize).then_some(*handle as *mut c_void)
}

/// An event that the plugin gives away.
pub(super) fn event(devices: Devices, handle: *mut c_void) -> Arc<dyn Event> {
    Arc::new(PluginEvent { devices, handle })
}

impl Drop for PluginEvent {
    fn drop(&mut self) {
        if let Some(release) = self.devices.table.event_release {
            // SAFETY: once, the plugin's own handle.
            guarded((), || unsafe { release(self.devices.table.ctx, self.handle) });
        }
    }
}

impl Event for PluginEvent {
    fn query(&self) -> Result<bool> {
        let f = self
            .devices
            .library
            .need(self.devices.table.event_query, "event_query")?;
        let mut done = 0;
        self.devices
            // SAFETY: the plugin's own function and handle.
            .call(|ctx, fault| unsafe { f(ctx, self.handle, &raw mut done, fault) })?;
        Ok(done != 0)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        let f = self
            .devices
            .library
            .need(self.devices.table.event_synchronize, "event_synchronize")?;
        // SAFETY: the plugin's own function and handle.
        self.devices
            .call(|ctx, fault| unsafe { f(ctx, self.handle, fault::milliseconds(deadline), fault) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Stream for PluginStream {
    fn device(&self) -> Device {
        Device::new(self.devices.kind.clone(), self.index)
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let f = self
            .devices
            .library
            .need(self.devices.table.stream_record, "stream_record")?;
        let mut handle = std::ptr::null_mut();
        self.devices
            // SAFETY: the plugin's own function and handle.
            .call(|ctx, fault| unsafe { f(ctx, self.handle, &raw mut handle, fault) })?;
        Ok(event(self.devices, handle))
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        let own = event
            .as_any()
            .downcast_ref::<PluginEvent>()
            .filter(|e| std::ptr::eq(e.devices, self.devices));
        let Some(event) = own else {
            // Of another device kind: the host waits, for longer than any collective's own deadline.
            return event.synchronize(ftcore::deadline_in(std::time::Duration::from_secs(3600)));
        };
        let f = self
            .devices
            .library
            .need(self.devices.table.stream_wait, "stream_wait")?;
        // SAFETY: the plugin's own function and handles.
        self.devices
            .call(|ctx, fault| unsafe { f(ctx, self.handle, event.handle, fault) })
    }

    fn query(&self) -> Result<bool> {
        let f = self
            .devices
            .library
            .need(self.devices.table.stream_query, "stream_query")?;
        let mut done = 0;
        self.devices
            // SAFETY: the plugin's own function and handle.
            .call(|ctx, fault| unsafe { f(ctx, self.handle, &raw mut done, fault) })?;
        Ok(done != 0)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        let f = self
            .devices
            .library
            .need(self.devices.table.stream_synchronize, "stream_synchronize")?;
        // SAFETY: the plugin's own function and handle.
        self.devices
            .call(|ctx, fault| unsafe { f(ctx, self.handle, fault::milliseconds(deadline), fault) })
    }
}

impl PluginAccelerator {
    fn stream(&self, stream: &dyn Stream) -> Result<*mut c_void> {
        stream_handle(self.0, stream).ok_or_else(|| {
            Error::invalid(format!(
                "a stream on {} is not one of plugin {}'s '{}' streams",
                stream.device(),
                self.0.library.shown(),
                self.0.kind
            ))
        })
    }
}

impl Accelerator for PluginAccelerator {
    fn kind(&self) -> DeviceKind {
        self.0.kind.clone()
    }

    fn count(&self) -> u32 {
        // SAFETY: the plugin's own function and context.
        self.0.table.count.map_or(0, |f| unsafe { f(self.0.table.ctx) })
    }

    fn current(&self) -> Result<u32> {
        let f = self.0.library.need(self.0.table.current, "current")?;
        let mut index = 0;
        self.0
            // SAFETY: as above.
            .call(|ctx, fault| unsafe { f(ctx, &raw mut index, fault) })?;
        Ok(index)
    }

    fn set(&self, index: u32) -> Result<()> {
        let f = self.0.library.need(self.0.table.set, "set")?;
        // SAFETY: as above.
        self.0.call(|ctx, fault| unsafe { f(ctx, index, fault) })
    }

    fn current_stream(&self, index: u32) -> Result<Arc<dyn Stream>> {
        let f = self
            .0
            .library
            .need(self.0.table.current_stream, "current_stream")?;
        let mut handle = std::ptr::null_mut();
        self.0
            // SAFETY: as above.
            .call(|ctx, fault| unsafe { f(ctx, index, &raw mut handle, fault) })?;
        Ok(new_stream(self.0, index, handle))
    }

    fn synchronize(&self, index: u32, deadline: Instant) -> Result<()> {
        let f = self.0.library.need(self.0.table.synchronize, "synchronize")?;
        // SAFETY: as above.
        self.0
            .call(|ctx, fault| unsafe { f(ctx, index, fault::milliseconds(deadline), fault) })
    }

    fn name(&self, index: u32) -> Result<String> {
        let f = self.0.library.need(self.0.table.name, "name")?;
        let mut name = Collected::default();
        let sink = name.sink();
        // SAFETY: as above; the sink lives for the call.
        self.0.call(|ctx, fault| unsafe { f(ctx, index, sink, fault) })?;
        let name = name
            .one()
            .map_err(|e| super::breach(&self.0.library.shown(), e))?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    fn new_stream(&self, index: u32, high_priority: bool) -> Result<Arc<dyn Stream>> {
        let f = self.0.library.need(self.0.table.new_stream, "new_stream")?;
        let mut handle = std::ptr::null_mut();
        self.0
            // SAFETY: as above.
            .call(|ctx, fault| unsafe { f(ctx, index, u32::from(high_priority), &raw mut handle, fault) })?;
        Ok(new_stream(self.0, index, handle))
    }

    fn alloc(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let f = self.0.library.need(self.0.table.alloc, "alloc")?;
        let dims: Vec<u64> = shape.iter().map(|d| *d as u64).collect();
        let (code, at, len) = (u32::from(dtype.code()), dims.as_ptr(), dims.len() as u64);
        let mut buffer = abi::Buffer::empty();
        self.0
            // SAFETY: as above; the arguments live for the call.
            .call(|ctx, fault| unsafe { f(ctx, index, code, at, len, &raw mut buffer, fault) })?;
        let breach = |what: String| super::breach(&self.0.library.shown(), what);
        // SAFETY: our own struct; `read` only believes the size.
        let b = unsafe { abi::read(&raw const buffer) }.map_err(breach)?;
        let memory = Box::new(Allocation {
            owner: b.owner,
            release: b.release,
        });
        let count = shape.iter().try_fold(1usize, |a, d| a.checked_mul(*d));
        let wanted = count.and_then(|c| c.checked_mul(dtype.size()));
        let ptr = NonNull::new(b.ptr.cast::<u8>()).ok_or_else(|| breach("memory at address 0".into()))?;
        if wanted.is_none_or(|w| w as u64 != b.bytes) {
            return Err(breach(format!("{} bytes for {shape:?} of {dtype}", b.bytes)));
        }
        // SAFETY: the plugin says that these bytes are this tensor's alone until `release`.
        unsafe { Tensor::from_raw(ptr, dtype, shape, None, Device::new(self.kind(), index), memory) }
    }

    fn copy_in(&self, from: &[u8], to: &mut Tensor, stream: &dyn Stream) -> Result<()> {
        let f = self.0.library.need(self.0.table.copy_in, "copy_in")?;
        let handle = self.stream(stream)?;
        let (from, to) = (text::lend_bytes(from), buffer::lend(to));
        // SAFETY: as above; both sides of the copy live for the call, and `to` is borrowed for writing.
        self.0
            .call(|ctx, fault| unsafe { f(ctx, from, &raw const to, handle, fault) })
    }

    fn copy_out(&self, from: &Tensor, to: &mut [u8], stream: &dyn Stream) -> Result<()> {
        let f = self.0.library.need(self.0.table.copy_out, "copy_out")?;
        let handle = self.stream(stream)?;
        let from = buffer::lend(from);
        let (at, len) = (to.as_mut_ptr().cast::<c_void>(), to.len() as u64);
        // SAFETY: as above.
        self.0
            .call(|ctx, fault| unsafe { f(ctx, &raw const from, at, len, handle, fault) })
    }

    fn native_fp8(&self, index: u32) -> bool {
        // SAFETY: as above.
        self.0
            .table
            .native_fp8
            .is_some_and(|f| unsafe { f(self.0.table.ctx, index) } != 0)
    }
}
