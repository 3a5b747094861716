//! oneCCL's calls over byte slices, with sizes checked and errors typed. Every call blocks until it is done, for ever if a
//! peer is gone: only threads that may be given up call them.

use std::ffi::c_void;
use std::ptr::null_mut;

use ftcore::{DType, Error, ErrorKind, Result};
use oneccl_sys::{DataType, Library, RedOp, ResultCode, UniqueId};

use super::exit::{self, Call};

/// A communicator. Not destroyed when dropped: that would wait for the peers (see [`destroy`](Self::destroy)).
#[derive(Debug)]
pub(crate) struct Comm {
    pub(super) library: &'static Library,
    pub(super) raw: oneccl_sys::Comm,
    /// What CommCount and CommUserRank say is wrong after a split: these are our own numbers.
    rank: u32,
    world: u32,
}

// SAFETY: INV-12 the handle is a pointer to an object that oneCCL guards itself; who may call what at the same time is the
// engine's business (one thread for collectives, one per peer and direction for messages).
unsafe impl Send for Comm {}
// SAFETY: INV-12 as above.
unsafe impl Sync for Comm {}

/// oneCCL's name for a dtype that it has.
pub(crate) fn native(dtype: DType) -> Option<DataType> {
    Some(match dtype {
        DType::F64 => DataType::F64,
        DType::F32 => DataType::F32,
        DType::F16 => DataType::F16,
        DType::BF16 => DataType::BF16,
        DType::I64 => DataType::I64,
        DType::I32 => DataType::I32,
        DType::I8 => DataType::I8,
        DType::U64 => DataType::U64,
        DType::U32 => DataType::U32,
        DType::U8 => DataType::U8,
        _ => return None,
    })
}

/// How bytes of `dtype` are moved: as that type where oneCCL has it, else as bytes. With the number of elements.
pub(super) fn moved(dtype: DType, bytes: usize) -> (DataType, usize) {
    match native(dtype) {
        Some(d) => (d, bytes / dtype.size()),
        None => (DataType::U8, bytes),
    }
}

pub(super) fn sizes(ok: bool, what: &str) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(Error::new(
            ErrorKind::Internal,
            format!("{what}: sizes do not fit"),
        ))
    }
}

/// A new id, made by one rank for all.
pub(crate) fn unique_id(library: &'static Library) -> Result<UniqueId> {
    let mut id = UniqueId::zeroed();
    exit::come_first(exit::After::Opening);
    let _call = Call::enter();
    // SAFETY: INV-12 the out-parameter is a live id.
    let code = unsafe { (library.functions.get_unique_id)(&raw mut id) };
    exit::come_first(exit::After::Transport);
    outcome(library, null_mut(), "onecclGetUniqueId", code)?;
    Ok(id)
}

fn outcome(library: &Library, comm: oneccl_sys::Comm, call: &str, code: ResultCode) -> Result<()> {
    if code == ResultCode::SUCCESS {
        return Ok(());
    }
    // SAFETY: INV-12 null, or the communicator of the call that has just returned.
    let words = unsafe { library.describe(code, comm) };
    let text = format!("{call} failed: {words}");
    Err(Error::new(ErrorKind::Backend, text).with_code(code.0.into()))
}

