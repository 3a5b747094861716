//! Cargo, called by a test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// The cargo that runs this test, as if it were called outside of it.
///
/// Cargo tells a test its package by `CARGO_PKG_…` and `CARGO_MANIFEST_…`. Build scripts may ask to be run again when these change (ring's does), and with
/// them everything above is built again: once for the test's call, and once more for the next call from outside.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// The dynamic library of a package of this workspace, built as the test that asks for it is, once in a process.
///
/// Errors: what cargo says.
pub fn dylib(package: &str) -> Result<PathBuf, String> {
    let file = format!("/lib{}.so", package.replace('-', "_"));
    once(package, &["--lib"], "\"cdylib\"", &file)
}

/// A program of a package of this workspace, as above.
///
/// Errors: what cargo says.
pub fn program(package: &str, name: &str) -> Result<PathBuf, String> {
    once(package, &["--bin", name], "\"executable\"", &format!("/{name}"))
}

/// Builds `targets`, and finds what ends with `file` among what cargo says of `kind`.
fn once(package: &str, targets: &[&str], kind: &str, file: &str) -> Result<PathBuf, String> {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    // Held meanwhile: two would only wait for cargo's lock.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = built.get(file) {
        return Ok(path.clone());
    }
    let path = build(package, targets, kind, file)?;
    built.insert(file.to_owned(), path.clone());
    Ok(path)
}

fn build(package: &str, targets: &[&str], kind: &str, file: &str) -> Result<PathBuf, String> {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    // Alone a package has fewer features, with which all that it depends on would be built once more. The matrix has built the whole workspace, with
    // the features of its tests, which those of an example are as well.
    let select: &[&str] = match std::env::var_os("OXCCL_XTASK_RUN") {
        Some(_) => &["--workspace", "--example", "all_reduce"],
        None => &["--package", package],
    };
    let output = cargo()
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .args([
            "build",
            "--message-format=json-render-diagnostics",
            "--profile",
            profile,
        ])
        .args(select)
        .args(targets)
        .output()
        .map_err(|e| format!("cargo cannot be started: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{package} does not build ({}):\n{said}", output.status));
    }
    let said = String::from_utf8_lossy(&output.stdout);
    let lines = said.lines().filter(|line| line.contains(kind));
    lines
        .flat_map(|line| line.split('"'))
        .rfind(|part| part.ends_with(file))
        .map(PathBuf::from)
        .ok_or_else(|| format!("cargo built no {file}:\n{said}"))
}
