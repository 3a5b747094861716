//! Handing descriptors over a Unix socket, together with the bytes of a greeting.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};

/// What ranks hand each other: two memfds and two eventfds.
pub(crate) const HANDLES: usize = 4;

/// Sends `bytes` with `handles`; the number of bytes that went out (the handles go with the first one).
pub(crate) fn send(socket: impl AsFd, bytes: &[u8], handles: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDLES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !handles.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(handles)) {
        return Err(Errno::NOBUFS);
    }
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )
}

/// Receives into `buffer`; at most [`HANDLES`] are taken, further ones are closed by the kernel.
///
/// Errors: `MFILE` if the process has no room for the descriptors that came; nothing is taken then, and the next call finds them.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    handles: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDLES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    // Only looked at: of what is taken, the kernel drops the descriptors for which there is no room.
    let message = recvmsg(
        &socket,
        &mut [IoSliceMut::new(buffer)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | RecvFlags::PEEK,
    )?;
    let cut = message.flags.contains(ReturnFlags::CTRUNC);
    let mut came: Vec<OwnedFd> = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = part {
            came.extend(fds);
        }
    }
    // As many fit into what was handed in: it was the kernel that could make no more.
    if cut && came.len() < HANDLES {
        return Err(Errno::MFILE);
    }
    let seen = buffer.get_mut(..message.bytes).unwrap_or_default();
    let bytes = match seen.is_empty() {
        true => 0,
        false => recv(&socket, &mut *seen, RecvFlags::DONTWAIT)?.0,
    };
    // A peer that sends more than those of a region gains nothing by it.
    came.truncate(HANDLES.saturating_sub(handles.len()));
    handles.append(&mut came);
    Ok(bytes)
}
