//! A plugin's group, as a `ProcessGroup` of this program.

use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, Device, DeviceKind, Epoch, Error,
    ErrorKind, Failed, GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, deadline_in,
    work_pair,
};

use super::device::{self, Devices};
use super::library::{Library, guarded};
use super::operation::{Outgoing, Pending};
use super::{factory, polling, store};
use crate::abi::{self, Growing, NONE, WORK_POLLED};
use crate::{fault, text};

/// The plugin's table. Closed when the last user is gone.
struct Raw {
    library: &'static Library,
    table: abi::Group,
}

// SAFETY: INV-8 the ABI says that a group's functions may be called from any thread.
unsafe impl Send for Raw {}
// SAFETY: INV-8 as above.
unsafe impl Sync for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(close) = self.table.close {
            // SAFETY: INV-8 once: nobody else has the table any more.
            guarded((), || unsafe { close(self.table.ctx) });
        }
    }
}

impl Raw {
    fn abort(&self, reason: &str) {
        if let Some(abort) = self.table.abort {
            // SAFETY: INV-10 the plugin's own function and context.
            unsafe { abort(self.table.ctx, text::lend(reason)) }
        }
    }
}

/// See the module.
pub(super) struct PluginGroup {
    raw: Arc<Raw>,
    capabilities: Capabilities,
    /// What the group said after the last `configure`: it changes there only, and is needed for every call.
    info: RwLock<GroupInfo>,
    /// For messages, should the plugin fail to say one.
    backend: String,
    timeout: Duration,
}

impl PluginGroup {
    /// Takes over a table that the plugin has filled in.
    pub(super) fn adopt(
        library: &'static Library,
        table: &abi::Group,
        backend: &str,
        timeout: Duration,
    ) -> Result<Self> {
        // SAFETY: INV-10 our own struct; `read` only believes the size.
        let table = unsafe { abi::read(std::ptr::from_ref(table)) }
            .map_err(|e| super::breach(&library.shown(), e))?;
        let raw = Arc::new(Raw { library, table });
        let needed = [
            (table.info.is_some(), "info"),
            (table.capabilities.is_some(), "capabilities"),
            (table.configure.is_some(), "configure"),
            (table.submit.is_some(), "submit"),
            (table.abort.is_some(), "abort"),
            (table.shutdown.is_some(), "shutdown"),
            (table.close.is_some(), "close"),
        ];
        if let Some((_, name)) = needed.iter().find(|(there, _)| !there) {
            let text = format!("a group without {name}");
            return Err(super::breach(&library.shown(), text));
        }
        let capabilities = factory::capabilities(library, |said| {
            if let Some(f) = table.capabilities {
                // SAFETY: INV-10 the plugin's own function and context; `said` lives for the call.
                unsafe { f(table.ctx, said, Some(factory::take_capabilities)) }
            }
        });
        let group = Self {
            raw,
            capabilities,
            info: RwLock::new(GroupInfo {
                backend: backend.to_string(),
                name: backend.to_string(),
                rank: 0,
                world_size: 0,
                epoch: Epoch(0),
                device: Device::CPU,
            }),
            backend: backend.to_string(),
            timeout,
        };
        group.refresh();
        Ok(group)
    }

    /// Asks the plugin what the group is now.
    fn refresh(&self) {
        let mut answer: Answer = None;
        if let Some(info) = self.raw.table.info {
            // SAFETY: INV-10 the plugin's own function and context; `answer` lives for the call.
            unsafe { info(self.raw.table.ctx, (&raw mut answer).cast(), Some(take_info)) }
        }
        let why = match answer {
            Some(Ok(info)) => {
                *self.info.write().unwrap_or_else(PoisonError::into_inner) = info;
                return;
            }
            Some(Err(why)) => why,
            None => "it said nothing".to_string(),
        };
        tracing::warn!(
            plugin = self.raw.library.shown(),
            why,
            "a plugin's group cannot say what it is"
        );
        // Not configured, as far as anybody can tell.
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        info.world_size = 0;
        info.rank = 0;
    }

