//! A device kind as a C table. Stream and event handles are boxed `Arc`s of this side.

use std::ffi::c_void;
use std::sync::Arc;

use ftcore::{Accelerator, DType, Error, Event, Result, Stream, Tensor};

use super::{breach, guarded, operation, quiet};
use crate::abi::{self, Buffer, Bytes, DeviceTable, Fault, Growing, Sink};
use crate::{fault, text};

/// The table of a device kind; `accelerator` must be static.
pub(super) fn export(accelerator: &'static Arc<dyn Accelerator>) -> DeviceTable {
    let mut t = DeviceTable::empty();
    t.ctx = std::ptr::from_ref(accelerator).cast_mut().cast();
    t.count = Some(count);
    t.current = Some(current);
    t.set = Some(set);
    t.name = Some(name);
    t.synchronize = Some(synchronize);
    t.alloc = Some(alloc);
    t.copy_in = Some(copy_in);
    t.copy_out = Some(copy_out);
    t.current_stream = Some(current_stream);
    t.new_stream = Some(new_stream);
    t.stream_release = Some(stream_release);
    t.stream_record = Some(stream_record);
    t.stream_wait = Some(stream_wait);
    t.stream_query = Some(stream_query);
    t.stream_synchronize = Some(stream_synchronize);
    t.event_release = Some(event_release);
    t.event_query = Some(event_query);
    t.event_synchronize = Some(event_synchronize);
    t.native_fp8 = Some(native_fp8);
    t
}

/// A handle for the host.
pub(super) fn event_handle(event: Arc<dyn Event>) -> *mut c_void {
    Box::into_raw(Box::new(event)).cast()
}

fn stream_handle(stream: Arc<dyn Stream>) -> *mut c_void {
    Box::into_raw(Box::new(stream)).cast()
}

/// # Safety
/// `ctx` is the one that `export` gave out.
unsafe fn accelerator<'a>(ctx: *mut c_void) -> Result<&'a dyn Accelerator> {
    // SAFETY: by the contract it is static.
    let accelerator = unsafe { ctx.cast::<Arc<dyn Accelerator>>().as_ref() };
    accelerator
        .map(|a| &**a)
        .ok_or_else(|| breach("a device kind without its ctx".into()))
}

/// # Safety
/// `handle` is null or a stream handle that was not given back.
unsafe fn stream<'a>(handle: *mut c_void) -> Result<&'a dyn Stream> {
    // SAFETY: by the contract.
    let stream = unsafe { handle.cast::<Arc<dyn Stream>>().as_ref() };
    stream.map(|s| &**s).ok_or_else(|| breach("no stream".into()))
}

/// # Safety
/// `handle` is null or an event handle that was not given back.
unsafe fn event<'a>(handle: *mut c_void) -> Result<&'a dyn Event> {
    // SAFETY: by the contract.
    let event = unsafe { handle.cast::<Arc<dyn Event>>().as_ref() };
    event.map(|e| &**e).ok_or_else(|| breach("no event".into()))
}

/// # Safety
/// `to` is null or writable.
unsafe fn put<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(breach("no place for the answer".into()));
    }
    // SAFETY: by the contract.
    unsafe { to.write(value) };
    Ok(())
}

unsafe extern "C" fn count(ctx: *mut c_void) -> u32 {
    let mut count = 0;
    quiet("devices were counted", || {
        // SAFETY: the host passes our own ctx.
        count = unsafe { accelerator(ctx) }.map_or(0, Accelerator::count);
    });
    count
}

unsafe extern "C" fn current(ctx: *mut c_void, index: *mut u32, fault: *mut Fault) -> i32 {
    // SAFETY: the host passes our own ctx and its own place.
    guarded("the current device was asked for", fault, || unsafe {
        put(index, accelerator(ctx)?.current()?)
    })
}

unsafe extern "C" fn set(ctx: *mut c_void, index: u32, fault: *mut Fault) -> i32 {
    // SAFETY: the host passes our own ctx.
    guarded("a device was made current", fault, || unsafe {
        accelerator(ctx)?.set(index)
    })
}

unsafe extern "C" fn name(ctx: *mut c_void, index: u32, sink: Sink, fault: *mut Fault) -> i32 {
    // SAFETY: the host passes our own ctx and its own sink.
    guarded("a device's name was asked for", fault, || unsafe {
        text::give(&sink, accelerator(ctx)?.name(index)?.as_bytes());
        Ok(())
    })
}

unsafe extern "C" fn synchronize(ctx: *mut c_void, index: u32, timeout_ms: i64, fault: *mut Fault) -> i32 {
    // SAFETY: the host passes our own ctx.
    guarded("a device was synchronised", fault, || unsafe {
        accelerator(ctx)?.synchronize(index, fault::deadline(timeout_ms))
    })
}

unsafe extern "C" fn free(owner: *mut c_void) {
    quiet("memory was given back", || {
        // SAFETY: made by `alloc`; the host gives it back once.
        drop(unsafe { Box::from_raw(owner.cast::<Tensor>()) });
    });
}

