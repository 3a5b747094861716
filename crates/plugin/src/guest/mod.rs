//! The plugin's side: any `BackendFactory` and any `Accelerator` become a dylib with one macro.
//!
//! [`export!`](crate::export) makes the two entry points out of a [`Declaration`]. Everything that comes in is read and
//! checked, every entry is wrapped in `catch_unwind` (a panic becomes a failed group, not a dead process), log events go to
//! the host. Memory is lent: a tensor here is the host's own memory, held through retain and release.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use ftcore::registry::BackendFactory;
use ftcore::{Accelerator, Device, DeviceKind, Error, ErrorKind, Result};

use crate::abi::{self, DeviceId, FAILED, Fault, Growing, OK, Sink, Str};
use crate::{fault, offer, text};

mod device;
mod group;
mod logging;
mod operation;
mod store;

/// A backend of this plugin.
pub struct Backend {
    /// Its name, in lower case.
    pub name: &'static str,
    /// The device kind that it serves.
    pub device: &'static str,
    /// Makes the factory; called once, when the plugin is opened.
    pub factory: fn() -> Arc<dyn BackendFactory>,
}

/// A device kind of this plugin.
pub struct DeviceEntry {
    /// The kind's name, in lower case.
    pub kind: &'static str,
    /// Makes it; called once, when the plugin is opened.
    pub make: fn() -> Arc<dyn Accelerator>,
}

/// What a plugin is and brings. Made by [`export!`](crate::export), as a static.
pub struct Declaration {
    name: &'static str,
    version: &'static str,
    backends: &'static [Backend],
    devices: &'static [DeviceEntry],
    listed: OnceLock<Listed>,
    opened: OnceLock<Opened>,
}

/// The lists of the query, in C.
struct Listed {
    _entries: Vec<abi::BackendEntry>,
    backends: Vec<*const abi::BackendEntry>,
    devices: Vec<Str>,
}

// SAFETY: the pointers lead to static strings and to `_entries`, which is never changed.
unsafe impl Send for Listed {}
// SAFETY: as above: read only.
unsafe impl Sync for Listed {}

struct Opened {
    factories: Vec<Arc<dyn BackendFactory>>,
    devices: Vec<Arc<dyn Accelerator>>,
}

impl Declaration {
    /// A plugin's declaration.
    pub const fn new(
        name: &'static str,
        version: &'static str,
        backends: &'static [Backend],
        devices: &'static [DeviceEntry],
    ) -> Self {
        Self {
            name,
            version,
            backends,
            devices,
            listed: OnceLock::new(),
            opened: OnceLock::new(),
        }
    }

    /// Answers `oxccl_plugin_query_v1`.
    ///
    /// # Safety
    /// `reply` is the reply of the call that is running.
    pub unsafe fn query(&'static self, reply: *mut abi::QueryReply) -> i32 {
        catch_unwind(AssertUnwindSafe(|| {
            let listed = self.listed.get_or_init(|| {
                let entries: Vec<abi::BackendEntry> = self
                    .backends
                    .iter()
                    .map(|b| {
                        let mut entry = abi::BackendEntry::empty();
                        entry.name = text::lend(b.name);
                        entry.device = text::lend(b.device);
                        entry
                    })
                    .collect();
                Listed {
                    backends: entries.iter().map(|e| &raw const *e).collect(),
                    _entries: entries,
                    devices: self.devices.iter().map(|d| text::lend(d.kind)).collect(),
                }
            });
            let mut r = abi::QueryReply::empty();
            r.magic = abi::MAGIC;
            r.major = abi::MAJOR;
            r.min_minor = abi::MINIMUM_MINOR;
            r.max_minor = abi::MINOR;
            r.backend_count = u32::try_from(listed.backends.len()).unwrap_or(0);
            r.device_count = u32::try_from(listed.devices.len()).unwrap_or(0);
            r.name = text::lend(self.name);
            r.version = text::lend(self.version);
            r.backends = listed.backends.as_ptr();
            r.devices = listed.devices.as_ptr();
            // SAFETY: by the contract; the lists are static.
            match unsafe { abi::write(reply, &r) } {
                Ok(()) => OK,
                Err(_) => FAILED,
            }
        }))
        .unwrap_or_else(|panic| {
            std::mem::forget(panic);
            FAILED
        })
    }

