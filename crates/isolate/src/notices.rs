//! What the ranks tell each other where the backend does not: aborts, failures and deaths.
//!
//! A library without abort leaves the survivors of a death hanging. So each rank of such a group publishes its child's process and
//! its own in the configuration's store and watches the others': on the same host by pidfd, which is evidence at once; for reasons (an
//! abort, a time-out) and for other hosts by a failure notice in the store, where the first one counts. A rank that lives says why its
//! child has ended; for a whole rank that is gone none will. A rank that learns of a failure ends its own child. The watch is one for all groups
//! of the child, and is over when the last of them has left.
//!
//! What a child reports of a lost rank is only suspected: such a library sees no more than that the other end of a connection is gone, while the rank
//! that aborted has said why in the store, and ended its child after that. So the report is held back until the store was asked, which is certain
//! to find what was said. Then the loss counts as what the notice says, or as it is.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use ftcore::engine::spawn;
use ftcore::lifecycle::leave_at_exit;
use ftcore::{Cancel, Configuration, Error, ErrorKind, Result, Store, deadline_in, process_space};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::wait_for;
use crate::link::{LEAVE, Link, TELLING};
use crate::store::{decode, encode};
use crate::watch::Watch;
use crate::wire::frames::Report;

/// Between the notice of a failure and the end of a child, so that all ranks hear the reason before they see a death.
const AHEAD: Duration = Duration::from_millis(20);
/// How often the watch looks at what is not signalled: a rank that is needed although it left.
const LOOK: Duration = Duration::from_millis(50);
/// The store is asked for a notice again after this; a notice itself comes at once.
const LISTEN: Duration = Duration::from_secs(60);
/// The same after a failure of the store.
const AGAIN: Duration = Duration::from_millis(500);
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

struct State {
    /// The groups of the child that have not left.
    groups: u32,
    /// From now on nothing that is found concerns the group: it may be in another epoch already.
    is_closed: bool,
    /// Reports of a loss that is only suspected.
    held: Vec<Report>,
    /// A thread is asking, and will [settle](Notices::settle).
    is_asking: bool,
    /// The other ranks are watched: until then a loss is taken as it is reported.
    is_watching: bool,
}

/// The watch over the other ranks of one configuration, and of the groups that are split from it.
pub(crate) struct Notices {
    store: Arc<dyn Store>,
    /// Before every key.
    prefix: String,
    rank: u32,
    link: Arc<Link>,
    state: Mutex<State>,
    /// Wakes who looks after the others when the watch is closed, and stays set.
    waker: OwnedFd,
    /// Cancelled when the watch is closed: ends the wait for a notice.
    closed: Cancel,
}

/// (process space, then number and start time of the child and of the rank's own process): the same processes, if they are on this host and can
/// be seen.
fn card(child: u32) -> String {
    let of = |pid: u32| format!("{pid} {}", start_time(pid).unwrap_or_default());
    let space = process_space().unwrap_or_default();
    format!("{space} {} {}", of(child), of(std::process::id()))
}

fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields = stat.rsplit_once(')')?.1;
    fields.split_whitespace().nth(19).map(str::to_string)
}

/// A process of another rank: what to watch, and since when it has ended. Neither if it is on another host, or hidden.
#[derive(Default)]
struct Process {
    fd: Option<OwnedFd>,
    ended: Option<Instant>,
}

impl Process {
    fn find(pid: Option<&str>, started: Option<&str>) -> Self {
        let pid = pid.and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
        let (Some(pid), Some(started)) = (pid, started.filter(|s| !s.is_empty())) else {
            return Self::default();
        };
        let gone = || Self {
            fd: None,
            ended: Some(Instant::now()),
        };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(Errno::SRCH) => return gone(),
            Err(_) => return Self::default(),
        };
        // Looked at after the descriptor holds the process: a number used again shows here.
        match start_time(pid.as_raw_nonzero().get().unsigned_abs()) {
            Some(now) if now == started => Self {
                fd: Some(fd),
                ended: None,
            },
            Some(_) => gone(),
            None => Self::default(),
        }
    }

    /// Since when it has ended.
    fn ended(&mut self) -> Option<Instant> {
        let now = Timespec::default();
        let over =
            |fd: &OwnedFd| matches!(poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)), Ok(n) if n > 0);
        if self.fd.as_ref().is_some_and(over) {
            *self = Self {
                fd: None,
                ended: Some(Instant::now()),
            };
        }
        self.ended
    }
}

