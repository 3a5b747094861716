//! The state file: the job's record, replaced as a whole by a rename, and locked against a second lighthouse.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ftcore::forked::Parents;
use ftcore::identity::Rarely;
use ftcore::{Error, ErrorKind, Result};
use protocol::quorum::Record;
use rustix::fs::{FlockOperation, flock};

use super::saved;

/// No state file of ours is larger, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A state file that belongs to this lighthouse until it is closed or dropped.
#[derive(Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
    /// A file beside it, because a lock does not survive a rename. `None` once closed. A child that is forked off would keep the lock.
    lock: Mutex<Option<Parents<File>>>,
    /// A record that the disk did not take, to be tried again.
    unsaved: Mutex<Option<Record>>,
    failures: Rarely,
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

impl StateFile {
    /// Makes its folder if there is none, locks it and reads it; a missing file is no record.
    ///
    /// Errors: `Io` if it cannot be written or read, `Conflict` if another lighthouse has it, `Corrupt` if it is not ours.
    pub(crate) fn open(path: &Path) -> Result<(Self, Option<Record>)> {
        let path =
            std::path::absolute(path).map_err(|e| Error::io(format!("state file {}", path.display()), e))?;
        let unwritable = |e: std::io::Error| {
            let kind = e.kind();
            let text = format!(
                "state file {} cannot be written: {e}; choose a place that can be, or go without one",
                path.display()
            );
            Error::io(text, kind.into())
        };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(unwritable)?;
        }
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(beside(&path, ".lock"))
            .map_err(unwritable)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| {
            if e == rustix::io::Errno::WOULDBLOCK {
                let text = format!(
                    "state file {} belongs to another lighthouse that is running: end that one, or give this one a file of its own",
                    path.display()
                );
                return Error::new(ErrorKind::Conflict, text);
            }
            unwritable(e.into())
        })?;
        let record = load(&path)?;
        // What would fail at the first quorum fails now: the disk may be full, or the file another's.
        let probe = beside(&path, ".new");
        let written = File::create(&probe).and_then(|mut f| f.write_all(b"{}").and_then(|()| f.sync_data()));
        written.map_err(unwritable)?;
        std::fs::remove_file(&probe).map_err(unwritable)?;
        let lock = Mutex::new(Some(lock.into()));
        let file = Self {
            path,
            lock,
            unsaved: Mutex::new(None),
            failures: Rarely::new(),
        };
        Ok((file, record))
    }

    /// Saves `record`, or keeps it in memory for [`written`](Self::written) to try again.
    pub(crate) fn keep(&self, record: &Record) {
        *self.unsaved.lock().unwrap_or_else(PoisonError::into_inner) = Some(record.clone());
        // A caller that is to be told of the record hears of a failure from `written`.
        let _ = self.written();
    }

    /// Saves what the disk did not take before. Errors: `Unavailable` that names the file and why, as long as the disk does not take it.
    pub(crate) fn written(&self) -> Result<()> {
        let mut unsaved = self.unsaved.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(record) = unsaved.as_ref() else {
            return Ok(());
        };
        if let Err(error) = self.save(record) {
            if let Some(not_logged) = self.failures.pass() {
                tracing::error!(
                    %error, not_logged,
                    "the record cannot be saved, and no quorum is delivered until it can be: make room"
                );
            }
            let text = format!(
                "the lighthouse cannot save the job's record, and delivers no quorum that a restart of it would not know of: {}; make room there",
                error.message()
            );
            return Err(Error::new(ErrorKind::Unavailable, text).with_source(error));
        }
        *unsaved = None;
        Ok(())
    }

    /// Replaces the file, so that a crash leaves the old or the new one. Errors: `Io`; `InvalidState` once closed.
    pub(crate) fn save(&self, record: &Record) -> Result<()> {
        let what = || format!("state file {}", self.path.display());
        let open = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if open.is_none() {
            return Err(Error::new(
                ErrorKind::InvalidState,
                format!("{} is closed", what()),
            ));
        }
        let text = saved::encode(record, &what())?;
        let new = beside(&self.path, ".new");
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_data()?;
            std::fs::rename(&new, &self.path)?;
            // The rename itself is durable once the folder is.
            self.path
                .parent()
                .map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        };
        write().map_err(|e| {
            // What is there of it takes the room that others need.
            let _ = std::fs::remove_file(&new);
            Error::io(what(), e)
        })
    }

    /// Gives the file up, for another lighthouse to go on with; this one saves nothing more.
    pub(crate) fn close(&self) {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(lock) = lock {
            // Also where a child that was forked off in the wrong moment has a copy. If that cannot be, closing it is what there is.
            let _ = flock(&lock, FlockOperation::Unlock);
        }
    }
}

