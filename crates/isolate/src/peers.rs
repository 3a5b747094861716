//! What the ranks tell each other where the backend does not: aborts, failures and deaths.
//!
//! A library without abort leaves the survivors of a death hanging. So each rank of such a group publishes its child's process and
//! its own in the configuration's store and watches the others': on the same host by pidfd, which is evidence at once; for reasons (an
//! abort, a time-out) and for other hosts by a `news` key in the store, where the first word counts. A rank that lives says why its
//! child has ended; for a whole rank that is gone none will. A rank that learns of a failure ends its own child.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::lifecycle::part_from;
use ftcore::{Configuration, Error, ErrorKind, Result, Store, deadline_in};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::front::Front;
use crate::link::Link;
use crate::wire::{Reader, Writer, error};

/// How often the watch looks at what is not signalled: a failure of its own group, a rank that is needed although it left.
const LOOK: Duration = Duration::from_millis(50);
/// The store is asked for news again after this; news itself comes at once.
const SLICE: Duration = Duration::from_millis(500);
/// Between the news of a failure and the end of a child, so that all ranks hear the reason before they see a death.
const AHEAD: Duration = Duration::from_millis(20);
/// A child that ended without a word is lost after this, unless what is pending ends meanwhile without it: the reason, or a
/// leave, may still be on its way from its rank.
const SILENT: Duration = Duration::from_secs(1);
/// The same if the rank's own process has ended too. What it said before is with the store, which is asked; what it sent is in this host's
/// sockets, and gets this long to be read. A store that is there and does not answer is asked again for as long as above.
const GONE: Duration = Duration::from_millis(40);
/// How often the watch looks while it waits for a word.
const SOON: Duration = Duration::from_millis(10);
/// Work that has been waiting this long for a rank that has left in good order waits in vain.
const NEEDED: Duration = Duration::from_secs(2);
/// A store call of the watch. A store that does not answer does not end a group.
const CALL: Duration = Duration::from_secs(2);

/// How the watch is to end.
enum Stop {
    /// Tell the others this, then end the child.
    Tell(Error),
    /// This rank leaves in good order.
    Left,
}

#[derive(Default)]
struct Control {
    stop: Option<Stop>,
    /// What had failed here by then: the others are to hear that.
    first: Option<Error>,
    /// Ends once the watch has said what it has to.
    watch: Option<Receiver<()>>,
    /// From now on nothing that is found concerns the group: it may be in another epoch already.
    closed: bool,
}

struct Shared {
    store: Arc<dyn Store>,
    /// Before every key.
    prefix: String,
    rank: u32,
    world: u32,
    control: Mutex<Control>,
    waker: OwnedFd,
    link: Arc<Link>,
    front: Arc<Front>,
}

/// The watch over the other ranks of one configuration. Dropped, it ends quietly.
pub(crate) struct Peers(Arc<Shared>);

fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_string()
}

/// Where process numbers mean the same: this boot, and the namespace they are counted in.
fn home() -> String {
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot(), space.display())
}

/// (boot, namespace, then process id and start time of the child and of the rank itself): the same processes, if they are on this host and
/// can be seen.
fn card(child: u32) -> String {
    let of = |pid: u32| format!("{pid} {}", start_time(pid).unwrap_or_default());
    format!("{} {} {}", home(), of(child), of(std::process::id()))
}

fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)
        .map(str::to_string)
}

/// What can be seen of a process of another rank.
enum Seen {
    /// Its end will be.
    Watched(OwnedFd),
    /// It has ended.
    Gone,
    /// Nothing: it is on another host, or hidden.
    Nothing,
}

/// The child and the rank of `card`.
fn look_for(card: &str) -> (Seen, Seen) {
    let home = home();
    let parts = card
        .strip_prefix(&home)
        .filter(|_| !home.starts_with(' ') && !home.ends_with(' '));
    let mut parts = parts.unwrap_or_default().split(' ').skip(1);
    let mut next = || {
        let number = parts.next().and_then(|pid| pid.parse::<i32>().ok());
        let (Some(pid), Some(started)) = (number.and_then(Pid::from_raw), parts.next()) else {
            return Seen::Nothing;
        };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(Errno::SRCH) => return Seen::Gone,
            Err(_) => return Seen::Nothing,
        };
        // Looked at after the descriptor holds the process: a number used again shows here.
        match start_time(pid.as_raw_nonzero().get().unsigned_abs()) {
            Some(now) if !started.is_empty() => match now == started {
                true => Seen::Watched(fd),
                false => Seen::Gone,
            },
            _ => Seen::Nothing,
        }
    };
    (next(), next())
}

