//! The real NCCL for the test that opens it and asks for its version: one wheel from PyPI, of which the library is kept. It
//! needs no GPU to be opened; whatever needs one is another row.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::wheels::{self, Place, Wheel};

const VERSION: &str = "2.30.7";
const WHEELS: [Wheel; 1] = [Wheel {
    name: "nvidia-nccl-cu13",
    version: VERSION,
    sha256: "cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50",
}];
const PLACE: Place<'_> = Place {
    folder: "nccl-2.30.7",
    recipe: "1",
    notice: "NCCL 2.30.7: fetching its wheel (252 MB, once)",
};

/// Why the library cannot be had here.
#[derive(Debug)]
pub(crate) enum NotHere {
    /// The wheel is for Linux on x86-64.
    Platform,
    /// There is no Python to fetch the wheel with.
    Python,
    /// Downloading or unpacking failed.
    Failed { error: anyhow::Error },
}

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Platform => write!(f, "NCCL's wheel is taken for Linux on x86-64 only"),
            Self::Python => write!(f, "python3 is missing (fetches the wheel with pip)"),
            Self::Failed { error } => write!(f, "NCCL {VERSION} could not be prepared: {error:#}"),
        }
    }
}

/// `cargo xtask nccl`: prepares the library and says where it is.
pub(crate) fn run() -> bool {
    match prepare() {
        Ok(folder) => {
            println!("NCCL {VERSION} is ready. To use it:");
            println!("export OXCCL_NCCL_PATH={}", folder.display());
            true
        }
        Err(why) => {
            eprintln!("xtask: {why}");
            false
        }
    }
}

/// The folder for `OXCCL_NCCL_PATH`; made on the first call, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf, NotHere> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(NotHere::Platform);
    }
    let failed = |error| NotHere::Failed { error };
    if let Some(folder) = wheels::found(&PLACE).map_err(failed)? {
        return Ok(folder);
    }
    if !wheels::is_program("python3") {
        return Err(NotHere::Python);
    }
    wheels::make_once(&PLACE, build).map_err(failed)
}

fn build(fresh: &Path) -> Result<()> {
    let (work, log) = (fresh.join("work"), fresh.join("build.log"));
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    wheels::download(&WHEELS, &work, &log)?;
    let files = ["nvidia/nccl/lib/libnccl.so.2=libnccl.so.2"];
    wheels::unpack(&work, "nvidia-nccl-cu13", fresh, &files, &log)?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_carries_the_version_of_the_wheel() {
        assert_eq!(PLACE.folder, format!("nccl-{VERSION}"));
        assert!(PLACE.notice.contains(VERSION));
        assert!(
            WHEELS
                .iter()
                .all(|w| w.version == VERSION && w.sha256.len() == 64)
        );
    }
}
