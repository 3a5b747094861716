//! The parent's view of one child: what was submitted and asked, and what becomes of it when the child ends.
//!
//! Callers put operations and calls in here and send their frames; the [`keeper`](crate::keeper) takes them out when the
//! child reports, or when the child is gone. Memory that the child may still touch stays in here until then (INV-8).
//! Here: the state, the handles on it, and the order to end; [`sending`] and [`reports`] are the two directions, and [`doubts`] what of
//! the reports is not believed at once.

mod doubts;
mod reports;
mod sending;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::lifecycle::{Parting, part_from};
use ftcore::{Capabilities, Error, ErrorKind, Result, time_left};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::Receiver;
use crate::clock;
use crate::front::Front;
use crate::options::IsolateOptions;
use crate::output::Tail;
use crate::peers::Herald;
use crate::pending::Pending;
use crate::pool::{Known, Pool, Region};
use crate::store::serve::Stores;
use crate::wire::frames::{Order, Settled};

/// How often a caller on the express socket looks whether its work has ended otherwise.
const LOOK: Duration = Duration::from_millis(50);

/// How the child is to end.
#[derive(Clone)]
pub(crate) struct Ending {
    /// What pending work fails with.
    pub(crate) error: Error,
    /// What the child is told, so that it can tell the other ranks.
    pub(crate) leave_order: Option<Arc<Order>>,
    /// Pending work fails now, or before that when the child is gone: a caller that sees it fail may want the other ranks to have been told.
    pub(crate) fail_at: Instant,
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
    doubts: doubts::Doubts,
    /// The end of this process waits for the child's.
    parting: bool,
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
    /// Of the watch over the other ranks, where there is one.
    herald: Mutex<Herald>,
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
            herald: Mutex::default(),
            express: Mutex::new(Receiver::new(Arc::new(express), false)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_stores(&self, stores: Arc<Stores>) {
        drop(self.stores.set(stores));
    }

    fn herald(&self) -> MutexGuard<'_, Herald> {
        self.herald.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_herald(&self, herald: Herald) {
        *self.herald() = herald;
    }

    /// Tells the other ranks why this one's child ends, if a watch on them runs; false otherwise. Never blocks.
    pub(crate) fn tell_peers(&self, error: &Error) -> bool {
        self.herald().tell(error.clone())
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

    /// True if an operation has been waiting for `rank`, which left at `at`, for `patience`.
    pub(crate) fn misses(&self, rank: u32, at: Instant, patience: Duration) -> bool {
        let state = self.lock();
        state.pending.values().any(|p| p.misses(rank, at, patience))
    }

    /// True if anything is pending.
    pub(crate) fn is_busy(&self) -> bool {
        !self.lock().pending.is_empty()
    }

    /// True if only one group lives in the child.
    pub(crate) fn is_alone(&self) -> bool {
        self.lock().handles <= 1
    }

    /// The handle of `group` is gone; with the last one the child goes too, after this `leave_order`. Never blocks.
    pub(crate) fn detach(self: &Arc<Self>, group: u32, error: Error, leave_order: Option<Order>) {
        let last = {
            let mut state = self.lock();
            state.fronts.remove(&group);
            state.handles = state.handles.saturating_sub(1);
            if state.handles > 0 && state.ending.is_none() {
                state.outbox.push(Order::Release { group });
            }
            state.handles == 0
        };
        self.part();
        if last {
            self.end(error, leave_order, Duration::from_millis(500));
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

    /// Orders the end: pending work fails with `error`, the child gets `grace` after its `leave_order`, then SIGKILL. Never
    /// blocks. Of several orders the first error and the earliest end count.
    pub(crate) fn end(&self, error: Error, leave_order: Option<Order>, grace: Duration) {
        self.end_after_words(error, leave_order, Duration::ZERO, grace);
    }

    /// As [`end`](Self::end), but pending work fails only once the child is gone, or after `words`. Memory of the caller on which the child
    /// works comes back with its end alone: then that is `words` from now, too.
    pub(crate) fn end_after_words(
        &self,
        error: Error,
        leave_order: Option<Order>,
        words: Duration,
        grace: Duration,
    ) {
        let now = Instant::now();
        let mut state = self.lock();
        let waits = !words.is_zero() && state.pending.values().any(Pending::is_direct);
        let kill_at = clock::later(now, if waits { words } else { grace });
        match &mut state.ending {
            Some(ending) => ending.kill_at = ending.kill_at.min(kill_at),
            None => {
                state.ending = Some(Ending {
                    error,
                    leave_order: leave_order.map(Arc::new),
                    fail_at: clock::later(now, words),
                    kill_at,
                });
            }
        }
        drop(state);
        self.wake();
    }

    /// Aborts one group of several in the child; if that takes too long, the child.
    pub(crate) fn abort_group(self: &Arc<Self>, group: u32, reason: &str, error: Error, grace: Duration) {
        self.part();
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

    /// A group of the child was told to end. The end of this process, which is the child's, waits for the child's own: it has something to
    /// say first.
    pub(crate) fn part(self: &Arc<Self>) {
        struct Child(Weak<Link>);
        impl Parting for Child {
            fn is_over(&self) -> bool {
                self.0.strong_count() == 0
            }
            fn wait_over(&self, deadline: Instant) {
                if let Some(link) = self.0.upgrade() {
                    // Others of its groups may live: they end with this process, and without a word.
                    let error = Error::new(ErrorKind::Aborted, "the process is ending");
                    let left = time_left(deadline);
                    link.end_after_words(error, Some(Order::Quit), left, left);
                    link.wait_gone(deadline);
                }
            }
        }
        if !std::mem::replace(&mut self.lock().parting, true) {
            part_from(Child(Arc::downgrade(self)));
        }
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
}
