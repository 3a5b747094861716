//! A process that was forked off one with groups: it has copies of the parent's connections and none of its threads.
//!
//! Whatever it did with a group would go over the parent's connections, or wait for threads that are not there. So it is refused, and its
//! end tells the peers nothing: the parent goes on. Nor does it hide the parent's end from them: it has no copy of what is held in [`Parents`].
//! A child that starts another program (`exec`) is not meant: that has no groups.
//! Stores know by the process in which they were made (`Born`): a child may go on with a client, with connections of its own.

mod parents;

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Error, ErrorKind, Result};

pub use parents::Parents;

/// Forks that led here.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The count of forks in the process that made the first group, plus 1; 0 before that.
static HOME: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: this is the handler of a fork, before the child goes on.
    unsafe { parents::give_up() };
}

/// From now on, forks of this process are noticed.
fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler lives as long as this library, and counts and makes system calls only, which is async-signal-safe. A library that is
        // unloaded takes its handlers along.
        if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
            tracing::warn!(
                "a child that is forked off this process will not be refused, and may hide the end of this process from its peers: no room for a \
                 fork handler"
            );
        }
    });
}

/// Before a group is configured or used: `InvalidState` in a process that was forked off one that has configured groups.
///
/// For authors of backends that do not use [`Lifecycle`](crate::lifecycle::Lifecycle), which does this.
pub fn check() -> Result<()> {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        watch();
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

/// The process in which something was made: a child that was forked off since has a copy, and shares with its parent what the system keeps.
#[derive(Debug)]
pub(crate) struct Born(u32);

impl Born {
    /// In this process.
    pub(crate) fn here() -> Self {
        Self(std::process::id())
    }

    /// True in another process than that.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.0 != std::process::id()
    }

    /// As a child that was forked off sees what its parent made: no process of Linux has the number 0.
    #[cfg(test)]
    pub(crate) fn in_parent() -> Self {
        Self(0)
    }
}

/// True in a process that was forked off one that has configured groups.
pub fn is_child() -> bool {
    let home = HOME.load(Ordering::Relaxed);
    home != 0 && home != FORKS.load(Ordering::Relaxed).wrapping_add(1)
}
