//! What a killed child leaves in `/dev/shm`: a library that is ended by SIGKILL cannot remove the files that it names after its
//! process (oneCCL with `CCL_ATL_SHM=1`: `<pid>:0:0`, 64 MB each).
//!
//! Removed is only what carries the number of a child that has ended and is not collected yet: until then no other process can
//! have that number, and the dead one makes nothing new.

use std::ffi::OsStr;
use std::path::Path;

use rustix::process::Pid;

const FOLDER: &str = "/dev/shm";

/// Removes the files of the dead process `pid`. To be called before it is collected.
pub(crate) fn sweep(pid: Pid) {
    sweep_in(Path::new(FOLDER), pid.as_raw_nonzero().get());
}

fn sweep_in(folder: &Path, pid: i32) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let is_file = entry.file_type().is_ok_and(|t| t.is_file());
        if !is_file || !is_named_after(&entry.file_name(), pid) {
            continue;
        }
        match std::fs::remove_file(entry.path()) {
            Ok(()) => {
                tracing::debug!(pid, file = %entry.path().display(), "removed what a child process left")
            }
            // Another user's file of the same name, or another process was quicker.
            Err(error) => {
                tracing::debug!(pid, file = %entry.path().display(), %error, "a child process left a file that stays");
            }
        }
    }
}

/// `<pid>:<number>:<number>`.
fn is_named_after(name: &OsStr, pid: i32) -> bool {
    let Some(name) = name.to_str() else { return false };
    let parts: Vec<&str> = name.split(':').collect();
    let [first, second, third] = parts.as_slice() else {
        return false;
    };
    let digits = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    *first == pid.to_string() && [second, third].into_iter().all(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_that_very_process_go() {
        let folder = std::env::temp_dir().join(format!("oxccl-litter-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("123:7:7")).unwrap();
        let kept = [
            "1234:0:0",
            "12:0:0",
            "123:0",
            "123:0:",
            "123:0:x",
            "123",
            "0123:0:0",
            "123:0:0:0",
        ];
        for name in kept.iter().chain(&["123:0:0", "123:1:15"]) {
            std::fs::write(folder.join(name), "").unwrap();
        }
        sweep_in(&folder, 123);
        let mut left: Vec<String> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let mut want: Vec<String> = kept.iter().map(ToString::to_string).collect();
        want.push("123:7:7".into());
        want.sort();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, want);
        sweep_in(&folder, 123);
    }
}
