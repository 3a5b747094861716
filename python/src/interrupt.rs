//! Ctrl-C during a blocking call. The main thread waits inside the collective and runs no Python code, so a thread of ours looks on:
//! after a SIGINT it aborts the group, the call ends, and the interpreter raises `KeyboardInterrupt`.
//!
//! Only while Python's own handler of SIGINT stands: what another one wants is not known before it has run, and it runs when the call has ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use oxccl::core::{Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors;
use crate::group::Handle;
use crate::process::{Crossing, detached, is_main};
use crate::raw::signal;

/// How often the watcher looks while there are calls, and how often a wait returns to the interpreter.
pub(crate) const SLICE: Duration = Duration::from_millis(30);
/// After so many looks without a call it sleeps until the next.
const IDLE_LOOKS: u32 = 20;

/// The call that the main thread is in.
static PRESENT: Mutex<Option<Arc<Handle>>> = Mutex::new(None);
static ASLEEP: AtomicBool = AtomicBool::new(false);
static WATCHER: OnceLock<Option<Thread>> = OnceLock::new();

fn present() -> MutexGuard<'static, Option<Arc<Handle>>> {
    PRESENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `call` without the GIL; `KeyboardInterrupt` if the user wants it to end, and the group is aborted then.
pub(crate) fn blocking<T: Send>(
    py: Python<'_>,
    handle: &Arc<Handle>,
    call: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    if !is_main() {
        return Ok(detached(py, call));
    }
    let Some(watcher) = WATCHER.get_or_init(start) else {
        return Ok(detached(py, call));
    };
    {
        let mut present = present();
        signal::CALL.fetch_add(1, Ordering::SeqCst);
        *present = Some(handle.clone());
    }
    if ASLEEP.swap(false, Ordering::SeqCst) {
        watcher.unpark();
    }
    // A signal that came before the call had its number.
    let done = py.check_signals().map(|()| py.detach(call));
    drop(present().take());
    done
}

fn start() -> Option<Thread> {
    signal::chain();
    let started = thread::Builder::new().name("ox-py-signals".into()).spawn(watch);
    started.ok().map(|thread| thread.thread().clone())
}

fn watch() {
    let mut idle = 0;
    loop {
        // A handler that was set since took our place.
        signal::chain();
        let aborted = look();
        idle = if aborted || present().is_some() {
            0
        } else {
            idle + 1
        };
        if idle < IDLE_LOOKS {
            thread::park_timeout(SLICE);
            continue;
        }
        ASLEEP.store(true, Ordering::SeqCst);
        if present().is_none() {
            thread::park();
        }
        ASLEEP.store(false, Ordering::SeqCst);
        idle = 0;
    }
}

/// Aborts the group of the present call if the signal came during it.
fn look() -> bool {
    let signalled = signal::SIGNALLED.load(Ordering::SeqCst);
    let is_due = || signalled != 0 && signalled == signal::CALL.load(Ordering::SeqCst);
    if !is_due() || present().is_none() {
        return false;
    }
    let Ok(crossing) = Crossing::begin() else {
        return false;
    };
    let is_wanted = Python::try_attach(|py| ends_calls(py).unwrap_or(false)).unwrap_or(false);
    drop(crossing);
    if !is_wanted {
        return false;
    }
    let present = present();
    match &*present {
        Some(handle) if is_due() => {
            signal::SIGNALLED.store(0, Ordering::SeqCst);
            handle.group().abort("interrupted at the keyboard");
            true
        }
        _ => false,
    }
}

/// True if the handler of SIGINT is the one that raises `KeyboardInterrupt`.
fn ends_calls(py: Python<'_>) -> PyResult<bool> {
    let signal = py.import(intern!(py, "signal"))?;
    let handler = signal.call_method1(intern!(py, "getsignal"), (libc::SIGINT,))?;
    Ok(handler.is(&signal.getattr(intern!(py, "default_int_handler"))?))
}

/// Runs `call`, which takes its time and cannot be aborted, on a thread of its own, and returns to the interpreter now and then. After
/// `KeyboardInterrupt` it goes on to its deadline, and what it gives is dropped.
pub(crate) fn apart<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> PyResult<T> {
    let (give, take) = std::sync::mpsc::sync_channel(1);
    let started = thread::Builder::new().name("ox-py-call".into()).spawn(move || {
        drop(give.send(call()));
    });
    started.map_err(|e| errors::raise(py, &Error::io("cannot start a thread", e)))?;
    let take = Mutex::new(take);
    loop {
        let wait = || match take
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .recv_timeout(SLICE)
        {
            Ok(done) => Some(done),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => None,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                Some(Err(Error::new(ErrorKind::Internal, "the call's thread panicked")))
            }
        };
        let done = detached(py, wait);
        py.check_signals()?;
        if let Some(done) = done {
            return done.map_err(|error| errors::raise(py, &error));
        }
    }
}

/// Waits in slices until `wait` gives something or `deadline` passes, returning to the interpreter in between.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    deadline: Instant,
    mut wait: impl FnMut(Instant) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    loop {
        let until = deadline.min(Instant::now() + SLICE);
        let done = detached(py, || wait(until));
        if done.is_some() {
            return Ok(done);
        }
        py.check_signals()?;
        if Instant::now() >= deadline {
            return Ok(None);
        }
    }
}
