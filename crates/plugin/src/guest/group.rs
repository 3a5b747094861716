//! A process group as a C table.
//!
//! What was submitted completes through the host's callback, after every reference to its memory was given back (those that
//! the backend could not give back stay held: INV-8). A panic inside the group ends it: see [`Exported::dead`].

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use ftcore::{
    Checked, Collective, Completion, Configuration, Epoch, Error, ErrorKind, Event, GroupInfo, ProcessGroup,
    Result, Status, SubmitOptions, Tensor, Work,
};

use super::{breach, device, operation, panicked, quiet, store};
use crate::abi::{self, FAILED, Fault, Growing, OK, Str};
use crate::{fault, offer, text};

struct Exported {
    inner: Box<dyn ProcessGroup>,
    /// What the group says since the last `configure`, once a call needs it: every call is checked against it.
    info: RwLock<Option<GroupInfo>>,
    /// Set by the first panic. The group's own state may be half changed, so it is never asked again for anything but its
    /// end; the host makes another one.
    dead: OnceLock<Error>,
}

impl Exported {
    fn died(&self, what: &str, panic: Box<dyn std::any::Any + Send>) -> Error {
        let error = panicked(what, panic);
        let first = self.dead.set(error.clone()).is_ok();
        if first {
            // Ends what is pending, if it still can.
            quiet("a group that had panicked was aborted", || {
                self.inner.abort(error.message());
            });
        }
        error
    }

    fn check(&self, op: Collective, options: &SubmitOptions) -> Result<Checked> {
        let known = self.info.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(info) = &*known {
            return Ok(Checked::new(op, info, self.inner.capabilities(), options)?);
        }
        drop(known);
        // Asked and kept under the lock: `configure` forgets it afterwards, never before.
        let mut known = self.info.write().unwrap_or_else(PoisonError::into_inner);
        let info = known.insert(self.inner.info());
        Ok(Checked::new(op, info, self.inner.capabilities(), options)?)
    }

    fn alive(&self) -> Result<()> {
        match self.dead.get() {
            None => Ok(()),
            Some(cause) => Err(Error::new(
                ErrorKind::Poisoned,
                format!("this group ended with a panic and cannot be used again: {cause}"),
            )
            .with_source(cause.clone())),
        }
    }
}

/// Fills in `table` with a group.
///
/// # Safety
/// `table` is the host's, of the call that is running.
pub(super) unsafe fn export(inner: Box<dyn ProcessGroup>, table: *mut abi::Group) -> Result<()> {
    let exported = Arc::new(Exported {
        info: RwLock::new(None),
        inner,
        dead: OnceLock::new(),
    });
    let mut group = abi::Group::empty();
    group.ctx = Arc::into_raw(exported).cast_mut().cast();
    group.info = Some(info);
    group.capabilities = Some(capabilities);
    group.configure = Some(configure);
    group.submit = Some(submit);
    group.split = Some(split);
    group.abort = Some(abort);
    group.error = Some(error);
    group.shutdown = Some(shutdown);
    group.traffic = Some(traffic);
    group.close = Some(close);
    group.execute = Some(execute);
    // SAFETY: by the contract.
    unsafe { abi::write(table, &group) }.map_err(|e| {
        // SAFETY: no other code has seen it.
        drop(unsafe { Arc::from_raw(group.ctx.cast_const().cast::<Exported>()) });
        breach(e)
    })
}

/// # Safety
/// `ctx` is one that `export` gave out and `close` has not seen.
unsafe fn group<'a>(ctx: *mut c_void) -> Option<&'a Exported> {
    // SAFETY: by the contract it is alive for the call.
    unsafe { ctx.cast::<Exported>().as_ref() }
}

/// Runs an entry of a living group; a panic ends the group.
///
/// # Safety
/// As [`group`].
unsafe fn entry(
    ctx: *mut c_void,
    what: &str,
    fault: *mut Fault,
    run: impl FnOnce(&Exported) -> Result<()>,
) -> i32 {
    // SAFETY: by the contract.
    let Some(group) = (unsafe { group(ctx) }) else {
        return FAILED;
    };
    let result = group.alive().and_then(|()| {
        catch_unwind(AssertUnwindSafe(|| run(group))).unwrap_or_else(|panic| Err(group.died(what, panic)))
    });
    // SAFETY: every caller passes the fault of the call that is running.
    unsafe { fault::answer(result, fault) }
}

/// Runs an entry that cannot fail.
///
/// # Safety
/// As [`group`].
unsafe fn quietly(ctx: *mut c_void, what: &str, run: impl FnOnce(&Exported)) {
    // SAFETY: by the contract.
    if let Some(group) = unsafe { group(ctx) }
        && let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(group)))
    {
        let error = group.died(what, panic);
        quiet(
            "a panic was logged",
            || tracing::error!(%error, "caught in a plugin's group"),
        );
    }
}

type InfoReply = Option<unsafe extern "C" fn(*mut c_void, *const abi::Info)>;

