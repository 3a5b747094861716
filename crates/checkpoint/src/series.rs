//! The checkpoints of one replica: a folder with one sealed file per step, of which the last few are kept.
//!
//! `ROOT/replica-R/step-S.safetensors` is the state in which step S begins. A replica writes only its own: its parameters
//! between two outer steps, its optimizer's moments and what it owes differ from the others', and no replica can know that
//! another one has a disk at all. Only one process has a series open; it removes what an earlier incarnation left unfinished.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ftcore::forked::Parents;
use ftcore::{Error, ErrorKind, Result, Step, time_left};
use rustix::fs::FlockOperation;

use crate::disk::{self, TEMPORARY, save_with, sync_folder};
use crate::{FORMAT_VERSION, StateDict};

/// The metadata entry with the step at which a checkpoint goes on.
pub const STEP_KEY: &str = "oxccl.step";
/// The metadata entry with the lineage of the state.
pub const LINEAGE_KEY: &str = "oxccl.lineage";
pub(crate) const VERSION_KEY: &str = "oxccl.version";

const FIRST: &str = "step-";
const LAST: &str = ".safetensors";
/// Held by the process that writes the series, until it ends in whatever way.
const LOCK: &str = ".lock";

/// The folder of a replica's checkpoints.
pub(crate) fn folder(root: &Path, replica: u32) -> PathBuf {
    root.join(format!("replica-{replica}"))
}

/// The file of a replica's checkpoint of `step`.
pub(crate) fn file(root: &Path, replica: u32, step: Step) -> PathBuf {
    folder(root, replica).join(format!("{FIRST}{step:012}{LAST}"))
}

/// The steps of the checkpoints of `replica` under `root`, in rising order; none if there is no such folder. Whether they are
/// whole is not looked at. Errors: `Io`.
pub fn steps(root: &Path, replica: u32) -> Result<Vec<Step>> {
    let folder = folder(root, replica);
    let failed = |e| Error::io(format!("reading the folder {}", folder.display()), e);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let number = name
            .to_str()
            .and_then(|n| n.strip_prefix(FIRST)?.strip_suffix(LAST))
            .filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
        steps.extend(number.and_then(|n| n.parse().ok()).map(Step));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The metadata of a checkpoint, from its header alone: quick, and without proof that the file is whole. `NotFound`, `Io` or `Corrupt`.
pub fn peek(root: &Path, replica: u32, step: Step) -> Result<BTreeMap<String, String>> {
    disk::peek(&file(root, replica, step))
}

/// A checkpoint that is on disk now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The step at which it goes on.
    pub step: Step,
    /// Its file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Series {
    root: PathBuf,
    replica: u32,
    keep: usize,
    /// Children get no copy: the lock is the open file's, and would live as long as they do.
    _lock: Parents<File>,
}

