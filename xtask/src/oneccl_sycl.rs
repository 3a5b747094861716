//! The real oneCCL on SYCL queues, for tests of `xpu` without an Intel GPU: SYCL's CPU device runs them.
//!
//! Seven wheels from PyPI, of which only the files that are loaded at run time are kept, in one folder, so that each finds its
//! neighbours: oneCCL's SYCL build (2022.1.2: that of 2022.2.0 crashes when a communicator starts), the SYCL runtime, OpenCL for
//! CPUs with its compiler, and dpctl's C library, which has no Python in it although its wheel is made for one version of Python.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::oneccl;
use crate::wheels::{self, Place, Wheel};

pub(crate) const VERSION: &str = "2022.1.2";
const COMPILER: &str = "2026.2.0";
const WHEELS: [Wheel; 6] = [
    Wheel {
        name: "oneccl",
        version: VERSION,
        sha256: "c87c28fcce5435b03b8f01f3e669ab3ec59718f28f9ab537403b49efe83f4c16",
    },
    Wheel {
        name: "intel-sycl-rt",
        version: COMPILER,
        sha256: "ad920da1ffcb43edbc03422a7c85094997e6d578f9ab534743442af70bcbfaa1",
    },
    Wheel {
        name: "intel-opencl-rt",
        version: COMPILER,
        sha256: "6b6215a420598b4999ee01caca6d5cbe106aa4155c46c52377619c5aafce9f67",
    },
    Wheel {
        name: "intel-cmplr-lib-rt",
        version: COMPILER,
        sha256: "9f713083073a820d2496a6da8e8d4f3482aba6640f74521d25ea48dcebe72748",
    },
    Wheel {
        name: "intel-cmplr-lib-ur",
        version: COMPILER,
        sha256: "0d0a5099aa2e1e38375b509c2a8182e719ed74aa656b2a800ddf6cfbd3384b80",
    },
    Wheel {
        name: "tbb",
        version: "2023.2.0",
        sha256: "7d80615b6e970f11671fa05b6eaa9483ac864fbfe525ac280271a78b37870b7c",
    },
];
/// Made for Python 3.11; pip must be told, whatever Python runs it.
const DPCTL: Wheel = Wheel {
    name: "dpctl",
    version: "0.22.1",
    sha256: "19b90062f02ca9a8e8c534169e607b251c05d0da51a4c21d3c3e7c96d9e70bb7",
};
const DPCTL_PYTHON: &str = "3.11";

/// What is kept: of which wheel, the files of its `lib` folder. OpenCL picks its built-in functions by what the processor can do.
const KEPT: [(&str, &[&str]); 6] = [
    // The last one is for host memory: groups of both kinds are wanted where one is isolated.
    (
        "oneccl",
        &[
            "libccl.so.2",
            "libccl.so.1",
            "libccl_legacy.so",
            "libccl_legacy_cpu.so",
        ],
    ),
    ("intel-sycl-rt", &["libsycl.so.9"]),
    (
        "intel-opencl-rt",
        &[
            "libOpenCL.so.1",
            "libintelocl.so",
            "libcommon_clang.so.2026.22.10.0",
            "cl.cfg",
            "clbltfnshared.rtl",
            "cllibrary.rtl",
            "clbltfnh8.rtl",
            "clbltfne9.rtl",
            "clbltfnl9.rtl",
            "clbltfnz0.rtl",
            "clbltfnz1.rtl",
            "cllibraryh8.o",
            "cllibrarye9.o",
            "cllibraryl9.o",
            "cllibraryz0.o",
            "cllibraryz1.o",
            "libocl_svml_h8.so",
            "libocl_svml_e9.so",
            "libocl_svml_l9.so",
            "libocl_svml_z0.so",
            "libocl_svml_z1.so",
        ],
    ),
    (
        "intel-cmplr-lib-rt",
        &["libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so"],
    ),
    ("intel-cmplr-lib-ur", &["libur_loader.so.0"]),
    ("tbb", &["libtbb.so.12", "libtbbmalloc.so.2"]),
];
const PLACE: Place<'_> = Place {
    folder: "oneccl-sycl-2022.1.2",
    recipe: "3",
    notice: "oneCCL 2022.1.2 on SYCL: fetching its wheels and those of the SYCL and OpenCL runtimes (560 MB, once; 650 MB are kept)",
};

/// The variables with which tests find the libraries in `folder` and take the CPU device for an `xpu`.
pub(crate) fn environment(folder: &Path) -> Vec<(String, String)> {
    vec![
        ("OXCCL_XCCL_PATH".to_owned(), folder.display().to_string()),
        ("OXCCL_XPU_DEVICES".to_owned(), "cpu".to_owned()),
    ]
}

/// The folder with everything; made on the first call, which takes a minute, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    wheels::for_this_platform("oneCCL")?;
    if let Some(folder) = wheels::found(&PLACE)? {
        return Ok(folder);
    }
    wheels::needs("python3", "fetches the wheels with pip")?;
    wheels::make(&PLACE, build).with_context(|| format!("oneCCL {VERSION} on SYCL could not be prepared"))
}

fn build(fresh: &Path, work: &Path, log: &Path) -> Result<()> {
    let kept = fresh.join("lib");
    fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
    wheels::download(&WHEELS, None, work, log)?;
    wheels::download(&[DPCTL], Some(DPCTL_PYTHON), work, log)?;
    for (wheel, files) in KEPT {
        let wanted: Vec<String> = files.iter().map(|name| format!("/lib/{name}={name}")).collect();
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        wheels::unpack(work, wheel, &kept, &wanted, log)?;
    }
    let interface = ["dpctl/libDPCTLSyclInterface.so=libDPCTLSyclInterface.so"];
    wheels::unpack(work, DPCTL.name, &kept, &interface, log)?;
    oneccl::add_fabric(&kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned_by_version_and_hash_and_gives_something() {
        for wheel in WHEELS.iter().chain([&DPCTL]) {
            assert!(
                wheel.sha256.len() == 64 && wheel.sha256.bytes().all(|b| b.is_ascii_hexdigit()),
                "{}",
                wheel.name
            );
        }
        for wheel in &WHEELS {
            assert!(
                KEPT.iter()
                    .any(|(name, files)| *name == wheel.name && !files.is_empty()),
                "{}",
                wheel.name
            );
        }
        assert!(PLACE.folder.ends_with(VERSION) && PLACE.notice.contains(VERSION));
    }
}
