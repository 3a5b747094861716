//! One thread per configuration: takes submissions, moves bytes, watches deadlines and peers, and ends.
//!
//! The thread takes submissions out of the `queue`, runs collectives one after the other and point-to-point messages
//! beside them, and sleeps in `poll` in between. The first failure ends the engine (`farewell`): every peer is told so that
//! nobody waits (L27), everything pending fails with that cause, and the thread and its sockets are gone. Deadlines, peers
//! and work belong to this one epoch (L30).

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, OpKind, Result, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::exec::{Exec, Step};
use crate::p2p::Messages;
use crate::peer::{Incoming, Peer};
use crate::queue::{Ended, Shared, Stop, Submission, later, prepare};
use crate::wire::{self, Control, ControlKind};

/// A data connection that breaks gets this long until the control connection has said why.
const GRACE: Duration = Duration::from_millis(50);
/// Control frames that are read from one peer before the others get their turn.
const FRAMES: usize = 64;
/// Ranks other than 0 give rank 0 of a monitored barrier this long after the deadline to name the missing ones.
const VERDICT: Duration = Duration::from_millis(500);

/// How the thread's work came to an end.
enum End {
    Failed(Error),
    Left(String),
}

/// The state of the thread.
pub(crate) struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) peers: Vec<Option<Peer>>,
    pub(crate) waiting: VecDeque<Submission>,
    pub(crate) current: Option<Exec>,
    pub(crate) messages: Messages,
    /// The origin and the subject that a peer's abort named, if one came.
    pub(crate) reported: Option<(u32, u32)>,
    /// A loss reported by a peer while a collective runs; fails the group as soon as that one ends or is blocked.
    report: Option<Error>,
}

