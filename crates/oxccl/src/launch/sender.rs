//! The replica's end of the event stream. Training hands events to a bounded queue and goes on; the thread `ox-events`
//! writes them to the supervisor's socket. What cannot be delivered is dropped, never waited for.

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, time_left};

use super::env::{ENV_EVENTS, ENV_INCARNATION, ENV_RANK, ENV_REPLICA};
use super::events::{EventKind, ReplicaEvent, now_us};

/// Above this many waiting events, the oldest `Step` makes room.
const SOFT: usize = 1024;
/// Above this many nothing more is taken: the supervisor has read nothing for thousands of commits.
const HARD: usize = 64 * 1024;
/// A supervisor that takes no byte for this long is given up.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<ReplicaEvent>,
    /// The thread holds an event that is not written yet.
    writing: bool,
    /// No further events: the thread ends when the queue is empty.
    closed: bool,
    /// The supervisor cannot be reached any more, and why.
    broken: Option<Error>,
    dropped: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Open {
    shared: Arc<Shared>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

/// Sends a replica's events to its supervisor. Cheap to clone; clones share one queue and one thread.
///
/// - `send` never blocks and never fails. `Step` events are dropped (oldest first) while the supervisor is slow; others
///   are kept, up to 65536 of them, which no supervisor that still runs leaves unread.
/// - Without `OXCCL_EVENTS` (a replica started by hand) it does nothing.
/// - Dropping the last clone lets the thread write what is left; call [`EventSender::flush`] before the process exits.
#[derive(Debug, Clone)]
pub struct EventSender {
    replica: u32,
    incarnation: u32,
    rank: u32,
    open: Option<Arc<Open>>,
}

impl EventSender {
    /// A sender that goes nowhere.
    pub fn disabled() -> Self {
        Self {
            replica: 0,
            incarnation: 0,
            rank: 0,
            open: None,
        }
    }

    /// The sender for the supervisor named in `OXCCL_EVENTS`, for the replica, incarnation and rank of `OXCCL_REPLICA`,
    /// `OXCCL_INCARNATION` and `OXCCL_RANK`. Without `OXCCL_EVENTS`, or when that socket cannot be reached (a warning says so), a disabled one:
    /// training does not depend on being watched.
    pub fn from_env() -> Self {
        let Some(path) = std::env::var_os(ENV_EVENTS) else {
            return Self::disabled();
        };
        let number = |name| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(0);
        match Self::connect(Path::new(&path), number(ENV_REPLICA), number(ENV_INCARNATION)) {
            Ok(sender) => sender.of_rank(number(ENV_RANK)),
            Err(e) => {
                tracing::warn!("no events are sent: {e}");
                Self::disabled()
            }
        }
    }

    /// The sender for the supervisor that listens at `path`. Fails with `Io` if there is none.
    pub fn connect(path: &Path, replica: u32, incarnation: u32) -> Result<Self> {
        let what = || format!("connect to the supervisor's event socket {}", path.display());
        let stream = UnixStream::connect(path).map_err(|e| Error::io(what(), e))?;
        stream
            .set_write_timeout(Some(WRITE_TIMEOUT))
            .map_err(|e| Error::io(what(), e))?;
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("ox-events".into())
            .spawn(move || write_all(&of_thread, stream))
            .map_err(|e| Error::io("start thread ox-events", e))?;
        Ok(Self {
            replica,
            incarnation,
            rank: 0,
            open: Some(Arc::new(Open { shared })),
        })
    }

    /// The same sender, for the events of this rank of the replica (0 if not said).
    #[must_use]
    pub fn of_rank(self, rank: u32) -> Self {
        Self { rank, ..self }
    }

    /// True if events go somewhere.
    pub fn is_enabled(&self) -> bool {
        self.open
            .as_ref()
            .is_some_and(|open| open.shared.lock().broken.is_none())
    }

    /// Stamps `kind` with the time and queues it. Never blocks.
    pub fn send(&self, kind: EventKind) {
        let Some(open) = &self.open else { return };
        let event = ReplicaEvent {
            replica: self.replica,
            incarnation: self.incarnation,
            rank: self.rank,
            t_us: now_us(),
            kind,
        };
        let mut state = open.shared.lock();
        if state.broken.is_some() || state.closed {
            return;
        }
        if state.queue.len() >= SOFT {
            let oldest = state
                .queue
                .iter()
                .position(|e| matches!(e.kind, EventKind::Step { .. }));
            match oldest {
                Some(at) => drop(state.queue.remove(at)),
                None if matches!(event.kind, EventKind::Step { .. }) || state.queue.len() >= HARD => {
                    state.dropped += 1;
                    return;
                }
                None => {}
            }
            state.dropped += u64::from(oldest.is_some());
        }
        state.queue.push_back(event);
        drop(state);
        open.shared.changed.notify_all();
    }

    /// Waits until everything sent so far is written. `Timeout` names how many events were left; a supervisor that is
    /// gone is the error met when writing.
    pub fn flush(&self, deadline: Instant) -> Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        let mut state = open.shared.lock();
        loop {
            if let Some(e) = &state.broken {
                return Err(e.clone());
            }
            if state.queue.is_empty() && !state.writing {
                return Ok(());
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(format!(
                    "{} events were not taken by the supervisor",
                    state.queue.len() + usize::from(state.writing)
                )));
            }
            state = open
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Events dropped so far because the supervisor was slow.
    pub fn dropped(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| open.shared.lock().dropped)
    }
}

