//! A store in a file of a shared file system: processes of one host, or of several with a common directory.
//!
//! The file is a log: every write appends records under an exclusive `flock`; every reader applies what is new since
//! its last look to its own table. Waits poll (network file systems have no notification), but never past their
//! deadline (L41). Each record carries its lengths and two checksums: one of its header, so that a length is trusted only
//! if it was really written, and one of its body.
//!
//! A record that ends beyond the end of the file was cut off by the death of its writer: readers stop before it, the next
//! writer removes it. Anything else that does not fit is `ErrorKind::Corrupt`.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use super::keys::{MAX_KEY, MAX_VALUE};
use super::table::Table;
use super::tabled::Tabled;
use crate::forked::Born;
use crate::{Error, ErrorKind, Result, time_left};

const MAGIC: &[u8; 8] = b"OXKVLOG1";
/// kind u8, key length u32, value length u32, checksum of these u32; all little endian.
const HEADER: usize = 13;
const KIND_SET: u8 = 1;
const KIND_DELETE: u8 = 2;
const CHECKSUM: usize = 4;

const POLL: Duration = Duration::from_millis(5);
/// First pause after another process held the lock; doubled up to `POLL`.
const LOCK_PAUSE: Duration = Duration::from_micros(100);

/// A store in a file that several processes open.
///
/// The file must be new for each job: keys of an earlier job in the same file are seen by the next one. It is never
/// removed by this type, and it only grows. A process that was forked off opens it again, at the same path.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::store::{FileStore, Store};
/// use ftcore::deadline_in;
///
/// let path = std::env::temp_dir().join(format!("example-{}", std::process::id()));
/// let (store, soon) = (FileStore::open(&path)?, deadline_in(Duration::from_secs(5)));
/// store.set("key", b"value", soon)?;
/// assert_eq!(store.get("key", soon)?, b"value");
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct FileStore {
    path: PathBuf,
    log: Mutex<Log>,
}

/// The open file and the table that its first `offset` bytes make.
struct Log {
    file: File,
    table: Table,
    offset: u64,
    /// Who has opened the file: a lock that two processes have through one opening keeps neither out.
    born: Born,
}

#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

