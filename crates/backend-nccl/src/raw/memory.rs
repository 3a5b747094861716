//! Memory that NCCL makes itself, and memory that a communicator is told of, so that it reaches it without copies of its own.

use std::ffi::c_void;
use std::ptr;
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};

use super::{Comm, Nccl};
use crate::cuda::raw::Span;

/// What a communicator knows a buffer by; ends with the communicator at the latest.
#[derive(Debug)]
pub(crate) struct Registration {
    handle: *mut c_void,
    is_window: bool,
}
// SAFETY: INV-12 only a number here; the library takes it on any thread.
unsafe impl Send for Registration {}

impl Registration {
    /// Of a call that failed half way: there is nothing to end, but the communicator may know the memory.
    pub(crate) fn unknown() -> Self {
        Self {
            handle: ptr::null_mut(),
            is_window: true,
        }
    }
}

impl Nccl {
    /// The first function that is missing for registered buffers; `None` if they can be had.
    pub(crate) fn lacks_for_registered(&self) -> Option<&'static str> {
        let api = self.api();
        [
            ("ncclMemAlloc", api.mem_alloc.is_some()),
            ("ncclMemFree", api.mem_free.is_some()),
            ("ncclCommRegister", api.comm_register.is_some()),
            ("ncclCommDeregister", api.comm_deregister.is_some()),
        ]
        .into_iter()
        .find_map(|(name, has)| (!has).then_some(name))
    }

    /// As above for windows.
    pub(crate) fn lacks_for_windows(&self) -> Option<&'static str> {
        let api = self.api();
        [
            ("ncclMemAlloc", api.mem_alloc.is_some()),
            ("ncclMemFree", api.mem_free.is_some()),
            ("ncclCommWindowRegister", api.comm_window_register.is_some()),
            ("ncclCommWindowDeregister", api.comm_window_deregister.is_some()),
        ]
        .into_iter()
        .find_map(|(name, has)| (!has).then_some(name))
    }

    /// Memory on the current device. May wait for the device.
    pub(crate) fn mem_alloc(&self, bytes: usize) -> Result<Span> {
        let alloc = self.api().mem_alloc.ok_or_else(|| missing("ncclMemAlloc"))?;
        let mut memory = ptr::null_mut();
        // SAFETY: INV-12 writes one pointer.
        self.check("ncclMemAlloc", unsafe { alloc(&raw mut memory, bytes) })?;
        if memory.is_null() {
            return Err(Error::new(ErrorKind::Backend, "ncclMemAlloc gave no memory"));
        }
        Ok(Span::at(memory, bytes))
    }

    /// Frees it. Waits for the device.
    pub(crate) fn mem_free(&self, span: Span) -> Result<()> {
        let free = self.api().mem_free.ok_or_else(|| missing("ncclMemFree"))?;
        // SAFETY: INV-8 made by `mem_alloc`, freed once by its only owner, after its last use.
        self.check("ncclMemFree", unsafe { free(span.pointer()) })
    }
}

fn missing(function: &str) -> Error {
    Error::unsupported(format!("this NCCL has no {function}"))
}

impl Comm {
    /// Tells this communicator of `span`; no other rank takes part.
    pub(crate) fn register(&self, span: Span) -> Result<Registration> {
        let _inside = self.enter()?;
        let register = self.nccl.api().comm_register;
        let register = register.ok_or_else(|| missing("ncclCommRegister"))?;
        let mut handle = ptr::null_mut();
        // SAFETY: INV-12 the gate keeps the communicator; writes one handle. INV-8: the memory outlives the registration (see
        // `buffers`).
        let result = unsafe { register(self.handle, span.pointer(), span.bytes(), &raw mut handle) };
        self.nccl.check("ncclCommRegister", result)?;
        Ok(Registration {
            handle,
            is_window: false,
        })
    }

    /// Makes a window of `span` and the other ranks' memory of the same length: a collective call of all ranks.
    pub(crate) fn window(
        &self,
        span: Span,
        deadline: Instant,
        stop: &dyn Fn() -> Option<Error>,
    ) -> Result<Registration> {
        let register = self.nccl.api().comm_window_register;
        let register = register.ok_or_else(|| missing("ncclCommWindowRegister"))?;
        // A non-blocking communicator writes the handle when it is through: the place stays if that is never known.
        let place: *mut *mut c_void = Box::into_raw(Box::new(ptr::null_mut()));
        {
            let _inside = self.enter()?;
            let flags = nccl_sys::WINDOW_SYMMETRIC;
            // SAFETY: INV-12 the gate keeps the communicator; the place is never freed before the library is through with it.
            // INV-8: the memory outlives the registration (see `buffers`).
            let result = unsafe { register(self.handle, span.pointer(), span.bytes(), place, flags) };
            self.nccl.check("ncclCommWindowRegister", result)?;
        }
        self.settle(deadline, stop)?;
        // SAFETY: INV-12 made above, and nothing is in progress any more that could write to it.
        let place = unsafe { Box::from_raw(place) };
        // SAFETY: INV-12 read as it stands in memory: another thread of the library wrote it before the state changed.
        let handle = unsafe { ptr::read_volatile(&raw const *place) };
        Ok(Registration {
            handle,
            is_window: true,
        })
    }

    /// Makes it forget. On an error the communicator may still know the memory.
    pub(crate) fn deregister(&self, registration: &Registration) -> Result<()> {
        let _inside = self.enter()?;
        let api = self.nccl.api();
        let (name, function) = match registration.is_window {
            true => ("ncclCommWindowDeregister", api.comm_window_deregister),
            false => ("ncclCommDeregister", api.comm_deregister),
        };
        let function = function.ok_or_else(|| missing(name))?;
        // A library that has no use for the buffer gives no handle.
        if registration.handle.is_null() {
            return Ok(());
        }
        // SAFETY: INV-12 the gate keeps the communicator, which made the handle; ended once, by its only owner.
        self.nccl
            .check(name, unsafe { function(self.handle, registration.handle) })
    }
}
