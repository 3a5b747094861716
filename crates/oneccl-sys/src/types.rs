//! The values that cross into oneCCL, laid out as its C API says. Numbers are plain integers, never Rust enums: a newer
//! library may return one that is not known here.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;

/// An opaque communicator; null for ranks that a split leaves out.
pub type Comm = *mut c_void;

/// A pointer to a `sycl::queue`, or null for host memory.
pub type Stream = *mut c_void;

/// What a call returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ResultCode(pub c_int);

impl ResultCode {
    /// It worked.
    pub const SUCCESS: Self = Self(0);
    /// The plugin threw an exception; `onecclGetLastError` has its text.
    pub const PLUGIN_EXCEPTION: Self = Self(11);

    /// The code's name in the C API. `onecclGetErrorString` itself knows no text for 11 and above.
    pub fn name(self) -> &'static str {
        match self.0 {
            0 => "success",
            1 => "unhandled error",
            2 => "system error",
            3 => "internal error",
            4 => "invalid argument",
            5 => "invalid usage",
            6 => "in progress",
            7 => "GPU failure",
            8 => "CPU failure",
            9 => "host allocation failed",
            10 => "device allocation failed",
            11 => "the plugin threw an exception",
            12 => "not implemented",
            _ => "unknown result",
        }
    }
}

/// The type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DataType(pub c_int);

#[allow(missing_docs, reason = "the names say it")]
impl DataType {
    pub const I8: Self = Self(0);
    pub const U8: Self = Self(1);
    pub const I32: Self = Self(2);
    pub const U32: Self = Self(3);
    pub const I64: Self = Self(4);
    pub const U64: Self = Self(5);
    pub const F16: Self = Self(6);
    pub const F32: Self = Self(7);
    pub const F64: Self = Self(8);
    pub const BF16: Self = Self(9);
}

/// A reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct RedOp(pub c_int);

#[allow(missing_docs, reason = "the names say it")]
impl RedOp {
    pub const SUM: Self = Self(0);
    pub const PROD: Self = Self(1);
    pub const MAX: Self = Self(2);
    pub const MIN: Self = Self(3);
    pub const AVG: Self = Self(4);
}

/// What the ranks of a communicator must have in common: one of them makes it, the others get it by other means.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    /// Opaque.
    pub data: [c_char; Self::BYTES],
}

impl UniqueId {
    /// The size.
    pub const BYTES: usize = 4096;

    /// All zero.
    pub const fn zeroed() -> Self {
        Self {
            data: [0; Self::BYTES],
        }
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.data.iter().map(|&c| c.cast_unsigned()).collect()
    }

    /// From as many bytes; `None` for any other number.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        Some(Self {
            data: bytes.map(u8::cast_signed),
        })
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The beginning is the address of the key-value server in text, which is what one wants to see.
        let text: String = self
            .to_bytes()
            .into_iter()
            .take_while(|b| b.is_ascii_graphic())
            .map(char::from)
            .collect();
        write!(f, "UniqueId({text})")
    }
}

/// How a communicator is made. Fields that were not asked for are [`Config::UNDEFINED`] or null.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs, reason = "the C API's own names and meanings")]
pub struct Config {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub multi_threaded: c_int,
    pub plugin: c_uint,
}

impl Config {
    /// "Not set" for the numbers.
    pub const UNDEFINED: c_int = c_int::MIN;

    /// Nothing set, for a library of that version.
    pub fn new(version: Version) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: version.code(),
            blocking: Self::UNDEFINED,
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: Self::UNDEFINED,
            net_name: std::ptr::null(),
            split_share: Self::UNDEFINED,
            multi_threaded: Self::UNDEFINED,
            plugin: 0,
        }
    }
}

/// The library's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The year.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
    /// What the library says in its last two digits (2022.1.2 says 0).
    pub patch: u32,
}

impl Version {
    /// From `onecclGetVersion`'s number: year, minor and patch in two digits each.
    pub fn from_code(code: c_int) -> Self {
        let code = code.unsigned_abs();
        Self {
            major: code / 10_000,
            minor: code / 100 % 100,
            patch: code % 100,
        }
    }

    /// The number that `onecclGetVersion` gives.
    pub fn code(self) -> c_uint {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_c_api() {
        assert_eq!(size_of::<UniqueId>(), 4096);
        assert_eq!(align_of::<UniqueId>(), 1);
        assert_eq!(size_of::<Config>(), 56);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, plugin), 48);
    }

    #[test]
    fn versions_and_ids_round_trip() {
        let v = Version::from_code(20_220_200);
        assert_eq!((v.to_string().as_str(), v.code()), ("2022.2.0", 20_220_200));
        let mut id = UniqueId::zeroed();
        for (c, b) in id.data.iter_mut().zip(*b"127.0.0.1_4096") {
            *c = b.cast_signed();
        }
        let again = UniqueId::from_bytes(&id.to_bytes()).unwrap();
        assert_eq!(format!("{again:?}"), "UniqueId(127.0.0.1_4096)");
        assert!(UniqueId::from_bytes(&[0; 12]).is_none());
    }
}
