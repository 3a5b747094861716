//! The log of a replica's events: a file of JSON lines, one for each thing that happened ([`Event`]).
//!
//! It never holds up the training and never fails it. A line is handed to a thread that writes; if that is behind by [`QUEUE`] lines, or the file
//! cannot be written, lines are left out, and the log says later how many. A full disk is reported once. Each line is one write to the end of the
//! file, so that the ranks of a replica on one host share a file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ftcore::{Error, Result};
use protocol::quorum::cut;
use serde::Serialize;

/// Lines that may wait for the thread.
const QUEUE: usize = 1024;
/// How long the end of a run may wait for its last lines.
const FLUSH: Duration = Duration::from_millis(500);
/// Ids in a line; `size` says how many there are.
const MOST_LISTED: usize = 16;

/// What happened. Times are in seconds.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event<'a> {
    /// The rank is ready for its first quorum.
    Start { world_size: u32 },
    /// There is a quorum. `step` is that of the members that are up to date; `heal` says that this replica is behind it.
    Quorum {
        epoch: i64,
        step: i64,
        replica_rank: u32,
        size: u32,
        heal: bool,
        spare: bool,
        members: Vec<&'a str>,
        took_s: f64,
    },
    /// The group was connected for an epoch, or was not.
    Configure {
        epoch: i64,
        took_s: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a str>,
    },
    /// The state of a step was fetched and applied, or was not.
    Heal {
        epoch: i64,
        step: i64,
        from: Vec<&'a str>,
        bytes: usize,
        took_s: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a str>,
    },
    /// A step committed.
    Commit {
        epoch: i64,
        step: i64,
        contributors: u32,
        took_s: f64,
    },
    /// An attempt at a step did not commit, and is done again.
    Discard {
        epoch: i64,
        step: i64,
        reason: &'a str,
        took_s: f64,
    },
    /// This rank failed in an epoch: the first failure of the attempt.
    Failure { epoch: i64, reason: &'a str },
    /// An epoch is over, as the lighthouse says.
    Abort { epoch: i64, reason: &'a str },
    /// A member of the epoch is gone, as the lighthouse says.
    MemberLost {
        epoch: i64,
        member: &'a str,
        reason: &'a str,
    },
    /// The rank left in order, or gave up because of `error`.
    End {
        step: i64,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a str>,
    },
    /// Lines were left out before this one.
    Dropped { lines: u64 },
}

#[derive(Serialize)]
struct Line<'a> {
    /// Seconds since 1970.
    time: f64,
    replica_id: &'a str,
    rank: u32,
    #[serde(flatten)]
    event: Event<'a>,
}

/// As much of a text as a line has.
pub(crate) fn text(of: &str) -> &str {
    cut(of)
}

/// As many ids as a line has.
pub(crate) fn listed<'a>(ids: impl IntoIterator<Item = &'a String>) -> Vec<&'a str> {
    ids.into_iter().take(MOST_LISTED).map(String::as_str).collect()
}

/// Where the log lies, and whose it is.
#[derive(Debug, Clone)]
struct Place {
    path: PathBuf,
    replica_id: String,
    rank: u32,
}

impl Place {
    fn line(&self, event: Event<'_>) -> Option<String> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = Line {
            // Microseconds are enough, and short.
            time: (time.as_secs_f64() * 1e6).round() / 1e6,
            replica_id: &self.replica_id,
            rank: self.rank,
            event,
        };
        serde_json::to_string(&line).ok().map(|text| text + "\n")
    }
}

/// The sending side; cheap to clone. Without a folder it does nothing.
#[derive(Clone, Default)]
pub(crate) struct EventLog(Option<Arc<Open>>);

struct Open {
    place: Place,
    lines: SyncSender<String>,
    /// Lines that the queue took.
    taken: AtomicU64,
    counts: Arc<Counts>,
}

