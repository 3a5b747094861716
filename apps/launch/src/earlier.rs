//! What an earlier run left in the folder of this one, and what of it is removed before anything is started: logs, and the record of a job of
//! which nothing is left.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind as IoKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ftcore::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How long the lighthouse of a launcher that has died is waited for: it dies a moment later.
pub(super) const DIES: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(5);

/// Where the lighthouse of this run keeps its record. One with credentials puts the job's id behind the name.
pub(super) fn state_file(run_dir: &Path) -> PathBuf {
    run_dir.join("lighthouse.state")
}

/// Removes what the processes of an earlier run said in the same folder: a cause of this run's failures is not looked for there.
pub(super) fn forget_logs(folder: &Path, replicas: &Range<u32>, lighthouse: bool) -> Result<()> {
    let io = |e| {
        Error::io(
            format!("clear the logs of an earlier run in {}", folder.display()),
            e,
        )
    };
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let replica = || {
            let (replica, _) = name
                .strip_prefix("replica-")?
                .strip_suffix(".log")?
                .split_once('.')?;
            replica.parse().ok()
        };
        if (lighthouse && name == "lighthouse.log") || replica().is_some_and(|r| replicas.contains(&r)) {
            std::fs::remove_file(entry.path()).map_err(io)?;
        }
    }
    Ok(())
}

/// Removes the record of this job, unless a lighthouse has it at `until` still: ours then says so itself, and does not start.
pub(super) fn forget_record(run_dir: &Path, job: Option<&str>, until: Instant) -> Result<()> {
    let mut record = state_file(run_dir).into_os_string();
    if let Some(job) = job {
        record.push(format!(".{job}"));
    }
    let record = Path::new(&record);
    let io = |e| {
        Error::io(
            format!("remove the record of an earlier run, {}", record.display()),
            e,
        )
    };
    if !record.exists() {
        return Ok(());
    }
    // Beside the file, as lighthouses have it; it stays, since one that starts may hold it open already.
    let mut lock = record.as_os_str().to_owned();
    lock.push(".lock");
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(lock)
        .map_err(io)?;
    if !is_ours(&lock, until).map_err(io)? {
        return Ok(());
    }
    match std::fs::remove_file(record) {
        Err(e) if e.kind() != IoKind::NotFound => Err(io(e)),
        _ => Ok(()),
    }
}

/// Locks the file, until it is closed.
fn is_ours(lock: &File, until: Instant) -> std::io::Result<bool> {
    loop {
        match flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() >= until => return Ok(false),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOOK),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_jobs_that_of_this_one_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let all = [
            "lighthouse.state",
            "lighthouse.state.this-job",
            "lighthouse.state.that-job",
        ];
        for name in all {
            std::fs::write(dir.path().join(name), "{}").unwrap();
        }
        let left = || all.map(|name| dir.path().join(name).exists());
        forget_record(dir.path(), Some("this-job"), Instant::now()).unwrap();
        assert_eq!(left(), [true, false, true]);
        forget_record(dir.path(), None, Instant::now()).unwrap();
        assert_eq!(left(), [false, false, true]);
    }

    #[test]
    fn the_record_of_a_lighthouse_that_runs_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let record = state_file(dir.path());
        std::fs::write(&record, "{}").unwrap();
        let lock = File::create(dir.path().join("lighthouse.state.lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        forget_record(dir.path(), None, Instant::now()).unwrap();
        assert!(record.exists());
        drop(lock);
        forget_record(dir.path(), None, Instant::now()).unwrap();
        assert!(!record.exists());
        // There is none any more, and that is no error.
        forget_record(dir.path(), None, Instant::now()).unwrap();
    }
}
