//! oneCCL's calls over spans of memory, with sizes checked and errors typed. Without a queue they are on host memory, and every call blocks
//! until it is done, for ever if a peer is gone: only threads that may be given up call them.
//!
//! With a queue they are on a device. On SYCL's CPU device every call blocks until all ranks have made it; on a GPU it may only enqueue. Neither
//! is relied on above. What is waited for here is the host task that every call leaves on the queue: what is enqueued behind one that has
//! not run yet is handed on by SYCL's own thread, and the event of such a command was seen to be complete, to a poll and to a wait, just
//! before the command ran (about once in half a million copies; `fixtures/c/sycl_early_event.c` shows it without a line of ours): a copy
//! to the host then gave old values and wrote to memory that its owner had freed (INV-8). So nothing is ever enqueued behind one.

use std::ffi::c_void;
use std::ptr::null_mut;

use ftcore::{DType, Error, ErrorKind, Result};
use oneccl_sys::{DataType, Library, RedOp, ResultCode, UniqueId};

use super::exit::{self, Call};
use super::sycl::{Queue, Span};

/// A communicator. Not destroyed when dropped: that would wait for the peers (see [`destroy`](Self::destroy)).
#[derive(Debug)]
pub(crate) struct Comm {
    library: &'static Library,
    raw: oneccl_sys::Comm,
    /// What CommCount and CommUserRank say is wrong after a split: these are our own numbers.
    rank: u32,
    world: u32,
}

// SAFETY: the handle is a pointer to an object that oneCCL guards itself; who may call what at the same time is the
// engine's business (one thread for collectives, one per peer and direction for messages).
unsafe impl Send for Comm {}
// SAFETY: as above.
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
fn moved(dtype: DType, bytes: usize) -> (DataType, usize) {
    match native(dtype) {
        Some(d) => (d, bytes / dtype.size()),
        None => (DataType::U8, bytes),
    }
}

fn sizes(ok: bool, what: &str) -> Result<()> {
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
    // SAFETY: the out-parameter is a live id.
    let code = unsafe { (library.functions.get_unique_id)(&raw mut id) };
    exit::come_first(exit::After::Transport);
    outcome(library, null_mut(), "onecclGetUniqueId", code)?;
    Ok(id)
}

fn outcome(library: &Library, comm: oneccl_sys::Comm, call: &str, code: ResultCode) -> Result<()> {
    if code == ResultCode::SUCCESS {
        return Ok(());
    }
    // SAFETY: null, or the communicator of the call that has just returned.
    let words = unsafe { library.describe(code, comm) };
    let text = format!("{call} failed: {words}");
    Err(Error::new(ErrorKind::Backend, text).with_code(code.0.into()))
}