impl Series {
    /// Opens (or makes) the series of `replica` under `root`, of which the newest `keep` (at least 1) are to stay.
    ///
    /// Errors: `Conflict` if another process still has it open at `deadline`; `Io`; `InvalidArgument` for `keep` 0.
    pub fn open(root: impl Into<PathBuf>, replica: u32, keep: usize, deadline: Instant) -> Result<Self> {
        let root = root.into();
        if keep == 0 {
            return Err(Error::invalid("at least one checkpoint must be kept"));
        }
        let folder = folder(&root, replica);
        let failed = |what: &str, e| Error::io(format!("{what} {}", folder.display()), e);
        fs::create_dir_all(&folder).map_err(|e| failed("making the folder", e))?;
        sync_folder(&root)?;
        let lock = File::create(folder.join(LOCK)).map_err(|e| failed("making the lock file in", e))?;
        let lock = Parents::new(lock);
        while let Err(e) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            match e {
                rustix::io::Errno::WOULDBLOCK if !time_left(deadline).is_zero() => {
                    // The incarnation before this one may be dying still; nothing tells when its lock goes.
                    std::thread::park_timeout(Duration::from_millis(5));
                }
                rustix::io::Errno::WOULDBLOCK => {
                    let text = format!(
                        "the checkpoints in {} are being written by another process: end it, or choose another folder",
                        folder.display()
                    );
                    return Err(Error::new(ErrorKind::Conflict, text));
                }
                // Some network file systems have no locks; then the user's care is what there is.
                rustix::io::Errno::NOLCK | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS => {
                    tracing::warn!(folder = %folder.display(), "the file system has no locks: nothing keeps two runs apart");
                    break;
                }
                e => return Err(failed("locking", e.into())),
            }
        }
        let this = Self {
            root,
            replica,
            keep,
            _lock: lock,
        };
        this.remove_unfinished(&folder);
        Ok(this)
    }

    /// What a killed process left: no other process writes here.
    fn remove_unfinished(&self, folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_ours = name.to_str().is_some_and(|n| {
                n.strip_prefix('.').is_some_and(|n| n.starts_with(FIRST)) && n.ends_with(TEMPORARY)
            });
            if is_ours && let Err(error) = fs::remove_file(entry.path()) {
                tracing::warn!(file = %entry.path().display(), %error, "an unfinished checkpoint cannot be removed");
            }
        }
    }

    /// The folder under which the replicas' folders stand.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Writes the checkpoint of `step` (0 or more) and then removes what is no longer kept: all but the newest, and those of later
    /// steps, which a run left that went on from an earlier one.
    ///
    /// Errors: as [`crate::save`]; all older checkpoints are there then.
    pub fn save(&self, step: Step, lineage: &str, state: &StateDict) -> Result<Written> {
        if step < Step(0) {
            return Err(Error::invalid(format!("a checkpoint of step {step}")));
        }
        let path = file(&self.root, self.replica, step);
        let own = BTreeMap::from([
            (STEP_KEY.to_owned(), step.to_string()),
            (LINEAGE_KEY.to_owned(), lineage.to_owned()),
            (VERSION_KEY.to_owned(), FORMAT_VERSION.to_string()),
        ]);
        let bytes = save_with(&path, state, own)?;
        self.prune(step);
        Ok(Written { step, path, bytes })
    }

    fn prune(&self, newest: Step) {
        let all = steps(&self.root, self.replica).unwrap_or_default();
        let is_later = all.iter().filter(|s| **s > newest);
        let is_old = all.iter().rev().filter(|s| **s <= newest).skip(self.keep);
        for step in is_later.chain(is_old) {
            let path = file(&self.root, self.replica, *step);
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(file = %path.display(), %error, "an old checkpoint cannot be removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::deadline_in;

    fn state(x: f32) -> StateDict {
        let mut s = StateDict::new();
        s.insert_f32("w", &[1], &[x]).unwrap();
        s
    }

    fn open(root: &Path) -> Series {
        Series::open(root, 1, 2, deadline_in(Duration::from_secs(10))).unwrap()
    }

    #[test]
    fn the_last_few_are_kept_and_those_of_an_abandoned_future_go() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("made/by/open");
        assert_eq!(steps(&root, 1).unwrap(), []);
        let series = open(&root);
        for step in [5, 10, 15, 20] {
            series.save(Step(step), "a", &state(step as f32)).unwrap();
        }
        assert_eq!(steps(&root, 1).unwrap(), [15, 20].map(Step));
        // The run went on from 15 again, and writes at other steps now.
        series.save(Step(18), "b", &state(18.0)).unwrap();
        assert_eq!(steps(&root, 1).unwrap(), [15, 18].map(Step));
        assert_eq!(peek(&root, 1, Step(18)).unwrap()[LINEAGE_KEY], "b");
        assert_eq!(peek(&root, 1, Step(20)).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(series.save(Step(-1), "", &state(0.0)).is_err());
    }

    #[test]
    fn a_series_has_one_writer_who_removes_what_a_dead_one_left_unfinished() {
        let dir = tempfile::tempdir().unwrap();
        let series = open(dir.path());
        series.save(Step(3), "", &state(3.0)).unwrap();
        let e = Series::open(dir.path(), 1, 2, Instant::now()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        assert!(e.message().contains("replica-1"), "{e}");
        // Another replica's is its own.
        Series::open(dir.path(), 2, 2, Instant::now()).unwrap();
        let left = folder(dir.path(), 1).join(".step-000000000004.safetensors.77-0.tmp");
        fs::write(&left, "half").unwrap();
        fs::write(folder(dir.path(), 1).join("notes.txt"), "the user's").unwrap();
        drop(series);
        drop(open(dir.path()));
        assert!(!left.exists());
        assert!(folder(dir.path(), 1).join("notes.txt").exists());
        assert_eq!(steps(dir.path(), 1).unwrap(), [3].map(Step));
    }

    #[test]
    fn keeping_none_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Series::open(dir.path(), 0, 0, Instant::now()).is_err());
    }
}
