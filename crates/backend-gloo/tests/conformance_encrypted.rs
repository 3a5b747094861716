//! Gloo against the one suite, over TCP with the connections of a job that encrypts them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use backend_gloo::GlooGroup;
use conformance::{Limit, Mode, run_limited};
use ftcore::{Device, Error, Result};

/// The folder of a job's credentials, written by whichever process is first.
fn folder() -> Result<String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conformance-encrypted");
    let io = |e| Error::io("writing credentials", e);
    std::fs::create_dir_all(&folder).map_err(io)?;
    for (name, text) in [("job", "conformance".to_string()), ("secret", "5a".repeat(32))] {
        let new = folder.join(format!(
            "{name}.{}.{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&new, text).map_err(io)?;
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).map_err(io)?;
        std::fs::rename(new, folder.join(name)).map_err(io)?;
    }
    Ok(folder.to_string_lossy().into_owned())
}

fn main() -> ExitCode {
    run_limited(
        &Device::CPU,
        &[Mode::Threads],
        Arc::new(|_, mut options| {
            options.hints.insert("transport".into(), "tcp".into());
            options.hints.insert("credentials".into(), folder()?);
            options.hints.insert("encrypt".into(), "1".into());
            Ok(Box::new(GlooGroup::new("conformance", options)?))
        }),
        Limit::unless_long(
            3,
            "larger worlds over TCP have rows of their own; OXCCL_LONG=1 runs them",
        ),
    )
}
