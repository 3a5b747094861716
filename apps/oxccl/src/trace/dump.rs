//! Asks running processes for their flight records: SIGUSR2, and the file that comes of it. Linux tells by `/proc` whether a process handles the
//! signal, which would end it otherwise, and where it writes.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use oxccl::core::{Error, ErrorKind, Result};
use rustix::process::{Pid, Signal, kill_process};

/// How often the folder is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Asks process `pid` for its record and waits for it until `deadline`. The file.
///
/// Errors: `NotFound` if there is no such process, `InvalidState` if the signal would end it, `PermissionDenied`, `Timeout` naming the folder.
pub(super) fn dump(pid: u32, deadline: Instant) -> Result<PathBuf> {
    let process = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Error::invalid(format!("{pid} is no process's number")))?;
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let status = std::fs::read_to_string(proc.join("status"))
        .map_err(|_| Error::new(ErrorKind::NotFound, format!("there is no process {pid} here")))?;
    if !handles(&status, Signal::USR2) {
        return Err(Error::new(
            ErrorKind::InvalidState,
            format!(
                "process {pid} has no handler for SIGUSR2, which would end it; its program has to call \
                 `oxccl::flight_recorder::dump_on_signal()`"
            ),
        ));
    }
    let folder = folder(&proc).map_err(|e| Error::io(format!("find where process {pid} writes"), e))?;
    let before = written(&folder, pid);
    kill_process(process, Signal::USR2)
        .map_err(|e| Error::io(format!("send SIGUSR2 to process {pid}"), e.into()))?;
    loop {
        let now = written(&folder, pid);
        if let Some((path, _)) = now.filter(|now| before.as_ref() != Some(now)) {
            return Ok(path);
        }
        if Instant::now() >= deadline {
            return Err(Error::timeout(format!(
                "process {pid} was sent SIGUSR2, and no record came into {}",
                folder.display()
            )));
        }
        std::thread::sleep(LOOK);
    }
}

/// True if the process of this `/proc/PID/status` catches `signal`.
fn handles(status: &str, signal: Signal) -> bool {
    let caught = status
        .lines()
        .find_map(|line| line.strip_prefix("SigCgt:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 1)
}

/// Where the process writes: as its environment says, else its current folder.
fn folder(proc: &Path) -> std::io::Result<PathBuf> {
    let current = std::fs::read_link(proc.join("cwd"))?;
    let environment = std::fs::read(proc.join("environ"))?;
    let named = environment
        .split(|byte| *byte == 0)
        .filter_map(|variable| variable.strip_prefix(b"OXCCL_FLIGHT_RECORDER_DIR="))
        .rfind(|value| !value.is_empty());
    Ok(match named {
        Some(folder) => current.join(Path::new(std::ffi::OsStr::from_bytes(folder))),
        None => current,
    })
}

/// The latest record of the process there, and when it was written: a later one replaces it under the same name.
fn written(folder: &Path, pid: u32) -> Option<(PathBuf, SystemTime)> {
    let entries = std::fs::read_dir(folder).ok()?;
    let records = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let name = entry.file_name();
        let (rest, began) = name.to_str()?.strip_suffix(".json")?.rsplit_once('-')?;
        let is_its = rest.starts_with("flight-")
            && rest.rsplit_once('-')?.1 == pid.to_string()
            && began.bytes().all(|b| b.is_ascii_digit());
        let at = entry.metadata().ok()?.modified().ok()?;
        is_its.then(|| (entry.path(), at))
    });
    records.max_by_key(|(_, at)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_signal_is_a_bit_of_the_mask() {
        let status = |mask: &str| format!("Name:\tx\nSigIgn:\tffffffffffffffff\nSigCgt:\t{mask}\n");
        assert!(handles(&status("0000000000000800"), Signal::USR2));
        assert!(!handles(&status("0000000000000400"), Signal::USR2));
        assert!(!handles("Name:\tx\n", Signal::USR2));
    }

    #[test]
    fn the_record_of_a_process_is_told_from_those_of_others() {
        let folder = std::env::temp_dir().join(format!("oxccl-dump-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in [
            "flight-a-b-17-1.json",
            "flight-host-170-1.json",
            "flight-host-17-1.json.part",
            "x.json",
        ] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let found = written(&folder, 17).map(|(path, _)| path);
        assert_eq!(found, Some(folder.join("flight-a-b-17-1.json")));
        assert_eq!(written(&folder, 7), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