/// Another rank.
struct Peer {
    rank: u32,
    child: Process,
    own: Process,
    /// It left.
    left: bool,
}

impl Peer {
    fn of(rank: u32, card: &str) -> Self {
        let space = process_space();
        let parts = space
            .and_then(|space| card.strip_prefix(&space))
            .unwrap_or_default();
        let mut parts = parts.split(' ').skip(1);
        let mut next = || Process::find(parts.next(), parts.next());
        Self {
            rank,
            child: next(),
            own: next(),
            left: false,
        }
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

impl Notices {
    pub(crate) fn new(configuration: &Configuration, link: &Arc<Link>) -> Result<Arc<Self>> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("make an eventfd", e.into()))?;
        Ok(Arc::new(Self {
            store: configuration.store.clone(),
            prefix: prefix(configuration),
            rank: configuration.rank,
            link: link.clone(),
            state: Mutex::new(State {
                groups: 1,
                is_closed: false,
                held: Vec::new(),
                is_asking: false,
                is_watching: false,
            }),
            waker,
            closed: Cancel::default(),
        }))
    }

    /// Watches the other ranks from now on; all of them have published.
    pub(crate) fn watch(self: &Arc<Self>, configuration: &Configuration) -> Result<()> {
        self.lock().is_watching = true;
        let others: Vec<u32> = (0..configuration.world_size)
            .filter(|rank| *rank != self.rank)
            .collect();
        let keys: Vec<String> = others.iter().map(|r| format!("{}/{r}", self.prefix)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let cards = self.store.multi_get(&keys, configuration.deadline)?;
        let peers = others.into_iter().zip(&cards);
        let peers: Vec<Peer> = peers
            .map(|(rank, card)| Peer::of(rank, &String::from_utf8_lossy(card)))
            .collect();
        let (listening, watching) = (self.clone(), self.clone());
        spawn("ox-inotices", move || listening.listen())?;
        spawn("ox-ipeers", move || watching.look_after(peers))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Ends the watch; false if it was over. What is held back is yet to be [settled](Self::settle).
    fn close(&self) -> bool {
        let was_open = !std::mem::replace(&mut self.lock().is_closed, true);
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
        self.closed
            .cancel(Error::new(ErrorKind::Aborted, "the watch is over"));
        was_open
    }

    /// Another rank has failed: so have the groups of this child. Nothing if the watch is over.
    fn failed(&self, error: Error) {
        if self.close() {
            self.end(&error);
        }
    }

    /// Ends the child because of what another rank has failed with. Not at once: a child that ends is a death to ranks that have not heard
    /// the reason yet. What is held back fails with the same.
    fn end(&self, failure: &Error) {
        self.end_child(failure);
        self.settle();
    }

    fn end_child(&self, failure: &Error) {
        self.link.end_after(failure.clone(), None, AHEAD, AHEAD);
    }

    /// The first failure of the group, from the rank that saw it.
    fn post(&self, error: &Error) {
        let posted = encode(&(self.rank, error.clone())).and_then(|notice| {
            self.store
                .compare_set(&self.key("failure"), b"", &notice, deadline_in(CALL))
        });
        if let Err(error) = posted {
            tracing::warn!(rank = self.rank, %error, "the other ranks could not be told of a failure");
        }
    }

    /// Waits for the others' notice until the watch is closed.
    fn listen(&self) {
        let (store, key) = (self.closed.over(&self.store), self.key("failure"));
        while !self.is_closed() {
            let error = match store.wait(&[&key], deadline_in(LISTEN)) {
                Ok(()) => match self.notice(CALL) {
                    // None: this rank's own.
                    Ok(told) => return told.into_iter().for_each(|error| self.failed(error)),
                    Err(error) => error,
                },
                Err(error) if error.kind() == ErrorKind::Timeout || self.is_closed() => continue,
                Err(error) => error,
            };
            tracing::warn!(rank = self.rank, %error, "nothing is known of other ranks: the store does not answer");
            // Or until the watch is closed.
            drop(wait_for(self.waker.as_fd(), PollFlags::IN, deadline_in(AGAIN)));
        }
    }

    /// What another rank posted, as this rank's error. A store that does not answer is an error of its own.
    fn notice(&self, limit: Duration) -> Result<Option<Error>> {
        let key = self.key("failure");
        if !self.store.check(&[&key], deadline_in(limit))? {
            return Ok(None);
        }
        let notice = self.store.get(&key, deadline_in(limit))?;
        let (origin, told): (u32, Error) = decode(notice.get(4..).unwrap_or_default())?;
        if origin == self.rank {
            return Ok(None);
        }
        let text = match told.kind() {
            // Its own text names the rank.
            ErrorKind::Aborted => told.message().to_string(),
            _ => format!("rank {origin} reports: {told}"),
        };
        let error = Error::new(told.kind(), text);
        Ok(Some(error.with_peer(told.context().peer.unwrap_or(origin))))
    }

    /// A rank is lost, as the child says: why, if a rank has said so. A rank that ends its child says it before, so that one answer of the
    /// store is enough; one that is gone, or does not answer in time, leaves a loss.
    fn ask(&self) {
        for limit in [GONE, SILENT] {
            match self.notice(limit) {
                Ok(told) => {
                    told.into_iter().for_each(|error| self.failed(error));
                    break;
                }
                Err(e) if is_refused(&e) => break,
                Err(_) => {}
            }
        }
        self.settle();
    }

    /// The thread that watches the others' processes.
    fn look_after(&self, mut peers: Vec<Peer>) {
        while !self.is_closed() {
            if let Some(error) = peers.iter_mut().find_map(|peer| self.lost(peer)) {
                return self.failed(error);
            }
            let mut fds = vec![PollFd::new(&self.waker, PollFlags::IN)];
            let processes = peers
                .iter()
                .flat_map(|peer| [&peer.child.fd, &peer.own.fd])
                .flatten();
            fds.extend(processes.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)));
            let is_expecting = peers.iter().any(|peer| peer.child.ended.is_some() && !peer.left);
            let look = if is_expecting { SOON } else { LOOK };
            let _ = poll(&mut fds, Timespec::try_from(look).ok().as_ref());
        }
    }

