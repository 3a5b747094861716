//! One thread per configuration: serves the control connections, watches deadlines and peers, drives what was submitted, and ends.
//!
//! The thread takes orders out of the `queue`, drives the `executor` of collectives and the `channels` of messages unless a caller does, and sleeps in `poll` in between. The first failure ends the engine (`leave`): every peer is told so that
//! none waits (L27), everything pending fails with that cause, and the thread and its sockets are gone. Deadlines, peers
//! and work belong to this one epoch (L30).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result, time_left};
use rustix::event::{PollFd, PollFlags};

use crate::channels::Channels;
use crate::executor::{Executor, Turn, still_queued, wait_for};
use crate::peer::{Fate, Peer};
use crate::queue::{Ended, Shared, Stop, Taken};
use crate::transport::lines::Listener;
use crate::transport::shm::Sleep;
use crate::wire::{self, Control, ControlKind};

/// Control frames that are read from one peer before the others get their turn.
const FRAMES: usize = 64;

/// How the thread's work came to an end.
enum End {
    Failed(Error),
    Left(String),
}

/// The state of the thread.
pub(crate) struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) peers: Vec<Option<Peer>>,
    /// While this thread drives it.
    pub(crate) executor: Option<Box<Executor>>,
    /// Likewise.
    pub(crate) channels: Option<Box<Channels>>,
    /// The origin and the subject that a peer's abort named, if one came.
    pub(crate) reported: Option<(u32, u32)>,
    /// How often the thread's bell had rung before this turn.
    pub(crate) rung: u32,
}

/// Starts the engine over connected peers (`None` at the own rank).
pub(crate) fn start(shared: &Arc<Shared>, mut peers: Vec<Option<Peer>>) -> Result<()> {
    let place = shared.place;
    let to_wake = Arc::downgrade(shared);
    let listener: Listener = Arc::new(move || {
        if let Some(shared) = to_wake.upgrade() {
            shared.wake();
        }
    });
    for peer in peers.iter_mut().flatten() {
        peer.control.listen(&listener);
    }
    let engine = Engine {
        shared: shared.clone(),
        peers,
        executor: None,
        channels: None,
        reported: None,
        rung: 0,
    };
    let ended = Ended(shared.clone());
    std::thread::Builder::new()
        .name(format!("ox-gloo-{}", place.rank))
        .spawn(move || {
            let ended = ended;
            engine.run();
            drop(ended);
        })
        .map(drop)
        .map_err(|e| Error::io("starting the engine's thread", e))
}

impl Engine {
    fn run(mut self) {
        match self.serve() {
            End::Failed(error) => self.fail(error),
            End::Left(reason) => {
                tracing::debug!(rank = self.shared.place.rank, epoch = %self.shared.place.epoch, %reason, "leaving");
                self.tell(ControlKind::Leave, 0, u32::MAX, self.shared.place.rank, &reason);
                self.speak();
                let driven = self.shared.recall((self.executor.take(), self.channels.take()));
                self.part(driven);
                self.failure_notices();
            }
        }
        // The sockets close here and the memory goes, before the end is announced.
    }

    fn serve(&mut self) -> End {
        loop {
            let ended = match self.turn() {
                Ok(None) => continue,
                Ok(Some(end)) => end,
                Err(error) => End::Failed(error),
            };
            // An order that interrupted the turn is the true cause.
            if let End::Failed(e) = &ended
                && e.kind() == ErrorKind::Aborted
                && self.shared.interrupt().load(Ordering::Acquire)
                && let Ok(Some(ordered)) = self.take_orders()
            {
                return ordered;
            }
            return ended;
        }
    }

    /// One turn of the loop: look for orders, move what can be moved, sleep until something can.
    fn turn(&mut self) -> Result<Option<End>> {
        self.rung = self.shared.thread_bell().count();
        if let Some(end) = self.take_orders()? {
            return Ok(Some(end));
        }
        let mut moved = self.control()?;
        self.shared.looked();
        moved |= self.carry_messages()?;
        moved |= self.collectives()?;
        self.check_deadlines()?;
        if !moved {
            self.sleep()?;
        }
        Ok(None)
    }

    fn is_idle(&self) -> bool {
        !self.shared.is_busy() && self.channels_are_idle()
    }

