//! Whether the lock file of every workspace in the tree fits its manifests.
//!
//! The workspaces beside the main one (`python`, `plugins/hccl`, …) build crates of the main one by path: a dependency that one of those gets stands
//! in their lock files too, and no build of the main workspace notices that it is missing there.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Output};
use crate::tidy;

const LIMIT: Duration = Duration::from_secs(2 * 60);

/// Compares them; cargo says what is missing. True if all fit.
pub(crate) fn check() -> Result<bool> {
    let root = Metadata::read()?.workspace_root;
    let mut fit = true;
    for lock in tidy::files_named(&root, "Cargo.lock")? {
        let folder = lock.parent().unwrap_or(Path::new("."));
        let mut cargo = cargo_command(folder);
        // Resolves without fetching a single crate.
        cargo.args(["update", "--workspace", "--locked", "--quiet"]);
        let finished = process::run(&mut cargo, LIMIT, Output::Inherit, |_| {})?;
        if !finished.is_success() {
            let (lock, folder) = (lock.display(), folder.display());
            println!("{lock} does not fit its manifests: run `cargo update --workspace` in {folder}");
            fit = false;
        }
    }
    Ok(fit)
}