    /// A rank whose process has ended without a word, or that left while it was needed.
    fn lost(&self, peer: &mut Peer) -> Option<Error> {
        let gone = peer.own.ended();
        let at = peer.child.ended()?;
        let (silent, unheard, text) = match gone {
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
            match self.last_word(peer.rank, gone.map_or(CALL, |_| GONE)) {
                Word::Left => peer.left = true,
                Word::Failed(error) => return Some(error),
                Word::None => {}
                Word::Unheard => is_known = false,
            }
        }
        let text = match peer.left {
            true if self.link.misses(peer.rank, at, NEEDED) => "left the group, which still needed it",
            false if silent && (is_known || unheard) => text,
            _ => return None,
        };
        Some(Error::new(ErrorKind::PeerLost, text).with_peer(peer.rank))
    }

    /// What the store has of a rank whose child has ended. What a rank said before its process ended is there, so that this needs no luck:
    /// the thread that waits for notices may not have had its turn.
    fn last_word(&self, rank: u32, limit: Duration) -> Word {
        let left = self.key(&format!("{rank}/left"));
        let answer = self
            .store
            .check(&[&left], deadline_in(limit))
            .and_then(|left| match left {
                true => Ok(Word::Left),
                false => Ok(self.notice(limit)?.map_or(Word::None, Word::Failed)),
            });
        match answer {
            Ok(word) => word,
            Err(e) if is_refused(&e) => Word::None,
            Err(_) => Word::Unheard,
        }
    }
}

impl Watch for Notices {
    fn join(&self) {
        self.lock().groups += 1;
    }

