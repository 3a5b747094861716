//! NVRTC for the test that compiles the kernels of `quant-cuda`: one wheel from PyPI, of which the library and its headers are kept. It
//! needs no GPU.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::wheels::{self, Place, Wheel};

const WHEELS: [Wheel; 1] = [Wheel {
    name: "nvidia-cuda-nvrtc",
    version: "13.0.88",
    sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
}];
const PLACE: Place<'_> = Place {
    folder: "nvrtc-13.0.88",
    recipe: "1",
    notice: "NVRTC 13.0.88: fetching its wheel (90 MB, once)",
};

/// The folder for `OXCCL_NVRTC_PATH`; made on the first call, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("NVRTC's wheel is taken for Linux on x86-64 only");
    }
    if let Some(folder) = wheels::found(&PLACE)? {
        return Ok(folder);
    }
    if !wheels::is_program("python3") {
        bail!("python3 is missing (fetches the wheel with pip)");
    }
    wheels::make_once(&PLACE, build)
}

fn build(fresh: &Path) -> Result<()> {
    let (work, log) = (fresh.join("work"), fresh.join("build.log"));
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    wheels::download(&WHEELS, &work, &log)?;
    let files = [
        "lib/libnvrtc.so.13=libnvrtc.so.13",
        "lib/libnvrtc-builtins.so.13.0=libnvrtc-builtins.so.13.0",
    ];
    wheels::unpack(&work, "nvidia-cuda-nvrtc", fresh, &files, &log)?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}
