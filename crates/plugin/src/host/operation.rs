//! An operation on its way into a plugin: the C form of a `Collective`, and what keeps its memory until it is given back.
//!
//! The tensors stay in [`Pending`]. The plugin gets their addresses and two numbers: one to complete the operation with, once, and one to
//! retain and release its memory with. Tensors that are still retained when the operation has ended, or that the plugin has not completed,
//! are not handed out but kept, for ever if need be (INV-8).

#[cfg(test)]
mod layout;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Collective, Completer, Completion, Error, ErrorKind, OpKind, ReduceOp, Result, Tensor};

use super::device::{self, Devices};
use super::handles::{Handle, Handles};
use super::library::{Library, guarded};
use super::overdue::Overdue;
use crate::abi::{self, Buffer, FAILED, Growing, NONE, Operation};
use crate::{fault, text};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("shapes cross the plugin ABI as 64-bit numbers without a copy");

/// Operations that plugins have not completed.
static COMPLETIONS: Handles<Pending> = Handles::new("an operation");
/// Operations whose memory plugins have.
static MEMORY: Handles<Pending> = Handles::new("memory");

/// What belongs to one operation that a plugin has.
pub(super) struct Pending {
    kind: OpKind,
    library: &'static Library,
    /// Ranks of the group: what an outcome says is checked against it.
    world_size: u32,
    state: Mutex<State>,
    /// For events that the plugin records.
    devices: Option<Devices>,
    /// Where its deadline is kept, and under which number.
    watch: OnceLock<(Arc<Overdue>, u64)>,
}

#[derive(Default)]
struct State {
    running: Option<(Option<Completer>, Collective)>,
    /// Has ended for its caller; the plugin may still touch it.
    kept: Option<Collective>,
    /// What the plugin holds its memory by.
    memory: Option<Handle>,
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
        library: &'static Library,
        world_size: u32,
        devices: Option<Devices>,
    ) -> Self {
        Self {
            kind: op.kind(),
            library,
            world_size,
            state: Mutex::new(State {
                running: Some((completer, op)),
                ..State::default()
            }),
            devices,
            watch: OnceLock::new(),
        }
    }

    /// Has `overdue` find out if the plugin has not completed this by `deadline`. Errors: deadlines cannot be watched.
    pub(super) fn watch(self: &Arc<Self>, overdue: &Arc<Overdue>, deadline: Instant) -> Result<()> {
        let number = overdue.begun(Arc::downgrade(self), deadline)?;
        let _ = self.watch.set((overdue.clone(), number));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation was refused: everything comes back. None if the plugin has completed it nevertheless.
    pub(super) fn refused(&self) -> Option<Collective> {
        let (op, memory) = {
            let mut state = self.lock();
            (state.running.take().map(|(_, op)| op), state.memory.take())
        };
        memory.and_then(|memory| MEMORY.end(memory));
        op
    }

    /// The operation has ended: its completer, and its tensors unless the plugin still holds them.
    fn end(&self) -> Option<(Option<Completer>, Option<Vec<Tensor>>)> {
        let mut state = self.lock();
        // Under the lock: a `release` that gives back the last reference finds what is kept.
        let held = state.memory.take().and_then(|memory| MEMORY.end(memory));
        let held = held.map_or(0, |(_, held)| held);
        let Some((completer, op)) = state.running.take() else {
            // Later than its caller waited.
            let kept = state.kept.take_if(|_| held == 0);
            drop(state);
            drop(kept);
            return None;
        };
        if held == 0 {
            return Some((completer, Some(op.into_tensors())));
        }
        tracing::warn!(
            plugin = self.library.name,
            op = self.kind.name(),
            bytes = bytes(&op),
            "a plugin still holds the memory of an operation that has ended; it is kept until given back"
        );
        state.kept = Some(op);
        Some((completer, None))
    }

    /// The operation should have ended long ago. Its caller is told, its memory stays with the plugin. None: it has ended.
    pub(super) fn overdue(&self, late: Duration) -> Option<Error> {
        let (completer, bytes) = {
            let mut state = self.lock();
            let (completer, op) = state.running.take()?;
            let bytes = bytes(&op);
            state.kept = Some(op);
            (completer, bytes)
        };
        let error = self.named(Error::timeout(format!(
            "plugin {} has not completed the operation {:.1} s after its deadline; its {bytes} bytes stay with the plugin. Configure the group again, or run it isolated",
            self.library.shown(),
            late.as_secs_f64(),
        )));
        tracing::error!(%error, "a plugin broke the ABI");
        if let Some(completer) = completer {
            completer.fail(error.clone(), Vec::new());
        }
        Some(error)
    }

    /// Ends a blocking call.
    pub(super) fn end_blocking(
        &self,
        result: Result<abi::Outcome>,
    ) -> Result<Completion, (Error, Vec<Tensor>)> {
        let tensors = self.end().and_then(|(_, tensors)| tensors);
        match (result.and_then(|said| self.checked(&said)), tensors) {
            (Ok((source, contributors)), Some(tensors)) => Ok(Completion {
                tensors,
                source,
                contributors,
            }),
            (Ok(_), None) => Err((self.still_held(), Vec::new())),
            (Err(error), tensors) => Err((self.named(error), tensors.unwrap_or_default())),
        }
    }

    /// What a successful outcome claims: who sent, how many contributed.
    fn checked(&self, said: &abi::Outcome) -> Result<(Option<u32>, u32)> {
        let world = self.world_size;
        let source = (said.source != NONE).then_some(said.source);
        let wrong = match source.filter(|rank| *rank >= world) {
            Some(rank) => Some(format!("rank {rank} sent")),
            None => (said.contributors > world).then(|| format!("{} ranks contributed", said.contributors)),
        };
        match wrong {
            None => Ok((source, said.contributors)),
            Some(claim) => Err(super::breach(
                &self.library.shown(),
                format!("it says that {claim} in a group of {world} ranks"),
            )),
        }
    }

    fn still_held(&self) -> Error {
        self.named(Error::new(
            ErrorKind::Backend,
            format!(
                "plugin {} finished the operation and still holds its memory",
                self.library.name
            ),
        ))
    }

    pub(super) fn named(&self, error: Error) -> Error {
        error.with_op(self.kind.name())
    }

    /// The number by which the plugin retains and releases the operation's memory, until it has ended. Errors: there is no number left.
    fn lend_memory(self: &Arc<Self>) -> Result<Handle> {
        let handle = MEMORY
            .lend(self.clone(), &self.library.name)
            .ok_or_else(no_number)?;
        self.lock().memory = Some(handle);
        Ok(handle)
    }

    /// What the plugin is given to report on this operation, and its number. Errors: there is no number left.
    pub(super) fn completion(self: &Arc<Self>) -> Result<(abi::Completion, Handle)> {
        let handle = COMPLETIONS
            .lend(self.clone(), &self.library.name)
            .ok_or_else(no_number)?;
        let mut c = abi::Completion::empty();
        c.ctx = handle.to_ctx();
        c.complete = Some(complete);
        c.recorded = Some(recorded);
        Ok((c, handle))
    }

    /// The plugin has refused: it may not complete any more.
    pub(super) fn forget_completion(handle: Handle) {
        drop(COMPLETIONS.end(handle));
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
        if let Some((overdue, number)) = self.watch.get() {
            overdue.ended(*number);
        }
        let handle = self.lock().handle.take();
        if let Some((handle, close)) = handle.and_then(|h| Some((h, h.close?))) {
            // SAFETY: INV-8 once, and nobody else has a reference to `self` any more.
            guarded((), || unsafe { close(handle.ctx) });
        }
    }
}

