//! Control connections between the ranks of a group, beside a library that tells no rank who died, who aborted, or who is missing: a star
//! around rank 0.
//!
//! Every rank keeps one TCP connection to rank 0 for the life of a configuration; [`meet`] makes them, and compares how ranks are set up.
//! Notices (an abort, a failure, a time-out) go to rank 0 and from there to all; a connection that ends without a leave is a death and names
//! the rank. Barriers that know who is missing run here, too. Data never comes near them. Whom a failure is blamed on is decided here, for all
//! backends that have this.

mod line;
mod meanwhile;
mod meet;
mod record;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::{Driver, Engine, Place, spawn};
use crate::{Error, ErrorKind, Result, time_left};

use line::{Line, lock, refused_here};
use wire::{Frame, Kind};

pub use meanwhile::{give_id, hear_id};
pub use meet::{Door, Meeting, Terms, meet, ranks};

/// What is heard.
enum Notice {
    /// The group has failed elsewhere, or a rank is gone.
    Failed(Error),
    /// A barrier opens that this rank has entered and does not wait for.
    Released(u64),
}

/// Told of notices on a thread of this module; must not block.
type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// What the system did not let this rank do with a connection that stands.
fn not_set_up(error: std::io::Error) -> Error {
    refused_here("setting a control connection up", error)
}

/// The connection to one rank.
struct Link {
    peer: u32,
    writer: Mutex<Line>,
}

impl Link {
    fn prepare(&self) -> Result<()> {
        let line = lock(&self.writer);
        let stream = &line.stream;
        stream.set_nonblocking(false).map_err(not_set_up)?;
        stream.set_nodelay(true).map_err(not_set_up)?;
        stream.set_read_timeout(None).map_err(not_set_up)?;
        // A peer that does not read its few bytes must not hold up an abort.
        stream
            .set_write_timeout(Some(Duration::from_millis(50)))
            .map_err(not_set_up)
    }
}

/// The connections of one configuration.
pub struct Peers {
    backend: &'static str,
    place: Place,
    links: Vec<Link>,
    state: Mutex<State>,
    /// A barrier has opened, or will not.
    moved: Condvar,
    /// True once this rank has left; held while it is said.
    leave: Mutex<bool>,
}

#[derive(Default)]
struct State {
    /// Ranks that have left.
    left: BTreeSet<u32>,
    /// On rank 0: who has entered which barrier.
    entered: BTreeMap<u64, BTreeSet<u32>>,
    /// Barriers that a caller waits for.
    awaited: BTreeSet<u64>,
    /// No barrier opens any more: the engine was told of a failure, or a connection has ended.
    over: bool,
    /// A failure was told or heard.
    failed: bool,
    /// Nothing more is said or heard.
    closed: bool,
}

impl Peers {
    /// Takes the connections of `meeting` over. What comes in waits until a backend [listens](Self::listen).
    ///
    /// Errors: `Io` if a connection cannot be set up; then it was [failed](Self::fail).
    pub fn start(meeting: Meeting) -> Result<Arc<Self>> {
        let link = |(peer, line)| Link {
            peer,
            writer: Mutex::new(line),
        };
        let peers = Self {
            backend: meeting.backend,
            place: meeting.place,
            links: std::mem::take(&mut *lock(&meeting.lines))
                .into_iter()
                .map(link)
                .collect(),
            state: Mutex::default(),
            moved: Condvar::new(),
            leave: Mutex::default(),
        };
        match peers.links.iter().try_for_each(Link::prepare) {
            Ok(()) => Ok(Arc::new(peers)),
            Err(error) => {
                peers.fail(&error);
                Err(error)
            }
        }
    }

