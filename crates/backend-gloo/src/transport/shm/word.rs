//! What the two sides of a bell do with its word, for any kind of atomic: the machine's, or that of the model.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The owner looks for itself.
pub(super) const AWAKE: u32 = 0;
/// It sleeps, or is about to, until the word changes.
pub(super) const ON_WORD: u32 = 1;
/// Likewise, in a `poll` over the descriptor.
pub(super) const ON_DESCRIPTOR: u32 = 2;
/// Likewise, until the bell of its thread rings.
pub(super) const ON_THREAD: u32 = 3;

/// A word that two processes share.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn swap(&self, value: u32, order: Ordering) -> u32;
    fn fence(order: Ordering);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        Self::load(self, order)
    }
    fn store(&self, value: u32, order: Ordering) {
        Self::store(self, value, order);
    }
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        Self::swap(self, value, order)
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// The ringer, once what the owner is to see has been written: how the owner sleeps and must be woken, or [`AWAKE`].
pub(super) fn ring<W: Word>(word: &W) -> u32 {
    // What was written before comes before the look at the word; the other half is in `arm`.
    W::fence(Ordering::SeqCst);
    if word.load(Ordering::Relaxed) == AWAKE {
        return AWAKE;
    }
    // One of several ringers wakes it.
    word.swap(AWAKE, Ordering::AcqRel)
}

/// The owner, before its last look: from now on it must be rung for.
pub(super) fn arm<W: Word>(word: &W, how: u32) {
    word.store(how, Ordering::Relaxed);
    // The word comes before the look that follows.
    W::fence(Ordering::SeqCst);
}

/// The owner, awake again.
pub(super) fn disarm<W: Word>(word: &W) {
    word.store(AWAKE, Ordering::Relaxed);
}

/// True unless the owner was rung for since it armed.
pub(super) fn is_armed<W: Word>(word: &W) -> bool {
    word.load(Ordering::Acquire) != AWAKE
}
