//! The parent's view of one child: the way to it, what was asked, its groups, and the order to end.
//!
//! Callers send orders through here; the [`keeper`](crate::keeper) takes what the child reports and passes it on to the engines of its groups.
//! What becomes of operations is theirs. Memory of failed ones that the child may still touch stays in here until it is gone (INV-8).

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use ftcore::lifecycle::{Leaving, leave_at_exit};
use ftcore::{
    Cancel, Capabilities, Epoch, Error, ErrorKind, Result, Traffic, deadline_in, forked, time_left,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::{self, Filled, Receiver};
use crate::driver::Engine;
use crate::options::IsolateOptions;
use crate::output::Tail;
use crate::pool::{Known, Memory, Pool, Segment};
use crate::staging::Staged;
use crate::store::serve::Stores;
use crate::watch::Watch;
use crate::wire::frames::{Order, Report, Settled};
use crate::wire::odd;

/// Sending an order to a child that reads takes microseconds.
const SEND: Duration = Duration::from_secs(5);
/// The same for what the keeper sends, which has more to do.
const SEND_BESIDE: Duration = Duration::from_millis(50);
/// How long the other ranks are told of a failure until pending work fails: INV-2 gives 100 ms in all. A child that then has no memory of the
/// caller's may go on until `LEAVE`: on a busy machine it may not have had a core yet.
pub(crate) const TELLING: Duration = Duration::from_millis(60);
/// How long a child may take to tell the other ranks of the leave and exit, or to end what its group has failed with.
pub(crate) const LEAVE: Duration = Duration::from_millis(500);
/// How often a caller on the express socket looks whether its operation has ended otherwise.
const LOOK: Duration = Duration::from_millis(50);

/// How the child is to end.
#[derive(Clone)]
pub(crate) struct Ending {
    /// What pending work fails with.
    pub(crate) error: Error,
    /// What the child is told, so that it can tell the other ranks.
    pub(crate) order: Option<Arc<Order>>,
    /// Pending work fails now, or before that when the child is gone: a caller that sees it fail may want the other ranks to have been told.
    pub(crate) fail_at: Instant,
    pub(crate) kill_at: Instant,
}

/// What a child says first: what its backend offers.
type Greeting = Result<Capabilities>;
type Answer = Result<Option<Settled>>;

/// A group that has failed and has until then to end what is in flight.
struct Bound {
    engine: Weak<Engine>,
    until: Instant,
    failure: Error,
}

#[derive(Default)]
struct State {
    /// The engine of each group's present configuration, by the group's number in the child.
    engines: HashMap<u32, Weak<Engine>>,
    /// What a group failed with whose engine had not started, and at which epoch.
    early: HashMap<u32, (Epoch, Error)>,
    notices: Option<Weak<dyn Watch>>,
    /// Copies of tensors that the child may still touch.
    quarantine: Vec<Staged>,
    calls: HashMap<u32, SyncSender<Answer>>,
    greeting: Option<SyncSender<Greeting>>,
    claims: u32,
    next_call: u32,
    next_group: u32,
    /// Orders that a thread which must not block left to the keeper.
    outbox: Vec<Order>,
    bounds: Vec<Bound>,
    ending: Option<Ending>,
    /// The end of this process waits for the child's.
    is_leaving: bool,
    /// The child kept memory of an operation that failed.
    is_tainted: bool,
    /// The child is gone and collected, for this reason.
    gone: Option<Error>,
}

impl State {
    fn unusable(&self) -> Option<Error> {
        let ending = || self.ending.as_ref().map(|ending| ending.error.clone());
        self.gone.clone().or_else(ending)
    }

    fn engines(&self) -> Vec<Arc<Engine>> {
        self.engines.values().filter_map(Weak::upgrade).collect()
    }

    fn notices(&self) -> Option<Arc<dyn Watch>> {
        self.notices.as_ref().and_then(Weak::upgrade)
    }
}

/// What is held while a frame is sent.
#[derive(Default)]
pub(crate) struct Sending {
    /// The segments that the child knows.
    known: Known,
    /// Of a frame whose sender has stopped: it goes before what is sent next.
    rest: Vec<u8>,
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
    sending: Mutex<Sending>,
    state: Mutex<State>,
    changed: Condvar,
    stores: OnceLock<Arc<Stores>>,
    /// The number of the next operation: of all groups and configurations, so that no late report is taken for another's.
    next_id: AtomicU64,
    /// Reports of operations for which a caller waits here, one at a time: no other thread has to wake for them.
    express: Mutex<Receiver>,
}

/// A group's place in a child, and with it a claim on the child, which ends with the last one.
pub(crate) struct Claim {
    pub(crate) link: Arc<Link>,
    /// The group's number in the child; 0 for the first.
    pub(crate) number: u32,
    pub(crate) moved: Arc<Moved>,
}

/// Bytes that a group has moved in its present child.
#[derive(Default)]
pub(crate) struct Moved {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Moved {
    pub(crate) fn count(&self, sent: u64, received: u64) {
        self.sent.fetch_max(sent, Ordering::Relaxed);
        self.received.fetch_max(received, Ordering::Relaxed);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }
}

impl Claim {
    /// For the first group of a child.
    pub(crate) fn first(link: Arc<Link>) -> Self {
        Self::numbered(link, |_| 0)
    }

    /// For one more group.
    pub(crate) fn another(link: Arc<Link>) -> Self {
        Self::numbered(link, |state| {
            state.next_group += 1;
            state.next_group
        })
    }

    fn numbered(link: Arc<Link>, number: impl FnOnce(&mut State) -> u32) -> Self {
        let mut state = link.lock();
        state.claims += 1;
        let number = number(&mut state);
        drop(state);
        Self {
            link,
            number,
            moved: Arc::default(),
        }
    }
}

impl Drop for Claim {
    /// With the last group the child goes too; it tells the other ranks of the leave. Never blocks.
    fn drop(&mut self) {
        if forked::is_child() {
            // The child process is the parent's.
            return;
        }
        let link = &self.link;
        let is_last = {
            let mut state = link.lock();
            state.claims = state.claims.saturating_sub(1);
            state.claims == 0
        };
        link.part();
        if is_last {
            let error = Error::new(ErrorKind::Aborted, "the group was dropped");
            link.end(error, Some(Order::Leave), LEAVE);
        } else {
            link.order(Order::Release { group: self.number });
        }
    }
}

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
            sending: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            stores: OnceLock::new(),
            next_id: AtomicU64::new(0),
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

    pub(crate) fn expect_greeting(&self, greeting: SyncSender<Greeting>) {
        let mut state = self.lock();
        match state.gone.clone() {
            // Its keeper has answered whom it found.
            Some(error) => drop(greeting.send(Err(error))),
            None => state.greeting = Some(greeting),
        }
    }

    // ---- its groups

    /// From now on `engine` hears what the child says of group `number`, and the child's watch over the other ranks is this one.
    pub(crate) fn serve(&self, number: u32, engine: &Arc<Engine>, notices: Option<&Arc<dyn Watch>>) {
        let mut state = self.lock();
        state.engines.retain(|_, engine| engine.strong_count() > 0);
        state.engines.insert(number, Arc::downgrade(engine));
        if let Some(notices) = notices {
            state.notices = Some(Arc::downgrade(notices));
        }
        let early = state.early.remove(&number);
        let early = early.filter(|(epoch, _)| *epoch == engine.place().epoch);
        let unusable = state.unusable();
        drop(state);
        if early.is_some() {
            engine.driver().failed_there();
        }
        for error in early.map(|(_, error)| error).into_iter().chain(unusable) {
            engine.fail(engine.place().name(error));
        }
    }

    /// The engine of group `number`.
    pub(crate) fn engine(&self, number: u32) -> Option<Arc<Engine>> {
        self.lock().engines.get(&number).and_then(Weak::upgrade)
    }

    /// True if an operation of any group has been waiting for `rank`, which left at `at`, for `limit`.
    pub(crate) fn misses(&self, rank: u32, at: Instant, limit: Duration) -> bool {
        let engines = self.lock().engines();
        engines
            .iter()
            .any(|engine| engine.driver().misses(rank, at, limit))
    }

    /// True if only one group lives in the child.
    pub(crate) fn is_alone(&self) -> bool {
        self.lock().claims <= 1
    }

    /// Keeps what the child may still touch until it is gone. Such a child is not configured again.
    pub(crate) fn quarantine(&self, staged: Option<Staged>) {
        if let Some(staged) = staged {
            let mut state = self.lock();
            state.is_tainted = true;
            // A child that is gone touches nothing.
            if state.gone.is_none() {
                state.quarantine.push(staged);
            }
        }
    }

    // ---- orders

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`sending`](Self::sending), for the keeper; none while another thread is sending: it may be to a child that does not read before it is
    /// read from, and whose end must not wait for that.
    fn sending_now(&self) -> Option<MutexGuard<'_, Sending>> {
        match self.sending.try_lock() {
            Ok(sending) => Some(sending),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sends an order with descriptors.
    pub(crate) fn send_with(&self, order: &Order, fds: &[OwnedFd], deadline: Instant) -> Result<()> {
        let frame = order.encode()?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.put(&mut self.sending(), &frame, &fds, deadline)
    }

    /// Sends a frame, after what another sender has left.
    fn put(&self, sending: &mut Sending, frame: &[u8], fds: &[BorrowedFd<'_>], until: Instant) -> Result<()> {
        channel::send(&self.socket, &std::mem::take(&mut sending.rest), &[], until)?;
        channel::send(&self.socket, frame, fds, until)
    }

    /// As [`put`](Self::put), but no longer than something waits for the child: `Unavailable` then, and the rest of the frame is left. Nothing was
    /// left before: that happens to a child that is being ended alone.
    fn put_while_needed(
        &self,
        sending: &mut Sending,
        frame: &[u8],
        fds: &[BorrowedFd<'_>],
        until: Instant,
    ) -> Result<()> {
        let sent = channel::send_while(&self.socket, frame, fds, until, || !self.is_let_go())?;
        let rest = frame.get(sent..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        if sent > 0 {
            sending.rest = rest.to_vec();
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "the child process is being ended",
        ))
    }

    /// Has the keeper send an order. Never blocks.
    pub(crate) fn order(&self, order: Order) {
        self.lock().outbox.push(order);
        self.wake();
    }

    /// Asks the child for something that it does on a thread of its own, and waits for the answer until `deadline`, or until it is cancelled.
    ///
    /// Errors: the child's own; what it ended with, if it did; the reason of `cancel`, or `Timeout` if there is no answer, which leave it running.
    pub(crate) fn call(
        &self,
        make: impl FnOnce(u32) -> Order,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Option<Settled>> {
        let (answer, answered) = sync_channel(1);
        let number = {
            let mut state = self.lock();
            if let Some(error) = state.unusable() {
                return Err(error);
            }
            state.next_call = state.next_call.wrapping_add(1);
            let number = state.next_call;
            state.calls.insert(number, answer);
            number
        };
        if let Err(error) = self.send_with(&make(number), &[], deadline_in(SEND)) {
            // The keeper learns the true reason; see below.
            tracing::debug!(pid = %self.pid, %error, "an order was not delivered");
        }
        let answer = cancel.receive(&answered, deadline);
        if let Ok(Some(answer)) = answer {
            return answer;
        }
        self.lock().calls.remove(&number);
        answer.and(Err(Error::timeout(format!(
            "the child process (pid {}) that runs '{}' did not answer",
            self.pid, self.backend
        ))))
    }

    /// Sends the order of an operation, which is pending already. Errors: why the child gets no more of them.
    pub(crate) fn send_operation(
        &self,
        frame: &[u8],
        segments: &[Arc<Segment>],
        deadline: Instant,
    ) -> Result<()> {
        let mut sending = self.sending();
        let until = deadline.min(deadline_in(SEND));
        if let Some(error) = self.unusable() {
            return Err(error);
        }
        let sent = self
            .introduce(&mut sending, segments, until)
            .and_then(|()| self.put_while_needed(&mut sending, frame, &[], until));
        drop(sending);
        // A child that is gone, or is being ended, is the keeper's to explain. Otherwise half a frame may be out, and this child cannot be talked to
        // any more. Either way it is not known whether it has seen the operation, which fails like all others at its end.
        if let Err(error) = sent.or_else(|e| {
            if e.kind() == ErrorKind::Unavailable {
                Ok(())
            } else {
                Err(e)
            }
        }) {
            let text = format!("the child process (pid {}) takes no orders: {error}", self.pid);
            self.end(Error::new(ErrorKind::Unavailable, text), None, Duration::ZERO);
        }
        Ok(())
    }

    /// Tells the child of segments that it does not know yet.
    fn introduce(&self, sending: &mut Sending, segments: &[Arc<Segment>], until: Instant) -> Result<()> {
        for segment in segments {
            if sending.known.is_new(segment) {
                let (id, bytes) = (segment.id, segment.bytes() as u64);
                let (order, fd) = match &segment.memory {
                    Memory::Host(mapping) => (Order::Segment { id, bytes }, mapping.fd()),
                    Memory::Device(_, handle) => {
                        let handle = handle.clone();
                        (Order::DeviceSegment { id, bytes, handle }, None)
                    }
                };
                let fds: Vec<_> = fd.into_iter().collect();
                self.put_while_needed(sending, &order.encode()?, &fds, until)?;
            }
        }
        Ok(())
    }

    /// The keeper's part of sending: what others left to it, and segments that are gone. Left as they are while another thread is sending.
    pub(crate) fn flush(&self, idle: bool) -> Result<()> {
        if !idle && !self.has_orders() {
            return Ok(());
        }
        let Some(mut sending) = self.sending_now() else {
            return Ok(());
        };
        let orders = std::mem::take(&mut self.lock().outbox);
        let until = deadline_in(SEND_BESIDE);
        for order in orders {
            self.put(&mut sending, &order.encode()?, &[], until)?;
        }
        if idle {
            drop(self.pool.trim());
            for id in sending.known.gone() {
                self.put(&mut sending, &Order::Forget { id }.encode()?, &[], until)?;
            }
        }
        Ok(())
    }

    /// True if there is something for the keeper to send.
    pub(crate) fn has_orders(&self) -> bool {
        !self.lock().outbox.is_empty()
    }

    /// The last order, after what others left to the keeper. False, and nothing is done, while another thread is sending.
    pub(crate) fn send_last(&self, order: &Order, until: Instant) -> bool {
        let Some(mut sending) = self.sending_now() else {
            return false;
        };
        let before = std::mem::take(&mut self.lock().outbox);
        for order in before.iter().chain([order]) {
            let sent = order
                .encode()
                .and_then(|frame| self.put(&mut sending, &frame, &[], until));
            if let Err(error) = sent {
                tracing::debug!(pid = %self.pid, %error, "the child was not told of its end");
                break;
            }
        }
        true
    }

    // ---- reports: on the keeper's thread, except where a caller waits on the express socket itself

    /// The express socket, if no thread waits on it.
    pub(crate) fn express(&self) -> Option<MutexGuard<'_, Receiver>> {
        self.express.try_lock().ok()
    }

    /// Takes reports from the express socket, and waits for some if there are none. False if one is held back, or no more will come: then the
    /// keeper ends what the caller waits for, or the thread that asks whether a loss is true.
    pub(crate) fn hear(&self, receiver: &mut Receiver) -> bool {
        let heard = receiver.fill(true).and_then(|filled| {
            let mut taken = filled != Filled::Closed;
            while let Some(body) = receiver.next()? {
                match Report::decode(body)? {
                    report @ Report::Done { .. } => taken &= self.take(report)?,
                    _ => {
                        return Err(odd(
                            "another report than an operation's end on the express socket",
                        ));
                    }
                }
            }
            Ok(taken)
        });
        heard.unwrap_or_else(|error| {
            self.end(error, None, Duration::ZERO);
            false
        })
    }

    /// Takes a report; false if it is held back. `Protocol` if the child reports what was never asked.
    pub(crate) fn take(&self, report: Report) -> Result<bool> {
        let notices = match report.is_loss() {
            true => self.lock().notices(),
            false => None,
        };
        let report = match notices {
            Some(notices) => notices.hold(report),
            None => Some(report),
        };
        report.map_or(Ok(false), |report| self.carry_out(report).map(|()| true))
    }

    /// As [`take`](Self::take), for what is not held back any more.
    pub(crate) fn carry_out(&self, report: Report) -> Result<()> {
        match report {
            Report::Done { done } => {
                if done.id >= self.next_id.load(Ordering::Relaxed) {
                    let text = format_args!("the end of operation {}, which was never begun", done.id);
                    return Err(odd(text));
                }
                if !done.released {
                    self.lock().is_tainted = true;
                }
                if let Some(engine) = self.engine(done.group) {
                    engine.driver().done(done);
                }
            }
            Report::Failed { group, epoch, error } => {
                let mut state = self.lock();
                if group > state.next_group {
                    return Err(odd(format_args!(
                        "the failure of group {group}, which was never made"
                    )));
                }
                let engine = state.engines.get(&group).and_then(Weak::upgrade);
                match engine.filter(|engine| engine.place().epoch >= epoch) {
                    Some(engine) => {
                        drop(state);
                        // Of an earlier configuration it says nothing of this one.
                        if engine.place().epoch == epoch {
                            engine.driver().failed_there();
                            engine.fail(engine.place().name(error));
                        }
                    }
                    // Its engine is on its way.
                    None => drop(state.early.insert(group, (epoch, error))),
                }
            }
            Report::Answer { call, result } => {
                let mut state = self.lock();
                let caller = state.calls.remove(&call);
                // What fails while the child is being ended fails for that reason, whatever its backend saw of it.
                let result = result.map_err(|error| state.unusable().unwrap_or(error));
                drop(state);
                caller
                    .into_iter()
                    .for_each(|caller| drop(caller.send(result.clone())));
            }
            Report::Ready { capabilities } => self.greeted(Ok(capabilities)),
            Report::Refused { error } => self.greeted(Err(error)),
        }
        Ok(())
    }

    fn greeted(&self, result: Greeting) {
        let greeting = self.lock().greeting.take();
        greeting
            .into_iter()
            .for_each(|greeting| drop(greeting.send(result.clone())));
    }

    // ---- its end

    /// Why nothing can be asked of it, if so.
    pub(crate) fn unusable(&self) -> Option<Error> {
        self.lock().unusable()
    }

    /// True if it can be configured again: alive, with the way to its stores, and no memory of an earlier failure is in its hands.
    pub(crate) fn is_fresh(&self) -> bool {
        let is_served = self.stores.get().is_none_or(|stores| stores.is_open());
        let state = self.lock();
        is_served && state.unusable().is_none() && !state.is_tainted
    }

    /// Orders the end: its groups fail with `error`, the child gets `grace` after its `order`, then SIGKILL. Never
    /// blocks. Of several orders the first error and the earliest end count.
    pub(crate) fn end(&self, error: Error, order: Option<Order>, grace: Duration) {
        self.end_after(error, order, Duration::ZERO, grace);
    }

    /// As [`end`](Self::end), but pending work fails only once the child is gone, or after `telling`. Memory of the caller on which the child
    /// works comes back with its end alone: then that is `telling` from now, too.
    pub(crate) fn end_after(&self, error: Error, order: Option<Order>, telling: Duration, grace: Duration) {
        let engines = self.lock().engines();
        let waits = !telling.is_zero() && engines.iter().any(|engine| engine.driver().is_busy(true));
        let kill_at = deadline_in(if waits { telling } else { grace });
        let mut state = self.lock();
        let is_first = state.ending.is_none();
        match &mut state.ending {
            Some(ending) => ending.kill_at = ending.kill_at.min(kill_at),
            None => {
                state.ending = Some(Ending {
                    error: error.clone(),
                    order: order.map(Arc::new),
                    fail_at: deadline_in(telling),
                    kill_at,
                });
            }
        }
        // Where no group is left, those that have not ended yet are leaving.
        let fails = is_first && state.claims > 0;
        drop(state);
        self.wake();
        if fails {
            fail(&engines, &error);
        }
    }

    /// Group `number` has failed with `failure`, and gets `limit` to end what is in flight; then the child is ended.
    pub(crate) fn bound(&self, number: u32, limit: Duration, failure: &Error) {
        let mut state = self.lock();
        if let Some(engine) = state.engines.get(&number).cloned() {
            state.bounds.push(Bound {
                engine,
                until: deadline_in(limit),
                failure: failure.clone(),
            });
        }
        drop(state);
        self.wake();
    }

    /// Ends the child if a group has not ended in time what it failed with: with a word to the other ranks, if they may not have been told.
    /// When to look again.
    pub(crate) fn look_at_bounds(&self) -> Option<Instant> {
        let bounds = std::mem::take(&mut self.lock().bounds);
        for bound in bounds {
            let engine = bound.engine.upgrade();
            let Some(engine) = engine.filter(|engine| engine.driver().is_busy(false)) else {
                continue;
            };
            if !time_left(bound.until).is_zero() {
                self.lock().bounds.push(bound);
            } else if !engine.driver().end_left(None) {
                self.end(bound.failure, None, Duration::ZERO);
            }
        }
        self.lock().bounds.iter().map(|bound| bound.until).min()
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.lock().ending.clone()
    }

    /// True if nothing but memory waits for it: what was pending has failed, or is about to.
    fn is_let_go(&self) -> bool {
        let state = self.lock();
        let fails_at = state.ending.as_ref().map(|e| e.fail_at.min(e.kill_at));
        state.gone.is_some() || fails_at.is_some_and(|at| time_left(at).is_zero())
    }

    /// Fails what waits for the child; what that may still touch is kept until it is gone.
    pub(crate) fn let_go(&self, error: &Error) {
        let (engines, calls, greeting) = {
            let mut state = self.lock();
            let calls = std::mem::take(&mut state.calls);
            (state.engines(), calls, state.greeting.take())
        };
        engines.iter().for_each(|engine| engine.driver().let_go(error));
        calls
            .into_values()
            .for_each(|call| drop(call.send(Err(error.clone()))));
        greeting
            .into_iter()
            .for_each(|greeting| drop(greeting.send(Err(error.clone()))));
    }

    /// The child was collected: nothing touches its memory any more.
    pub(crate) fn collected(&self, error: &Error) {
        let (engines, notices, fails) = {
            let mut state = self.lock();
            state.gone.get_or_insert_with(|| error.clone());
            state.quarantine.clear();
            (state.engines(), state.notices(), state.claims > 0)
        };
        // What it said of another rank before it ended tells more than its end.
        notices.into_iter().for_each(|notices| notices.settle());
        if fails {
            fail(&engines, error);
        }
        engines.iter().for_each(|engine| engine.driver().collected(error));
        self.let_go(error);
        self.changed.notify_all();
    }

    /// A group of the child was told to end. The end of this process, which is the child's, waits for the child's own: it has something to
    /// say first.
    pub(crate) fn part(self: &Arc<Self>) {
        struct Child(Weak<Link>);
        impl Leaving for Child {
            fn is_over(&self) -> bool {
                self.0.strong_count() == 0
            }
            fn wait_over(&self, deadline: Instant) {
                if let Some(link) = self.0.upgrade() {
                    // Others of its groups may live: they end with this process, and without a word.
                    let error = Error::new(ErrorKind::Aborted, "the process is ending");
                    let left = time_left(deadline);
                    link.end_after(error, Some(Order::Quit), left, left);
                    link.wait_gone(deadline);
                }
            }
        }
        if !std::mem::replace(&mut self.lock().is_leaving, true) {
            leave_at_exit(Child(Arc::downgrade(self)));
        }
    }

    /// Waits until the child was collected, or until the deadline.
    pub(crate) fn wait_gone(&self, deadline: Instant) {
        let mut state = self.lock();
        while state.gone.is_none() && !time_left(deadline).is_zero() {
            let waited = self.changed.wait_timeout(state, time_left(deadline));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn fail(engines: &[Arc<Engine>], error: &Error) {
    for engine in engines {
        engine.fail(engine.place().name(error.clone()));
    }
}

#[cfg(test)]
pub(crate) mod tests;
