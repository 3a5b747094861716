//! A plugin in C that breaks the ABI.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `fixtures/c/breach.c` with these definitions, by the compiler that Rust links with.
pub(crate) fn breach(folder: &Path, defines: &[&str]) -> PathBuf {
    let root = documents::root();
    let library = folder.join("libbreach.so");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-fvisibility=hidden", "-I"])
        .arg(root.join("crates/plugin/include"))
        .args(defines)
        .arg(root.join("fixtures/c/breach.c"))
        .arg("-o")
        .arg(&library)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    library
}
