//! The executor of a group: everything that its collectives need, driven by one thread at a time.
//!
//! Collectives run one after the other; while one waits for other ranks, what the next ones send first goes out already, so that
//! a rank that wakes finds more than one operation's data and a link does not rest between two. The thread that takes the executor out of the queue drives it: the engine's thread for what was
//! submitted, or the caller of a blocking call on an idle group, which saves two hand-overs. Control connections, point-to-point
//! messages and orders stay with the engine's thread, so they go on under any driver.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, OpKind, Result, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::execution::{Execution, Step};
use crate::peer::GRACE;
use crate::port::{Port, Wire};
use crate::queue::{Shared, Taken, later};
use crate::spin_budget::SpinBudget;
use crate::transport::tcp::Link;

/// Ranks other than 0 give rank 0 of a monitored barrier this long after the deadline to name the missing ones.
const VERDICT: Duration = Duration::from_millis(500);

/// Operations that may have begun to send before it is their turn.
const AHEAD: usize = 16;

/// What came of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Something moved.
    Moved,
    /// A collective has ended.
    Ended,
    /// It waits for other ranks.
    Waiting,
    /// There is nothing to do.
    Idle,
}

/// The state of a group's collectives.
pub(crate) struct Executor {
    /// By rank; `None` at the own one.
    pub(crate) ports: Vec<Option<Port>>,
    pub(crate) current: Option<Execution>,
    /// The next ones, which send already.
    pub(crate) ahead: VecDeque<Execution>,
    /// Why the driver gave up: the engine's thread ends the group with it.
    pub(crate) failure: Option<Error>,
    /// How often a driver looks again before it sleeps.
    pub(crate) spin_budget: SpinBudget,
    /// Some payloads go over several connections: these know one operation at a time.
    railed: bool,
    /// Private memory of short operations.
    pub(crate) scratch: Vec<u8>,
    /// No thread drives it, and the bell is armed for the engine's thread.
    pub(crate) parked: bool,
}

impl Executor {
    /// `apart`: the ranks of this host have a core each.
    pub(crate) fn new(ports: Vec<Option<Port>>, apart: bool) -> Self {
        let mut others = ports.iter().flatten();
        let spin_budget = if others.all(|p| matches!(p.wire, Wire::Memory(_))) {
            SpinBudget::of(ports.iter().flatten().count(), apart)
        } else {
            SpinBudget::with_sockets()
        };
        Self {
            spin_budget,
            railed: ports.iter().flatten().any(|p| !p.rails.is_empty()),
            ports,
            current: None,
            ahead: VecDeque::new(),
            failure: None,
            scratch: Vec::new(),
            parked: false,
        }
    }

    /// True if no operation is in the middle of anything.
    pub(crate) fn is_idle(&self) -> bool {
        self.current.is_none() && self.ahead.is_empty() && self.failure.is_none()
    }

    /// Takes in what the engine's thread has learnt about the peers; true if that was something.
    pub(crate) fn look(&mut self, shared: &Shared) -> bool {
        if !shared.heed() {
            return false;
        }
        for port in self.ports.iter_mut().flatten() {
            if let Wire::Memory(memory) = &mut port.wire
                && memory.closed.is_none()
            {
                memory.closed = shared.fate(port.rank).map(|fate| fate.text);
            }
        }
        true
    }

    /// One turn: starts the next collective up to number `last` if none runs, and moves it on.
    pub(crate) fn turn(&mut self, shared: &Shared, last: Option<u64>) -> Result<Turn> {
        self.look(shared);
        if self.current.is_none() {
            // Also once a loss was reported: all that the next one needs may be here. It fails where it needs more.
            self.current = match self
                .ahead
                .pop_front_if(|execution| last.is_some_and(|last| execution.seq <= last))
            {
                Some(execution) => {
                    shared.begins(&execution);
                    Some(execution)
                }
                None if self.ahead.is_empty() => shared.pop(last)?,
                None => None,
            };
            if self.current.is_none() {
                return Ok(Turn::Idle);
            }
        }
        let Some(execution) = &mut self.current else {
            return Ok(Turn::Idle);
        };
        let step = execution.progress(&mut self.ports, shared.interrupt())?;
        if step == Step::Finished {
            if let Some(execution) = self.current.take() {
                shared.finished();
                execution.succeed();
            }
            return Ok(Turn::Ended);
        }
        // A rank that waits looks at every rank's header, not only at those of its own round.
        let mut closed = false;
        for port in self.ports.iter_mut().flatten() {
            let open = !port.read_closed();
            port.fill().map_err(|e| port.blame(e))?;
            execution.inspect(port)?;
            closed |= open && port.read_closed();
        }
        let moved = self.look_ahead(shared)?;
        match step {
            Step::Busy => Ok(Turn::Moved),
            _ if moved => Ok(Turn::Moved),
            // Found only now, and a closed socket is watched no more: the operation must hear of it before a thread sleeps.
            _ if closed => Ok(Turn::Moved),
            Step::Blocked(rank) => {
                self.blocked(shared, rank)?;
                Ok(Turn::Waiting)
            }
            _ => Ok(Turn::Waiting),
        }
    }