pub(super) fn int(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl Comm {
    /// Joins the communicator `id` as `rank`. Blocks until all ranks have.
    pub(crate) fn init(library: &'static Library, id: UniqueId, rank: u32, world: u32) -> Result<Self> {
        let mut raw = null_mut();
        let _call = Call::enter();
        // SAFETY: INV-12 the id comes from onecclGetUniqueId of a peer with the same version (exchanged before).
        let code = unsafe { (library.functions.comm_init_rank)(&raw mut raw, world as usize, id, int(rank)) };
        outcome(library, null_mut(), "onecclCommInitRank", code)?;
        exit::come_first(exit::After::Communicator);
        if raw.is_null() {
            return Err(Error::new(
                ErrorKind::Backend,
                "onecclCommInitRank succeeded without a communicator",
            ));
        }
        Ok(Self {
            library,
            raw,
            rank,
            world,
        })
    }

    /// The communicator of the ranks with the same `color`, in which this one is `rank` of `world`; `None` without a colour.
    pub(crate) fn split(&self, color: Option<u32>, key: u32, rank: u32, world: u32) -> Result<Option<Self>> {
        let split = self
            .library
            .functions
            .comm_split
            .ok_or_else(|| self.lacks("onecclCommSplit"))?;
        let mut raw = null_mut();
        let config = oneccl_sys::Config::new(self.library.version);
        let _call = Call::enter();
        // SAFETY: INV-12 a live communicator, an out-parameter and a configuration of this version.
        let code = unsafe {
            split(
                self.raw,
                color.map_or(-1, int),
                int(key),
                &raw mut raw,
                &raw const config,
            )
        };
        self.outcome("onecclCommSplit", code)?;
        if color.is_some() == raw.is_null() {
            return Err(Error::new(
                ErrorKind::Backend,
                "onecclCommSplit gave a communicator to a rank without a colour, or none to one with",
            ));
        }
        Ok(color.map(|_| Self {
            library: self.library,
            raw,
            rank,
            world,
        }))
    }

    /// Ends the communicator. Blocks until all its ranks do the same.
    pub(crate) fn destroy(self) -> Result<()> {
        let _call = Call::enter();
        // SAFETY: INV-12 self is the only handle, and nobody is in a call (the engine's lanes have ended).
        let code = unsafe { (self.library.functions.comm_destroy)(self.raw) };
        outcome(self.library, null_mut(), "onecclCommDestroy", code)
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    pub(crate) fn world(&self) -> u32 {
        self.world
    }

    /// True if the library exchanges parts of different lengths by itself.
    pub(crate) fn has_all_to_all_v(&self) -> bool {
        self.library.functions.all_to_all_v.is_some()
    }

    pub(super) fn outcome(&self, call: &str, code: ResultCode) -> Result<()> {
        outcome(self.library, self.raw, call, code)
    }

    pub(super) fn lacks(&self, call: &str) -> Error {
        Error::unsupported(format!("oneCCL {} has no {call}", self.library.version))
    }

    pub(super) fn reducible(dtype: DType) -> Result<DataType> {
        native(dtype).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("{dtype} reached oneCCL without being converted"),
            )
        })
    }

    /// Reduces in place on all ranks.
    pub(crate) fn all_reduce(&self, data: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        let at: *mut c_void = data.as_mut_ptr().cast();
        let count = data.len() / dtype.size();
        let _call = Call::enter();
        // SAFETY: INV-8 `data` is borrowed for the whole call and holds `count` elements; in place is allowed.
        let code =
            unsafe { (self.library.functions.all_reduce)(at, at, count, kind, op, self.raw, null_mut()) };
        self.outcome("onecclAllReduce", code)
    }

    /// Reduces `from` of all ranks into `into` on the root; `into` is not written elsewhere, but has the same length.
    pub(crate) fn reduce(
        &self,
        from: &[u8],
        into: &mut [u8],
        dtype: DType,
        op: RedOp,
        root: u32,
    ) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        sizes(from.len() == into.len(), "reduce")?;
        let count = from.len() / dtype.size();
        let _call = Call::enter();
        // SAFETY: INV-8 both are borrowed for the whole call and hold `count` elements.
        let code = unsafe {
            (self.library.functions.reduce)(
                from.as_ptr().cast(),
                into.as_mut_ptr().cast(),
                count,
                kind,
                op,
                int(root),
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclReduce", code)
    }

    /// Every rank's `data` becomes the root's.
    pub(crate) fn broadcast(&self, data: &mut [u8], dtype: DType, root: u32) -> Result<()> {
        let (kind, count) = moved(dtype, data.len());
        let at = data.as_mut_ptr();
        let _call = Call::enter();
        // SAFETY: INV-8 `data` is borrowed for the whole call and holds `count` elements; in place is allowed.
        let code = unsafe {
            (self.library.functions.broadcast)(
                at.cast_const().cast(),
                at.cast(),
                count,
                kind,
                int(root),
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclBroadcast", code)
    }

    /// `into` becomes the `from` of all ranks, one after the other.
    pub(crate) fn all_gather(&self, from: &[u8], into: &mut [u8], dtype: DType) -> Result<()> {
        sizes(from.len() * self.world as usize == into.len(), "all_gather")?;
        let (kind, count) = moved(dtype, from.len());
        let _call = Call::enter();
        // SAFETY: INV-8 both are borrowed for the whole call; `into` holds world times `count` elements (checked).
        let code = unsafe {
            (self.library.functions.all_gather)(
                from.as_ptr().cast(),
                into.as_mut_ptr().cast(),
                count,
                kind,
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclAllGather", code)
    }

    /// `into` becomes this rank's part of the reduction of `from`.
    pub(crate) fn reduce_scatter(&self, from: &[u8], into: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        sizes(into.len() * self.world as usize == from.len(), "reduce_scatter")?;
        let count = into.len() / dtype.size();
        let _call = Call::enter();
        // SAFETY: INV-8 both are borrowed for the whole call; `from` holds world times `count` elements (checked).
        let code = unsafe {
            (self.library.functions.reduce_scatter)(
                from.as_ptr().cast(),
                into.as_mut_ptr().cast(),
                count,
                kind,
                op,
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclReduceScatter", code)
    }

    /// Part r of `from` goes to rank r, part r of `into` comes from it; all parts have one length.
    pub(crate) fn all_to_all(&self, from: &[u8], into: &mut [u8], dtype: DType) -> Result<()> {
        let call = self
            .library
            .functions
            .all_to_all
            .ok_or_else(|| self.lacks("onecclAllToAll"))?;
        let world = self.world as usize;
        sizes(
            from.len() == into.len() && from.len().is_multiple_of(world),
            "all_to_all",
        )?;
        let (kind, count) = moved(dtype, from.len() / world);
        let _call = Call::enter();
        // SAFETY: INV-8 both are borrowed for the whole call and hold world times `count` elements (checked).
        let code = unsafe {
            call(
                from.as_ptr().cast(),
                into.as_mut_ptr().cast(),
                count,
                kind,
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclAllToAll", code)
    }

    /// As [`all_to_all`](Self::all_to_all) with the lengths of the parts in bytes.
    pub(crate) fn all_to_all_v(
        &self,
        from: &[u8],
        sent: &[usize],
        into: &mut [u8],
        received: &[usize],
        dtype: DType,
    ) -> Result<()> {
        let call = self
            .library
            .functions
            .all_to_all_v
            .ok_or_else(|| self.lacks("onecclAllToAllV"))?;
        let world = self.world as usize;
        sizes(
            sent.len() == world
                && received.len() == world
                && sent.iter().sum::<usize>() == from.len()
                && received.iter().sum::<usize>() == into.len(),
            "all_to_all",
        )?;
        let counts = |bytes: &[usize]| bytes.iter().map(|&b| moved(dtype, b).1).collect::<Vec<_>>();
        let (sent, received) = (counts(sent), counts(received));
        let _call = Call::enter();
        // SAFETY: INV-8 all four are borrowed for the whole call, and the counts add up to the lengths (checked).
        let code = unsafe {
            call(
                from.as_ptr().cast(),
                sent.as_ptr(),
                into.as_mut_ptr().cast(),
                received.as_ptr(),
                moved(dtype, 0).0,
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclAllToAllV", code)
    }

    /// Sends to `peer`; returns when the memory may be reused.
    pub(crate) fn send(&self, data: &[u8], dtype: DType, peer: u32) -> Result<()> {
        let call = self
            .library
            .functions
            .send
            .ok_or_else(|| self.lacks("onecclSend"))?;
        let (kind, count) = moved(dtype, data.len());
        let _call = Call::enter();
        // SAFETY: INV-8 `data` is borrowed for the whole call and holds `count` elements.
        let code = unsafe { call(data.as_ptr().cast(), count, kind, int(peer), self.raw, null_mut()) };
        self.outcome("onecclSend", code)
    }

    /// Receives as many bytes as `peer` sends.
    pub(crate) fn recv(&self, data: &mut [u8], dtype: DType, peer: u32) -> Result<()> {
        let call = self
            .library
            .functions
            .recv
            .ok_or_else(|| self.lacks("onecclRecv"))?;
        let (kind, count) = moved(dtype, data.len());
        let _call = Call::enter();
        // SAFETY: INV-8 `data` is borrowed for the whole call and holds `count` elements.
        let code = unsafe {
            call(
                data.as_mut_ptr().cast(),
                count,
                kind,
                int(peer),
                self.raw,
                null_mut(),
            )
        };
        self.outcome("onecclRecv", code)
    }
}
