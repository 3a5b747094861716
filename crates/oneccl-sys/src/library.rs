//! Opening: the library itself, the plugin that does the work, and the table of functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix as dl;

use crate::environment::{self, Flavour};
use crate::types::{Comm, Config, DataType, RedOp, ResultCode, Stream, UniqueId, Version};
use crate::{output, search};

/// Why the library could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No file in any of the places.
    #[error("libccl.so.2 was not found; searched: {}", searched.join(", "))]
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
    /// It does not tell its version.
    #[error("{library} does not tell its version (code {})", code.0)]
    NoVersion {
        /// The file.
        library: String,
        /// What it returned.
        code: ResultCode,
    },
}

macro_rules! functions {
    ($(required $r:ident = $rname:literal: fn($($rarg:ty),*) -> $rret:ty;)*
     $(optional $o:ident = $oname:literal: fn($($oarg:ty),*) -> $oret:ty;)*) => {
        /// The C API. Optional functions are `None` where this version or build lacks them.
        ///
        /// All are as unsafe as C: pointers must be valid for the counts given, communicators alive, and a communicator
        /// must not be used by two threads for collectives at the same time.
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs, reason = "the C API's own names")]
        pub struct Functions {
            $(pub $r: unsafe extern "C" fn($($rarg),*) -> $rret,)*
            $(pub $o: Option<unsafe extern "C" fn($($oarg),*) -> $oret>,)*
        }

        impl Functions {
            /// # Safety
            /// `library` is a oneCCL whose functions have these types.
            unsafe fn look_up(library: &dl::Library, file: &str) -> Result<Self, OpenError> {
                Ok(Self {
                    $($r: {
                        // SAFETY: the type is the C API's for that name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($rarg),*) -> $rret>($rname) };
                        *symbol.map_err(|_| OpenError::SymbolMissing {
                            library: file.to_string(),
                            symbol: printable($rname),
                        })?
                    },)*
                    $($o: {
                        // SAFETY: the type is the C API's for that name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($oarg),*) -> $oret>($oname) };
                        symbol.ok().map(|s| *s)
                    },)*
                })
            }
        }
    };
}