/// What to watch, or since when there is nothing to.
fn watched(seen: Seen) -> (Option<OwnedFd>, Option<Instant>) {
    match seen {
        Seen::Watched(fd) => (Some(fd), None),
        Seen::Gone => (None, Some(Instant::now())),
        Seen::Nothing => (None, None),
    }
}

fn prefix(configuration: &Configuration) -> String {
    format!("{}/isolate/{}", configuration.prefix, configuration.epoch)
}

/// Says before `configure` which process this rank's child is.
pub(crate) fn publish(configuration: &Configuration, link: &Link) -> Result<()> {
    let key = format!("{}/{}", prefix(configuration), configuration.rank);
    let pid = link.pid.as_raw_nonzero().get().unsigned_abs();
    configuration
        .store
        .set(&key, card(pid).as_bytes(), configuration.deadline)
}

impl Peers {
    /// Watches the other ranks from now on; all of them have published.
    pub(crate) fn watch(configuration: &Configuration, link: Arc<Link>, front: Arc<Front>) -> Result<Self> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("make an eventfd", e.into()))?;
        let shared = Arc::new(Shared {
            store: configuration.store.clone(),
            prefix: prefix(configuration),
            rank: configuration.rank,
            world: configuration.world_size,
            control: Mutex::default(),
            waker,
            link,
            front,
        });
        let others: Vec<u32> = (0..shared.world).filter(|&r| r != shared.rank).collect();
        let keys: Vec<String> = others.iter().map(|r| format!("{}/{r}", shared.prefix)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let cards = configuration.store.multi_get(&keys, configuration.deadline)?;
        let peers = others
            .into_iter()
            .zip(&cards)
            .map(|(rank, card)| {
                let (child, process) = look_for(&String::from_utf8_lossy(card));
                let ((child, ended), (process, gone)) = (watched(child), watched(process));
                Peer {
                    rank,
                    child,
                    process,
                    ended,
                    gone,
                    left: false,
                }
            })
            .collect();
        let watch = Watch {
            shared: shared.clone(),
            peers,
        };
        let (watching, ended) = channel();
        shared.lock().watch = Some(ended);
        let listener = shared.clone();
        std::thread::Builder::new()
            .name("ox-inews".to_string())
            .spawn(move || listener.listen())
            .map_err(|e| Error::io("start the thread that waits for news of other ranks", e))?;
        std::thread::Builder::new()
            .name("ox-ipeers".to_string())
            .spawn(move || {
                watch.run();
                drop(watching);
            })
            .map_err(|e| Error::io("start the thread that watches the other ranks", e))?;
        shared.link.set_herald(Herald(Arc::downgrade(&shared)));
        Ok(Self(shared))
    }

    /// Tells the others why this rank ends. Never blocks.
    pub(crate) fn tell(&self, error: Error) {
        self.0.stop(Stop::Tell(error));
    }

    /// Tells the others that this rank leaves in good order. Never blocks.
    pub(crate) fn leave(&self) {
        self.0.stop(Stop::Left);
    }
}

/// Of a link: the thread that ends its child can tell the others why.
#[derive(Default)]
pub(crate) struct Herald(Weak<Shared>);

impl Herald {
    /// As [`Peers::tell`]; false if no watch runs. Never blocks.
    pub(crate) fn tell(&self, error: Error) -> bool {
        let shared = self.0.upgrade();
        shared
            .as_ref()
            .map(|shared| shared.stop(Stop::Tell(error)))
            .is_some()
    }