fn write_all(shared: &Shared, mut stream: UnixStream) {
    loop {
        let event = {
            let mut state = shared.lock();
            loop {
                if let Some(event) = state.queue.pop_front() {
                    state.writing = true;
                    break event;
                }
                if state.closed {
                    return;
                }
                state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let written = match event.to_line() {
            Ok(line) => stream.write_all(line.as_bytes()).map_err(|e| match e.kind() {
                std::io::ErrorKind::WouldBlock => Error::timeout(format!(
                    "the supervisor took no event for {} s",
                    WRITE_TIMEOUT.as_secs()
                )),
                _ => Error::new(ErrorKind::PeerLost, format!("the supervisor is gone: {e}")).with_source(e),
            }),
            Err(e) => {
                tracing::warn!("an event was dropped: {e}");
                Ok(())
            }
        };
        let mut state = shared.lock();
        state.writing = false;
        if let Err(e) = written {
            tracing::warn!("no more events are sent: {e}");
            state.queue = VecDeque::new();
            state.broken = Some(e);
        }
        let stop = state.broken.is_some();
        drop(state);
        shared.changed.notify_all();
        if stop {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::os::unix::net::UnixListener;

    use ftcore::deadline_in;

    use super::super::events::{Commit, MAX_LINE, ReplicaState};
    use super::super::line::LineReader;
    use super::*;

    fn commit(step: u64) -> EventKind {
        EventKind::Commit(Commit {
            step,
            epoch: 1,
            failed_attempts: 0,
            participants: 2,
            contributors: 2,
            hash: None,
            inner_ms: 0.0,
            sync_ms: 0.0,
            bytes_sent: 0,
            bytes_recv: 0,
        })
    }

    #[test]
    fn a_reader_that_stalls_loses_steps_but_no_commit_and_never_blocks_the_sender() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let sender = EventSender::connect(&path, 3, 4).unwrap();
        // Nothing is read yet. Far more than the socket's buffer and the queue hold together.
        let commits = 2 * SOFT as u64;
        for step in 0..commits {
            for inner_step in 0..20 {
                sender.send(EventKind::Step {
                    inner_step,
                    loss: 1.0,
                    tokens_per_s: 1.0,
                });
            }
            sender.send(commit(step));
        }
        assert!(sender.dropped() > 0);
        let clone = sender.clone();
        let reader = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = LineReader::new(BufReader::new(stream), MAX_LINE);
            let mut seen = Vec::new();
            while let Some(line) = lines.next_line().unwrap() {
                let event = ReplicaEvent::from_line(line.unwrap()).unwrap();
                assert_eq!((event.replica, event.incarnation), (3, 4));
                if let EventKind::Commit(c) = event.kind {
                    seen.push(c.step);
                }
            }
            seen
        });
        sender.flush(deadline_in(Duration::from_secs(60))).unwrap();
        drop((sender, clone));
        assert_eq!(reader.join().unwrap(), (0..commits).collect::<Vec<_>>());
    }

    #[test]
    fn a_supervisor_that_went_away_costs_an_error_at_flush_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let sender = EventSender::connect(&path, 0, 0).unwrap();
        drop(listener.accept().unwrap());
        drop(listener);
        sender.send(EventKind::State {
            state: ReplicaState::Training,
        });
        let e = sender.flush(deadline_in(Duration::from_secs(60))).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
        assert!(!sender.is_enabled());
        sender.send(EventKind::State {
            state: ReplicaState::Done,
        });
    }

    #[test]
    fn flush_names_what_is_left_when_its_deadline_passes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let sender = EventSender::connect(&path, 0, 0).unwrap();
        for step in 0..10_000 {
            sender.send(commit(step));
        }
        let e = sender.flush(deadline_in(Duration::from_millis(50))).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        assert!(e.to_string().contains("events were not taken"), "{e}");
    }

    #[test]
    fn a_disabled_sender_takes_everything() {
        let sender = EventSender::disabled();
        sender.send(commit(1));
        sender.flush(Instant::now()).unwrap();
        assert!(!sender.is_enabled());
    }
}