    /// True unless messages are pending, with or without a driver.
    fn channels_are_idle(&self) -> bool {
        let queue = self.shared.lock();
        let channels = self.channels.as_ref().or(queue.channels.as_ref());
        queue.messages.is_empty() && channels.is_some_and(|channels| channels.is_idle())
    }

    /// Drives the messages, unless a caller does. True if anything moved.
    fn carry_messages(&mut self) -> Result<bool> {
        if self.channels.is_none() {
            self.channels = self.shared.take_busy_channels();
        }
        let Some(channels) = &mut self.channels else {
            return Ok(false);
        };
        if let Some(error) = channels.failure.take() {
            return Err(error);
        }
        let moved = channels.turn(&self.shared)?;
        channels.check_deadlines()?;
        if channels.is_idle()
            && let Some(channels) = self.channels.take()
        {
            self.shared.give_back_channels(channels, Taken::Engine);
            // Another turn: orders that waited for this, and what came in between.
            return Ok(true);
        }
        Ok(moved)
    }

    fn take_orders(&mut self) -> Result<Option<End>> {
        let stop = self.shared.lock().stop.clone();
        Ok(match stop {
            None => None,
            Some(Stop::Abort(error)) => Some(End::Failed(error)),
            Some(Stop::Leave(reason)) if self.is_idle() => Some(End::Left(reason)),
            Some(Stop::Leave(reason)) => {
                let text = format!(
                    "rank {} left while work was pending: {reason}",
                    self.shared.place.rank
                );
                Some(End::Failed(
                    Error::new(ErrorKind::Aborted, text).with_epoch(self.shared.place.epoch),
                ))
            }
            Some(Stop::Drain(_)) if self.is_idle() => Some(End::Left("shut down".to_string())),
            Some(Stop::Drain(deadline)) if time_left(deadline).is_zero() => {
                self.shared.lock().cut_short = true;
                let text = format!(
                    "rank {} shut down; its pending work was cut short at the deadline",
                    self.shared.place.rank
                );
                Some(End::Failed(
                    Error::new(ErrorKind::Aborted, text).with_epoch(self.shared.place.epoch),
                ))
            }
            Some(Stop::Drain(_)) => None,
        })
    }