/// What both sides count.
#[derive(Default)]
struct Counts {
    /// Lines that found the queue full.
    full: AtomicU64,
    /// Lines out of the queue that are written, or left out.
    done: Mutex<u64>,
    moved: Condvar,
}

impl Counts {
    fn done(&self) -> MutexGuard<'_, u64> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventLog {
    /// The log of `rank` of `replica_id` in `folder`, `events-NAME.jsonl`. The thread opens it; errors: it could not be started.
    pub(crate) fn open(folder: Option<PathBuf>, name: &str, replica_id: &str, rank: u32) -> Result<Self> {
        let Some(folder) = folder else {
            return Ok(Self::default());
        };
        let plain = |c: char| {
            if c.is_alphanumeric() || "-_.".contains(c) {
                c
            } else {
                '_'
            }
        };
        let name: String = name.chars().map(plain).collect();
        let place = Place {
            path: folder.join(format!("events-{name}.jsonl")),
            replica_id: replica_id.to_string(),
            rank,
        };
        Self::start(place, |place| {
            if let Some(folder) = place.path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            OpenOptions::new().create(true).append(true).open(&place.path)
        })
    }

    /// `open` is tried again while it fails.
    fn start<W: Write>(
        place: Place,
        open: impl Fn(&Place) -> std::io::Result<W> + Send + 'static,
    ) -> Result<Self> {
        let (lines, waiting) = sync_channel(QUEUE);
        let counts = Arc::new(Counts::default());
        let (at, both) = (place.clone(), counts.clone());
        std::thread::Builder::new()
            .name("ox-event-log".into())
            .spawn(move || write(&at, &waiting, &both, &open))
            .map_err(|e| Error::io("starting the thread of the event log", e))?;
        Ok(Self(Some(Arc::new(Open {
            place,
            lines,
            taken: AtomicU64::new(0),
            counts,
        }))))
    }

