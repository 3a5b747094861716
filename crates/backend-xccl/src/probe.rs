//! Whether oneCCL can be used here, and if not why; the library itself, opened once per process.

use std::sync::{Mutex, PoisonError};

use ftcore::registry::Unavailable;
use ftcore::{Error, ErrorKind, Result};
use oneccl_sys::{Flavour, Library, OpenError};

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
    let library: &'static Library = Box::leak(Box::new(Library::open(flavour).map_err(unavailable)?));
    *opened = Some(library);
    Ok(library)
}

fn unavailable(error: OpenError) -> Error {
    match error {
        OpenError::NotFound { searched } => Unavailable::LibraryNotFound {
            library: "libccl.so.2 (oneCCL)".to_string(),
            searched,
        },
        OpenError::NotLoadable { library, text } => Unavailable::LibraryNotLoadable { library, text },
        OpenError::SymbolMissing { library, symbol } => Unavailable::SymbolMissing {
            library,
            symbol: symbol.to_string(),
        },
        other => Unavailable::InitFailed {
            code: None,
            text: other.to_string(),
        },
    }
    .into()
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
