//! NCCL's C types, written by hand from its documentation and checked against the headers of 2.27 to 2.30.

use std::ffi::{c_char, c_int, c_uint};
use std::fmt;
use std::ptr;

/// A communicator; null is none.
pub type Comm = *mut std::ffi::c_void;
/// A `cudaStream_t`, which is a `CUstream`; null is the legacy default stream.
pub type Stream = *mut std::ffi::c_void;
/// What a call returns. Not an enum: a library newer than this file may return codes that are not known here.
pub type ResultCode = c_int;
/// An element type; see [`dtype`].
pub type DataType = c_int;
/// A reduction; see [`redop`], or made by `ncclRedOpCreatePreMulSum`.
pub type RedOp = c_int;

/// Result codes.
pub mod code {
    use super::ResultCode;
    /// Done.
    pub const SUCCESS: ResultCode = 0;
    /// A CUDA call failed.
    pub const UNHANDLED_CUDA_ERROR: ResultCode = 1;
    /// A call to the operating system failed.
    pub const SYSTEM_ERROR: ResultCode = 2;
    /// A defect or corrupted memory in NCCL.
    pub const INTERNAL_ERROR: ResultCode = 3;
    /// An argument has a value that is never right.
    pub const INVALID_ARGUMENT: ResultCode = 4;
    /// The call is wrong in this state or combination.
    pub const INVALID_USAGE: ResultCode = 5;
    /// A peer failed, or the network towards it.
    pub const REMOTE_ERROR: ResultCode = 6;
    /// A non-blocking communicator is still at it.
    pub const IN_PROGRESS: ResultCode = 7;
    /// Something took too long (2.30).
    pub const TIMEOUT: ResultCode = 8;
}

/// Element types.
pub mod dtype {
    use super::DataType;
    /// Signed, 8 bits.
    pub const INT8: DataType = 0;
    /// Unsigned, 8 bits.
    pub const UINT8: DataType = 1;
    /// Signed, 32 bits.
    pub const INT32: DataType = 2;
    /// Unsigned, 32 bits.
    pub const UINT32: DataType = 3;
    /// Signed, 64 bits.
    pub const INT64: DataType = 4;
    /// Unsigned, 64 bits.
    pub const UINT64: DataType = 5;
    /// IEEE binary16.
    pub const FLOAT16: DataType = 6;
    /// IEEE binary32.
    pub const FLOAT32: DataType = 7;
    /// IEEE binary64.
    pub const FLOAT64: DataType = 8;
    /// bfloat16.
    pub const BFLOAT16: DataType = 9;
    /// OCP E4M3 (reduced on compute capability 9.0 and later).
    pub const FLOAT8_E4M3: DataType = 10;
    /// OCP E5M2 (as above).
    pub const FLOAT8_E5M2: DataType = 11;
}

/// Built-in reductions.
pub mod redop {
    use super::RedOp;
    /// The sum.
    pub const SUM: RedOp = 0;
    /// The product.
    pub const PROD: RedOp = 1;
    /// The maximum; of floats, NaN loses.
    pub const MAX: RedOp = 2;
    /// The minimum; of floats, NaN loses.
    pub const MIN: RedOp = 3;
    /// The mean over all ranks.
    pub const AVG: RedOp = 4;
}

/// `ncclScalarHostImmediate`: the scalar is read from host memory before the call returns.
pub const SCALAR_HOST_IMMEDIATE: c_int = 1;
/// The colour of a rank that gets no communicator from a split.
pub const SPLIT_NOCOLOR: c_int = -1;

/// `NCCL_REVOKE_DEFAULT`: the only way to revoke.
pub const REVOKE_DEFAULT: c_int = 0;

/// What rank 0 makes and all ranks of a communicator share.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    /// Its size.
    pub const BYTES: usize = 128;
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It is as good as a key to the job.
        f.write_str("UniqueId(…)")
    }
}

/// A version as `ncclGetVersion` gives it: 10000 × major + 100 × minor + patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32);

impl Version {
    /// `major.minor.patch`.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self(major * 10_000 + minor * 100 + patch)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// "Not said": NCCL takes its own default.
pub const UNDEFINED: c_int = c_int::MIN;
const MAGIC: c_uint = 0xCAFE_BEEF;

/// `ncclConfig_t`. Versions append fields: a library reads `size` bytes and takes its defaults for the rest.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 0: calls return [`code::IN_PROGRESS`] rather than wait.
    pub blocking: c_int,
    /// Thread blocks per cluster.
    pub cga_cluster_size: c_int,
    /// The least number of blocks.
    pub min_ctas: c_int,
    /// The largest number of blocks.
    pub max_ctas: c_int,
    /// The network module; a C string that outlives the call.
    pub net_name: *const c_char,
    /// 1: a split communicator shares its parent's resources.
    pub split_share: c_int,
    /// The traffic class of the network.
    pub traffic_class: c_int,
    /// The communicator's name in the library's own reports; a C string that outlives the communicator.
    pub comm_name: *const c_char,
}

impl Config {
    /// Everything undefined, for a library of this version.
    pub fn new(version: Version) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: version.0,
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: ptr::null(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_print_and_compare_as_numbers() {
        assert_eq!(Version(22105).to_string(), "2.21.5");
        assert_eq!(Version(23203), Version::new(2, 32, 3));
        assert!(Version::new(2, 9, 9) < Version::new(2, 19, 0));
    }

    #[test]
    fn a_config_lies_as_the_c_struct_does() {
        // On 64-bit machines.
        assert_eq!(size_of::<Config>(), 56);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, traffic_class), 44);
    }
}
