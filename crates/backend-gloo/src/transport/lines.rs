//! Lines: one connection to each other process of this host with which groups share memory, whatever their number. Nothing is said on a line. Its end
//! says that the process is gone, to every group that has a rank there.
//!
//! A line is the Unix socket over which the ranks of a pair found each other. The first group of two processes keeps that socket as their line. A
//! further one meets over a socket of its own, on which both ranks prove and say all that they would otherwise, and both say of which line of
//! their processes they know; then the socket is closed, and both groups hold the one line. A process lets go of a line when its last group that holds
//! it has ended, so a line that ends under a group that has said nothing means that the process has died. Ranks of one process need none.
//!
//! One thread (`ox-gloo-lines`) watches all lines of the process for as long as there are any.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ftcore::forked::Parents;
use ftcore::lifecycle::nonce;
use ftcore::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use super::waker::Waker;

/// What may still come on the connection of a rank that gave up its configuration when this one was connected: it says so in memory, too.
const MOST: usize = 16 * 1024;

/// Called when the process at the other end of a line is gone. Must not block.
pub(crate) type Listener = Arc<dyn Fn() + Send + Sync>;

/// What the thread and the holders of a line have in common.
struct Wire {
    socket: Parents<OwnedFd>,
    /// How it showed that the process is gone.
    down: OnceLock<String>,
    /// Bytes that came in.
    read: AtomicUsize,
    listeners: Mutex<Listeners>,
}

#[derive(Default)]
struct Listeners {
    next: u64,
    all: BTreeMap<u64, Listener>,
}

/// The connection to another process, held by the groups that need it.
pub(crate) struct Line {
    id: u64,
    wire: Arc<Wire>,
}

/// A group's hold on a line.
pub(crate) struct Hold {
    line: Arc<Line>,
    key: Option<u64>,
}

struct Entry {
    process: u64,
    id: u64,
    line: Weak<Line>,
    wire: Arc<Wire>,
}

#[derive(Default)]
struct Registry {
    lines: Vec<Entry>,
    /// Wakes the thread that watches them.
    watcher: Option<Arc<Waker>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    lines: Vec::new(),
    watcher: None,
});

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names this process among all that ranks may meet; never 0.
pub(crate) fn own_process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(new_id)
}

/// Names a new line; never 0.
pub(crate) fn new_id() -> u64 {
    nonce().max(1)
}

/// The newest line to `process`, if there is one.
pub(crate) fn to(process: u64) -> Option<Arc<Line>> {
    let registry = lock(&REGISTRY);
    let found = registry.lines.iter().rev();
    let mut found = found.filter(|e| e.process == process && e.wire.down.get().is_none());
    found.find_map(|e| e.line.upgrade())
}

/// The line of that number to `process`, if it is known here.
pub(crate) fn known(process: u64, id: u64) -> Option<Arc<Line>> {
    let registry = lock(&REGISTRY);
    let found = registry
        .lines
        .iter()
        .find(|e| e.process == process && e.id == id && e.wire.down.get().is_none());
    found?.line.upgrade()
}

/// From now on `socket`, which does not block, is the line of that number to `process`.
///
/// Errors: `Io` if the thread that watches lines cannot be started.
pub(crate) fn open(process: u64, id: u64, socket: Parents<OwnedFd>) -> Result<Arc<Line>> {
    let wire = Arc::new(Wire {
        socket,
        down: OnceLock::new(),
        read: AtomicUsize::new(0),
        listeners: Mutex::default(),
    });
    let line = Arc::new(Line {
        id,
        wire: wire.clone(),
    });
    let mut registry = lock(&REGISTRY);
    let watcher = match &registry.watcher {
        Some(watcher) => watcher.clone(),
        None => start()?,
    };
    registry.watcher = Some(watcher.clone());
    registry.lines.push(Entry {
        process,
        id,
        line: Arc::downgrade(&line),
        wire,
    });
    drop(registry);
    watcher.wake();
    Ok(line)
}

impl Line {
    /// Names it, for the process at the other end.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

impl Hold {
    pub(crate) fn new(line: Arc<Line>) -> Self {
        Self { line, key: None }
    }

    /// From now on `listener` is called when the process is gone. It may be gone already.
    pub(crate) fn listen(&mut self, listener: Listener) {
        let mut listeners = lock(&self.line.wire.listeners);
        let key = listeners.next;
        listeners.next += 1;
        listeners.all.insert(key, listener);
        self.key = Some(key);
    }

    /// How it showed that the process is gone, if it is.
    pub(crate) fn down(&self) -> Option<&str> {
        self.line.wire.down.get().map(String::as_str)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            lock(&self.line.wire.listeners).all.remove(&key);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut registry = lock(&REGISTRY);
        registry.lines.retain(|entry| entry.id != self.id);
        let watcher = registry.watcher.clone();
        if registry.lines.is_empty() {
            registry.watcher = None;
        }
        drop(registry);
        // The other process hears of it now; the thread, which may be looking at the socket, closes it.
        let _ = shutdown(&self.wire.socket, Shutdown::Both);
        if let Some(watcher) = watcher {
            watcher.wake();
        }
    }
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {:016x}", self.line.id)
    }
}