    /// From now on `engine` fails with what is heard, and `opened` gets the numbers of barriers that open which this rank has
    /// [entered](Self::enter) without waiting; it must not block.
    ///
    /// Errors: `Io` if a thread does not start; then the engine has failed, and the others were told.
    pub fn listen<D: Driver>(
        self: &Arc<Self>,
        engine: &Arc<Engine<D>>,
        opened: impl Fn(&Engine<D>, u64) + Send + Sync + 'static,
    ) -> Result<()> {
        let (to, place) = (Arc::downgrade(engine), self.place);
        let listening = self.tell(Arc::new(move |notice| match (to.upgrade(), notice) {
            (Some(engine), Notice::Failed(error)) => engine.fail(place.name(error)),
            (Some(engine), Notice::Released(number)) => opened(&engine, number),
            (None, _) => {}
        }));
        listening.inspect_err(|error| {
            engine.fail(place.name(error.clone()));
            self.fail(error);
        })
    }

    /// Starts the threads that read.
    fn tell(self: &Arc<Self>, listener: Listener) -> Result<()> {
        let read = |link: &Link| {
            let mut line = lock(&link.writer).reader().map_err(not_set_up)?;
            let (this, peer, listener) = (self.clone(), link.peer, listener.clone());
            spawn(&format!("ox-{}-notices-{peer}", self.backend), move || {
                this.hear_all(peer, &mut line, &listener);
            })
        };
        self.links.iter().try_for_each(read)
    }

    /// The engine does not come up: the others are told why, and nothing is heard any more.
    pub fn fail(&self, error: &Error) {
        self.report(error);
        self.close();
    }

    fn hear_all(&self, peer: u32, line: &mut Line, listener: &Listener) {
        loop {
            match Frame::read(line) {
                Ok(Some(frame)) => self.hear(peer, frame, listener),
                ended => {
                    let why = match ended {
                        Err(e) if e.kind() == ErrorKind::Protocol => e.to_string(),
                        _ => "its control connection ended without a leave: the process is gone".to_string(),
                    };
                    let left = lock(&self.state).left.contains(&peer);
                    if !left && self.is_first() {
                        let error = Error::new(ErrorKind::PeerLost, why).with_peer(peer);
                        self.tell_others(
                            &Frame::of_error(Kind::Failed, self.place.rank, &error, Some(peer)),
                            peer,
                        );
                        listener(Notice::Failed(error));
                    }
                    return self.end_barriers();
                }
            }
        }
    }

    fn hear(&self, peer: u32, frame: Frame, listener: &Listener) {
        match frame.kind {
            // The one that leaves because of a failure ends its connection; that must not overtake the cause.
            Kind::Failed if self.is_first() => {
                self.tell_others(&frame, peer);
                listener(Notice::Failed(frame.error(self.place.rank)));
                self.end_barriers();
            }
            Kind::Bye => {
                lock(&self.state).left.insert(peer);
            }
            Kind::Enter if self.place.rank == 0 && self.enter_as(peer, frame.number) => {
                self.open(frame.number, listener);
            }
            Kind::Release if self.place.rank != 0 => self.open(frame.number, listener),
            // Out of place: harmless.
            _ => {}
        }
    }

    fn tell_others(&self, frame: &Frame, except: u32) {
        for link in self.links.iter().filter(|l| l.peer != except) {
            // Who cannot be told is gone or stuck, and its own connection says so to rank 0.
            let _ = frame.write(&mut *lock(&link.writer));
        }
    }

    /// True for the first failure that passes here, of whatever origin; only that one is told.
    fn is_first(&self) -> bool {
        let mut state = lock(&self.state);
        !state.closed && !std::mem::replace(&mut state.failed, true)
    }

    /// Ends the waits for barriers: the engine knows why by now.
    fn end_barriers(&self) {
        lock(&self.state).over = true;
        self.moved.notify_all();
    }

    /// Tells all ranks that the group has failed here.
    pub fn report(&self, error: &Error) {
        if !self.is_first() {
            return;
        }
        let told = match error.kind() {
            // The reason alone: who hears it puts the name before it.
            ErrorKind::Aborted => Error::new(ErrorKind::Aborted, self.place.reason(error)),
            _ => error.clone(),
        };
        let frame = Frame::of_error(Kind::Failed, self.place.rank, &told, error.context().peer);
        self.tell_others(&frame, self.place.rank);
        self.end_barriers();
    }

