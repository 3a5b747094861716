//! The collectives: HCCL of the Intel Gaudi software.
//!
//! The API follows NCCL's shape with differences that matter: minimum is 2 and maximum 3 among the reductions, the unique
//! id is 1024 bytes and a length passed by value, and `hcclAlltoAll` counts the whole buffer.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use vendor::{Opened, functions};

use crate::ftcore::registry::Unavailable;
use crate::ftcore::{DType, Error, ErrorKind, ReduceOp, Result};

use super::synapse::StreamHandle;

/// `hcclResult_t`.
type Code = c_int;
const SUCCESS: Code = 0;
/// Codes that mean that a connection is gone: hcclSocketError, hcclLibfabricError, hcclPortDown.
const CONNECTION_LOST: [Code; 3] = [9, 10, 16];

/// The least version that is accepted: HCCL 2, the API of this module (`HCCL_VERSION` in hccl.h: major × 1000 + …).
const LEAST_VERSION: c_int = 2000;

/// `HCCL_UNIQUE_ID_MAX_BYTES`.
const ID_BYTES: usize = 1024;

/// `hcclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId {
    internal: [u8; ID_BYTES],
    length: usize,
}

impl UniqueId {
    /// As it goes through the store.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let used = self.internal.get(..self.length).unwrap_or(&self.internal);
        used.to_vec()
    }

    /// Out of the store, which is not trusted (INV-10).
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut id = Self {
            internal: [0; ID_BYTES],
            length: bytes.len(),
        };
        let room = id.internal.get_mut(..bytes.len()).filter(|r| !r.is_empty());
        let Some(room) = room else {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!(
                    "the unique id in the store has {} bytes; 1 to {ID_BYTES} are possible",
                    bytes.len()
                ),
            ));
        };
        room.copy_from_slice(bytes);
        Ok(id)
    }
}

