//! States on disk: the same safetensors bytes, sealed with a hash and replaced in one step.
//!
//! `save` writes beside the target, flushes to the disk and renames, so that a crash leaves the old file or the new
//! one, never a half. `load` reads in parts and believes a sealed file only if its hash fits.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{ErrorKind as IoKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ftcore::{Error, ErrorKind, Result};

use crate::seal::{self, Opened};
use crate::{StateDict, codec};

/// How names of files end that are not complete yet.
pub(crate) const TEMPORARY: &str = ".tmp";
/// So many such files of processes that were killed are passed over by one [`save`].
const MAX_LEFT: u32 = 1000;
/// The number in the name of the next one that this process makes.
static SERIAL: AtomicU64 = AtomicU64::new(0);

/// Writes `state` to `path` (a safetensors file), replacing what is there only once the new file is safe on disk.
///
/// The temporary file stands in the same folder and is removed on an error. `ErrorKind::Io` names the step, the path and, where
/// writing failed, how many bytes are needed and free; other errors as [`crate::encode`].
pub fn save(path: impl AsRef<Path>, state: &StateDict) -> Result<()> {
    save_with(path.as_ref(), state, BTreeMap::new()).map(|_| ())
}

/// [`save`] with entries of the format's own metadata. The size of the file in bytes.
pub(crate) fn save_with(path: &Path, state: &StateDict, mut own: BTreeMap<String, String>) -> Result<u64> {
    let name = path
        .file_name()
        .ok_or_else(|| Error::invalid(format!("{} names no file", path.display())))?;
    own.insert(seal::KEY.to_owned(), seal::BLANK.to_owned());
    let mut bytes = codec::encode_with(state, &own)?;
    seal::seal(&mut bytes)?;
    let (temporary, file) = create_beside(path, name, bytes.len())?;
    let written = write_and_rename(file, &temporary, path, &bytes);
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    // The rename itself is durable only once the folder is.
    sync_folder(&folder_of(path))?;
    Ok(bytes.len() as u64)
}

/// A new file in the folder of `path`, whose name no other thread or process has that may save to this folder at once.
fn create_beside(path: &Path, name: &OsStr, bytes: usize) -> Result<(PathBuf, File)> {
    let mut tries = 0;
    loop {
        let mut temporary = OsString::from(".");
        temporary.push(name);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        temporary.push(format!(".{}-{serial}{TEMPORARY}", std::process::id()));
        let temporary = path.with_file_name(temporary);
        match File::create_new(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            // A process that was killed left it, and had this id: in a container each has. It may also be another container's that writes it now,
            // so it stays.
            Err(e) if e.kind() == IoKind::AlreadyExists && tries < MAX_LEFT => tries += 1,
            Err(e) => return Err(no_room("creating a file beside", path, &temporary, bytes)(e)),
        }
    }
}

/// Asked for before the temporary file is removed: what is free while it is there is what was missing.
fn no_room(what: &str, path: &Path, temporary: &Path, bytes: usize) -> impl FnOnce(std::io::Error) -> Error {
    move |e| {
        let text = format!(
            "{what} {}: {e} ({bytes} bytes needed, {})",
            path.display(),
            room_at(temporary)
        );
        Error::new(ErrorKind::Io, text).with_source(e)
    }
}

fn write_and_rename(mut file: File, temporary: &Path, path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |what| no_room(what, path, temporary, bytes.len());
    file.write_all(bytes).map_err(failed("writing"))?;
    file.sync_all().map_err(failed("flushing"))?;
    drop(file);
    fs::rename(temporary, path).map_err(|e| Error::io(format!("renaming to {}", path.display()), e))
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
    let read = || decoded(Opened::new(path)?).map(|(state, _)| state);
    read().map_err(|e| naming(path, e))
}

/// [`load`] of a file that must be sealed, with its own metadata beside the state.
pub(crate) fn load_sealed(path: &Path) -> Result<(StateDict, BTreeMap<String, String>)> {
    let read = || decoded(open_sealed(path)?);
    read().map_err(|e| naming(path, e))
}

/// The state in a file, and its own metadata. There is memory for the tensors only once their sizes are those of the file.
fn decoded(opened: Opened) -> Result<(StateDict, BTreeMap<String, String>)> {
    let header = codec::header_before(opened.header(), opened.data_bytes())?;
    let mut data = codec::room_for(header.data_len())?;
    opened.read(&mut |part| data.extend_from_slice(part))?;
    codec::state_of(&header, &data.into())
}

/// All metadata of a sealed file whose every byte was checked; it is not kept in memory.
pub(crate) fn check_sealed(path: &Path) -> Result<BTreeMap<String, String>> {
    let read = || {
        let opened = open_sealed(path)?;
        let metadata = codec::metadata_of(opened.header())?;
        opened.read(&mut |_| ())?;
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
    fn what_killed_processes_with_this_id_left_is_passed_over_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // More than the tests beside this one take meanwhile.
        let next = SERIAL.load(Ordering::Relaxed);
        for serial in next..next + 500 {
            let name = format!(".s.{}-{serial}{TEMPORARY}", std::process::id());
            fs::write(dir.path().join(name), "half").unwrap();
        }
        save(&path, &state(1.0)).unwrap();
        assert_eq!(bits(&load(&path).unwrap()), bits(&state(1.0)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 501);
    }

    #[test]
    fn a_file_that_is_larger_than_its_header_says_is_refused_before_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        save(&path, &state(1.0)).unwrap();
        // More than memory has, and nothing of it on the disk.
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        for e in [load(&path).unwrap_err(), load_sealed(&path).unwrap_err()] {
            assert_eq!(e.kind(), ErrorKind::Corrupt);
            assert!(e.message().contains("describes 8 bytes of tensors"), "{e}");
        }
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
