//! Credentials of process ranks: a folder for this run of the suite, so that every connection of a backend proves the secret in the rows `processes`.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use ftcore::Credentials;
use ftcore::lifecycle::nonce;

use crate::{Failure, Outcome};

static MADE: OnceLock<Result<Arc<Credentials>, String>> = OnceLock::new();

/// Those of this run.
pub(crate) fn credentials() -> Outcome<Arc<Credentials>> {
    let made = MADE.get_or_init(|| {
        let name = format!("oxccl-conformance-{}-{:016x}", std::process::id(), nonce());
        let folder = std::env::temp_dir().join(name);
        make(&folder).map_err(|e| format!("cannot make the credentials {}: {e}", folder.display()))?;
        Credentials::load(&folder).map_err(|e| e.to_string())
    });
    made.clone().map_err(Failure::new)
}

fn make(folder: &Path) -> std::io::Result<()> {
    DirBuilder::new().mode(0o700).create(folder)?;
    fs::write(folder.join("job"), "conformance")?;
    let secret: String = (0..4).map(|_| format!("{:016x}", nonce())).collect();
    let path = folder.join("secret");
    fs::write(&path, secret)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
}

/// Removes the folder, if there is one.
pub(crate) fn forget() {
    if let Some(Ok(credentials)) = MADE.get() {
        let _ = fs::remove_dir_all(credentials.folder());
    }
}
