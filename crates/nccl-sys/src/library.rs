//! Opening the library and filling the table.
//!
//! A required function that is missing fails the opening and is named; an optional one leaves `None`. The library is never
//! closed: it starts threads of its own and its functions may be on any stack.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use ftcore::registry::Unavailable;
use vendor::{Opened, Symbols, functions};

use crate::locate;
use crate::types::{Comm, Config, DataType, RedOp, ResultCode, Stream, UniqueId, Version};

/// The oldest version that is used. Before it what a non-blocking call leaves to do lies in thread-local memory of the thread that made it,
/// and a thread of the library writes there when the caller's may have ended: joining and splitting are on threads that end.
pub const OLDEST: Version = Version::new(2, 27, 0);

functions! {
    /// NCCL's functions. Arguments, units and errors are NCCL's own; see its documentation.
    pub struct Api {
        required {
            /// The version as a number.
            get_version = "ncclGetVersion": fn(*mut c_int) -> ResultCode;
            /// A new id for one communicator.
            get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> ResultCode;
            /// Joins a communicator.
            comm_init_rank_config = "ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> ResultCode;
            /// Flushes; needed before destroy on non-blocking communicators.
            comm_finalize = "ncclCommFinalize": fn(Comm) -> ResultCode;
            /// Frees a communicator.
            comm_destroy = "ncclCommDestroy": fn(Comm) -> ResultCode;
            /// Ends whatever runs, then frees it.
            comm_abort = "ncclCommAbort": fn(Comm) -> ResultCode;
            /// Divides a communicator by colour.
            comm_split = "ncclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> ResultCode;
            /// How a communicator is.
            comm_get_async_error = "ncclCommGetAsyncError": fn(Comm, *mut ResultCode) -> ResultCode;
            /// The number of ranks.
            comm_count = "ncclCommCount": fn(Comm, *mut c_int) -> ResultCode;
            /// A code in words.
            get_error_string = "ncclGetErrorString": fn(ResultCode) -> *const c_char;
            /// The library's last error in words; the communicator may be null.
            get_last_error = "ncclGetLastError": fn(Comm) -> *const c_char;
            /// A sum whose inputs are multiplied first.
            red_op_create_pre_mul_sum = "ncclRedOpCreatePreMulSum": fn(*mut RedOp, *mut c_void, DataType, c_int, Comm) -> ResultCode;
            /// Frees it.
            red_op_destroy = "ncclRedOpDestroy": fn(RedOp, Comm) -> ResultCode;
            /// send, recv, count, dtype, op, communicator, stream.
            all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> ResultCode;
            /// send, recv, count, dtype, root, communicator, stream.
            broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
            /// send, recv, count, dtype, op, root, communicator, stream.
            reduce = "ncclReduce": fn(*const c_void, *mut c_void, usize, DataType, RedOp, c_int, Comm, Stream) -> ResultCode;
            /// send, recv, count of send, dtype, communicator, stream.
            all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> ResultCode;
            /// send, recv, count of recv, dtype, op, communicator, stream.
            reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> ResultCode;
            /// send, count, dtype, peer, communicator, stream.
            send = "ncclSend": fn(*const c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
            /// recv, count, dtype, peer, communicator, stream.
            recv = "ncclRecv": fn(*mut c_void, usize, DataType, c_int, Comm, Stream) -> ResultCode;
            /// Begins a group of calls.
            group_start = "ncclGroupStart": fn() -> ResultCode;
            /// Ends it, and starts what was called in between.
            group_end = "ncclGroupEnd": fn() -> ResultCode;
        }
        optional {
            /// Ends whatever runs, without freeing (2.28.7).
            comm_revoke = "ncclCommRevoke": fn(Comm, c_int) -> ResultCode;
            /// Only a stand-in has this: what it is, in words.
            standin_description = "oxccl_standin_description": fn() -> *const c_char;
        }
    }
}

/// An opened library.
#[derive(Debug)]
pub struct Library {
    opened: Opened,
    version: Version,
    api: Api,
}

impl Library {
    /// Opens the first candidate that loads (see [`locate`]). A candidate that loads but is no usable NCCL ends the search:
    /// taking another one silently would hide which library runs.
    ///
    /// # Errors
    /// That none was found, or why it cannot be used.
    pub fn open() -> Result<Self, Unavailable> {
        let mut searched = Vec::new();
        for path in locate::candidates() {
            // SAFETY: NCCL's initialisers ask nothing of the caller.
            match unsafe { Opened::new(&path, Symbols::Own) } {
                Ok(opened) => return Self::of(opened),
                Err(e) => searched.push(e.to_string()),
            }
        }
        let (file, variable) = (locate::FILE, locate::ENV_PATH);
        Err(Unavailable::LibraryNotFound {
            library: format!("NCCL ({file}: pip install nvidia-nccl-cu13, or set {variable} to it)"),
            searched,
        })
    }

    fn of(opened: Opened) -> Result<Self, Unavailable> {
        // SAFETY: the signatures are those of NCCL's public header for these names.
        let api = unsafe { Api::look_up(&opened) }.map_err(|why| match why {
            Unavailable::SymbolMissing { library, symbol } => Unavailable::SymbolMissing {
                library: format!("{library} (NCCL {OLDEST} or later is needed)"),
                symbol,
            },
            why => why,
        })?;
        let mut number: c_int = 0;
        // SAFETY: writes one int; needs no device.
        let code = unsafe { (api.get_version)(&raw mut number) };
        let what = opened.path().display().to_string();
        let version = match u32::try_from(number) {
            Ok(n) if code == 0 => Version(n),
            _ => {
                return Err(Unavailable::InitFailed {
                    code: Some(code.into()),
                    text: format!("{what} does not tell its version"),
                });
            }
        };
        if version < OLDEST {
            return Err(Unavailable::VersionTooOld {
                what: format!("NCCL ({what})"),
                found: version.to_string(),
                needed: OLDEST.to_string(),
            });
        }
        Ok(Self { opened, version, api })
    }

    /// The file, or the bare name if the loader found it.
    pub fn path(&self) -> &Path {
        self.opened.path()
    }

    /// The library's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The functions.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// What a stand-in for tests says of itself; `None` for NCCL.
    pub fn stand_in(&self) -> Option<String> {
        // SAFETY: returns a static string.
        self.api.standin_description.map(|f| text(unsafe { f() }))
    }

    /// A result code in words.
    pub fn describe(&self, code: ResultCode) -> String {
        // SAFETY: the library returns a static string for every code.
        text(unsafe { (self.api.get_error_string)(code) })
    }

    /// The library's last error in words; empty if it keeps none.
    pub fn last_error(&self) -> String {
        // SAFETY: a null communicator asks for the process's last error; the string is static.
        text(unsafe { (self.api.get_last_error)(std::ptr::null_mut()) })
    }
}

fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: not null; the library's strings end with a zero and stay where they are.
    unsafe { std::ffi::CStr::from_ptr(s) }
        .to_string_lossy()
        .into_owned()
}
