//! A handler of SIGINT in front of the interpreter's: it notes during which call the signal came, and passes it on.
//!
//! The interpreter's own handler only leaves a note that the main thread reads between two of its instructions, and a thread that waits inside
//! a collective comes to none.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::{SIG_DFL, SIG_IGN, SIGINT, c_int, sighandler_t};

/// The number of the present or last call of the main thread.
pub(crate) static CALL: AtomicU64 = AtomicU64::new(0);
/// The number of the call in which the last signal came; 0 for none.
pub(crate) static SIGNALLED: AtomicU64 = AtomicU64::new(0);
/// The handler that ours passes the signal on to.
static NEXT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_interrupt(signal: c_int) {
    SIGNALLED.store(CALL.load(Ordering::SeqCst), Ordering::SeqCst);
    let next = NEXT.load(Ordering::SeqCst);
    if next != 0 {
        // SAFETY: `chain` stored a handler that takes the number alone, as the interpreter's does.
        let next: extern "C" fn(c_int) = unsafe { std::mem::transmute(next) };
        next(signal);
    }
}

/// Puts ours in front of the present handler, unless it is there, or there is none to pass the signal on to.
pub(crate) fn chain() {
    let ours = on_interrupt as extern "C" fn(c_int) as sighandler_t;
    // SAFETY: both calls are given structures of the right type, and ours only touches atomics before it passes the signal on.
    unsafe {
        let mut present: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(SIGINT, std::ptr::null(), &raw mut present) != 0
            || present.sa_sigaction == ours
            || present.sa_sigaction == SIG_DFL
            || present.sa_sigaction == SIG_IGN
            || present.sa_flags & libc::SA_SIGINFO != 0
        {
            return;
        }
        NEXT.store(present.sa_sigaction, Ordering::SeqCst);
        present.sa_sigaction = ours;
        libc::sigaction(SIGINT, &raw const present, std::ptr::null_mut());
    }
}
