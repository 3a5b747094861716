//! States on disk: the same safetensors bytes, sealed with a hash and replaced in one step.
//!
//! `save` writes beside the target, flushes to the disk and renames, so that a crash leaves the old file or the new
//! one, never a half. `load` reads in parts and believes a sealed file only if its hash fits.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ftcore::{Error, Result};

use crate::seal::{self, Opened};
use crate::{StateDict, codec};

/// How names of files end that are not complete yet.
pub(crate) const TEMPORARY: &str = ".tmp";

/// Writes `state` to `path` (a safetensors file), replacing what is there only once the new file is safe on disk.
///
/// The temporary file stands in the same folder and is removed on an error. `ErrorKind::Io` names the step, the path and, where
/// writing failed, how many bytes are needed and free; other errors as [`crate::encode`].
pub fn save(path: impl AsRef<Path>, state: &StateDict) -> Result<()> {
    save_with(path.as_ref(), state, BTreeMap::new()).map(|_| ())
}

/// [`save`] with entries of the format's own metadata. The size of the file in bytes.
pub(crate) fn save_with(path: &Path, state: &StateDict, mut own: BTreeMap<String, String>) -> Result<u64> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let name = path
        .file_name()
        .ok_or_else(|| Error::invalid(format!("{} names no file", path.display())))?;
    own.insert(seal::KEY.to_owned(), seal::BLANK.to_owned());
    let mut bytes = codec::encode_with(state, &own)?;
    seal::seal(&mut bytes)?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    // Unique among the threads and processes that may save to this folder at once.
    temporary.push(format!(
        ".{}-{}{TEMPORARY}",
        std::process::id(),
        SERIAL.fetch_add(1, Ordering::Relaxed)
    ));
    let temporary = path.with_file_name(temporary);
    let written = write_and_rename(&temporary, path, &bytes);
    if written.is_err() {
        // The first error is the one to report; the file may not even exist.
        let _ = fs::remove_file(&temporary);
    }
    written.map(|()| bytes.len() as u64)
}

fn write_and_rename(temporary: &Path, path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |what: &str, at: &Path| {
        let what = format!("{what} {}", at.display());
        move |e| Error::io(what, e)
    };
    // Asked for before the temporary file is removed: what is free while it is there is what was missing.
    let no_room = |what: &str| {
        let what = format!("{what} {}", path.display());
        move |e: std::io::Error| {
            let text = format!(
                "{what}: {e} ({} bytes needed, {})",
                bytes.len(),
                room_at(temporary)
            );
            Error::new(ftcore::ErrorKind::Io, text).with_source(e)
        }
    };
    let mut file = File::create_new(temporary).map_err(no_room("creating a file beside"))?;
    file.write_all(bytes).map_err(no_room("writing"))?;
    file.sync_all().map_err(no_room("flushing"))?;
    drop(file);
    fs::rename(temporary, path).map_err(failed("renaming to", path))?;
    // The rename itself is durable only once the folder is.
    sync_folder(&folder_of(path))
}

/// The folder in which `path` stands.
fn folder_of(path: &Path) -> PathBuf {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .map_or(PathBuf::from("."), Path::to_owned)
}

/// Makes what was created, renamed or removed in `folder` durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("flushing the folder {}", folder.display()), e);
    File::open(folder).and_then(|f| f.sync_all()).map_err(failed)
}

/// What there is room for where `path` is being written, in words.
fn room_at(path: &Path) -> String {
    let free = rustix::fs::statvfs(folder_of(path)).map_or_else(
        |e| format!("free space unknown: {e}"),
        |s| {
            // What the unfinished file holds is free again in a moment.
            let held = fs::metadata(path).map_or(0, |m| m.len());
            format!(
                "{} free",
                s.f_bavail.saturating_mul(s.f_frsize).saturating_add(held)
            )
        },
    );
    match rustix::process::getrlimit(rustix::process::Resource::Fsize).current {
        Some(limit) => format!("{free}, files limited to {limit}"),
        None => free,
    }
}

