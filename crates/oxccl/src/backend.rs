//! Choosing a backend as the programs do: plugins are found before the first backend is looked up, a device names its default, and a library that cannot abort or be
//! configured again runs in a child process where that is asked for.
//!
//! A program that makes fault-tolerant groups calls [`init`] first thing in `main`: the children that isolated groups
//! start are the program itself, started again.

use std::sync::{Arc, OnceLock};

use ftcore::registry::Backend;
use ftcore::registry::Finder;
use ftcore::{Device, Feature, GroupOptions, ProcessGroup, Registry, Result};
use isolate::IsolateOptions;
use world::WorldOptions;

/// To be called first thing in `main`, before arguments are read or anything is printed. Returns at once in an ordinary
/// process; in one that an isolated group started it serves as the group's child and never returns.
pub fn init() {
    isolate::run_child_if_asked();
}

ftcore::inventory::submit! {
    Finder {
        find: || {
            load_plugins();
        },
    }
}

/// Registers the plugins that `OXCCL_PLUGIN_PATH` and `OXCCL_PLUGIN_LIB_<NAME>` name, once per process, and says what came of each. Happens by itself
/// before the first backend is looked up in [`Registry::global`]. A plugin that cannot be used is a warning and a line in the reports.
pub fn load_plugins() -> &'static [plugin::Report] {
    static REPORTS: OnceLock<Vec<plugin::Report>> = OnceLock::new();
    REPORTS.get_or_init(|| plugin::discover(Registry::global()))
}

/// The backend of that name, or the device kind's default, plugins included.
///
/// Errors: those of [`Registry::get`] and [`Registry::default_backend`].
pub fn find(name: Option<&str>, device: &Device) -> Result<Backend> {
    let name = match name {
        Some(name) => name.to_string(),
        None => Registry::default_backend(&device.kind)?,
    };
    Registry::global().get(&name, Some(&device.kind))
}

/// A group for a manager: one that can be aborted and configured again. `name` is a backend's, or one for each device kind as in
/// `cpu:gloo,cuda:nccl`, and may have `messages:gloo` behind it ([`world::BackendSpec`]). A backend that cannot do both in process
/// (oneCCL has no abort, and its survivors hang) is isolated in a child process with a spare kept warm.
///
/// Errors: as [`find`] and [`world::WorldOptions::group`], the reason why the backend cannot be used here, and options that it does not
/// honour (INV-9).
pub fn fault_tolerant_group(
    name: Option<&str>,
    device: &Device,
    options: &GroupOptions,
) -> Result<Arc<dyn ProcessGroup>> {
    let wanted = WorldOptions {
        backends: name.unwrap_or_default().parse()?,
        device: device.clone(),
        options: options.clone(),
        make: Arc::new(fault_tolerant_backend),
        ..WorldOptions::default()
    };
    Ok(Arc::from(wanted.group("group")?))
}

/// [`fault_tolerant_group`] for one backend.
fn fault_tolerant_backend(
    name: &str,
    device: &Device,
    options: &GroupOptions,
) -> Result<Box<dyn ProcessGroup>> {
    let backend = match find(Some(name), device) {
        Ok(backend) => backend,
        // The registry may still serve the device, through the host.
        Err(_) => return Registry::global().create(name, device, options),
    };
    backend.factory.probe()?;
    let capabilities = backend.factory.capabilities();
    if capabilities.has(Feature::Abort) && capabilities.has(Feature::Reconfigure) {
        return backend.create(device, options);
    }
    let template = IsolateOptions {
        spare: true,
        ..IsolateOptions::new(backend.name.clone(), device.clone())
    };
    tracing::info!(
        backend = backend.name,
        "runs in a child process: it cannot be aborted in process"
    );
    isolate::wrap(&backend, template).create(device, options)
}
