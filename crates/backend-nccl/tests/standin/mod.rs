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

/// Set in the restarted process.
const MARK: &str = "OXCCL_STANDIN_READY";

/// The stand-in's file, built if it is not up to date.
pub(crate) fn library() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(cargo)
        .current_dir(&root)
        .args([
            "build",
            "--quiet",
            "-p",
            "nccl-standin",
            "--message-format=json-render-diagnostics",
        ])
        .output()
        .expect("cargo can be started");
    assert!(
        output.status.success(),
        "the stand-in does not build:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let messages = String::from_utf8_lossy(&output.stdout);
    messages
        .split('"')
        .find(|part| part.ends_with("libnccl_standin.so"))
        .map(PathBuf::from)
        .unwrap_or_else(|| panic!("cargo does not say where the stand-in is:\n{messages}"))
}

/// This program again, with the stand-in in the place of NCCL and the driver, and `more` variables.
pub(crate) fn command(library: &Path, more: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command
        .env(MARK, "1")
        .env("OXCCL_NCCL_PATH", library)
        .env("OXCCL_CUDA_PATH", library)
        .envs(more.iter().copied());
    command
}

/// True in a process that runs on the stand-in.
pub(crate) fn is_ready() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Returns in a process that runs on the stand-in; elsewhere starts it, with the same arguments, and ends as it did.
pub(crate) fn or_restart(more: &[(&str, &str)]) {
    if is_ready() {
        return;
    }
    let status: ExitStatus = command(&library(), more)
        .args(std::env::args_os().skip(1))
        .status()
        .expect("this program starts again");
    std::process::exit(status.code().unwrap_or(101));
}
