//! The program's side: finds plugins, tries them in a child process, opens them, registers what they bring.
//!
//! [`discover`] turns the environment into candidates; `probe` tries each in a child and `verdict` keeps what came of it; `library` opens it and holds its
//! table; a `factory`, `group` (over the common engine: `driver`) or `device` around the table is an ordinary backend, group or accelerator of this program.
//! Everything that comes back over the boundary is checked; what is lent is kept until the plugin has given it back, and named by numbers
//! (`handles`), so that a plugin that gives back twice harms nothing. One that never completes is found out by the engine.

mod buffer;
mod device;
mod discover;
mod driver;
mod factory;
mod group;
mod handles;
mod library;
mod operation;
mod polling;
mod probe;
mod store;
#[cfg(test)]
mod tests;
mod verdict;

pub use discover::{ENV_LIBRARY, ENV_PATH, Report, discover, discover_with};
pub use factory::Loaded;
pub use probe::{ENV_HELPER, ENV_PROBE_SECONDS};
pub use verdict::verdicts_for_job;

use std::path::Path;
use std::time::Duration;

use ftcore::{Error, ErrorKind, Result};

/// Tries the plugin at `path` in a child process, and opens it in this one if it did well there.
///
/// The same file (through a symlink too) is opened once per process. Nothing is registered: see [`Loaded::register`].
/// Errors: `Unsupported` with an `Unavailable` as its source.
pub fn load(path: &Path) -> Result<Loaded> {
    load_within(path, probe::limit()?)
}

/// As [`load`]; the child is killed after `limit`.
pub fn load_within(path: &Path, limit: Duration) -> Result<Loaded> {
    let path = library::canonical(path)?;
    probe::try_in_child(&path, limit)?;
    Ok(Loaded(library::open(&path)?))
}

/// Opens the plugin at `path` without trying it first: for the child processes of a program that has. A plugin that
/// crashes or hangs takes this process with it.
pub fn open_trusted(path: &Path) -> Result<Loaded> {
    Ok(Loaded(library::open(&library::canonical(path)?)?))
}

/// The plugin did not keep to the ABI.
fn breach(who: &str, what: String) -> Error {
    Error::new(ErrorKind::Protocol, format!("plugin {who} broke the ABI: {what}"))
}
