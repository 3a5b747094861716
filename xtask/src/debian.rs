//! Packages of Debian that rows and campaigns need, installed where we are root.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::wheels::{self, is_program, quietly};

const INSTALL_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Installs `packages` without what they only recommend.
///
/// The error says what to install where this may not.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let wanted = packages.join(" ");
    if !rustix::process::geteuid().is_root() {
        bail!("only root can install {wanted} (apt-get install {wanted})");
    }
    if !is_program("apt-get") {
        bail!("{wanted} cannot be installed: there is no apt-get");
    }
    let log = wheels::cache()?.join("apt.log");
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        // The probe of another row may be installing.
        command.args(["-o", "DPkg::Lock::Timeout=240"]);
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        quietly("apt-get", &mut command, INSTALL_LIMIT, &log)
    };
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    // The package lists may be old: fetched only if they are.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
}
