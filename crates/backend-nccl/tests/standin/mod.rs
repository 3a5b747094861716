//! Building the stand-in and running under it. A process cannot change where it loads its libraries from once it has, so a test binary
//! starts itself again with the variables set.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a test binary that cannot start ends"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;

use ftcore::registry::BackendFactory;

/// Set to run on this machine's GPU with the real NCCL instead of on the stand-in: what the rows beside `nccl` do.
const GPU: &str = "OXCCL_GPU_TESTS";

/// Set in the restarted process.
const MARK: &str = "OXCCL_STANDIN_READY";

/// The stand-in's file, built if it is not up to date.
pub(crate) fn library() -> PathBuf {
    conformance::dylib("nccl-standin").unwrap_or_else(|why| panic!("{why}"))
}

/// This program again, with the stand-in in the place of NCCL and the driver, and `more` variables.
pub(crate) fn command(library: &Path, more: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command
        .env(MARK, "1")
        .env("OXCCL_NCCL_PATH", library)
        .env("OXCCL_CUDA_PATH", library)
        .env("OXCCL_NVRTC_PATH", library)
        .envs(more.iter().copied());
    command
}

/// True in a process that runs on the stand-in.
pub(crate) fn is_ready() -> bool {
    std::env::var_os(MARK).is_some()
}

/// True if the tests are to run on a GPU with the real NCCL.
pub(crate) fn is_real() -> bool {
    std::env::var_os(GPU).is_some_and(|v| !v.is_empty())
}

/// Returns in a process that runs on the stand-in, or on a GPU; elsewhere starts it, with the same arguments, and ends as it did.
pub(crate) fn or_restart(more: &[(&str, &str)]) {
    if is_ready() {
        return;
    }
    if is_real() {
        let library = backend_nccl::NcclFactory.library().unwrap_or_default();
        assert!(
            !library.contains("stand-in"),
            "{GPU} asks for the real NCCL; this is {library}"
        );
        return;
    }
    let status: ExitStatus = command(&library(), more)
        .args(std::env::args_os().skip(1))
        .status()
        .expect("this program starts again");
    std::process::exit(status.code().unwrap_or(101));
}

/// What came after 2.27: used where a library has it, done without where it has not.
pub(crate) const NEWER: [&str; 1] = ["ncclCommRevoke"];

/// A copy of the library in which functions have other names, so that looking them up fails.
pub(crate) fn without(library: &Path, to: PathBuf, functions: &[&str]) -> PathBuf {
    let mut bytes = std::fs::read(library).expect("the stand-in can be read");
    for function in functions {
        let name = format!("\0{function}\0");
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(name.len()).position(|w| w == name.as_bytes()) {
            // The hash table still holds the old name's hash, so neither name is found.
            bytes[at + found + 1] = b'X';
            at += found + 1;
        }
    }
    std::fs::write(&to, bytes).expect("a copy of the stand-in");
    to
}

/// The library that makes a system refuse (`fixtures/c/refuse.c`), compiled at the first question. The error says why it cannot be had.
pub(crate) fn refusing() -> Result<PathBuf, String> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let build = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/c/refuse.c");
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("refuse-{}.so", std::process::id()));
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
        let output = Command::new(&cc)
            .args([
                "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared",
            ])
            .arg(source)
            .arg("-o")
            .arg(&to)
            .output()
            .map_err(|e| format!("there is no C compiler ('{cc}': {e})"))?;
        match output.status.success() {
            true => Ok(to),
            false => panic!(
                "refuse.c does not compile:\n{}",
                String::from_utf8_lossy(&output.stderr)
            ),
        }
    };
    BUILT.get_or_init(build).clone()
}
