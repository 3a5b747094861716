//! The parent's view of one child: what was submitted and asked, and what becomes of it when the child ends.
//!
//! Callers put operations and calls in here and send their frames; the [`keeper`](crate::keeper) takes them out when the
//! child reports, or when the child is gone. Memory that the child may still touch stays in here until then (INV-8).

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::{Capabilities, Error, ErrorKind, Result, Status, Work, time_left};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::{Filled, Receiver};
use crate::front::Front;
use crate::options::IsolateOptions;
use crate::output::Tail;
use crate::pending::Pending;
use crate::pool::{Known, Memory, Pool, Region};
use crate::store::serve::Stores;
use crate::wire::frames::{Done, Order, Report, Settled};
use crate::{channel, clock};

/// An operation that is not reported this long after its deadline will not be: the child is killed. More than what a
/// backend takes to name the missing ranks, less than what `Work::wait_done` adds.
pub(crate) const MARGIN: Duration = Duration::from_millis(1500);
/// How often a caller on the express socket looks whether its work has ended otherwise.
const LOOK: Duration = Duration::from_millis(50);
/// Sending an order to a child that reads takes microseconds.
const SEND: Duration = Duration::from_secs(5);

/// How the child is to end.
#[derive(Clone)]
pub(crate) struct Ending {
    /// What pending work fails with.
    pub(crate) error: Error,
    /// What the child is told, so that it can tell the other ranks.
    pub(crate) farewell: Option<Arc<Order>>,
    /// Pending work fails when the child is killed or gone, not before: whoever sees it fail may end at once, and the child
    /// with it, but the other ranks are to be told first.
    pub(crate) hold: bool,
    pub(crate) kill_at: Instant,
}

type Greeting = Result<(Capabilities, Option<String>)>;

struct Call {
    answer: SyncSender<Result<Settled>>,
    /// Begins anew with a good answer.
    front: Option<Arc<Front>>,
}

#[derive(Default)]
struct State {
    pending: HashMap<u64, Pending>,
    /// Failed, but the child may still touch the caller's memory.
    doomed: Vec<(Pending, Error)>,
    /// Copies of tensors that the child may still touch.
    quarantine: Vec<Region>,
    calls: HashMap<u32, Call>,
    greeting: Option<SyncSender<Greeting>>,
    fronts: HashMap<u32, Weak<Front>>,
    handles: u32,
    next_id: u64,
    next_call: u32,
    next_group: u32,
    /// Orders that a thread which must not block left to the keeper.
    outbox: Vec<Order>,
    /// Groups that were aborted alone, and until when the child may take to end their work.
    soft: Vec<(u32, Instant, Error)>,
    ending: Option<Ending>,
    /// The child kept memory of an operation that failed.
    tainted: bool,
    /// The child is gone and collected, for this reason.
    gone: Option<Error>,
}

/// One child process.
pub(crate) struct Link {
    pub(crate) pid: Pid,
    pub(crate) pidfd: OwnedFd,
    pub(crate) backend: String,
    pub(crate) pool: Arc<Pool>,
    pub(crate) tail: Tail,
    socket: Arc<OwnedFd>,
    waker: OwnedFd,
    /// Held while a frame is sent: the segments that the child knows.
    sending: Mutex<Known>,
    state: Mutex<State>,
    changed: Condvar,
    stores: OnceLock<Arc<Stores>>,
    /// Reports of operations for which a caller waits here, one at a time: no other thread has to wake for them.
    express: Mutex<Receiver>,
}

/// Memory of a failed operation that never came back is leaked on purpose after this (INV-8).
pub(crate) const LOST: Duration = Duration::from_secs(10);