    /// The plugin's handle for the stream of a call: null if the inputs are ready.
    fn stream(&self, options: &SubmitOptions) -> Result<*mut c_void> {
        let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) else {
            return Ok(std::ptr::null_mut());
        };
        let kind = stream.device().kind;
        let own = self
            .devices(&kind)
            .and_then(|d| device::stream_handle(d, &**stream));
        own.ok_or_else(|| {
            Error::unsupported(format!(
                "{} cannot order itself after a stream on {}",
                self.backend,
                stream.device()
            ))
        })
    }

    /// When a call must have ended: as an instant, and from now in milliseconds.
    fn time(&self, options: &SubmitOptions) -> (Instant, i64) {
        match options.deadline {
            Some(deadline) => (deadline, fault::milliseconds(deadline)),
            None => {
                let ms = i64::try_from(self.timeout.as_millis()).unwrap_or(i64::MAX);
                (deadline_in(self.timeout), ms)
            }
        }
    }

    fn devices(&self, kind: &DeviceKind) -> Option<Devices> {
        if *kind == DeviceKind::Cpu {
            return None;
        }
        device::find(self.raw.library, kind)
    }

    fn refuse(error: Error, op: Collective) -> Box<Rejected> {
        let error = error.with_op(op.kind().name());
        Box::new(Rejected { error, op })
    }

    /// Everything that a refusal gives back; it is there, since nothing was accepted.
    fn taken_back(pending: &Arc<Pending>, error: Error) -> Box<Rejected> {
        let op = pending.refused().unwrap_or(Collective::Barrier);
        Self::refuse(error, op)
    }
}

/// The device kind of an operation's memory; events that the plugin records are of that kind.
fn memory_kind(op: &Collective) -> Option<&DeviceKind> {
    match op {
        Collective::Batch { ops } => ops.first().and_then(memory_kind),
        op => op.tensors().first().map(|t| &t.device().kind),
    }
}

type Answer = Option<Result<GroupInfo, String>>;

unsafe extern "C" fn take_info(ctx: *mut c_void, info: *const abi::Info) {
    guarded((), || {
        // SAFETY: INV-8 `ctx` is the Answer of the call that is running.
        if let Some(answer) = unsafe { ctx.cast::<Answer>().as_mut() } {
            // SAFETY: INV-10 the plugin keeps to the ABI: readable for the call.
            *answer = Some(unsafe { read_info(info) });
        }
    });
}

/// # Safety
/// The struct keeps to the ABI.
unsafe fn read_info(info: *const abi::Info) -> Result<GroupInfo, String> {
    // SAFETY: INV-10 by the contract.
    let i = unsafe { abi::read(info) }?;
    // SAFETY: INV-10 by the contract.
    let (backend, name, kind) = unsafe {
        (
            text::read(i.backend)?,
            text::read(i.name)?,
            text::read(i.device.kind)?,
        )
    };
    Ok(GroupInfo {
        backend,
        name,
        rank: i.rank,
        world_size: i.world_size,
        epoch: Epoch(i.epoch),
        device: Device::new(kind.parse().map_err(|e: Error| e.to_string())?, i.device.index),
    })
}

