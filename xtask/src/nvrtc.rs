//! NVRTC for the test that compiles the kernels of `quant-cuda`: one wheel from PyPI, of which the library and its headers are kept. It
//! needs no GPU.

use std::path::PathBuf;

use anyhow::Result;

use crate::wheels::{self, Place, Wheel};

const WHEEL: Wheel = Wheel {
    name: "nvidia-cuda-nvrtc",
    version: "13.0.88",
    sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
};
const PLACE: Place<'_> = Place {
    folder: "nvrtc-13.0.88",
    recipe: "1",
    notice: "NVRTC 13.0.88: fetching its wheel (90 MB, once)",
};

/// The folder for `OXCCL_NVRTC_PATH`; made on the first call, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    let files = [
        "lib/libnvrtc.so.13=libnvrtc.so.13",
        "lib/libnvrtc-builtins.so.13.0=libnvrtc-builtins.so.13.0",
    ];
    wheels::kept(&PLACE, &WHEEL, &files)
}
