//! An operation on its way into a plugin: the C form of a `Collective`, and what keeps its memory until it is given back.
//!
//! The tensors stay in [`Pending`]. The plugin gets their addresses, one reference (given back by `complete`), and as many
//! more as it retains. Tensors that are still retained when the operation has ended are not handed out but kept, for
//! ever if need be (INV-8).

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ftcore::{Collective, Completer, Completion, Error, ErrorKind, OpKind, ReduceOp, Result, Tensor};

use super::device::{self, Devices};
use super::library::guarded;
use crate::abi::{self, Buffer, FAILED, Growing, NONE, Operation};
use crate::{fault, text};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("shapes cross the plugin ABI as 64-bit numbers without a copy");

/// What belongs to one operation that a plugin has.
pub(super) struct Pending {
    kind: OpKind,
    plugin: &'static str,
    state: Mutex<State>,
    /// References that the plugin took.
    holds: AtomicUsize,
    /// The operation has ended, and what is still held waits in `State::kept`.
    ended: AtomicBool,
    /// For events that the plugin records.
    devices: Option<Devices>,
}

#[derive(Default)]
struct State {
    running: Option<(Option<Completer>, Collective)>,
    kept: Option<Collective>,
    /// What `submit` filled in; closed once the operation has ended.
    handle: Option<abi::WorkHandle>,
}

// SAFETY: INV-8 the work handle's functions may be called from any thread, says the ABI; the rest is Send.
unsafe impl Send for State {}