    /// Once the current operation has nothing more to send: the first bytes of the next ones, in order. True if any moved.
    fn look_ahead(&mut self, shared: &Shared) -> Result<bool> {
        let waiting = shared.unfinished() > 1 && !shared.in_trouble();
        let sent = |execution: &Execution| execution.kind != OpKind::MonitoredBarrier && execution.has_sent();
        if !waiting || self.railed || !self.current.as_ref().is_some_and(sent) {
            return Ok(false);
        }
        let mut moved = false;
        for index in 0..AHEAD {
            if index == self.ahead.len() {
                if shared.unfinished() <= index + 1 {
                    break;
                }
                let Some(execution) = shared.pop_ahead(u64::MAX)? else {
                    break;
                };
                self.ahead.push_back(execution);
            }
            let Some(execution) = self.ahead.get_mut(index) else {
                break;
            };
            moved |= execution.send_ahead(&mut self.ports, shared.interrupt())?;
            if !sent(execution) {
                break;
            }
        }
        Ok(moved)
    }

    /// `rank` is needed and nothing more comes from it: wait a little for the reason, then give up.
    ///
    /// A rank that has ended because of another one said so on its control connection before, so that is read to its end first
    /// (by the engine's thread): the rank that was lost is blamed, not the one that passed the loss on.
    pub(crate) fn blocked(&mut self, shared: &Shared, rank: u32) -> Result<()> {
        // The engine's thread tells what a rank said before it tells that the rank is gone.
        let fate = shared.fate(rank);
        if let Some(report) = shared.report() {
            return Err(report);
        }
        let progress = self
            .current
            .as_ref()
            .map(|e| format!(" {}", e.progress_text(e.rounds())))
            .unwrap_or_default();
        let lost = |port: &Port, how: &str| {
            let text = format!("{how}{progress}");
            Err(port
                .error(ErrorKind::PeerLost, text)
                .with_epoch(shared.place.epoch))
        };
        let Some(Some(port)) = self.ports.get_mut(rank as usize) else {
            return Ok(());
        };
        let now = Instant::now();
        if port.suspect.is_none() {
            shared.wake();
        }
        let (since, looks) = *port.suspect.get_or_insert_with(|| (now, shared.looks()));
        let waited = now.duration_since(since);
        // One look may have begun before.
        let looked = shared.looks() >= looks + 2;
        if waited >= GRACE && !looked {
            shared.wake();
        }
        match fate {
            Some(fate) if fate.left => lost(port, &format!("left the group ({})", fate.text)),
            Some(fate) => lost(port, &fate.text),
            // However long that takes: a process that was stopped or had no core has heard nothing yet. The operation's deadline stands.
            None if waited >= GRACE && looked => {
                let how = port.closed().unwrap_or("closed the connection").to_string();
                lost(port, &how)
            }
            None => Ok(()),
        }
    }

    fn due(&self, shared: &Shared) -> Option<Instant> {
        self.current.as_ref().map(|execution| {
            if execution.kind == OpKind::MonitoredBarrier && shared.place.rank != 0 {
                later(execution.deadline, VERDICT)
            } else {
                execution.deadline
            }
        })
    }

    /// When the driver must look again, whatever happens.
    pub(crate) fn next_deadline(&self, shared: &Shared) -> Option<Instant> {
        let now = Instant::now();
        let suspects = self.ports.iter().flatten().filter_map(|p| {
            let (since, _) = p.suspect?;
            let waited = now.saturating_duration_since(since);
            // Past the grace it is up to the engine's thread, which does not ring for every look.
            Some(if waited < GRACE {
                later(since, GRACE)
            } else {
                later(now, GRACE / 10)
            })
        });
        let ahead = self.ahead.iter().map(|execution| execution.deadline);
        suspects.chain(self.due(shared)).chain(ahead).min()
    }