/// Reads a safetensors file, ours or of any other writer. `NotFound` or `Io` naming the path, `Corrupt` or `Unsupported` as
/// [`crate::decode`]; `Corrupt` too if a sealed file (each that [`save`] wrote) is not as it was written.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    let read = || {
        let mut parts = Vec::new();
        Opened::new(path)?.read(|part| parts.push(part))?;
        codec::decode_parts(parts).map(|(state, _)| state)
    };
    read().map_err(|e| naming(path, e))
}

/// [`load`] of a file that must be sealed, with its own metadata beside the state.
pub(crate) fn load_sealed(path: &Path) -> Result<(StateDict, BTreeMap<String, String>)> {
    let read = || {
        let mut parts = Vec::new();
        open_sealed(path)?.read(|part| parts.push(part))?;
        codec::decode_parts(parts)
    };
    read().map_err(|e| naming(path, e))
}

/// All metadata of a sealed file whose every byte was checked; it is not kept in memory.
pub(crate) fn check_sealed(path: &Path) -> Result<BTreeMap<String, String>> {
    let read = || {
        let opened = open_sealed(path)?;
        let metadata = codec::metadata_of(opened.header())?;
        opened.read(drop)?;
        Ok(metadata)
    };
    read().map_err(|e| naming(path, e))
}

/// All metadata of a file; nothing but the header is read, and its seal is not checked.
pub(crate) fn peek(path: &Path) -> Result<BTreeMap<String, String>> {
    Opened::new(path)
        .and_then(|opened| codec::metadata_of(opened.header()))
        .map_err(|e| naming(path, e))
}

fn open_sealed(path: &Path) -> Result<Opened> {
    let opened = Opened::new(path)?;
    if opened.is_sealed() {
        Ok(opened)
    } else {
        Err(codec::corrupt("its header has no seal"))
    }
}

fn naming(path: &Path, e: Error) -> Error {
    Error::new(e.kind(), format!("{}: {}", path.display(), e.message())).with_source(e)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::ErrorKind;

    fn state(x: f32) -> StateDict {
        let mut s = StateDict::new();
        s.insert_f32("w", &[2], &[x, f32::NAN]).unwrap();
        s.set_metadata("step", "12");
        s
    }

    fn bits(s: &StateDict) -> Vec<u8> {
        s.get("w").unwrap().data.to_vec()
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
    #[test]
    fn a_flipped_bit_anywhere_in_a_saved_file_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        save(&path, &state(1.0)).unwrap();
        let whole = fs::read(&path).unwrap();
        for byte in 0..whole.len() {
            let mut bad = whole.clone();
            bad[byte] ^= 1 << (byte % 8);
            fs::write(&path, &bad).unwrap();
            assert!(load_sealed(&path).is_err(), "byte {byte}");
            assert!(check_sealed(&path).is_err(), "byte {byte}");
        }
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(load(&path).is_err(), "{length} bytes");
            assert!(check_sealed(&path).is_err(), "{length} bytes");
        }
        fs::write(&path, [whole.as_slice(), b"x"].concat()).unwrap();
        assert!(load(&path).is_err() && check_sealed(&path).is_err());
    }

    #[test]
    fn a_file_of_another_writer_is_loaded_but_counts_as_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("other");
        fs::write(&path, codec::encode(&state(1.0)).unwrap()).unwrap();
        assert_eq!(bits(&load(&path).unwrap()), bits(&state(1.0)));
        assert_eq!(load_sealed(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_tensor_named_like_the_seal_is_not_taken_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut state = state(1.0);
        let name = format!("\"{}\":\"{}\"", seal::KEY, seal::BLANK);
        state.insert_f32(name.clone(), &[1], &[3.0]).unwrap();
        state.set_metadata(name.clone(), name.clone());
        save(&path, &state).unwrap();
        assert_eq!(load_sealed(&path).unwrap().0.get_f32(&name).unwrap(), [3.0]);
    }
}
