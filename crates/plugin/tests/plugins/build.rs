//! Builds the fixtures: Rust ones with the cargo that runs this test, C ones with `cc`, all below the target folder.
//!
//! Cargo has released its lock on the target folder by the time a test runs, so a test may call it again; artefacts are
//! shared with the ordinary build, and a second call finds everything fresh.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// The workspace's root.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// A folder of this test's own; it stays, so that a second run finds what is built.
pub(crate) fn folder(name: &str) -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugins").join(name);
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    Ok(folder)
}

fn told(what: &str, output: std::io::Result<Output>) -> Result<Output, String> {
    let output = output.map_err(|e| format!("{what}: {e}"))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!(
        "{what} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    ))
}

/// The C compiler, or why the tests that need one are skipped.
pub(crate) fn cc() -> Result<String, String> {
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    match Command::new(&cc).arg("--version").output() {
        Ok(o) if o.status.success() => Ok(cc),
        _ => Err(format!("there is no C compiler ('{cc}')")),
    }
}

const STRICT: [&str; 6] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC"];

/// Compiles `text` against the header in `include`.
pub(crate) fn c_object(name: &str, text: &str, include: &Path) -> Result<(), String> {
    let folder = folder("c")?;
    let source = folder.join(format!("{name}.c"));
    std::fs::write(&source, text).map_err(|e| e.to_string())?;
    let output = Command::new(cc()?)
        .args(STRICT)
        .arg("-c")
        .arg(&source)
        .arg("-I")
        .arg(include)
        .arg("-o")
        .arg(folder.join(format!("{name}.o")))
        .output();
    told(&format!("cc {name}"), output).map(drop)
}

/// What was built in this run, by name.
type Built = Mutex<BTreeMap<String, Result<PathBuf, String>>>;

fn once(
    built: &Built,
    name: &str,
    build: impl FnOnce() -> Result<PathBuf, String>,
) -> Result<PathBuf, String> {
    let mut built = built.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = built.get(name) {
        return known.clone();
    }
    let library = build();
    built.insert(name.to_string(), library.clone());
    library
}

/// Compiles a C plugin against the header in `include`, once per name and run; gives the library.
pub(crate) fn c_plugin(
    name: &str,
    source: &Path,
    include: &Path,
    defines: &[&str],
) -> Result<PathBuf, String> {
    static BUILT: Built = Mutex::new(BTreeMap::new());
    once(&BUILT, name, || compile(name, source, include, defines))
}

fn compile(name: &str, source: &Path, include: &Path, defines: &[&str]) -> Result<PathBuf, String> {
    // Beside its place and then moved there whole: other test processes may be opening it.
    let folder = folder("c")?;
    let library = folder.join(format!("lib{name}.so"));
    let fresh = folder.join(format!("lib{name}.so.{}", std::process::id()));
    let output = Command::new(cc()?)
        .args(STRICT)
        .args(["-shared", "-fvisibility=hidden", "-pthread"])
        .args(defines.iter().map(|d| format!("-D{d}")))
        .arg("-I")
        .arg(include)
        .arg(source)
        .arg("-o")
        .arg(&fresh)
        .output();
    told(&format!("cc {name}"), output)?;
    std::fs::rename(&fresh, &library).map_err(|e| e.to_string())?;
    Ok(library)
}

/// The training program. It is built by way of its own tests, selected out of the whole workspace: with the features that the whole
/// workspace's tests have, so that after them nothing is built again.
pub(crate) fn train_diloco() -> Result<PathBuf, String> {
    let optimised: &[&str] = if cfg!(debug_assertions) {
        &[]
    } else {
        &["--release"]
    };
    let output = conformance::cargo()
        .current_dir(root())
        .args(["test", "--no-run", "--workspace", "--test", "programs"])
        .arg("--message-format=json-render-diagnostics")
        .args(optimised)
        .output();
    let text = String::from_utf8_lossy(&told("cargo test --no-run", output)?.stdout).into_owned();
    let file = text
        .lines()
        .filter(|l| l.contains("\"name\":\"train_diloco\""))
        .filter_map(|l| l.split_once("\"executable\":\"")?.1.split('"').next())
        .next_back();
    file.map(PathBuf::from)
        .ok_or_else(|| format!("cargo built no program:\n{text}"))
}
