//! What the process goes through: a fork, of which the child cannot use its parent's groups, and the end of the interpreter, before which all groups end.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use oxccl::core::lifecycle::wait_for_partings;
use oxccl::core::{Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::errors::Raise;
use crate::group::Handle;
use crate::raw::fork;

/// True from the moment on that the interpreter's exit handlers end the groups.
static ENDS: AtomicBool = AtomicBool::new(false);
static GONE: AtomicBool = AtomicBool::new(false);
/// The count of forks in the process that made the first group, plus 1; 0 while there was none.
static MADE_AT: AtomicU32 = AtomicU32::new(0);
static LIVE: Mutex<Vec<Weak<Handle>>> = Mutex::new(Vec::new());

/// True once the interpreter ends: nothing is given back to it any more.
pub(crate) fn is_gone() -> bool {
    GONE.load(Ordering::Acquire)
}

/// How long a thread whose call was cut short by the interpreter's end stays away from it. Interpreters before 3.14 end a thread that
/// comes back to them by unwinding it, which Rust answers by aborting the process. Bounded, since an exit handler of the program's own
/// may wait for the thread.
const AWAY: Duration = Duration::from_secs(2);

/// True once the exit handlers have begun to end the groups.
pub(crate) fn ends() -> bool {
    ENDS.load(Ordering::Acquire)
}

/// At the end of a call on a thread other than the main one, before it takes the interpreter again: only daemon threads are left once the groups end.
pub(crate) fn stays_away_from_the_end() {
    if ends() {
        thread::sleep(AWAY);
    }
}

/// Before a group is made: refuses in a process that was forked off one that has groups.
pub(crate) fn may_make_groups(py: Python<'_>) -> PyResult<()> {
    let here = fork::count().wrapping_add(1);
    match MADE_AT.compare_exchange(0, here, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => py
            .import("oxccl._process")?
            .call_method0("end_with_process")
            .map(drop),
        Err(made) if made != here => {
            Err(forked("this process was forked off one that uses oxccl")).or_raise(py)
        }
        Err(_) => Ok(()),
    }
}

/// Before `what` is used: `born` is the count of forks when it was made.
pub(crate) fn is_at_home(born: u32, what: &str) -> Result<()> {
    if born == fork::count() {
        Ok(())
    } else {
        Err(forked(&format!(
            "{what} belongs to the process that this one was forked off"
        )))
    }
}

fn forked(what: &str) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        format!(
            "{what}: its connections and threads are not here; start processes with the spawn or forkserver method"
        ),
    )
}

/// Notes a group, so that it ends before the interpreter does.
pub(crate) fn note(handle: &Arc<Handle>) {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.retain(|other| other.strong_count() > 0);
    live.push(Arc::downgrade(handle));
}

/// Ends all groups: pending operations fail as aborted, idle groups leave in good order. From `atexit`.
#[pyfunction]
#[pyo3(name = "_end")]
pub(crate) fn end(py: Python<'_>) {
    let made = MADE_AT.load(Ordering::Acquire);
    if made != fork::count().wrapping_add(1) {
        // None was made, or by the process that this one was forked off.
        return;
    }
    ENDS.store(true, Ordering::Release);
    py.detach(|| {
        let live = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in live.iter().filter_map(Weak::upgrade) {
            // An idle group leaves in good order, and what is pending is cut short, which is the error.
            let _ = handle.group().shutdown(Instant::now());
        }
        // A forked child of `multiprocessing` ends without the exit handlers that wait for this.
        wait_for_partings();
    });
    crate::raw::holder::give_back_waiting(py);
    GONE.store(true, Ordering::Release);
}

/// In a process that an isolated group started: serves as its child and never returns. Otherwise returns at once.
#[pyfunction]
#[pyo3(name = "_run_child_if_asked")]
pub(crate) fn run_child_if_asked(py: Python<'_>) {
    py.detach(oxccl::backend::init);
}