    /// Reads and writes all control connections. True if anything moved.
    fn control(&mut self) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.peers.len() {
            for _ in 0..FRAMES {
                let Some(Some(peer)) = self.peers.get_mut(index) else {
                    break;
                };
                let rank = peer.rank;
                let place = |e: Error| {
                    if e.context().peer.is_some() {
                        e
                    } else {
                        e.with_peer(rank)
                    }
                };
                let Some((frame, text)) = peer.control.next().map_err(place)? else {
                    break;
                };
                self.check_epoch(rank, &frame)?;
                self.frame(rank, &frame, &text).map_err(place)?;
                moved = true;
            }
            let Some(Some(peer)) = self.peers.get_mut(index) else {
                continue;
            };
            moved |= peer.control.flush();
            if let Some(how) = peer.control.closed().map(str::to_string) {
                self.control_closed(index, &how)?;
            }
        }
        Ok(moved)
    }

    fn check_epoch(&self, rank: u32, frame: &Control) -> Result<()> {
        let epoch = self.shared.place.epoch;
        if frame.epoch == epoch {
            return Ok(());
        }
        let text = format!("sent a frame of epoch {}; this is epoch {epoch}", frame.epoch);
        Err(Error::new(ErrorKind::Protocol, text).with_peer(rank))
    }

    fn frame(&mut self, rank: u32, frame: &Control, text: &[u8]) -> Result<()> {
        let text = String::from_utf8_lossy(text);
        match frame.kind {
            ControlKind::Leave => {
                if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
                    tracing::debug!(rank, reason = %text, "a peer left in good order");
                    let text = text.into_owned();
                    peer.left = Some(text.clone());
                    self.shared.tell_fate(rank, Fate { left: true, text });
                }
                Ok(())
            }
            ControlKind::Abort => {
                let about = (frame.b, frame.a);
                let error = self.words(frame, text.into_owned());
                if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
                    peer.words.get_or_insert_with(|| error.clone());
                }
                // As with a loss that is seen here: what runs may have all it needs already.
                if error.kind() == ErrorKind::PeerLost && self.shared.is_busy() {
                    self.reported.get_or_insert(about);
                    self.shared.tell_report(error);
                    return Ok(());
                }
                self.reported = Some(about);
                Err(error)
            }
            // Said once, before the group was connected; messages are refused where they are read.
            _ => Err(Error::new(
                ErrorKind::Protocol,
                "sent a control frame out of turn",
            )),
        }
    }

    /// What a rank says before it ends: the cause, and whom it blames.
    fn words(&self, frame: &Control, text: String) -> Error {
        let (origin, subject) = (frame.b, frame.a);
        let kind = wire::kind_of(frame.code);
        let prefix = format!("rank {origin} reports: ");
        // The rank that passed it on has put that before it already.
        let text = if kind == ErrorKind::Aborted || text.starts_with(&prefix) {
            text
        } else {
            prefix + &text
        };
        let named = subject != u32::MAX && subject != self.shared.place.rank;
        Error::new(kind, text)
            .with_epoch(self.shared.place.epoch)
            .with_peer(if named { subject } else { origin })
    }

    /// The control connection of a peer has ended: with a leave that is in order, without it the peer is gone.
    ///
    /// A rank may have ended right after its part in the collective that runs here. What it sent before is still in
    /// the socket or the ring, so the collective goes on until it needs more than that; see `Executor::blocked`.
    ///
    /// A peer that ended because of another one has said so: that one is blamed, not the peer that passed it on.
    fn control_closed(&mut self, index: usize, how: &str) -> Result<()> {
        let busy = self.shared.is_busy();
        let Some(Some(peer)) = self.peers.get_mut(index) else {
            return Ok(());
        };
        if peer.left.is_none() && peer.gone.is_none() {
            peer.gone = Some(how.to_string());
            let text = how.to_string();
            self.shared.tell_fate(peer.rank, Fate { left: false, text });
        }
        let lost = |how: &str| {
            let error = peer.error(ErrorKind::PeerLost, how);
            Err(error.with_epoch(self.shared.place.epoch))
        };
        // Who needs a rank that has left is told by its fate, where it waits.
        match &peer.left {
            None if !busy => match peer.words.clone().or_else(|| self.shared.report()) {
                Some(words) => Err(words),
                None => lost(how),
            },
            _ => Ok(()),
        }
    }

    /// Drives the collectives, unless a caller does. True if anything moved.
    fn collectives(&mut self) -> Result<bool> {
        if self.executor.is_none() {
            self.executor = self.shared.take_busy_executor();
            if self.executor.is_none() {
                // What was put off while they ran is due now.
                return match self.shared.report() {
                    Some(report) if !self.shared.is_busy() => Err(report),
                    _ => Ok(false),
                };
            }
        }
        let Some(executor) = &mut self.executor else {
            return Ok(false);
        };
        if let Some(error) = executor.failure.take() {
            return Err(error);
        }
        match executor.turn(&self.shared, Some(u64::MAX))? {
            Turn::Moved | Turn::Ended => Ok(true),
            Turn::Waiting => {
                executor.check_deadlines(&self.shared)?;
                Ok(false)
            }
            Turn::Idle => {
                if let Some(executor) = self.executor.take() {
                    self.shared.give_back(executor, Taken::Engine);
                }
                // Another turn: orders that waited for this, and what came in between.
                Ok(true)
            }
        }
    }

    /// Until when this thread may sleep.
    fn next_deadline(&self) -> Option<Instant> {
        let mut queue = self.shared.lock();
        let collectives = queue.collectives.iter().map(|s| s.deadline);
        let drain = match &queue.stop {
            Some(Stop::Drain(deadline)) => Some(*deadline),
            _ => None,
        };
        // Also of what is parked.
        let executor = self.executor.as_ref().or(queue.executor.as_ref());
        let executor = executor.and_then(|executor| executor.next_deadline(&self.shared));
        let channels = self.channels.as_ref().or(queue.channels.as_ref());
        let channels = channels.and_then(|channels| channels.next_deadline());
        let looks_again = queue.looks_again.filter(|at| !time_left(*at).is_zero());
        let until = collectives
            .chain(executor)
            .chain(looks_again)
            .chain(channels)
            .chain(drain)
            .min();
        queue.looks_again = looks_again;
        queue.sleeps_until = until;
        until
    }

    fn check_deadlines(&mut self) -> Result<()> {
        let now = Instant::now();
        let queue = self.shared.lock();
        if let Some(queued) = queue.collectives.iter().find(|s| s.deadline <= now) {
            let late = (queued.op.kind(), queued.seq.unwrap_or(0));
            let error = still_queued(late, queued.submitted, queue.running);
            return Err(error.with_epoch(self.shared.place.epoch));
        }
        Ok(())
    }

    /// Blocks until a socket that matters is ready, a caller or a peer rings, or a deadline passes.
    fn sleep(&mut self) -> Result<()> {
        let how = match self.shared.waker() {
            Some(_) => Sleep::Descriptor,
            None => Sleep::Thread,
        };
        if let Some(executor) = &mut self.executor {
            // Armed first, so that what comes between the last look and the sleep rings.
            self.shared.bell().arm(how);
            match executor.turn(&self.shared, Some(u64::MAX)) {
                Ok(Turn::Waiting) => {}
                other => {
                    self.disarm();
                    return other.map(drop);
                }
            }
        }
        if let Some(channels) = &mut self.channels {
            self.shared.channels_bell().arm(how);
            let moved = channels.turn(&self.shared);
            if !matches!(moved, Ok(false)) {
                self.disarm();
                return moved.map(drop);
            }
        }
        let slept = match how {
            Sleep::Descriptor => self.sleep_on_descriptors(),
            Sleep::Thread | Sleep::Word => {
                let until = self.next_deadline();
                self.shared.thread_bell().sleep(self.rung, until);
                Ok(())
            }
        };
        self.disarm();
        slept
    }

    /// No sleep, or it is over.
    fn disarm(&self) {
        if self.executor.is_some() {
            self.shared.bell().disarm();
            self.shared.bell().drain();
        }
        if self.channels.is_some() {
            self.shared.channels_bell().disarm();
            self.shared.channels_bell().drain();
        }
    }

    fn sleep_on_descriptors(&mut self) -> Result<()> {
        let wake_at = self.next_deadline();
        // They stand first, in this order: what wakes the thread, and below the bells of what it drives.
        let bells = (
            self.shared.bell().descriptor(),
            self.shared.channels_bell().descriptor(),
        );
        let (Some(waker), (Some(bell), Some(channels_bell))) = (self.shared.waker(), bells) else {
            return Ok(());
        };
        let mut fds = vec![PollFd::new(waker, PollFlags::IN)];
        let mut controls = Vec::with_capacity(self.peers.len());
        let (mut ports, mut sockets) = (Vec::new(), Vec::new());
        for (index, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let Some(connection) = peer.control.connection() else {
                continue;
            };
            let link = &connection.link;
            let (read, write) = (link.read_closed.is_none(), connection.wants_write());
            // Something that could have moved did not get its turn: do not sleep at all.
            if (read && link.readable) || (write && link.writable) {
                return Ok(());
            }
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, read);
            flags.set(PollFlags::OUT, write);
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(link.as_fd(), flags));
                controls.push(index);
            }
        }
        if let Some(executor) = &self.executor {
            fds.push(PollFd::from_borrowed_fd(bell, PollFlags::IN));
            if executor.interest(&mut fds, &mut ports).is_none() {
                return Ok(());
            }
        }
        if let Some(channels) = &self.channels {
            fds.push(PollFd::from_borrowed_fd(channels_bell, PollFlags::IN));
            if channels.interest(&mut fds, &mut sockets).is_none() {
                return Ok(());
            }
        }
        wait_for(&mut fds, wake_at)?;
        let mut ready: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        drop(fds);
        waker.drain();
        let rest = ready.split_off(controls.len().min(ready.len()));
        let failed = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        for (index, flags) in controls.into_iter().zip(ready) {
            let Some(Some(peer)) = self.peers.get_mut(index) else {
                continue;
            };
            if let Some(connection) = peer.control.connection_mut() {
                connection.link.readable |= flags.intersects(PollFlags::IN | failed);
                connection.link.writable |= flags.intersects(PollFlags::OUT | failed);
            }
        }
        // The bells stand before what is watched with them.
        let mut rest = rest.as_slice();
        if let Some(executor) = &mut self.executor {
            let ready = rest.get(1..).unwrap_or(&[]);
            executor.heard(&ports, ready);
            rest = ready.get(ports.len()..).unwrap_or(&[]);
        }
        if let Some(channels) = &mut self.channels {
            channels.heard(&sockets, rest.get(1..).unwrap_or(&[]));
        }
        Ok(())
    }
}
