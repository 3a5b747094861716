//! What `cargo metadata --no-deps` says: the packages of the workspace, their targets and declared dependencies.
//!
//! The stairs rule reads the dependencies, the test matrix the test targets, the source rules the folders.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::process::{self, Output};

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);

/// The workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) workspace_root: PathBuf,
    pub(crate) target_directory: PathBuf,
}

/// One member.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
    /// The registries that may have it; absent if any may.
    pub(crate) publish: Option<Vec<String>>,
}

/// A declared dependency; `kind` is absent for a normal one, else `dev` or `build`.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// The version that is asked for; `*` if any is.
    pub(crate) req: String,
    pub(crate) kind: Option<String>,
}

/// A target: its kinds are cargo's words (`lib`, `bin`, `test`, …).
#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
    #[serde(default, rename = "required-features")]
    pub(crate) required_features: Vec<String>,
}

impl Package {
    /// True if the package's default features suffice for `target`.
    pub(crate) fn builds_by_default(&self, target: &Target) -> bool {
        let mut on: BTreeSet<&str> = BTreeSet::new();
        let mut new = vec!["default"];
        while let Some(feature) = new.pop() {
            if on.insert(feature) {
                new.extend(
                    self.features
                        .get(feature)
                        .into_iter()
                        .flatten()
                        .map(String::as_str),
                );
            }
        }
        target.required_features.iter().all(|f| on.contains(f.as_str()))
    }

    /// True if a registry may have it.
    pub(crate) fn is_published(&self) -> bool {
        self.publish
            .as_ref()
            .is_none_or(|registries| !registries.is_empty())
    }

    /// The package's folder.
    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new("."))
    }
}

impl Metadata {
    /// Reads the workspace that the current directory is in.
    pub(crate) fn read() -> Result<Self> {
        let out = Command::new(cargo())
            .args(["metadata", "--format-version", "1", "--no-deps"])
            .output()
            .context("cargo metadata could not be started")?;
        if !out.status.success() {
            bail!(
                "cargo metadata failed:\n{}",
                String::from_utf8_lossy(&out.stderr).trim_end()
            );
        }
        Self::parse(&out.stdout)
    }

    /// Builds what `select` names in cargo's words, which the error repeats. The folder of `profile`, where it is then.
    pub(crate) fn build(&self, select: &[&str], profile: &str) -> Result<PathBuf> {
        let mut cargo = cargo_command(&self.workspace_root);
        cargo.args(["build", "--profile", profile]).args(select);
        let finished = process::run(&mut cargo, BUILD_LIMIT, Output::Inherit, |_| {})?;
        if !finished.is_success() {
            bail!("{} could not be built: {}", select.join(" "), finished.describe());
        }
        // Cargo's name for the folder of its own profile.
        let folder = if profile == "dev" { "debug" } else { profile };
        Ok(self.target_directory.join(folder))
    }

    /// Parses cargo's JSON.
    pub(crate) fn parse(json: &[u8]) -> Result<Self> {
        serde_json::from_slice(json).context("cargo metadata printed something unexpected")
    }
}

/// The cargo that runs us, so that inner calls use the same toolchain.
pub(crate) fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// A cargo command in the workspace root, without the variables that `cargo run` set for xtask itself.
pub(crate) fn cargo_command(root: &Path) -> Command {
    let mut command = Command::new(cargo());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command.current_dir(root);
    command
}