    /// Answers `oxccl_plugin_open_v1`.
    ///
    /// # Safety
    /// The arguments are those of the call that is running; `host` stays valid as long as the process.
    pub unsafe fn open(
        &'static self,
        host: *const abi::Host,
        plugin: *mut abi::Plugin,
        fault: *mut Fault,
    ) -> i32 {
        guarded("opening the plugin", fault, || {
            // SAFETY: by the contract.
            let host = unsafe { abi::read(host) }.map_err(breach)?;
            if !(abi::MINIMUM_MINOR..=abi::MINOR).contains(&host.minor) {
                return Err(Error::unsupported(format!(
                    "the host chose ABI 1.{}; this plugin speaks 1.{} to 1.{}",
                    host.minor,
                    abi::MINIMUM_MINOR,
                    abi::MINOR
                )));
            }
            logging::install(host);
            let opened = self.opened.get_or_init(|| Opened {
                factories: self.backends.iter().map(|b| (b.factory)()).collect(),
                devices: self.devices.iter().map(|d| (d.make)()).collect(),
            });
            let mut table = abi::Plugin::empty();
            table.ctx = std::ptr::from_ref(opened).cast_mut().cast();
            table.probe = Some(probe);
            table.capabilities = Some(capabilities);
            table.create = Some(create);
            table.device = Some(device);
            table.library = Some(library);
            // SAFETY: by the contract.
            unsafe { abi::write(plugin, &table) }.map_err(breach)
        })
    }
}

/// The host did not keep to the ABI.
fn breach(what: String) -> Error {
    Error::new(ErrorKind::Protocol, format!("the host broke the ABI: {what}"))
}

/// The text of a panic; the payload itself is kept for ever, because dropping it could panic again.
fn panicked(what: &str, panic: Box<dyn Any + Send>) -> Error {
    let words = panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a text".to_string());
    std::mem::forget(panic);
    Error::new(
        ErrorKind::Internal,
        format!("the plugin panicked while {what}: {words}"),
    )
}

/// Runs an entry point; a panic becomes its error.
fn guarded(what: &str, fault: *mut Fault, run: impl FnOnce() -> Result<()>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(panicked(what, panic)));
    // SAFETY: every caller passes the fault of the call that is running.
    unsafe { fault::answer(result, fault) }
}

/// Runs an entry point that has no way to fail; a panic is logged.
fn quiet(what: &str, run: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        let error = panicked(what, panic);
        drop(catch_unwind(AssertUnwindSafe(|| {
            tracing::error!(%error, "caught in a plugin");
        })));
    }
}

/// The factory named by the host.
///
/// # Safety
/// `ctx` is the one that `open` gave out.
unsafe fn factory(ctx: *mut c_void, backend: u32) -> Result<&'static Arc<dyn BackendFactory>> {
    // SAFETY: `open` gave out a static.
    let opened = unsafe { ctx.cast::<Opened>().as_ref() };
    opened
        .and_then(|o| o.factories.get(backend as usize))
        .ok_or_else(|| Error::invalid(format!("this plugin has no backend {backend}")))
}

/// A device as the host names it.
///
/// # Safety
/// The text is readable for the call.
unsafe fn read_device(id: DeviceId) -> Result<Device> {
    // SAFETY: by the contract.
    let kind = unsafe { text::borrow(id.kind) }.map_err(breach)?;
    if kind == "cpu" {
        return Ok(Device::new(DeviceKind::Cpu, id.index));
    }
    Ok(Device::new(kind.parse()?, id.index))
}

unsafe extern "C" fn probe(ctx: *mut c_void, backend: u32, fault: *mut Fault) -> i32 {
    guarded("it was probed", fault, || {
        // SAFETY: the host passes our own ctx.
        unsafe { factory(ctx, backend) }?.probe()
    })
}

unsafe extern "C" fn capabilities(
    ctx: *mut c_void,
    backend: u32,
    reply_ctx: *mut c_void,
    reply: offer::Reply,
) {
    quiet("its capabilities were asked for", || {
        // SAFETY: the host passes our own ctx, and its own reply.
        unsafe {
            if let Ok(factory) = factory(ctx, backend) {
                offer::tell(&factory.capabilities(), reply_ctx, reply);
            }
        }
    });
}

