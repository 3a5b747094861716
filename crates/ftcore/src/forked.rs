//! A process that was forked off one with groups: it has copies of the parent's connections and none of its threads.
//!
//! Whatever it did with a group would go over the parent's connections, or wait for threads that are not there. So it is refused, and its
//! end tells the peers nothing: the parent goes on. A child that starts another program (`exec`) is not meant: that has no groups.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Error, ErrorKind, Result};

/// Forks that led here.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The count of forks in the process that made the first group, plus 1; 0 before that.
static HOME: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Before a group is configured or used: `InvalidState` in a process that was forked off one that has configured groups.
///
/// For authors of backends that do not use [`Lifecycle`](crate::lifecycle::Lifecycle), which does this.
pub fn check() -> Result<()> {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler lives as long as this library and only counts, which is async-signal-safe. A library that is unloaded takes its
        // handlers along.
        if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
            tracing::warn!(
                "a child that is forked off this process will not be refused: no room for a fork handler"
            );
        }
        HOME.store(FORKS.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    });
    refuse_child()
}

/// As [`check`], where no group is configured: on the path of every operation.
pub(crate) fn refuse_child() -> Result<()> {
    if !is_child() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidState,
        "this process was forked off one that has groups: their connections and threads are the parent's; start it by exec (spawn) instead",
    ))
}

/// True in a process that was forked off one that has configured groups.
pub fn is_child() -> bool {
    let home = HOME.load(Ordering::Relaxed);
    home != 0 && home != FORKS.load(Ordering::Relaxed).wrapping_add(1)
}