unsafe extern "C" fn info(ctx: *mut c_void, reply_ctx: *mut c_void, reply: InfoReply) {
    // SAFETY: the host passes our own ctx; its reply copies what it wants.
    unsafe {
        quietly(ctx, "it was asked what it is", |g| {
            let Some(reply) = reply else { return };
            let now = g.inner.info();
            let mut i = abi::Info::empty();
            i.backend = text::lend(&now.backend);
            i.name = text::lend(&now.name);
            i.rank = now.rank;
            i.world_size = now.world_size;
            i.epoch = now.epoch.0;
            i.device.kind = text::lend(now.device.kind.name());
            i.device.index = now.device.index;
            reply(reply_ctx, &raw const i);
        });
    }
}

unsafe extern "C" fn capabilities(ctx: *mut c_void, reply_ctx: *mut c_void, reply: offer::Reply) {
    // SAFETY: the host passes our own ctx and its own reply.
    unsafe {
        quietly(ctx, "it was asked what it offers", |g| {
            offer::tell(g.inner.capabilities(), reply_ctx, reply);
        });
    }
}

unsafe extern "C" fn configure(
    ctx: *mut c_void,
    configuration: *const abi::Configuration,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and keeps to the ABI.
    unsafe {
        entry(ctx, "it was configured", fault, |g| {
            let c = abi::read(configuration).map_err(breach)?;
            let (store, cancel) = store::hold(c.store)?;
            let result = g.inner.configure(Configuration {
                store,
                prefix: text::read(c.prefix).map_err(breach)?,
                name: text::read(c.name).map_err(breach)?,
                epoch: Epoch(c.epoch),
                rank: c.rank,
                world_size: c.world_size,
                deadline: fault::deadline(c.timeout_ms),
                cancel: cancel.clone(),
            });
            cancel.settle();
            *g.info.write().unwrap_or_else(PoisonError::into_inner) = None;
            result
        })
    }
}

/// What goes back over the boundary. The memory is given back before it is said.
struct Ended {
    source: u32,
    contributors: u32,
}

fn succeeded(completion: Completion, addresses: u64) -> Result<Ended> {
    let back = completion.tensors.iter().fold(0, operation::mix);
    if back != addresses {
        return Err(Error::new(
            ErrorKind::Internal,
            "the backend gave back other tensors than it was given, or in another order",
        ));
    }
    give_back(completion.tensors);
    Ok(Ended {
        source: completion.source.unwrap_or(abi::NONE),
        contributors: completion.contributors,
    })
}

fn give_back(tensors: Vec<Tensor>) {
    drop(tensors);
}

/// Says how an operation ended. Never unwinds.
fn complete(completion: &abi::Completion, result: Result<Ended>) {
    let mut outcome = abi::Outcome::empty();
    let mut why = None;
    match result {
        Ok(ended) => {
            outcome.source = ended.source;
            outcome.contributors = ended.contributors;
        }
        Err(error) => {
            outcome.status = FAILED;
            outcome.source = abi::NONE;
            outcome.fault = &raw const *why.insert(fault::encode(&error));
        }
    }
    if let Some(complete) = completion.complete {
        // SAFETY: once per accepted operation; the outcome and its fault live until the call returns.
        unsafe { complete(completion.ctx, &raw const outcome) }
    }
}

/// The host's callbacks. `complete` takes them out, so that `recorded`, which another thread may be about to call, never
/// comes after it.
struct Callbacks(Mutex<Option<abi::Completion>>);

// SAFETY: the ABI says that they may be called from any thread.
unsafe impl Send for Callbacks {}
// SAFETY: as above; the mutex lets one thread at a time.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    fn recorded(&self, event: Arc<dyn Event>) {
        let callbacks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((callbacks, recorded)) = callbacks.as_ref().and_then(|c| Some((c, c.recorded?))) {
            // SAFETY: not yet completed; the host takes the handle over.
            unsafe { recorded(callbacks.ctx, device::event_handle(event)) }
        }
    }

    fn ended(&self, work: &Work, status: &Status, addresses: u64) {
        let Some(callbacks) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        end(&callbacks, work, status, addresses);
    }
}

/// Gives the memory back and says how an operation ended.
fn end(callbacks: &abi::Completion, work: &Work, status: &Status, addresses: u64) {
    let result = catch_unwind(AssertUnwindSafe(|| match status {
        Status::Failed(error) => {
            give_back(work.recover());
            Err(error.clone())
        }
        _ => succeeded(work.take()?, addresses),
    }))
    .unwrap_or_else(|panic| Err(panicked("an operation was finished", panic)));
    complete(callbacks, result);
}

