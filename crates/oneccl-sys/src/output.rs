//! Keeps oneCCL's log out of the user's standard output.
//!
//! oneCCL logs through C's `stdout` stream. Redirecting file descriptor 1, even for the length of a call, would take other
//! threads' output along. But C's `stdout` is a variable that may be assigned (the GNU C Library documents it): it is
//! made to mean `stderr` once, before the library is opened. Rust's own output, and Python's, do not go through it; C and
//! C++ code of the same process that prints does. `OXCCL_XCCL_STDOUT=keep` leaves it alone.

/// With the value `keep`, C's `stdout` stays what it is.
pub const ENV_STDOUT: &str = "OXCCL_XCCL_STDOUT";

/// Makes C's `stdout` mean `stderr`, unless the user asked to keep it. True if it does now.
pub fn keep_out_of_stdout() -> bool {
    if std::env::var(ENV_STDOUT).is_ok_and(|v| v == "keep") {
        return false;
    }
    redirect()
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn redirect() -> bool {
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        static mut stdout: *mut c_void;
        static stderr: *mut c_void;
        fn fflush(stream: *mut c_void) -> c_int;
    }
    // SAFETY: both are valid streams for as long as the process lives, and a pointer-sized aligned store is seen
    // whole by other threads; what they had buffered is written out first.
    unsafe {
        fflush(stdout);
        stdout = stderr;
    }
    true
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn redirect() -> bool {
    false
}
