//! What the process goes through: a fork, of which the child cannot use its parent's groups, and the end of the interpreter, before which all groups end.
//!
//! Interpreters before 3.14 end a daemon thread that comes back to them at their end by unwinding it (`pthread_exit`), which the frames of Rust
//! answer by aborting the process. Where a thread comes back from a call without the GIL, PyO3 has it wait for ever instead. Python code that runs
//! below frames of ours is the other place: such stretches are [crossings](Crossing). The exit handler waits until the last one is through,
//! and none begins after that.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use oxccl::core::lifecycle::wait_for_leaves;
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

/// How long a thread whose call was cut short by the interpreter's end stays away from it: its program has little use for the error, and main
/// thread and exit handlers go on undisturbed. Bounded, since an exit handler of the program's own may wait for the thread.
const AWAY: Duration = Duration::from_secs(2);
/// How long the end waits for crossings: far longer than any takes that does not wait for something itself.
const CROSSINGS_END: Duration = Duration::from_secs(5);

/// The crossings under way, of threads other than the main one.
static CROSSINGS: AtomicUsize = AtomicUsize::new(0);

/// A stretch in which Python code may run below frames of this library: the interpreter does not end during it.
pub(crate) struct Crossing {
    is_counted: bool,
}

impl Crossing {
    /// Errors: `InvalidState` once the interpreter ends, on threads other than the main one.
    pub(crate) fn begin() -> Result<Self> {
        if is_main() {
            return Ok(Self { is_counted: false });
        }
        CROSSINGS.fetch_add(1, Ordering::SeqCst);
        let crossing = Self { is_counted: true };
        if ENDS.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::InvalidState, "the interpreter ends"));
        }
        Ok(crossing)
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        if self.is_counted {
            CROSSINGS.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// True on the thread on which the interpreter runs signal handlers, and ends.
pub(crate) fn is_main() -> bool {
    thread_local! {
        static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    }
    IS_MAIN.get().unwrap_or_else(|| {
        let is_main = crate::raw::is_main_thread();
        IS_MAIN.set(Some(is_main));
        is_main
    })
}

/// Runs `call` without the GIL: every call that may take a while goes through here. At the interpreter's end other threads than the main one, all
/// of them daemons, stay away from it.
pub(crate) fn detached<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let done = call();
        if !is_main() && ENDS.load(Ordering::SeqCst) {
            thread::sleep(AWAY);
        }
        done
    })
}

/// Before a group is made: refuses in a process that was forked off one that has groups.
pub(crate) fn may_make_groups(py: Python<'_>) -> PyResult<()> {
    let here = fork::count().wrapping_add(1);
    match MADE_AT.compare_exchange(0, here, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let _crossing = Crossing::begin().or_raise(py)?;
            py.import("oxccl._process")?
                .call_method0("end_with_process")
                .map(drop)
        }
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
    ENDS.store(true, Ordering::SeqCst);
    py.detach(|| {
        let live = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in live.iter().filter_map(Weak::upgrade) {
            // An idle group leaves in good order, and what is pending is cut short, which is the error.
            let _ = handle.group().shutdown(Instant::now());
        }
        // A forked child of `multiprocessing` ends without the exit handlers that wait for this.
        wait_for_leaves();
        let until = Instant::now() + CROSSINGS_END;
        while CROSSINGS.load(Ordering::SeqCst) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    });
    crate::raw::holder::give_back_waiting(py);
    GONE.store(true, Ordering::Release);
}

/// In a process that an isolated group started: serves as its child and never returns. Otherwise returns at once.
#[pyfunction]
#[pyo3(name = "_run_child_if_asked")]
pub(crate) fn run_child_if_asked(py: Python<'_>) {
    detached(py, oxccl::backend::init);
}
