//! Cargo, called by a test.

use std::process::Command;

/// The cargo that runs this test, as if it were called outside of it.
///
/// Cargo tells a test its package by `CARGO_PKG_…` and `CARGO_MANIFEST_…`. Build scripts may ask to be run again when these change (ring's does), and with
/// them everything above is built again: once for the test's call, and once more for the next call from outside.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}