unsafe extern "C" fn library(ctx: *mut c_void, backend: u32, sink: Sink) {
    quiet("its library was asked for", || {
        // SAFETY: the host passes our own ctx, and its own sink.
        unsafe {
            if let Some(library) = factory(ctx, backend).ok().and_then(|f| f.library()) {
                text::give(&sink, library.as_bytes());
            }
        }
    });
}

unsafe extern "C" fn create(
    ctx: *mut c_void,
    backend: u32,
    device: DeviceId,
    options: *const abi::GroupOptions,
    group: *mut abi::Group,
    fault: *mut Fault,
) -> i32 {
    guarded("a group was made", fault, || {
        // SAFETY: the host passes our own ctx and keeps to the ABI for the rest.
        unsafe {
            let factory = factory(ctx, backend)?;
            let device = read_device(device)?;
            let options = offer::read_options(options).map_err(breach)?;
            group::export(factory.create(&device, &options)?, group)
        }
    })
}

unsafe extern "C" fn device(
    ctx: *mut c_void,
    device: u32,
    table: *mut abi::DeviceTable,
    fault: *mut Fault,
) -> i32 {
    guarded("a device kind was asked for", fault, || {
        // SAFETY: `open` gave out a static.
        let opened = unsafe { ctx.cast::<Opened>().as_ref() };
        let accelerator = opened
            .and_then(|o| o.devices.get(device as usize))
            .ok_or_else(|| Error::invalid(format!("this plugin has no device kind {device}")))?;
        // SAFETY: the host keeps to the ABI; what is exported is static.
        unsafe { abi::write(table, &device::export(accelerator)) }.map_err(breach)
    })
}

/// Makes this crate (a `cdylib`) an oxccl plugin.
///
/// `backends` are (name, device kind, function that makes an `Arc<dyn BackendFactory>`); `devices`, which may be left out,
/// are (kind, function that makes an `Arc<dyn Accelerator>`). Once per library.
///
/// ```no_run
/// use std::sync::Arc;
/// # use oxccl_plugin::ftcore::{self, Capabilities, Device, GroupOptions, ProcessGroup, Result};
/// # struct MyFactory;
/// # impl ftcore::registry::BackendFactory for MyFactory {
/// #     fn probe(&self) -> Result<()> { Ok(()) }
/// #     fn capabilities(&self) -> Capabilities { unimplemented!() }
/// #     fn create(&self, _: &Device, _: &GroupOptions) -> Result<Box<dyn ProcessGroup>> { unimplemented!() }
/// # }
/// oxccl_plugin::export! {
///     name: "acme",
///     version: env!("CARGO_PKG_VERSION"),
///     backends: [("acme", "cpu", || Arc::new(MyFactory))],
/// }
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! export {
    (
        name: $name:expr,
        version: $version:expr,
        backends: [ $( ($backend:expr, $device:expr, $factory:expr $(,)?) ),* $(,)? ]
        $(, devices: [ $( ($kind:expr, $make:expr $(,)?) ),* $(,)? ])?
        $(,)?
    ) => {
        static OXCCL_PLUGIN: $crate::guest::Declaration = $crate::guest::Declaration::new(
            $name,
            $version,
            &[ $( $crate::guest::Backend { name: $backend, device: $device, factory: $factory } ),* ],
            &[ $( $( $crate::guest::DeviceEntry { kind: $kind, make: $make } ),* )? ],
        );

        /// The plugin's pure entry point.
        ///
        /// # Safety
        /// Called by an oxccl host, which keeps to the plugin ABI.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn oxccl_plugin_query_v1(reply: *mut $crate::abi::QueryReply) -> i32 {
            // SAFETY: the host's own argument.
            unsafe { OXCCL_PLUGIN.query(reply) }
        }

        /// The entry point that starts the plugin.
        ///
        /// # Safety
        /// Called by an oxccl host, which keeps to the plugin ABI.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn oxccl_plugin_open_v1(
            host: *const $crate::abi::Host,
            plugin: *mut $crate::abi::Plugin,
            fault: *mut $crate::abi::Fault,
        ) -> i32 {
            // SAFETY: the host's own arguments.
            unsafe { OXCCL_PLUGIN.open(host, plugin, fault) }
        }
    };
}
