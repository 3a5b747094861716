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

use super::contract::Store;
use super::keys::{self, MAX_KEY, MAX_VALUE};
use super::table::{Refusal, Table, leading_number};
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
/// removed by this type, and it only grows.
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
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| Error::io(format_args!("cannot open the store file {}", path.display()), e))?;
        Ok(Self {
            path,
            log: Mutex::new(Log {
                file,
                table: Table::default(),
                offset: 0,
            }),
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

    /// Polls the file until `ready` returns something; at the deadline, gives `late` the last look at the table.
    fn poll<T>(
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

    /// True if the file is exactly as long as what was read of it: then there is nothing new and no lock is needed.
    fn is_current(&self) -> bool {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.offset > 0 && log.file.metadata().is_ok_and(|m| m.len() == log.offset)
    }

    fn write<T>(
        &self,
        op: &'static str,
        key: &str,
        deadline: Instant,
        f: impl FnOnce(&mut Table) -> Result<T, Refusal>,
    ) -> Result<T> {
        self.locked(op, Access::Write, deadline, |log| {
            let before = log.table.get(key.as_bytes()).cloned();
            let out = f(&mut log.table).map_err(|refusal| Fault::Refused(refusal.into_error(op, key)))?;
            let mut records = Vec::new();
            match log.table.get(key.as_bytes()) {
                // Unchanged: nothing for the log (a comparison that failed).
                Some(now) if before.as_ref().is_some_and(|b| b == now) => return Ok(out),
                Some(now) => encode(&mut records, KIND_SET, key.as_bytes(), now),
                None if before.is_none() => return Ok(out),
                None => encode(&mut records, KIND_DELETE, key.as_bytes(), &[]),
            }
            log.append(&records)?;
            Ok(out)
        })
    }

    fn values(&self, op: &'static str, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        keys::check_keys(op, keys)?;
        let since = Instant::now();
        self.poll(
            op,
            deadline,
            |table| {
                keys.iter()
                    .map(|key| table.get(key.as_bytes()).map(|v| v.to_vec()))
                    .collect()
            },
            |table| keys::wait_timed_out(op, keys, &missing(table, keys), since),
        )
    }
}

fn missing<'a>(table: &Table, keys: &[&'a str]) -> Vec<&'a str> {
    keys.iter()
        .copied()
        .filter(|key| !table.contains(key.as_bytes()))
        .collect()
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

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        keys::check_pair("store.set", key, value)?;
        self.write("store.set", key, deadline, |table| {
            table.set(key.as_bytes(), value.to_vec())
        })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        Ok(self
            .values("store.get", &[key], deadline)?
            .pop()
            .unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        keys::check_key("store.add", key)?;
        self.write("store.add", key, deadline, |table| {
            table.add(key.as_bytes(), amount)
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        keys::check_pair("store.compare_set", key, desired)?;
        let (value, _) = self.write("store.compare_set", key, deadline, |table| {
            table.compare_set(key.as_bytes(), expected, desired)
        })?;
        Ok(value.to_vec())
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        keys::check_keys("store.check", keys)?;
        self.locked("store.check", Access::Read, deadline, |log| {
            Ok(keys.iter().all(|key| log.table.contains(key.as_bytes())))
        })
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        keys::check_keys("store.wait", keys)?;
        let since = Instant::now();
        self.poll(
            "store.wait",
            deadline,
            |table| {
                keys.iter()
                    .all(|key| table.contains(key.as_bytes()))
                    .then_some(())
            },
            |table| keys::wait_timed_out("store.wait", keys, &missing(table, keys), since),
        )
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        keys::check_key("store.delete", key)?;
        self.write("store.delete", key, deadline, |table| {
            Ok(table.remove(key.as_bytes()))
        })
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        keys::check_pair("store.append", key, value)?;
        self.write("store.append", key, deadline, |table| {
            table.append(key.as_bytes(), value)
        })
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.values("store.multi_get", keys, deadline)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        keys::check_pairs("store.multi_set", pairs)?;
        if pairs.is_empty() {
            return Ok(());
        }
        self.locked("store.multi_set", Access::Write, deadline, |log| {
            let mut records = Vec::new();
            for (key, value) in pairs {
                log.table
                    .set(key.as_bytes(), value.to_vec())
                    .map_err(|refusal| Fault::Refused(refusal.into_error("store.multi_set", key)))?;
                encode(&mut records, KIND_SET, key.as_bytes(), value);
            }
            log.append(&records)
        })
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        self.locked("store.num_keys", Access::Read, deadline, |log| {
            Ok(i64::try_from(log.table.len()).unwrap_or(i64::MAX))
        })
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        self.locked("store.list", Access::Read, deadline, |log| {
            Ok(log
                .table
                .keys()
                .map(|key| String::from_utf8_lossy(key).into_owned())
                .collect())
        })
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        keys::check_barrier(key, world_size)?;
        let since = Instant::now();
        self.write("store.barrier", key, deadline, |table| {
            table.add(key.as_bytes(), 1)
        })?;
        let arrived = |table: &Table| table.get(key.as_bytes()).and_then(|v| leading_number(v));
        self.poll(
            "store.barrier",
            deadline,
            |table| arrived(table).filter(|n| *n >= i64::from(world_size)).map(drop),
            |table| keys::barrier_timed_out(key, arrived(table), world_size, since),
        )
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
    use crate::deadline_in;

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
    fn a_failed_comparison_writes_nothing_to_the_file() {
        let (_dir, path) = with_two_keys();
        let before = std::fs::metadata(&path).unwrap().len();
        let store = FileStore::open(&path).unwrap();
        assert_eq!(store.compare_set("a", b"no", b"new", soon()).unwrap(), b"1");
        assert!(!store.delete("absent", soon()).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), before);
    }
}