functions! {
    required get_version = b"onecclGetVersion\0": fn(*mut c_int) -> ResultCode;
    required get_unique_id = b"onecclGetUniqueId\0": fn(*mut UniqueId) -> ResultCode;
    required comm_init_rank = b"onecclCommInitRank\0": fn(*mut Comm, usize, UniqueId, c_int) -> ResultCode;
    required comm_destroy = b"onecclCommDestroy\0": fn(Comm) -> ResultCode;
    required all_reduce = b"onecclAllReduce\0":
        fn(*mut c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> ResultCode;
    required broadcast = b"onecclBroadcast\0":
        fn(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
    required reduce = b"onecclReduce\0":
        fn(*const c_void, *mut c_void, usize, DataType, RedOp, c_int, Comm, Stream) -> ResultCode;
    required all_gather = b"onecclAllGather\0":
        fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> ResultCode;
    required reduce_scatter = b"onecclReduceScatter\0":
        fn(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> ResultCode;
    optional comm_split = b"onecclCommSplit\0": fn(Comm, c_int, c_int, *mut Comm, *const Config) -> ResultCode;
    optional get_error_string = b"onecclGetErrorString\0": fn(ResultCode) -> *const c_char;
    optional get_last_error = b"onecclGetLastError\0": fn(Comm) -> *const c_char;
    optional all_to_all = b"onecclAllToAll\0":
        fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> ResultCode;
    optional all_to_all_v = b"onecclAllToAllV\0":
        fn(*const c_void, *const usize, *mut c_void, *const usize, DataType, Comm, Stream) -> ResultCode;
    optional send = b"onecclSend\0": fn(*const c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
    optional recv = b"onecclRecv\0": fn(*mut c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
}

/// A symbol's name without its final zero.
fn printable(name: &'static [u8]) -> &'static str {
    CStr::from_bytes_with_nul(name)
        .ok()
        .and_then(|n| n.to_str().ok())
        .unwrap_or("?")
}

/// An opened oneCCL. Never closed.
#[derive(Debug)]
pub struct Library {
    /// The functions.
    pub functions: Functions,
    /// The file.
    pub file: PathBuf,
    /// What it says it is.
    pub version: Version,
    /// Which memory it serves.
    pub flavour: Flavour,
}

/// Libraries of Intel's compiler that some builds need and that lie beside them; opened first, in this order, where the
/// loader would not find them by itself.
const COMPANIONS: [&str; 8] = [
    "libintlc.so.5",
    "libimf.so",
    "libirng.so",
    "libsvml.so",
    "libumf.so.1",
    "libur_loader.so.0",
    "libsycl.so.9",
    "libfabric.so.1",
];

/// What the plugins are linked to, beside them; opened first where the loader would not find it by itself.
const ENGINE: &str = "libccl.so.1";

impl Library {
    /// Prepares the process, finds the library and opens it with its plugin. What the library prints while it is opened goes
    /// to standard error (see [`output`]).
    ///
    /// Call it once per process and keep the result: opening it again is harmless, but pointless.
    pub fn open(flavour: Flavour) -> Result<Self, OpenError> {
        let found = search::find();
        let Some(file) = found.file else {
            return Err(OpenError::NotFound {
                searched: found.searched,
            });
        };
        environment::prepare(flavour);
        if let Some(folder) = file.parent() {
            environment::use_providers_in(folder);
        }
        output::keep_out_of_stdout();
        Self::open_file(file, flavour).map_err(|e| match e {
            // The loader's path was the last resort: say where else it was looked for.
            OpenError::NotLoadable { library, text } if found.searched.len() > 1 => OpenError::NotLoadable {
                library,
                text: format!("{text}; searched before: {}", found.searched.join(", ")),
            },
            e => e,
        })
    }

    fn open_file(file: PathBuf, flavour: Flavour) -> Result<Self, OpenError> {
        let folder = file.parent().filter(|p| !p.as_os_str().is_empty());
        // The CPU-only build lies where the plugin looks for it, and needs nothing.
        let around =
            folder.filter(|f| !(flavour == Flavour::Host && f.join("ccl/cpu/lib").join(ENGINE).is_file()));
        for companion in COMPANIONS {
            // Whether it was needed shows when the library itself is opened.
            let _ = around.map(|folder| open_for_good(&folder.join(companion)));
        }
        let library = open_for_good(&file)?;
        let _ = around.map(|folder| open_for_good(&folder.join(ENGINE)));
        // By its full path: oneCCL asks the loader for the bare name later, which then finds what is open already.
        let plugin = match folder {
            Some(folder) => folder.join(flavour.plugin_file()),
            None => PathBuf::from(flavour.plugin_file()),
        };
        open_for_good(&plugin)?;
        let name = file.display().to_string();
        // SAFETY: libccl.so.2 is oneCCL's C API.
        let functions = unsafe { Functions::look_up(&library, &name)? };
        let mut code = 0;
        // SAFETY: the out-parameter is a live integer.
        let result = unsafe { (functions.get_version)(&raw mut code) };
        if result != ResultCode::SUCCESS {
            return Err(OpenError::NoVersion {
                library: name,
                code: result,
            });
        }
        Ok(Self {
            functions,
            file,
            version: Version::from_code(code),
            flavour,
        })
    }

    /// The library's text for `code`, with the text of the last exception where there is one.
    ///
    /// # Safety
    /// `comm` is null or a live communicator.
    pub unsafe fn describe(&self, code: ResultCode, comm: Comm) -> String {
        let read = |text: *const c_char| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: the library returns text that ends with a zero and lives until its next call on this thread.
            let text = unsafe { CStr::from_ptr(text) };
            text.to_string_lossy().trim().to_string()
        };
        let mut text = code.name().to_string();
        if let Some(f) = self.functions.get_error_string {
            // SAFETY: any number may be asked for.
            let theirs = read(unsafe { f(code) });
            if !theirs.is_empty() && !theirs.to_ascii_lowercase().contains("unknown") {
                text = theirs;
            }
        }
        if let Some(f) = self.functions.get_last_error {
            // SAFETY: null or a live communicator.
            let last = read(unsafe { f(comm) });
            if !last.is_empty() && !last.eq_ignore_ascii_case("no error") {
                text = format!("{text}: {last}");
            }
        }
        text
    }
}

/// Opens a library whose symbols the plugins may use, and never closes it.
fn open_for_good(file: &Path) -> Result<ManuallyDrop<dl::Library>, OpenError> {
    // SAFETY: oneCCL's initialisers ask nothing of the caller.
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
