//! Whether oneCCL can be used here, and if not why; the library itself, opened once per process.

use std::sync::{Mutex, PoisonError};

use ftcore::{Error, ErrorKind, Result};
use oneccl_sys::{Flavour, Library};

/// Opened libraries live as long as the process.
static OPENED: Mutex<Option<&'static Library>> = Mutex::new(None);

/// The library for `flavour`. Opened by the first call; a process has one flavour, since oneCCL chooses its plugin once.
pub(crate) fn library(flavour: Flavour) -> Result<&'static Library> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = *opened {
        if library.flavour == flavour {
            return Ok(library);
        }
        return Err(Error::new(
            ErrorKind::Conflict,
            format!(
                "oneCCL was opened with {} in this process; with {} it needs a process of its own (an isolated group has one)",
                library.flavour.plugin(),
                flavour.plugin()
            ),
        ));
    }
    let library: &'static Library = Box::leak(Box::new(Library::open(flavour)?));
    *opened = Some(library);
    Ok(library)
}

/// Whether groups on host memory can be made.
pub(crate) fn probe() -> Result<()> {
    library(Flavour::Host).map(drop)
}

/// The library in words.
pub(crate) fn describe() -> Option<String> {
    let library = library(Flavour::Host).ok()?;
    Some(format!(
        "oneCCL {} from {}",
        library.version,
        library.file.display()
    ))
}
