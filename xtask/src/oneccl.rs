//! The real oneCCL for tests on host memory, without its gigabytes: three wheels from PyPI (pinned, hashes checked), of which
//! five files are used.
//!
//! The wheel's own `libccl.so.1` wants SYCL and Intel's compiler libraries. But the plugin for host memory prefers one that
//! lies in `ccl/cpu/lib` beside it, and the devel wheel has the CPU-only build as a static archive: it is linked into a shared
//! library here. `wheels` fetches them and keeps the result.
//!
//! libfabric is the one that Intel ships, too. With its provider for TCP alone a process that joins a communicator uses half the processor time
//! that it needs with Debian's, in which every provider starts and that of verbs reads the symbols of the whole kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::debian;
use crate::wheels::{self, Lacks, Place, Wheel, quietly};

/// The version of both wheels.
pub(crate) const VERSION: &str = "2022.2.0";
/// The wheels for Linux on x86-64, with their hashes.
const WHEELS: [Wheel; 2] = [
    Wheel {
        name: "oneccl",
        version: VERSION,
        sha256: "02c2f52434bfad50cc2d00be6e97fd81e3f365d279ac7bdabd2e3b656194c19f",
    },
    Wheel {
        name: "oneccl-devel",
        version: VERSION,
        sha256: "6df69cc33962e48f401041bd788991bd47f82d3b1be3ed788aa184293c581cf2",
    },
];
const PLACE: Place<'_> = Place {
    folder: "oneccl-2022.2.0",
    recipe: "2",
    notice: "oneCCL 2022.2.0: fetching its wheels (125 MB, once)",
};
/// The newest that has libfabric, 2.4.0: later ones leave it to the system.
const FABRIC_WHEEL: Wheel = Wheel {
    name: "impi-rt",
    version: "2021.18.1",
    sha256: "51ca89c1e64e60d86a7d40a7d6124312ba63aafc03fb6aacc140b3c66371d814",
};
const FABRIC: Place<'_> = Place {
    folder: "libfabric-2.4.0",
    recipe: "1",
    notice: "libfabric 2.4.0 for oneCCL: fetching the wheel that has it (129 MB, once)",
};
/// What is taken of it; a provider is found beside the library.
const FABRIC_FILES: [&str; 3] = ["libfabric.so.1", "libtcp-fi.so", "LICENSE.impi-rt.txt"];
/// What the library needs at run time besides, and the Debian package that has it.
const SYSTEM_LIBRARIES: [(&str, &str); 1] = [("libhwloc.so.15", "libhwloc15")];

const BUILD_LIMIT: Duration = Duration::from_secs(120);

/// The archive refers to Intel's tracing library and memory functions, which are not in the wheels: tracing is off while
/// its pointers are null, and the C library copies as well.
const STUBS: &str = r"#include <stddef.h>
#include <string.h>
#define TRACE(name) void *__itt_##name##_ptr__3_0
TRACE(domain_create); TRACE(event_create); TRACE(event_start); TRACE(event_end); TRACE(metadata_add);
TRACE(string_handle_create); TRACE(task_begin); TRACE(task_end); TRACE(thread_set_name);
void *_intel_fast_memcpy(void *to, const void *from, size_t n) { return memcpy(to, from, n); }
void *_intel_fast_memset(void *to, int byte, size_t n) { return memset(to, byte, n); }
";

/// The folder for `OXCCL_XCCL_PATH`; made on the first call, which takes a minute, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    wheels::for_this_platform("oneCCL")?;
    install_libraries(&SYSTEM_LIBRARIES)?;
    if let Some(folder) = wheels::found(&PLACE)? {
        return Ok(folder);
    }
    for (name, needed_for) in [
        ("python3", "fetches the wheels with pip"),
        ("cc", "compiles a few stubs"),
        ("g++", "links the library"),
    ] {
        wheels::needs(name, needed_for)?;
    }
    wheels::make(&PLACE, build).with_context(|| format!("oneCCL {VERSION} could not be prepared"))
}

