//! An opened plugin: the library, what it states, and its table. Opened once per file and process, never unloaded.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ftcore::float_mode::DefaultMode;
use ftcore::printable::{LONGEST, one_line};
use ftcore::registry::Unavailable;
use ftcore::{DeviceKind, Error, Result};
use tracing::level_filters::LevelFilter;
use vendor::{Opened, Symbols};

use crate::abi::{self, Fault, Growing, OK, OpenFn, QueryFn, QueryReply, Str};
use crate::{fault, text};

/// A plugin in this process.
pub(super) struct Library {
    /// Canonical: the identity of the plugin.
    pub(super) path: PathBuf,
    /// As it may be shown, like the version.
    pub(super) name: String,
    pub(super) version: String,
    /// (name, device kind), in the order of the query.
    pub(super) backends: Vec<(String, DeviceKind)>,
    /// In the order of the query.
    pub(super) devices: Vec<DeviceKind>,
    /// The minor version that both sides use.
    pub(super) minor: u32,
    pub(super) table: abi::Plugin,
}

// SAFETY: the ABI says that the table may be used from any thread as long as the process lives.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// What a query said.
struct Stated {
    name: String,
    version: String,
    backends: Vec<(String, DeviceKind)>,
    devices: Vec<DeviceKind>,
    minor: u32,
}

/// The canonical path, which is the identity of a plugin.
pub(super) fn canonical(path: &Path) -> Result<PathBuf, Unavailable> {
    let found = std::fs::canonicalize(path).ok().filter(|p| p.is_file());
    found.ok_or_else(|| Unavailable::LibraryNotFound {
        library: path.display().to_string(),
        searched: Vec::new(),
    })
}

static OPENED: Mutex<BTreeMap<PathBuf, Result<&'static Library, Unavailable>>> = Mutex::new(BTreeMap::new());

/// Opens the plugin at a canonical path. The second time gives what the first time gave, a failure too, once its
/// constructors have run. A file that the loader did not take is tried again: it may have lacked descriptors or memory.
pub(super) fn open(path: &Path) -> Result<&'static Library, Unavailable> {
    // Held while opening: `oxccl_plugin_open_v1` runs at most once. What it calls back (logging) does not come here.
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = opened.get(path) {
        return known.clone();
    }
    // SAFETY: the user named this file, and a child process has opened it without a crash (or the caller takes the
    // risk, see `open_trusted`).
    let dylib = unsafe { Opened::new(path, Symbols::Own)? };
    let result = begin_with(&dylib, path).map(|l| &*Box::leak(Box::new(l)));
    opened.insert(path.to_path_buf(), result.clone());
    result
}

fn begin_with(dylib: &Opened, path: &Path) -> Result<Library, Unavailable> {
    let shown = path.display().to_string();
    // SAFETY: the name says the type: it is the version's own.
    let query = unsafe { dylib.required::<QueryFn>(abi::QUERY)? };
    let stated = ask(query).map_err(|e| e.of(&shown))?;
    // SAFETY: as above.
    let start = unsafe { dylib.required::<OpenFn>(abi::OPEN)? };
    let table = begin(start, &stated, &shown)?;
    Ok(Library {
        path: path.to_path_buf(),
        name: stated.name,
        version: stated.version,
        backends: stated.backends,
        devices: stated.devices,
        minor: stated.minor,
        table,
    })
}

/// What is wrong with a query's reply, before the file's name is known.
enum Wrong {
    Garbage(String),
    Old(String, String),
    New(String, String),
}

impl Wrong {
    fn of(self, library: &str) -> Unavailable {
        let what = "the plugin ABI".to_string();
        match self {
            Self::Garbage(text) => Unavailable::NotAPlugin {
                library: library.to_string(),
                text,
            },
            Self::Old(found, needed) => Unavailable::VersionTooOld { what, found, needed },
            Self::New(found, needed) => Unavailable::VersionTooNew { what, found, needed },
        }
    }
}

/// The most that a query can list.
const MOST: u32 = 64;

