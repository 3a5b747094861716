//! The environment variable without which Intel's OpenCL runtime for CPUs is not found when it came with pip: set in this
//! process before the library is opened, never over a value that the user set (see [`vendor::environment`]).

use std::path::Path;

use vendor::environment::set_if_absent;

/// Names the OpenCL runtimes, separated by colons; the loader of OpenCL then looks nowhere else.
pub const ENV_ICD: &str = "OCL_ICD_FILENAMES";
/// Intel's OpenCL runtime for CPUs.
pub const CPU_RUNTIME: &str = "libintelocl.so";

/// Lets OpenCL find the CPU runtime if it lies in one of `folders`, unless the user named runtimes. True if it was written.
pub fn prepare(folders: &[impl AsRef<Path>]) -> bool {
    let found = folders
        .iter()
        .map(|f| f.as_ref().join(CPU_RUNTIME))
        .find(|f| f.is_file());
    found.is_some_and(|file| set_if_absent(ENV_ICD, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_is_not_there_is_not_named() {
        assert!(!prepare(&["/nowhere/at/all"]));
    }
}