impl Link {
    pub(crate) fn new(
        child: &Child,
        socket: Arc<OwnedFd>,
        express: OwnedFd,
        options: &IsolateOptions,
        pool: Arc<Pool>,
    ) -> Result<Self> {
        let pid = i32::try_from(child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a process id out of range"))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|e| Error::io(format!("watch child process {pid}"), e.into()))?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("make an eventfd", e.into()))?;
        set_socket_timeout(&express, Timeout::Recv, Some(LOOK))
            .map_err(|e| Error::io("set up a socket", e.into()))?;
        Ok(Self {
            pid,
            pidfd,
            backend: options.backend.clone(),
            pool,
            tail: Tail::default(),
            socket,
            waker,
            sending: Mutex::new(Known::default()),
            state: Mutex::new(State {
                next_group: 1,
                ..State::default()
            }),
            changed: Condvar::new(),
            stores: OnceLock::new(),
            express: Mutex::new(Receiver::new(Arc::new(express), false)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_stores(&self, stores: Arc<Stores>) {
        drop(self.stores.set(stores));
    }

    pub(crate) fn stores(&self) -> Result<&Arc<Stores>> {
        self.stores
            .get()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a child process without stores"))
    }

    pub(crate) fn waker(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }

    fn wake(&self) {
        // It only fails when the counter is full, and then the keeper wakes all the same.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// The last lines of the child's output, as the end of a message.
    pub(crate) fn tail_text(&self) -> String {
        self.tail.text()
    }

    pub(crate) fn expect_greeting(&self, greeting: SyncSender<Greeting>) {
        self.lock().greeting = Some(greeting);
    }

    // ---- handles

    /// A new handle's group: its number and where its failures go.
    pub(crate) fn attach(&self, front: &Arc<Front>) -> u32 {
        let mut state = self.lock();
        let number = state.next_group;
        state.next_group += 1;
        state.fronts.insert(number, Arc::downgrade(front));
        state.handles += 1;
        number
    }

    /// The first group of the child.
    pub(crate) fn attach_first(&self, front: &Arc<Front>) {
        let mut state = self.lock();
        state.fronts.insert(0, Arc::downgrade(front));
        state.handles += 1;
    }

    /// What happens from now on is no failure of `group`.
    pub(crate) fn mute(&self, group: u32) {
        self.lock().fronts.remove(&group);
    }

    /// True if an operation is pending that was there at `at` already.
    pub(crate) fn pending_since(&self, at: Instant) -> bool {
        self.lock().pending.values().any(|p| p.submitted <= at)
    }

    /// True if anything is pending.
    pub(crate) fn is_busy(&self) -> bool {
        !self.lock().pending.is_empty()
    }

    /// True if only one group lives in the child.
    pub(crate) fn is_alone(&self) -> bool {
        self.lock().handles <= 1
    }

    /// The handle of `group` is gone; with the last one the child goes too. Never blocks.
    pub(crate) fn detach(&self, group: u32, error: Error) {
        let last = {
            let mut state = self.lock();
            state.fronts.remove(&group);
            state.handles = state.handles.saturating_sub(1);
            if state.handles > 0 && state.ending.is_none() {
                state.outbox.push(Order::Release { group });
            }
            state.handles == 0
        };
        if last {
            self.end(error, Some(Order::Leave), Duration::from_millis(500));
        } else {
            self.wake();
        }
    }

    // ---- its end

    /// Why nothing can be asked of it, if so.
    pub(crate) fn unusable(&self) -> Option<Error> {
        let state = self.lock();
        state
            .gone
            .clone()
            .or_else(|| state.ending.as_ref().map(|e| e.error.clone()))
    }

    /// True if it can be configured again: alive, and no memory of an earlier failure is in its hands.
    pub(crate) fn is_fresh(&self) -> bool {
        let state = self.lock();
        state.gone.is_none() && state.ending.is_none() && !state.tainted
    }

    /// Orders the end: pending work fails with `error`, the child gets `grace` after its `farewell`, then SIGKILL. Never
    /// blocks. Of several orders the first error and the earliest end count.
    pub(crate) fn end(&self, error: Error, farewell: Option<Order>, grace: Duration) {
        self.end_with(error, farewell, grace, false);
    }

    /// As [`end`](Self::end), but pending work fails only once the child is killed or gone.
    pub(crate) fn end_after_words(&self, error: Error, farewell: Option<Order>, grace: Duration) {
        self.end_with(error, farewell, grace, true);
    }

    fn end_with(&self, error: Error, farewell: Option<Order>, grace: Duration, hold: bool) {
        let kill_at = clock::later(Instant::now(), grace);
        let mut state = self.lock();
        match &mut state.ending {
            Some(ending) => ending.kill_at = ending.kill_at.min(kill_at),
            None => {
                state.ending = Some(Ending {
                    error,
                    farewell: farewell.map(Arc::new),
                    hold,
                    kill_at,
                });
            }
        }
        drop(state);
        self.wake();
    }

    /// Aborts one group of several in the child; if that takes too long, the child.
    pub(crate) fn abort_group(&self, group: u32, reason: &str, error: Error, grace: Duration) {
        let mut state = self.lock();
        state.outbox.push(Order::Abort {
            group,
            reason: reason.to_string(),
        });
        state
            .soft
            .push((group, clock::later(Instant::now(), grace), error));
        drop(state);
        self.wake();
    }

    /// Waits until the child was collected; false at the deadline.
    pub(crate) fn wait_gone(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        while state.gone.is_none() {
            let left = time_left(deadline);
            if left.is_zero() {
                return false;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    // ---- sending

    /// Sends an order with descriptors.
    pub(crate) fn send_with(&self, order: &Order, fds: &[OwnedFd], deadline: Instant) -> Result<()> {
        let frame = order.encode()?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        channel::send(&self.socket, &frame, &fds, deadline)
    }

    /// Asks the child for something that it does on a thread of its own, and waits for the answer until `deadline`.
    ///
    /// Errors: the child's own; what it ended with, if it did; `Timeout` if there is no answer, which leaves it running.
    pub(crate) fn call(
        &self,
        make: impl FnOnce(u32) -> Order,
        front: Option<Arc<Front>>,
        deadline: Instant,
    ) -> Result<Settled> {
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        let number = {
            let mut state = self.lock();
            if let Some(e) = state
                .gone
                .clone()
                .or_else(|| state.ending.as_ref().map(|e| e.error.clone()))
            {
                return Err(e);
            }
            let number = state.next_call;
            state.next_call = state.next_call.wrapping_add(1);
            state.calls.insert(number, Call { answer, front });
            number
        };
        let frame = make(number).encode()?;
        {
            let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(e) = channel::send(&self.socket, &frame, &[], clock::later(Instant::now(), SEND)) {
                // The keeper learns the true reason; see below.
                tracing::debug!(pid = %self.pid, error = %e, "an order was not delivered");
            }
        }
        answered.recv_timeout(time_left(deadline)).unwrap_or_else(|_| {
            self.lock().calls.remove(&number);
            Err(Error::timeout(format!(
                "the child process (pid {}) that runs '{}' did not answer",
                self.pid, self.backend
            )))
        })
    }

    /// Puts an operation into the child. `frame` makes the message from the operation's number.
    ///
    /// Errors give the pending operation back.
    pub(crate) fn submit(
        &self,
        pending: Pending,
        segments: &[Arc<crate::pool::Segment>],
        frame: impl FnOnce(u64) -> Result<Vec<u8>>,
    ) -> Result<(), Box<(Error, Pending)>> {
        let mut known = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let until = pending.deadline.min(clock::later(Instant::now(), SEND));
        let id = {
            let mut state = self.lock();
            if let Some(e) = state
                .gone
                .clone()
                .or_else(|| state.ending.as_ref().map(|e| e.error.clone()))
            {
                return Err(Box::new((e, pending)));
            }
            let id = state.next_id;
            state.next_id += 1;
            state.pending.insert(id, pending);
            id
        };
        let sent = self
            .introduce(&mut known, segments, until)
            .and_then(|()| channel::send(&self.socket, &frame(id)?, &[], until));
        drop(known);
        let Err(error) = sent else { return Ok(()) };
        // A child that is gone is the keeper's to explain. Otherwise half a frame may be out, and this child cannot be talked to
        // any more. Either way nobody knows whether it has seen the operation, which fails like all others at its end.
        if error.kind() == ErrorKind::Unavailable {
            return Ok(());
        }
        let error = Error::new(
            ErrorKind::Unavailable,
            format!("the child process (pid {}) takes no orders: {error}", self.pid),
        );
        self.end(error, None, Duration::ZERO);
        Ok(())
    }

    /// The express socket, if nobody waits on it.
    pub(crate) fn express(&self) -> Option<MutexGuard<'_, Receiver>> {
        self.express.try_lock().ok()
    }

    /// Takes reports from the express socket until `work` has ended. Returns too when the child has closed it: then the keeper
    /// ends the work.
    pub(crate) fn await_express(&self, receiver: &mut Receiver, work: &Work) {
        loop {
            let taken = self.take_express(receiver);
            if let Err(error) = &taken {
                self.end(error.clone(), None, Duration::ZERO);
            }
            if taken.is_err() || !matches!(work.status(), Status::Pending) {
                return;
            }
            match receiver.fill(true) {
                // Nothing: the socket's time-out; the keeper may have ended the work meanwhile.
                Ok(Filled::Some | Filled::Nothing) => {}
                Ok(Filled::Closed) | Err(_) => return,
            }
        }
    }

    fn take_express(&self, receiver: &mut Receiver) -> Result<()> {
        while let Some(body) = receiver.next()? {
            match Report::decode(body)? {
                Report::Done(done) => self.done(done)?,
                _ => {
                    return Err(crate::wire::odd(
                        "another report than an operation's end on the express socket",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Tells the child of segments that it does not know yet, and of those that are gone.
    fn introduce(
        &self,
        known: &mut Known,
        segments: &[Arc<crate::pool::Segment>],
        until: Instant,
    ) -> Result<()> {
        for segment in segments {
            if known.is_new(segment) {
                let (id, bytes) = (segment.id, segment.bytes() as u64);
                let (order, fd) = match &segment.memory {
                    Memory::Host(mapping) => (Order::Segment { id, bytes }, mapping.fd()),
                    Memory::Device(_, handle) => {
                        let handle = handle.clone();
                        (Order::DeviceSegment { id, bytes, handle }, None)
                    }
                };
                let fds: Vec<_> = fd.into_iter().collect();
                channel::send(&self.socket, &order.encode()?, &fds, until)?;
            }
        }
        Ok(())
    }

    /// The keeper's part of sending: what others left to it, and segments that are gone.
    pub(crate) fn flush(&self, idle: bool) -> Result<()> {
        let orders = std::mem::take(&mut self.lock().outbox);
        if orders.is_empty() && !idle {
            return Ok(());
        }
        let mut known = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let until = clock::later(Instant::now(), Duration::from_millis(50));
        for order in orders {
            channel::send(&self.socket, &order.encode()?, &[], until)?;
        }
        if idle {
            drop(self.pool.trim());
            for id in known.gone() {
                channel::send(&self.socket, &Order::Forget { id }.encode()?, &[], until)?;
            }
        }
        Ok(())
    }

    /// The last order; not waited for if another thread is sending to a child that does not read.
    pub(crate) fn farewell(&self, order: &Order, until: Instant) {
        let Ok(_sending) = self.sending.try_lock() else {
            return;
        };
        let sent = order
            .encode()
            .and_then(|frame| channel::send(&self.socket, &frame, &[], until));
        if let Err(error) = sent {
            tracing::debug!(pid = %self.pid, %error, "the child was not told of its end");
        }
    }

    // ---- what the child reports (the keeper's thread)

    pub(crate) fn greeted(&self, result: Greeting) {
        if let Some(greeting) = self.lock().greeting.take() {
            drop(greeting.send(result));
        }
    }

    pub(crate) fn answered(&self, number: u32, result: Result<Settled>) {
        let Some(call) = self.lock().calls.remove(&number) else {
            return;
        };
        if let (Ok(settled), Some(front)) = (&result, &call.front) {
            front.reset();
            front.count(settled.sent, settled.received);
        }
        drop(call.answer.send(result));
    }

    pub(crate) fn poisoned(&self, group: u32, error: &Error) {
        if let Some(front) = self.front(group) {
            front.poison(error);
        }
    }

    fn front(&self, group: u32) -> Option<Arc<Front>> {
        self.lock().fronts.get(&group).and_then(Weak::upgrade)
    }

    /// `Protocol` if the child reports what was never asked.
    pub(crate) fn done(&self, done: Done) -> Result<()> {
        let (pending, front) = {
            let mut state = self.lock();
            if done.id >= state.next_id {
                return Err(crate::wire::odd(format_args!(
                    "the end of operation {}, which was never begun",
                    done.id
                )));
            }
            state.tainted |= !done.released;
            let front = state.fronts.get(&done.group).and_then(Weak::upgrade);
            (state.pending.remove(&done.id), front)
        };
        if let Some(front) = front {
            front.count(done.sent, done.received);
            if let Some(first) = &done.poison {
                front.poison(first);
            }
        }
        // What fails while the child is being ended fails for that reason, whatever its backend saw of it.
        let mut done = done;
        if done.result.is_err()
            && let Some(ending) = self.ending()
        {
            done.result = Err(ending.error);
        }
        // Failed already, if the child is being ended.
        let Some(pending) = pending else { return Ok(()) };
        if !done.released && pending.is_direct() {
            // Only the child's end gives the caller's memory back.
            let error = done
                .result
                .err()
                .unwrap_or_else(|| Error::new(ErrorKind::Internal, "a finished operation kept its memory"));
            self.lock().doomed.push((pending, error.clone()));
            self.end(error, None, Duration::ZERO);
            return Ok(());
        }
        match done.result {
            Ok((source, contributors)) => pending.succeed(source, contributors),
            Err(error) => {
                let regions = pending.fail(error);
                if !done.released {
                    self.lock().quarantine.extend(regions);
                }
            }
        }
        Ok(())
    }

    // ---- time and the end (the keeper's thread)

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.lock().ending.clone()
    }

    /// Operations and aborts that took too long; orders the end if there is one. When to look again.
    pub(crate) fn check_deadlines(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        if state.ending.is_some() {
            return None;
        }
        let late = state
            .pending
            .values()
            .filter(|p| clock::later(p.deadline, MARGIN) <= now)
            .min_by_key(|p| p.deadline);
        if let Some(p) = late {
            let mut error = Error::timeout(format!(
                "the child process (pid {}) did not report the end of the operation by {:.1} s after its deadline; it is killed",
                self.pid,
                MARGIN.as_secs_f64()
            ))
            .with_op(p.kind.name())
            .with_rank(p.rank)
            .with_epoch(p.epoch);
            if let Some(seq) = p.seq {
                error = error.with_seq(seq);
            }
            drop(state);
            self.end(error, None, Duration::ZERO);
            return None;
        }
        let mut hard = None;
        let State { soft, pending, .. } = &mut *state;
        soft.retain(|(group, until, error)| {
            if !pending.values().any(|p| p.group == *group) {
                return false;
            }
            if *until <= now {
                hard = Some(error.clone());
            }
            true
        });
        let next = state.soft.iter().map(|s| s.1).min();
        let due = state
            .pending
            .values()
            .map(|p| clock::later(p.deadline, MARGIN))
            .min();
        drop(state);
        if let Some(error) = hard {
            self.end(error, None, Duration::ZERO);
            return None;
        }
        [next, due].into_iter().flatten().min()
    }

    /// Fails everything with `error`; what the child may still touch is kept until it is gone.
    pub(crate) fn fail_all(&self, error: &Error) {
        let (now, calls, fronts, greeting) = {
            let mut state = self.lock();
            let all: Vec<Pending> = std::mem::take(&mut state.pending).into_values().collect();
            let (later, now): (Vec<_>, Vec<_>) = all.into_iter().partition(Pending::is_direct);
            state.doomed.extend(later.into_iter().map(|p| (p, error.clone())));
            let calls: Vec<Call> = std::mem::take(&mut state.calls).into_values().collect();
            let fronts: Vec<_> = state.fronts.values().filter_map(Weak::upgrade).collect();
            (now, calls, fronts, state.greeting.take())
        };
        fronts.iter().for_each(|f| f.poison(error));
        let mut regions = Vec::new();
        for pending in now {
            regions.extend(pending.fail(error.clone()));
        }
        self.lock().quarantine.extend(regions);
        calls.iter().for_each(|c| drop(c.answer.send(Err(error.clone()))));
        if let Some(greeting) = greeting {
            drop(greeting.send(Err(error.clone())));
        }
    }

    /// The child was collected: nobody touches its memory any more.
    pub(crate) fn collected(&self, error: &Error) {
        self.lock().gone.get_or_insert_with(|| error.clone());
        self.fail_all(error);
        let (doomed, quarantine) = {
            let mut state = self.lock();
            (
                std::mem::take(&mut state.doomed),
                std::mem::take(&mut state.quarantine),
            )
        };
        drop(quarantine);
        for (pending, error) in doomed {
            drop(pending.fail(error));
        }
        self.changed.notify_all();
    }

    /// The child was killed long ago and does not go away: what it may touch is given up for ever.
    pub(crate) fn give_up(&self) {
        let (doomed, quarantine) = {
            let mut state = self.lock();
            (
                std::mem::take(&mut state.doomed),
                std::mem::take(&mut state.quarantine),
            )
        };
        for (pending, error) in doomed {
            let (tensors, regions) = Pending::dissolve(pending.slots);
            tensors
                .into_iter()
                .for_each(|t| t.leak("a killed child process that does not end may still write to it"));
            std::mem::forget(regions);
            pending.completer.fail(error, Vec::new());
        }
        std::mem::forget(quarantine);
    }
}
