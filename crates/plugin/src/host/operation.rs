//! An operation on its way into a plugin: the C form of a `Collective`, and what keeps its memory until it is given back.
//!
//! The tensors stay in [`Pending`]. The plugin gets their addresses and two numbers: one to complete the operation with, once, and one to
//! retain and release its memory with. Tensors that are still retained when the operation has ended, or that the plugin has not completed,
//! are not handed out but kept, for ever if need be (INV-8).

#[cfg(test)]
mod layout;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ftcore::engine::{Outcome, Ticket};
use ftcore::{Collective, Completion, Error, ErrorKind, OpKind, ReduceOp, Result, Tensor};

use super::buffer;
use super::device::{self, Devices};
use super::driver::PluginDriver;
use super::handles::{Handle, Handles};
use super::library::{Library, guarded};
use crate::abi::{self, Buffer, FAILED, Growing, NONE, Operation};
use crate::{fault, text};

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
}

type Mine = Ticket<PluginDriver>;

#[derive(Default)]
struct State {
    running: Option<(Option<Mine>, Collective)>,
    /// `submit` has not returned: the plugin may yet refuse what it has completed.
    submitting: bool,
    /// What it has completed meanwhile.
    early: Option<(Mine, Outcome)>,
    /// Has ended; the plugin still holds its memory.
    kept: Option<Collective>,
    /// What the plugin holds its memory by.
    memory: Option<Handle>,
    /// What `submit` filled in; closed once the operation has ended.
    handle: Option<abi::WorkHandle>,
}

// SAFETY: the work handle's functions may be called from any thread, says the ABI; the rest is Send.
unsafe impl Send for State {}

impl Pending {
    /// Takes the operation in. `ticket` is none for a blocking call.
    pub(super) fn new(
        op: Collective,
        ticket: Option<Mine>,
        library: &'static Library,
        world_size: u32,
        devices: Option<Devices>,
    ) -> Self {
        Self {
            kind: op.kind(),
            library,
            world_size,
            state: Mutex::new(State {
                submitting: ticket.is_some(),
                running: Some((ticket, op)),
                ..State::default()
            }),
            devices,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation `number` of the driver's engine, if the plugin has it.
    pub(super) fn find(driver: &PluginDriver, number: u64) -> Option<Arc<Self>> {
        let is_it = |pending: &Arc<Self>| match &pending.lock().running {
            Some((Some(ticket), _)) => {
                ticket.number() == number && std::ptr::eq(ticket.engine().driver(), driver)
            }
            _ => false,
        };
        COMPLETIONS.all().into_iter().find(is_it)
    }

    /// The plugin has taken the operation.
    pub(super) fn accepted(&self) {
        let early = {
            let mut state = self.lock();
            state.submitting = false;
            state.early.take()
        };
        if let Some((ticket, outcome)) = early {
            ticket.answer(outcome);
        }
    }

    /// The plugin has refused the operation: its caller is told, and gets back what the plugin does not hold.
    pub(super) fn refused(&self, driver: &PluginDriver, error: Error) {
        let early = self.lock().early.take();
        if let Some((Some(ticket), tensors)) = self.end() {
            ticket.answer(driver.failed(self.named(error), tensors.unwrap_or_default()));
        } else if let Some((ticket, _)) = early {
            let what = format!("it completed an operation and then refused it: {error}");
            let error = self.named(super::breach(&self.library.shown(), what));
            ticket.refuse(error, Vec::new());
        }
    }

    /// The operation has ended: its ticket, and its tensors unless the plugin still holds them.
    fn end(&self) -> Option<(Option<Mine>, Option<Vec<Tensor>>)> {
        let mut state = self.lock();
        // Under the lock: a `release` that gives back the last reference finds what is kept.
        let held = state.memory.take().and_then(|memory| MEMORY.end(memory));
        let held = held.map_or(0, |(_, held)| held);
        let (ticket, op) = state.running.take()?;
        if held == 0 {
            return Some((ticket, Some(op.into_tensors())));
        }
        tracing::warn!(
            plugin = self.library.name,
            op = self.kind.name(),
            bytes = op.tensors().iter().map(|t| t.byte_len()).sum::<usize>(),
            "a plugin still holds the memory of an operation that has ended; it is kept until given back"
        );
        state.kept = Some(op);
        Some((ticket, None))
    }

    /// What becomes of an operation whose end the plugin has told. `None` for tensors: it still holds them.
    fn outcome(
        &self,
        driver: &PluginDriver,
        said: Result<abi::Outcome>,
        tensors: Option<Vec<Tensor>>,
    ) -> Outcome {
        match (said.and_then(|said| self.checked(&said)), tensors) {
            (Ok((source, contributors)), Some(tensors)) => Outcome::Succeeded(Completion {
                tensors,
                source,
                contributors,
            }),
            (Ok(_), None) => Outcome::Refused(self.still_held(), Vec::new()),
            (Err(error), tensors) => driver.failed(self.named(error), tensors.unwrap_or_default()),
        }
    }

    /// Ends a blocking call.
    pub(super) fn end_blocking(&self, driver: &PluginDriver, said: Result<abi::Outcome>) -> Outcome {
        let tensors = self.end().and_then(|(_, tensors)| tensors);
        self.outcome(driver, said, tensors)
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

    fn named(&self, error: Error) -> Error {
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
                // SAFETY: the plugin's own function; the handle is not closed while `self` is borrowed.
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
            // SAFETY: the plugin's own function; a polled operation completes on this thread only.
            unsafe { poll(ctx) }
        }
        self.lock().running.is_some()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let handle = self.lock().handle.take();
        if let Some((handle, close)) = handle.and_then(|h| Some((h, h.close?))) {
            // SAFETY: once, and no other code has a reference to `self` any more.
            guarded((), || unsafe { close(handle.ctx) });
        }
    }
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
        // SAFETY: the outcome and its fault are readable for the call.
        let said = unsafe { read_outcome(outcome, &pending.library.name) };
        let Some((Some(ticket), tensors)) = pending.end() else {
            return;
        };
        let outcome = pending.outcome(ticket.engine().driver(), said, tensors);
        let mut state = pending.lock();
        if state.submitting {
            state.early = Some((ticket, outcome));
            return;
        }
        drop(state);
        ticket.answer(outcome);
    });
}

/// What a successful outcome says, or why it failed.
///
/// # Safety
/// The outcome keeps to the ABI.
pub(super) unsafe fn read_outcome(outcome: *const abi::Outcome, plugin: &str) -> Result<abi::Outcome> {
    // SAFETY: by the contract.
    let o = unsafe { abi::read(outcome) }.map_err(|e| super::breach(plugin, e))?;
    if o.status == abi::OK {
        return Ok(o);
    }
    // SAFETY: by the contract.
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
        if let Some((Some(ticket), _)) = &pending.lock().running {
            ticket.recorded(event);
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
            Collective::AllReduce { op, .. }
            | Collective::ReduceScatterInto { op, .. }
            | Collective::ReduceScatterInPlace { op, .. } => reduce(o, *op),
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
            out.buffers = op.tensors().into_iter().map(buffer::lend).collect();
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
        let owner = match self.buffers.is_empty() && self.children.is_empty() {
            true => std::ptr::null_mut(),
            false => owner.lend_memory()?.to_ctx(),
        };
        Ok(self.fill(owner, contribute, timeout_ms, stream))
    }

    fn fill(
        &mut self,
        owner: *mut c_void,
        contribute: bool,
        timeout_ms: i64,
        stream: *mut c_void,
    ) -> &Operation {
        for buffer in &mut self.buffers {
            buffer.owner = owner;
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
