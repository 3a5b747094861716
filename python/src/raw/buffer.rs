//! The buffer protocol. Its functions joined the stable ABI in Python 3.11; every earlier Python 3 has them with the same layout.

use std::ffi::{CStr, c_char, c_int, c_void};

use oxccl::core::DType;
use pyo3::ffi::{Py_ssize_t, PyObject};
use pyo3::prelude::*;

/// `Py_buffer`.
#[repr(C)]
pub(crate) struct View {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

// SAFETY: a view is only read (its fields never change), and given back by an attached thread.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

/// With format, shape and strides; read-only memory too.
const RECORDS_RO: c_int = 0x0004 | 0x0008 | 0x0010;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
}

/// True if `object` knows the buffer protocol.
pub(crate) fn is_offered(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: a live object, and this thread is attached.
    unsafe { PyObject_CheckBuffer(object.as_ptr()) != 0 }
}

impl View {
    /// Asks `object` for its memory, which it keeps (and keeps in place) until [`release`](Self::release).
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Box<Self>> {
        // SAFETY: all-zero bytes are null pointers and zeros.
        let mut view: Box<Self> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: a live object and a structure of the right layout; this thread is attached.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, RECORDS_RO) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(view)
    }

    /// Gives the memory back. Only on an attached thread.
    #[allow(
        clippy::boxed_local,
        reason = "the view stays where it was filled: its pointers may lead into it"
    )]
    pub(crate) fn release(mut self: Box<Self>) {
        // SAFETY: filled by PyObject_GetBuffer and given back once, here: it takes the box.
        unsafe { PyBuffer_Release(&raw mut *self) };
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.buf.cast()
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.readonly != 0
    }

    pub(crate) fn item_size(&self) -> usize {
        usize::try_from(self.itemsize).unwrap_or(0)
    }

    /// The number of elements.
    pub(crate) fn count(&self) -> usize {
        usize::try_from(self.len).unwrap_or(0) / self.item_size().max(1)
    }

    fn list(&self, at: *const Py_ssize_t) -> Vec<isize> {
        let n = usize::try_from(self.ndim).unwrap_or(0);
        if at.is_null() || n == 0 {
            return Vec::new();
        }
        // SAFETY: the protocol: `ndim` numbers that live as long as the view.
        unsafe { std::slice::from_raw_parts(at, n) }.to_vec()
    }

    pub(crate) fn shape(&self) -> Vec<isize> {
        self.list(self.shape)
    }

    /// In bytes; empty if the memory is contiguous.
    pub(crate) fn strides(&self) -> Vec<isize> {
        self.list(self.strides)
    }

    /// The element type, or its name in the notation of `struct` if it is none of ours.
    pub(crate) fn dtype(&self) -> Result<DType, String> {
        let format = if self.format.is_null() {
            "B"
        } else {
            // SAFETY: the protocol: a text that ends in zero and lives as long as the view.
            unsafe { CStr::from_ptr(self.format) }.to_str().unwrap_or("?")
        };
        dtype_of(format, self.item_size()).ok_or_else(|| format.to_owned())
    }
}

/// The element type of a `struct` format whose elements take `size` bytes.
fn dtype_of(format: &str, size: usize) -> Option<DType> {
    let kind = match format.as_bytes() {
        [kind] => *kind,
        [b'@' | b'=', kind] => *kind,
        [b'<', kind] if cfg!(target_endian = "little") || size == 1 => *kind,
        [b'>' | b'!', kind] if cfg!(target_endian = "big") || size == 1 => *kind,
        _ => return None,
    };
    Some(match (kind, size) {
        (b'd', 8) => DType::F64,
        (b'f', 4) => DType::F32,
        (b'e', 2) => DType::F16,
        (b'b' | b'h' | b'i' | b'l' | b'q' | b'n', 1) => DType::I8,
        (b'b' | b'h' | b'i' | b'l' | b'q' | b'n', 2) => DType::I16,
        (b'b' | b'h' | b'i' | b'l' | b'q' | b'n', 4) => DType::I32,
        (b'b' | b'h' | b'i' | b'l' | b'q' | b'n', 8) => DType::I64,
        (b'B' | b'H' | b'I' | b'L' | b'Q' | b'N' | b'c', 1) => DType::U8,
        (b'B' | b'H' | b'I' | b'L' | b'Q' | b'N', 2) => DType::U16,
        (b'B' | b'H' | b'I' | b'L' | b'Q' | b'N', 4) => DType::U32,
        (b'B' | b'H' | b'I' | b'L' | b'Q' | b'N', 8) => DType::U64,
        (b'?', 1) => DType::Bool,
        _ => return None,
    })
}