fn start() -> Result<Arc<Waker>> {
    let waker = Arc::new(Waker::new()?);
    let own = waker.clone();
    std::thread::Builder::new()
        .name("ox-gloo-lines".to_string())
        .spawn(move || watch(&own))
        .map_err(|e| Error::io("starting the thread that watches lines", e))?;
    Ok(waker)
}

/// Watches all lines until there are none, or another thread does.
fn watch(waker: &Arc<Waker>) {
    loop {
        let wires: Vec<Arc<Wire>> = {
            let registry = lock(&REGISTRY);
            let current = registry.watcher.as_ref();
            if !current.is_some_and(|current| Arc::ptr_eq(current, waker)) {
                return;
            }
            let up = registry.lines.iter().filter(|e| e.wire.down.get().is_none());
            up.map(|e| e.wire.clone()).collect()
        };
        let mut fds = vec![PollFd::new(waker.as_ref(), PollFlags::IN)];
        fds.extend(
            wires
                .iter()
                .map(|w| PollFd::from_borrowed_fd(w.socket.as_fd(), PollFlags::IN)),
        );
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                // Only for want of memory; what the kernel cannot watch is looked at.
                tracing::warn!(%error, "lines cannot be watched");
                std::thread::yield_now();
            }
        }
        drop(fds);
        waker.drain();
        for wire in wires {
            wire.look();
        }
    }
}

impl Wire {
    /// Takes what has come in; tells the listeners if it has ended.
    fn look(&self) {
        let mut bytes = [0; 512];
        let how = loop {
            match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => break "closed the connection".to_string(),
                Ok((n, _)) => {
                    if self.read.fetch_add(n, Ordering::Relaxed) > MOST {
                        break "speaks on a connection on which nothing is said".to_string();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(e) => break format!("the connection broke ({e})"),
            }
        };
        // Told outside of the lock: a listener may let go of its hold.
        let listeners: Vec<Listener> = {
            let listeners = lock(&self.listeners);
            if self.down.set(how).is_err() {
                return;
            }
            listeners.all.values().cloned().collect()
        };
        for listener in listeners {
            listener();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn tells(to: &Sender<u32>, number: u32) -> Listener {
        let to = Mutex::new(to.clone());
        Arc::new(move || {
            let _ = lock(&to).send(number);
        })
    }

    /// A line to `process`, and its other end.
    fn line_to(process: u64) -> (Arc<Line>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_read_timeout(Some(SOON)).unwrap();
        (
            open(process, new_id(), OwnedFd::from(ours).into()).unwrap(),
            theirs,
        )
    }

    #[test]
    fn the_end_of_a_process_is_told_to_all_that_hold_its_line_and_to_no_other() {
        let (process, other) = (new_id(), new_id());
        let (line, theirs) = line_to(process);
        let (elsewhere, _kept) = line_to(other);
        assert_eq!(to(process).unwrap().id(), line.id());
        assert!(known(process, line.id()).is_some());
        assert!(known(other, line.id()).is_none() && to(new_id()).is_none());
        let (says, said) = channel();
        let hold = |line: &Arc<Line>, number: Option<u32>| {
            let mut hold = Hold::new(line.clone());
            number.into_iter().for_each(|n| hold.listen(tells(&says, n)));
            hold
        };
        let holds = [hold(&line, Some(1)), hold(&line, Some(2)), hold(&line, None)];
        let unconcerned = hold(&elsewhere, Some(3));
        // One that has let go hears nothing.
        drop(hold(&line, Some(4)));
        drop(theirs);
        let mut heard = [said.recv_timeout(SOON).unwrap(), said.recv_timeout(SOON).unwrap()];
        heard.sort_unstable();
        assert_eq!(heard, [1, 2]);
        assert!(holds.iter().all(|hold| hold.down().is_some()));
        assert!(unconcerned.down().is_none());
        // It is no way to meet any more.
        assert!(to(process).is_none() && known(process, line.id()).is_none());
        assert!(said.try_recv().is_err());
    }

    #[test]
    fn a_line_ends_for_the_other_process_with_its_last_holder() {
        let process = new_id();
        let (line, mut theirs) = line_to(process);
        let (first, last) = (Hold::new(line.clone()), Hold::new(line));
        drop(first);
        assert!(to(process).is_some());
        drop(last);
        assert!(to(process).is_none());
        assert_eq!(theirs.read(&mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn who_speaks_on_a_line_without_end_is_taken_for_gone() {
        use std::io::Write;
        let (line, mut theirs) = line_to(new_id());
        let (says, said) = channel();
        let mut hold = Hold::new(line);
        hold.listen(tells(&says, 1));
        // What a rank that gave up has said on it is no harm.
        theirs.write_all(&[1; 5000]).unwrap();
        let _ = theirs.write_all(&[1; 2 * MOST]);
        said.recv_timeout(SOON).unwrap();
        assert!(hold.down().unwrap().contains("nothing is said"), "{hold:?}");
    }
}