fn ask(query: QueryFn) -> Result<Stated, Wrong> {
    // More room than any version of the reply needs: one that writes beyond the size it was told does no harm.
    let mut room = vec![0u64; (abi::LARGEST / 8) as usize];
    let reply: *mut QueryReply = room.as_mut_ptr().cast();
    // SAFETY: `room` is larger than QueryReply and aligned for it.
    unsafe { reply.write(QueryReply::empty()) };
    // SAFETY: the function's type is the one that the name stands for.
    let status = unsafe { query(reply) };
    if status != OK {
        return Err(Wrong::Garbage(format!("its query failed with {status}")));
    }
    // SAFETY: our own memory, larger than whatever a believable size says.
    let r = unsafe { abi::read(reply) }.map_err(Wrong::Garbage)?;
    if r.magic != abi::MAGIC {
        return Err(Wrong::Garbage(format!("its magic number is {:#018x}", r.magic)));
    }
    if r.major != abi::MAJOR || r.min_minor > r.max_minor {
        return Err(Wrong::Garbage(format!(
            "it states ABI {} with minor versions {} to {}",
            r.major, r.min_minor, r.max_minor
        )));
    }
    let version = |minor: u32| format!("{}.{minor}", abi::MAJOR);
    if r.min_minor > abi::MINOR {
        return Err(Wrong::New(version(r.min_minor), version(abi::MINOR)));
    }
    #[allow(
        clippy::absurd_extreme_comparisons,
        reason = "the oldest version will not stay 0"
    )]
    if r.max_minor < abi::MINIMUM_MINOR {
        return Err(Wrong::Old(version(r.max_minor), version(abi::MINIMUM_MINOR)));
    }
    if r.backend_count > MOST || r.device_count > MOST || r.backend_count + r.device_count == 0 {
        return Err(Wrong::Garbage(format!(
            "it lists {} backends and {} device kinds",
            r.backend_count, r.device_count
        )));
    }
    // SAFETY: a plugin with this magic and version keeps to the ABI; a child has tried that it does not crash.
    unsafe { lists(&r) }.map_err(Wrong::Garbage)
}

/// # Safety
/// The reply's pointers keep to the ABI.
unsafe fn lists(r: &QueryReply) -> Result<Stated, String> {
    let kind = |text: String| text.parse::<DeviceKind>().map_err(|e| e.to_string());
    // SAFETY: by the contract.
    let entries = unsafe { text::list(r.backends, u64::from(r.backend_count), "backends") }?;
    let mut backends = Vec::with_capacity(entries.len());
    for entry in entries {
        // SAFETY: by the contract.
        let (name, device) = unsafe {
            let entry = abi::read(*entry)?;
            (text::read(entry.name)?, kind(text::read(entry.device)?)?)
        };
        if name.is_empty() || name.len() > 64 {
            return Err(format!("a backend's name has {} bytes", name.len()));
        }
        backends.push((name.to_lowercase(), device));
    }
    // They stand in log lines, errors and lists.
    let printable = |text: String| one_line(&text, LONGEST).into_owned();
    // SAFETY: by the contract.
    let (name, version, devices) = unsafe {
        (
            printable(text::read(r.name)?),
            printable(text::read(r.version)?),
            text::texts(r.devices, u64::from(r.device_count), "device kinds")?,
        )
    };
    #[allow(clippy::unnecessary_min_or_max, reason = "the newest version will not stay 0")]
    let minor = r.max_minor.min(abi::MINOR);
    Ok(Stated {
        name,
        version,
        backends,
        devices: devices.into_iter().map(kind).collect::<Result<_, _>>()?,
        minor,
    })
}

