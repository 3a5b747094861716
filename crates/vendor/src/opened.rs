//! A library that is open, and stays so: it starts threads of its own, and its functions may be on any stack.

use std::error::Error as _;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use ftcore::registry::Unavailable;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

/// Who sees a library's symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symbols {
    /// Only who looks them up.
    Own,
    /// Also the libraries that are opened later, which may need them.
    Shared,
}

/// An opened library. Never closed.
#[derive(Debug)]
pub struct Opened {
    library: ManuallyDrop<Library>,
    path: PathBuf,
}

impl Opened {
    /// Opens `path`; a bare file name is for the loader's path. All that it needs is resolved at once, and not in the middle of a call.
    ///
    /// # Errors
    /// `LibraryNotLoadable` has the loader's own words, also where there is no such file.
    ///
    /// # Safety
    /// The library's initialisers run, and those of the libraries that it needs: what they ask of the caller holds.
    pub unsafe fn new(path: &Path, symbols: Symbols) -> Result<Self, Unavailable> {
        let scope = match symbols {
            Symbols::Own => RTLD_LOCAL,
            Symbols::Shared => RTLD_GLOBAL,
        };
        // SAFETY: the caller's promise.
        match unsafe { Library::open(Some(path), RTLD_NOW | scope) } {
            Ok(library) => Ok(Self {
                library: ManuallyDrop::new(library),
                path: path.to_path_buf(),
            }),
            Err(error) => Err(Unavailable::LibraryNotLoadable {
                library: path.display().to_string(),
                // The loader's own words are the source of libloading's.
                text: error
                    .source()
                    .map_or_else(|| error.to_string(), ToString::to_string),
            }),
        }
    }

    /// As it was opened: a path, or the bare name that the loader found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The function `name`.
    ///
    /// # Errors
    /// `SymbolMissing` names it.
    ///
    /// # Safety
    /// `F` is the type of the C function of that name.
    pub unsafe fn required<F: Copy>(&self, name: &str) -> Result<F, Unavailable> {
        // SAFETY: the caller's promise.
        unsafe { self.optional(name) }.ok_or_else(|| Unavailable::SymbolMissing {
            library: self.path.display().to_string(),
            symbol: name.to_string(),
        })
    }

    /// The function `name`, if the library has it.
    ///
    /// # Safety
    /// As for [`required`](Self::required).
    pub unsafe fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get::<F>(name.as_bytes()) }.ok().map(|f| *f)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use super::*;

    #[test]
    fn a_library_that_is_not_there_and_a_function_that_it_lacks_are_named() {
        // SAFETY: there is none.
        let none = unsafe { Opened::new(Path::new("/nowhere/libnone.so"), Symbols::Own) };
        let Err(Unavailable::LibraryNotLoadable { library, text }) = none else {
            panic!("{none:?}");
        };
        assert_eq!(library, "/nowhere/libnone.so");
        assert!(text.contains("No such file"), "{text}");
        // SAFETY: C's library is open in every process.
        let c = unsafe { Opened::new(Path::new("libc.so.6"), Symbols::Own) }.unwrap();
        // SAFETY: its type in C's header.
        let abs: unsafe extern "C" fn(c_int) -> c_int = unsafe { c.required("abs") }.unwrap();
        // SAFETY: not the least number, which has no absolute value.
        assert_eq!(unsafe { abs(-7) }, 7);
        // SAFETY: there is no such function.
        let missing = unsafe { c.required::<unsafe extern "C" fn()>("oxccl_has_no_such_function") };
        let wanted = Unavailable::SymbolMissing {
            library: "libc.so.6".to_string(),
            symbol: "oxccl_has_no_such_function".to_string(),
        };
        assert_eq!(missing.unwrap_err(), wanted);
    }
}