impl ProcessGroup for PluginGroup {
    fn info(&self) -> GroupInfo {
        self.info.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        let raw = &*self.raw;
        let f = raw.library.need(raw.table.configure, "configure")?;
        let store = store::Lent::new(configuration.store.clone());
        let mut c = abi::Configuration::empty();
        c.store = &raw const store.table;
        c.prefix = text::lend(&configuration.prefix);
        c.name = text::lend(&configuration.name);
        c.epoch = configuration.epoch.0;
        c.rank = configuration.rank;
        c.world_size = configuration.world_size;
        c.timeout_ms = fault::milliseconds(configuration.deadline);
        // SAFETY: INV-10 the plugin's own function and context; all arguments live for the call.
        let result = raw
            .library
            .call(|fault| unsafe { f(raw.table.ctx, &raw const c, fault) });
        self.refresh();
        result.map_err(|e| e.with_op("configure"))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let (stream, submit) = match (self.stream(&options), self.raw.table.submit) {
            (Ok(stream), Some(submit)) => (stream, submit),
            (Err(error), _) => return Err(Self::refuse(error, op)),
            (Ok(_), None) => return Err(Self::refuse(Error::unsupported("no submit"), op)),
        };
        let (deadline, timeout_ms) = self.time(&options);
        let mut outgoing = Outgoing::new(&op);
        let group = Arc::downgrade(&self.raw);
        let devices = match self.raw.library.devices.is_empty() {
            true => None,
            false => memory_kind(&op).and_then(|kind| self.devices(kind)),
        };
        let mut made = None;
        let pending = Arc::new_cyclic(|me: &Weak<Pending>| {
            let me = me.clone();
            let (work, completer) = work_pair(op.kind(), deadline, move |reason| {
                if me.upgrade().is_some_and(|p| p.abort(reason)) {
                    return;
                }
                if let Some(group) = group.upgrade() {
                    group.abort(reason);
                }
            });
            made = Some(work);
            Pending::new(op, Some(completer), &self.raw.library.name, devices)
        });
        let Some(work) = made else {
            let error = Error::new(ErrorKind::Internal, "no work was made");
            return Err(Self::taken_back(&pending, error));
        };
        let operation = *outgoing.lend(&pending, options.contribute, timeout_ms, stream);
        let completion = pending.completion();
        let mut handle = abi::WorkHandle::empty();
        // SAFETY: INV-10 the plugin's own function and context; INV-8 the structs live for the call, the memory in
        // `pending` until it is given back.
        let accepted = self.raw.library.call(|fault| unsafe {
            submit(
                self.raw.table.ctx,
                &raw const operation,
                &raw const completion,
                &raw mut handle,
                fault,
            )
        });
        if let Err(error) = accepted {
            pending.forget_completion();
            return Err(Self::taken_back(&pending, error));
        }
        let polled = handle.flags & WORK_POLLED != 0;
        if handle.close.is_some() || handle.poll.is_some() || handle.abort.is_some() {
            pending.set_handle(handle);
        }
        if polled && let Err(error) = polling::drive(pending) {
            tracing::warn!(%error, "an operation of a plugin will not make progress");
            work.abort("it cannot be polled");
        }
        Ok(work)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        let Some(execute) = self.raw.table.execute else {
            // It has no such function: submit and wait.
            let work = self.submit(op, options)?;
            return work.take().map_err(|error| {
                let tensors = work.recover();
                Box::new(Failed { error, tensors })
            });
        };
        let op = op.into_inner();
        let stream = match self.stream(&options) {
            Ok(stream) => stream,
            Err(error) => return Err(Self::refuse(error, op).into()),
        };
        let (_, timeout_ms) = self.time(&options);
        let mut outgoing = Outgoing::new(&op);
        let pending = Arc::new(Pending::new(op, None, &self.raw.library.name, None));
        let operation = *outgoing.lend(&pending, options.contribute, timeout_ms, stream);
        let mut outcome = abi::Outcome::empty();
        outcome.source = NONE;
        // SAFETY: INV-10 and INV-8 as in `submit`.
        let result = self.raw.library.call(|fault| unsafe {
            execute(self.raw.table.ctx, &raw const operation, &raw mut outcome, fault)
        });
        let result = result.map(|()| (outcome.source, outcome.contributors));
        pending
            .end_blocking(result)
            .map_err(|(error, tensors)| Box::new(Failed { error, tensors }))
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let raw = &*self.raw;
        let f = raw.library.need(raw.table.split, "split")?;
        let mut table = abi::Group::empty();
        let mut made = 0;
        let (has, number, ms) = (
            u32::from(color.is_some()),
            color.unwrap_or(0),
            fault::milliseconds(deadline),
        );
        raw.library
            // SAFETY: INV-10 the plugin's own function and context; all arguments live for the call.
            .call(|fault| unsafe {
                f(
                    raw.table.ctx,
                    has,
                    number,
                    key,
                    ms,
                    &raw mut table,
                    &raw mut made,
                    fault,
                )
            })
            .map_err(|e| e.with_op("split"))?;
        if made == 0 {
            return Ok(None);
        }
        let group = Self::adopt(raw.library, &table, &self.backend, self.timeout)?;
        Ok(Some(Box::new(group)))
    }

    fn abort(&self, reason: &str) {
        self.raw.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        let f = self.raw.table.error?;
        // SAFETY: INV-10 the plugin's own function and context.
        let found = self
            .raw
            .library
            .call(|fault| unsafe { f(self.raw.table.ctx, fault) });
        found.err()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        let raw = &*self.raw;
        let f = raw.library.need(raw.table.shutdown, "shutdown")?;
        // SAFETY: INV-10 the plugin's own function and context.
        raw.library
            .call(|fault| unsafe { f(raw.table.ctx, fault::milliseconds(deadline), fault) })
            .map_err(|e: Error| match e.kind() {
                ErrorKind::Timeout => e.with_op("shutdown"),
                _ => e,
            })
    }

    fn traffic(&self) -> Traffic {
        let mut t = abi::Traffic::empty();
        if let Some(f) = self.raw.table.traffic {
            // SAFETY: INV-10 the plugin's own function and context; the struct is ours.
            unsafe { f(self.raw.table.ctx, &raw mut t) }
        }
        Traffic {
            sent: t.sent,
            received: t.received,
        }
    }
}
