//! The supervisor's end of the event stream: a Unix socket, one thread that accepts, one per connection that reads
//! lines. A bad line costs its writer a warning, a flood of them its connection; nothing a child writes can grow,
//! block or crash the supervisor.

use std::collections::HashMap;
use std::io::{BufReader, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::identity::TurnedAway;
use ftcore::{Error, Result, time_left};
use oxccl::launch::{LineReader, MAX_LINE, Message};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, getpgid};

use super::control::Control;
use super::events::SupervisorEvent;
use super::queue::{EventQueue, Handed};

/// A Unix socket's path must fit a fixed field of the kernel (108 bytes with the final zero).
const MAX_SOCKET_PATH: usize = 100;
/// Connections at a time; a rank uses one.
const MAX_CONNECTIONS: usize = 1024;
/// Bad lines from one connection before it is closed.
const MAX_BAD_LINES: u32 = 16;

#[derive(Debug, Default)]
struct State {
    closing: bool,
    /// Open connections by the process group of the writer (a child of the supervisor leads its own group).
    open: HashMap<i32, usize>,
    connections: usize,
    next_mark: u64,
    /// The highest mark that came back.
    seen_mark: u64,
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

/// Waits until all that an ended process wrote has been read.
#[derive(Debug, Clone)]
pub(super) struct Drain {
    path: PathBuf,
    shared: Arc<Shared>,
}

impl Drain {
    /// Returns once nothing written by the process group `group` waits to be read, or at `deadline`. Its processes must
    /// have ended.
    pub(super) fn wait(&self, group: Pid, deadline: Instant) {
        let mark = {
            let mut state = self.shared.lock();
            state.next_mark += 1;
            state.next_mark
        };
        // Connections are accepted in order: once this one was, no earlier one is still unknown.
        let sent = Message::Mark { mark }.to_line().and_then(|line| {
            UnixStream::connect(&self.path)
                .and_then(|mut stream| stream.write_all(line.as_bytes()))
                .map_err(|e| Error::io("mark the event socket", e))
        });
        if let Err(e) = sent {
            return tracing::warn!("last events of process group {group} may come late: {e}");
        }
        let mut state = self.shared.lock();
        while state.seen_mark < mark || state.open.contains_key(&group.as_raw_pid()) {
            let left = time_left(deadline);
            if left.is_zero() {
                return tracing::warn!(
                    "last events of process group {group} may come late: still being read"
                );
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Accepts connections until it is dropped; then the socket file is gone.
#[derive(Debug)]
pub(super) struct EventListener {
    path: PathBuf,
    /// Set when the run directory's path was too long for a socket: removed with the socket.
    own_dir: Option<PathBuf>,
    shared: Arc<Shared>,
}

impl EventListener {
    /// Listens in `run_dir` (in a private folder of the system's temporary directory if that path is too long) and
    /// hands events of `replicas` of `ranks` each to `events`, a lighthouse's address to `control`.
    pub(super) fn start(
        run_dir: &Path,
        replicas: std::ops::Range<u32>,
        ranks: u32,
        events: EventQueue,
        control: Sender<Control>,
    ) -> Result<Self> {
        // This supervisor's own: others may share the folder, on other machines too.
        let name = format!("events-{:016x}.sock", ftcore::lifecycle::nonce());
        let mut path = run_dir.join(&name);
        let mut own_dir = None;
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            let dir = private_dir()?;
            path = dir.join(&name);
            own_dir = Some(dir);
        }
        let listener = UnixListener::bind(&path)
            .map_err(|e| Error::io(format!("listen on the event socket {}", path.display()), e))?;
        // Until then the check of the writer's user keeps others out.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
            .map_err(|e| Error::io(format!("protect the event socket {}", path.display()), e))?;
        let shared = Arc::new(Shared::default());
        let route = Route {
            replicas,
            ranks,
            events,
            control,
            shared: Arc::clone(&shared),
        };
        std::thread::Builder::new()
            .name("ox-ev-accept".into())
            .spawn(move || accept(&listener, &route))
            .map_err(|e| Error::io("start thread ox-ev-accept", e))?;
        Ok(Self {
            path,
            own_dir,
            shared,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn drain(&self) -> Drain {
        Drain {
            path: self.path.clone(),
            shared: Arc::clone(&self.shared),
        }
    }
}

impl Drop for EventListener {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        // Wakes `accept`, which then sees the flag.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        if let Some(dir) = &self.own_dir {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

fn private_dir() -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let base = std::env::temp_dir();
    for n in 0..1000 {
        let dir = base.join(format!("oxccl-{}-{n}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io(format!("create {}", dir.display()), e)),
        }
    }
    Err(Error::invalid(format!(
        "no free name for a folder in {}",
        base.display()
    )))
}

#[derive(Debug, Clone)]
struct Route {
    replicas: std::ops::Range<u32>,
    ranks: u32,
    events: EventQueue,
    control: Sender<Control>,
    shared: Arc<Shared>,
}

fn accept(listener: &UnixListener, route: &Route) {
    let turned_away = TurnedAway::new();
    let mut failures = 0;
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => {
                failures = 0;
                stream
            }
            Err(e) => {
                failures += 1;
                tracing::warn!("event socket: {e}");
                // Out of descriptors, most likely. Without a pause this would spin; after many the replicas go on unwatched.
                if failures > 100 || route.shared.lock().closing {
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if let Err(user) = is_of_this_user(&stream) {
            turned_away.say(
                "event socket",
                &user,
                &"only the supervisor's own user may write events",
            );
            continue;
        }
        let (pid, group) = writer_of(&stream);
        {
            let mut state = route.shared.lock();
            if state.closing {
                return;
            }
            if state.connections >= MAX_CONNECTIONS {
                tracing::warn!(
                    "event socket: more than {MAX_CONNECTIONS} connections; the newest is refused"
                );
                continue;
            }
            state.connections += 1;
            *state.open.entry(group).or_default() += 1;
        }
        let of_thread = route.clone();
        let started = std::thread::Builder::new()
            .name("ox-ev-read".into())
            .spawn(move || {
                read(stream, pid, &of_thread);
                ended(&of_thread.shared, group);
            });
        if let Err(e) = started {
            ended(&route.shared, group);
            tracing::warn!("event socket: a connection is refused, no thread for it: {e}");
        }
    }
}

fn ended(shared: &Shared, group: i32) {
    let mut state = shared.lock();
    state.connections -= 1;
    if let Some(open) = state.open.get_mut(&group) {
        *open -= 1;
        if *open == 0 {
            state.open.remove(&group);
        }
    }
    drop(state);
    shared.changed.notify_all();
}

/// The writer runs as the supervisor's user, or as root; otherwise which user it is.
fn is_of_this_user(stream: &UnixStream) -> std::result::Result<(), String> {
    match socket_peercred(stream) {
        Ok(peer) if peer.uid.is_root() || peer.uid == rustix::process::geteuid() => Ok(()),
        Ok(peer) => Err(format!("user {}", peer.uid.as_raw())),
        Err(e) => Err(format!("a user that is not known ({e})")),
    }
}

/// The process at the other end and its process group; a process that is gone already counts as its own group.
fn writer_of(stream: &UnixStream) -> (i32, i32) {
    let Ok(credentials) = socket_peercred(stream) else {
        return (0, 0);
    };
    let group = getpgid(Some(credentials.pid)).unwrap_or(credentials.pid);
    (credentials.pid.as_raw_pid(), group.as_raw_pid())
}

fn read(stream: UnixStream, pid: i32, route: &Route) {
    let mut lines = LineReader::new(BufReader::new(stream), MAX_LINE);
    let mut bad = 0;
    loop {
        let problem = match lines.next_line() {
            Ok(None) => return,
            // The writer was killed: its `Exited` event says so.
            Err(e) => return tracing::debug!("event socket: connection lost: {e}"),
            Ok(Some(Err(e))) => format!(
                "a line of {} bytes is longer than the {MAX_LINE} allowed",
                e.length
            ),
            Ok(Some(Ok(line))) => match Message::from_line(line) {
                Ok(Message::Lighthouse { lighthouse_ready }) => {
                    if route
                        .control
                        .send(Control::LighthouseReady(lighthouse_ready))
                        .is_err()
                    {
                        return;
                    }
                    continue;
                }
                // Only the supervisor's own process may set marks.
                Ok(Message::Mark { mark }) if pid == std::process::id().cast_signed() => {
                    let mut state = route.shared.lock();
                    state.seen_mark = state.seen_mark.max(mark);
                    drop(state);
                    route.shared.changed.notify_all();
                    return;
                }
                Ok(Message::Mark { .. }) => format!("a supervisor's mark from process {pid}"),
                Ok(Message::Replica(event))
                    if route.replicas.contains(&event.replica) && event.rank < route.ranks =>
                {
                    let replica = event.replica;
                    match route.events.push(SupervisorEvent::Replica(event)) {
                        Handed::Queued | Handed::Dropped => continue,
                        Handed::Refused => {
                            return tracing::warn!("event socket: replica {replica} is no longer read");
                        }
                    }
                }
                Ok(Message::Replica(event)) => format!(
                    "an event of replica {}, rank {}, but this supervisor has replicas {} to {} of {} ranks",
                    event.replica,
                    event.rank,
                    route.replicas.start,
                    route.replicas.end.saturating_sub(1),
                    route.ranks
                ),
                Err(e) => e.to_string(),
            },
        };
        tracing::warn!("event socket: {problem}");
        bad += 1;
        if bad >= MAX_BAD_LINES {
            return tracing::warn!("event socket: {bad} bad lines; that connection is closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc::channel;

    use ftcore::deadline_in;
    use oxccl::launch::{EventKind, EventSender, ReplicaState};

    use super::super::queue::event_queue;
    use super::*;

    #[test]
    fn hostile_connections_change_nothing_for_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let (queue, mut events) = event_queue();
        let (control, _kept) = channel();
        let listener = EventListener::start(dir.path(), 0..2, 1, queue, control).unwrap();
        let honest = EventSender::connect(listener.path(), 1, 0).unwrap();
        let _half_open = UnixStream::connect(listener.path()).unwrap();

        // Bad lines until the supervisor hangs up; a foreign replica index and an endless line among them.
        let mut hostile = UnixStream::connect(listener.path()).unwrap();
        hostile.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let foreign =
            b"{\"replica\":7,\"incarnation\":0,\"t_us\":0,\"event\":\"state\",\"state\":\"done\"}\n";
        hostile.write_all(foreign).unwrap();
        let mut endless = vec![b'z'; 4 * MAX_LINE];
        endless.push(b'\n');
        hostile.write_all(&endless).unwrap();
        for _ in 0..MAX_BAD_LINES {
            let _ = hostile.write_all(b"\x00\xff{]\n");
        }
        match hostile.read(&mut [0; 1]) {
            Ok(0) => {}
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
            other => panic!("the connection should be closed: {other:?}"),
        }

        honest.send(EventKind::State {
            state: ReplicaState::Training,
        });
        match events.next_until(deadline_in(Duration::from_secs(60))) {
            Some(SupervisorEvent::Replica(e)) => {
                assert_eq!(
                    (e.replica, e.kind),
                    (
                        1,
                        EventKind::State {
                            state: ReplicaState::Training
                        }
                    )
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_event_socket_is_the_supervisors_users_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (queue, _events) = event_queue();
        let (control, _kept) = channel();
        let listener = EventListener::start(dir.path(), 0..1, 1, queue, control).unwrap();
        let mode = std::fs::metadata(listener.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(is_of_this_user(&ours), Ok(()));
    }

    #[test]
    fn a_run_directory_with_a_very_long_path_still_gets_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("d".repeat(200));
        std::fs::create_dir(&long).unwrap();
        let (queue, _events) = event_queue();
        let (control, _kept) = channel();
        let listener = EventListener::start(&long, 0..1, 1, queue, control).unwrap();
        let path = listener.path().to_owned();
        assert!(path.exists());
        drop(listener);
        assert!(!path.exists() && !path.parent().unwrap().exists());
    }

    #[test]
    fn two_supervisors_that_share_a_run_directory_each_hear_their_own_replicas() {
        let dir = tempfile::tempdir().unwrap();
        let start = |replica: u32| {
            let (queue, events) = event_queue();
            let (control, kept) = channel();
            let listener = EventListener::start(dir.path(), replica..replica + 1, 1, queue, control).unwrap();
            (listener, events, kept)
        };
        let (first, mut of_first, _kept) = start(0);
        let (second, ..) = start(1);
        assert_ne!(first.path(), second.path());
        // Nor does the end of one take the other's away.
        drop(second);
        let state = ReplicaState::Training;
        EventSender::connect(first.path(), 0, 0)
            .unwrap()
            .send(EventKind::State { state });
        match of_first.next_until(deadline_in(Duration::from_secs(60))) {
            Some(SupervisorEvent::Replica(e)) => assert_eq!(e.replica, 0),
            other => panic!("{other:?}"),
        }
    }
}
