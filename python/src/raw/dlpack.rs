//! DLPack: capsules of both versions, taken over and given back.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use oxccl::core::DType;
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
