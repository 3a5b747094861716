//! Opening: dpctl's library, what it needs, and the table of functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use ftcore::registry::Unavailable;
use vendor::{Opened, Symbols, functions};

use crate::types::{Bool, DeviceRef, DeviceType, EventRef, EventStatus, QueueRef, SelectorRef};
use crate::{environment, search};

functions! {
    /// dpctl's C API. Optional functions are `None` where this version lacks them.
    ///
    /// All are as unsafe as C: references must be alive, memory valid for the bytes given until the command that uses it
    /// is done. What fails says so on standard error and returns null or zero.
    #[allow(missing_docs, reason = "the C API's own names")]
    pub struct Functions {
        required {
            filter_selector = "DPCTLFilterSelector_Create": fn(*const c_char) -> SelectorRef;
            selector_delete = "DPCTLDeviceSelector_Delete": fn(SelectorRef);
            device_from_selector = "DPCTLDevice_CreateFromSelector": fn(SelectorRef) -> DeviceRef;
            device_delete = "DPCTLDevice_Delete": fn(DeviceRef);
            device_type = "DPCTLDevice_GetDeviceType": fn(DeviceRef) -> DeviceType;
            device_name = "DPCTLDevice_GetName": fn(DeviceRef) -> *const c_char;
            device_count = "DPCTLDeviceMgr_GetNumDevices": fn(c_int) -> usize;
            string_delete = "DPCTLCString_Delete": fn(*const c_char);
            queue_for_device = "DPCTLQueue_CreateForDevice": fn(DeviceRef, *const c_void, c_int) -> QueueRef;
            queue_copy = "DPCTLQueue_Copy": fn(QueueRef) -> QueueRef;
            queue_delete = "DPCTLQueue_Delete": fn(QueueRef);
            queue_device = "DPCTLQueue_GetDevice": fn(QueueRef) -> DeviceRef;
            queue_memcpy = "DPCTLQueue_Memcpy": fn(QueueRef, *mut c_void, *const c_void, usize) -> EventRef;
            queue_memset = "DPCTLQueue_Memset": fn(QueueRef, *mut c_void, u8, usize) -> EventRef;
            queue_barrier = "DPCTLQueue_SubmitBarrier": fn(QueueRef) -> EventRef;
            queue_barrier_for = "DPCTLQueue_SubmitBarrierForEvents": fn(QueueRef, *const EventRef, usize) -> EventRef;
            event_status = "DPCTLEvent_GetCommandExecutionStatus": fn(EventRef) -> EventStatus;
            event_delete = "DPCTLEvent_Delete": fn(EventRef);
            malloc_device = "DPCTLmalloc_device": fn(usize, QueueRef) -> *mut c_void;
            malloc_shared = "DPCTLmalloc_shared": fn(usize, QueueRef) -> *mut c_void;
            malloc_host = "DPCTLmalloc_host": fn(usize, QueueRef) -> *mut c_void;
            free = "DPCTLfree_with_queue": fn(*mut c_void, QueueRef);
        }
        optional {
            version = "DPCTLService_GetDPCPPVersion": fn() -> *const c_char;
            device_driver = "DPCTLDevice_GetDriverVersion": fn(DeviceRef) -> *const c_char;
            device_equal = "DPCTLDevice_AreEq": fn(DeviceRef, DeviceRef) -> Bool;
        }
    }
}

/// An opened dpctl with the SYCL runtime under it. Never closed.
#[derive(Debug)]
pub struct Library {
    /// The functions.
    pub functions: Functions,
    /// The file.
    pub file: PathBuf,
    /// The version of the SYCL compiler that it was built with; empty if it does not tell.
    pub version: String,
}

/// What dpctl and the SYCL runtime load, in the order in which they need each other; opened first where they lie in one of
/// the library's folders, so that the loader's path does not matter.
const COMPANIONS: [&str; 9] = [
    "libintlc.so.5",
    "libimf.so",
    "libirng.so",
    "libsvml.so",
    "libtbb.so.12",
    "libumf.so.1",
    "libur_loader.so.0",
    "libsycl.so.9",
    "libOpenCL.so.1",
];

impl Library {
    /// Prepares the process, finds the library and opens it with what it needs.
    ///
    /// Call it once per process and keep the result: opening it again is harmless, but pointless.
    ///
    /// # Errors
    /// That it was not found, or why it cannot be used.
    pub fn open() -> Result<Self, Unavailable> {
        let found = search::find();
        let not_found = |searched| Unavailable::LibraryNotFound {
            library: format!("{} (dpctl, the way to SYCL)", search::LIBRARY),
            searched,
        };
        let Some(file) = found.file else {
            return Err(not_found(found.searched));
        };
        let folders = search::folders(&file);
        environment::prepare(&folders);
        for companion in COMPANIONS {
            if let Some(file) = folders.iter().map(|f| f.join(companion)).find(|f| f.is_file()) {
                // Whether it was needed shows when the library itself is opened.
                let _ = open_for_good(&file);
            }
        }
        let library = open_for_good(&file).map_err(|e| match e {
            // The loader's path was the last resort: say where else it was looked for.
            Unavailable::LibraryNotLoadable { .. } if folders.is_empty() => not_found(found.searched),
            e => e,
        })?;
        // SAFETY: a library of this name is dpctl's C API.
        let functions = unsafe { Functions::look_up(&library)? };
        // SAFETY: takes nothing, and gives a new string away.
        let version = functions.version.map(|f| unsafe { text(&functions, f()) });
        Ok(Self {
            functions,
            file,
            version: version.unwrap_or_default(),
        })
    }

    /// Takes a string that a function of this library returned: its text, and the string is freed.
    ///
    /// # Safety
    /// `string` is null or came from a function of this library that gives strings away, and was not taken before.
    pub unsafe fn take_string(&self, string: *const c_char) -> String {
        // SAFETY: the caller's promise.
        unsafe { text(&self.functions, string) }
    }
}

/// # Safety
/// See [`Library::take_string`].
unsafe fn text(functions: &Functions, string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: dpctl's strings end with a zero and belong to the caller (see `take_string`).
    unsafe {
        let text = CStr::from_ptr(string).to_string_lossy().trim().to_string();
        (functions.string_delete)(string);
        text
    }
}

/// Opens a library whose symbols others may use.
fn open_for_good(file: &Path) -> Result<Opened, Unavailable> {
    // SAFETY: the initialisers of the SYCL runtime ask nothing of the caller.
    unsafe { Opened::new(file, Symbols::Shared) }
}