/// Which of the system libraries the loader does not know.
fn missing_libraries(wanted: &[(&'static str, &'static str)]) -> Vec<&'static str> {
    let known = ["/sbin/ldconfig", "ldconfig"]
        .iter()
        .find_map(|program| Command::new(program).arg("-p").output().ok())
        .map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
        .unwrap_or_default();
    wanted
        .iter()
        .filter(|(library, _)| !known.contains(library))
        .map(|(_, package)| *package)
        .collect()
}

/// Installs what the loader does not know of `wanted`, each a library and the Debian package that has it.
fn install_libraries(wanted: &[(&'static str, &'static str)]) -> Result<()> {
    let packages = missing_libraries(wanted);
    if packages.is_empty() {
        return Ok(());
    }
    let lacks = |why: String| {
        let packages = packages.join(" ");
        Lacks(format!(
            "system libraries are missing (apt-get install {packages}): {why}"
        ))
    };
    debian::install(&packages).map_err(|e| lacks(format!("{e:#}")))?;
    match missing_libraries(wanted).as_slice() {
        [] => Ok(()),
        still => Err(lacks(format!(
            "apt-get succeeded, but the loader still lacks {}",
            still.join(" ")
        ))
        .into()),
    }
}

/// Puts libfabric into the folder `to`, beside the library that loads it.
pub(crate) fn add_fabric(to: &Path) -> Result<()> {
    let files = [
        "/lib/libfabric.so.1=libfabric.so.1",
        "/lib/libtcp-fi.so=libtcp-fi.so",
        "/LICENSE.txt=LICENSE.impi-rt.txt",
    ];
    let from = wheels::kept(&FABRIC, &FABRIC_WHEEL, &files)?;
    for name in FABRIC_FILES {
        fs::copy(from.join(name), to.join(name))
            .with_context(|| format!("cannot copy {name} to {}", to.display()))?;
    }
    Ok(())
}

/// Makes everything in `fresh`.
fn build(fresh: &Path, work: &Path, log: &Path) -> Result<()> {
    let plugins = fresh.join("lib");
    let library = plugins.join("ccl/cpu/lib");
    fs::create_dir_all(&library).with_context(|| format!("cannot make {}", library.display()))?;
    wheels::download(&WHEELS, None, work, log)?;
    let files = [
        "/lib/libccl.so.2=libccl.so.2",
        "/lib/libccl_legacy_cpu.so=libccl_legacy_cpu.so",
        "/licensing/license.txt=LICENSE.oneccl.txt",
    ];
    wheels::unpack(work, "oneccl", &plugins, &files, log)?;
    add_fabric(&plugins)?;
    let files = ["/lib/ccl/cpu/lib/libccl.a=libccl.a"];
    wheels::unpack(work, "oneccl-devel", work, &files, log)?;
    let (source, object) = (work.join("stubs.c"), work.join("stubs.o"));
    fs::write(&source, STUBS).with_context(|| format!("cannot write {}", source.display()))?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-fPIC", "-c"])
        .arg(&source)
        .arg("-o")
        .arg(&object);
    quietly("cc", &mut cc, BUILD_LIMIT, log)?;
    let mut link = Command::new("g++");
    link.args(["-shared", "-s", "-Wl,-soname,libccl.so.1", "-o"])
        .arg(library.join("libccl.so.1"))
        .arg("-Wl,--whole-archive")
        .arg(work.join("libccl.a"))
        .arg("-Wl,--no-whole-archive")
        .arg(&object)
        // By its full name: the package with the short one is not needed.
        .args(["-l:libhwloc.so.15", "-ldl", "-lpthread"]);
    quietly("g++", &mut link, BUILD_LIMIT, log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wheels_are_pinned_by_hash() {
        assert_eq!(PLACE.folder, format!("oneccl-{VERSION}"));
        for wheel in WHEELS.iter().chain([&FABRIC_WHEEL]) {
            let digits = wheel.sha256.bytes().all(|b| b.is_ascii_hexdigit());
            assert!(wheel.sha256.len() == 64 && digits, "{}", wheel.name);
        }
    }
}