fn begin(start: OpenFn, stated: &Stated, shown: &str) -> Result<abi::Plugin, Unavailable> {
    let mut host = abi::Host::empty();
    // As long as the process: the plugin logs through it.
    host.ctx = std::ptr::from_ref(&*Box::leak(Box::new(stated.name.clone())))
        .cast_mut()
        .cast();
    host.minor = stated.minor;
    host.version = text::lend(env!("CARGO_PKG_VERSION"));
    host.log = Some(log);
    host.log_level = Some(log_level);
    let host = Box::leak(Box::new(host));
    let mut table = abi::Plugin::empty();
    let mut fault = Fault::empty();
    // SAFETY: the function's type is the one that the name stands for; all arguments are ours.
    let status = unsafe { start(&raw const *host, &raw mut table, &raw mut fault) };
    fault::check(status, &fault, shown).map_err(|e| {
        Unavailable::of(&e).cloned().unwrap_or(Unavailable::InitFailed {
            code: e.code(),
            text: e.message().to_string(),
        })
    })?;
    let garbage = |text: String| Unavailable::NotAPlugin {
        library: shown.to_string(),
        text,
    };
    // SAFETY: our own struct; `read` only believes the size.
    let table = unsafe { abi::read(&raw const table) }.map_err(garbage)?;
    let lacks = if table.probe.is_none() || table.capabilities.is_none() || table.create.is_none() {
        Some("its table lacks probe, capabilities or create")
    } else if table.device.is_none() && !stated.devices.is_empty() {
        Some("it states device kinds and has no way to hand them out")
    } else {
        None
    };
    match lacks {
        None => Ok(table),
        Some(text) => Err(garbage(text.to_string())),
    }
}

/// Runs a callback that a plugin calls. A panic of ours (a subscriber's, a user's) must not unwind into it.
pub(super) fn guarded<R>(fallback: R, run: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        // Dropping the payload could panic again.
        std::mem::forget(panic);
        fallback
    })
}

/// The most characters of a plugin's log line.
const LONGEST_LOGGED: usize = 4096;

unsafe extern "C" fn log(ctx: *mut c_void, level: u32, target: Str, words: Str) {
    guarded((), || {
        // SAFETY: `ctx` is the leaked name; the texts are readable for the call.
        let (plugin, target, words) = unsafe {
            let plugin = ctx.cast::<String>().as_ref().map_or("?", String::as_str);
            (plugin, text::read(target), text::read(words))
        };
        let (from, words) = (target.unwrap_or_default(), words.unwrap_or_default());
        let (from, words) = (one_line(&from, LONGEST), one_line(&words, LONGEST_LOGGED));
        let from = &*from;
        match level {
            1 => tracing::error!(target: "oxccl_plugin", plugin, from, "{words}"),
            2 => tracing::warn!(target: "oxccl_plugin", plugin, from, "{words}"),
            3 => tracing::info!(target: "oxccl_plugin", plugin, from, "{words}"),
            4 => tracing::debug!(target: "oxccl_plugin", plugin, from, "{words}"),
            _ => tracing::trace!(target: "oxccl_plugin", plugin, from, "{words}"),
        }
    });
}

unsafe extern "C" fn log_level(_ctx: *mut c_void) -> u32 {
    guarded(0, || match LevelFilter::current() {
        LevelFilter::OFF => 0,
        LevelFilter::ERROR => 1,
        LevelFilter::WARN => 2,
        LevelFilter::INFO => 3,
        LevelFilter::DEBUG => 4,
        _ => 5,
    })
}

impl Library {
    /// One that is no file, for tests.
    #[cfg(test)]
    pub(super) fn stand_in(name: &str, devices: Vec<DeviceKind>, table: abi::Plugin) -> &'static Self {
        Box::leak(Box::new(Self {
            path: name.into(),
            name: name.to_string(),
            version: String::new(),
            backends: Vec::new(),
            devices,
            minor: abi::MINOR,
            table,
        }))
    }

    /// For messages.
    pub(super) fn shown(&self) -> String {
        format!("{} ({})", self.name, self.path.display())
    }

    /// A call with a fault of its own, in the default mode for floats: what a plugin computes in it, or on threads that it starts then, is
    /// the same on all ranks.
    pub(super) fn call(&self, run: impl FnOnce(*mut Fault) -> i32) -> Result<()> {
        let mut fault = Fault::empty();
        let mode = DefaultMode::set();
        let status = run(&raw mut fault);
        drop(mode);
        if status == OK {
            return Ok(());
        }
        fault::check(status, &fault, &self.shown())
    }

    /// A function that the table has to have.
    pub(super) fn need<F>(&self, function: Option<F>, name: &str) -> Result<F> {
        function.ok_or_else(|| Error::unsupported(format!("plugin {} has no {name}", self.shown())))
    }
}
