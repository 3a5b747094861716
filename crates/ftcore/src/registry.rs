//! The backend registry: duplicate-safe, it warns instead of asserting.
//!
//! Key: (backend name in lower case, device kind). Static registrations (through `inventory`), API calls and plugins
//! meet in [`Registry::register`]; nothing else writes the map. When two *different* providers claim one key, the
//! higher provenance wins (API call, then a plugin that the user named, then built-in), and the first within one; there
//! is one warning that names both and the winner, and [`Registry::conflicts`] lists it. Never a panic, never silence.

use std::collections::BTreeMap;
use std::fmt;
#[cfg(not(feature = "shuttle"))]
use std::sync::RwLock;
use std::sync::{Arc, Once, OnceLock, PoisonError};

#[cfg(feature = "shuttle")]
use shuttle::sync::RwLock;

use crate::nearest::nearest;
use crate::{
    Capabilities, Device, DeviceKind, Error, ErrorKind, GroupOptions, ProcessGroup, Resolved, Result, Staged,
};

mod defaults;
mod reporting;
#[cfg(test)]
mod tests;
mod unavailable;

pub use defaults::{DefaultBackends, ENV_DEFAULT_BACKEND, device_pairs};
pub use unavailable::Unavailable;

/// Where a provider comes from, from weakest to strongest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Provenance {
    /// Linked into the program.
    BuiltIn,
    /// A dylib from a path that the user named.
    Plugin,
    /// Registered by a call of the program.
    Api,
}

/// Who provides a backend: the same identity twice is the same provider.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// Where it comes from.
    pub provenance: Provenance,
    /// The crate's name, or the dylib's canonical path.
    pub origin: String,
    /// Its version.
    pub version: String,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.provenance {
            Provenance::BuiltIn => "built in",
            Provenance::Plugin => "plugin",
            Provenance::Api => "API call",
        };
        write!(f, "{} {} ({kind})", self.origin, self.version)
    }
}

/// Makes groups of one backend.
///
/// ```
/// use ftcore::registry::BackendFactory;
/// use ftcore::{
///     Capabilities, DType, DTypeSet, Device, Error, FeatureSet, GroupOptions, OpKind, OpSet, ProcessGroup, ReduceOp,
///     Result, names,
/// };
///
/// struct Mine;
///
/// impl BackendFactory for Mine {
///     fn probe(&self) -> Result<()> {
///         Ok(()) // no library to look for
///     }
///     fn capabilities(&self) -> Capabilities {
///         Capabilities {
///             ops: OpSet::of(&[OpKind::Broadcast, OpKind::Barrier]),
///             moves: DTypeSet::of(&[DType::F32]),
///             reduces: [DTypeSet::NONE; ReduceOp::COUNT],
///             features: FeatureSet::NONE,
///             options: Vec::new(),
///             devices: names(&["cpu"]),
///             notes: Vec::new(),
///         }
///     }
///     fn create(&self, _: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
///         options.require_honoured("mine", &[])?;
///         Err(Error::unsupported("no groups yet"))
///     }
/// }
/// ```
pub trait BackendFactory: Send + Sync {
    /// Whether it can be used here and now; the error says why not (library not found at …, symbol missing, no
    /// device, version too old). Cheap enough to be called for a table.
    fn probe(&self) -> Result<()>;
    /// What its groups offer.
    fn capabilities(&self) -> Capabilities;
    /// The vendor library behind it, in words (name, version, path), if there is one and it was found.
    fn library(&self) -> Option<String> {
        None
    }
    /// A new, unconfigured group on `device`. Programs call [`Backend::create`], which settles the options first: they have the names
    /// that [`capabilities`](Self::capabilities) lists. One that is not honoured is refused (INV-9).
    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>>;
}

/// A registration: key, source and factory.
#[derive(Clone)]
pub struct Backend {
    /// The name, in lower case.
    pub name: String,
    /// The device kind that it serves.
    pub device: DeviceKind,
    /// Who provides it.
    pub source: Source,
    /// Makes the groups.
    pub factory: Arc<dyn BackendFactory>,
}

