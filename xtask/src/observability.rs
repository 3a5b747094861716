//! The browser and the Prometheus of the row `observability`: Debian's, installed once.

use anyhow::{Result, bail};

use crate::wheels::is_program;
use crate::{debian, matrix};

/// What the tests start, by the names under which Debian installs it.
const PROGRAMS: [&str; 4] = ["chromium", "chromedriver", "prometheus", "promtool"];
/// The font is only recommended by the browser, which draws no text without one.
const PACKAGES: [&str; 4] = ["chromium", "chromium-driver", "fonts-dejavu-core", "prometheus"];

pub(crate) fn prepare() -> Result<matrix::Environment> {
    let missing = || PROGRAMS.iter().find(|name| !is_program(name));
    if missing().is_some() {
        debian::install(&PACKAGES)?;
    }
    if let Some(name) = missing() {
        bail!(
            "{name} is missing after the installation of {}",
            PACKAGES.join(" ")
        );
    }
    Ok(matrix::Environment::new())
}