    /// False if there is no log: then nothing need be made for a line.
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Never blocks.
    pub(crate) fn write(&self, event: Event<'_>) {
        let Some(log) = &self.0 else { return };
        let Some(line) = log.place.line(event) else {
            return;
        };
        let count = match log.lines.try_send(line) {
            Ok(()) => &log.taken,
            Err(_) => &log.counts.full,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until what this thread has written is in the file or left out, half a second at most. True if it is.
    pub(crate) fn flush(&self) -> bool {
        let Some(log) = &self.0 else { return true };
        let taken = log.taken.load(Ordering::Relaxed);
        let done = log.counts.done();
        let waited = log
            .counts
            .moved
            .wait_timeout_while(done, FLUSH, |done| *done < taken);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= taken
    }
}

/// Writes what comes, until the last sender is gone.
fn write<W: Write>(
    place: &Place,
    waiting: &Receiver<String>,
    counts: &Counts,
    open: &impl Fn(&Place) -> std::io::Result<W>,
) {
    let mut file: Option<W> = None;
    let (mut lost, mut is_said, mut torn) = (0u64, false, false);
    while let Ok(line) = waiting.recv() {
        lost = lost.saturating_add(counts.full.swap(0, Ordering::Relaxed));
        let mut lines = String::new();
        if torn {
            // What a failed write left of a line ends here.
            lines.push('\n');
        }
        if lost > 0 {
            lines += &place.line(Event::Dropped { lines: lost }).unwrap_or_default();
        }
        lines += &line;
        let mut put = || -> std::io::Result<()> {
            let file = match &mut file {
                Some(file) => file,
                none => none.insert(open(place)?),
            };
            file.write_all(lines.as_bytes())
        };
        match put() {
            Ok(()) => (lost, torn) = (0, false),
            Err(error) => {
                torn = torn || file.is_some();
                lost = lost.saturating_add(1);
                if !std::mem::replace(&mut is_said, true) {
                    tracing::warn!(
                        %error,
                        path = %place.path.display(),
                        "the event log cannot be written; the training goes on without it, and this is said once"
                    );
                }
            }
        }
        *counts.done() += 1;
        counts.moved.notify_all();
    }
}

/// The folder that the configuration names, or `OXCCL_EVENT_LOG`.
pub(crate) fn folder(configured: Option<&PathBuf>) -> Option<PathBuf> {
    let variable = || std::env::var_os("OXCCL_EVENT_LOG").filter(|v| !v.is_empty());
    configured.cloned().or_else(|| variable().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::mpsc::channel;

    use super::*;

    /// A disk that is full after some bytes, until it gets more room; it takes what fits, as a file does.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(Vec<u8>, usize)>>);

    impl Disk {
        fn with_room(room: usize) -> Self {
            let disk = Self::default();
            disk.0.lock().unwrap().1 = room;
            disk
        }

        fn lines(&self) -> Vec<serde_json::Result<serde_json::Value>> {
            let text = String::from_utf8(self.0.lock().unwrap().0.clone()).unwrap();
            text.lines()
                .filter(|l| !l.is_empty())
                .map(serde_json::from_str)
                .collect()
        }
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut disk = self.0.lock().unwrap();
            let fits = bytes.len().min(disk.1);
            if fits == 0 {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            disk.1 -= fits;
            disk.0.extend_from_slice(&bytes[..fits]);
            Ok(fits)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn place() -> Place {
        Place {
            path: "events-a.jsonl".into(),
            replica_id: "a:1".into(),
            rank: 0,
        }
    }

    fn commit(step: i64) -> Event<'static> {
        Event::Commit {
            epoch: 7,
            step,
            contributors: 2,
            took_s: 0.25,
        }
    }

    #[test]
    fn a_full_disk_loses_lines_and_says_how_many_once_there_is_room() {
        let disk = Disk::with_room(250);
        let file = disk.clone();
        let log = EventLog::start(place(), move |_| Ok(file.clone())).unwrap();
        (0..10).for_each(|step| log.write(commit(step)));
        while !log.flush() {}
        let written = disk.lines().iter().filter(|l| l.is_ok()).count();
        assert!((1..9).contains(&written), "{:?}", disk.lines());
        disk.0.lock().unwrap().1 = 1 << 20;
        log.write(commit(10));
        while !log.flush() {}
        let lines = disk.lines();
        // One was torn; every other one is whole.
        let whole: Vec<_> = lines.iter().filter_map(|l| l.as_ref().ok()).collect();
        assert!(lines.len() <= whole.len() + 1, "{lines:?}");
        let [.., dropped, last] = whole.as_slice() else {
            panic!("{lines:?}")
        };
        assert_eq!(dropped["event"], "dropped");
        assert_eq!(dropped["lines"], 10 - written, "{lines:?}");
        assert_eq!((&last["event"], &last["step"]), (&"commit".into(), &10.into()));
    }

    #[test]
    fn a_disk_that_hangs_holds_up_no_step_and_its_lines_are_counted() {
        let (free, hung) = channel::<()>();
        let hung = Mutex::new(hung);
        let disk = Disk::with_room(1 << 20);
        let file = disk.clone();
        let log = EventLog::start(place(), move |_| {
            let _ = hung.lock().unwrap().recv();
            Ok(file.clone())
        })
        .unwrap();
        // More than may wait, while nothing is written at all.
        let many = 3 * QUEUE as i64;
        (0..many).for_each(|step| log.write(commit(step)));
        assert_eq!(disk.lines().len(), 0);
        drop(free);
        // The queue drains; then there is room for one that says how many were left out.
        while !log.flush() {}
        log.write(commit(many));
        while !log.flush() {}
        let lines = disk.lines();
        let sum: i64 = lines
            .iter()
            .map(|l| l.as_ref().unwrap())
            .map(|l| {
                if l["event"] == "dropped" {
                    l["lines"].as_i64().unwrap()
                } else {
                    1
                }
            })
            .sum();
        assert_eq!(sum, many + 1);
    }
}