impl Backend {
    /// What [`create`](Self::create) makes of `options`: to find out before anything is started.
    ///
    /// Errors: those of [`GroupOptions::resolved`].
    pub fn resolve(&self, options: &GroupOptions) -> Result<Resolved> {
        options.resolved(&self.name, &self.factory.capabilities().options)
    }

    /// A new, unconfigured group on `device`, with `options` as [`GroupOptions::resolved`] settles them: the variables of the environment
    /// count, and what is dropped stands in [`GroupInfo::dropped_options`](crate::GroupInfo::dropped_options).
    ///
    /// Errors: why the backend cannot be used here; those of [`GroupOptions::resolved`]; its own.
    pub fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        self.factory.probe()?;
        let resolved = self.resolve(options)?;
        let group = self.factory.create(device, &resolved.options)?;
        Ok(reporting::with_dropped(group, resolved.dropped))
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Backend({} on {} from {})",
            self.name, self.device, self.source
        )
    }
}

/// A backend that is linked in. Submit one with `ftcore::inventory::submit!`.
pub struct StaticBackend {
    /// The name.
    pub name: &'static str,
    /// The device kind's name.
    pub device: &'static str,
    /// The crate.
    pub origin: &'static str,
    /// The crate's version.
    pub version: &'static str,
    /// Makes the factory.
    pub factory: fn() -> Arc<dyn BackendFactory>,
}

inventory::collect!(StaticBackend);

/// Where more backends come from than are linked in: plugins. Submit one with `ftcore::inventory::submit!`.
pub struct Finder {
    /// Registers them with the process's registry. Called once, before the first backend is looked up there; it looks none up itself.
    pub find: fn(),
}

inventory::collect!(Finder);

/// What to do when a key is taken by another provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnConflict {
    /// Keep the stronger provenance, else the first; warn once.
    #[default]
    Keep,
    /// Take the new one; warn once.
    Replace,
    /// An error of kind `Conflict`.
    Strict,
}

/// What a registration led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The key was free.
    Registered,
    /// The same provider stands there already; nothing changed.
    AlreadyThere,
    /// Another provider lost the key to this one.
    Replaced(Source),
    /// Another provider keeps the key.
    Shadowed(Source),
}

/// Two providers that claimed one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConflictRecord {
    /// The backend's name.
    pub name: String,
    /// The device kind.
    pub device: DeviceKind,
    /// Who has the key.
    pub winner: Source,
    /// Who has not.
    pub loser: Source,
}

/// A provider that was named but cannot be used, so that it has no entry.
#[derive(Debug, Clone)]
pub struct Unusable {
    /// The backend that it was named for, in lower case, if that is known.
    pub name: Option<String>,
    /// The dylib.
    pub origin: String,
    /// Why not; see [`Unavailable::of`].
    pub error: Error,
}

/// A map of backends. There is one per process ([`Registry::global`]); tests make their own.
///
/// ```
/// use ftcore::{Device, GroupOptions, Registry};
///
/// for backend in Registry::global().list() {
///     println!("{} for {}: {}", backend.name, backend.device, backend.source);
/// }
/// // One that is not there is an error that says which ones are.
/// assert!(Registry::global().create("mine", &Device::CPU, &GroupOptions::default()).is_err());
/// ```
#[derive(Default)]
pub struct Registry {
    inner: RwLock<Inner>,
    /// It is the process's.
    is_global: bool,
}

#[derive(Default)]
struct Inner {
    map: BTreeMap<(String, DeviceKind), Backend>,
    conflicts: Vec<ConflictRecord>,
    unusable: Vec<Unusable>,
}

