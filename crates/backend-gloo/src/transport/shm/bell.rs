//! How a rank that waits is woken: one word that says how it sleeps, and beside the word itself two ways to wake it: the bell of its thread, or an
//! eventfd for sleepers that watch sockets too.
//!
//! The sleeper arms the bell, looks once more for what it waits for, and sleeps. The ringer publishes what it did and then looks
//! at the word. Both put a full fence in between, so one of them sees the other: no wake-up is lost (`word`, and `model`, which runs
//! it under every order that memory allows). A rank that does not sleep costs its peers one read of a line that is not written.
//!
//! The group's own thread may wait for both bells, for orders and for what its peers say. Where all of that is memory it sleeps on one word that
//! counts what happened (`ThreadBell`), and the group needs no descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ftcore::{Error, Result, descriptors, time_left};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::futex;
use rustix::time::Timespec;

use super::map::{Mapping, PAGE};
use super::word::{self, AWAKE, ON_DESCRIPTOR, ON_THREAD, ON_WORD};

/// How the owner of a bell sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// In [`Bell::sleep`].
    Word,
    /// In a `poll` over the bell's descriptor.
    Descriptor,
    /// In [`ThreadBell::sleep`].
    Thread,
}

/// Where the words of a rank's bells stand in its page: that of its collectives,
pub(crate) const COLLECTIVES: usize = 0;
/// that of its messages, on a line of its own,
pub(crate) const MESSAGES: usize = 256;
/// and that of its thread.
const THREAD: usize = 512;

fn timeout(left: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    }
}

/// The bell of a rank's thread: who has something for it rings.
#[derive(Debug, Clone)]
pub(crate) struct ThreadBell(Arc<Mapping>);

impl ThreadBell {
    pub(super) fn new(page: Arc<Mapping>) -> Self {
        Self(page)
    }

    /// Wakes the thread, or keeps it from its next sleep. Whatever it is to see must have been written before.
    pub(crate) fn ring(&self) {
        ring_thread(&self.0);
    }

    /// How often it has rung: for [`sleep`](Self::sleep), before the last look.
    pub(crate) fn count(&self) -> u32 {
        self.0.word32::<THREAD>().load(Ordering::SeqCst)
    }

    /// Sleeps until it rings, or `until`. Returns at once if it has rung since it was counted.
    pub(crate) fn sleep(&self, counted: u32, until: Option<Instant>) {
        let left = until.map(time_left);
        if left.is_some_and(|left| left.is_zero()) {
            return;
        }
        // Rounded up, so that the time has passed when this returns.
        let timeout = left.map(|left| timeout(left.saturating_add(Duration::from_micros(100))));
        let word = self.0.word32::<THREAD>();
        let _ = futex::wait(word, futex::Flags::empty(), counted, timeout.as_ref());
    }
}

fn ring_thread(page: &Mapping) {
    let word = page.word32::<THREAD>();
    word.fetch_add(1, Ordering::SeqCst);
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

/// The other side of a bell: rings it. `AT`: [`COLLECTIVES`] or [`MESSAGES`].
#[derive(Debug)]
pub(crate) struct Ringer<const AT: usize> {
    page: Arc<Mapping>,
    /// For an owner that watches sockets.
    descriptor: Option<OwnedFd>,
}

/// Both bells of a neighbour.
///
/// Each has a descriptor of its own: two threads may sleep on them, and one that forgets its rings must not take the other's.
pub(super) fn ringers(
    page: Arc<Mapping>,
    descriptors: Option<[OwnedFd; 2]>,
) -> (Ringer<COLLECTIVES>, Ringer<MESSAGES>) {
    let (collectives, messages) = descriptors.map(|[c, m]| (c, m)).unzip();
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
            ON_DESCRIPTOR => self.write(),
            ON_THREAD => ring_thread(&self.page),
            _ => {}
        }
    }

    fn write(&self) {
        if let Some(descriptor) = &self.descriptor {
            // If the counter is full, the owner is about to wake anyway.
            let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
        }
    }

    /// The owner watches no socket: its descriptor is not needed.
    pub(super) fn close(&mut self) {
        self.descriptor = None;
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
    /// For the group's thread, where the other two have no descriptors.
    pub(crate) thread: ThreadBell,
}

impl Bells {
    /// Bells that only this process rings. `sockets`: who waits for them watches sockets, too.
    pub(crate) fn private(sockets: bool) -> Result<Self> {
        let descriptors = match sockets {
            true => Some([descriptor()?, descriptor()?]),
            false => None,
        };
        Ok(Self::new(Arc::new(Mapping::private(PAGE)?), descriptors))
    }

    pub(super) fn new(page: Arc<Mapping>, descriptors: Option<[OwnedFd; 2]>) -> Self {
        let thread = ThreadBell::new(page.clone());
        let (collectives, messages) = ringers(page, descriptors);
        Self {
            collectives: Bell(collectives),
            messages: Bell(messages),
            thread,
        }
    }

    /// True if who waits for them can watch sockets, too.
    pub(crate) fn have_descriptors(&self) -> bool {
        self.collectives.descriptor().is_some() && self.messages.descriptor().is_some()
    }
}

pub(super) fn descriptor() -> Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    descriptors::with_room(|| Ok(eventfd(0, flags)?)).map_err(|e| Error::io("creating an eventfd", e))
}

impl<const AT: usize> Bell<AT> {
    /// From now on peers ring. Look for what is waited for between this and the sleep.
    pub(crate) fn arm(&self, how: Sleep) {
        let word = match how {
            Sleep::Word => ON_WORD,
            Sleep::Descriptor => ON_DESCRIPTOR,
            Sleep::Thread => ON_THREAD,
        };
        word::arm(self.0.page.word32::<AT>(), word);
    }

    /// True unless a peer has rung since [`arm`](Self::arm).
    pub(crate) fn is_armed(&self) -> bool {
        word::is_armed(self.0.page.word32::<AT>())
    }

    /// No sleep after all, or it is over.
    pub(crate) fn disarm(&self) {
        word::disarm(self.0.page.word32::<AT>());
    }

    /// Sleeps until a peer rings, or `until`. Returns at once if one rang since [`arm`](Self::arm).
    pub(crate) fn sleep(&self, until: Instant) {
        let left = time_left(until);
        if !left.is_zero() {
            let word = self.0.page.word32::<AT>();
            let _ = futex::wait(word, futex::Flags::empty(), ON_WORD, Some(&timeout(left)));
        }
        self.disarm();
    }

    /// For a `poll`, if the bell has one.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.0.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Forgets rings that reached the descriptor.
    pub(crate) fn drain(&self) {
        if let Some(descriptor) = &self.0.descriptor {
            let mut count = [0u8; 8];
            let _ = rustix::io::read(descriptor, &mut count);
        }
    }

    /// Wakes the thread that sleeps on it, whatever the word says: a peer may have cleared it and died before it woke a thread.
    pub(crate) fn alarm(&self) {
        fence(Ordering::SeqCst);
        let word = self.0.page.word32::<AT>();
        word.store(AWAKE, Ordering::SeqCst);
        let _ = futex::wake(word, futex::Flags::empty(), u32::MAX);
        match &self.0.descriptor {
            Some(_) => self.0.write(),
            None => ring_thread(&self.0.page),
        }
    }
}
