//! What the engine's threads meet at: the standard library's, or shuttle's for the model of the shell (`tests/engine_model.rs`).

#[cfg(feature = "shuttle")]
pub(super) use shuttle::sync::{Condvar, Mutex, MutexGuard};
#[cfg(feature = "shuttle")]
use shuttle::thread;
#[cfg(not(feature = "shuttle"))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(feature = "shuttle"))]
use std::thread;

use crate::float_mode::DefaultMode;

/// Starts a detached thread, in the default [mode](crate::float_mode) for floats: a new thread has that of its maker, and so have those that a
/// library starts on it, but what they compute is to be the same on all ranks. `Io` if the system starts none.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> crate::Result<()> {
    let started = thread::Builder::new().name(name.to_string()).spawn(move || {
        let _mode = DefaultMode::set();
        run(body);
    });
    let failed = |e| {
        let text = format!(
            "the thread {name} does not start; this process may have too many of them for its limits (`ulimit -u`, the cgroup's \
             pids.max) or its memory"
        );
        crate::Error::io(text, e)
    };
    started.map(drop).map_err(failed)
}

/// Not inlined: see [`DefaultMode`].
#[inline(never)]
fn run(body: impl FnOnce()) {
    body();
}
