//! DLPack: capsules of both versions, taken over and given back, and made of tensors of ours.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use oxccl::core::{DType, Tensor};
use pyo3::ffi;
use pyo3::prelude::*;

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Plain {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

const READ_ONLY: u64 = 1;
const PLAIN: &CStr = c"dltensor";
const USED_PLAIN: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// A tensor that was taken over from a capsule.
pub(crate) enum Managed {
    #[allow(private_interfaces, reason = "no other module looks inside")]
    Plain(NonNull<Plain>),
    #[allow(private_interfaces, reason = "no other module looks inside")]
    Versioned(NonNull<Versioned>),
}

// SAFETY: what it points to is only read until it is given back by an attached thread.
unsafe impl Send for Managed {}
// SAFETY: as above.
unsafe impl Sync for Managed {}

impl Managed {
    /// Takes the tensor out of what `__dlpack__` gave.
    ///
    /// Errors: a text for a capsule that is none, that was used before, or of a version that is not known.
    pub(crate) fn of(capsule: &Bound<'_, PyAny>) -> Result<Self, String> {
        let at = capsule.as_ptr();
        let take = |name: &CStr, used: &CStr| {
            // SAFETY: a live object on an attached thread; the name is checked first, and the new one lives for ever.
            unsafe {
                if ffi::PyCapsule_IsValid(at, name.as_ptr()) == 0 {
                    return None;
                }
                let pointer = NonNull::new(ffi::PyCapsule_GetPointer(at, name.as_ptr()))?;
                // From here on it is ours to give back, and not the capsule's.
                (ffi::PyCapsule_SetName(at, used.as_ptr()) == 0).then_some(pointer)
            }
        };
        if let Some(pointer) = take(VERSIONED, USED_VERSIONED) {
            let pointer = pointer.cast::<Versioned>();
            // SAFETY: the protocol: a capsule of this name holds such a structure.
            let major = unsafe { pointer.as_ref() }.major;
            let managed = Self::Versioned(pointer);
            if major != 1 {
                managed.release();
                return Err(format!("__dlpack__ gave a tensor of DLPack {major}, not 1"));
            }
            return Ok(managed);
        }
        take(PLAIN, USED_PLAIN)
            .map(|pointer| Self::Plain(pointer.cast()))
            .ok_or_else(|| "__dlpack__ gave no capsule of a tensor, or one that was used before".to_owned())
    }

    fn tensor(&self) -> &DlTensor {
        // SAFETY: the protocol: valid until its deleter is called, which `release` does.
        unsafe {
            match self {
                Self::Plain(at) => &(*at.as_ptr()).tensor,
                Self::Versioned(at) => &(*at.as_ptr()).tensor,
            }
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            // SAFETY: as in `tensor`.
            Self::Versioned(at) => unsafe { (*at.as_ptr()).flags & READ_ONLY != 0 },
        }
    }

    /// Gives the tensor back. Only on an attached thread.
    pub(crate) fn release(self) {
        // SAFETY: taken over once, and given back once, here: it takes self.
        unsafe {
            match self {
                Self::Plain(at) => {
                    if let Some(deleter) = (*at.as_ptr()).deleter {
                        deleter(at.as_ptr());
                    }
                }
                Self::Versioned(at) => {
                    if let Some(deleter) = (*at.as_ptr()).deleter {
                        deleter(at.as_ptr());
                    }
                }
            }
        }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        let tensor = self.tensor();
        let offset = usize::try_from(tensor.byte_offset).unwrap_or(0);
        tensor.data.cast::<u8>().wrapping_add(offset)
    }

    /// True for memory that the CPU reaches: its own, and what is pinned for CUDA or ROCm.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.tensor().device_type, 1 | 3 | 11)
    }

    /// DLPack's numbers of the device.
    pub(crate) fn device(&self) -> (i32, i32) {
        (self.tensor().device_type, self.tensor().device_id)
    }

    fn list(&self, at: *const i64) -> Vec<isize> {
        let n = usize::try_from(self.tensor().ndim).unwrap_or(0);
        if at.is_null() || n == 0 {
            return Vec::new();
        }
        // SAFETY: the protocol: `ndim` numbers that live as long as the tensor.
        let numbers = unsafe { std::slice::from_raw_parts(at, n) };
        numbers
            .iter()
            .map(|&d| isize::try_from(d).unwrap_or(-1))
            .collect()
    }

    pub(crate) fn shape(&self) -> Vec<isize> {
        self.list(self.tensor().shape)
    }

    /// In elements; empty if the memory is contiguous.
    pub(crate) fn strides(&self) -> Vec<isize> {
        self.list(self.tensor().strides)
    }

    /// The element type, or DLPack's numbers of it if it is none of ours.
    pub(crate) fn dtype(&self) -> Result<DType, String> {
        let DataType { code, bits, lanes } = self.tensor().dtype;
        Ok(match (code, bits, lanes) {
            (0, 8, 1) => DType::I8,
            (0, 16, 1) => DType::I16,
            (0, 32, 1) => DType::I32,
            (0, 64, 1) => DType::I64,
            (1, 8, 1) => DType::U8,
            (1, 16, 1) => DType::U16,
            (1, 32, 1) => DType::U32,
            (1, 64, 1) => DType::U64,
            (2, 16, 1) => DType::F16,
            (2, 32, 1) => DType::F32,
            (2, 64, 1) => DType::F64,
            (4, 16, 1) => DType::BF16,
            (6, 8, 1) => DType::Bool,
            (10, 8, 1) => DType::F8E4M3,
            (12, 8, 1) => DType::F8E5M2,
            (5, bits, 1) => return Err(format!("complex{bits}")),
            _ => return Err(format!("DLPack code {code}, {bits} bits, {lanes} lanes")),
        })
    }
}