fn bytes(op: &Collective) -> usize {
    op.tensors().iter().map(|t| t.byte_len()).sum()
}

fn no_number() -> Error {
    Error::new(
        ErrorKind::Backend,
        "plugins have more operations than there are numbers for them; most were never completed",
    )
}

unsafe extern "C" fn complete(ctx: *mut c_void, outcome: *const abi::Outcome) {
    guarded((), || {
        let handle = Handle::from_ctx(ctx);
        let Some((pending, _)) = COMPLETIONS.end(handle) else {
            return COMPLETIONS.misused(handle, "called complete");
        };
        // SAFETY: INV-10 the outcome and its fault are readable for the call.
        let result = unsafe { read_outcome(outcome, &pending.library.name) };
        let result = result.and_then(|said| pending.checked(&said));
        let Some((Some(completer), tensors)) = pending.end() else {
            return;
        };
        match (result, tensors) {
            (Ok((source, contributors)), Some(tensors)) => completer.succeed(Completion {
                tensors,
                source,
                contributors,
            }),
            (Ok(_), None) => completer.fail(pending.still_held(), Vec::new()),
            (Err(error), tensors) => completer.fail(error, tensors.unwrap_or_default()),
        }
    });
}

/// What a successful outcome says, or why it failed.
///
/// # Safety
/// The outcome keeps to the ABI.
unsafe fn read_outcome(outcome: *const abi::Outcome, plugin: &str) -> Result<abi::Outcome> {
    // SAFETY: INV-10 by the contract.
    let o = unsafe { abi::read(outcome) }.map_err(|e| super::breach(plugin, e))?;
    if o.status == abi::OK {
        return Ok(o);
    }
    // SAFETY: INV-10 by the contract.
    let fault = unsafe { abi::read(o.fault) }.map_err(|e| super::breach(plugin, e))?;
    fault::check(FAILED, &fault, plugin).map(|()| o)
}

unsafe extern "C" fn recorded(ctx: *mut c_void, event: *mut c_void) {
    guarded((), || {
        let handle = Handle::from_ctx(ctx);
        let Some(pending) = COMPLETIONS.get(handle) else {
            return COMPLETIONS.misused(handle, "recorded an event");
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
    guarded((), || {
        let handle = Handle::from_ctx(owner);
        if !MEMORY.retain(handle) {
            MEMORY.misused(handle, "called retain");
        }
    });
}

unsafe extern "C" fn release(owner: *mut c_void) {
    guarded((), || {
        let handle = Handle::from_ctx(owner);
        match MEMORY.release(handle) {
            None => MEMORY.misused(handle, "called release"),
            Some((pending, true)) => {
                let kept = pending.lock().kept.take();
                // Outside the lock: freeing may call another plugin's code.
                drop(kept);
            }
            Some((_, false)) => {}
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

    /// The operation for one call, with the owner of all its buffers. Errors: there is no number left for it.
    pub(super) fn lend(
        &mut self,
        owner: &Arc<Pending>,
        contribute: bool,
        timeout_ms: i64,
        stream: *mut c_void,
    ) -> Result<&Operation> {
        let owner = owner.lend_memory()?;
        Ok(self.fill(owner, contribute, timeout_ms, stream))
    }

    fn fill(&mut self, owner: Handle, contribute: bool, timeout_ms: i64, stream: *mut c_void) -> &Operation {
        for buffer in &mut self.buffers {
            buffer.owner = owner.to_ctx();
            buffer.retain = Some(retain);
            buffer.release = Some(release);
        }
        for child in &mut self.children {
            let child = *child.fill(owner, contribute, timeout_ms, stream);
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
