//! `oxccl backends`: every backend that this program knows, where it comes from, whether it can be used here and if not
//! why, and what it offers.
//!
//! Each is probed in a child process with a time limit: a vendor library that crashes or hangs is a line in the table, and
//! so is a plugin that cannot be used.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use oxccl::core::printable::{LONGEST, one_line};
use oxccl::core::registry::{
    Backend, DefaultBackends, OnConflict, Provenance, Source, Unavailable, check_name,
};
use oxccl::core::{
    Capabilities, DType, DTypeSet, DeviceKind, Error, Feature, OpKind, OpSet, ReduceOp, Registry, Result,
    VARIABLE, deadline_in, variable_prefix,
};
use oxccl::plugin;
use oxccl_launch::BoundChild;
use serde::{Deserialize, Serialize};

use super::scratch::Scratch;
use super::{ExitCode, again};

const EXAMPLES: &str = "\
Examples:
  What can carry data on this machine, a line each:
    oxccl backends

  All that one of them offers:
    oxccl backends --backend gloo

  For a script, the names of the usable ones:
    oxccl backends --json | jq -r '.backends[] | select(.usable) | .name'";

/// List the backends: origin, usable or why not, operations, element types, features, conflicts.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Write the list as JSON: all that is known of each.
    #[arg(long)]
    json: bool,
    /// Show all that this backend offers, instead of a line for each.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
}

/// Asks one backend whether it can be used (how `backends` starts itself).
#[derive(Debug, clap::Args)]
pub(crate) struct ProbeArguments {
    name: String,
    device: String,
    /// Where the verdict goes.
    verdict: std::path::PathBuf,
    /// The plugin that brings it, which the caller has tried already.
    #[arg(long)]
    plugin: Option<std::path::PathBuf>,
}

/// What a backend's child found out.
#[derive(Default, Serialize, Deserialize)]
struct Verdict {
    /// The vendor library behind it.
    library: Option<String>,
    /// Why it cannot be used.
    reason: Option<String>,
    /// The typed reason, where there is one: code and parts.
    unavailable: Option<(u32, Vec<String>)>,
}

impl Verdict {
    fn because(error: &Error) -> Self {
        Self {
            library: None,
            reason: Some(error.to_string()),
            unavailable: Unavailable::of(error).map(Unavailable::encode),
        }
    }

    fn typed(&self) -> Option<Unavailable> {
        let (code, parts) = self.unavailable.as_ref()?;
        Unavailable::decode(*code, parts)
    }
}

/// How long one backend may take to say whether it can be used.
const PROBE: Duration = Duration::from_secs(20);

#[derive(Serialize)]
struct List {
    backends: Vec<Entry>,
    conflicts: Vec<Conflict>,
    plugins: Vec<Plugin>,
    defaults: std::collections::BTreeMap<String, String>,
}

/// A file that a variable named as a plugin.
#[derive(Serialize)]
struct Plugin {
    path: String,
    variable: String,
    name: Option<String>,
    version: Option<String>,
    /// The minor version of the plugin ABI that both sides use.
    abi_minor: Option<u32>,
    used: bool,
    /// Why it is not used.
    reason: Option<String>,
    unavailable: Option<&'static str>,
}

#[derive(Serialize)]
struct Entry {
    name: String,
    device: String,
    version: String,
    source: Origin,
    usable: bool,
    /// Why it cannot be used.
    reason: Option<String>,
    /// The same as a word that a script can rely on, such as `library_not_found`.
    unavailable: Option<&'static str>,
    /// The vendor library behind it.
    library: Option<String>,
    /// True if it serves its device when none is named.
    default: bool,
    operations: Vec<&'static str>,
    moves: Vec<&'static str>,
    reductions: Vec<Reductions>,
    features: Vec<String>,
    options: Vec<String>,
    /// Of the environment that it reads beside those of its options.
    variables: Vec<String>,
    devices: Vec<String>,
    notes: Vec<Note>,
}

#[derive(Serialize, Clone)]
struct Origin {
    kind: &'static str,
    origin: String,
    version: String,
}

