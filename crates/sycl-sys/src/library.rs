//! Opening: dpctl's library, what it needs, and the table of functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix as dl;

use crate::types::{Bool, DeviceRef, DeviceType, EventRef, EventStatus, QueueRef, SelectorRef};
use crate::{environment, search};

/// Why the library could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No file in any of the places.
    #[error("libDPCTLSyclInterface.so (dpctl) was not found; searched: {}", searched.join(", "))]
    NotFound {
        /// The places, in order.
        searched: Vec<String>,
    },
    /// The loader refuses it, or something that it needs.
    #[error("{library} cannot be loaded: {text}")]
    NotLoadable {
        /// The file.
        library: String,
        /// The loader's words.
        text: String,
    },
    /// A function that every version has is missing.
    #[error("{library} has no symbol {symbol}")]
    SymbolMissing {
        /// The file.
        library: String,
        /// The function.
        symbol: &'static str,
    },
}

macro_rules! functions {
    ($(required $r:ident = $rname:literal: fn($($rarg:ty),*) $(-> $rret:ty)?;)*
     $(optional $o:ident = $oname:literal: fn($($oarg:ty),*) $(-> $oret:ty)?;)*) => {
        /// dpctl's C API. Optional functions are `None` where this version lacks them.
        ///
        /// All are as unsafe as C: references must be alive, memory valid for the bytes given until the command that uses it
        /// is done. What fails says so on standard error and returns null or zero.
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs, reason = "the C API's own names")]
        pub struct Functions {
            $(pub $r: unsafe extern "C" fn($($rarg),*) $(-> $rret)?,)*
            $(pub $o: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
        }

        impl Functions {
            /// # Safety
            /// `library` is dpctl's, whose functions have these types.
            unsafe fn look_up(library: &dl::Library, file: &str) -> Result<Self, OpenError> {
                Ok(Self {
                    $($r: {
                        // SAFETY: the type is the C API's for that name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($rarg),*) $(-> $rret)?>($rname) };
                        *symbol.map_err(|_| OpenError::SymbolMissing {
                            library: file.to_string(),
                            symbol: printable($rname),
                        })?
                    },)*
                    $($o: {
                        // SAFETY: the type is the C API's for that name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>($oname) };
                        symbol.ok().map(|s| *s)
                    },)*
                })
            }
        }
    };
}

functions! {
    required filter_selector = b"DPCTLFilterSelector_Create\0": fn(*const c_char) -> SelectorRef;
    required selector_delete = b"DPCTLDeviceSelector_Delete\0": fn(SelectorRef);
    required device_from_selector = b"DPCTLDevice_CreateFromSelector\0": fn(SelectorRef) -> DeviceRef;
    required device_delete = b"DPCTLDevice_Delete\0": fn(DeviceRef);
    required device_type = b"DPCTLDevice_GetDeviceType\0": fn(DeviceRef) -> DeviceType;
    required device_name = b"DPCTLDevice_GetName\0": fn(DeviceRef) -> *const c_char;
    required device_count = b"DPCTLDeviceMgr_GetNumDevices\0": fn(c_int) -> usize;
    required string_delete = b"DPCTLCString_Delete\0": fn(*const c_char);
    required queue_for_device = b"DPCTLQueue_CreateForDevice\0": fn(DeviceRef, *const c_void, c_int) -> QueueRef;
    required queue_copy = b"DPCTLQueue_Copy\0": fn(QueueRef) -> QueueRef;
    required queue_delete = b"DPCTLQueue_Delete\0": fn(QueueRef);
    required queue_device = b"DPCTLQueue_GetDevice\0": fn(QueueRef) -> DeviceRef;
    required queue_memcpy = b"DPCTLQueue_Memcpy\0": fn(QueueRef, *mut c_void, *const c_void, usize) -> EventRef;
    required queue_memset = b"DPCTLQueue_Memset\0": fn(QueueRef, *mut c_void, u8, usize) -> EventRef;
    required queue_barrier = b"DPCTLQueue_SubmitBarrier\0": fn(QueueRef) -> EventRef;
    required queue_barrier_for = b"DPCTLQueue_SubmitBarrierForEvents\0": fn(QueueRef, *const EventRef, usize) -> EventRef;
    required event_status = b"DPCTLEvent_GetCommandExecutionStatus\0": fn(EventRef) -> EventStatus;
    required event_delete = b"DPCTLEvent_Delete\0": fn(EventRef);
    required malloc_device = b"DPCTLmalloc_device\0": fn(usize, QueueRef) -> *mut c_void;
    required malloc_shared = b"DPCTLmalloc_shared\0": fn(usize, QueueRef) -> *mut c_void;
    required malloc_host = b"DPCTLmalloc_host\0": fn(usize, QueueRef) -> *mut c_void;
    required free = b"DPCTLfree_with_queue\0": fn(*mut c_void, QueueRef);
    optional version = b"DPCTLService_GetDPCPPVersion\0": fn() -> *const c_char;
    optional device_driver = b"DPCTLDevice_GetDriverVersion\0": fn(DeviceRef) -> *const c_char;
    optional device_equal = b"DPCTLDevice_AreEq\0": fn(DeviceRef, DeviceRef) -> Bool;
}

/// A symbol's name without its final zero.
fn printable(name: &'static [u8]) -> &'static str {
    CStr::from_bytes_with_nul(name)
        .ok()
        .and_then(|n| n.to_str().ok())
        .unwrap_or("?")
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
    pub fn open() -> Result<Self, OpenError> {
        let found = search::find();
        let Some(file) = found.file else {
            return Err(OpenError::NotFound {
                searched: found.searched,
            });
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
            OpenError::NotLoadable { .. } if folders.is_empty() => OpenError::NotFound {
                searched: found.searched,
            },
            e => e,
        })?;
        let name = file.display().to_string();
        // SAFETY: a library of this name is dpctl's C API.
        let functions = unsafe { Functions::look_up(&library, &name)? };
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

/// Opens a library whose symbols others may use, and never closes it.
fn open_for_good(file: &Path) -> Result<ManuallyDrop<dl::Library>, OpenError> {
    // SAFETY: the initialisers of the SYCL runtime ask nothing of the caller.
    let opened = unsafe { dl::Library::open(Some(file), dl::RTLD_NOW | dl::RTLD_GLOBAL) };
    opened.map(ManuallyDrop::new).map_err(|e| OpenError::NotLoadable {
        library: file.display().to_string(),
        text: words(&e),
    })
}

/// The loader's own words, which the error has as its source.
fn words(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}
