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
use super::overdue::Overdue;
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
        if ftcore::forked::is_child() {
            // The plugin's connections are the parent's.
            return;
        }
        if let Some(close) = self.table.close {
            // SAFETY: INV-8 once: nobody else has the table any more.
            guarded((), || unsafe { close(self.table.ctx) });
        }
    }
}

impl Raw {
    fn abort(&self, reason: &str) {
        if let Some(abort) = self.table.abort.filter(|_| !ftcore::forked::is_child()) {
            // SAFETY: INV-10 the plugin's own function and context.
            unsafe { abort(self.table.ctx, text::lend(reason)) }
        }
    }
}

/// See the module.
pub(super) struct PluginGroup {
    raw: Arc<Raw>,
    capabilities: Capabilities,
    /// What was agreed in the last `configure`: it changes there only, and is needed for every call.
    info: RwLock<GroupInfo>,
    overdue: Arc<Overdue>,
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
                dropped_options: Vec::new(),
            }),
            overdue: Arc::default(),
            backend: backend.to_string(),
            timeout,
        };
        match group.ask() {
            Ok(mut info) => {
                // Not configured, whatever it says.
                (info.rank, info.world_size, info.epoch) = (0, 0, Epoch(0));
                group.set_info(info);
            }
            Err(why) => {
                tracing::warn!(
                    plugin = library.shown(),
                    why,
                    "a plugin's group cannot say what it is"
                );
            }
        }
        Ok(group)
    }

    fn set_info(&self, info: GroupInfo) {
        *self.info.write().unwrap_or_else(PoisonError::into_inner) = info;
    }

    fn unconfigured(&self) {
        let mut info = self.info.write().unwrap_or_else(PoisonError::into_inner);
        (info.rank, info.world_size) = (0, 0);
    }

    /// What a configured group says it is, if `agreed` finds nothing wrong with it. Errors: `Protocol`; the group is aborted and not configured.
    fn claims(&self, agreed: impl FnOnce(&GroupInfo) -> Option<String>) -> Result<()> {
        let wrong = match self.ask() {
            Ok(info) => match agreed(&info) {
                None => {
                    self.set_info(info);
                    return Ok(());
                }
                Some(wrong) => wrong,
            },
            Err(why) => format!("it cannot say what the group is: {why}"),
        };
        self.unconfigured();
        self.raw.abort("the plugin broke the ABI");
        Err(super::breach(&self.raw.library.shown(), wrong))
    }

    /// A `configure` that is refused, for a stale epoch say, leaves the group as it was `before`, if it says so.
    fn keep(&self, before: GroupInfo) {
        let same = |now: GroupInfo| {
            (now.rank, now.world_size, now.epoch) == (before.rank, before.world_size, before.epoch)
        };
        if self.ask().is_ok_and(same) {
            self.set_info(before);
        }
    }

    /// Asks the plugin what the group is now.
    fn ask(&self) -> Result<GroupInfo, String> {
        let mut answer: Answer = None;
        if let Some(info) = self.raw.table.info {
            // SAFETY: INV-10 the plugin's own function and context; `answer` lives for the call.
            unsafe { info(self.raw.table.ctx, (&raw mut answer).cast(), Some(take_info)) }
        }
        answer.unwrap_or_else(|| Err("it said nothing".to_string()))
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

    fn world_size(&self) -> u32 {
        self.info
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .world_size
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

    /// Everything that a refusal gives back.
    fn taken_back(&self, pending: &Pending, error: Error) -> Box<Rejected> {
        match pending.refused() {
            Some(op) => Self::refuse(error, op),
            None => {
                let what = format!("it completed an operation and then refused it: {error}");
                Self::refuse(
                    super::breach(&self.raw.library.shown(), what),
                    Collective::Barrier,
                )
            }
        }
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
        dropped_options: Vec::new(),
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
        ftcore::forked::check()?;
        let raw = &*self.raw;
        let f = raw.library.need(raw.table.configure, "configure")?;
        configuration.cancel.check()?;
        let cancel = configuration.cancel.child();
        let store = store::Lent::new(&configuration.store, cancel.clone(), &raw.library.name)?;
        let before = self.info();
        self.unconfigured();
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
        cancel.settle();
        let (rank, world, epoch) = (configuration.rank, configuration.world_size, configuration.epoch);
        let refused = result.is_err();
        let configured = result.and_then(|()| {
            self.overdue.forget();
            self.claims(|info| {
                let same = (info.rank, info.world_size, info.epoch) == (rank, world, epoch);
                (!same).then(|| {
                    format!(
                        "configured as rank {rank} of {world} at epoch {epoch}, it says that it is rank {} of {} at epoch {}",
                        info.rank, info.world_size, info.epoch
                    )
                })
            })
        });
        if refused {
            self.keep(before);
        }
        configured.map_err(|e| match (e.kind(), cancel.reason()) {
            (ErrorKind::Aborted, Some(reason)) => reason,
            _ => e.with_op("configure").with_rank(rank).with_epoch(epoch.0),
        })
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let (stream, submit) = match (self.stream(&options), self.raw.table.submit) {
            (Ok(stream), Some(submit)) => (stream, submit),
            (Err(error), _) => return Err(Self::refuse(error, op)),
            (Ok(_), None) => return Err(Self::refuse(Error::unsupported("no submit"), op)),
        };
        if let Some(error) = self.overdue.refusal() {
            return Err(Self::refuse(error, op));
        }
        let (deadline, timeout_ms) = self.time(&options);
        let mut outgoing = Outgoing::new(&op);
        let group = Arc::downgrade(&self.raw);
        let devices = match self.raw.library.devices.is_empty() {
            true => None,
            false => memory_kind(&op).and_then(|kind| self.devices(kind)),
        };
        let world_size = self.world_size();
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
            Pending::new(op, Some(completer), self.raw.library, world_size, devices)
        });
        let Some(work) = made else {
            let error = Error::new(ErrorKind::Internal, "no work was made");
            return Err(self.taken_back(&pending, error));
        };
        let lent = pending.watch(&self.overdue, deadline).and_then(|()| {
            let operation = *outgoing.lend(&pending, options.contribute, timeout_ms, stream)?;
            Ok((operation, pending.completion()?))
        });
        let (operation, (completion, handle_of_completion)) = match lent {
            Ok(lent) => lent,
            Err(error) => return Err(self.taken_back(&pending, error)),
        };
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
            Pending::forget_completion(handle_of_completion);
            return Err(self.taken_back(&pending, error));
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
        let stream = match self.overdue.refusal().map_or_else(|| self.stream(&options), Err) {
            Ok(stream) => stream,
            Err(error) => return Err(Self::refuse(error, op).into()),
        };
        let (_, timeout_ms) = self.time(&options);
        let mut outgoing = Outgoing::new(&op);
        let pending = Arc::new(Pending::new(op, None, self.raw.library, self.world_size(), None));
        let operation = match outgoing.lend(&pending, options.contribute, timeout_ms, stream) {
            Ok(operation) => *operation,
            Err(error) => return Err(self.taken_back(&pending, error).into()),
        };
        let mut outcome = abi::Outcome::empty();
        outcome.source = NONE;
        // SAFETY: INV-10 and INV-8 as in `submit`.
        let result = self.raw.library.call(|fault| unsafe {
            execute(self.raw.table.ctx, &raw const operation, &raw mut outcome, fault)
        });
        let result = result.map(|()| outcome);
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
        let most = self.world_size();
        group.claims(|info| {
            let possible = info.rank < info.world_size && info.world_size <= most;
            (!possible).then(|| {
                format!(
                    "a part of a group of {most} ranks says that it is rank {} of {}",
                    info.rank, info.world_size
                )
            })
        })?;
        Ok(Some(Box::new(group)))
    }

    fn abort(&self, reason: &str) {
        self.raw.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        if let Some(overdue) = self.overdue.failure() {
            return Some(overdue);
        }
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
