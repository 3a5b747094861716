//! Which checkpoint a replica goes on from when the whole job was lost.
//!
//! A kill of everything may leave one replica's newest checkpoint a step behind another's, or damaged. Replicas at different
//! steps would heal, which is right but not what the undisturbed run would have computed: between two outer steps each
//! replica has parameters of its own. So where the folder is shared, each looks for the newest step that all others have
//! too, whole and of the same history; they all come to the same answer. Where it is not, or no such step is left, a replica
//! takes its own newest, and a replica that is behind heals.

use std::path::{Path, PathBuf};

use ftcore::{Error, ErrorKind, Result, Step};

use crate::series::{LINEAGE_KEY, STEP_KEY, VERSION_KEY, file, steps};
use crate::{FORMAT_VERSION, StateDict, disk};

/// A checkpoint that is whole.
#[derive(Debug)]
pub struct Found {
    /// The step at which it goes on.
    pub step: Step,
    /// The history that led to it.
    pub lineage: String,
    /// The state.
    pub state: StateDict,
    /// Its file.
    pub path: PathBuf,
}

/// What [`newest`] saw.
#[derive(Debug)]
pub struct Search {
    /// The checkpoint to go on from.
    pub found: Option<Found>,
    /// This replica's files that are not whole, and why. Each error names its path.
    pub damaged: Vec<Error>,
}

/// The checkpoint of `replica` under `root` to go on from; `others` are the replicas that shall go on with it, as far as
/// their folders are under `root` too. Reads each file that is looked at once; those of others are not kept in memory.
///
/// Errors: `Io` if the folder cannot be read. Files that cannot are not errors here, but listed.
pub fn newest(root: &Path, replica: u32, others: impl IntoIterator<Item = u32>) -> Result<Search> {
    let mut damaged = Vec::new();
    let own = steps(root, replica)?;
    let mut others = others.into_iter().filter(|r| *r != replica).collect::<Vec<_>>();
    // A replica that has none at all heals from the others wherever they go on.
    others.retain(|r| steps(root, *r).is_ok_and(|s| !s.is_empty()));
    let mut first: Option<Step> = None;
    for &step in own.iter().rev() {
        let path = file(root, replica, step);
        match disk::check_sealed(&path).and_then(|metadata| check(&path, step, &metadata).map(|()| metadata))
        {
            Err(e) => damaged.push(e),
            Ok(metadata) => {
                first = first.or(Some(step));
                let lineage = metadata.get(LINEAGE_KEY);
                let is_common = others.iter().all(|&r| {
                    let path = file(root, r, step);
                    disk::check_sealed(&path).is_ok_and(|theirs| {
                        check(&path, step, &theirs).is_ok() && theirs.get(LINEAGE_KEY) == lineage
                    })
                });
                if is_common {
                    first = Some(step);
                    break;
                }
            }
        }
    }
    let found = first
        .map(|step| read(file(root, replica, step), step))
        .transpose()?;
    Ok(Search { found, damaged })
}

fn read(path: PathBuf, step: Step) -> Result<Found> {
    let (state, own) = disk::load_sealed(&path)?;
    check(&path, step, &own)?;
    let lineage = own.get(LINEAGE_KEY).cloned().unwrap_or_default();
    Ok(Found {
        step,
        lineage,
        state,
        path,
    })
}

/// A renamed file, or one of a format to come, is not taken for what its name says.
fn check(path: &Path, step: Step, metadata: &std::collections::BTreeMap<String, String>) -> Result<()> {
    for (key, expected, kind) in [
        (VERSION_KEY, FORMAT_VERSION.to_string(), ErrorKind::Unsupported),
        (STEP_KEY, step.to_string(), ErrorKind::Corrupt),
    ] {
        let found = metadata.get(key).map_or("missing", String::as_str);
        if found != expected {
            let text = format!("{}: {key} is {found}, not {expected}", path.display());
            return Err(Error::new(kind, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Series;
    use std::fs;
    use std::time::Duration;

    fn write(root: &Path, replica: u32, step: Step, lineage: &str) {
        let mut s = StateDict::new();
        s.insert_f32("w", &[2], &[replica as f32, step.0 as f32]).unwrap();
        let deadline = ftcore::deadline_in(Duration::from_secs(10));
        let series = Series::open(root, replica, 9, deadline).unwrap();
        series.save(step, lineage, &s).unwrap();
    }

    fn step(root: &Path, replica: u32) -> Option<i64> {
        newest(root, replica, 0..3).unwrap().found.map(|f| f.step.0)
    }

    #[test]
    fn all_go_on_from_the_newest_step_that_all_have_whole() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(step(root, 0), None);
        for (replica, steps) in [(0, [4, 8, 12]), (1, [4, 8, 12]), (2, [4, 8, 8])] {
            for s in steps {
                write(root, replica, Step(s), &format!("to {s}"));
            }
        }
        assert_eq!([0, 1, 2].map(|r| step(root, r)), [Some(8); 3]);
        let found = newest(root, 1, 0..3).unwrap().found.unwrap();
        assert_eq!(
            (found.lineage.as_str(), found.path),
            ("to 8", file(root, 1, Step(8)))
        );
        assert_eq!(found.state.get_f32("w").unwrap(), [1.0, 8.0]);

        // A bit of replica 2's file flips: the one before counts, for all of them, and only replica 2 has to say so.
        let path = file(root, 2, Step(8));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 4;
        fs::write(&path, bytes).unwrap();
        assert_eq!([0, 1, 2].map(|r| step(root, r)), [Some(4); 3]);
        assert_eq!(newest(root, 0, 0..3).unwrap().damaged.len(), 0);
        let damaged = newest(root, 2, 0..3).unwrap().damaged;
        assert_eq!(damaged.len(), 1);
        assert!(
            damaged[0].to_string().contains(path.to_str().unwrap()),
            "{damaged:?}"
        );
    }

    #[test]
    fn without_a_common_step_each_takes_its_own_newest_whole_one() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        // Replica 1 was gone for long; replica 2 has none.
        for (replica, s) in [(0, 100), (0, 104), (1, 4)] {
            write(root, replica, Step(s), "");
        }
        assert_eq!([0, 1, 2].map(|r| step(root, r)), [Some(104), Some(4), None]);
        fs::write(file(root, 0, Step(104)), "half").unwrap();
        assert_eq!(step(root, 0), Some(100));
    }

    #[test]
    fn equal_steps_of_different_histories_are_not_common() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for (replica, s, lineage) in [(0, 4, "a"), (1, 4, "a"), (0, 8, "b"), (1, 8, "c")] {
            write(root, replica, Step(s), lineage);
        }
        assert_eq!([0, 1].map(|r| step(root, r)), [Some(4); 2]);
    }

    #[test]
    fn a_file_under_another_steps_name_is_damage() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, 0, Step(4), "");
        fs::rename(file(root, 0, Step(4)), file(root, 0, Step(9))).unwrap();
        let search = newest(root, 0, [0]).unwrap();
        assert!(search.found.is_none());
        let text = search.damaged[0].to_string();
        assert!(text.contains("oxccl.step is 4, not 9"), "{text}");
    }
}
