//! Finds plugins through the environment: `OXCCL_PLUGIN_LIB_<NAME>` first, then `OXCCL_PLUGIN_PATH`.
//!
//! Every candidate ends in one [`Report`]: opened and registered, or why not. Nothing here stops a program: a plugin that
//! cannot be used is a line in a table and a note in the registry.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ftcore::registry::{OnConflict, Outcome, Unavailable};
use ftcore::{DeviceKind, Error, Registry, Result};

use super::{Loaded, library, probe};

/// Plugin files, or folders of them, separated by `:`. Earlier ones win; within a folder the order of names counts, not
/// that of the listing.
pub const ENV_PATH: &str = "OXCCL_PLUGIN_PATH";
/// Followed by a backend's name in upper case ('-' as '_'): the file that provides it.
pub const ENV_LIBRARY: &str = "OXCCL_PLUGIN_LIB_";

/// What came of one candidate.
#[derive(Debug, Clone)]
pub struct Report {
    /// The file, as it was found.
    pub path: PathBuf,
    /// The variable that named it.
    pub variable: String,
    /// The backend that it was named for, if it was.
    pub requested: Option<String>,
    /// What it registered as (name, device kind, outcome); or why it is not used (its source is an `Unavailable` where
    /// the plugin itself is to blame).
    pub result: Result<Vec<(String, DeviceKind, Outcome)>>,
    /// The opened plugin.
    pub loaded: Option<Loaded>,
}

pub(super) struct Candidate {
    path: PathBuf,
    variable: String,
    requested: Option<String>,
}

/// Opens what the environment names and registers it in `registry`. May be called again: what is there stays.
///
/// Never fails as a whole; each candidate's report says what came of it.
pub fn discover(registry: &Registry) -> Vec<Report> {
    discover_with(registry, &std::env::vars_os().collect())
}

/// As [`discover`], with `variables` instead of the environment's.
pub fn discover_with(registry: &Registry, variables: &BTreeMap<OsString, OsString>) -> Vec<Report> {
    // One at a time: two threads that start at once get the same reports.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    try_all(variables)
        .into_iter()
        .map(|c| match c {
            Ok(candidate) => take(candidate, registry),
            Err(report) => *report,
        })
        .inspect(|report| {
            if let Err(error) = &report.result {
                tracing::warn!(plugin = %report.path.display(), variable = report.variable, %error, "a plugin is not used");
                registry.note_unusable(
                    report.requested.as_deref(),
                    &report.path.display().to_string(),
                    error.clone(),
                );
            }
        })
        .collect()
}

/// Tries the candidates side by side, and opens none.
pub(super) fn try_all(variables: &BTreeMap<OsString, OsString>) -> Vec<Result<Candidate, Box<Report>>> {
    let candidates = candidates(variables);
    if let Ok(limit) = probe::limit() {
        let paths = candidates.iter().flatten().map(|c| &c.path);
        probe::try_side_by_side(&paths.filter_map(|p| library::canonical(p).ok()).collect(), limit);
    }
    candidates
}

fn take(candidate: Candidate, registry: &Registry) -> Report {
    let mut loaded = None;
    let result = open(&candidate).and_then(|plugin| {
        loaded = Some(plugin);
        let wanted = |name: &str| candidate.requested.as_deref().is_none_or(|r| same_name(r, name));
        let registered = plugin.register_some(registry, OnConflict::Keep, wanted)?;
        Ok(registered
            .into_iter()
            .map(|(b, outcome)| (b.name, b.device, outcome))
            .collect())
    });
    Report {
        path: candidate.path,
        variable: candidate.variable,
        requested: candidate.requested,
        result,
        loaded,
    }
}

fn open(candidate: &Candidate) -> Result<Loaded> {
    let path = library::canonical(&candidate.path)?;
    probe::try_in_child(&path, probe::limit()?)?;
    let plugin = Loaded(library::open(&path)?);
    if let Some(requested) = &candidate.requested {
        let names: Vec<String> = plugin.backends().into_iter().map(|b| b.name).collect();
        if !names.iter().any(|n| same_name(requested, n)) {
            let mismatch = Unavailable::NameMismatch {
                library: path.display().to_string(),
                requested: requested.clone(),
                stated: if names.is_empty() {
                    "no backend".to_string()
                } else {
                    names.join(", ")
                },
            };
            return Err(mismatch.into());
        }
    }
    Ok(plugin)
}

