//! How a rank that waits is woken: one word that says how it sleeps, and an eventfd for sleepers that watch sockets too.
//!
//! The sleeper arms the bell, looks once more for what it waits for, and sleeps. The ringer publishes what it did and then looks
//! at the word. Both put a full fence in between, so one of them sees the other: no wake-up is lost (`word`, and `model`, which runs
//! it under every order that memory allows). A rank that does not sleep costs its peers one read of a line that is not written.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use ftcore::{Error, Result, time_left};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::futex;
use rustix::time::Timespec;

use super::map::{Mapping, PAGE};
use super::word::{self, AWAKE, ON_DESCRIPTOR, ON_WORD};

/// How the owner of a bell sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// In [`Bell::sleep`].
    Word,
    /// In a `poll` over the bell's descriptor.
    Descriptor,
}

/// Where the words of a rank's bells stand in its page: that of its collectives,
pub(crate) const COLLECTIVES: usize = 0;
/// and that of its messages, on a line of its own.
pub(crate) const MESSAGES: usize = 256;

/// The other side of a bell: rings it. `AT`: [`COLLECTIVES`] or [`MESSAGES`].
#[derive(Debug)]
pub(crate) struct Ringer<const AT: usize> {
    page: Arc<Mapping>,
    descriptor: OwnedFd,
}

/// Both bells of a neighbour.
///
/// Each has a descriptor of its own: two threads may sleep on them, and one that forgets its rings must not take the other's.
pub(super) fn ringers(
    page: Mapping,
    collectives: OwnedFd,
    messages: OwnedFd,
) -> (Ringer<COLLECTIVES>, Ringer<MESSAGES>) {
    let page = Arc::new(page);
    let collectives = Ringer {
        page: page.clone(),
        descriptor: collectives,
    };
    let messages = Ringer {
        page,
        descriptor: messages,
    };
    (collectives, messages)
}

impl<const AT: usize> Ringer<AT> {
    /// Wakes the owner if it sleeps. Whatever it is to see must have been written before.
    pub(crate) fn ring(&self) {
        let word = self.page.word32::<AT>();
        match word::ring(word) {
            ON_WORD => {
                let _ = futex::wake(word, futex::Flags::empty(), 1);
            }
            ON_DESCRIPTOR => {
                // If the counter is full, the owner is about to wake anyway.
                let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
            }
            _ => {}
        }
    }
}

/// A rank's own bell. One thread at a time sleeps on it.
#[derive(Debug)]
pub(crate) struct Bell<const AT: usize>(Ringer<AT>);

/// A rank's own bells.
#[derive(Debug)]
pub(crate) struct Bells {
    /// For the driver of the collectives.
    pub(crate) collectives: Bell<COLLECTIVES>,
    /// For the driver of the messages.
    pub(crate) messages: Bell<MESSAGES>,
}

impl Bells {
    /// Bells that only this process rings.
    pub(crate) fn private() -> Result<Self> {
        Ok(Self::new(Mapping::private(PAGE)?, descriptor()?, descriptor()?))
    }

    pub(super) fn new(page: Mapping, collectives: OwnedFd, messages: OwnedFd) -> Self {
        let (collectives, messages) = ringers(page, collectives, messages);
        Self {
            collectives: Bell(collectives),
            messages: Bell(messages),
        }
    }
}

pub(super) fn descriptor() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| Error::io("creating an eventfd", e.into()))
}

impl<const AT: usize> Bell<AT> {
    /// From now on peers ring. Look for what is waited for between this and the sleep.
    pub(crate) fn arm(&self, how: Sleep) {
        let word = match how {
            Sleep::Word => ON_WORD,
            Sleep::Descriptor => ON_DESCRIPTOR,
        };
        word::arm(self.0.page.word32::<AT>(), word);
    }

    /// No sleep after all, or it is over.
    pub(crate) fn disarm(&self) {
        word::disarm(self.0.page.word32::<AT>());
    }

    /// Sleeps until a peer rings, or `until`. Returns at once if one rang since [`arm`](Self::arm).
    pub(crate) fn sleep(&self, until: Instant) {
        let left = time_left(until);
        if !left.is_zero() {
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let _ = futex::wait(
                self.0.page.word32::<AT>(),
                futex::Flags::empty(),
                ON_WORD,
                Some(&timeout),
            );
        }
        self.disarm();
    }

    /// Forgets rings that reached the descriptor.
    pub(crate) fn drain(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.0.descriptor, &mut count);
    }

    /// Wakes the thread that sleeps on it, whatever the word says: a peer may have cleared it and died before it woke a thread.
    pub(crate) fn alarm(&self) {
        fence(Ordering::SeqCst);
        let word = self.0.page.word32::<AT>();
        word.store(AWAKE, Ordering::SeqCst);
        let _ = futex::wake(word, futex::Flags::empty(), u32::MAX);
        let _ = rustix::io::write(&self.0.descriptor, &1u64.to_ne_bytes());
    }
}

impl<const AT: usize> AsFd for Bell<AT> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }
}