fn int(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl Comm {
    /// Joins the communicator `id` as `rank`. Blocks until all ranks have.
    pub(crate) fn init(library: &'static Library, id: UniqueId, rank: u32, world: u32) -> Result<Self> {
        let mut raw = null_mut();
        let _call = Call::enter();
        // SAFETY: the id comes from onecclGetUniqueId of a peer with the same version (exchanged before).
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
        // SAFETY: a live communicator, an out-parameter and a configuration of this version.
        let code = unsafe {
            split(
                self.raw,
                color.map_or(-1, int),
                int(key),
                &raw mut raw,
                &raw const config,
            )
        };
        outcome(self.library, self.raw, "onecclCommSplit", code)?;
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
        // SAFETY: self is the only handle, and no call is under way (the engine releases its driver after the last).
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

    fn lacks(&self, call: &str) -> Error {
        Error::unsupported(format!("oneCCL {} has no {call}", self.library.version))
    }

    fn reducible(dtype: DType) -> Result<DataType> {
        native(dtype).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("{dtype} reached oneCCL without being converted"),
            )
        })
    }

    fn parts_fit(&self, whole: Span, part: Span, what: &str) -> Result<()> {
        sizes(part.bytes() * self.world as usize == whole.bytes(), what)
    }

    /// Makes a call on what is C's name for the queue, and sees it done.
    fn call(&self, on: Option<&Queue>, name: &str, f: impl FnOnce(*mut c_void) -> ResultCode) -> Result<()> {
        let _call = Call::enter();
        let code = f(on.map_or(null_mut(), Queue::pointer));
        outcome(self.library, self.raw, name, code)?;
        on.map_or(Ok(()), Queue::settle)
    }

    /// Reduces in place on all ranks.
    pub(crate) fn all_reduce(&self, on: Option<&Queue>, data: Span, dtype: DType, op: RedOp) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        let (at, count) = (data.pointer(), data.bytes() / dtype.size());
        self.call(on, "onecclAllReduce", |queue| {
            // SAFETY: the span is alive until the call is done (see Span) and holds `count` elements; in place is allowed.
            unsafe { (self.library.functions.all_reduce)(at, at, count, kind, op, self.raw, queue) }
        })
    }

    /// Reduces `from` of all ranks into `into` on the root; `into` is not written elsewhere, but has the same length.
    pub(crate) fn reduce(
        &self,
        on: Option<&Queue>,
        from: Span,
        into: Span,
        dtype: DType,
        op: RedOp,
        root: u32,
    ) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        sizes(from.bytes() == into.bytes(), "reduce")?;
        let (root, count) = (int(root), from.bytes() / dtype.size());
        let (from, into) = (from.pointer().cast_const(), into.pointer());
        self.call(on, "onecclReduce", |queue| {
            // SAFETY: both spans are alive until the call is done (see Span) and hold `count` elements (checked).
            unsafe { (self.library.functions.reduce)(from, into, count, kind, op, root, self.raw, queue) }
        })
    }

    /// Every rank's `data` becomes the root's.
    pub(crate) fn broadcast(&self, on: Option<&Queue>, data: Span, dtype: DType, root: u32) -> Result<()> {
        let (kind, count) = moved(dtype, data.bytes());
        let (at, root) = (data.pointer(), int(root));
        self.call(on, "onecclBroadcast", |queue| {
            // SAFETY: the span is alive until the call is done (see Span) and holds `count` elements; in place is allowed.
            unsafe {
                (self.library.functions.broadcast)(at.cast_const(), at, count, kind, root, self.raw, queue)
            }
        })
    }

    /// `into` becomes the `from` of all ranks, one after the other.
    pub(crate) fn all_gather(&self, on: Option<&Queue>, from: Span, into: Span, dtype: DType) -> Result<()> {
        self.parts_fit(into, from, "all_gather")?;
        let (kind, count) = moved(dtype, from.bytes());
        let (from, into) = (from.pointer().cast_const(), into.pointer());
        self.call(on, "onecclAllGather", |queue| {
            // SAFETY: both spans are alive until the call is done (see Span); `into` holds world times `count` (checked).
            unsafe { (self.library.functions.all_gather)(from, into, count, kind, self.raw, queue) }
        })
    }

    /// `into` becomes this rank's part of the reduction of `from`.
    pub(crate) fn reduce_scatter(
        &self,
        on: Option<&Queue>,
        from: Span,
        into: Span,
        dtype: DType,
        op: RedOp,
    ) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        self.parts_fit(from, into, "reduce_scatter")?;
        let count = into.bytes() / dtype.size();
        let (from, into) = (from.pointer().cast_const(), into.pointer());
        self.call(on, "onecclReduceScatter", |queue| {
            // SAFETY: both spans are alive until the call is done (see Span); `from` holds world times `count` (checked).
            unsafe { (self.library.functions.reduce_scatter)(from, into, count, kind, op, self.raw, queue) }
        })
    }

    /// Part r of `from` goes to rank r, part r of `into` comes from it; all parts have one length.
    pub(crate) fn all_to_all(&self, on: Option<&Queue>, from: Span, into: Span, dtype: DType) -> Result<()> {
        let name = "onecclAllToAll";
        let call = self
            .library
            .functions
            .all_to_all
            .ok_or_else(|| self.lacks(name))?;
        let world = self.world as usize;
        let fits = from.bytes() == into.bytes() && from.bytes().is_multiple_of(world);
        sizes(fits, "all_to_all")?;
        let (kind, count) = moved(dtype, from.bytes() / world);
        let (from, into) = (from.pointer().cast_const(), into.pointer());
        self.call(on, name, |queue| {
            // SAFETY: both spans are alive until the call is done (see Span) and hold world times `count` (checked).
            unsafe { call(from, into, count, kind, self.raw, queue) }
        })
    }

    /// As [`all_to_all`](Self::all_to_all) on host memory, with the lengths of the parts in bytes.
    pub(crate) fn all_to_all_v(
        &self,
        from: Span,
        sent: &[usize],
        into: Span,
        received: &[usize],
        dtype: DType,
    ) -> Result<()> {
        let name = "onecclAllToAllV";
        let call = self
            .library
            .functions
            .all_to_all_v
            .ok_or_else(|| self.lacks(name))?;
        let world = self.world as usize;
        let fit = |parts: &[usize], whole: Span| {
            parts.len() == world && parts.iter().sum::<usize>() == whole.bytes()
        };
        sizes(fit(sent, from) && fit(received, into), "all_to_all")?;
        let counts = |bytes: &[usize]| bytes.iter().map(|&b| moved(dtype, b).1).collect::<Vec<_>>();
        let (sent, received) = (counts(sent), counts(received));
        let (from, into, kind) = (from.pointer().cast_const(), into.pointer(), moved(dtype, 0).0);
        self.call(None, name, |queue| {
            // SAFETY: all four are alive until the call is done (see Span), and the counts add up to the lengths (checked).
            unsafe {
                call(
                    from,
                    sent.as_ptr(),
                    into,
                    received.as_ptr(),
                    kind,
                    self.raw,
                    queue,
                )
            }
        })
    }

    /// Sends to `peer`; the memory may be reused when it is done.
    pub(crate) fn send(&self, on: Option<&Queue>, data: Span, dtype: DType, peer: u32) -> Result<()> {
        let name = "onecclSend";
        let call = self.library.functions.send.ok_or_else(|| self.lacks(name))?;
        let (kind, count) = moved(dtype, data.bytes());
        let (at, peer) = (data.pointer().cast_const(), int(peer));
        self.call(on, name, |queue| {
            // SAFETY: the span is alive until the call is done (see Span) and holds `count` elements.
            unsafe { call(at, count, kind, peer, self.raw, queue) }
        })
    }

    /// Receives as many bytes as `peer` sends.
    pub(crate) fn recv(&self, on: Option<&Queue>, data: Span, dtype: DType, peer: u32) -> Result<()> {
        let name = "onecclRecv";
        let call = self.library.functions.recv.ok_or_else(|| self.lacks(name))?;
        let (kind, count) = moved(dtype, data.bytes());
        let (at, peer) = (data.pointer(), int(peer));
        self.call(on, name, |queue| {
            // SAFETY: the span is alive until the call is done (see Span) and holds `count` elements.
            unsafe { call(at, count, kind, peer, self.raw, queue) }
        })
    }
}