/// A backend's name as it is registered: in lower case.
///
/// Errors: `InvalidArgument` if it is empty or has anything but letters, digits, '-', '_', '.' and '+' in it.
pub fn check_name(name: &str) -> Result<String> {
    let good = |c: char| c.is_alphanumeric() || "-_.+".contains(c);
    if name.is_empty() || !name.chars().all(good) {
        return Err(Error::invalid(format!(
            "'{}' is not a backend name: it must be letters, digits, '-', '_', '.' and '+', without spaces",
            name.escape_debug()
        )));
    }
    Ok(name.to_lowercase())
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// The process's registry, with everything that is linked in. Static registrations enter in the order of their
    /// names and origins, so that the order of linking cannot change a winner.
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Registry> = OnceLock::new();
        GLOBAL.get_or_init(|| {
            let registry = Self {
                is_global: true,
                ..Self::new()
            };
            let mut linked: Vec<&StaticBackend> = inventory::iter::<StaticBackend>.into_iter().collect();
            linked.sort_by_key(|b| (b.name, b.device, b.origin, b.version));
            for b in linked {
                let outcome = b.device.parse().and_then(|device| {
                    let source = Source {
                        provenance: Provenance::BuiltIn,
                        origin: b.origin.to_string(),
                        version: b.version.to_string(),
                    };
                    let backend = Backend { name: b.name.to_string(), device, source, factory: (b.factory)() };
                    registry.register(backend, OnConflict::Keep)
                });
                if let Err(error) = outcome {
                    tracing::warn!(name = b.name, origin = b.origin, %error, "a linked-in backend was not registered");
                }
            }
            registry
        })
    }

    /// Registers a backend. See the module for who wins.
    ///
    /// Errors: `InvalidArgument` for a bad name; `Conflict` with `Strict`.
    pub fn register(&self, mut backend: Backend, on_conflict: OnConflict) -> Result<Outcome> {
        backend.name = check_name(&backend.name)?;
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let key = (backend.name.clone(), backend.device.clone());
        let Some(present) = inner.map.get(&key) else {
            inner.map.insert(key, backend);
            return Ok(Outcome::Registered);
        };
        if present.source == backend.source {
            return Ok(Outcome::AlreadyThere);
        }
        let present_source = present.source.clone();
        let text = format!(
            "backend '{}' for {} is provided by {present_source} and by {}",
            backend.name, backend.device, backend.source
        );
        let replace = match on_conflict {
            OnConflict::Strict => return Err(Error::new(ErrorKind::Conflict, text)),
            OnConflict::Replace => true,
            OnConflict::Keep => backend.source.provenance > present_source.provenance,
        };
        let (winner, loser) = if replace {
            (backend.source.clone(), present_source.clone())
        } else {
            (present_source.clone(), backend.source.clone())
        };
        let record = ConflictRecord {
            name: key.0.clone(),
            device: key.1.clone(),
            winner: winner.clone(),
            loser,
        };
        if !inner.conflicts.contains(&record) {
            tracing::warn!("{text}; {winner} is used");
            inner.conflicts.push(record);
        }
        if replace {
            inner.map.insert(key, backend);
            Ok(Outcome::Replaced(present_source))
        } else {
            Ok(Outcome::Shadowed(present_source))
        }
    }

    /// Remembers that the provider at `origin`, named for backend `name` if that is known, cannot be used: a look-up that
    /// finds nothing then says why. The last note for an origin counts.
    pub fn note_unusable(&self, name: Option<&str>, origin: &str, error: Error) {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let name = name.map(str::to_lowercase);
        inner.unusable.retain(|u| u.origin != origin || u.name != name);
        inner.unusable.push(Unusable {
            name,
            origin: origin.to_string(),
            error,
        });
    }

    /// Providers that were named but cannot be used.
    pub fn unusable(&self) -> Vec<Unusable> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.unusable.clone()
    }

    /// Every key that two providers claimed, with winner and loser.
    pub fn conflicts(&self) -> Vec<ConflictRecord> {
        self.inner
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .conflicts
            .clone()
    }

    /// All backends, sorted by name and device.
    pub fn list(&self) -> Vec<Backend> {
        self.inner
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .map
            .values()
            .cloned()
            .collect()
    }

    /// Has every [`Finder`] look once, if this is the process's registry.
    fn complete(&self) {
        static FOUND: Once = Once::new();
        if self.is_global {
            FOUND.call_once(|| {
                inventory::iter::<Finder>
                    .into_iter()
                    .for_each(|finder| (finder.find)())
            });
        }
    }

    /// The backend `name` (any case) for `device`; with no device, the only one of that name. Of the process's registry every
    /// [`Finder`] has looked before.
    ///
    /// Errors: `NotFound` says what is known, which near name was probably meant, and what was named for it but cannot be
    /// used (the reason is the source); `InvalidArgument` if the name is ambiguous between devices.
    pub fn get(&self, name: &str, device: Option<&DeviceKind>) -> Result<Backend> {
        self.complete();
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let name = check_name(name)?;
        let of_name: Vec<&Backend> = inner.map.values().filter(|b| b.name == name).collect();
        let found: Vec<&Backend> = of_name
            .iter()
            .copied()
            .filter(|b| device.is_none_or(|d| *d == b.device))
            .collect();
        match found.as_slice() {
            [one] => Ok((*one).clone()),
            [] => Err(inner.not_found(&name, device, !of_name.is_empty())),
            several => {
                let devices: Vec<String> = several
                    .iter()
                    .map(|b| format!("{}:{}", b.device, b.name))
                    .collect();
                Err(Error::invalid(format!(
                    "backend '{name}' serves several devices; say which: {}",
                    devices.join(", ")
                )))
            }
        }
    }

    /// The backend for `device` when the caller names none: the built-in table (cpu gloo, cuda nccl, xpu xccl, hpu
    /// hccl), overridden by `OXCCL_DEFAULT_BACKEND`. What is registered, and when, has no influence.
    ///
    /// Errors: `InvalidArgument` if the variable cannot be read; `NotFound` for a device kind without a default.
    pub fn default_backend(device: &DeviceKind) -> Result<String> {
        DefaultBackends::from_env()?.of(device).map(str::to_string)
    }

    /// True if the backend is known and its probe passes; the error says why not.
    pub fn is_backend_available(&self, name: &str, device: Option<&DeviceKind>) -> Result<()> {
        self.get(name, device)?.factory.probe()
    }

    /// A new, unconfigured group of `name` on `device`.
    ///
    /// A backend that serves host memory only (gloo) is put behind [`Staged`] for a device whose kind is known in this
    /// program, so that a group can fall back to it on any device.
    pub fn create(
        &self,
        name: &str,
        device: &Device,
        options: &GroupOptions,
    ) -> Result<Box<dyn ProcessGroup>> {
        let backend = match self.get(name, Some(&device.kind)) {
            Err(e) if e.kind() == ErrorKind::NotFound && !device.is_cpu() => {
                let Ok(host) = self.get(name, Some(&DeviceKind::Cpu)) else {
                    return Err(e);
                };
                crate::accelerator(&device.kind)?;
                let inner = host.create(&Device::CPU, options)?;
                let staged = Staged::new(Arc::from(inner), device, options.timeout)?;
                return Ok(Box::new(staged));
            }
            found => found?,
        };
        backend.create(device, options)
    }
}

