//! The two calls on `/dev/net/tun` for which there is no safe wrapper.

use std::fs::File;
use std::io;

use rustix::ioctl::{IntegerSetter, Setter, ioctl};

/// From linux/if_tun.h.
const TUNSETIFF: rustix::ioctl::Opcode = 0x4004_54CA;
const TUNSETOFFLOAD: rustix::ioctl::Opcode = 0x4004_54D0;
const IFF_TUN: u16 = 0x0001;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
const TUN_F_CSUM: usize = 0x01;
const TUN_F_TSO4: usize = 0x02;
/// `sizeof(struct ifreq)`.
const IFREQ: usize = 40;

/// Makes the interface `name` in the calling thread's network namespace, with `tun` as its other end. Packets come with a header of
/// 10 bytes; with `whole` they may be larger than the MTU: segmenting them is left to the receiver, which saves most of the work.
pub(crate) fn attach(tun: &File, name: &str, whole: bool) -> io::Result<()> {
    let mut request = [0u8; IFREQ];
    // The name ends with a zero inside its 16 bytes.
    for (to, from) in request.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    let flags = (IFF_TUN | IFF_NO_PI | IFF_VNET_HDR).to_ne_bytes();
    for (to, from) in request.iter_mut().skip(16).zip(flags) {
        *to = from;
    }
    // SAFETY: TUNSETIFF reads (and writes back) one `struct ifreq`, whose size the array has; it outlives the call.
    let set = unsafe { Setter::<TUNSETIFF, [u8; IFREQ]>::new(request) };
    // SAFETY: as above.
    unsafe { ioctl(tun, set) }?;
    let offload = if whole {
        TUN_F_CSUM | TUN_F_TSO4
    } else {
        TUN_F_CSUM
    };
    // SAFETY: TUNSETOFFLOAD takes a number and touches no memory of ours.
    let set = unsafe { IntegerSetter::<TUNSETOFFLOAD>::new_usize(offload) };
    // SAFETY: as above.
    unsafe { ioctl(tun, set) }?;
    Ok(())
}
