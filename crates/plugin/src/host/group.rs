//! A plugin's group, as a `ProcessGroup` of this program.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::{Label, Place};
use ftcore::lifecycle::{Lifecycle, leave_at_exit};
use ftcore::{
    Capabilities, Checked, Completion, Configuration, DType, Device, Epoch, Error, Failed, Feature,
    GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Tensor, Traffic, Work, deadline_in,
    execute_by_submit, forked,
};

use super::driver::{Call, Engine, PluginDriver, Raw};
use super::library::{Library, guarded};
use super::{factory, store};
use crate::abi::{self, Growing};
use crate::{fault, text};

/// See the module.
pub(super) struct PluginGroup {
    raw: Arc<Raw>,
    capabilities: Capabilities,
    lifecycle: Lifecycle<Engine>,
    /// What it serves.
    device: Device,
    timeout: Duration,
    /// Tells that the plugin's group was closed.
    closed: Mutex<Option<Receiver<()>>>,
}

impl PluginGroup {
    /// Takes over a table that the plugin has filled in.
    pub(super) fn adopt(
        library: &'static Library,
        table: &abi::Group,
        backend: &str,
        timeout: Duration,
    ) -> Result<Self> {
        // SAFETY: our own struct; `read` only believes the size.
        let table = unsafe { abi::read(std::ptr::from_ref(table)) }
            .map_err(|e| super::breach(&library.shown(), e))?;
        let (holding, closed) = channel();
        let raw = Arc::new(Raw {
            library,
            table,
            _closed: holding,
        });
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
        let mut capabilities = factory::capabilities(library, |said| {
            if let Some(f) = table.capabilities {
                // SAFETY: the plugin's own function and context; `said` lives for the call.
                unsafe { f(table.ctx, said, Some(factory::take_capabilities)) }
            }
        });
        if table.execute.is_none() && capabilities.has(Feature::Borrow) {
            tracing::warn!(
                plugin = library.shown(),
                "a plugin's group advertises BORROW and has no execute: what is lent to it is copied"
            );
            // What is submitted may outlive the call that lent it.
            capabilities.features = capabilities.features.without(Feature::Borrow);
        }
        let info = ask(&raw).unwrap_or_else(|why| {
            tracing::warn!(
                plugin = library.shown(),
                why,
                "a plugin's group cannot say what it is"
            );
            GroupInfo {
                backend: backend.into(),
                name: backend.into(),
                rank: 0,
                world_size: 0,
                epoch: Epoch(0),
                device: Device::CPU,
                dropped_options: Vec::new(),
            }
        });
        Ok(Self {
            raw,
            capabilities,
            lifecycle: Lifecycle::new(info.backend, info.name),
            device: info.device,
            timeout,
            closed: Mutex::new(Some(closed)),
        })
    }

    /// What a configured group says it is, if `agreed` finds nothing wrong with it. Errors: `Protocol`; the plugin's group is aborted.
    fn claims(&self, agreed: impl FnOnce(&GroupInfo) -> Option<String>) -> Result<GroupInfo> {
        let wrong = match ask(&self.raw) {
            Ok(info) => match agreed(&info) {
                None => return Ok(info),
                Some(wrong) => wrong,
            },
            Err(why) => format!("it cannot say what the group is: {why}"),
        };
        self.raw.abort("the plugin broke the ABI");
        Err(super::breach(&self.raw.library.shown(), wrong))
    }

    fn connect(&self, configuration: &Configuration) -> Result<Arc<Engine>> {
        let raw = &*self.raw;
        let f = raw.library.need(raw.table.configure, "configure")?;
        let store = store::Lent::new(
            &configuration.store,
            configuration.cancel.clone(),
            &raw.library.name,
        )?;
        let mut c = abi::Configuration::empty();
        c.store = &raw const store.table;
        c.prefix = text::lend(&configuration.prefix);
        c.name = text::lend(&configuration.name);
        c.epoch = configuration.epoch.0;
        c.rank = configuration.rank;
        c.world_size = configuration.world_size;
        c.timeout_ms = fault::milliseconds(configuration.deadline);
        raw.library
            // SAFETY: the plugin's own function and context; all arguments live for the call.
            .call(|fault| unsafe { f(raw.table.ctx, &raw const c, fault) })?;
        let (rank, world, epoch) = (configuration.rank, configuration.world_size, configuration.epoch);
        self.claims(|info| {
            let same = (info.rank, info.world_size, info.epoch) == (rank, world, epoch);
            (!same).then(|| {
                format!(
                    "configured as rank {rank} of {world} at epoch {epoch}, it says that it is rank {} of {} at epoch {}",
                    info.rank, info.world_size, info.epoch
                )
            })
        })?;
        self.start(configuration)
    }

    /// The engine of a configuration of the plugin's group that is there.
    fn start(&self, configuration: &Configuration) -> Result<Arc<Engine>> {
        PluginDriver::start(self.raw.clone(), Place::of(configuration), &self.device.kind)
    }

