//! What the driver's calls work on: device memory by address and length, and handles whose fields nothing outside `raw` sees.

use std::ffi::c_void;
use std::ptr;

use ftcore::{Error, Result, Tensor};

/// Device memory that an operation works on: an address and a length in bytes.
///
/// INV-8: the one that enqueues work on a span keeps its owner (a tensor or a block) until that work is done, or leaks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Span {
    /// No memory.
    pub(crate) const EMPTY: Self = Self { address: 0, bytes: 0 };

    /// The memory of a tensor.
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            address: tensor.as_ptr() as u64,
            bytes: tensor.byte_len(),
        }
    }

    /// The part that begins at byte `offset`; `None` if it does not lie within.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then(|| Self {
            address: self.address + offset as u64,
            bytes,
        })
    }

    /// The length in bytes.
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// The address as C takes it.
    pub(crate) fn pointer(self) -> *mut c_void {
        self.address as *mut c_void
    }

    /// The byte after the last.
    pub(crate) fn end(self) -> u64 {
        self.address + self.bytes as u64
    }

    /// The first byte's address.
    pub(crate) fn start(self) -> u64 {
        self.address
    }
}

macro_rules! handle {
    ($(#[$m:meta])* $name:ident) => {
        $(#[$m])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $name(pub(super) *mut c_void);
        // SAFETY: the driver's handles may be used from any thread; this is only a number here.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    };
}

handle!(
    /// A `CUcontext`.
    Context
);
handle!(
    /// A `CUstream`.
    StreamHandle
);
handle!(
    /// A `CUevent`.
    EventHandle
);
handle!(
    /// A `CUfunction`.
    Function
);

/// A `CUipcMemHandle` or `CUipcEventHandle`: 64 bytes that mean something to the driver only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct IpcHandle(pub(super) [u8; 64]);

impl IpcHandle {
    /// From another process; `InvalidArgument` if it cannot be one.
    pub(crate) fn of(bytes: &[u8]) -> Result<Self> {
        let handle = bytes
            .try_into()
            .map_err(|_| Error::invalid(format!("{} bytes are no handle of the CUDA driver", bytes.len())))?;
        Ok(Self(handle))
    }

    /// To pass on.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl StreamHandle {
    /// The legacy default stream.
    pub(crate) const DEFAULT: Self = Self(ptr::null_mut());
    /// The calling thread's own default stream (`CU_STREAM_PER_THREAD`): another one on every thread.
    pub(crate) const PER_THREAD: Self = Self(ptr::without_provenance_mut(2));

    /// As C takes it.
    pub(crate) fn pointer(self) -> *mut c_void {
        self.0
    }
}
