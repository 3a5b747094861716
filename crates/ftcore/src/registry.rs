//! The backend registry: duplicate-safe, it warns instead of asserting.
//!
//! Key: (backend name in lower case, device kind). Static registrations (through `inventory`), API calls and plugins
//! meet in [`Registry::register`]; nothing else writes the map. When two *different* providers claim one key, the
//! higher provenance wins (API call, then a plugin that the user named, then built-in), and the first within one; there
//! is one warning that names both and the winner, and [`Registry::conflicts`] lists it. Never a panic, never silence.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::{Capabilities, Device, DeviceKind, Error, ErrorKind, GroupOptions, ProcessGroup, Result};

mod defaults;

pub use defaults::{DefaultBackends, ENV_DEFAULT_BACKEND};

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
    /// A new, unconfigured group on `device`. Options that are not honoured are refused (INV-9).
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

/// A map of backends. There is one per process ([`Registry::global`]); tests make their own.
#[derive(Default)]
pub struct Registry {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    map: BTreeMap<(String, DeviceKind), Backend>,
    conflicts: Vec<ConflictRecord>,
}

fn check_name(name: &str) -> Result<String> {
    let bad = name.is_empty()
        || name
            .chars()
            .any(|c| c == ':' || c == ',' || c.is_whitespace() || c.is_control());
    if bad {
        return Err(Error::invalid(format!(
            "'{name}' is not a backend name: it must be non-empty and free of ':', ',' and spaces"
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
            let registry = Self::new();
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

    /// The backend `name` (any case) for `device`; with no device, the only one of that name.
    ///
    /// Errors: `NotFound` says what is known and which near name was probably meant; `InvalidArgument` if the name is
    /// ambiguous between devices.
    pub fn get(&self, name: &str, device: Option<&DeviceKind>) -> Result<Backend> {
        let name = check_name(name)?;
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let of_name: Vec<&Backend> = inner.map.values().filter(|b| b.name == name).collect();
        let found: Vec<&Backend> = of_name
            .iter()
            .copied()
            .filter(|b| device.is_none_or(|d| *d == b.device))
            .collect();
        match found.as_slice() {
            [one] => Ok((*one).clone()),
            [] => {
                let known: Vec<String> = inner
                    .map
                    .values()
                    .map(|b| format!("{}:{}", b.device, b.name))
                    .collect();
                let mut text = match device {
                    Some(d) if !of_name.is_empty() => format!("backend '{name}' does not serve {d}"),
                    _ => format!("no backend '{name}'"),
                };
                text.push_str("; known: ");
                text.push_str(&if known.is_empty() {
                    "none".to_string()
                } else {
                    known.join(", ")
                });
                let near = inner
                    .map
                    .values()
                    .map(|b| (edit_distance(&name, &b.name), &b.name))
                    .min();
                if let Some((_, near)) = near.filter(|(distance, _)| of_name.is_empty() && *distance <= 2) {
                    text.push_str(&format!(". Did you mean '{near}'?"));
                }
                Err(Error::new(ErrorKind::NotFound, text))
            }
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
    pub fn create(
        &self,
        name: &str,
        device: &Device,
        options: &GroupOptions,
    ) -> Result<Box<dyn ProcessGroup>> {
        let backend = self.get(name, Some(&device.kind))?;
        backend.factory.probe()?;
        backend.factory.create(device, options)
    }
}

/// Levenshtein distance, for suggestions.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cb, cell) in b.iter().zip(row.iter_mut().skip(1)) {
            let above = *cell;
            let best = (diagonal + usize::from(ca != *cb)).min(above + 1).min(left + 1);
            diagonal = above;
            left = best;
            *cell = best;
        }
    }
    row.last()
        .copied()
        .unwrap_or(0)
        .max(usize::from(b.is_empty()) * a.chars().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;
    impl BackendFactory for Nothing {
        fn probe(&self) -> Result<()> {
            Err(Error::unsupported("libnothing.so not found"))
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities {
                ops: crate::OpSet::NONE,
                moves: crate::DTypeSet::NONE,
                reduces: Default::default(),
                features: crate::FeatureSet::NONE,
                options: Vec::new(),
                devices: Vec::new(),
                notes: Vec::new(),
            }
        }
        fn create(&self, _: &Device, _: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
            self.probe().map(|()| unreachable!())
        }
    }

    fn backend(name: &str, device: DeviceKind, provenance: Provenance, origin: &str) -> Backend {
        let source = Source {
            provenance,
            origin: origin.into(),
            version: "1".into(),
        };
        Backend {
            name: name.into(),
            device,
            source,
            factory: Arc::new(Nothing),
        }
    }

    #[test]
    fn l43_a_second_provider_never_replaces_silently_and_the_stronger_provenance_wins_in_any_order() {
        let plugin = || backend("HCCL", DeviceKind::Hpu, Provenance::Plugin, "/opt/libvendor.so");
        let built_in = || backend("hccl", DeviceKind::Hpu, Provenance::BuiltIn, "backend-hccl");
        for order in [true, false] {
            let r = Registry::new();
            let (a, b) = if order {
                (plugin(), built_in())
            } else {
                (built_in(), plugin())
            };
            assert_eq!(
                r.register(a.clone(), OnConflict::Keep).unwrap(),
                Outcome::Registered
            );
            assert_eq!(r.register(a, OnConflict::Keep).unwrap(), Outcome::AlreadyThere);
            r.register(b, OnConflict::Keep).unwrap();
            assert_eq!(r.get("hccl", None).unwrap().source.provenance, Provenance::Plugin);
            let c = r.conflicts();
            assert_eq!(c.len(), 1);
            assert_eq!(c[0].winner.origin, "/opt/libvendor.so");
        }
        let r = Registry::new();
        r.register(built_in(), OnConflict::Keep).unwrap();
        let e = r.register(plugin(), OnConflict::Strict).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Conflict);
    }

    #[test]
    fn l19_one_name_on_two_devices_is_two_backends_and_a_bare_look_up_says_so() {
        let r = Registry::new();
        r.register(
            backend("hccl", DeviceKind::Hpu, Provenance::Plugin, "gaudi"),
            OnConflict::Keep,
        )
        .unwrap();
        let npu = DeviceKind::Named("npu".into());
        r.register(
            backend("hccl", npu.clone(), Provenance::Plugin, "ascend"),
            OnConflict::Keep,
        )
        .unwrap();
        assert!(r.conflicts().is_empty());
        assert_eq!(r.get("hccl", Some(&npu)).unwrap().source.origin, "ascend");
        let e = r.get("hccl", None).unwrap_err();
        assert!(
            e.to_string().contains("hpu:hccl") && e.to_string().contains("npu:hccl"),
            "{e}"
        );
    }

    #[test]
    fn unknown_names_get_a_suggestion_and_unusable_backends_their_reason() {
        let r = Registry::new();
        r.register(
            backend("gloo", DeviceKind::Cpu, Provenance::BuiltIn, "x"),
            OnConflict::Keep,
        )
        .unwrap();
        let e = r.get("glo", None).unwrap_err();
        assert!(e.to_string().contains("Did you mean 'gloo'?"), "{e}");
        let e = r.is_backend_available("GLOO", None).unwrap_err();
        assert!(e.to_string().contains("libnothing.so"), "{e}");
        assert!(
            r.register(
                backend("a:b", DeviceKind::Cpu, Provenance::Api, "x"),
                OnConflict::Keep
            )
            .is_err()
        );
    }

    /// 64 threads that register one key at the same moment, each as another provider; (who, what came of it).
    fn race(r: &Registry, provenance: fn(usize) -> Provenance) -> Vec<(Source, Outcome)> {
        let start = std::sync::Barrier::new(64);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..64)
                .map(|i| {
                    let (start, b) = (
                        &start,
                        backend("one", DeviceKind::Cpu, provenance(i), &format!("crate{i}")),
                    );
                    scope.spawn(move || {
                        start.wait();
                        (b.source.clone(), r.register(b, OnConflict::Keep).unwrap())
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn of_64_threads_that_race_for_a_key_exactly_one_wins_and_all_others_are_told_its_name() {
        for _ in 0..50 {
            let r = Registry::new();
            let outcomes = race(&r, |_| Provenance::Api);
            let winner = r.get("one", None).unwrap().source;
            for (source, outcome) in &outcomes {
                if *source == winner {
                    assert_eq!(*outcome, Outcome::Registered);
                } else {
                    assert_eq!(*outcome, Outcome::Shadowed(winner.clone()));
                }
            }
            let mut losers: Vec<Source> = r.conflicts().into_iter().map(|c| c.loser).collect();
            losers.sort();
            losers.dedup();
            assert_eq!(losers.len(), 63);
            assert!(r.conflicts().iter().all(|c| c.winner == winner));
            assert_eq!(r.list().len(), 1);
        }
    }

    #[test]
    fn in_a_race_of_mixed_provenance_the_outcomes_form_one_chain_up_to_the_strongest() {
        for _ in 0..50 {
            let r = Registry::new();
            let outcomes = race(&r, |i| match i % 3 {
                0 => Provenance::BuiltIn,
                1 => Provenance::Plugin,
                _ => Provenance::Api,
            });
            let mut chain: Vec<&Source> = outcomes
                .iter()
                .filter(|(_, o)| *o == Outcome::Registered)
                .map(|(s, _)| s)
                .collect();
            assert_eq!(chain.len(), 1, "one found the key free");
            while let Some((next, _)) = outcomes
                .iter()
                .find(|(_, o)| matches!(o, Outcome::Replaced(s) if Some(&s) == chain.last()))
            {
                assert!(next.provenance > chain[chain.len() - 1].provenance);
                chain.push(next);
            }
            let replaced = outcomes
                .iter()
                .filter(|(_, o)| matches!(o, Outcome::Replaced(_)))
                .count();
            assert_eq!(replaced + 1, chain.len(), "every replacement is in the chain");
            let winner = r.get("one", None).unwrap().source;
            assert_eq!(winner.provenance, Provenance::Api);
            assert_eq!(chain.last(), Some(&&winner));
            for (source, outcome) in &outcomes {
                if let Outcome::Shadowed(by) = outcome {
                    assert!(chain.contains(&by) && by.provenance >= source.provenance);
                }
            }
        }
    }

    #[test]
    fn edit_distance_is_levenshtein() {
        for (a, b, d) in [
            ("", "", 0),
            ("abc", "", 3),
            ("", "ab", 2),
            ("nccl", "xccl", 1),
            ("gloo", "goo", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(edit_distance(a, b), d, "{a} {b}");
        }
    }
}
