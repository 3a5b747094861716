//! Variables without which a library does not work, or works badly: set in this process before it is opened.
//!
//! `setenv` is not safe while another thread reads the environment outside Rust's own lock (C's `getenv`). A program that cares sets them in its
//! launcher, or opens its libraries before it starts threads; what is set already is not written.

use std::ffi::OsStr;
use std::sync::{Mutex, PoisonError};

static WRITING: Mutex<()> = Mutex::new(());

/// Sets `name` unless the user did. True if it was written.
pub fn set_if_absent(name: &str, value: impl AsRef<OsStr>) -> bool {
    set_if(name, value, |present| present.is_none())
}

/// Sets `name` to `value` if `may` says so of what it is now. True if it was written.
pub fn set_if(name: &str, value: impl AsRef<OsStr>, may: impl FnOnce(Option<&OsStr>) -> bool) -> bool {
    let _one_at_a_time = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let (present, value) = (std::env::var_os(name), value.as_ref());
    if !may(present.as_deref()) || present.is_some_and(|p| p == value) {
        return false;
    }
    // SAFETY: Rust's own readers and writers share a lock; C code that reads the environment in another thread at
    // this moment is what the module's documentation warns of.
    unsafe { std::env::set_var(name, value) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_the_user_set_is_left_alone() {
        // SAFETY: a name that nothing else reads.
        unsafe { std::env::set_var("OXCCL_TEST_ENVIRONMENT", "mine") };
        assert!(!set_if_absent("OXCCL_TEST_ENVIRONMENT", "theirs"));
        assert_eq!(std::env::var("OXCCL_TEST_ENVIRONMENT").unwrap(), "mine");
        assert!(set_if_absent("OXCCL_TEST_ENVIRONMENT_2", "ours"));
        assert!(!set_if_absent("OXCCL_TEST_ENVIRONMENT_2", "later"));
        assert_eq!(std::env::var("OXCCL_TEST_ENVIRONMENT_2").unwrap(), "ours");
        assert!(set_if("OXCCL_TEST_ENVIRONMENT_2", "others", |present| {
            present.is_some_and(|p| p == "ours")
        }));
        assert!(!set_if("OXCCL_TEST_ENVIRONMENT_2", "others", |_| true));
    }
}
