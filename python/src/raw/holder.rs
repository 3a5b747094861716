//! What keeps lent memory alive, and how it is given back: at once by a thread that is attached to the interpreter, else through a queue that the
//! interpreter empties. A thread of a group never waits for the GIL.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::{Py, PyAny, Python};

use super::buffer::View;
use super::dlpack::Managed;
use crate::process::{self, Crossing};

/// Memory that Python has lent. Dropping it gives the memory back.
pub(crate) struct Holder(Option<Lent>);

pub(crate) enum Lent {
    Buffer(Box<View>),
    DlPack(Managed),
    /// An object that owns the memory.
    Owner(Py<PyAny>),
}

thread_local! {
    /// This thread is attached, and giving back may run Python code here.
    static ATTACHED: Cell<bool> = const { Cell::new(false) };
}
static QUEUE: Mutex<Vec<Lent>> = Mutex::new(Vec::new());
static WAITING: AtomicBool = AtomicBool::new(false);

impl Holder {
    pub(crate) fn new(lent: Lent) -> Self {
        Self(Some(lent))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let Some(lent) = self.0.take() else {
            return;
        };
        if process::is_gone() {
            // There is no interpreter to give it back to, and the process ends.
            std::mem::forget(lent);
        } else if ATTACHED.get() {
            give_back(lent);
        } else {
            QUEUE.lock().unwrap_or_else(PoisonError::into_inner).push(lent);
            if !WAITING.swap(true, Ordering::AcqRel) {
                // If the interpreter's list is full, the next call of ours does it.
                // SAFETY: may be called from any thread, attached or not, while there is an interpreter.
                unsafe { pyo3::ffi::Py_AddPendingCall(Some(on_pending), std::ptr::null_mut()) };
            }
        }
    }
}

fn give_back(lent: Lent) {
    match lent {
        Lent::Buffer(view) => view.release(),
        Lent::DlPack(managed) => managed.release(),
        Lent::Owner(owner) => drop(owner),
    }
}

extern "C" fn on_pending(_: *mut c_void) -> c_int {
    empty();
    0
}

/// Only on an attached thread.
fn empty() {
    WAITING.store(false, Ordering::Release);
    let lent = std::mem::take(&mut *QUEUE.lock().unwrap_or_else(PoisonError::into_inner));
    lent.into_iter().for_each(give_back);
}

/// Gives back what threads of groups could not.
pub(crate) fn give_back_waiting(_attached: Python<'_>) {
    if WAITING.load(Ordering::Acquire)
        && let Ok(_crossing) = Crossing::begin()
    {
        empty();
    }
}

/// Drops `value`, and gives back the memory in it here and now.
pub(crate) fn drop_attached<T>(_attached: Python<'_>, value: T) {
    let Ok(_crossing) = Crossing::begin() else {
        // The main thread has it given back.
        return;
    };
    let before = ATTACHED.replace(true);
    drop(value);
    ATTACHED.set(before);
}
