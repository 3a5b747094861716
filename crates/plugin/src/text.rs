//! Strings and lists of the ABI: made for a call, read (and distrusted) on the other side.

use std::ffi::c_void;

use crate::abi::{Bytes, Note, Sink, Str};

/// More than any name, path or text of the ABI; a longer one is garbage.
const LONGEST: u64 = 1 << 20;
/// More than any list: the longest have an entry for each rank.
pub(crate) const MOST: u64 = 1 << 20;
/// The largest value of a store, with room.
const LARGEST_VALUE: u64 = 64 << 20;

pub(crate) fn lend(text: &str) -> Str {
    Str {
        ptr: text.as_ptr().cast(),
        len: text.len() as u64,
    }
}

pub(crate) fn lend_bytes(bytes: &[u8]) -> Bytes {
    Bytes {
        ptr: bytes.as_ptr().cast(),
        len: bytes.len() as u64,
    }
}

/// A text where it is. Errors are in words.
///
/// # Safety
/// If not null, `text.ptr` points to `text.len` readable bytes (if that is at most a mebibyte) that stay as they are for
/// as long as the result is used.
pub(crate) unsafe fn borrow<'a>(text: Str) -> Result<&'a str, String> {
    if text.len == 0 {
        return Ok("");
    }
    if text.ptr.is_null() || text.len > LONGEST {
        return Err(format!("a text of {} bytes at {:p}", text.len, text.ptr));
    }
    // SAFETY: readable by the contract; the length is at most a mebibyte.
    let bytes = unsafe { std::slice::from_raw_parts(text.ptr.cast::<u8>(), text.len as usize) };
    std::str::from_utf8(bytes).map_err(|e| format!("a text that is not UTF-8: {e}"))
}

/// Reads a text. Errors are in words.
///
/// # Safety
/// As [`borrow`], for the call.
pub(crate) unsafe fn read(text: Str) -> Result<String, String> {
    // SAFETY: by the contract; copied at once.
    unsafe { borrow(text) }.map(str::to_string)
}

/// Reads bytes. Errors are in words.
///
/// # Safety
/// As [`read`], for at most 64 MiB.
pub(crate) unsafe fn read_bytes<'a>(bytes: Bytes) -> Result<&'a [u8], String> {
    if bytes.len == 0 {
        return Ok(&[]);
    }
    if bytes.ptr.is_null() || bytes.len > LARGEST_VALUE {
        return Err(format!("{} bytes at {:p}", bytes.len, bytes.ptr));
    }
    // SAFETY: readable by the contract.
    Ok(unsafe { std::slice::from_raw_parts(bytes.ptr.cast::<u8>(), bytes.len as usize) })
}

/// Bytes of a tensor, of whatever length. Errors are in words.
///
/// # Safety
/// If not null, `bytes.ptr` points to `bytes.len` readable bytes for the call.
pub(crate) unsafe fn read_any<'a>(bytes: Bytes) -> Result<&'a [u8], String> {
    if bytes.len == 0 {
        return Ok(&[]);
    }
    match usize::try_from(bytes.len) {
        Ok(len) if !bytes.ptr.is_null() && isize::try_from(len).is_ok() => {
            // SAFETY: readable by the contract, and no object is larger than isize::MAX.
            Ok(unsafe { std::slice::from_raw_parts(bytes.ptr.cast::<u8>(), len) })
        }
        _ => Err(format!("{} bytes at {:p}", bytes.len, bytes.ptr)),
    }
}

/// Bytes to be written, of whatever length. Errors are in words.
///
/// # Safety
/// If not null, `to` points to `len` bytes that are writable and initialised, for the call.
pub(crate) unsafe fn writable<'a>(to: *mut c_void, len: u64) -> Result<&'a mut [u8], String> {
    if len == 0 {
        return Ok(&mut []);
    }
    match usize::try_from(len) {
        Ok(n) if !to.is_null() && isize::try_from(n).is_ok() => {
            // SAFETY: writable by the contract, and no object is larger than isize::MAX.
            Ok(unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), n) })
        }
        _ => Err(format!("{len} bytes at {to:p}")),
    }
}