    /// Enters barrier `number` and goes on. True if that has opened it, here on rank 0; else the listener hears when it opens.
    pub fn enter(&self, number: u64) -> bool {
        if self.place.rank == 0 {
            return self.enter_as(0, number);
        }
        let frame = Frame::new(Kind::Enter, self.place.rank, number, "");
        self.tell_others(&frame, self.place.rank);
        false
    }

    /// Enters barrier `number` and waits until it opens. The listener hears nothing of it.
    ///
    /// Errors: `Timeout` at `deadline`; `PeerLost` if it will not open, because the group has failed or a connection has ended.
    pub fn barrier(&self, number: u64, deadline: Instant) -> Result<()> {
        lock(&self.state).awaited.insert(number);
        if self.enter(number) {
            lock(&self.state).awaited.remove(&number);
            return Ok(());
        }
        let mut state = lock(&self.state);
        while state.awaited.contains(&number) {
            let vain = state.over || state.closed;
            let left = time_left(deadline);
            if vain || left.is_zero() {
                state.awaited.remove(&number);
                drop(state);
                let text = format!("waiting for {}", self.awaited(number));
                return Err(match vain {
                    true => Error::new(
                        ErrorKind::PeerLost,
                        format!("{text}: in vain, for the group has failed, or a rank is gone"),
                    ),
                    false => Error::timeout(text),
                });
            }
            let (next, _) = self
                .moved
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
        Ok(())
    }

    /// In words, what a rank that has entered barrier `number` waits for; rank 0 knows whom.
    pub fn awaited(&self, number: u64) -> String {
        if self.place.rank != 0 {
            return "rank 0 to open the barrier".to_string();
        }
        let missing = self.missing(number);
        let have = if missing.len() == 1 { "has" } else { "have" };
        format!("the barrier, which {} {have} not entered", ranks(&missing))
    }

    /// On rank 0: notes that `rank` has entered. True if it was the last; then the others were told.
    fn enter_as(&self, rank: u32, number: u64) -> bool {
        let complete = {
            let mut state = lock(&self.state);
            let entered = state.entered.entry(number).or_default();
            entered.insert(rank);
            let complete = entered.len() == self.place.world as usize;
            if complete {
                state.entered.remove(&number);
            }
            complete
        };
        if complete {
            self.tell_others(&Frame::new(Kind::Release, 0, number, ""), 0);
        }
        complete
    }

    /// Barrier `number` has opened.
    fn open(&self, number: u64, listener: &Listener) {
        let awaited = lock(&self.state).awaited.remove(&number);
        match awaited {
            true => self.moved.notify_all(),
            false => listener(Notice::Released(number)),
        }
    }

    /// On rank 0: who has not entered barrier `number`.
    fn missing(&self, number: u64) -> Vec<u32> {
        let state = lock(&self.state);
        let entered = state.entered.get(&number);
        (0..self.place.world)
            .filter(|r| entered.is_none_or(|e| !e.contains(r)))
            .collect()
    }

    /// Ranks that have left in good order.
    pub fn left(&self) -> Vec<u32> {
        lock(&self.state).left.iter().copied().collect()
    }

    /// Leaves: the others need not worry when the connections end. The one that comes second waits for the first, so that
    /// no rank ends the connections under a leave that is being written.
    pub fn leave(&self) {
        let mut said = lock(&self.leave);
        if !std::mem::replace(&mut *said, true) {
            self.tell_others(&Frame::new(Kind::Bye, self.place.rank, 0, ""), self.place.rank);
        }
    }

    /// Ends the connections.
    pub fn close(&self) {
        if std::mem::replace(&mut lock(&self.state).closed, true) {
            return;
        }
        self.moved.notify_all();
        for link in &self.links {
            let _ = lock(&link.writer).stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.close();
    }
}
