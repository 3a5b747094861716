//! What the row `observability` looks at jobs with: Debian's curl, jq, browser and Prometheus, and rotel, an OpenTelemetry collector, whose wheel on PyPI
//! holds its program. Installed once.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, bail};

use crate::wheels::{self, Place, Wheel, is_program};
use crate::{debian, matrix};

/// What the tests start, by the names under which Debian installs it.
const PROGRAMS: [&str; 6] = ["curl", "jq", "chromium", "chromedriver", "prometheus", "promtool"];
/// The font is only recommended by the browser, which draws no text without one.
const PACKAGES: [&str; 6] = [
    "curl",
    "jq",
    "chromium",
    "chromium-driver",
    "fonts-dejavu-core",
    "prometheus",
];

const WHEEL: Wheel = Wheel {
    name: "rotel",
    version: "0.0.1a15",
    sha256: "2f4117e58410c933e0dc042a268ef738dab2e3a5d63b5831209acdac2a6ddcb7",
};
const PLACE: Place<'_> = Place {
    folder: "rotel-0.0.1a15",
    recipe: "1",
    notice: "rotel 0.0.1a15: fetching its wheel (10 MB, once)",
};

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
    let folder = wheels::kept(&PLACE, &WHEEL, &["rotel/rotel-agent=rotel-agent"])?;
    let collector = folder.join("rotel-agent");
    // What is taken out of a wheel is a file like any other.
    fs::set_permissions(&collector, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} a program", collector.display()))?;
    let collector = collector.to_string_lossy().into_owned();
    Ok(vec![("OXCCL_TEST_COLLECTOR".to_string(), collector)])
}
