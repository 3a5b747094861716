//! The end of the process while threads are in oneCCL, or leaving it.
//!
//! oneCCL takes itself apart in a destructor that runs inside `exit`: a thread that is in a call at that moment crashes the
//! process. Data that a finished call left in a send buffer is lost with the process, and the peers hang. And when the
//! process that has the key-value server goes while a peer destroys its communicator, that peer is aborted. (All three were
//! seen.) So calls and leaves are counted, and a handler that runs before that destructor waits for the leaves, lets
//! no new call begin, waits for those under way, and ends the process without destructors if one is stuck.
//!
//! What a call itself brings, and first of all the one that loads the transport, comes before any handler that was there
//! already. `configure` waits for its own calls. A load in the background (in the child of an isolated group) is waited for by
//! the thread that began it: `exit` runs the destructors of its caller's thread-local values before any handler. So dropping
//! a group never waits, and only the end of such a process does.

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Calls under way.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Groups that leave.
static LEAVING: AtomicUsize = AtomicUsize::new(0);
/// Threads that were given up inside a call and have not come back.
static STUCK: AtomicUsize = AtomicUsize::new(0);
/// Calls that bring destructors, and that no caller waits for.
static BRINGING: AtomicUsize = AtomicUsize::new(0);
/// The process is ending: no new calls.
static CLOSING: AtomicBool = AtomicBool::new(false);

/// How long the end of the process waits for the other ranks of groups that were left.
const FOR_LEAVES: Duration = Duration::from_secs(5);
/// How long it waits for calls.
const FOR_CALLS: Duration = Duration::from_millis(1500);
/// How long the thread that began a load in the background waits for it when it ends.
const FOR_BRINGING: Duration = Duration::from_millis(1500);

macro_rules! counted {
    ($(#[$m:meta])* $name:ident in $counter:ident) => {
        $(#[$m])*
        #[derive(Debug)]
        pub(crate) struct $name(());

        impl $name {
            /// Begins.
            pub(crate) fn begin() -> Self {
                $counter.fetch_add(1, Ordering::SeqCst);
                Self(())
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                $counter.fetch_sub(1, Ordering::SeqCst);
            }
        }
    };
}

counted! {
    /// A call under way.
    Call in CALLS
}
counted! {
    /// A group that leaves in good order, until its communicators are gone on all ranks.
    Leaving in LEAVING
}
counted! {
    /// A thread that was given up; ends when it comes back.
    Stuck in STUCK
}
counted! {
    /// A load in the background.
    Bringing in BRINGING
}

/// Waits, when its thread ends or ends the process, for what is being brought.
struct Patient;

impl Drop for Patient {
    fn drop(&mut self) {
        settle(FOR_BRINGING, || BRINGING.load(Ordering::SeqCst) == 0);
    }
}

/// From here on this thread does not end, nor end the process, within a load in the background that began before.
pub(crate) fn end_after_bringing() {
    thread_local! {
        static PATIENT: Patient = const { Patient };
    }
    // The first use is what has its destructor run.
    PATIENT.with(|_| ());
}

impl Call {
    /// Begins a call. Never returns once the process is ending: its thread ends with it.
    pub(super) fn enter() -> Self {
        let call = Self::begin();
        if CLOSING.load(Ordering::SeqCst) {
            drop(call);
            loop {
                std::thread::park();
            }
        }
        call
    }
}

/// How many threads are stuck in oneCCL.
pub(crate) fn stuck() -> usize {
    STUCK.load(Ordering::SeqCst)
}

unsafe extern "C" {
    #[cfg(target_env = "gnu")]
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    #[cfg(target_env = "gnu")]
    fn fflush(stream: *mut c_void) -> c_int;
    #[cfg(target_env = "gnu")]
    fn _exit(status: c_int) -> !;
}

/// What the library has done by now: each step may have brought destructors of its own.
#[derive(Debug, Clone, Copy)]
pub(super) enum After {
    /// It was opened.
    Opening,
    /// It has loaded its transport, with its first id.
    Transport,
    /// It has made a communicator.
    Communicator,
}

/// Puts the handler before the destructors that the library has brought `after` a step, once for each: they run in reverse
/// order of registration. The handler may run several times.
pub(super) fn come_first(after: After) {
    static DONE: [Once; 3] = [const { Once::new() }; 3];
    let [opening, transport, communicator] = &DONE;
    let once = match after {
        After::Opening => opening,
        After::Transport => transport,
        After::Communicator => communicator,
    };
    once.call_once(|| {
        #[cfg(target_env = "gnu")]
        // SAFETY: the handler is a function that lives as long as the program and takes no argument of ours.
        unsafe {
            on_exit(at_exit, std::ptr::null_mut());
        }
    });
}

/// Waits until `done` or for `limit`.
fn settle(limit: Duration, done: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    while !done() {
        if began.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

#[cfg(target_env = "gnu")]
extern "C" fn at_exit(status: c_int, _: *mut c_void) {
    // Groups that were told to end, of any backend: their last executors leave now.
    ftcore::lifecycle::wait_for_leaves();
    settle(FOR_LEAVES, || LEAVING.load(Ordering::SeqCst) == 0);
    CLOSING.store(true, Ordering::SeqCst);
    settle(FOR_CALLS, || CALLS.load(Ordering::SeqCst) <= stuck());
    if CALLS.load(Ordering::SeqCst) > 0 {
        // SAFETY: what C streams hold is written out, then the process ends at once with its own status.
        unsafe {
            fflush(std::ptr::null_mut());
            _exit(status);
        }
    }
}
