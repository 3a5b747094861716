//! The values that cross into dpctl's C API. Numbers are plain integers, never Rust enums: a newer library may return one
//! that is not known here.

use std::ffi::{c_int, c_void};

/// An opaque `sycl::device`, owned by the one that got it from a `Create` or `Get` function.
pub type DeviceRef = *mut c_void;
/// An opaque device selector.
pub type SelectorRef = *mut c_void;
/// A pointer to a `sycl::queue`: what oneCCL takes as a stream.
pub type QueueRef = *mut c_void;
/// An opaque `sycl::event`.
pub type EventRef = *mut c_void;

/// C's `bool` as it comes back in a register: false is zero.
pub type Bool = u8;

/// Queue property: commands run one after the other, in the order of their submission.
pub const IN_ORDER: c_int = 1 << 1;

/// What kind of device it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DeviceType(pub c_int);

impl DeviceType {
    /// A CPU that runs SYCL.
    pub const CPU: Self = Self(1 << 2);
    /// A GPU.
    pub const GPU: Self = Self(1 << 4);
}

/// Through which driver interface a device is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct BackendType(pub c_int);

impl BackendType {
    /// Level Zero: Intel's GPUs.
    pub const LEVEL_ZERO: Self = Self(1 << 17);
}

/// How far an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct EventStatus(pub c_int);

impl EventStatus {
    /// The question failed.
    pub const UNKNOWN: Self = Self(0);
    /// Everything before it is done.
    pub const COMPLETE: Self = Self(3);
}
