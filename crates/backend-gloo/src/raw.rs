//! What the kernel says about a connection and no safe call asks for.

use std::ffi::c_int;
use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ`.
const UNACKNOWLEDGED: Opcode = 0x5411;
/// `SIOCOUTQNSD`.
const UNSENT: Opcode = 0x894B;

/// Bytes that were written to a TCP socket and that the other end does not have yet, as far as is known here; 0 if there is no connection any more.
pub(crate) fn unacknowledged(socket: impl AsFd) -> usize {
    // SAFETY: the request has no input and writes one int, which is what the getter has room for; on what is no socket it fails or counts
    // something else.
    let bytes = unsafe { ioctl(socket, Getter::<UNACKNOWLEDGED, c_int>::new()) };
    usize::try_from(bytes.unwrap_or(0)).unwrap_or(0)
}

/// Those of them that have not been on their way even once.
pub(crate) fn unsent(socket: impl AsFd) -> usize {
    // SAFETY: as above.
    let bytes = unsafe { ioctl(socket, Getter::<UNSENT, c_int>::new()) };
    usize::try_from(bytes.unwrap_or(0)).unwrap_or(0)
}
