//! Finds and opens the vendor libraries: `OXCCL_HCCL_PATH` first and alone if it is set, then what the loader finds, then
//! the folder into which Intel's packages install.
//!
//! The HCCL functions are looked for in `libhccl.so`; Intel's own programs link them from `libSynapse.so` (hccl_demo's
//! Makefile), which is therefore tried next. Libraries are never unloaded.

use std::path::{Path, PathBuf};

use vendor::{Opened, Symbols};

use crate::ftcore::Result;
use crate::ftcore::registry::Unavailable;

/// The file or folder with the vendor libraries.
pub(crate) const ENV_PATH: &str = "OXCCL_HCCL_PATH";
/// Where Intel's packages install (hccl_demo's Makefile).
const VENDOR_FOLDER: &str = "/usr/lib/habanalabs";

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
            // SAFETY: the initialisers of Intel's libraries ask nothing of the caller.
            match unsafe { Opened::new(&path, Symbols::Own) } {
                Ok(opened) => return Ok(opened),
                // A bare name is the loader's to find; only its own words tell absent from unusable.
                Err(why) if path.exists() || !why.to_string().contains("No such file") => {
                    return Err(why.into());
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