    /// The engine and what it is to be given, or the refusal. Also when the call must have ended: as an instant, and from now in milliseconds.
    fn admit(&self, op: Checked, options: SubmitOptions) -> Result<Admitted, Box<Rejected>> {
        let op = op.into_inner();
        let engine = self.lifecycle.engine().and_then(|engine| {
            let theirs = self.raw.stream(options.stream.as_deref()).map_err(|device| {
                let text = format!(
                    "{} cannot order itself after a stream on {device}",
                    self.lifecycle.backend()
                );
                Error::unsupported(text)
            });
            theirs.map(|_| engine)
        });
        let engine = match engine {
            Ok(engine) => engine,
            Err(error) => {
                let error = error.with_op(op.kind().name());
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let (deadline, timeout_ms) = match options.deadline {
            Some(deadline) => (deadline, fault::milliseconds(deadline)),
            None => (deadline_in(self.timeout), fault::whole(self.timeout)),
        };
        Ok(Admitted {
            engine,
            label: Label::of(&op),
            call: Call {
                op,
                contribute: options.contribute,
                stream: options.stream,
            },
            deadline,
            timeout_ms,
        })
    }
}

/// A call on its way to the engine.
struct Admitted {
    engine: Arc<Engine>,
    label: Label,
    call: Call,
    deadline: Instant,
    timeout_ms: i64,
}

/// Asks the plugin what the group is now.
fn ask(raw: &Raw) -> Result<GroupInfo, String> {
    let mut answer: Answer = None;
    if let Some(info) = raw.table.info {
        // SAFETY: the plugin's own function and context; `answer` lives for the call.
        unsafe { info(raw.table.ctx, (&raw mut answer).cast(), Some(take_info)) }
    }
    answer.unwrap_or_else(|| Err("it said nothing".to_string()))
}

type Answer = Option<Result<GroupInfo, String>>;

unsafe extern "C" fn take_info(ctx: *mut c_void, info: *const abi::Info) {
    guarded((), || {
        // SAFETY: `ctx` is the Answer of the call that is running.
        if let Some(answer) = unsafe { ctx.cast::<Answer>().as_mut() } {
            // SAFETY: the plugin keeps to the ABI: readable for the call.
            *answer = Some(unsafe { read_info(info) });
        }
    });
}

/// # Safety
/// The struct keeps to the ABI.
unsafe fn read_info(info: *const abi::Info) -> Result<GroupInfo, String> {
    // SAFETY: by the contract.
    let i = unsafe { abi::read(info) }?;
    // SAFETY: by the contract.
    let (backend, name, kind) = unsafe {
        (
            text::read(i.backend)?,
            text::read(i.name)?,
            text::read(i.device.kind)?,
        )
    };
    Ok(GroupInfo {
        backend: backend.into(),
        name: name.into(),
        rank: i.rank,
        world_size: i.world_size,
        epoch: Epoch(i.epoch),
        device: Device::new(kind.parse().map_err(|e: Error| e.to_string())?, i.device.index),
        dropped_options: Vec::new(),
    })
}

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for PluginGroup {
    fn info(&self) -> GroupInfo {
        self.lifecycle.info(self.device.clone())
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let admitted = self.admit(op, options)?;
        (admitted.engine).submit_here(admitted.call, admitted.label, admitted.deadline)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        let Some(execute) = self.raw.table.execute else {
            return execute_by_submit(self, op, options);
        };
        let Admitted {
            engine,
            label,
            call,
            deadline,
            timeout_ms,
        } = self.admit(op, options)?;
        engine.carry_out(call, label, deadline, |call| {
            engine.driver().execute(execute, call, timeout_ms)
        })
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Tensor::try_zeros(dtype, &[count])
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| e.with_op("split");
        let (engine, parent) = self.lifecycle.configured().map_err(named)?;
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
            // SAFETY: the plugin's own function and context; all arguments live for the call.
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
            .map_err(named)?;
        if made == 0 {
            return Ok(None);
        }
        let child = Self::adopt(raw.library, &table, self.lifecycle.backend(), self.timeout)?;
        let most = engine.place().world;
        let info = child.claims(|info| {
            let possible = info.rank < info.world_size && info.world_size <= most;
            (!possible).then(|| {
                format!(
                    "a part of a group of {most} ranks says that it is rank {} of {}",
                    info.rank, info.world_size
                )
            })
        })?;
        let configuration = Configuration {
            name: info.name.to_string(),
            epoch: info.epoch,
            rank: info.rank,
            world_size: info.world_size,
            deadline,
            ..parent
        };
        // It is connected.
        child.lifecycle.configure(configuration, |c| child.start(c))?;
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.lifecycle.abort(reason);
        if self.lifecycle.engine().is_err() {
            // It may be inside `configure`, and look at this only.
            self.raw.abort(reason);
        }
    }

    /// The engine is not told of what the plugin finds out between two operations.
    fn error(&self) -> Option<Error> {
        if let Some(error) = self.lifecycle.error() {
            return Some(error);
        }
        // Before it is asked: what it says then is not the failure of a later configuration.
        let engine = self.lifecycle.engine();
        let error = self.raw.error()?;
        if let Ok(engine) = engine {
            engine.fail(error.clone());
        }
        Some(error)
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        if forked::is_child() {
            // The plugin's connections are the parent's.
            return Ok(());
        }
        let raw = &*self.raw;
        let drained = self.lifecycle.shutdown(deadline);
        let f = raw.library.need(raw.table.shutdown, "shutdown")?;
        // SAFETY: the plugin's own function and context.
        let ended =
            (raw.library).call(|fault| unsafe { f(raw.table.ctx, fault::milliseconds(deadline), fault) });
        drained.and(ended)
    }

    fn traffic(&self) -> Traffic {
        let mut t = abi::Traffic::empty();
        if let Some(f) = self.raw.table.traffic {
            // SAFETY: the plugin's own function and context; the struct is ours.
            unsafe { f(self.raw.table.ctx, &raw mut t) }
        }
        Traffic {
            sent: t.sent,
            received: t.received,
        }
    }
}

impl Drop for PluginGroup {
    fn drop(&mut self) {
        // The engine's threads may be the last to let go of the plugin's group, which has its leave to send.
        let closed = self.closed.get_mut().unwrap_or_else(PoisonError::into_inner);
        closed.take().into_iter().for_each(leave_at_exit);
    }
}
