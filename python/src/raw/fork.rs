//! Counts the forks that led to this process.

use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Begins to count. Once per process; the count goes on in its children.
pub(crate) fn watch() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    // SAFETY: the handler is a function of this library, which an interpreter never unloads, and only counts.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// How many forks since then led here.
pub(crate) fn count() -> u32 {
    FORKS.load(Ordering::Relaxed)
}
