//! The real etcd, for the tests of the lighthouse's record: Debian's `etcd-server`, of which only the program is kept.
//!
//! The package is downloaded and unpacked into the user's cache, which needs no root; where that fails, root installs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::debian;
use crate::wheels::{self, Place, quietly};

const PACKAGE: &str = "etcd-server";
const PLACE: Place<'_> = Place {
    folder: "etcd-debian",
    recipe: "1",
    notice: "etcd: fetching Debian's etcd-server (8 MB, once)",
};
/// Where the package puts the program.
const PROGRAM: &str = "usr/bin/etcd";
const LIMIT: Duration = Duration::from_secs(300);

/// The program for `OXCCL_ETCD_PATH`: the installed one, or one in the cache, fetched on the first call.
pub(crate) fn prepare() -> Result<PathBuf> {
    let installed = Path::new("/").join(PROGRAM);
    if installed.is_file() {
        return Ok(installed);
    }
    if let Some(folder) = wheels::found(&PLACE)? {
        return Ok(folder.join(PROGRAM));
    }
    for name in ["apt-get", "dpkg-deb"] {
        wheels::needs(name, "fetches etcd, which is not installed")?;
    }
    let fetched = wheels::make(&PLACE, build).map(|folder| folder.join(PROGRAM));
    let fetched = fetched.or_else(|error| {
        debian::install(&[PACKAGE]).map_err(|e| e.context(format!("{error:#}")))?;
        let there = Some(installed).filter(|p| p.is_file());
        there.with_context(|| format!("apt-get succeeded, but there is no /{PROGRAM}"))
    });
    fetched.with_context(|| format!("{PACKAGE} could not be fetched (install it: apt-get install {PACKAGE})"))
}

/// Downloads and unpacks the package into `fresh`, and starts the program once.
fn build(fresh: &Path, work: &Path, log: &Path) -> Result<()> {
    let download = || {
        let mut command = Command::new("apt-get");
        command.args(["download", PACKAGE]).current_dir(work);
        quietly("apt-get download", &mut command, LIMIT, log)
    };
    // The package lists may be old, or not there; only root can renew them.
    download().or_else(|error| {
        if !rustix::process::geteuid().is_root() {
            return Err(error);
        }
        let mut update = Command::new("apt-get");
        quietly("apt-get update", update.arg("update"), LIMIT, log).and_then(|()| download())
    })?;
    let file = fs::read_dir(work)
        .with_context(|| format!("cannot read {}", work.display()))?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| anyhow!("apt-get left no package"))?;
    let unpacked = work.join("unpacked");
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("-x").arg(&file).arg(&unpacked);
    quietly("dpkg-deb", &mut unpack, LIMIT, log)?;
    let program = fresh.join(PROGRAM);
    if let Some(folder) = program.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    fs::rename(unpacked.join(PROGRAM), &program).context("the package has no etcd")?;
    // It may be linked against a newer C library than this machine's.
    quietly("etcd", Command::new(&program).arg("--version"), LIMIT, log)
}
