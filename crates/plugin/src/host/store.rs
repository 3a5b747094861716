//! A store of this program as a C table, for a plugin's `configure`.

use std::ffi::c_void;
use std::sync::Arc;

use ftcore::{Cancel, Error, ErrorKind, Result, Store};

use super::handles::{Handle, Handles};
use super::library::guarded;
use crate::abi::{self, Bytes, FAILED, Fault, Growing, Sink, Str};
use crate::{fault, text};

/// Stores that plugins have.
static STORES: Handles<Shared> = Handles::new("a store");

struct Shared {
    store: Arc<dyn Store>,
    cancel: Cancel,
}

/// A table that the plugin may use until this is dropped, and as long as it holds a reference.
pub(super) struct Lent {
    pub(super) table: abi::Store,
    handle: Handle,
}

impl Lent {
    /// Waits for keys of `store` end when `cancel` does. Errors: plugins hold more stores than there are numbers for them.
    pub(super) fn new(store: &Arc<dyn Store>, cancel: Cancel, plugin: &'static str) -> Result<Self> {
        let shared = Shared {
            store: cancel.over(store),
            cancel,
        };
        let handle = STORES
            .lend(Arc::new(shared), plugin)
            .ok_or_else(|| Error::new(ErrorKind::Backend, "plugins hold too many stores"))?;
        let mut table = abi::Store::empty();
        table.ctx = handle.to_ctx();
        table.retain = Some(retain);
        table.release = Some(release);
        table.set = Some(set);
        table.get = Some(get);
        table.add = Some(add);
        table.compare_set = Some(compare_set);
        table.check = Some(check);
        table.wait = Some(wait);
        table.remove = Some(remove);
        table.append = Some(append);
        table.multi_get = Some(multi_get);
        table.multi_set = Some(multi_set);
        table.num_keys = Some(num_keys);
        table.list = Some(list);
        table.barrier = Some(barrier);
        table.wanted = Some(wanted);
        Ok(Self { table, handle })
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        drop(STORES.end(self.handle));
    }
}

unsafe extern "C" fn retain(ctx: *mut c_void) {
    guarded((), || {
        let handle = Handle::from_ctx(ctx);
        if !STORES.retain(handle) {
            STORES.misused(handle, "called retain");
        }
    });
}

unsafe extern "C" fn release(ctx: *mut c_void) {
    guarded((), || {
        let handle = Handle::from_ctx(ctx);
        if STORES.release(handle).is_none() {
            STORES.misused(handle, "called release");
        }
    });
}

/// Runs one call. Errors in words are the plugin's breach of the ABI.
///
/// # Safety
/// `fault` is the call's.
unsafe fn call(ctx: *mut c_void, fault: *mut Fault, run: impl FnOnce(&dyn Store) -> Result<()>) -> i32 {
    guarded(FAILED, || {
        let result = match STORES.get(Handle::from_ctx(ctx)) {
            Some(shared) => run(&*shared.store),
            None => Err(wrong("a ctx of which it holds no reference".to_string())),
        };
        // SAFETY: by the contract.
        unsafe { fault::answer(result, fault) }
    })
}

fn wrong(what: String) -> Error {
    Error::invalid(format!("the plugin called the store with {what}"))
}

/// # Safety
/// Readable for the call.
unsafe fn key(key: Str) -> Result<String> {
    // SAFETY: by the contract.
    unsafe { text::read(key) }.map_err(wrong)
}

/// # Safety
/// Readable for the call.
unsafe fn bytes<'a>(bytes: Bytes) -> Result<&'a [u8]> {
    // SAFETY: by the contract.
    unsafe { text::read_bytes(bytes) }.map_err(wrong)
}

/// # Safety
/// Readable for the call.
unsafe fn keys(first: *const Str, count: u64) -> Result<Vec<String>> {
    // SAFETY: by the contract.
    unsafe { text::texts(first, count, "keys") }.map_err(wrong)
}

fn borrowed(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

/// # Safety
/// `to` is null or writable.
unsafe fn put<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(wrong("no place for the answer".into()));
    }
    // SAFETY: by the contract.
    unsafe { to.write(value) };
    Ok(())
}

unsafe extern "C" fn set(ctx: *mut c_void, k: Str, value: Bytes, timeout_ms: i64, fault: *mut Fault) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            s.set(&key(k)?, bytes(value)?, fault::deadline(timeout_ms))
        })
    }
}

