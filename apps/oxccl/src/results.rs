//! Standard output is for results only: what a plugin or a vendor library prints there would end up in the middle of them, so it goes to
//! standard error instead.

use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;

use oxccl::core::{Error, Result};

/// Standard output as this program was given it.
static OUT: OnceLock<File> = OnceLock::new();

fn failed(e: std::io::Error) -> Error {
    Error::io("write to standard output", e)
}

/// Keeps standard output for [`write`]; its number means standard error from now on. A program that was started without one writes nowhere.
pub(crate) fn claim() -> Result<()> {
    let Ok(out) = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3) else {
        return Ok(());
    };
    rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(|e| failed(e.into()))?;
    let _ = OUT.set(out.into());
    Ok(())
}

/// Writes to standard output. Errors: `Io`.
pub(crate) fn write(text: &(impl AsRef<[u8]> + ?Sized)) -> Result<()> {
    match OUT.get() {
        Some(mut out) => out.write_all(text.as_ref()).map_err(failed),
        None => Ok(()),
    }
}
