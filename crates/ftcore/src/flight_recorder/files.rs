//! Where records go: one file for each process, replaced as a whole.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use super::environment::said;
use super::json;
use super::ring::GroupRing;
use super::ticks::unix_ns;
use crate::exit::leave_at_exit;
use crate::{Error, Result};

/// Rings of groups that are gone and stay readable.
const KEPT: usize = 32;
/// How long a record that a failure causes waits for the outcome of the other operations.
const GATHER: Duration = Duration::from_millis(50);

/// The rings of the process, oldest first.
static RINGS: Mutex<Vec<Arc<GroupRing>>> = Mutex::new(Vec::new());

pub(super) fn register(ring: GroupRing) -> Arc<GroupRing> {
    let ring = Arc::new(ring);
    let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
    rings.retain(|r| !(r.is_closed() && r.is_empty()));
    let closed = rings.iter().filter(|r| r.is_closed()).count();
    let mut over = closed.saturating_sub(KEPT);
    rings.retain(|r| {
        let goes = over > 0 && r.is_closed();
        over -= usize::from(goes);
        !goes
    });
    rings.push(ring.clone());
    ring
}

/// The name of this process's file: a process that is started again under the same number gets another one.
fn name(host: &str) -> String {
    static BEGAN: OnceLock<u64> = OnceLock::new();
    let began = BEGAN.get_or_init(|| unix_ns() / 1_000_000);
    let host: String = host
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') {
                c
            } else {
                '_'
            }
        })
        .collect();
    format!("flight-{host}-{}-{began}.json", std::process::id())
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "host" } else { name }.to_string()
}

/// What the groups of this process did last, as JSON; `why` says what caused the record.
pub fn record_text(why: &str) -> String {
    let rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let snapshots: Vec<_> = rings.iter().map(|ring| ring.snapshot()).collect();
    json::write(&host(), &said(), why, &snapshots)
}

/// Writes the record into the folder that `OXCCL_FLIGHT_RECORDER_DIR` named when a group was last made, or the current one. The path of the file.
///
/// Errors: `Io`, with the path.
pub fn dump(why: &str) -> Result<PathBuf> {
    let folder = said().folder.clone();
    dump_to(&folder.unwrap_or_else(|| PathBuf::from(".")), why)
}

/// Writes the record into `folder`, which is made if it is not there. Another record of this process is replaced. The path of the file.
///
/// Errors: `Io`, with the path.
pub fn dump_to(folder: &Path, why: &str) -> Result<PathBuf> {
    // Two threads must not write the same file.
    static WRITING: Mutex<()> = Mutex::new(());
    let _one = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let path = folder.join(name(&host()));
    let half = path.with_extension("json.part");
    let failed = |e: std::io::Error| Error::io(format!("write the flight record {}", path.display()), e);
    std::fs::create_dir_all(folder).map_err(failed)?;
    std::fs::write(&half, record_text(why)).map_err(failed)?;
    std::fs::rename(&half, &path).map_err(failed)?;
    Ok(path)
}

/// Whether a thread writes, and whether something has failed since it began to.
pub(super) struct Writer(AtomicU8);

const IDLE: u8 = 0;
const WRITES: u8 = 1;
const AGAIN: u8 = 2;

impl Writer {
    pub(super) const fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Asks for a record. True if the caller has to start the thread; in one step, as a thread that is there may end at any time.
    pub(super) fn ask(&self) -> bool {
        let next = |state| Some(if state == IDLE { WRITES } else { AGAIN });
        let before = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        before == Ok(IDLE)
    }

    /// The thread begins to write: what was asked for before will be in it.
    pub(super) fn begin(&self) {
        self.0.store(WRITES, Ordering::Release);
    }

    /// The thread has written. True if it ends; false if it was asked again.
    pub(super) fn end(&self) -> bool {
        let over = self
            .0
            .compare_exchange(WRITES, IDLE, Ordering::AcqRel, Ordering::Acquire);
        over.is_ok()
    }

    /// There is no thread.
    fn give_up(&self) {
        self.0.store(IDLE, Ordering::Release);
    }
}

/// A configuration has failed for the first time. Does not block: the file is written by a thread that the end of the process waits for.
pub(super) fn after_failure(why: &str) {
    static WRITER: Writer = Writer::new();
    let Some(folder) = said().folder.clone() else {
        return;
    };
    if !WRITER.ask() {
        return;
    }
    let (written, end) = mpsc::channel::<()>();
    let why = why.to_string();
    let spawned = std::thread::Builder::new()
        .name("ox-flight-recorder".to_string())
        .spawn(move || {
            loop {
                std::thread::sleep(GATHER);
                WRITER.begin();
                match dump_to(&folder, &why) {
                    Ok(path) => tracing::warn!(path = %path.display(), "a group has failed: what it did last is written"),
                    Err(error) => tracing::warn!(%error, "a group has failed, and what it did last could not be written"),
                }
                if WRITER.end() {
                    break;
                }
            }
            drop(written);
        });
    match spawned {
        Ok(_) => leave_at_exit(end),
        Err(error) => {
            WRITER.give_up();
            tracing::warn!(%error, "a group has failed, and there is no thread to write what it did last");
        }
    }
}