unsafe extern "C" fn alloc(
    ctx: *mut c_void,
    index: u32,
    dtype: u32,
    shape: *const u64,
    shape_len: u64,
    buffer: *mut Buffer,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx, and keeps to the ABI.
    guarded("memory was asked for", fault, || unsafe {
        let dtype = u8::try_from(dtype)
            .ok()
            .and_then(DType::from_code)
            .ok_or_else(|| Error::unsupported(format!("element type {dtype} is not known to this plugin")))?;
        let dims = text::list(shape, shape_len, "dimensions").map_err(breach)?;
        let shape: Vec<usize> = dims
            .iter()
            .map(|d| usize::try_from(*d).unwrap_or(usize::MAX))
            .collect();
        let accelerator = accelerator(ctx)?;
        let mut tensor = Box::new(accelerator.alloc(index, dtype, &shape)?);
        let mut b = Buffer::empty();
        b.ptr = tensor.as_mut_ptr().cast();
        b.bytes = tensor.byte_len() as u64;
        b.count = tensor.count() as u64;
        b.dtype = u32::from(dtype.code());
        b.device.index = index;
        b.release = Some(free);
        b.owner = (&raw mut *tensor).cast();
        abi::write(buffer, &b).map_err(breach)?;
        std::mem::forget(tensor);
        Ok(())
    })
}

unsafe extern "C" fn copy_in(
    ctx: *mut c_void,
    from: Bytes,
    to: *const Buffer,
    handle: *mut c_void,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and handle, and keeps to the ABI.
    guarded("memory was copied to the device", fault, || unsafe {
        let from = text::read_any(from).map_err(breach)?;
        let mut to = operation::hold(&abi::read(to).map_err(breach)?)?;
        accelerator(ctx)?.copy_in(from, &mut to, stream(handle)?)
    })
}

unsafe extern "C" fn copy_out(
    ctx: *mut c_void,
    from: *const Buffer,
    to: *mut c_void,
    to_len: u64,
    handle: *mut c_void,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and handle, and keeps to the ABI.
    guarded("memory was copied from the device", fault, || unsafe {
        let from = operation::hold(&abi::read(from).map_err(breach)?)?;
        let to = text::writable(to, to_len).map_err(breach)?;
        accelerator(ctx)?.copy_out(&from, to, stream(handle)?)
    })
}

unsafe extern "C" fn current_stream(
    ctx: *mut c_void,
    index: u32,
    handle: *mut *mut c_void,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and its own place.
    guarded("the current stream was asked for", fault, || unsafe {
        put(handle, stream_handle(accelerator(ctx)?.current_stream(index)?))
    })
}

unsafe extern "C" fn new_stream(
    ctx: *mut c_void,
    index: u32,
    high_priority: u32,
    handle: *mut *mut c_void,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and its own place.
    guarded("a stream was made", fault, || unsafe {
        put(
            handle,
            stream_handle(accelerator(ctx)?.new_stream(index, high_priority != 0)?),
        )
    })
}

unsafe extern "C" fn stream_release(_ctx: *mut c_void, handle: *mut c_void) {
    quiet("a stream was given back", || {
        if !handle.is_null() {
            // SAFETY: the host gives a handle back once.
            drop(unsafe { Box::from_raw(handle.cast::<Arc<dyn Stream>>()) });
        }
    });
}

unsafe extern "C" fn stream_record(
    _ctx: *mut c_void,
    handle: *mut c_void,
    out: *mut *mut c_void,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes a handle of ours and its own place.
    guarded("a stream was marked", fault, || unsafe {
        put(out, event_handle(stream(handle)?.record()?))
    })
}

unsafe extern "C" fn stream_wait(
    _ctx: *mut c_void,
    handle: *mut c_void,
    after: *mut c_void,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes handles of ours.
    guarded("a stream was made to wait", fault, || unsafe {
        stream(handle)?.wait(event(after)?)
    })
}

unsafe extern "C" fn stream_query(
    _ctx: *mut c_void,
    handle: *mut c_void,
    done: *mut u32,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes a handle of ours and its own place.
    guarded("a stream was asked", fault, || unsafe {
        put(done, u32::from(stream(handle)?.query()?))
    })
}

unsafe extern "C" fn stream_synchronize(
    _ctx: *mut c_void,
    handle: *mut c_void,
    timeout_ms: i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes a handle of ours.
    guarded("a stream was waited for", fault, || unsafe {
        stream(handle)?.synchronize(fault::deadline(timeout_ms))
    })
}

unsafe extern "C" fn event_release(_ctx: *mut c_void, handle: *mut c_void) {
    quiet("an event was given back", || {
        if !handle.is_null() {
            // SAFETY: the host gives a handle back once.
            drop(unsafe { Box::from_raw(handle.cast::<Arc<dyn Event>>()) });
        }
    });
}

unsafe extern "C" fn event_query(
    _ctx: *mut c_void,
    handle: *mut c_void,
    done: *mut u32,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes a handle of ours and its own place.
    guarded("an event was asked", fault, || unsafe {
        put(done, u32::from(event(handle)?.query()?))
    })
}

unsafe extern "C" fn event_synchronize(
    _ctx: *mut c_void,
    handle: *mut c_void,
    timeout_ms: i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes a handle of ours.
    guarded("an event was waited for", fault, || unsafe {
        event(handle)?.synchronize(fault::deadline(timeout_ms))
    })
}

unsafe extern "C" fn native_fp8(ctx: *mut c_void, index: u32) -> u32 {
    let mut native = 0;
    quiet("a device was asked for FP8", || {
        // SAFETY: the host passes our own ctx.
        native = u32::from(unsafe { accelerator(ctx) }.is_ok_and(|a| a.native_fp8(index)));
    });
    native
}