unsafe extern "C" fn get(ctx: *mut c_void, k: Str, timeout_ms: i64, value: Sink, fault: *mut Fault) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            text::give(&value, &s.get(&key(k)?, fault::deadline(timeout_ms))?);
            Ok(())
        })
    }
}

unsafe extern "C" fn add(
    ctx: *mut c_void,
    k: Str,
    amount: i64,
    timeout_ms: i64,
    result: *mut i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            put(result, s.add(&key(k)?, amount, fault::deadline(timeout_ms))?)
        })
    }
}

unsafe extern "C" fn compare_set(
    ctx: *mut c_void,
    k: Str,
    expected: Bytes,
    desired: Bytes,
    timeout_ms: i64,
    value: Sink,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            let deadline = fault::deadline(timeout_ms);
            let stands = s.compare_set(&key(k)?, bytes(expected)?, bytes(desired)?, deadline)?;
            text::give(&value, &stands);
            Ok(())
        })
    }
}

unsafe extern "C" fn check(
    ctx: *mut c_void,
    first: *const Str,
    count: u64,
    timeout_ms: i64,
    result: *mut u32,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            let keys = keys(first, count)?;
            let all = s.check(&borrowed(&keys), fault::deadline(timeout_ms))?;
            put(result, u32::from(all))
        })
    }
}

unsafe extern "C" fn wait(
    ctx: *mut c_void,
    first: *const Str,
    count: u64,
    timeout_ms: i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            let keys = keys(first, count)?;
            s.wait(&borrowed(&keys), fault::deadline(timeout_ms))
        })
    }
}

unsafe extern "C" fn remove(
    ctx: *mut c_void,
    k: Str,
    timeout_ms: i64,
    result: *mut u32,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            let existed = s.delete(&key(k)?, fault::deadline(timeout_ms))?;
            put(result, u32::from(existed))
        })
    }
}

unsafe extern "C" fn append(
    ctx: *mut c_void,
    k: Str,
    value: Bytes,
    timeout_ms: i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            s.append(&key(k)?, bytes(value)?, fault::deadline(timeout_ms))
        })
    }
}

unsafe extern "C" fn multi_get(
    ctx: *mut c_void,
    first: *const Str,
    count: u64,
    timeout_ms: i64,
    values: Sink,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            let keys = keys(first, count)?;
            for value in s.multi_get(&borrowed(&keys), fault::deadline(timeout_ms))? {
                text::give(&values, &value);
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn multi_set(
    ctx: *mut c_void,
    first: *const Str,
    values: *const Bytes,
    count: u64,
    timeout_ms: i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            let keys = keys(first, count)?;
            let values = text::list(values, count, "values").map_err(wrong)?;
            let pairs: Vec<(&str, &[u8])> = keys
                .iter()
                .zip(values)
                .map(|(k, v)| Ok((k.as_str(), bytes(*v)?)))
                .collect::<Result<_>>()?;
            s.multi_set(&pairs, fault::deadline(timeout_ms))
        })
    }
}

unsafe extern "C" fn num_keys(ctx: *mut c_void, timeout_ms: i64, result: *mut i64, fault: *mut Fault) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            put(result, s.num_keys(fault::deadline(timeout_ms))?)
        })
    }
}

unsafe extern "C" fn list(ctx: *mut c_void, timeout_ms: i64, sink: Sink, fault: *mut Fault) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            for key in s.list(fault::deadline(timeout_ms))? {
                text::give(&sink, key.as_bytes());
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn barrier(
    ctx: *mut c_void,
    k: Str,
    world_size: u32,
    timeout_ms: i64,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the plugin keeps to the ABI.
    unsafe {
        call(ctx, fault, |s| {
            s.barrier(&key(k)?, world_size, fault::deadline(timeout_ms))
        })
    }
}

unsafe extern "C" fn wanted(ctx: *mut c_void, fault: *mut Fault) -> i32 {
    guarded(FAILED, || {
        let wanted = match STORES.get(Handle::from_ctx(ctx)) {
            Some(shared) => shared.cancel.check(),
            None => Err(wrong("a ctx of which it holds no reference".to_string())),
        };
        // SAFETY: the plugin keeps to the ABI.
        unsafe { fault::answer(wanted, fault) }
    })
}
