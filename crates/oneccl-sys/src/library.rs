//! Opening: the library itself, the plugin that does the work, and the table of functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use ftcore::registry::Unavailable;
use vendor::{Opened, Symbols, functions};

use crate::environment::{self, Flavour};
use crate::types::{Comm, Config, DataType, RedOp, ResultCode, Stream, UniqueId, Version};
use crate::{output, search};

functions! {
    /// The C API. Optional functions are `None` where this version or build lacks them.
    ///
    /// All are as unsafe as C: pointers must be valid for the counts given, communicators alive, and a communicator
    /// must not be used by two threads for collectives at the same time.
    #[allow(missing_docs, reason = "the C API's own names")]
    pub struct Functions {
        required {
            get_version = "onecclGetVersion": fn(*mut c_int) -> ResultCode;
            get_unique_id = "onecclGetUniqueId": fn(*mut UniqueId) -> ResultCode;
            comm_init_rank = "onecclCommInitRank": fn(*mut Comm, usize, UniqueId, c_int) -> ResultCode;
            comm_destroy = "onecclCommDestroy": fn(Comm) -> ResultCode;
            all_reduce = "onecclAllReduce":
                fn(*mut c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> ResultCode;
            broadcast = "onecclBroadcast":
                fn(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
            reduce = "onecclReduce":
                fn(*const c_void, *mut c_void, usize, DataType, RedOp, c_int, Comm, Stream) -> ResultCode;
            all_gather = "onecclAllGather":
                fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> ResultCode;
            reduce_scatter = "onecclReduceScatter":
                fn(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> ResultCode;
        }
        optional {
            comm_split = "onecclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *const Config) -> ResultCode;
            get_error_string = "onecclGetErrorString": fn(ResultCode) -> *const c_char;
            get_last_error = "onecclGetLastError": fn(Comm) -> *const c_char;
            all_to_all = "onecclAllToAll":
                fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> ResultCode;
            all_to_all_v = "onecclAllToAllV":
                fn(*const c_void, *const usize, *mut c_void, *const usize, DataType, Comm, Stream) -> ResultCode;
            send = "onecclSend": fn(*const c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
            recv = "onecclRecv": fn(*mut c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
        }
    }
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
    ///
    /// # Errors
    /// That it was not found, or why it cannot be used.
    pub fn open(flavour: Flavour) -> Result<Self, Unavailable> {
        let found = search::find();
        let Some(file) = found.file else {
            return Err(Unavailable::LibraryNotFound {
                library: format!("{} (oneCCL)", search::LIBRARY),
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
            Unavailable::LibraryNotLoadable { library, text } if found.searched.len() > 1 => {
                let text = format!("{text}; searched before: {}", found.searched.join(", "));
                Unavailable::LibraryNotLoadable { library, text }
            }
            e => e,
        })
    }

    fn open_file(file: PathBuf, flavour: Flavour) -> Result<Self, Unavailable> {
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
        // SAFETY: libccl.so.2 is oneCCL's C API.
        let functions = unsafe { Functions::look_up(&library)? };
        let mut code = 0;
        // SAFETY: the out-parameter is a live integer.
        let result = unsafe { (functions.get_version)(&raw mut code) };
        if result != ResultCode::SUCCESS {
            return Err(Unavailable::InitFailed {
                code: Some(result.0.into()),
                text: format!("{} does not tell its version", file.display()),
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

/// Opens a library whose symbols the plugins may use.
fn open_for_good(file: &Path) -> Result<Opened, Unavailable> {
    // SAFETY: the initialisers of oneCCL and of what it needs ask nothing of the caller.
    unsafe { Opened::new(file, Symbols::Shared) }
}