/// Operations that take the same element types.
#[derive(Serialize)]
struct Reductions {
    operations: Vec<&'static str>,
    dtypes: Vec<&'static str>,
}

#[derive(Serialize)]
struct Note {
    subject: String,
    text: String,
}

#[derive(Serialize)]
struct Conflict {
    name: String,
    device: String,
    winner: Origin,
    loser: Origin,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let registry = Registry::global();
    let defaults = DefaultBackends::from_env()?;
    let only = match &arguments.backend {
        Some(name) => Some(check_name(name)?),
        None => None,
    };
    let reports = oxccl::backend::load_plugins();
    // By the names under which the registry shows them: a path need not be text.
    let files: BTreeMap<String, PathBuf> = reports
        .iter()
        .filter_map(|r| {
            r.loaded
                .map(|l| (l.path().display().to_string(), l.path().to_path_buf()))
        })
        .collect();
    let plugins = reports.iter().map(found).collect();
    let scratch = Scratch::new("backends")?;
    let mut backends = Vec::new();
    for backend in registry.list() {
        if only.as_ref().is_some_and(|name| *name != backend.name) {
            continue;
        }
        let file = files.get(&backend.source.origin);
        let verdict = ask(&backend, file, &scratch).unwrap_or_else(|e| Verdict::because(&e));
        backends.push(entry(&backend, verdict, &defaults));
    }
    if let Some(name) = only.filter(|_| backends.is_empty()) {
        // Says what is known, and what it may have been meant for.
        registry.get(&name, None)?;
    }
    let list = List {
        backends,
        conflicts: registry
            .conflicts()
            .into_iter()
            .map(|c| Conflict {
                name: c.name,
                device: c.device.to_string(),
                winner: origin(&c.winner),
                loser: origin(&c.loser),
            })
            .collect(),
        plugins,
        defaults: defaults
            .iter()
            .map(|(device, name)| (device.to_string(), name.to_string()))
            .collect(),
    };
    if arguments.json {
        crate::results::json(&list, "the list")?;
    } else {
        crate::results::write(&table(&list, arguments.backend.is_some()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The child's side: writes whether the backend can be used, and ends with 0 either way.
pub(crate) fn probe(arguments: ProbeArguments) -> Result<ExitCode> {
    let device: DeviceKind = arguments.device.parse()?;
    let registry = Registry::global();
    if let Some(path) = &arguments.plugin {
        plugin::open_trusted(path)?.register(registry, OnConflict::Replace)?;
    }
    let backend = registry.get(&arguments.name, Some(&device))?;
    let mut verdict = match backend.factory.probe() {
        Ok(()) => Verdict::default(),
        Err(e) => Verdict::because(&e),
    };
    verdict.library = backend.factory.library();
    let text =
        serde_json::to_string(&verdict).map_err(|e| Error::invalid(format!("write a verdict: {e}")))?;
    std::fs::write(&arguments.verdict, text)
        .map_err(|e| Error::io(format!("write {}", arguments.verdict.display()), e))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks in a child process. An error is a verdict too: the child crashed, hung or could not be started.
fn ask(backend: &Backend, file_of_plugin: Option<&PathBuf>, scratch: &Scratch) -> Result<Verdict> {
    if backend.source.provenance == Provenance::Api {
        // Known to this process only; it is this program's own code.
        let mut verdict = backend
            .factory
            .probe()
            .err()
            .map(|e| Verdict::because(&e))
            .unwrap_or_default();
        verdict.library = backend.factory.library();
        return Ok(verdict);
    }
    let file = |what: &str| {
        scratch
            .path()
            .join(format!("{}-{}-{what}", backend.device, hex(&backend.name)))
    };
    let answer = file("verdict");
    let mut command = again()?;
    command
        .args(["backends-probe", &backend.name, backend.device.name()])
        .arg(&answer);
    if let Some(plugin) = file_of_plugin {
        command.arg("--plugin").arg(plugin);
    }
    let mut child = BoundChild::spawn(command, &file("log"))?;
    let exit = child
        .wait(deadline_in(PROBE))
        .map_err(|_| Unavailable::ProbeTimedOut {
            milliseconds: u64::try_from(PROBE.as_millis()).unwrap_or(u64::MAX),
        })?;
    if let Some(signal) = exit.signal {
        let output = child.tail();
        return Err(Unavailable::ProbeCrashed { signal, output }.into());
    }
    let text = std::fs::read_to_string(&answer).unwrap_or_default();
    serde_json::from_str(&text).map_err(|_| {
        let text = format!("it ended with {exit}; {}", child.tail());
        Unavailable::ProbeFailed { text }.into()
    })
}

fn found(report: &plugin::Report) -> Plugin {
    let error = report.result.as_ref().err();
    Plugin {
        path: report.path.display().to_string(),
        variable: report.variable.clone(),
        name: report.loaded.map(|l| l.name().to_string()),
        version: report.loaded.map(|l| l.version().to_string()),
        abi_minor: report.loaded.map(|l| l.abi_minor()),
        used: error.is_none(),
        unavailable: error.and_then(Unavailable::of).map(Unavailable::name),
        reason: error.map(ToString::to_string),
    }
}

/// A backend's name may hold any character but a few; a file's may not.
fn hex(name: &str) -> String {
    name.bytes().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}");
        text
    })
}

fn origin(source: &Source) -> Origin {
    Origin {
        kind: match source.provenance {
            Provenance::BuiltIn => "built in",
            Provenance::Plugin => "plugin",
            Provenance::Api => "API",
        },
        origin: source.origin.clone(),
        version: source.version.clone(),
    }
}

fn entry(backend: &Backend, mut verdict: Verdict, defaults: &DefaultBackends) -> Entry {
    let capabilities = backend.factory.capabilities();
    if capabilities.ops == OpSet::NONE && verdict.reason.is_none() {
        verdict.reason = Some("it offers no operation, or its capabilities cannot be read".to_string());
    }
    let options = || capabilities.options.iter().map(|name| &**name);
    let own_options = || options().filter(|name| !name.starts_with(VARIABLE));
    let read = options().filter_map(|name| name.strip_prefix(VARIABLE));
    Entry {
        name: backend.name.clone(),
        device: backend.device.to_string(),
        version: backend.source.version.clone(),
        source: origin(&backend.source),
        usable: verdict.reason.is_none(),
        unavailable: verdict.typed().map(|u| u.name()),
        reason: verdict.reason,
        library: verdict.library,
        default: defaults.of(&backend.device).is_ok_and(|n| n == backend.name),
        operations: OpKind::ALL
            .into_iter()
            .filter(|&op| capabilities.ops.contains(op))
            .map(OpKind::name)
            .collect(),
        moves: names(capabilities.moves),
        reductions: reductions(&capabilities),
        features: Feature::ALL
            .into_iter()
            .filter(|f| capabilities.has(*f))
            .map(snake)
            .collect(),
        options: own_options().map(String::from).collect(),
        variables: read
            .map(|rest| format!("{}{rest}", variable_prefix(&backend.name)))
            .collect(),
        devices: capabilities.devices.iter().map(ToString::to_string).collect(),
        notes: capabilities
            .notes
            .iter()
            .map(|(subject, text)| Note {
                subject: (*subject).to_string(),
                text: (*text).to_string(),
            })
            .collect(),
    }
}

/// `MismatchDetection` to `mismatch_detection`.
fn snake(feature: Feature) -> String {
    let mut name = String::new();
    for c in format!("{feature:?}").chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}

fn names(set: DTypeSet) -> Vec<&'static str> {
    DType::ALL
        .into_iter()
        .filter(|&d| set.contains(d))
        .map(DType::name)
        .collect()
}

/// One entry per set of element types, in the order of the reductions' codes.
fn reductions(capabilities: &Capabilities) -> Vec<Reductions> {
    let mut sets: Vec<(DTypeSet, Vec<&'static str>)> = Vec::new();
    for (code, &set) in (0u8..).zip(&capabilities.reduces) {
        if set == DTypeSet::NONE {
            continue;
        }
        let name = ReduceOp::name_of(code);
        match sets.iter_mut().find(|(s, _)| *s == set) {
            Some((_, operations)) => operations.push(name),
            None => sets.push((set, vec![name])),
        }
    }
    sets.into_iter()
        .map(|(set, operations)| Reductions {
            operations,
            dtypes: names(set),
        })
        .collect()
}

/// A text of a plugin or a library in a line of the table.
fn shown(text: &str) -> String {
    one_line(text, LONGEST).into_owned()
}

fn table(list: &List, all: bool) -> String {
    let heads = ["BACKEND", "DEVICE", "VERSION", "SOURCE"].map(String::from);
    let mut rows: Vec<([String; 4], String)> = vec![(heads, "USABLE".to_string())];
    rows.extend(list.backends.iter().map(|b| {
        let cells = [
            shown(&b.name),
            b.device.clone(),
            shown(&b.version),
            shown(&format!("{} ({})", b.source.kind, b.source.origin)),
        ];
        let usable = match (&b.reason, b.default) {
            (Some(reason), _) => shown(&format!("no: {reason}")),
            (None, true) => format!("yes, the default for {}", b.device),
            (None, false) => "yes".to_string(),
        };
        (cells, usable)
    }));
    let width = |column: usize| {
        rows.iter()
            .filter_map(|(cells, _)| cells.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths = [width(0), width(1), width(2), width(3)];
    let mut text = String::new();
    for (i, (cells, usable)) in rows.iter().enumerate() {
        for (cell, width) in cells.iter().zip(widths) {
            let _ = write!(text, "{cell:width$}  ");
        }
        let _ = writeln!(text, "{usable}");
        if let Some(backend) = i
            .checked_sub(1)
            .and_then(|i| list.backends.get(i))
            .filter(|_| all)
        {
            details(&mut text, backend);
        }
    }
    if list.backends.is_empty() {
        text.push_str("(no backend is linked into this program)\n");
    }
    text.push('\n');
    for p in &list.plugins {
        let said = match (&p.reason, &p.name) {
            (Some(reason), _) => format!("not used: {reason}"),
            (None, name) => format!(
                "{} {}, ABI 1.{}",
                name.as_deref().unwrap_or("?"),
                p.version.as_deref().unwrap_or("?"),
                p.abi_minor.unwrap_or(0)
            ),
        };
        let _ = writeln!(
            text,
            "plugin: {} ({}): {}",
            shown(&p.path),
            p.variable,
            shown(&said)
        );
    }
    if list.conflicts.is_empty() {
        text.push_str("conflicts: none\n");
    }
    for c in &list.conflicts {
        let show = |o: &Origin| shown(&format!("{} {} ({})", o.origin, o.version, o.kind));
        let _ = writeln!(
            text,
            "conflict: {} for {} is provided by {} and by {}; the first is used",
            c.name,
            c.device,
            show(&c.winner),
            show(&c.loser)
        );
    }
    let defaults: Vec<String> = list.defaults.iter().map(|(d, n)| format!("{d}:{n}")).collect();
    let _ = writeln!(text, "defaults: {}", defaults.join(", "));
    text
}

fn details(text: &mut String, backend: &Entry) {
    let mut line = |head: &str, body: String| {
        if !body.is_empty() {
            let _ = writeln!(text, "  {head:<12} {}", shown(&body));
        }
    };
    line("library", backend.library.clone().unwrap_or_default());
    line("operations", backend.operations.join(" "));
    line("moves", backend.moves.join(" "));
    for r in &backend.reductions {
        let body = format!("{}: {}", r.operations.join(" "), r.dtypes.join(" "));
        line("reduces", body);
    }
    line("features", backend.features.join(" "));
    line("options", backend.options.join(" "));
    line("variables", backend.variables.join(" "));
    line("memory on", backend.devices.join(" "));
    for note in &backend.notes {
        line("note", format!("{}: {}", note.subject, note.text));
    }
}