impl FileStore {
    /// Opens the file at `path`, creating it if it is absent; its directory must exist.
    ///
    /// # Errors
    /// `Io` if the file cannot be opened for reading and writing. Its contents are looked at by the first call.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let log = Log::open(&path, true).map_err(|fault| fault.into_error(&path))?;
        Ok(Self {
            path,
            log: Mutex::new(log),
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `f` on the table as the file has it now, under the lock. The mutex is held only while there is work to do:
    /// a call that waits for another process's lock does not hold up other threads.
    fn locked<T>(
        &self,
        op: &'static str,
        access: Access,
        deadline: Instant,
        f: impl FnOnce(&mut Log) -> Result<T, Fault>,
    ) -> Result<T> {
        let since = Instant::now();
        let operation = match access {
            Access::Read => FlockOperation::NonBlockingLockShared,
            Access::Write => FlockOperation::NonBlockingLockExclusive,
        };
        let mut pause = LOCK_PAUSE;
        let fail = |fault: Fault| fault.into_error(&self.path).with_op(op);
        loop {
            {
                let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                if log.born.is_elsewhere() {
                    *log = Log::open(&self.path, false).map_err(fail)?;
                }
                match rustix::fs::flock(&log.file, operation) {
                    Ok(()) => {
                        let out = log.refresh().and_then(|()| match access {
                            Access::Read => f(&mut log),
                            Access::Write => log.drop_torn_tail().and_then(|()| f(&mut log)),
                        });
                        let unlocked = rustix::fs::flock(&log.file, FlockOperation::Unlock);
                        let out = out.map_err(fail)?;
                        unlocked.map_err(|e| fail(Fault::Io("unlock", e.into())))?;
                        return Ok(out);
                    }
                    Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(fail(Fault::Io("lock", e.into()))),
                }
            }
            let left = time_left(deadline);
            if left.is_zero() {
                let text = format!(
                    "waited {:.1} s for the lock of the store file {}",
                    since.elapsed().as_secs_f64(),
                    self.path.display()
                );
                return Err(Error::timeout(text).with_op(op));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(POLL);
        }
    }

    /// True if the file is exactly as long as what was read of it: then there is nothing new and no lock is needed.
    fn is_current(&self) -> bool {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.offset > 0 && log.file.metadata().is_ok_and(|m| m.len() == log.offset)
    }
}

/// What can go wrong while the lock is held.
enum Fault {
    Io(&'static str, io::Error),
    Corrupt(String),
    Refused(Error),
}

impl Fault {
    fn into_error(self, path: &Path) -> Error {
        match self {
            Self::Io(what, e) => {
                Error::io(format_args!("cannot {what} the store file {}", path.display()), e)
            }
            Self::Corrupt(why) => Error::new(
                ErrorKind::Corrupt,
                format!("the store file {} is damaged: {why}", path.display()),
            ),
            Self::Refused(e) => e,
        }
    }
}

impl Log {
    /// Of the file at `path`, of which nothing was read yet.
    fn open(path: &Path, may_create: bool) -> Result<Self, Fault> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(may_create).truncate(false);
        Ok(Self {
            file: options.open(path).map_err(|e| Fault::Io("open", e))?,
            table: Table::default(),
            offset: 0,
            born: Born::here(),
        })
    }

    /// Applies what is new in the file, up to its end or to a torn record.
    fn refresh(&mut self) -> Result<(), Fault> {
        let reading = |e| Fault::Io("read", e);
        let len = self.file.metadata().map_err(reading)?.len();
        if len < self.offset {
            return Err(Fault::Corrupt(format!(
                "it has {len} bytes, but {} were read before: something cut or replaced it",
                self.offset
            )));
        }
        if len == self.offset {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(self.offset)).map_err(reading)?;
        let mut left = len - self.offset;
        let mut reader = BufReader::with_capacity(64 * 1024, (&self.file).take(left));
        if self.offset == 0 {
            let mut magic = vec![0; left.min(MAGIC.len() as u64) as usize];
            reader.read_exact(&mut magic).map_err(reading)?;
            if !MAGIC.starts_with(&magic) {
                return Err(Fault::Corrupt("it does not begin as a store file does".into()));
            }
            if magic.len() < MAGIC.len() {
                return Ok(());
            }
            self.offset = MAGIC.len() as u64;
            left -= MAGIC.len() as u64;
        }
        loop {
            let at = self.offset;
            let corrupt = |why: &str| Fault::Corrupt(format!("{why} in the record at byte {at}"));
            if left < HEADER as u64 {
                return Ok(());
            }
            let mut header = [0; HEADER];
            reader.read_exact(&mut header).map_err(reading)?;
            let [kind, k0, k1, k2, k3, v0, v1, v2, v3, sum @ ..] = header;
            let key_len = u32::from_le_bytes([k0, k1, k2, k3]) as usize;
            let value_len = u32::from_le_bytes([v0, v1, v2, v3]) as usize;
            if checksum(&[&[kind, k0, k1, k2, k3, v0, v1, v2, v3]]) != u32::from_le_bytes(sum) {
                return Err(corrupt("wrong header checksum"));
            }
            if key_len > MAX_KEY || value_len > MAX_VALUE || !matches!(kind, KIND_SET | KIND_DELETE) {
                return Err(corrupt("impossible kind or length"));
            }
            let total = (HEADER + key_len + value_len + CHECKSUM) as u64;
            if left < total {
                return Ok(());
            }
            // Both lengths were checked, and the file really is that long.
            let mut key = vec![0; key_len];
            let mut value = vec![0; value_len];
            let mut sum = [0; CHECKSUM];
            reader.read_exact(&mut key).map_err(reading)?;
            reader.read_exact(&mut value).map_err(reading)?;
            reader.read_exact(&mut sum).map_err(reading)?;
            if checksum(&[&key, &value]) != u32::from_le_bytes(sum) {
                return Err(corrupt("wrong body checksum"));
            }
            if kind == KIND_DELETE {
                self.table.remove(&key);
            } else {
                self.table
                    .set(&key, value)
                    .map_err(|refusal| Fault::Corrupt(refusal.describe(&key)))?;
            }
            self.offset += total;
            left -= total;
        }
    }

    /// Only under the exclusive lock: the process that was writing beyond `offset` is dead.
    fn drop_torn_tail(&mut self) -> Result<(), Fault> {
        let len = self.file.metadata().map_err(|e| Fault::Io("read", e))?.len();
        if len != self.offset {
            if len > MAGIC.len() as u64 {
                tracing::warn!(
                    bytes = len - self.offset,
                    "removing a record whose writer died from a store file"
                );
            }
            self.file
                .set_len(self.offset)
                .map_err(|e| Fault::Io("truncate", e))?;
        }
        Ok(())
    }

    /// Appends records that the table has already; if that fails, neither the file nor the table keeps them.
    fn append(&mut self, records: &[u8]) -> Result<(), Fault> {
        let start = self.offset;
        let written = self.file.seek(SeekFrom::Start(start)).and_then(|_| {
            if start == 0 {
                self.file.write_all(MAGIC)?;
            }
            self.file.write_all(records)
        });
        if let Err(e) = written {
            // A tail left here because even this fails is torn, and the next writer removes it.
            let _ = self.file.set_len(start);
            self.table = Table::default();
            self.offset = 0;
            return Err(Fault::Io("write", e));
        }
        let header = if start == 0 { MAGIC.len() } else { 0 };
        self.offset = start + (header + records.len()) as u64;
        Ok(())
    }
}

fn encode(out: &mut Vec<u8>, kind: u8, key: &[u8], value: &[u8]) {
    let start = out.len();
    out.push(kind);
    // Both fit: the arguments were checked.
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    let sum = checksum(&[out.get(start..).unwrap_or_default()]);
    out.extend_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(key);
    out.extend_from_slice(value);
    out.extend_from_slice(&checksum(&[key, value]).to_le_bytes());
}

/// FNV-1a, folded to 32 bits: finds damage, is no protection against intent (a party that can write the file may).
fn checksum(parts: &[&[u8]]) -> u32 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in parts.iter().flat_map(|part| part.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    (hash ^ (hash >> 32)) as u32
}

impl Tabled for FileStore {
    fn look<T>(&self, op: &'static str, deadline: Instant, look: impl FnOnce(&Table) -> T) -> Result<T> {
        self.locked(op, Access::Read, deadline, |log| Ok(look(&log.table)))
    }

    fn write<T>(
        &self,
        op: &'static str,
        keys: &[&str],
        deadline: Instant,
        write: impl FnOnce(&mut Table) -> Result<T>,
    ) -> Result<T> {
        self.locked(op, Access::Write, deadline, |log| {
            let value = |table: &Table, key: &str| table.get(key.as_bytes()).cloned();
            let before: Vec<_> = keys.iter().map(|key| value(&log.table, key)).collect();
            let out = write(&mut log.table).map_err(Fault::Refused)?;
            let mut records = Vec::new();
            for (key, before) in keys.iter().zip(before) {
                match value(&log.table, key) {
                    // Nothing for the log (a comparison that failed).
                    now if now == before => {}
                    Some(now) => encode(&mut records, KIND_SET, key.as_bytes(), &now),
                    None => encode(&mut records, KIND_DELETE, key.as_bytes(), &[]),
                }
            }
            if !records.is_empty() {
                log.append(&records)?;
            }
            Ok(out)
        })
    }

    /// By polling the file.
    fn block<T>(
        &self,
        op: &'static str,
        deadline: Instant,
        mut ready: impl FnMut(&Table) -> Option<T>,
        late: impl FnOnce(&Table) -> Error,
    ) -> Result<T> {
        loop {
            let found = if self.is_current() {
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                ready(&log.table)
            } else {
                self.locked(op, Access::Read, deadline, |log| Ok(ready(&log.table)))?
            };
            if let Some(out) = found {
                return Ok(out);
            }
            let left = time_left(deadline);
            if left.is_zero() {
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                return Err(late(&log.table));
            }
            thread::sleep(POLL.min(left));
        }
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Store, deadline_in};

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(20))
    }

    fn with_two_keys() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let store = FileStore::open(&path).unwrap();
        store.set("a", b"1", soon()).unwrap();
        store.set("b", b"22", soon()).unwrap();
        (dir, path)
    }

