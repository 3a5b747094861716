//! The real oneCCL on SYCL queues, for tests of `xpu` without an Intel GPU: SYCL's CPU device runs them.
//!
//! Seven wheels from PyPI, of which only the files that are loaded at run time are kept, in one folder, so that each finds its
//! neighbours: oneCCL's SYCL build (2022.1.2: that of 2022.2.0 crashes when a communicator starts), the SYCL runtime, OpenCL for
//! CPUs with its compiler, and dpctl's C library, which has no Python in it although its wheel is made for one version of Python.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::oneccl;
use crate::wheels::{self, Place, Unfetched, Wheel, is_program};

const VERSION: &str = "2022.1.2";
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

/// Why the libraries cannot be had here.
#[derive(Debug)]
pub(crate) enum NotHere {
    /// What the library on host memory lacks as well.
    Base(oneccl::NotHere),
    /// Downloading or unpacking failed.
    Failed { error: anyhow::Error },
}

impl NotHere {
    /// True if this machine could have them, and only we fail to prepare them.
    pub(crate) fn is_defect(&self) -> bool {
        match self {
            Self::Base(base) => base.is_defect(),
            Self::Failed { error } => !error.is::<Unfetched>(),
        }
    }
}

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base(base) => base.fmt(f),
            Self::Failed { error } => {
                write!(f, "oneCCL {VERSION} on SYCL could not be prepared: {error:#}")
            }
        }
    }
}

/// `cargo xtask oneccl --sycl`: prepares the libraries and says how to use them.
pub(crate) fn run() -> bool {
    match prepare() {
        Ok(folder) => {
            println!("oneCCL {VERSION} on SYCL is ready. To use it on SYCL's CPU device:");
            for (name, value) in environment(&folder) {
                println!("export {name}={value}");
            }
            true
        }
        Err(why) => {
            eprintln!("xtask: {why}");
            false
        }
    }
}

/// The variables with which tests find the libraries in `folder` and take the CPU device for an `xpu`.
pub(crate) fn environment(folder: &Path) -> Vec<(String, String)> {
    vec![
        ("OXCCL_XCCL_PATH".to_owned(), folder.display().to_string()),
        ("OXCCL_XPU_DEVICES".to_owned(), "cpu".to_owned()),
    ]
}

/// The folder with everything; made on the first call, which takes a minute, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf, NotHere> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(NotHere::Base(oneccl::NotHere::Platform));
    }
    let failed = |error| NotHere::Failed { error };
    if let Some(folder) = wheels::found(&PLACE).map_err(failed)? {
        return Ok(folder);
    }
    if !is_program("python3") {
        return Err(NotHere::Base(oneccl::NotHere::Program {
            name: "python3",
            needed_for: "fetches the wheels with pip",
        }));
    }
    wheels::make_once(&PLACE, build).map_err(failed)
}

fn build(fresh: &Path) -> Result<()> {
    let (work, kept, log) = (fresh.join("work"), fresh.join("lib"), fresh.join("build.log"));
    for folder in [&work, &kept] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    wheels::download(&WHEELS, &work, &log)?;
    download_dpctl(&work, &log)?;
    for (wheel, files) in KEPT {
        let wanted: Vec<String> = files.iter().map(|name| format!("/lib/{name}={name}")).collect();
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        wheels::unpack(&work, wheel, &kept, &wanted, &log)?;
    }
    let interface = ["dpctl/libDPCTLSyclInterface.so=libDPCTLSyclInterface.so"];
    wheels::unpack(&work, DPCTL.name, &kept, &interface, &log)?;
    oneccl::add_fabric(&kept)?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

/// As [`wheels::download`], for one version of Python that need not be the one that runs.
fn download_dpctl(to: &Path, log: &Path) -> Result<()> {
    let list = to.join("requirements-dpctl.txt");
    let wanted = format!(
        "{}=={} --hash=sha256:{}\n",
        DPCTL.name, DPCTL.version, DPCTL.sha256
    );
    fs::write(&list, wanted).with_context(|| format!("cannot write {}", list.display()))?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-cache-dir",
    ])
    .args(["--no-deps", "--only-binary", ":all:", "--require-hashes"])
    .args(["--python-version", DPCTL_PYTHON, "--requirement"])
    .arg(&list)
    .arg("--dest")
    .arg(to);
    wheels::fetch(&mut pip, log)
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