    /// The child reports that a rank is lost. Where that may be the end of a rank that has said why, `hold` holds the report back; if it then
    /// says that no thread is asking yet, the store is asked, and the link [settles](Link::settle) what is held. Never blocks.
    pub(crate) fn inquire(&self, hold: impl FnOnce() -> bool) {
        let Some(shared) = self.0.upgrade() else { return };
        // Held while the report is put away: with a watch that is over, nothing is left behind that would count in the next epoch.
        let control = shared.lock();
        let is_first = !control.closed && shared.front.error().is_none() && hold();
        drop(control);
        if is_first {
            let asking = shared.clone();
            let started = std::thread::Builder::new()
                .name("ox-iasks".to_string())
                .spawn(move || asking.ask());
            if let Err(error) = started {
                tracing::warn!(rank = shared.rank, %error, "a loss is believed without asking why");
                shared.link.settle(None);
            }
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.0.stop(Stop::Left);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first reason counts: also before this one, a failure of the group that the watch has not seen yet.
    fn stop(&self, stop: Stop) {
        let mut control = self.lock();
        if !control.closed {
            control.closed = true;
            control.stop = Some(stop);
            control.first = self.front.error();
            // This process may end at once: not before that is said.
            control.watch.take().into_iter().for_each(part_from);
        }
        drop(control);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Another rank has failed: so has this group. True unless the watch is over.
    fn failed(&self, error: Error) -> bool {
        let mut control = self.lock();
        if control.closed {
            return false;
        }
        control.closed = true;
        self.front.poison(&error);
        // Not at once: a child that ends is a death to ranks that have not heard the reason yet.
        self.link.end_after_words(error, None, AHEAD, AHEAD);
        true
    }

    /// Waits for the others' news, in slices, so that the thread ends with the watch.
    fn listen(&self) {
        let key = self.news_key();
        while !self.lock().closed {
            match self.store.wait(&[&key], deadline_in(SLICE)) {
                Ok(()) => match self.news(CALL).ok().flatten() {
                    Some(error) => {
                        self.failed(error);
                        self.wake();
                        return;
                    }
                    // This rank's own.
                    None => return,
                },
                Err(e) if e.kind() == ErrorKind::Timeout => {}
                Err(error) => {
                    tracing::warn!(rank = self.rank, %error, "no news of other ranks: the store does not answer");
                    std::thread::sleep(SLICE);
                }
            }
        }
    }

    fn news_key(&self) -> String {
        format!("{}/news", self.prefix)
    }

    /// The first failure of the group, from the rank that saw it.
    fn post(&self, error: &Error) {
        let mut w = Writer::new(0);
        w.u32(self.rank);
        error::put(&mut w, error);
        let posted = w.finish().and_then(|bytes| {
            self.store
                .compare_set(&self.news_key(), b"", &bytes, deadline_in(CALL))
        });
        if let Err(error) = posted {
            tracing::warn!(rank = self.rank, %error, "the other ranks could not be told of a failure");
        }
    }

    /// What another rank posted, as this rank's error. A store that does not answer is an error of its own.
    fn news(&self, patience: Duration) -> Result<Option<Error>> {
        let key = self.news_key();
        if !self.store.check(&[&key], deadline_in(patience))? {
            return Ok(None);
        }
        let bytes = self.store.get(&key, deadline_in(patience))?;
        Ok(self.told(&bytes))
    }

    /// A rank is lost, as the child says: why, if a rank has said so. A rank that ends its child says it before, so that one answer of the
    /// store is enough; one that is gone, or does not answer in time, leaves a loss.
    fn ask(&self) {
        let mut told = None;
        for patience in [GONE, SILENT] {
            match self.news(patience) {
                Ok(news) => {
                    told = news;
                    break;
                }
                Err(e) if is_refused(&e) => break,
                Err(_) => {}
            }
        }
        if let Some(error) = &told {
            self.failed(error.clone());
            self.wake();
        }
        self.link.settle(told.as_ref());
    }

    /// What the store has of a rank whose child has ended. What a rank said before its process ended is there, so that this needs no luck:
    /// the thread that waits for news may not have had its turn.
    fn last_word(&self, rank: u32, patience: Duration) -> Word {
        let answer = self
            .store
            .check(&[&self.left_key(rank)], deadline_in(patience))
            .and_then(|left| match left {
                true => Ok(Word::Left),
                false => Ok(self.news(patience)?.map_or(Word::None, Word::Failed)),
            });
        match answer {
            Ok(word) => word,
            Err(e) if is_refused(&e) => Word::None,
            Err(_) => Word::Unheard,
        }
    }

    fn told(&self, bytes: &[u8]) -> Option<Error> {
        let mut r = Reader::new(bytes.get(5..)?);
        let (origin, told) = (r.u32().ok()?, error::get(&mut r).ok()?);
        if origin == self.rank {
            return None;
        }
        let text = match told.kind() {
            // Its own text names the rank.
            ErrorKind::Aborted => told.message().to_string(),
            _ => format!("rank {origin} reports: {told}"),
        };
        let mut error = Error::new(told.kind(), text).with_peer(told.context().peer.unwrap_or(origin));
        if let Some(epoch) = told.context().epoch {
            error = error.with_epoch(epoch);
        }
        Some(error)
    }

    fn left_key(&self, rank: u32) -> String {
        format!("{}/{rank}/left", self.prefix)
    }
}

/// What a rank whose child has ended has left in the store.
enum Word {
    /// It left in good order.
    Left,
    /// Why it, or another rank, has failed.
    Failed(Error),
    /// Nothing, or the store is gone.
    None,
    /// The store has not answered.
    Unheard,
}

/// True if no server is there to answer: the store may have been in the very process that has ended.
fn is_refused(error: &Error) -> bool {
    use std::io::ErrorKind as Kind;
    let cause = std::error::Error::source(error).and_then(|e| e.downcast_ref::<std::io::Error>());
    cause.is_some_and(|e| {
        matches!(
            e.kind(),
            Kind::ConnectionRefused | Kind::ConnectionReset | Kind::BrokenPipe | Kind::UnexpectedEof
        )
    })
}

struct Peer {
    rank: u32,
    /// `None` for a child that cannot be watched, or that has ended.
    child: Option<OwnedFd>,
    /// The rank's own process, as above.
    process: Option<OwnedFd>,
    /// When the child was seen to have ended.
    ended: Option<Instant>,
    /// When the rank's own process was.
    gone: Option<Instant>,
    /// It left.
    left: bool,
}

struct Watch {
    shared: Arc<Shared>,
    peers: Vec<Peer>,
}

impl Watch {
    fn run(mut self) {
        loop {
            let (stop, first, closed) = {
                let mut control = self.shared.lock();
                (control.stop.take(), control.first.take(), control.closed)
            };
            match stop {
                Some(Stop::Tell(error)) => {
                    self.shared.post(first.as_ref().unwrap_or(&error));
                    return self.shared.link.end(error, None, AHEAD);
                }
                Some(Stop::Left) => {
                    if let Some(first) = first {
                        return self.shared.post(&first);
                    }
                    let key = self.shared.left_key(self.shared.rank);
                    if let Err(error) = self.shared.store.set(&key, b"1", deadline_in(CALL)) {
                        tracing::debug!(%error, "the other ranks could not be told that this rank leaves");
                    }
                    return;
                }
                None if closed => return,
                None => {}
            }
            // A failure that is this rank's own.
            if let Some(error) = self.shared.front.error() {
                return self.shared.post(&error);
            }
            if self.lost().is_some_and(|error| self.shared.failed(error)) {
                return;
            }
            self.sleep();
        }
    }

    fn sleep(&self) {
        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        fds.extend(
            self.peers
                .iter()
                .flat_map(|p| [&p.child, &p.process])
                .flatten()
                .map(|p| PollFd::from_borrowed_fd(p.as_fd(), PollFlags::IN)),
        );
        let expecting = self.peers.iter().any(|p| p.ended.is_some() && !p.left);
        let look = if expecting { SOON } else { LOOK };
        let _ = poll(&mut fds, Timespec::try_from(look).ok().as_ref());
    }

    /// A rank whose process has ended without a word, or that left while it was needed.
    fn lost(&mut self) -> Option<Error> {
        let ended = |fd: &OwnedFd| {
            let now = Timespec::default();
            matches!(poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)), Ok(n) if n > 0)
        };
        let (shared, link) = (&self.shared, &self.shared.link);
        for peer in &mut self.peers {
            if peer.child.as_ref().is_some_and(ended) {
                peer.child = None;
                peer.ended = Some(Instant::now());
            }
            if peer.process.as_ref().is_some_and(ended) {
                peer.process = None;
                peer.gone = Some(Instant::now());
            }
            let Some(at) = peer.ended else { continue };
            let (silent, unheard, text) = match peer.gone {
                Some(gone) => (
                    gone.elapsed() > GONE,
                    gone.elapsed() > SILENT,
                    "its process has ended",
                ),
                None => {
                    let silent = at.elapsed() > SILENT;
                    (silent, silent, "its child process has ended")
                }
            };
            let mut is_known = true;
            if !peer.left {
                let patience = peer.gone.map_or(CALL, |_| GONE);
                match shared.last_word(peer.rank, patience) {
                    Word::Left => peer.left = true,
                    Word::Failed(error) => return Some(error),
                    Word::None => {}
                    Word::Unheard => is_known = false,
                }
            }
            let text = match peer.left {
                true if link.misses(peer.rank, at, NEEDED) => "left the group, which still needed it",
                false if silent && (is_known || unheard) => text,
                _ => continue,
            };
            return Some(Error::new(ErrorKind::PeerLost, text).with_peer(peer.rank));
        }
        None
    }
}