functions! {
    #[allow(non_snake_case, reason = "fields are named as the C functions")]
    struct Table {
        required {
            hcclGetVersion = "hcclGetVersion": fn(*mut c_int) -> Code;
            hcclGetUniqueId = "hcclGetUniqueId": fn(*mut UniqueId) -> Code;
            hcclCommInitRank = "hcclCommInitRank": fn(*mut *mut c_void, c_int, UniqueId, c_int) -> Code;
            hcclCommDestroy = "hcclCommDestroy": fn(*mut c_void) -> Code;
            hcclCommAbort = "hcclCommAbort": fn(*mut c_void) -> Code;
            hcclGetErrorString = "hcclGetErrorString": fn(Code) -> *const c_char;
            hcclCommGetAsyncError = "hcclCommGetAsyncError": fn(*mut c_void, *mut Code) -> Code;
            hcclCommCount = "hcclCommCount": fn(*mut c_void, *mut c_int) -> Code;
            hcclCommUserRank = "hcclCommUserRank": fn(*mut c_void, *mut c_int) -> Code;
            hcclAllReduce = "hcclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> Code;
            hcclReduce = "hcclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, *mut c_void, *mut c_void) -> Code;
            hcclBroadcast = "hcclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> Code;
            hcclReduceScatter = "hcclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> Code;
            hcclAllGather = "hcclAllGather": fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> Code;
            hcclAlltoAll = "hcclAlltoAll": fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> Code;
            hcclSend = "hcclSend": fn(*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> Code;
            hcclRecv = "hcclRecv": fn(*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> Code;
            hcclGroupStart = "hcclGroupStart": fn() -> Code;
            hcclGroupEnd = "hcclGroupEnd": fn() -> Code;
        }
        optional {
            hcclGetVersionString = "hcclGetVersionString": fn(*mut c_char, c_uint) -> Code;
            hcclCommFinalize = "hcclCommFinalize": fn(*mut c_void) -> Code;
            hcclGetLastErrorMessage = "hcclGetLastErrorMessage": fn() -> *const c_char;
            hcclCommGetAsyncErrorMessage = "hcclCommGetAsyncErrorMessage": fn(*mut c_void) -> *const c_char;
        }
    }
}

/// `hcclDataType_t` of the types that HCCL supports; no other gets this far.
pub(crate) fn dtype_code(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::I32 => Ok(2),
        DType::U32 => Ok(3),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::BF16 => Ok(9),
        other => Err(Error::unsupported(format!("HCCL does not know {other}"))),
    }
}

/// `hcclRedOp_t` of the reductions that HCCL supports.
pub(crate) fn reduction_code(op: ReduceOp) -> Result<c_int> {
    match op {
        ReduceOp::Sum => Ok(0),
        ReduceOp::Min => Ok(2),
        ReduceOp::Max => Ok(3),
        other => Err(Error::unsupported(format!("HCCL does not reduce with {other}"))),
    }
}

/// A communicator's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CommHandle(usize);

impl CommHandle {
    fn pointer(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// A piece of device memory: address, elements, type. The engine keeps it alive (INV-8).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

impl Span {
    /// The number of bytes.
    pub(crate) fn bytes(self) -> u64 {
        (self.count * self.dtype.size()) as u64
    }

    fn pointer(self) -> *mut c_void {
        self.address as usize as *mut c_void
    }
}

/// The opened library.
pub(crate) struct Hccl {
    table: Table,
    /// Where it was found.
    pub(crate) path: String,
    /// `major × 1000 + minor × 100 + patch`.
    pub(crate) version: i32,
    /// The library's own words on its version, if it has them.
    pub(crate) version_text: Option<String>,
}

/// Where a call goes.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) comm: CommHandle,
    pub(crate) stream: StreamHandle,
}

impl Hccl {
    /// Looks the functions up and reads the version.
    pub(crate) fn new(library: &Opened) -> Result<Self> {
        // SAFETY: the symbols have the C signatures written here, as the published headers say.
        let table = unsafe { Table::look_up(library)? };
        let mut hccl = Self {
            table,
            path: library.path().display().to_string(),
            version: 0,
            version_text: None,
        };
        // SAFETY: a pointer to a live int.
        let code = unsafe { (hccl.table.hcclGetVersion)(&raw mut hccl.version) };
        hccl.check("hcclGetVersion", code)?;
        if hccl.version < LEAST_VERSION {
            return Err(Unavailable::VersionTooOld {
                what: format!("HCCL at {}", hccl.path),
                found: Self::dotted(hccl.version),
                needed: Self::dotted(LEAST_VERSION),
            }
            .into());
        }
        if let Some(function) = hccl.table.hcclGetVersionString {
            let mut buffer = [0u8; 256];
            // SAFETY: the buffer has the size given, its last byte stays zero.
            let code = unsafe { function(buffer.as_mut_ptr().cast(), buffer.len() as c_uint - 1) };
            hccl.version_text = CStr::from_bytes_until_nul(&buffer)
                .ok()
                .filter(|t| code == SUCCESS && !t.is_empty())
                .map(|t| t.to_string_lossy().trim().to_string());
        }
        Ok(hccl)
    }

    fn dotted(version: i32) -> String {
        format!("{}.{}.{}", version / 1000, version / 100 % 10, version % 100)
    }

    /// The version in words.
    pub(crate) fn describe(&self) -> String {
        let words = self
            .version_text
            .as_ref()
            .map(|t| format!(" [{t}]"))
            .unwrap_or_default();
        format!("HCCL {}{words} from {}", Self::dotted(self.version), self.path)
    }

    /// A C string of the library, if it gave one.
    fn text(pointer: *const c_char) -> Option<String> {
        if pointer.is_null() {
            return None;
        }
        // SAFETY: the header says that these are null-terminated and belong to the library.
        let text = unsafe { CStr::from_ptr(pointer) }
            .to_string_lossy()
            .trim()
            .to_string();
        (!text.is_empty()).then_some(text)
    }

    fn words(&self, code: Code, detail: Option<String>) -> String {
        // SAFETY: takes a number.
        let name = Self::text(unsafe { (self.table.hcclGetErrorString)(code) })
            .unwrap_or_else(|| "no description".to_string());
        detail.map_or(name.clone(), |d| format!("{name}: {d}"))
    }

    fn kind(code: Code) -> ErrorKind {
        if CONNECTION_LOST.contains(&code) {
            ErrorKind::PeerLost
        } else {
            ErrorKind::Backend
        }
    }

    fn check(&self, function: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: no arguments; the text is this thread's.
        let detail = self
            .table
            .hcclGetLastErrorMessage
            .and_then(|f| Self::text(unsafe { f() }));
        Err(Error::new(
            Self::kind(code),
            format!("{function} failed: {}", self.words(code, detail)),
        )
        .with_code(i64::from(code)))
    }

    /// A new id; this process then hosts what the other ranks meet at.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId {
            internal: [0; ID_BYTES],
            length: 0,
        };
        // SAFETY: a pointer to a live id.
        let code = unsafe { (self.table.hcclGetUniqueId)(&raw mut id) };
        self.check("hcclGetUniqueId", code).map(|()| id)
    }

    /// Makes a communicator; blocks until all ranks are there, possibly for ever.
    pub(crate) fn init_rank(&self, id: UniqueId, world: u32, rank: u32) -> Result<CommHandle> {
        let mut comm: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pointer to a live handle; the id is passed by value as in the header.
        let code = unsafe { (self.table.hcclCommInitRank)(&raw mut comm, world as c_int, id, rank as c_int) };
        self.check("hcclCommInitRank", code)?;
        if comm.is_null() {
            return Err(Error::new(
                ErrorKind::Backend,
                "hcclCommInitRank gave no communicator",
            ));
        }
        let comm = CommHandle(comm as usize);
        self.is_right(comm, world, rank).inspect_err(|_| {
            if let Err(error) = self.abort(comm) {
                tracing::warn!(%error, "a communicator that is not right was not aborted");
            }
        })?;
        Ok(comm)
    }

    /// The communicator must have the rank and the size that were asked for.
    fn is_right(&self, comm: CommHandle, world: u32, rank: u32) -> Result<()> {
        let (mut count, mut own) = (0, 0);
        // SAFETY: a live communicator and pointers to live ints.
        let code = unsafe { (self.table.hcclCommCount)(comm.pointer(), &raw mut count) };
        self.check("hcclCommCount", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.table.hcclCommUserRank)(comm.pointer(), &raw mut own) };
        self.check("hcclCommUserRank", code)?;
        if (i64::from(count), i64::from(own)) != (i64::from(world), i64::from(rank)) {
            return Err(Error::new(
                ErrorKind::Backend,
                format!("asked for rank {rank} of {world}, the communicator is rank {own} of {count}"),
            ));
        }
        Ok(())
    }

    /// Ends a communicator in good order. May block until its work is done.
    pub(crate) fn destroy(&self, comm: CommHandle) -> Result<()> {
        if let Some(finalize) = self.table.hcclCommFinalize {
            // SAFETY: a live communicator.
            self.check("hcclCommFinalize", unsafe { finalize(comm.pointer()) })?;
        }
        // SAFETY: a live communicator, used here for the last time.
        self.check("hcclCommDestroy", unsafe {
            (self.table.hcclCommDestroy)(comm.pointer())
        })
    }

    /// Ends a communicator and what is running on it. May block for ever: call it from a thread that can be given up.
    pub(crate) fn abort(&self, comm: CommHandle) -> Result<()> {
        // SAFETY: a live communicator, used here for the last time.
        self.check("hcclCommAbort", unsafe {
            (self.table.hcclCommAbort)(comm.pointer())
        })
    }

    /// The communicator's asynchronous error, if it has one.
    pub(crate) fn async_error(&self, comm: CommHandle) -> Option<Error> {
        let mut error = SUCCESS;
        // SAFETY: a live communicator and a pointer to a live int.
        let code = unsafe { (self.table.hcclCommGetAsyncError)(comm.pointer(), &raw mut error) };
        if let Err(e) = self.check("hcclCommGetAsyncError", code) {
            return Some(e);
        }
        if error == SUCCESS {
            return None;
        }
        let detail = self
            .table
            .hcclCommGetAsyncErrorMessage
            // SAFETY: a live communicator.
            .and_then(|f| Self::text(unsafe { f(comm.pointer()) }));
        let text = format!(
            "the communicator reports an asynchronous error: {}",
            self.words(error, detail)
        );
        Some(Error::new(Self::kind(error), text).with_code(i64::from(error)))
    }

    /// Runs `calls` as one group, which is closed whatever happens in it; the first error counts.
    pub(crate) fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: no arguments; groups belong to the calling thread.
        self.check("hcclGroupStart", unsafe { (self.table.hcclGroupStart)() })?;
        let called = calls();
        // SAFETY: as above.
        let ended = self.check("hcclGroupEnd", unsafe { (self.table.hcclGroupEnd)() });
        called.and(ended)
    }
}

