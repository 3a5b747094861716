//! The environment variable without which Intel's OpenCL runtime for CPUs is not found when it came with pip: set in this
//! process before the library is opened, never over a value that the user set.
//!
//! `setenv` is not safe while another thread reads the environment outside Rust's own lock (C's `getenv`); a program that
//! cares sets the variable in its launcher, and then nothing is written.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Names the OpenCL runtimes, separated by colons; the loader of OpenCL then looks nowhere else.
pub const ENV_ICD: &str = "OCL_ICD_FILENAMES";
/// Intel's OpenCL runtime for CPUs.
pub const CPU_RUNTIME: &str = "libintelocl.so";

static WRITING: Mutex<()> = Mutex::new(());

/// Lets OpenCL find the CPU runtime if it lies in one of `folders`, unless the user named runtimes. True if it was written.
pub fn prepare(folders: &[impl AsRef<Path>]) -> bool {
    let found = folders
        .iter()
        .map(|f| f.as_ref().join(CPU_RUNTIME))
        .find(|f| f.is_file());
    found.is_some_and(|file| set_if_absent(ENV_ICD, &file))
}

fn set_if_absent(name: &str, value: &Path) -> bool {
    let _one_at_a_time = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    if std::env::var_os(name).is_some() {
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
    fn a_value_of_the_user_stays_and_a_runtime_that_is_not_there_is_not_named() {
        // SAFETY: a name that nothing else reads.
        unsafe { std::env::set_var("OXCCL_TEST_ICD", "mine") };
        assert!(!set_if_absent("OXCCL_TEST_ICD", Path::new("theirs")));
        assert_eq!(std::env::var("OXCCL_TEST_ICD").unwrap(), "mine");
        assert!(!prepare(&["/nowhere/at/all"]));
    }
}