unsafe extern "C" fn submit(
    ctx: *mut c_void,
    operation: *const abi::Operation,
    completion: *const abi::Completion,
    handle: *mut abi::WorkHandle,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and keeps to the ABI.
    unsafe {
        entry(ctx, "an operation was submitted", fault, |g| {
            let callbacks = abi::read(completion).map_err(breach)?;
            let incoming = operation::read(operation)?;
            let addresses = incoming.addresses;
            let checked = g.check(incoming.op, &incoming.options)?;
            let work = g.inner.submit(checked, incoming.options).map_err(Error::from)?;
            let status = work.status();
            if !matches!(status, Status::Pending) {
                end(&callbacks, &work, &status, addresses);
                return Ok(());
            }
            let mut w = abi::WorkHandle::empty();
            w.ctx = Box::into_raw(Box::new(work.clone())).cast();
            w.abort = Some(work_abort);
            w.close = Some(work_close);
            if abi::write(handle, &w).is_err() {
                // A host without a place for it aborts the group instead.
                work_close(w.ctx);
            }
            let callbacks = Arc::new(Callbacks(Mutex::new(Some(callbacks))));
            let (same, ending) = (work.clone(), callbacks.clone());
            work.on_complete(move |status| ending.ended(&same, status, addresses));
            if matches!(work.status(), Status::Pending) {
                work.on_recorded(move |event| {
                    quiet("an operation was recorded", || callbacks.recorded(event))
                });
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn work_abort(ctx: *mut c_void, reason: Str) {
    quiet("an operation was aborted", || {
        // SAFETY: the host passes the ctx of a handle that it has not closed.
        unsafe {
            if let Some(work) = ctx.cast::<Work>().as_ref() {
                work.abort(&text::read(reason).unwrap_or_default());
            }
        }
    });
}

unsafe extern "C" fn work_close(ctx: *mut c_void) {
    quiet("an operation was closed", || {
        if !ctx.is_null() {
            // SAFETY: made by `submit`, closed once.
            drop(unsafe { Box::from_raw(ctx.cast::<Work>()) });
        }
    });
}

unsafe extern "C" fn execute(
    ctx: *mut c_void,
    operation: *const abi::Operation,
    outcome: *mut abi::Outcome,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and keeps to the ABI.
    unsafe {
        entry(ctx, "an operation was executed", fault, |g| {
            let incoming = operation::read(operation)?;
            let checked = g.check(incoming.op, &incoming.options)?;
            match g.inner.execute(checked, incoming.options) {
                Ok(completion) => {
                    let ended = succeeded(completion, incoming.addresses)?;
                    let mut out = abi::Outcome::empty();
                    out.status = OK;
                    out.source = ended.source;
                    out.contributors = ended.contributors;
                    abi::write(outcome, &out).map_err(breach)
                }
                Err(failed) => {
                    give_back(failed.tensors);
                    Err(failed.error)
                }
            }
        })
    }
}

unsafe extern "C" fn split(
    ctx: *mut c_void,
    has_color: u32,
    color: u32,
    key: u32,
    timeout_ms: i64,
    table: *mut abi::Group,
    made: *mut u32,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host passes our own ctx and keeps to the ABI.
    unsafe {
        entry(ctx, "it was split", fault, |g| {
            let Some(made) = made.as_mut() else {
                return Err(breach("a split without a place for the answer".into()));
            };
            *made = 0;
            let color = (has_color != 0).then_some(color);
            if let Some(child) = g.inner.split(color, key, fault::deadline(timeout_ms))? {
                export(child, table)?;
                *made = 1;
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn abort(ctx: *mut c_void, reason: Str) {
    // SAFETY: the host passes our own ctx and a text for the call.
    unsafe {
        quietly(ctx, "it was aborted", |g| {
            if g.dead.get().is_none() {
                g.inner.abort(&text::read(reason).unwrap_or_default());
            }
        });
    }
}

unsafe extern "C" fn error(ctx: *mut c_void, fault: *mut Fault) -> i32 {
    let mut found = None;
    // SAFETY: the host passes our own ctx, and its own fault.
    unsafe {
        quietly(ctx, "it was asked for its error", |g| {
            found = g.dead.get().cloned().or_else(|| g.inner.error());
        });
        match found {
            None => 0,
            Some(error) => fault::answer(Err(error), fault),
        }
    }
}

unsafe extern "C" fn shutdown(ctx: *mut c_void, timeout_ms: i64, fault: *mut Fault) -> i32 {
    // SAFETY: the host passes our own ctx.
    unsafe {
        entry(ctx, "it was shut down", fault, |g| {
            g.inner.shutdown(fault::deadline(timeout_ms))
        })
    }
}

unsafe extern "C" fn traffic(ctx: *mut c_void, traffic: *mut abi::Traffic) {
    // SAFETY: the host passes our own ctx and its own struct.
    unsafe {
        quietly(ctx, "it was asked for its traffic", |g| {
            let now = g.inner.traffic();
            let mut t = abi::Traffic::empty();
            t.sent = now.sent;
            t.received = now.received;
            drop(abi::write(traffic, &t));
        });
    }
}

unsafe extern "C" fn close(ctx: *mut c_void) {
    quiet("a group was closed", || {
        if !ctx.is_null() {
            // SAFETY: made by `export`, closed once.
            drop(unsafe { Arc::from_raw(ctx.cast_const().cast::<Exported>()) });
        }
    });
}
