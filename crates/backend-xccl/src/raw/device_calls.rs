//! oneCCL's calls over device memory and a queue. As those over slices (`comm`), but the caller keeps the memory until the queue has
//! done the work.
//!
//! On SYCL's CPU device every call blocks until all ranks have made it; on a GPU it may only enqueue. Nobody above relies on
//! either. What is waited for here is the host task that every call leaves on the queue: see [`Comm::outcome_on`].

use ftcore::{DType, Result};
use oneccl_sys::{RedOp, ResultCode};

use super::comm::{Comm, int, moved, sizes};
use super::exit::Call;
use super::sycl::{Queue, Span};

impl Comm {
    /// What a call has come to, once the queue has nothing left to do.
    ///
    /// Every collective leaves a host task on the queue. What is enqueued behind one that has not run yet is handed on by SYCL's own
    /// thread, and the event of such a command was seen to be complete, to a poll and to a wait, just before the command ran
    /// (about once in half a million copies; `fixtures/c/sycl_early_event.c` shows it without a line of ours): a copy to the
    /// host then gave old values and wrote to memory that its owner had freed (INV-8). So nothing is ever enqueued behind one.
    fn outcome_on(&self, queue: &Queue, call: &str, code: ResultCode) -> Result<()> {
        self.outcome(call, code)?;
        queue.settle()
    }

    /// Reduces in place on all ranks.
    pub(crate) fn all_reduce_on(&self, queue: &Queue, data: Span, dtype: DType, op: RedOp) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        let count = data.bytes() / dtype.size();
        let _call = Call::enter();
        // SAFETY: INV-8 the span is alive until the queue is done (see Span) and holds `count` elements; in place is allowed.
        let code = unsafe {
            (self.library.functions.all_reduce)(
                data.pointer(),
                data.pointer(),
                count,
                kind,
                op,
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclAllReduce", code)
    }

    /// Reduces `from` of all ranks into `into` on the root; `into` has the same length everywhere.
    pub(crate) fn reduce_on(
        &self,
        queue: &Queue,
        from: Span,
        into: Span,
        dtype: DType,
        op: RedOp,
        root: u32,
    ) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        sizes(from.bytes() == into.bytes(), "reduce")?;
        let count = from.bytes() / dtype.size();
        let _call = Call::enter();
        // SAFETY: INV-8 both spans are alive until the queue is done (see Span) and hold `count` elements.
        let code = unsafe {
            (self.library.functions.reduce)(
                from.pointer().cast_const(),
                into.pointer(),
                count,
                kind,
                op,
                int(root),
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclReduce", code)
    }

    /// `data` becomes the root's.
    pub(crate) fn broadcast_on(&self, queue: &Queue, data: Span, dtype: DType, root: u32) -> Result<()> {
        let (kind, count) = moved(dtype, data.bytes());
        let _call = Call::enter();
        // SAFETY: INV-8 the span is alive until the queue is done (see Span) and holds `count` elements; in place is allowed.
        let code = unsafe {
            (self.library.functions.broadcast)(
                data.pointer().cast_const(),
                data.pointer(),
                count,
                kind,
                int(root),
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclBroadcast", code)
    }

    /// `into` becomes the `from` of all ranks, one after the other.
    pub(crate) fn all_gather_on(&self, queue: &Queue, from: Span, into: Span, dtype: DType) -> Result<()> {
        sizes(from.bytes() * self.world() as usize == into.bytes(), "all_gather")?;
        let (kind, count) = moved(dtype, from.bytes());
        let _call = Call::enter();
        // SAFETY: INV-8 both spans are alive until the queue is done (see Span); `into` holds world times `count` (checked).
        let code = unsafe {
            (self.library.functions.all_gather)(
                from.pointer().cast_const(),
                into.pointer(),
                count,
                kind,
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclAllGather", code)
    }

    /// `into` becomes this rank's part of the reduction of `from`.
    pub(crate) fn reduce_scatter_on(
        &self,
        queue: &Queue,
        from: Span,
        into: Span,
        dtype: DType,
        op: RedOp,
    ) -> Result<()> {
        let kind = Self::reducible(dtype)?;
        sizes(
            into.bytes() * self.world() as usize == from.bytes(),
            "reduce_scatter",
        )?;
        let count = into.bytes() / dtype.size();
        let _call = Call::enter();
        // SAFETY: INV-8 both spans are alive until the queue is done (see Span); `from` holds world times `count` (checked).
        let code = unsafe {
            (self.library.functions.reduce_scatter)(
                from.pointer().cast_const(),
                into.pointer(),
                count,
                kind,
                op,
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclReduceScatter", code)
    }

    /// Part r of `from` goes to rank r, part r of `into` comes from it; all parts have one length.
    pub(crate) fn all_to_all_on(&self, queue: &Queue, from: Span, into: Span, dtype: DType) -> Result<()> {
        let call = self
            .library
            .functions
            .all_to_all
            .ok_or_else(|| self.lacks("onecclAllToAll"))?;
        let world = self.world() as usize;
        sizes(
            from.bytes() == into.bytes() && from.bytes().is_multiple_of(world),
            "all_to_all",
        )?;
        let (kind, count) = moved(dtype, from.bytes() / world);
        let _call = Call::enter();
        // SAFETY: INV-8 both spans are alive until the queue is done (see Span) and hold world times `count` (checked).
        let code = unsafe {
            call(
                from.pointer().cast_const(),
                into.pointer(),
                count,
                kind,
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclAllToAll", code)
    }

    /// Sends to `peer`.
    pub(crate) fn send_on(&self, queue: &Queue, data: Span, dtype: DType, peer: u32) -> Result<()> {
        let call = self
            .library
            .functions
            .send
            .ok_or_else(|| self.lacks("onecclSend"))?;
        let (kind, count) = moved(dtype, data.bytes());
        let _call = Call::enter();
        // SAFETY: INV-8 the span is alive until the queue is done (see Span) and holds `count` elements.
        let code = unsafe {
            call(
                data.pointer().cast_const(),
                count,
                kind,
                int(peer),
                self.raw,
                queue.pointer(),
            )
        };
        self.outcome_on(queue, "onecclSend", code)
    }

    /// Receives as many bytes as `peer` sends.
    pub(crate) fn recv_on(&self, queue: &Queue, data: Span, dtype: DType, peer: u32) -> Result<()> {
        let call = self
            .library
            .functions
            .recv
            .ok_or_else(|| self.lacks("onecclRecv"))?;
        let (kind, count) = moved(dtype, data.bytes());
        let _call = Call::enter();
        // SAFETY: INV-8 the span is alive until the queue is done (see Span) and holds `count` elements.
        let code = unsafe { call(data.pointer(), count, kind, int(peer), self.raw, queue.pointer()) };
        self.outcome_on(queue, "onecclRecv", code)
    }
}