impl Pending {
    /// Takes the operation in. `completer` is none for a blocking call.
    pub(super) fn new(
        op: Collective,
        completer: Option<Completer>,
        plugin: &'static str,
        devices: Option<Devices>,
    ) -> Self {
        Self {
            kind: op.kind(),
            plugin,
            state: Mutex::new(State {
                running: Some((completer, op)),
                ..State::default()
            }),
            holds: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            devices,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation was refused: everything comes back.
    pub(super) fn refused(&self) -> Option<Collective> {
        self.lock().running.take().map(|(_, op)| op)
    }

    /// The operation has ended: its completer, and its tensors unless the plugin still holds them.
    fn end(&self) -> Option<(Option<Completer>, Option<Vec<Tensor>>)> {
        let mut state = self.lock();
        let (completer, op) = state.running.take()?;
        // In this order: either `release` sees `ended`, or this sees its zero.
        self.ended.store(true, Ordering::SeqCst);
        if self.holds.load(Ordering::SeqCst) == 0 {
            return Some((completer, Some(op.into_tensors())));
        }
        let bytes: usize = op.tensors().iter().map(|t| t.byte_len()).sum();
        tracing::warn!(
            plugin = self.plugin,
            op = self.kind.name(),
            bytes,
            "a plugin still holds the memory of an operation that has ended; it is kept until given back"
        );
        state.kept = Some(op);
        Some((completer, None))
    }

    /// Ends a blocking call.
    pub(super) fn end_blocking(
        &self,
        result: Result<(u32, u32)>,
    ) -> Result<Completion, (Error, Vec<Tensor>)> {
        let tensors = self.end().and_then(|(_, tensors)| tensors);
        match (result, tensors) {
            (Ok((source, contributors)), Some(tensors)) => Ok(Completion {
                tensors,
                source: (source != NONE).then_some(source),
                contributors,
            }),
            (Ok(_), None) => Err((self.still_held(), Vec::new())),
            (Err(error), tensors) => Err((self.named(error), tensors.unwrap_or_default())),
        }
    }

    fn still_held(&self) -> Error {
        self.named(Error::new(
            ErrorKind::Backend,
            format!(
                "plugin {} finished the operation and still holds its memory",
                self.plugin
            ),
        ))
    }

    pub(super) fn named(&self, error: Error) -> Error {
        error.with_op(self.kind.name())
    }

    /// What the plugin is given to report on this operation. Takes a reference, which `complete` gives back.
    pub(super) fn completion(self: &Arc<Self>) -> abi::Completion {
        let mut c = abi::Completion::empty();
        c.ctx = Arc::into_raw(self.clone()).cast_mut().cast();
        c.complete = Some(complete);
        c.recorded = Some(recorded);
        c
    }

    /// Gives back the reference of [`completion`](Self::completion) after a refusal.
    pub(super) fn forget_completion(self: &Arc<Self>) {
        // SAFETY: INV-8 the plugin has refused, so it will not complete: the reference is ours again.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(self)) }
    }

    /// What `submit` filled in. Closed when this is dropped: abort and poll hold a reference while they use it.
    pub(super) fn set_handle(&self, handle: abi::WorkHandle) {
        self.lock().handle = Some(handle);
    }

    /// Aborts this operation alone, if the plugin offers that. False: it does not.
    pub(super) fn abort(&self, reason: &str) -> bool {
        let abort = {
            let state = self.lock();
            let running = state.running.is_some();
            state
                .handle
                .filter(|_| running)
                .and_then(|h| Some((h.ctx, h.abort?)))
        };
        match abort {
            Some((ctx, abort)) => {
                // SAFETY: INV-8 the plugin's own function; the handle is not closed while `self` is borrowed.
                unsafe { abort(ctx, text::lend(reason)) }
                true
            }
            None => false,
        }
    }

    /// Lets the plugin make progress. False once the operation has ended.
    pub(super) fn poll(&self) -> bool {
        let (handle, running) = {
            let state = self.lock();
            (state.handle, state.running.is_some())
        };
        if let (true, Some((ctx, poll))) = (running, handle.and_then(|h| Some((h.ctx, h.poll?)))) {
            // SAFETY: INV-8 the plugin's own function; a polled operation completes on this thread only.
            unsafe { poll(ctx) }
        }
        self.lock().running.is_some()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let handle = self.lock().handle.take();
        if let Some((handle, close)) = handle.and_then(|h| Some((h, h.close?))) {
            // SAFETY: INV-8 once, and nobody else has a reference to `self` any more.
            guarded((), || unsafe { close(handle.ctx) });
        }
    }
}

unsafe extern "C" fn complete(ctx: *mut c_void, outcome: *const abi::Outcome) {
    guarded((), || {
        if ctx.is_null() {
            return;
        }
        // SAFETY: INV-8 the reference that `completion` made, given back here: the ABI says exactly once.
        let pending = unsafe { Arc::from_raw(ctx.cast_const().cast::<Pending>()) };
        // SAFETY: INV-10 the outcome and its fault are readable for the call.
        let result = unsafe { read_outcome(outcome, pending.plugin) };
        let Some((Some(completer), tensors)) = pending.end() else {
            return;
        };
        match (result, tensors) {
            (Ok((source, contributors)), Some(tensors)) => completer.succeed(Completion {
                tensors,
                source: (source != NONE).then_some(source),
                contributors,
            }),
            (Ok(_), None) => completer.fail(pending.still_held(), Vec::new()),
            (Err(error), tensors) => completer.fail(error, tensors.unwrap_or_default()),
        }
    });
}

/// (source, contributors), or why it failed.
///
/// # Safety
/// The outcome keeps to the ABI.
unsafe fn read_outcome(outcome: *const abi::Outcome, plugin: &str) -> Result<(u32, u32)> {
    // SAFETY: INV-10 by the contract.
    let o = unsafe { abi::read(outcome) }.map_err(|e| super::breach(plugin, e))?;
    if o.status == abi::OK {
        return Ok((o.source, o.contributors));
    }
    // SAFETY: INV-10 by the contract.
    let fault = unsafe { abi::read(o.fault) }.map_err(|e| super::breach(plugin, e))?;
    fault::check(FAILED, &fault, plugin).map(|()| (NONE, 0))
}

unsafe extern "C" fn recorded(ctx: *mut c_void, event: *mut c_void) {
    guarded((), || {
        // SAFETY: INV-8 the plugin has not completed yet, so its reference stands.
        let Some(pending) = (unsafe { ctx.cast::<Pending>().as_ref() }) else {
            return;
        };
        let Some(devices) = &pending.devices else {
            return;
        };
        let event = device::event(devices, event);
        if let Some((Some(completer), _)) = &pending.lock().running {
            completer.recorded(event);
        }
    });
}

unsafe extern "C" fn retain(owner: *mut c_void) {
    // SAFETY: INV-8 the plugin has the operation, or another reference.
    unsafe {
        if let Some(pending) = owner.cast::<Pending>().as_ref() {
            pending.holds.fetch_add(1, Ordering::SeqCst);
            Arc::increment_strong_count(owner.cast_const().cast::<Pending>());
        }
    }
}

unsafe extern "C" fn release(owner: *mut c_void) {
    guarded((), || {
        if owner.is_null() {
            return;
        }
        // SAFETY: INV-8 gives back a reference that `retain` took.
        let pending = unsafe { Arc::from_raw(owner.cast_const().cast::<Pending>()) };
        if pending.holds.fetch_sub(1, Ordering::SeqCst) == 1 && pending.ended.load(Ordering::SeqCst) {
            let kept = pending.lock().kept.take();
            // Outside the lock: freeing may call another plugin's code.
            drop(kept);
        }
    });
}

/// The C form of an operation. Holds addresses of the tensors, not the tensors: those must stay alive and where they are.
pub(super) struct Outgoing {
    operation: Operation,
    buffers: Vec<Buffer>,
    children: Vec<Outgoing>,
    child_operations: Vec<Operation>,
    input_splits: Vec<u64>,
    output_splits: Vec<u64>,
}

fn reduce(operation: &mut Operation, op: ReduceOp) {
    operation.reduce = u32::from(op.code());
    if let ReduceOp::PremulSum(factor) = op {
        operation.factor = factor;
    }
}

impl Outgoing {
    pub(super) fn new(op: &Collective) -> Self {
        let mut o = Operation::empty();
        o.kind = u32::from(op.kind().code());
        o.reduce = NONE;
        o.root = NONE;
        o.peer = NONE;
        let mut out = Self {
            operation: o,
            buffers: Vec::new(),
            children: Vec::new(),
            child_operations: Vec::new(),
            input_splits: Vec::new(),
            output_splits: Vec::new(),
        };
        let o = &mut out.operation;
        match op {
            Collective::AllReduce { op, .. } | Collective::ReduceScatterInto { op, .. } => reduce(o, *op),
            Collective::ReduceScatter { op, inputs, .. } => {
                reduce(o, *op);
                o.input_count = u32::try_from(inputs.len()).unwrap_or(NONE);
            }
            Collective::Broadcast { root, .. } | Collective::Gather { root, .. } => o.root = *root,
            Collective::Scatter { root, inputs, .. } => {
                o.root = *root;
                o.input_count = u32::try_from(inputs.len()).unwrap_or(NONE);
            }
            Collective::Reduce { root, op, .. } => {
                reduce(o, *op);
                o.root = *root;
            }
            Collective::AllToAll { inputs, .. } => {
                o.input_count = u32::try_from(inputs.len()).unwrap_or(NONE);
            }
            Collective::AllToAllInto {
                input_splits,
                output_splits,
                ..
            } => {
                out.input_splits = input_splits.iter().map(|s| *s as u64).collect();
                out.output_splits = output_splits.iter().map(|s| *s as u64).collect();
            }
            Collective::Send { peer, tag, .. } => {
                o.peer = *peer;
                o.tag = *tag;
            }
            Collective::Recv { peer, tag, .. } => {
                o.peer = peer.unwrap_or(NONE);
                o.tag = *tag;
            }
            Collective::MonitoredBarrier { wait_all } => o.wait_all = u32::from(*wait_all),
            Collective::Batch { ops } => out.children = ops.iter().map(Self::new).collect(),
            _ => {}
        }
        if !matches!(op, Collective::Batch { .. }) {
            out.buffers = op.tensors().into_iter().map(lend).collect();
        }
        out
    }

    /// The operation for one call, with the owner of all its buffers.
    pub(super) fn lend(
        &mut self,
        owner: &Arc<Pending>,
        contribute: bool,
        timeout_ms: i64,
        stream: *mut c_void,
    ) -> &Operation {
        for buffer in &mut self.buffers {
            buffer.owner = Arc::as_ptr(owner).cast_mut().cast();
            buffer.retain = Some(retain);
            buffer.release = Some(release);
        }
        for child in &mut self.children {
            let child = *child.lend(owner, contribute, timeout_ms, stream);
            self.child_operations.push(child);
        }
        let o = &mut self.operation;
        o.contribute = u32::from(contribute);
        o.timeout_ms = timeout_ms;
        o.stream = stream;
        o.buffers = self.buffers.as_ptr();
        o.buffer_count = self.buffers.len() as u64;
        o.buffer_stride = size_of::<Buffer>() as u64;
        o.children = self.child_operations.as_ptr();
        o.child_count = self.child_operations.len() as u64;
        o.child_stride = size_of::<Operation>() as u64;
        o.input_splits = self.input_splits.as_ptr();
        o.input_split_count = self.input_splits.len() as u64;
        o.output_splits = self.output_splits.as_ptr();
        o.output_split_count = self.output_splits.len() as u64;
        &self.operation
    }
}

/// A buffer without an owner: lent for one call.
pub(super) fn lend(tensor: &Tensor) -> Buffer {
    let mut b = Buffer::empty();
    b.ptr = tensor.as_ptr().cast_mut().cast();
    b.bytes = tensor.byte_len() as u64;
    b.count = tensor.count() as u64;
    b.dtype = u32::from(tensor.dtype().code());
    b.device.kind = text::lend(tensor.device().kind.name());
    b.device.index = tensor.device().index;
    // usize is u64 here, see the top.
    b.shape = tensor.shape().as_ptr().cast();
    b.shape_len = tensor.shape().len() as u64;
    b
}