    #[test]
    fn a_second_handle_sees_what_the_first_wrote() {
        let (_dir, path) = with_two_keys();
        let other = FileStore::open(&path).unwrap();
        assert_eq!(other.get("b", soon()).unwrap(), b"22");
        assert_eq!(other.list(soon()).unwrap(), ["a", "b"]);
    }

    #[test]
    fn every_single_damaged_byte_is_reported_as_corrupt_naming_the_file() {
        let (_dir, path) = with_two_keys();
        let good = std::fs::read(&path).unwrap();
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 0x20;
            std::fs::write(&path, &bad).unwrap();
            let e = FileStore::open(&path).unwrap().num_keys(soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt, "byte {i}: {e}");
            assert!(e.to_string().contains("store"), "{e}");
        }
    }

    #[test]
    fn a_record_cut_off_anywhere_is_ignored_by_readers_and_removed_by_the_next_writer() {
        let (_dir, path) = with_two_keys();
        let good = std::fs::read(&path).unwrap();
        let first = MAGIC.len() + HEADER + 1 + 1 + CHECKSUM;
        for cut in 0..good.len() {
            std::fs::write(&path, &good[..cut]).unwrap();
            let kept = i64::from(cut >= first);
            let store = FileStore::open(&path).unwrap();
            assert_eq!(store.num_keys(soon()).unwrap(), kept, "cut at {cut}");
            store.set("c", b"3", soon()).unwrap();
            let other = FileStore::open(&path).unwrap();
            assert_eq!(other.num_keys(soon()).unwrap(), kept + 1, "cut at {cut}");
        }
    }

    #[test]
    fn a_file_that_shrank_under_the_reader_is_corrupt() {
        let (_dir, path) = with_two_keys();
        let store = FileStore::open(&path).unwrap();
        assert_eq!(store.num_keys(soon()).unwrap(), 2);
        OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(10)
            .unwrap();
        assert_eq!(store.num_keys(soon()).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_lock_held_elsewhere_is_waited_for_until_the_deadline_only() {
        let (_dir, path) = with_two_keys();
        let holder = OpenOptions::new().read(true).open(&path).unwrap();
        rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
        let store = FileStore::open(&path).unwrap();
        let start = Instant::now();
        let e = store
            .set("c", b"3", deadline_in(Duration::from_millis(200)))
            .unwrap_err();
        let took = start.elapsed();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        assert!(
            took >= Duration::from_millis(200) && took < Duration::from_secs(5),
            "{took:?}"
        );
        rustix::fs::flock(&holder, FlockOperation::Unlock).unwrap();
        store.set("c", b"3", soon()).unwrap();
    }

    #[test]
    fn a_forked_child_is_kept_out_by_the_lock_of_its_parent() {
        let (_dir, path) = with_two_keys();
        let child = FileStore::open(&path).unwrap();
        assert_eq!(child.num_keys(soon()).unwrap(), 2);
        // The parent's, which the child has inherited.
        let parent = {
            let mut log = child.log.lock().unwrap();
            log.born = Born::in_parent();
            log.file.try_clone().unwrap()
        };
        rustix::fs::flock(&parent, FlockOperation::LockExclusive).unwrap();
        let e = child
            .set("c", b"3", deadline_in(Duration::from_millis(50)))
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        rustix::fs::flock(&parent, FlockOperation::Unlock).unwrap();
        child.set("c", b"3", soon()).unwrap();
        assert_eq!(child.list(soon()).unwrap(), ["a", "b", "c"]);
    }

    #[test]
    fn a_failed_comparison_writes_nothing_to_the_file() {
        let (_dir, path) = with_two_keys();
        let before = std::fs::metadata(&path).unwrap().len();
        let store = FileStore::open(&path).unwrap();
        assert_eq!(store.compare_set("a", b"no", b"new", soon()).unwrap(), b"1");
        assert!(!store.delete("absent", soon()).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), before);
    }
}
