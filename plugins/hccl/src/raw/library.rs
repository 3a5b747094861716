//! Finds and opens the vendor libraries: `OXCCL_HCCL_PATH` first and alone if it is set, then what the loader finds, then
//! the folder into which Intel's packages install.
//!
//! The HCCL functions are looked for in `libhccl.so`; Intel's own programs link them from `libSynapse.so` (hccl_demo's
//! Makefile), which is therefore tried next. Libraries are never unloaded.

use std::error::Error as _;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use crate::ftcore::Result;
use crate::ftcore::registry::Unavailable;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The file or folder with the vendor libraries.
pub(crate) const ENV_PATH: &str = "OXCCL_HCCL_PATH";
/// Where Intel's packages install (hccl_demo's Makefile).
const VENDOR_FOLDER: &str = "/usr/lib/habanalabs";

/// An opened library. Never closed: its functions stay in use, and so may its threads.
pub(crate) struct Opened {
    library: ManuallyDrop<Library>,
    /// As it was opened: a path, or a bare name that the loader resolved.
    pub(crate) path: PathBuf,
}

impl Opened {
    /// The function `name`, or an error that names it.
    ///
    /// # Safety
    /// `F` is the type of the C function of that name.
    pub(crate) unsafe fn required<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: forwarded to the caller.
        unsafe { self.optional(name) }.ok_or_else(|| {
            Unavailable::SymbolMissing {
                library: self.path.display().to_string(),
                symbol: name.to_string(),
            }
            .into()
        })
    }

    /// The function `name` if the library has it.
    ///
    /// # Safety
    /// As for [`required`](Self::required).
    pub(crate) unsafe fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        let symbol = std::ffi::CString::new(name).ok()?;
        // SAFETY: the caller says that F is its type.
        unsafe { self.library.get::<F>(symbol.as_bytes_with_nul()) }
            .ok()
            .map(|f| *f)
    }
}

fn open_file(path: &Path) -> std::result::Result<Opened, String> {
    // SAFETY: loading runs the library's initialisers; the user named it or installed it as the vendor's.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    library
        .map(|library| Opened {
            library: ManuallyDrop::new(library),
            path: path.to_path_buf(),
        })
        // The loader's own words are in the source.
        .map_err(|e| e.source().map_or_else(|| e.to_string(), ToString::to_string))
}

/// The places where `name` may be, in the order in which they are tried.
fn places(name: &str, named: Option<&Path>) -> Vec<PathBuf> {
    match named {
        Some(path) if path.is_dir() => vec![path.join(name)],
        // A file stands for its folder as far as the other library is concerned.
        Some(path) if path.file_name().is_some_and(|f| f == name) => vec![path.to_path_buf()],
        Some(path) => vec![path.with_file_name(name)],
        None => vec![PathBuf::from(name), Path::new(VENDOR_FOLDER).join(name)],
    }
}

/// Opens the first of `names` that is there. A typed reason says what was searched, or why a file that is there cannot be
/// loaded (it then is not skipped: the next name would be another installation).
pub(crate) fn open(names: &[&str]) -> Result<Opened> {
    let named = std::env::var_os(ENV_PATH).map(PathBuf::from);
    let mut searched = Vec::new();
    for name in names {
        for path in places(name, named.as_deref()) {
            match open_file(&path) {
                Ok(opened) => return Ok(opened),
                // A bare name is the loader's to find; only its own words tell absent from unusable.
                Err(text) if path.exists() || !text.contains("No such file") => {
                    let library = path.display().to_string();
                    return Err(Unavailable::LibraryNotLoadable { library, text }.into());
                }
                Err(_) if path.parent().is_some_and(|p| p.as_os_str().is_empty()) => {
                    searched.push(format!("{} (loader path)", path.display()));
                }
                Err(_) => searched.push(path.display().to_string()),
            }
        }
    }
    let library = names.first().copied().unwrap_or_default();
    Err(Unavailable::LibraryNotFound {
        library: format!("{library} (set {ENV_PATH} to the folder of the Gaudi software)"),
        searched,
    }
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_place_is_the_only_one_and_a_file_stands_for_its_folder() {
        let folder = std::env::temp_dir();
        assert_eq!(places("libhccl.so", Some(&folder)), [folder.join("libhccl.so")]);
        let file = Path::new("/opt/x/libhccl.so");
        assert_eq!(places("libhccl.so", Some(file)), [file]);
        assert_eq!(
            places("libSynapse.so", Some(file)),
            [Path::new("/opt/x/libSynapse.so")]
        );
        assert_eq!(
            places("libhccl.so", None),
            [
                Path::new("libhccl.so"),
                Path::new("/usr/lib/habanalabs/libhccl.so")
            ]
        );
    }
}
