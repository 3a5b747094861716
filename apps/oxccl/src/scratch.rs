//! A folder of a command's own in the system's temporary directory, for the output of its children; gone with it.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use oxccl::core::{Error, Result};

/// Removes the folder when dropped.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// A new folder that only this user can read, named for `purpose`.
    pub(super) fn new(purpose: &str) -> Result<Self> {
        let ns = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos());
        let name = format!("oxccl-{purpose}-{}-{ns}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|e| Error::io(format!("create the folder {}", path.display()), e))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::debug!(%error, folder = %self.0.display(), "a temporary folder stays behind");
        }
    }
}