/// Declares the calls that enqueue work: what they take besides the communicator and the stream, and how C takes it.
macro_rules! calls {
    ($($(#[$m:meta])* $f:ident($($a:ident: $t:ty),*) = $api:ident($($c:expr),*);)*) => {
        impl Hccl {
            $(
                $(#[$m])*
                pub(crate) fn $f(&self, to: Target, $($a: $t),*) -> Result<()> {
                    let call = self.table.$api;
                    // SAFETY: the communicator is live (`crate::issue`); the engine keeps the spans alive until the stream has passed
                    // them, and their sizes were validated before.
                    let code = unsafe { call($($c,)* to.comm.pointer(), to.stream.pointer()) };
                    self.check(stringify!($api), code)
                }
            )*
        }
    };
}

calls! {
    /// Enqueues an all-reduce in place.
    all_reduce(data: Span, op: ReduceOp) =
        hcclAllReduce(data.pointer(), data.pointer(), data.count, dtype_code(data.dtype)?, reduction_code(op)?);
    /// Enqueues a reduce of `data`; `result` is where the root wants it, null elsewhere, which the header allows.
    reduce(data: Span, result: Option<Span>, op: ReduceOp, root: u32) =
        hcclReduce(data.pointer(), pointer_of(result), data.count, dtype_code(data.dtype)?, reduction_code(op)?, root as c_int);
    /// Enqueues a broadcast in place.
    broadcast(data: Span, root: u32) =
        hcclBroadcast(data.pointer(), data.pointer(), data.count, dtype_code(data.dtype)?, root as c_int);
    /// Enqueues a reduce-scatter of `input` (world times `output`).
    reduce_scatter(input: Span, output: Span, op: ReduceOp) =
        hcclReduceScatter(input.pointer(), output.pointer(), output.count, dtype_code(input.dtype)?, reduction_code(op)?);
    /// Enqueues an all-gather of `input` into `output` (world times `input`).
    all_gather(input: Span, output: Span) =
        hcclAllGather(input.pointer(), output.pointer(), input.count, dtype_code(input.dtype)?);
    /// Enqueues an even all-to-all of two buffers of one size. The library counts whole buffers.
    all_to_all(input: Span, output: Span) =
        hcclAlltoAll(input.pointer(), output.pointer(), input.count, dtype_code(input.dtype)?);
    /// Enqueues a send.
    send(data: Span, peer: u32) = hcclSend(data.pointer(), data.count, dtype_code(data.dtype)?, peer as c_int);
    /// Enqueues a receive.
    receive(data: Span, peer: u32) = hcclRecv(data.pointer(), data.count, dtype_code(data.dtype)?, peer as c_int);
}

fn pointer_of(span: Option<Span>) -> *mut c_void {
    span.map_or(std::ptr::null_mut(), Span::pointer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_hccls_and_not_nccls() {
        assert_eq!(reduction_code(ReduceOp::Min).unwrap(), 2);
        assert_eq!(reduction_code(ReduceOp::Max).unwrap(), 3);
        assert!(reduction_code(ReduceOp::Avg).is_err() && reduction_code(ReduceOp::Product).is_err());
        assert_eq!(dtype_code(DType::BF16).unwrap(), 9);
        assert!(dtype_code(DType::I64).is_err());
        assert_eq!(size_of::<UniqueId>(), 1032);
        assert_eq!(Hccl::dotted(2604), "2.6.4");
    }

    #[test]
    fn an_id_from_the_store_is_checked_before_it_is_used() {
        let id = UniqueId::from_bytes(b"meet here").unwrap();
        assert_eq!(id.to_bytes(), b"meet here");
        assert!(UniqueId::from_bytes(&[0; 1024]).is_ok());
        for bad in [0, 1025] {
            let e = UniqueId::from_bytes(&vec![1; bad]).err().unwrap();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        }
    }
}