/// A name in a variable against a backend's: what a variable cannot hold counts as '_'.
fn same_name(requested: &str, name: &str) -> bool {
    let plain = |n: &str| -> String {
        n.chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() {
                    c.to_ascii_lowercase()
                } else {
                    '_'
                }
            })
            .collect()
    };
    plain(requested) == plain(name)
}

/// The candidates in the order in which they register.
fn candidates(variables: &BTreeMap<OsString, OsString>) -> Vec<Result<Candidate, Box<Report>>> {
    let mut found = Vec::new();
    for (variable, path) in variables {
        let name = variable.to_str().and_then(|v| v.strip_prefix(ENV_LIBRARY));
        if let Some(name) = name.filter(|n| !n.is_empty() && !path.is_empty()) {
            found.push(Ok(Candidate {
                path: path.into(),
                variable: format!("{ENV_LIBRARY}{name}"),
                requested: Some(name.to_lowercase()),
            }));
        }
    }
    let paths = variables
        .get(&OsString::from(ENV_PATH))
        .cloned()
        .unwrap_or_default();
    for entry in std::env::split_paths(&paths).filter(|p| !p.as_os_str().is_empty()) {
        match libraries(&entry) {
            Ok(files) => found.extend(files.into_iter().map(|path| {
                Ok(Candidate {
                    path,
                    variable: ENV_PATH.to_string(),
                    requested: None,
                })
            })),
            Err(error) => found.push(Err(Box::new(Report {
                path: entry,
                variable: ENV_PATH.to_string(),
                requested: None,
                result: Err(error),
                loaded: None,
            }))),
        }
    }
    found
}

/// The file itself, or the `*.so` files of a folder, sorted by name.
fn libraries(entry: &Path) -> Result<Vec<PathBuf>> {
    if !entry.is_dir() {
        return Ok(vec![entry.to_path_buf()]);
    }
    let listing = std::fs::read_dir(entry)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .map_err(|e| Error::io(format!("list {}", entry.display()), e))?;
    let mut files: Vec<PathBuf> = listing
        .into_iter()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "so") && p.is_file())
        .collect();
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Vec<(String, Option<String>)> {
        let variables = pairs.iter().map(|(k, v)| (k.into(), v.into())).collect();
        candidates(&variables)
            .into_iter()
            .map(|c| match c {
                Ok(c) => (c.path.display().to_string(), c.requested),
                Err(r) => (r.path.display().to_string(), None),
            })
            .collect()
    }

    #[test]
    fn named_libraries_come_before_the_path_and_empty_entries_count_for_nothing() {
        let found = of(&[
            ("OXCCL_PLUGIN_PATH", ":/b.so::/a.so"),
            ("OXCCL_PLUGIN_LIB_HCCL", "/opt/h.so"),
            ("OXCCL_PLUGIN_LIB_", "/x.so"),
            ("OXCCL_PLUGIN_LIB_EMPTY", ""),
        ]);
        let name = |n: &str| Some(n.to_string());
        assert_eq!(
            found,
            [
                ("/opt/h.so".to_string(), name("hccl")),
                ("/b.so".to_string(), None),
                ("/a.so".to_string(), None)
            ]
        );
    }

    #[test]
    fn a_folder_gives_its_libraries_in_the_order_of_their_names() {
        let dir = std::env::temp_dir().join(format!("oxccl-plugin-folder-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for name in ["b.so", "a.so", "c.so", "notes.txt", "d.so.1"] {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let names: Vec<String> = libraries(&dir)
            .unwrap()
            .iter()
            .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(names, ["a.so", "b.so", "c.so"]);
    }

    #[test]
    fn a_name_in_a_variable_stands_for_what_a_variable_cannot_hold() {
        assert!(same_name("my_ccl", "My-CCL"));
        assert!(!same_name("hccl", "nccl"));
    }
}
