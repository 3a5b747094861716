//! Wakes the engine's poll from other threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ftcore::{Error, Result, descriptors};
use rustix::event::{EventfdFlags, eventfd};

/// An eventfd: any number of wakes before the engine looks count as one.
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        descriptors::with_room(|| Ok(eventfd(0, flags)?))
            .map(Self)
            .map_err(|e| Error::io("creating an eventfd", e))
    }

    /// Never blocks: if the counter is full, the engine is awake anyway.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets all wakes so far.
    pub(crate) fn drain(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