/// A list of fixed structs. Errors are in words.
///
/// # Safety
/// If not null and aligned, `list` points to `count` readable elements (if at most 2^20).
pub(crate) unsafe fn list<'a, T>(list: *const T, count: u64, what: &str) -> Result<&'a [T], String> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() || !list.is_aligned() || count > MOST {
        return Err(format!("a list of {count} {what} at {list:p}"));
    }
    // SAFETY: readable by the contract; the count is at most 2^20.
    Ok(unsafe { std::slice::from_raw_parts(list, count as usize) })
}

/// A list of texts.
///
/// # Safety
/// As [`list`] and [`read`].
pub(crate) unsafe fn texts(first: *const Str, count: u64, what: &str) -> Result<Vec<String>, String> {
    // SAFETY: same contract.
    let texts = unsafe { list(first, count, what) }?;
    // SAFETY: same contract.
    texts.iter().map(|t| unsafe { read(*t) }).collect()
}

/// A list of pairs.
///
/// # Safety
/// As [`list`] and [`read`].
pub(crate) unsafe fn pairs(
    first: *const Note,
    count: u64,
    what: &str,
) -> Result<Vec<(String, String)>, String> {
    // SAFETY: same contract.
    let notes = unsafe { list(first, count, what) }?;
    notes
        .iter()
        // SAFETY: same contract.
        .map(|n| unsafe { Ok((read(n.subject)?, read(n.text)?)) })
        .collect()
}

/// Collects what the callee writes.
#[derive(Default)]
pub(crate) struct Collected {
    /// One per call of `write`.
    pub(crate) values: Vec<Vec<u8>>,
    refused: Option<String>,
}

impl Collected {
    /// Valid while `self` is not moved.
    pub(crate) fn sink(&mut self) -> Sink {
        unsafe extern "C" fn write(ctx: *mut c_void, bytes: Bytes) {
            // SAFETY: `ctx` is the Collected of the call that is running, on its thread.
            let Some(this) = (unsafe { ctx.cast::<Collected>().as_mut() }) else {
                return;
            };
            // SAFETY: the callee keeps to the ABI: readable for the call.
            match unsafe { read_bytes(bytes) } {
                Ok(b) if this.values.len() < MOST as usize => this.values.push(b.to_vec()),
                Ok(_) => this.refused = Some("an answer of too many values".to_string()),
                Err(e) => this.refused = Some(e),
            }
        }
        Sink {
            ctx: (&raw mut *self).cast(),
            write: Some(write),
        }
    }

    /// All values; an error in words if one could not be read.
    pub(crate) fn finish(self) -> Result<Vec<Vec<u8>>, String> {
        match self.refused {
            None => Ok(self.values),
            Some(e) => Err(e),
        }
    }

    /// The one value.
    pub(crate) fn one(self) -> Result<Vec<u8>, String> {
        let mut values = self.finish()?;
        match (values.pop(), values.is_empty()) {
            (Some(value), true) => Ok(value),
            (_, _) => Err("an answer that is not exactly one value".to_string()),
        }
    }
}

/// Hands a value to the caller.
///
/// # Safety
/// `sink` is the sink of the call that is running.
pub(crate) unsafe fn give(sink: &Sink, bytes: &[u8]) {
    if let Some(write) = sink.write {
        // SAFETY: the caller keeps its sink alive for the call.
        unsafe { write(sink.ctx, lend_bytes(bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_with_an_entry_for_each_of_very_many_ranks_cross() {
        let ranks = 100_000;
        let keys: Vec<String> = (0..ranks).map(|rank| format!("rank/{rank}")).collect();
        let lent: Vec<Str> = keys.iter().map(|key| lend(key)).collect();
        // SAFETY: the list and its texts live as long as the test.
        let back = unsafe { texts(lent.as_ptr(), lent.len() as u64, "keys") }.unwrap();
        assert!(back == keys);
        let mut answer = Collected::default();
        let sink = answer.sink();
        for key in &keys {
            // SAFETY: `answer` stays where it is.
            unsafe { give(&sink, key.as_bytes()) };
        }
        assert_eq!(answer.finish().unwrap().len(), ranks);
    }
}
