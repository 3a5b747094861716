//! What an opened plugin brings, as backends and device kinds of this program.

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

use ftcore::registry::{Backend, BackendFactory, OnConflict, Outcome, Provenance, Source};
use ftcore::{
    Capabilities, DTypeSet, Device, ErrorKind, FeatureSet, GroupOptions, OpSet, ProcessGroup, ReduceOp,
    Registry, Result,
};

use super::device;
use super::group::PluginGroup;
use super::library::Library;
use crate::abi::{self, Growing};
use crate::text::Collected;
use crate::{offer, text};

/// A plugin that was opened in this process.
#[derive(Clone, Copy)]
pub struct Loaded(pub(super) &'static Library);

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loaded({} {})", self.0.shown(), self.0.version)
    }
}

impl Loaded {
    /// Its own name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its version.
    pub fn version(&self) -> &str {
        &self.0.version
    }

    /// Its file, with all symlinks resolved: its identity.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The minor version of the ABI that both sides use.
    pub fn abi_minor(&self) -> u32 {
        self.0.minor
    }

    /// The device kinds that it brings.
    pub fn devices(&self) -> &[ftcore::DeviceKind] {
        &self.0.devices
    }

    /// Its backends, ready to be registered or used.
    pub fn backends(&self) -> Vec<Backend> {
        let source = Source {
            provenance: Provenance::Plugin,
            origin: self.0.path.display().to_string(),
            version: self.0.version.clone(),
        };
        (0u32..)
            .zip(&self.0.backends)
            .map(|(index, (name, device))| Backend {
                name: name.clone(),
                device: device.clone(),
                source: source.clone(),
                factory: Arc::new(PluginFactory {
                    library: self.0,
                    index,
                    name: name.clone(),
                }),
            })
            .collect()
    }

    /// Registers its backends, and its device kinds process-wide. A device kind that another has registered stays with
    /// that one (logged).
    ///
    /// Errors: as [`Registry::register`].
    pub fn register(&self, registry: &Registry, on_conflict: OnConflict) -> Result<Vec<(Backend, Outcome)>> {
        self.register_some(registry, on_conflict, |_| true)
    }

    /// As [`register`](Self::register), for the backends with a name that `wanted` accepts.
    pub(super) fn register_some(
        &self,
        registry: &Registry,
        on_conflict: OnConflict,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<(Backend, Outcome)>> {
        self.register_devices();
        self.backends()
            .into_iter()
            .filter(|b| wanted(&b.name))
            .map(|b| {
                let outcome = registry.register(b.clone(), on_conflict)?;
                Ok((b, outcome))
            })
            .collect()
    }

    fn register_devices(&self) {
        for (index, kind) in (0u32..).zip(&self.0.devices) {
            match device::register(self.0, index, kind) {
                Err(e) if e.kind() == ErrorKind::Conflict => {
                    tracing::debug!(plugin = self.name(), %kind, "the device kind is there already");
                }
                Err(error) => {
                    tracing::warn!(plugin = self.name(), %kind, %error, "a device kind was not registered")
                }
                Ok(()) => {}
            }
        }
    }
}

struct PluginFactory {
    library: &'static Library,
    index: u32,
    name: String,
}

/// What a plugin said it offers.
struct Said(Option<Result<Capabilities, String>>);

pub(super) unsafe extern "C" fn take_capabilities(ctx: *mut c_void, capabilities: *const abi::Capabilities) {
    super::library::guarded((), || {
        // SAFETY: `ctx` is the Said of the call that is running; the plugin keeps to the ABI.
        unsafe {
            if let Some(said) = ctx.cast::<Said>().as_mut() {
                said.0 = Some(offer::read(capabilities));
            }
        }
    });
}

/// Asks for capabilities with `ask`, which gets the context for [`take_capabilities`]. A plugin that says nothing sensible
/// offers nothing.
pub(super) fn capabilities(library: &Library, ask: impl FnOnce(*mut c_void)) -> Capabilities {
    let mut said = Said(None);
    ask((&raw mut said).cast());
    let why = match said.0 {
        Some(Ok(capabilities)) => return capabilities,
        Some(Err(why)) => why,
        None => "it said nothing".to_string(),
    };
    tracing::warn!(
        plugin = library.shown(),
        why,
        "a plugin's capabilities cannot be read; it offers nothing"
    );
    Capabilities {
        ops: OpSet::NONE,
        moves: DTypeSet::NONE,
        reduces: [DTypeSet::NONE; ReduceOp::COUNT],
        features: FeatureSet::NONE,
        options: Vec::new(),
        devices: Vec::new(),
        notes: Vec::new(),
    }
}

impl BackendFactory for PluginFactory {
    fn probe(&self) -> Result<()> {
        let f = self.library.need(self.library.table.probe, "probe")?;
        // SAFETY: the plugin's own function and context.
        self.library
            .call(|fault| unsafe { f(self.library.table.ctx, self.index, fault) })
    }

    fn capabilities(&self) -> Capabilities {
        capabilities(self.library, |said| {
            if let Some(f) = self.library.table.capabilities {
                // SAFETY: the plugin's own function and context; `said` lives for the call.
                unsafe { f(self.library.table.ctx, self.index, said, Some(take_capabilities)) }
            }
        })
    }

    fn library(&self) -> Option<String> {
        let f = self.library.table.library?;
        let mut answer = Collected::default();
        let sink = answer.sink();
        // SAFETY: the plugin's own function and context; the sink lives for the call.
        unsafe { f(self.library.table.ctx, self.index, sink) };
        let words = answer.one().ok()?;
        String::from_utf8(words).ok().filter(|w| !w.is_empty())
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        let f = self.library.need(self.library.table.create, "create")?;
        options.check()?;
        let mut table = abi::Group::empty();
        let id = abi::DeviceId {
            kind: text::lend(device.kind.name()),
            index: device.index,
            reserved: 0,
        };
        offer::with_options(options, |options| {
            // SAFETY: the plugin's own function and context; all arguments live for the call.
            self.library.call(|fault| unsafe {
                f(
                    self.library.table.ctx,
                    self.index,
                    id,
                    options,
                    &raw mut table,
                    fault,
                )
            })
        })?;
        let group = PluginGroup::adopt(self.library, &table, &self.name, options.timeout)?;
        Ok(Box::new(group))
    }
}