/// Starts the engine over connected peers (`None` at the own rank).
pub(crate) fn start(shared: &Arc<Shared>, peers: Vec<Option<Peer>>) -> Result<()> {
    let place = shared.place;
    let engine = Engine {
        shared: shared.clone(),
        peers,
        waiting: VecDeque::new(),
        current: None,
        messages: Messages::new(place),
        reported: None,
        report: None,
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
                tracing::debug!(rank = self.shared.place.rank, epoch = self.shared.place.epoch, %reason, "leaving");
                self.tell(ControlKind::Goodbye, 0, u32::MAX, self.shared.place.rank, &reason);
                self.last_words();
            }
        }
        // The sockets close here, before the end is announced.
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
        if let Some(end) = self.take_orders()? {
            return Ok(Some(end));
        }
        let mut moved = self.control()?;
        moved |= self.collective()?;
        self.check_deadlines()?;
        if !moved {
            self.sleep()?;
        }
        Ok(None)
    }

    fn is_idle(&self) -> bool {
        self.current.is_none() && self.waiting.is_empty() && self.messages.is_idle()
    }

    fn take_orders(&mut self) -> Result<Option<End>> {
        let (incoming, stop) = {
            let mut queue = self.shared.lock();
            (std::mem::take(&mut queue.incoming), queue.stop.clone())
        };
        for submission in incoming {
            if submission.seq.is_some() {
                self.waiting.push_back(submission);
            } else {
                let Submission {
                    op,
                    completer,
                    deadline,
                    submitted,
                    ..
                } = submission;
                self.messages
                    .submit(op, completer, deadline, submitted, &mut self.peers)?;
            }
        }
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
                moved |= self.messages.pull(peer).map_err(place)?;
                match peer.control.next().map_err(place)? {
                    None => break,
                    Some(Incoming::Piece(frame)) => {
                        self.check_epoch(rank, &frame)?;
                        if let Some(Some(peer)) = self.peers.get_mut(index) {
                            self.messages.piece(rank, &frame, peer)?;
                        }
                    }
                    Some(Incoming::Frame(frame, text)) => {
                        self.check_epoch(rank, &frame)?;
                        self.frame(rank, &frame, &text).map_err(place)?;
                    }
                }
                moved = true;
            }
            let Some(Some(peer)) = self.peers.get_mut(index) else {
                continue;
            };
            moved |= self.messages.flush(peer);
            // A header that waits says what the peer is doing, whether or not this rank is doing anything.
            peer.data
                .fill()
                .map_err(|e| e.with_peer(peer.rank).with_peer_address(peer.address.clone()))?;
            if let Some(how) = peer.control.link.read_closed.clone() {
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
            ControlKind::Goodbye => {
                if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
                    tracing::debug!(rank, reason = %text, "a peer left in good order");
                    peer.left = Some(text.into_owned());
                }
                Ok(())
            }
            ControlKind::Abort => {
                let origin = frame.b;
                self.reported = Some((origin, frame.a));
                let kind = wire::kind_of(frame.code);
                let text = if kind == ErrorKind::Aborted {
                    text.into_owned()
                } else {
                    format!("rank {origin} reports: {text}")
                };
                let mut error = Error::new(kind, text).with_epoch(self.shared.place.epoch);
                if frame.a != u32::MAX && frame.a != self.shared.place.rank {
                    error = error.with_peer(frame.a);
                }
                if error.context().peer.is_none() {
                    error = error.with_peer(origin);
                }
                // As with a loss that is seen here: what runs may have all it needs already.
                if kind == ErrorKind::PeerLost && self.current.is_some() {
                    self.report.get_or_insert(error);
                    return Ok(());
                }
                Err(error)
            }
            _ => self.messages.frame(rank, frame, &mut self.peers),
        }
    }

    /// The control connection of a peer has ended: with a good-bye that is in order, without it the peer is gone.
    ///
    /// A rank may have ended right after its part in the collective that runs here. What it sent before is still in
    /// the socket, so the collective goes on until it needs more than that; see `blocked`.
    fn control_closed(&mut self, index: usize, how: &str) -> Result<()> {
        let busy = self.current.is_some();
        let Some(Some(peer)) = self.peers.get_mut(index) else {
            return Ok(());
        };
        if peer.left.is_none() {
            peer.gone.get_or_insert_with(|| how.to_string());
        }
        let Some(Some(peer)) = self.peers.get(index) else {
            return Ok(());
        };
        let needed = self.messages.needs(peer.rank);
        match &peer.left {
            None if needed || !busy => Err(self.lost(peer, how)),
            Some(reason) if needed => Err(self.lost(peer, &format!("left the group ({reason})"))),
            _ => Ok(()),
        }
    }

    fn lost(&self, peer: &Peer, how: &str) -> Error {
        let progress = self
            .current
            .as_ref()
            .map(|e| format!(" {}", e.progress_text(e.rounds())))
            .unwrap_or_default();
        peer.error(ErrorKind::PeerLost, format!("{how}{progress}"))
            .with_epoch(self.shared.place.epoch)
    }

    /// Runs the collective at the head. True if one ended.
    fn collective(&mut self) -> Result<bool> {
        if self.current.is_none() {
            if let Some(report) = self.report.take() {
                return Err(report);
            }
            let Some(submission) = self.waiting.pop_front() else {
                return Ok(false);
            };
            let seq = submission.seq.unwrap_or(0);
            match prepare(submission, seq, self.shared.place) {
                Ok(exec) => self.current = Some(exec),
                Err(failed) => {
                    let (error, completer) = *failed;
                    completer.fail(error.clone(), Vec::new());
                    return Err(error);
                }
            }
        }
        let Some(exec) = &mut self.current else {
            return Ok(false);
        };
        let step = exec.progress(&mut self.peers, self.shared.interrupt())?;
        // Whoever waits looks at everybody's header, not only at those of its own round.
        for peer in self.peers.iter_mut().flatten() {
            peer.data
                .fill()
                .map_err(|e| e.with_peer(peer.rank).with_peer_address(peer.address.clone()))?;
            if step != Step::Finished {
                exec.inspect(peer)?;
            }
        }
        match step {
            Step::Finished => {
                if let Some(exec) = self.current.take() {
                    exec.succeed();
                }
                Ok(true)
            }
            Step::Busy => Ok(true),
            Step::Waiting => Ok(false),
            Step::Blocked(rank) => {
                self.blocked(rank)?;
                Ok(false)
            }
        }
    }

    /// The collective needs a rank whose data connection is closed: wait a little for the reason, then give up.
    fn blocked(&mut self, rank: u32) -> Result<()> {
        if let Some(report) = self.report.take() {
            return Err(report);
        }
        let now = Instant::now();
        let Some(Some(peer)) = self.peers.get_mut(rank as usize) else {
            return Ok(());
        };
        let since = *peer.suspect.get_or_insert(now);
        let left = peer.left.clone();
        let link = &peer.data.link;
        let how = link.read_closed.clone().or_else(|| link.write_closed.clone());
        let Some(Some(peer)) = self.peers.get(rank as usize) else {
            return Ok(());
        };
        match left {
            None if peer.gone.is_some() => Err(self.lost(peer, peer.gone.as_deref().unwrap_or_default())),
            Some(reason) => Err(self.lost(peer, &format!("left the group ({reason})"))),
            None if now.duration_since(since) >= GRACE => {
                Err(self.lost(peer, how.as_deref().unwrap_or("closed the connection")))
            }
            None => Ok(()),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let collectives = self
            .waiting
            .iter()
            .map(|s| s.deadline)
            .chain(self.current.iter().map(|e| self.due(e)));
        let suspects = self
            .peers
            .iter()
            .flatten()
            .filter_map(|p| p.suspect.map(|since| later(since, GRACE)));
        let drain = match &self.shared.lock().stop {
            Some(Stop::Drain(deadline)) => Some(*deadline),
            _ => None,
        };
        collectives
            .chain(suspects)
            .chain(self.messages.deadline())
            .chain(drain)
            .min()
    }

    fn due(&self, exec: &Exec) -> Instant {
        if exec.kind == OpKind::MonitoredBarrier && self.shared.place.rank != 0 {
            later(exec.deadline, VERDICT)
        } else {
            exec.deadline
        }
    }

    fn check_deadlines(&mut self) -> Result<()> {
        let now = Instant::now();
        if let Some(exec) = &self.current
            && self.due(exec) <= now
        {
            return Err(self.overdue(exec));
        }
        if let Some(queued) = self.waiting.iter().find(|s| s.deadline <= now) {
            let behind = self
                .current
                .as_ref()
                .map(|e| format!(" behind {} #{}", e.kind, e.seq))
                .unwrap_or_default();
            return Err(Error::timeout(format!(
                "timed out after {:.1} s while {} #{} was still queued{behind}",
                queued.submitted.elapsed().as_secs_f64(),
                queued.op.kind(),
                queued.seq.unwrap_or(0),
            ))
            .with_epoch(self.shared.place.epoch));
        }
        self.messages.overdue(now).map_or(Ok(()), Err)
    }

    fn overdue(&self, exec: &Exec) -> Error {
        let (senders, takers) = exec.waiting_for();
        let world = self.shared.place.world;
        let elapsed = exec.submitted.elapsed().as_secs_f64();
        let list = |ranks: &[u32]| {
            let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
            format!(
                "{} {}",
                if names.len() == 1 { "rank" } else { "ranks" },
                names.join(", ")
            )
        };
        let text = if exec.kind == OpKind::MonitoredBarrier && self.shared.place.rank == 0 {
            let missing = match senders.as_slice() {
                [first, ..] if !exec.wait_all => format!("rank {first} (the first one found)"),
                all => list(all),
            };
            format!("{missing} of {world} did not reach the barrier within {elapsed:.1} s")
        } else {
            let mut waits = Vec::new();
            if !senders.is_empty() {
                waits.push(format!("waiting for {} of {world}", list(&senders)));
            }
            if !takers.is_empty() {
                waits.push(format!("{} of {world} not taking data", list(&takers)));
            }
            format!(
                "timed out after {elapsed:.1} s, {}: {}",
                exec.progress_text(exec.rounds()),
                waits.join("; ")
            )
        };
        Error::timeout(text).with_epoch(self.shared.place.epoch)
    }

    /// Blocks until a socket that matters is ready, somebody calls, or a deadline passes.
    fn sleep(&mut self) -> Result<()> {
        let wake_at = self.next_deadline();
        let mut interest = Vec::with_capacity(self.peers.len() * 2);
        let mut fds = vec![PollFd::new(self.shared.waker(), PollFlags::IN)];
        for (index, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let control = &peer.control;
            let takes = self.current.as_ref().is_some_and(|e| e.wants_write(peer.rank))
                && peer.data.link.write_closed.is_none();
            let wants = [
                (
                    false,
                    &control.link,
                    control.link.read_closed.is_none(),
                    control.wants_write(),
                ),
                (true, &peer.data.link, peer.data.wants_read(), takes),
            ];
            for (is_data, link, read, write) in wants {
                // Something that could have moved did not get its turn: do not sleep at all.
                if (read && link.readable) || (write && link.writable) {
                    return Ok(());
                }
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, read);
                flags.set(PollFlags::OUT, write);
                if !flags.is_empty() {
                    fds.push(PollFd::from_borrowed_fd(link.as_fd(), flags));
                    interest.push((index, is_data));
                }
            }
        }
        let timeout = wake_at.map(|at| {
            // Rounded up, so that a deadline has passed when poll returns.
            let left = time_left(at).saturating_add(Duration::from_micros(100));
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("waiting for sockets", e.into())),
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        self.shared.waker().drain();
        let failed = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        for ((index, is_data), flags) in interest.into_iter().zip(ready.into_iter().skip(1)) {
            let Some(Some(peer)) = self.peers.get_mut(index) else {
                continue;
            };
            let link = if is_data {
                &mut peer.data.link
            } else {
                &mut peer.control.link
            };
            link.readable |= flags.intersects(PollFlags::IN | failed);
            link.writable |= flags.intersects(PollFlags::OUT | failed);
        }
        Ok(())
    }
}
