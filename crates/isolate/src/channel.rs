//! One end of the socket between parent and child: whole frames out, whole frames and file descriptors in.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::wire::{MAX_FRAME, odd};

/// File descriptors that one message may bring.
const FDS: usize = 4;
/// What one read takes at most.
const CHUNK: usize = 64 << 10;
/// How often a sender that waits looks whether the frame is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// Two connected sockets, closed in programs that either side starts.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd)> {
    socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|e| Error::io("make a pair of sockets", e.into()))
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "the other process closed its socket")
}

/// Waits until `fd` is ready for `flags`; false at the deadline.
pub(crate) fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> Result<bool> {
    loop {
        let left = time_left(deadline);
        if left.is_zero() {
            return Ok(false);
        }
        match poll(
            &mut [PollFd::from_borrowed_fd(fd, flags)],
            Timespec::try_from(left).ok().as_ref(),
        ) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(Error::io("wait for a child process", e.into())),
        }
    }
}

/// Sends a frame, with up to two file descriptors. One sender at a time: the caller holds the lock.
///
/// Errors: `Timeout` if the other side does not read, `Unavailable` if it is gone. After an error the stream may end in the
/// middle of a frame and is of no more use.
pub(crate) fn send(socket: &OwnedFd, frame: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<()> {
    send_while(socket, frame, fds, deadline, || true).map(drop)
}

/// As [`send`], but no longer than it is `wanted`. How many bytes were sent.
pub(crate) fn send_while(
    socket: &OwnedFd,
    frame: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
    wanted: impl Fn() -> bool,
) -> Result<usize> {
    let mut rest = frame;
    while !rest.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // The descriptor goes with the first byte.
        if rest.len() == frame.len() && !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        match sendmsg(
            socket,
            &[IoSlice::new(rest)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if !wanted() => break,
            Err(Errno::AGAIN) => {
                let is_ready = wait_for(socket.as_fd(), PollFlags::OUT, deadline.min(deadline_in(LOOK)))?;
                if !is_ready && time_left(deadline).is_zero() {
                    return Err(Error::timeout("the other process does not read its orders"));
                }
            }
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(closed()),
            Err(e) => return Err(Error::io("send to the other process", e.into())),
        }
    }
    Ok(frame.len() - rest.len())
}

/// What a read brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// Something.
    Some,
    /// Nothing for now.
    Nothing,
    /// The other side has closed its end.
    Closed,
}

/// The receiving end: bytes and descriptors as they came.
pub(crate) struct Receiver {
    socket: Arc<OwnedFd>,
    /// Longer than what it holds: clearing it for every read would cost more than the read.
    buffer: Vec<u8>,
    /// What is there and was not taken yet.
    start: usize,
    end: usize,
    fds: VecDeque<OwnedFd>,
    take_fds: bool,
}

impl Receiver {
    /// `take_fds`: whether the other side may send file descriptors; otherwise the kernel drops them.
    pub(crate) fn new(socket: Arc<OwnedFd>, take_fds: bool) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            fds: VecDeque::new(),
            take_fds,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket, for the sending half.
    pub(crate) fn shared(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Reads once; blocks only if `block`.
    pub(crate) fn fill(&mut self, block: bool) -> Result<Filled> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let room = self.end + CHUNK;
        if self.buffer.len() > room.saturating_mul(4) {
            // A large frame is not remembered for ever.
            self.buffer.truncate(room);
            self.buffer.shrink_to_fit();
        } else if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
        let mut control = if self.take_fds {
            RecvAncillaryBuffer::new(&mut space)
        } else {
            RecvAncillaryBuffer::default()
        };
        let flags = if block {
            RecvFlags::empty()
        } else {
            RecvFlags::DONTWAIT
        };
        let into = self.buffer.get_mut(self.end..room).unwrap_or_default();
        let result = recvmsg(
            &*self.socket,
            &mut [IoSliceMut::new(into)],
            &mut control,
            flags | RecvFlags::CMSG_CLOEXEC,
        );
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        let (bytes, filled) = match result {
            Ok(m) if m.bytes == 0 => (0, Ok(Filled::Closed)),
            Ok(m) => (m.bytes, Ok(Filled::Some)),
            Err(Errno::INTR | Errno::AGAIN) => (0, Ok(Filled::Nothing)),
            Err(Errno::CONNRESET) => (0, Ok(Filled::Closed)),
            Err(e) => (0, Err(Error::io("receive from the other process", e.into()))),
        };
        self.end += bytes;
        filled
    }

    /// The next whole frame's body. `Protocol` if its length cannot be.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>> {
        let rest = self.buffer.get(self.start..self.end).unwrap_or_default();
        let Some((head, rest)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*head) as usize;
        if length == 0 || length > MAX_FRAME {
            return Err(odd(format_args!(
                "a length of {length} bytes; the limit is {MAX_FRAME}"
            )));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        self.start += 4 + length;
        Ok(Some(body))
    }

    /// True if more bytes are here than were taken.
    pub(crate) fn has_more(&self) -> bool {
        self.end > self.start
    }

    /// A descriptor that came with the frames so far.
    pub(crate) fn next_fd(&mut self) -> Result<OwnedFd> {
        self.fds
            .pop_front()
            .ok_or_else(|| odd("no file descriptor where one belongs"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wire::Writer;

    fn soon() -> Instant {
        ftcore::deadline_in(Duration::from_secs(20))
    }

    fn frame(bytes: &[u8]) -> Vec<u8> {
        let mut w = Writer::new(1);
        w.bytes(bytes);
        w.finish().unwrap()
    }

    #[test]
    fn frames_of_any_size_come_whole_and_descriptors_with_them() {
        let (a, b) = pair().unwrap();
        let sizes = [0usize, 1, 70_000, 3, 1 << 20];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in sizes {
                    send(&a, &frame(&vec![7; n]), &[a.as_fd()], soon()).unwrap();
                }
                drop(a);
            });
            let mut r = Receiver::new(Arc::new(b), true);
            let mut got = Vec::new();
            let mut largest = 0;
            loop {
                while let Some(body) = r.next().unwrap() {
                    got.push(body.len() - 5);
                    r.next_fd().unwrap();
                }
                largest = largest.max(r.buffer.len());
                if r.fill(true).unwrap() == Filled::Closed {
                    break;
                }
            }
            assert_eq!(got, sizes);
            assert!(
                largest > 1 << 20 && r.buffer.len() <= 4 * CHUNK,
                "{largest}, {}",
                r.buffer.len()
            );
            assert!(r.next_fd().is_err());
        });
    }

    #[test]
    fn a_reader_that_sleeps_costs_a_time_out_and_one_that_is_gone_an_error() {
        let (a, b) = pair().unwrap();
        let big = frame(&vec![0; 8 << 20]);
        let e = send(&a, &big, &[], ftcore::deadline_in(Duration::from_millis(30))).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        drop(b);
        let e = send(&a, &big, &[], soon()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    }

    #[test]
    fn lengths_that_cannot_be_are_refused_at_once() {
        for length in [0u32, u32::MAX, MAX_FRAME as u32 + 1] {
            let (a, b) = pair().unwrap();
            send(&a, &length.to_le_bytes(), &[], soon()).unwrap();
            let mut r = Receiver::new(Arc::new(b), false);
            assert_eq!(r.fill(true).unwrap(), Filled::Some);
            assert_eq!(r.next().unwrap_err().kind(), ErrorKind::Protocol);
        }
    }
}
