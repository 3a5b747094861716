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

/// The profile of this very test.
fn profile() -> &'static str {
    if cfg!(debug_assertions) { "dev" } else { "release" }
}

/// Runs cargo in `folder` and gives the dynamic library that it names, the one whose path ends with `end`.
pub(crate) fn cargo(folder: &Path, arguments: &[&str], end: &str) -> Result<PathBuf, String> {
    let text = cargo_says(folder, &["build"], arguments)?;
    let library = text
        .lines()
        .filter(|l| l.contains("\"compiler-artifact\"") && l.contains("\"cdylib\""))
        .flat_map(|l| l.split('"'))
        .rfind(|part| part.ends_with(end));
    library
        .map(PathBuf::from)
        .ok_or_else(|| format!("cargo built no library:\n{text}"))
}

/// The training program. It is built by way of its own tests, selected out of the whole workspace: with the features that the whole
/// workspace's tests have, so that after them nothing is built again.
pub(crate) fn train_diloco() -> Result<PathBuf, String> {
    let select = ["test", "--no-run", "--workspace", "--test", "programs"];
    let optimised: &[&str] = if cfg!(debug_assertions) {
        &[]
    } else {
        &["--release"]
    };
    let text = cargo_says(root(), &select, optimised)?;
    let file = text
        .lines()
        .filter(|l| l.contains("\"name\":\"train_diloco\""))
        .filter_map(|l| l.split_once("\"executable\":\"")?.1.split('"').next())
        .next_back();
    file.map(PathBuf::from)
        .ok_or_else(|| format!("cargo built no program:\n{text}"))
}

/// Runs cargo in `folder`; what it says of its artefacts.
fn cargo_says(folder: &Path, command: &[&str], arguments: &[&str]) -> Result<String, String> {
    // One at a time: they would only wait for each other's lock.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = conformance::cargo()
        .current_dir(folder)
        .args(command)
        .arg("--message-format=json")
        .args(arguments)
        .output();
    let what = format!("cargo {} {}", command.join(" "), arguments.join(" "));
    let output = told(&what, output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A fixture of this workspace, built once per run.
pub(crate) fn rust_plugin(package: &str) -> Result<PathBuf, String> {
    static BUILT: Built = Mutex::new(BTreeMap::new());
    once(&BUILT, package, || {
        let file = format!("/lib{}.so", package.replace('-', "_"));
        let mut arguments = vec!["--lib", "--profile", profile()];
        // Alone its dependencies have fewer features and would all be built once more: under xtask the whole workspace is built.
        match std::env::var_os("OXCCL_XTASK_RUN") {
            Some(_) => arguments.push("--workspace"),
            None => arguments.extend(["--package", package]),
        }
        cargo(root(), &arguments, &file)
    })
}