/// A host tensor of ours that Python may read and write wherever it has a view of it. Its memory goes with the last of them.
pub(crate) struct Kept {
    address: NonNull<u8>,
    dtype: DType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _owner: Tensor,
}

// SAFETY: `address` leads into the owner's memory, which is Send, and only Python's views read or write there.
unsafe impl Send for Kept {}
// SAFETY: as above; nothing here is changed once it is made.
unsafe impl Sync for Kept {}

impl Kept {
    /// `owner` is one-dimensional and has as many elements as `shape`.
    pub(crate) fn new(mut owner: Tensor, shape: &[usize]) -> Option<Arc<Self>> {
        let shape: Vec<i64> = shape
            .iter()
            .map(|&d| i64::try_from(d).ok())
            .collect::<Option<_>>()?;
        let mut strides = vec![1i64; shape.len()];
        for n in (1..shape.len()).rev() {
            let (before, at) = strides.split_at_mut(n);
            if let (Some(before), Some(at), Some(dim)) = (before.last_mut(), at.first(), shape.get(n)) {
                *before = at.saturating_mul((*dim).max(1));
            }
        }
        Some(Arc::new(Self {
            address: NonNull::new(owner.as_mut_ptr())?,
            dtype: owner.dtype(),
            shape,
            strides,
            _owner: owner,
        }))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// True while a capsule, or what took it over, has it.
    pub(crate) fn is_lent(self: &Arc<Self>) -> bool {
        let is_lent = Arc::strong_count(self) > 1;
        // What was written through the views that are gone was written before.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        is_lent
    }

    fn described(&self) -> DlTensor {
        let (code, bits) = match self.dtype {
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => (0, self.dtype.size() * 8),
            DType::F16 | DType::F32 | DType::F64 => (2, self.dtype.size() * 8),
            DType::BF16 => (4, 16),
            DType::Bool => (6, 8),
            DType::F8E4M3 => (10, 8),
            DType::F8E5M2 => (12, 8),
            _ => (1, self.dtype.size() * 8),
        };
        DlTensor {
            data: self.address.as_ptr().cast(),
            device_type: 1,
            device_id: 0,
            ndim: i32::try_from(self.shape.len()).unwrap_or(i32::MAX),
            dtype: DataType {
                code,
                bits: u8::try_from(bits).unwrap_or(u8::MAX),
                lanes: 1,
            },
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            byte_offset: 0,
        }
    }

    /// A capsule of version 1 or of the old kind. Who takes it over gives it back on any thread, attached or not.
    pub(crate) fn lend<'py>(
        self: &Arc<Self>,
        py: Python<'py>,
        versioned: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let context = Arc::into_raw(self.clone()).cast::<c_void>().cast_mut();
        let (at, name) = if versioned {
            let made = Versioned {
                major: 1,
                minor: 0,
                context,
                deleter: Some(delete_versioned),
                flags: 0,
                tensor: self.described(),
            };
            (Box::into_raw(Box::new(made)).cast::<c_void>(), VERSIONED)
        } else {
            let made = Plain {
                tensor: self.described(),
                context,
                deleter: Some(delete_plain),
            };
            (Box::into_raw(Box::new(made)).cast::<c_void>(), PLAIN)
        };
        // SAFETY: an attached thread; the name lives for ever, and the destructor frees what lies at `at` if no one took it over.
        unsafe {
            Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(at, name.as_ptr(), Some(delete_unused)))
        }
        // SAFETY: there is no capsule that would free it.
        .inspect_err(|_| unsafe { delete(at, versioned) })
    }
}

/// # Safety
/// `at` was made by [`Kept::lend`], of that version, and is freed once.
unsafe fn delete(at: *mut c_void, versioned: bool) {
    // SAFETY: by the contract above.
    unsafe {
        if versioned {
            delete_versioned(at.cast());
        } else {
            delete_plain(at.cast());
        }
    }
}

unsafe extern "C" fn delete_plain(at: *mut Plain) {
    // SAFETY: the protocol: called once, with what `lend` made.
    unsafe { drop(Arc::from_raw(Box::from_raw(at).context.cast::<Kept>())) };
}

unsafe extern "C" fn delete_versioned(at: *mut Versioned) {
    // SAFETY: as above.
    unsafe { drop(Arc::from_raw(Box::from_raw(at).context.cast::<Kept>())) };
}

/// Of a capsule: who took the tensor over has given it another name.
unsafe extern "C" fn delete_unused(capsule: *mut ffi::PyObject) {
    for (name, versioned) in [(PLAIN, false), (VERSIONED, true)] {
        // SAFETY: the interpreter calls this on an attached thread with a capsule that `lend` made; a valid name means that it still owns its tensor.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) != 0 {
                delete(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()), versioned);
            }
        }
    }
}