    /// The error of an operation that is past its deadline.
    pub(crate) fn check_deadlines(&self, shared: &Shared) -> Result<()> {
        let (Some(execution), Some(due)) = (&self.current, self.due(shared)) else {
            return Ok(());
        };
        let now = Instant::now();
        if due <= now {
            return Err(overdue(execution, shared));
        }
        match self.ahead.iter().find(|next| next.deadline <= now) {
            Some(next) => Err(still_queued(
                (next.kind, next.seq),
                next.submitted,
                Some((execution.kind, execution.seq)),
            )
            .with_epoch(shared.place.epoch)),
            None => Ok(()),
        }
    }

    /// How the ranks are connected, in words.
    pub(crate) fn transport(&self) -> &'static str {
        let local = |p: &Port| matches!(p.wire, Wire::Memory(_));
        let mut ports = self.ports.iter().flatten();
        match (ports.clone().any(local), ports.all(local)) {
            (_, true) => "shm",
            (true, false) => "shm and tcp",
            (false, _) => "tcp",
        }
    }

    /// True if every rank shares memory: a driver needs to watch no socket.
    pub(crate) fn is_local(&self) -> bool {
        let mut ports = self.ports.iter().flatten();
        ports.all(|p| matches!(p.wire, Wire::Memory(_)))
    }

    /// The sockets that the current collective waits for, with what it waits for, and whose they are: rank and number of the
    /// connection. `None` if one has something already.
    pub(crate) fn interest<'a>(
        &'a self,
        fds: &mut Vec<PollFd<'a>>,
        whose: &mut Vec<(u32, usize)>,
    ) -> Option<()> {
        let Some(execution) = &self.current else {
            return Some(());
        };
        for port in self.ports.iter().flatten() {
            let Wire::Socket(link) = &port.wire else { continue };
            let read = link.read_closed.is_none() && port.wants_read() && !execution.holds(port.rank);
            let to_rails = execution.to_rails(port.rank);
            let mut all = std::iter::once(execution).chain(&self.ahead);
            let wants = to_rails.is_none() && all.any(|execution| execution.wants_write(port.rank));
            let write = wants && link.write_closed.is_none();
            if (read && port.is_readable()) || (write && link.writable) {
                return None;
            }
            watch(link, read, write, (port.rank, 0), fds, whose);
            if port.rails.is_empty() {
                continue;
            }
            let from_rails = execution.on_rails(port.rank);
            for (rail, number) in port.rails.iter().zip(1..) {
                let read = from_rails.is_some_and(|frame| rail.wants_read(frame));
                let write = to_rails.is_some_and(|more| rail.wants_write(more));
                if (read && rail.link.readable) || (write && rail.link.writable) {
                    return None;
                }
                watch(&rail.link, read, write, (port.rank, number), fds, whose);
            }
        }
        Some(())
    }

    /// Between two looks without a sleep nothing says what is ready: the sockets are simply tried.
    pub(crate) fn try_sockets(&mut self) {
        for port in self.ports.iter_mut().flatten() {
            let first = match &mut port.wire {
                Wire::Socket(link) => Some(link),
                Wire::Memory(_) => None,
            };
            for link in first
                .into_iter()
                .chain(port.rails.iter_mut().map(|r| &mut r.link))
            {
                link.readable = link.read_closed.is_none();
                link.writable = link.write_closed.is_none();
            }
        }
    }

    /// What poll said about the sockets of [`interest`](Self::interest).
    pub(crate) fn heard(&mut self, whose: &[(u32, usize)], ready: &[PollFlags]) {
        let failed = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        for ((rank, number), flags) in whose.iter().zip(ready) {
            if let Some(Some(port)) = self.ports.get_mut(*rank as usize)
                && let Some(link) = port.link_mut(*number)
            {
                link.readable |= flags.intersects(PollFlags::IN | failed);
                link.writable |= flags.intersects(PollFlags::OUT | failed);
            }
        }
    }

    /// Sleeps until something may have happened, or `until`. The bell is armed and everything was looked at since.
    pub(crate) fn sleep(&mut self, shared: &Shared, until: Instant) -> Result<()> {
        if self.is_local() {
            shared.bell().sleep(until);
            return Ok(());
        }
        let Some(bell) = shared.bell().descriptor() else {
            shared.bell().disarm();
            return Ok(());
        };
        let mut fds = vec![PollFd::from_borrowed_fd(bell, PollFlags::IN)];
        let mut whose = Vec::new();
        if self.interest(&mut fds, &mut whose).is_none() {
            shared.bell().disarm();
            return Ok(());
        }
        wait_for(&mut fds, Some(until))?;
        shared.bell().disarm();
        shared.bell().drain();
        let ready: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        drop(fds);
        self.heard(&whose, &ready);
        Ok(())
    }
}

