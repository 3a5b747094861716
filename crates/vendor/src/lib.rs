//! Vendors' libraries (NCCL, CUDA, oneCCL, SYCL, Gaudi) as tables of functions that are opened at run time: no headers, no link step.
//!
//! [`search`] says where the packages of a machine put them, [`Opened`] is one that is open, for good, and [`functions!`] makes a table of its
//! functions. Why there is none is an [`Unavailable`] everywhere.
//!
//! ```
//! use std::ffi::c_double;
//! use std::path::Path;
//!
//! use vendor::{Opened, Symbols, functions};
//!
//! functions! {
//!     /// What is used of C's mathematical library.
//!     struct Math {
//!         required {
//!             cosine = "cos": fn(c_double) -> c_double;
//!         }
//!         optional {
//!             newest = "not_in_any_version": fn(c_double) -> c_double;
//!         }
//!     }
//! }
//!
//! # fn main() -> Result<(), ftcore::registry::Unavailable> {
//! // SAFETY: its initialisers ask nothing of the caller.
//! let library = unsafe { Opened::new(Path::new("libm.so.6"), Symbols::Own)? };
//! // SAFETY: these are the types of C's header.
//! let math = unsafe { Math::look_up(&library)? };
//! // SAFETY: any number has a cosine.
//! assert_eq!(unsafe { (math.cosine)(0.0) }, 1.0);
//! assert!(math.newest.is_none());
//! # Ok(())
//! # }
//! ```

pub mod environment;
mod opened;
pub mod search;

pub use opened::{Opened, Symbols};

/// A table of C functions, `required` ones (at least one) and `optional` ones, each by its field's name, the library's name for it and its type.
/// `look_up` fills it from an [`Opened`]: a required function that is missing is an error that names it, an optional one is `None`.
///
/// The table is `Copy`, and as unsafe to use as C: `look_up` is unsafe, because what it takes for granted is that the functions have these types.
#[macro_export]
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Table:ident {
            required { $($(#[$rm:meta])* $r:ident = $rname:literal: fn($($rarg:ty),* $(,)?) $(-> $rret:ty)?;)+ }
            $(optional { $($(#[$om:meta])* $o:ident = $oname:literal: fn($($oarg:ty),* $(,)?) $(-> $oret:ty)?;)* })?
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        $vis struct $Table {
            $($(#[$rm])* $vis $r: unsafe extern "C" fn($($rarg),*) $(-> $rret)?,)+
            $($($(#[$om])* $vis $o: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*)?
        }

        impl $Table {
            /// Looks all of them up.
            ///
            /// # Errors
            /// `SymbolMissing` names the first required function that is not there.
            ///
            /// # Safety
            /// The library's functions of these names have these types.
            $vis unsafe fn look_up(
                library: &$crate::Opened,
            ) -> ::std::result::Result<Self, $crate::Unavailable> {
                Ok(Self {
                    // SAFETY: the field has the function's type, as the caller says.
                    $($r: unsafe { library.required($rname)? },)+
                    // SAFETY: as above.
                    $($($o: unsafe { library.optional($oname) },)*)?
                })
            }
        }
    };
}

#[doc(hidden)]
pub use ftcore::registry::Unavailable;
