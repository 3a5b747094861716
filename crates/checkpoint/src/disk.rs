//! States on disk: the same safetensors bytes, replaced in one step.
//!
//! `save` writes beside the target, flushes to the disk and renames, so that a crash leaves the old file or the new
//! one, never a half.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ftcore::{Error, ErrorKind, Result};

use crate::{StateDict, codec};

/// Writes `state` to `path` (a safetensors file), replacing what is there only once the new file is safe on disk.
///
/// The temporary file stands in the same folder and is removed on an error. `ErrorKind::Io` names the step and the
/// path; other errors as [`crate::encode`].
pub fn save(path: impl AsRef<Path>, state: &StateDict) -> Result<()> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let path = path.as_ref();
    let name = path
        .file_name()
        .ok_or_else(|| Error::invalid(format!("{} names no file", path.display())))?;
    let bytes = codec::encode(state)?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    // Unique among the threads and processes that may save to this folder at once.
    temporary.push(format!(
        ".{}-{}.tmp",
        std::process::id(),
        SERIAL.fetch_add(1, Ordering::Relaxed)
    ));
    let temporary = path.with_file_name(temporary);
    let written = write_and_rename(&temporary, path, &bytes);
    if written.is_err() {
        // The first error is the one to report; the file may not even exist.
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn write_and_rename(temporary: &Path, path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |what: &str, at: &Path| {
        let what = format!("{what} {}", at.display());
        move |e| Error::io(what, e)
    };
    let mut file = File::create_new(temporary).map_err(failed("creating", temporary))?;
    file.write_all(bytes).map_err(failed("writing", temporary))?;
    file.sync_all().map_err(failed("flushing", temporary))?;
    drop(file);
    fs::rename(temporary, path).map_err(failed("renaming to", path))?;
    // The rename itself is durable only once the folder is.
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .map_or(PathBuf::from("."), Path::to_owned);
    let folder_file = File::open(&folder).map_err(failed("opening", &folder))?;
    folder_file.sync_all().map_err(failed("flushing", &folder))
}

/// Reads a safetensors file. `NotFound` or `Io` naming the path, `Corrupt` or `Unsupported` as [`crate::decode`].
pub fn load(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    let failed = |e: std::io::Error| {
        if e.kind() == std::io::ErrorKind::NotFound {
            Error::new(ErrorKind::NotFound, format!("no file {}", path.display())).with_source(e)
        } else {
            Error::io(format!("reading {}", path.display()), e)
        }
    };
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|mut f| f.read_to_end(&mut bytes))
        .map_err(failed)?;
    codec::decode(&bytes)
        .map_err(|e| Error::new(e.kind(), format!("{}: {}", path.display(), e.message())).with_source(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(x: f32) -> StateDict {
        let mut s = StateDict::new();
        s.insert_f32("w", &[2], &[x, f32::NAN]).unwrap();
        s.set_metadata("step", "12");
        s
    }

    fn bits(s: &StateDict) -> Vec<u8> {
        s.get("w").unwrap().data.clone()
    }

    #[test]
    fn what_was_saved_last_is_loaded_and_nothing_else_is_left_in_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.safetensors");
        save(&path, &state(1.0)).unwrap();
        save(&path, &state(2.0)).unwrap();
        let back = load(&path).unwrap();
        assert_eq!(bits(&back), bits(&state(2.0)));
        assert_eq!(back.metadata()["step"], "12");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_save_keeps_the_old_file_and_removes_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
        let e = save(&path, &state(1.0)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Io);
        assert!(e.message().contains("taken"), "{e}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(save(dir.path().join("no/such/folder"), &state(1.0)).is_err());
    }

    #[test]
    fn missing_and_damaged_files_are_told_apart_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let e = load(&path).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        save(&path, &state(1.0)).unwrap();
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let e = load(&path).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(e.message().contains(path.to_str().unwrap()), "{e}");
    }
}