/// Reads the file; a missing one is no record. Errors: `Io`, or `Corrupt` if it is not ours.
fn load(path: &Path) -> Result<Option<Record>> {
    let what = || format!("state file {}", path.display());
    let file = match File::open(path) {
        Ok(f) => f,
        Err(e) if e.kind() == IoKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(what(), e)),
    };
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut text)
        .map_err(|e| Error::io(what(), e))?;
    saved::decode(&text, &what()).map(Some)
}

#[cfg(test)]
mod tests {
    use protocol::quorum::Eviction;

    use super::*;
    use ftcore::{Epoch, Step};

    fn record() -> Record {
        Record {
            quorum_id: Epoch(41),
            step: Step(7),
            lineage: Some("ab".into()),
            members: vec!["a:1".into(), "b:1".into()],
            departed: vec!["b:1".into()],
            left: vec!["b:1".into()],
            closes: true,
            evicted: vec![Eviction {
                replica_id: "c:1".into(),
                incarnation: "a process".into(),
                reason: "its host is repaired".into(),
            }],
        }
    }

    #[test]
    fn what_is_saved_is_loaded_and_damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let (file, none) = StateFile::open(&path).unwrap();
        assert_eq!(none, None);
        file.save(&record()).unwrap();
        drop(file);
        assert_eq!(StateFile::open(&path).unwrap().1, Some(record()));
        for damage in [
            "{\"quorum_id\": 4",
            "{\"quorum_id\": -4, \"members\": []}",
            "{\"quorum_id\": 4, \"step\": -1, \"members\": []}",
            "",
        ] {
            std::fs::write(&path, damage).unwrap();
            let error = StateFile::open(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{damage}");
        }
    }

    #[test]
    fn a_file_of_an_older_version_is_loaded_without_a_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        std::fs::write(&path, "{\"quorum_id\":41,\"members\":[\"a:1\"]}").unwrap();
        let expected = Record {
            quorum_id: Epoch(41),
            members: vec!["a:1".into()],
            ..Record::default()
        };
        assert_eq!(StateFile::open(&path).unwrap().1, Some(expected));
    }

    #[test]
    fn a_missing_folder_is_made_and_a_place_that_cannot_be_written_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("some/where/state");
        let (file, _) = StateFile::open(&path).unwrap();
        file.save(&record()).unwrap();
        let below_a_file = path.join("state");
        let error = StateFile::open(&below_a_file).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(
            error.to_string().contains(&below_a_file.display().to_string()),
            "{error}"
        );
        assert_eq!(
            StateFile::open(dir.path()).unwrap_err().kind(),
            ErrorKind::Io,
            "a folder"
        );
    }

    #[test]
    fn a_file_has_one_lighthouse_and_a_closed_one_saves_nothing_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let (first, _) = StateFile::open(&path).unwrap();
        let error = StateFile::open(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(
            error.to_string().contains("another lighthouse that is running"),
            "{error}"
        );
        // As a process has it that was forked off before the number was noted.
        let copy = |file: &StateFile| file.lock.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let _copy = copy(&first);
        first.close();
        let (second, _) = StateFile::open(&path).unwrap();
        assert_eq!(first.save(&record()).unwrap_err().kind(), ErrorKind::InvalidState);
        second.save(&record()).unwrap();
    }
}
