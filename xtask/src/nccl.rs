//! The real NCCL for the test that opens it and asks for its version: one wheel from PyPI, of which the library is kept. It
//! needs no GPU to be opened; whatever needs one is another row.

use std::path::PathBuf;

use anyhow::Result;

use crate::wheels::{self, Place, Wheel};

pub(crate) const VERSION: &str = "2.30.7";
const WHEEL: Wheel = Wheel {
    name: "nvidia-nccl-cu13",
    version: VERSION,
    sha256: "cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50",
};
const PLACE: Place<'_> = Place {
    folder: "nccl-2.30.7",
    recipe: "1",
    notice: "NCCL 2.30.7: fetching its wheel (252 MB, once)",
};

/// The folder for `OXCCL_NCCL_PATH`; made on the first call, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    wheels::kept(&PLACE, &WHEEL, &["nvidia/nccl/lib/libnccl.so.2=libnccl.so.2"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_carries_the_version_of_the_wheel() {
        assert_eq!(PLACE.folder, format!("nccl-{VERSION}"));
        assert!(PLACE.notice.contains(VERSION));
        assert_eq!(WHEEL.sha256.len(), 64);
    }
}