    fn tell(self: Arc<Self>, failure: &Error) {
        if !self.close() {
            // Who ended the watch settles, once all groups have failed: what is held back must not be taken for the cause before.
            return self.end_child(failure);
        }
        // Its end is not to overtake a store that takes longer than pending work waits.
        self.link.end_after(failure.clone(), None, TELLING, LEAVE);
        self.settle();
        let (telling, told) = mpsc::channel::<()>();
        // This process may end at once: not before that is said.
        leave_at_exit(told);
        let (this, error) = (self.clone(), failure.clone());
        let started = spawn("ox-itell", move || {
            this.post(&error);
            this.link.end(error, None, AHEAD);
            drop(telling);
        });
        if let Err(error) = started {
            tracing::warn!(rank = self.rank, %error, "the other ranks are not told of a failure");
        }
    }

    fn leave(&self) {
        let is_last = {
            let mut state = self.lock();
            state.groups = state.groups.saturating_sub(1);
            state.groups == 0
        };
        if !is_last || !self.close() {
            return;
        }
        self.settle();
        let key = self.key(&format!("{}/left", self.rank));
        if let Err(error) = self.store.set(&key, b"1", deadline_in(CALL)) {
            tracing::debug!(%error, "the other ranks could not be told that this rank leaves");
        }
    }

    fn hold(self: Arc<Self>, report: Report) -> Option<Report> {
        let mut state = self.lock();
        // What fails now fails for a reason that is known.
        let is_known = self.link.unusable().is_some() || !state.is_watching;
        if state.is_closed || is_known {
            return Some(report);
        }
        state.held.push(report);
        if !std::mem::replace(&mut state.is_asking, true) {
            drop(state);
            let asking = self.clone();
            if let Err(error) = spawn("ox-iasks", move || asking.ask()) {
                tracing::warn!(rank = self.rank, %error, "a loss is taken as confirmed without asking why");
                self.settle();
            }
        }
        None
    }

    fn settle(&self) {
        loop {
            let held = {
                let mut state = self.lock();
                state.is_asking = !state.held.is_empty();
                std::mem::take(&mut state.held)
            };
            if held.is_empty() {
                return;
            }
            for report in held {
                if let Err(error) = self.link.carry_out(report) {
                    self.link.end(error, None, Duration::ZERO);
                }
            }
        }
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

#[cfg(test)]
mod tests {
    use ftcore::{Epoch, InMemoryStore};

    use super::*;
    use crate::link::tests::linked;
    use crate::store::tests::Far;

    #[test]
    fn a_notice_is_heard_over_a_long_link_and_though_the_first_look_at_it_fails() {
        let near = Arc::new(InMemoryStore::new());
        let soon = || deadline_in(Duration::from_secs(20));
        let configuration = Configuration {
            store: Arc::new(Far::new(near.clone(), 1)),
            prefix: "p".into(),
            name: "n".into(),
            epoch: Epoch(1),
            rank: 0,
            world_size: 2,
            deadline: soon(),
            cancel: Cancel::default(),
        };
        let (mut child, link, ..) = linked();
        let notices = Notices::new(&configuration, &link).unwrap();
        let (telling, told) = mpsc::channel();
        let listener = {
            let notices = notices.clone();
            std::thread::spawn(move || {
                notices.listen();
                let _ = telling.send(());
            })
        };
        let failure = encode(&(1u32, Error::new(ErrorKind::Backend, "broken"))).unwrap();
        near.set(&notices.key("failure"), &failure, soon()).unwrap();
        let heard = told.recv_timeout(Duration::from_secs(20));
        notices.close();
        listener.join().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        heard.expect("the listener hears nothing");
        let error = link.unusable().expect("the listener gave up");
        assert_eq!(
            (error.kind(), error.context().peer),
            (ErrorKind::Backend, Some(1)),
            "{error}"
        );
    }

    #[test]
    fn the_listener_ends_with_the_watch() {
        let configuration = Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "p".into(),
            name: "n".into(),
            epoch: Epoch(1),
            rank: 0,
            world_size: 2,
            deadline: deadline_in(Duration::from_secs(20)),
            cancel: Cancel::default(),
        };
        let (mut child, link, ..) = linked();
        child.kill().unwrap();
        child.wait().unwrap();
        let notices = Notices::new(&configuration, &link).unwrap();
        let begun = Instant::now();
        let listener = {
            let notices = notices.clone();
            std::thread::spawn(move || notices.listen())
        };
        notices.close();
        listener.join().unwrap();
        assert!(begun.elapsed() < LISTEN / 2);
    }
}
