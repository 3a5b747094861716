//! Control connections beside NCCL, which tells no rank who died, who aborted, or who is missing: a star around rank 0.
//!
//! Every rank keeps one TCP connection to rank 0 for the life of a configuration. Notices (an abort, a failure, a time-out) goes to rank
//! 0 and from there to all; a connection that ends without a leave is a death and names the rank. The monitored barrier runs here,
//! too. `rendezvous` makes the connections; data never comes near them.

mod line;
mod meanwhile;
mod record;
mod rendezvous;
mod strangers;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ftcore::engine::spawn;
use ftcore::{Error, ErrorKind, Result};

use wire::{Frame, Kind};

pub(crate) use line::Line;
pub(crate) use rendezvous::{meet, refuse};
pub(crate) use wire::VERSION;

/// What the engine hears.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The group has failed elsewhere, or a rank is gone.
    Failed(Error),
    /// Monitored barrier `number` opens.
    Released(u64),
}

/// Told of notices on a thread of this module; must not block.
pub(crate) type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// What to do where the system gives no more sockets.
const FILES: &str = "if files run out, raise `ulimit -n`";
const SET_UP: &str = "setting a control connection up";

struct Link {
    peer: u32,
    writer: Mutex<Line>,
}

/// The connections of one configuration.
pub(crate) struct Control {
    rank: u32,
    world: u32,
    links: Vec<Link>,
    listener: Listener,
    state: Mutex<State>,
    /// True once this rank has has left; held while it is said.
    leave: Mutex<bool>,
}

#[derive(Default)]
struct State {
    /// Ranks that has left.
    left: BTreeSet<u32>,
    /// On rank 0: who has entered which monitored barrier.
    entered: BTreeMap<u64, BTreeSet<u32>>,
    /// A failure was told or heard.
    failed: bool,
    /// Nothing more is said or heard.
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Takes the connections over and starts to listen. If that fails, the others are told.
    pub(crate) fn start(
        rank: u32,
        world: u32,
        streams: Vec<(u32, Line)>,
        listener: Listener,
    ) -> Result<Arc<Self>> {
        let link = |(peer, stream)| Link {
            peer,
            writer: Mutex::new(stream),
        };
        let control = Arc::new(Self {
            rank,
            world,
            links: streams.into_iter().map(link).collect(),
            listener,
            state: Mutex::default(),
            leave: Mutex::default(),
        });
        match control.links.iter().try_for_each(|l| control.read(l)) {
            Ok(()) => Ok(control),
            Err(error) => {
                control.fail(&error);
                Err(error)
            }
        }
    }

    /// Starts to listen to one rank.
    fn read(self: &Arc<Self>, link: &Link) -> Result<()> {
        let io = |e| Error::io(format!("{SET_UP} ({FILES})"), e);
        let mut line = {
            let mut line = lock(&link.writer);
            let stream = &line.stream;
            stream.set_nonblocking(false).map_err(io)?;
            stream.set_nodelay(true).map_err(io)?;
            stream.set_read_timeout(None).map_err(io)?;
            // A peer that does not read its few bytes must not hold up an abort.
            stream
                .set_write_timeout(Some(Duration::from_millis(50)))
                .map_err(io)?;
            line.reader().map_err(io)?
        };
        let (this, peer) = (self.clone(), link.peer);
        spawn(&format!("ox-nccl-notices-{peer}"), move || {
            this.listen(peer, &mut line)
        })
    }

    /// The engine does not come up: the others are told why, and the one that listens here stops.
    pub(crate) fn fail(&self, error: &Error) {
        self.report(error);
        self.close();
    }

    fn listen(&self, peer: u32, line: &mut Line) {
        loop {
            match Frame::read(line) {
                Ok(Some(frame)) => self.hear(peer, frame),
                ended => {
                    let why = match ended {
                        Err(e) if e.kind() == ErrorKind::Protocol => e.to_string(),
                        _ => "its control connection ended without a leave: the process is gone".to_string(),
                    };
                    let left = lock(&self.state).left.contains(&peer);
                    if !left && self.is_first() {
                        let error = Error::new(ErrorKind::PeerLost, why).with_peer(peer);
                        self.tell_others(
                            &Frame::of_error(Kind::Failed, self.rank, &error, Some(peer)),
                            peer,
                        );
                        (self.listener)(Notice::Failed(error));
                    }
                    return;
                }
            }
        }
    }

    fn hear(&self, peer: u32, frame: Frame) {
        match frame.kind {
            // The one that leaves because of a failure ends its connection; that must not overtake the cause.
            Kind::Failed if self.is_first() => {
                self.tell_others(&frame, peer);
                (self.listener)(Notice::Failed(frame.error()));
            }
            Kind::Bye => {
                lock(&self.state).left.insert(peer);
            }
            Kind::Enter if self.rank == 0 => self.enter_as(peer, frame.number),
            Kind::Release if self.rank != 0 => (self.listener)(Notice::Released(frame.number)),
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

    /// Tells all ranks that the group has failed here.
    pub(crate) fn report(&self, error: &Error) {
        if !self.is_first() {
            return;
        }
        let told = match error.kind() {
            // The reason alone: who hears it puts the name before it.
            ErrorKind::Aborted => Error::new(
                ErrorKind::Aborted,
                error
                    .message()
                    .trim_start_matches(&format!("aborted by rank {}: ", self.rank)),
            ),
            _ => error.clone(),
        };
        let frame = Frame::of_error(Kind::Failed, self.rank, &told, error.context().peer);
        self.tell_others(&frame, self.rank);
    }

    /// Enters monitored barrier `number`; the listener hears when it opens.
    pub(crate) fn enter(&self, number: u64) {
        if self.rank == 0 {
            self.enter_as(0, number);
        } else {
            self.tell_others(&Frame::new(Kind::Enter, self.rank, number, ""), self.rank);
        }
    }

    fn enter_as(&self, rank: u32, number: u64) {
        let complete = {
            let mut state = lock(&self.state);
            let entered = state.entered.entry(number).or_default();
            entered.insert(rank);
            let complete = entered.len() == self.world as usize;
            if complete {
                state.entered.remove(&number);
            }
            complete
        };
        if complete {
            self.tell_others(&Frame::new(Kind::Release, 0, number, ""), 0);
            (self.listener)(Notice::Released(number));
        }
    }

    /// On rank 0: who has not entered monitored barrier `number`.
    pub(crate) fn missing(&self, number: u64) -> Vec<u32> {
        let state = lock(&self.state);
        let entered = state.entered.get(&number);
        (0..self.world)
            .filter(|r| entered.is_none_or(|e| !e.contains(r)))
            .collect()
    }

    /// Ranks that have left in good order.
    pub(crate) fn left(&self) -> Vec<u32> {
        lock(&self.state).left.iter().copied().collect()
    }

    /// Leaves: the others need not worry when the connections end. The one that comes second waits for the first, so that
    /// no rank ends the connections under a leave that is being written.
    pub(crate) fn bye(&self) {
        let mut said = lock(&self.leave);
        if !std::mem::replace(&mut *said, true) {
            self.tell_others(&Frame::new(Kind::Bye, self.rank, 0, ""), self.rank);
        }
    }

    /// Ends the connections.
    pub(crate) fn close(&self) {
        if std::mem::replace(&mut lock(&self.state).closed, true) {
            return;
        }
        for link in &self.links {
            let _ = lock(&link.writer).stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.close();
    }
}