impl Inner {
    fn not_found(&self, name: &str, device: Option<&DeviceKind>, on_other_devices: bool) -> Error {
        let known: Vec<String> = self
            .map
            .values()
            .map(|b| format!("{}:{}", b.device, b.name))
            .collect();
        let mut text = match device {
            Some(d) if on_other_devices => format!("backend '{name}' does not serve {d}"),
            _ => format!("no backend '{name}'"),
        };
        text.push_str("; known: ");
        text.push_str(&if known.is_empty() {
            "none".to_string()
        } else {
            known.join(", ")
        });
        let named = |u: &&Unusable| u.name.as_deref() == Some(name);
        if let Some(meant) = self.unusable.iter().find(named) {
            text.push_str(&format!(". {} cannot be used: {}", meant.origin, meant.error));
            return Error::new(ErrorKind::NotFound, text).with_source(meant.error.clone());
        }
        for other in self.unusable.iter().filter(|u| u.name.is_none()) {
            text.push_str(&format!(". Not used: {}: {}", other.origin, other.error));
        }
        let near = nearest(name, self.map.values().map(|b| b.name.as_str()));
        if let Some(near) = near.filter(|_| !on_other_devices) {
            text.push_str(&format!(". Did you mean '{near}'?"));
        }
        Error::new(ErrorKind::NotFound, text)
    }
}