/// Adds a connection to what poll looks at, if anything of it is waited for.
fn watch<'a>(
    link: &'a Link,
    read: bool,
    write: bool,
    who: (u32, usize),
    fds: &mut Vec<PollFd<'a>>,
    whose: &mut Vec<(u32, usize)>,
) {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, read);
    flags.set(PollFlags::OUT, write);
    if !flags.is_empty() {
        fds.push(PollFd::from_borrowed_fd(link.as_fd(), flags));
        whose.push(who);
    }
}

/// Blocks until a descriptor is ready or `until`, which is rounded up so that it has passed when this returns.
pub(crate) fn wait_for(fds: &mut [PollFd<'_>], until: Option<Instant>) -> Result<()> {
    let timeout = until.map(|at| {
        let left = time_left(at).saturating_add(Duration::from_micros(100));
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::io("waiting for sockets", e.into())),
    }
}

/// The error of an operation whose deadline passes before its turn has come.
pub(crate) fn still_queued(
    (kind, seq): (OpKind, u64),
    submitted: Instant,
    running: Option<(OpKind, u64)>,
) -> Error {
    let behind = running
        .map(|(kind, seq)| format!(" behind {kind} #{seq}"))
        .unwrap_or_default();
    Error::timeout(format!(
        "timed out after {:.1} s while {kind} #{seq} was still queued{behind}",
        submitted.elapsed().as_secs_f64(),
    ))
}

fn overdue(execution: &Execution, shared: &Shared) -> Error {
    let (senders, takers) = execution.waiting_for();
    let world = shared.place.world;
    let elapsed = execution.submitted.elapsed().as_secs_f64();
    let text = if execution.kind == OpKind::MonitoredBarrier && shared.place.rank == 0 {
        let missing = match senders.as_slice() {
            [first, ..] if !execution.wait_all => format!("rank {first} (the first one found)"),
            all => list(all),
        };
        format!("{missing} of {world} did not reach the barrier within {elapsed:.1} s")
    } else {
        let progress = execution.progress_text(execution.rounds());
        timed_out(elapsed, &progress, &senders, &takers, world)
    };
    Error::timeout(text).with_epoch(shared.place.epoch)
}

fn list(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let what = if names.len() == 1 { "rank" } else { "ranks" };
    format!("{what} {}", names.join(", "))
}

/// What a time-out says: how far the operation came and who was waited for.
pub(crate) fn timed_out(elapsed: f64, progress: &str, senders: &[u32], takers: &[u32], world: u32) -> String {
    let mut waits = Vec::new();
    if !senders.is_empty() {
        waits.push(format!("waiting for {} of {world}", list(senders)));
    }
    if !takers.is_empty() {
        waits.push(format!("{} of {world} not taking data", list(takers)));
    }
    format!("timed out after {elapsed:.1} s, {progress}: {}", waits.join("; "))
}

/// What a driver takes out of the queue, and gives back whatever happens.
pub(crate) struct Holder<'a> {
    shared: &'a Shared,
    executor: Option<Box<Executor>>,
}

impl<'a> Holder<'a> {
    pub(crate) fn new(shared: &'a Shared, executor: Box<Executor>) -> Self {
        Self {
            shared,
            executor: Some(executor),
        }
    }

    /// The executor. An error only after it was given back.
    pub(crate) fn executor(&mut self) -> Result<&mut Executor> {
        self.executor
            .as_deref_mut()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the executor was given back"))
    }

    /// What runs waits for others, and this thread does not; see [`Shared::park`].
    pub(crate) fn park(mut self) {
        if let Some(executor) = self.executor.take() {
            self.shared.park(executor);
        }
    }

    /// The driver gives up: the engine's thread ends the group with `error`.
    pub(crate) fn fail(mut self, error: Error) {
        if let Some(executor) = &mut self.executor {
            executor.failure.get_or_insert(error);
        }
    }
}

impl Drop for Holder<'_> {
    fn drop(&mut self) {
        if let Some(executor) = self.executor.take() {
            self.shared.give_back(executor, Taken::Caller);
        }
    }
}
