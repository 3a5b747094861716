//! One configuration of a group at work: lanes of jobs, each with a thread that makes oneCCL's blocking calls.
//!
//! Collectives have one lane, in order of submission; messages have one per peer and direction, on a communicator of their own,
//! so that nobody waits for another's message. A call cannot be cancelled. So a lane's thread is expendable: the watcher ends
//! every job at its deadline, whatever the thread is doing, leaks the memory that it may still touch (INV-8), poisons the group
//! and tells the peers through the store (`news`). A thread that does come back finds its job gone and ends.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::lifecycle::part_from;
use ftcore::{
    Collective, Completer, Error, ErrorKind, Event, OpKind, Rejected, Result, Tensor, Work, driven_work_pair,
    time_left,
};

use crate::job::{Active, Batch, Job, Label, Memory, Sink, Task};
use crate::link::Link;
use crate::news::Channel;
use crate::ops::{self, Count};
use crate::raw::exit::{self, Leaving, Stuck};
use crate::raw::lent::{Lent, lend};
use crate::recipe::Recipe;
use crate::tally::Tally;
use crate::traffic::Counters;
use crate::xpu;
use crate::xpu::comm::Side;
use crate::xpu::event::{Order, Promise, XpuEvent};

mod lane;
mod spin;
mod watch;

pub(crate) use lane::{on_device, with_messages};

/// How long a rank that leaves waits for the others, so that communicators can be destroyed (a call of all ranks).
const FAREWELL: Duration = Duration::from_secs(60);
/// How long it then waits until they all have.
const LAST_ONES: Duration = Duration::from_secs(4);
/// How long after its deadline an operation on a device has been reported, so that nobody waits for its event any more.
const PROMISED: Duration = Duration::from_secs(5);
/// The part of that for which `shutdown` waits.
const COURTESY: Duration = Duration::from_secs(2);

/// Refuses if a thread of this process is stuck in oneCCL: a new communicator beside one has been seen to return wrong sums.
pub(crate) fn require_unstuck() -> Result<()> {
    match exit::stuck() {
        0 => Ok(()),
        n => Err(Error::new(
            ErrorKind::InvalidState,
            format!(
                "{n} thread(s) of this process are stuck in a oneCCL call that cannot be cancelled; oneCCL is not safe to use \
                 beside them: replace the process (an isolated group does that by itself)"
            ),
        )),
    }
}

/// Who we are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
}

/// The communicators of one configuration.
#[derive(Debug)]
pub(crate) struct Comms {
    pub(crate) collectives: Link,
    /// `None` in a world of one, and where the library cannot split.
    pub(crate) messages: Option<Link>,
}

impl Comms {
    /// Of a world of one.
    pub(crate) fn alone() -> Self {
        Self {
            collectives: Link::Alone,
            messages: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LaneId {
    Collectives,
    To(u32),
    From(u32),
}

#[derive(Default)]
struct Lane {
    queue: VecDeque<Job>,
    active: Option<Active>,
    /// Of the thread that was given up in this lane.
    stuck: Option<Stuck>,
    wake: Arc<Condvar>,
    /// Its thread waits for `wake`.
    asleep: bool,
    /// Counts jobs: the number of a message is the same on both sides.
    turn: u64,
    /// Held while a split runs.
    split: Option<Lent>,
}

#[derive(Default)]
struct State {
    lanes: BTreeMap<LaneId, Lane>,
    comms: Option<Arc<Comms>>,
    error: Option<Error>,
    /// No new work; threads end when their queue is empty.
    stopping: bool,
    next_seq: u64,
    /// Until when the watcher sleeps; `None` while it waits for a call.
    watch_until: Option<Instant>,
    /// The communicators are gone, or given up.
    ended: bool,
    /// While this rank says good-bye: the end of the process waits for it.
    leaving: Option<Leaving>,
    /// Ends with the thread that tells the other ranks of a failure.
    listener: Option<Receiver<()>>,
}

/// One configuration.
pub(crate) struct Engine {
    pub(crate) place: Place,
    state: Mutex<State>,
    changed: Condvar,
    /// Counts what a lane's thread would wake for, so that it can look without the lock.
    arrivals: AtomicU64,
    watch: Condvar,
    counters: Arc<Counters>,
    counted: bool,
    tally: Option<Tally>,
    channel: Option<Channel>,
    side: Option<Arc<Side>>,
}

/// What an engine is made of.
pub(crate) struct Parts {
    pub(crate) comms: Comms,
    /// `None` in a world of one.
    pub(crate) channel: Option<Channel>,
    pub(crate) counters: Arc<Counters>,
    /// Whether contributors are counted.
    pub(crate) counted: bool,
    /// Where ranks of one host write down who contributes.
    pub(crate) tally: Option<Tally>,
    /// Of a group on a device.
    pub(crate) side: Option<Arc<Side>>,
}

impl Engine {
    /// An engine over communicators that are there already. A world of one needs no thread.
    pub(crate) fn start(place: Place, parts: Parts) -> Result<Arc<Self>> {
        let Parts {
            comms,
            channel,
            counters,
            counted,
            tally,
            side,
        } = parts;
        let engine = Arc::new(Self {
            place,
            state: Mutex::new(State {
                comms: Some(Arc::new(comms)),
                ..State::default()
            }),
            changed: Condvar::new(),
            arrivals: AtomicU64::new(0),
            watch: Condvar::new(),
            counters,
            counted,
            tally,
            channel,
            side,
        });
        if place.world > 1 {
            engine.lock().lanes.insert(LaneId::Collectives, Lane::default());
            engine.spawn("ox-xccl", |e| e.collectives())?;
            engine.spawn("ox-xccl-watch", |e| e.watch())?;
            let (listening, listener) = mpsc::channel();
            engine.lock().listener = Some(listener);
            engine.spawn("ox-xccl-news", move |e| {
                e.listen();
                drop(listening);
            })?;
        }
        Ok(engine)
    }

    fn spawn(self: &Arc<Self>, name: &str, body: impl FnOnce(Arc<Self>) + Send + 'static) -> Result<()> {
        let engine = self.clone();
        let made = std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || body(engine));
        made.map(drop)
            .map_err(|e| Error::io(format!("cannot start thread {name}"), e))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure.
    pub(crate) fn error(&self) -> Option<Error> {
        self.lock().error.clone()
    }

    fn named(&self, error: Error) -> Error {
        error.with_rank(self.place.rank).with_epoch(self.place.epoch)
    }

    fn refusal(&self, state: &State) -> Option<Error> {
        if let Some(first) = &state.error {
            let text = format!("the group failed earlier and was not configured again: {first}");
            return Some(Error::new(ErrorKind::Poisoned, text).with_source(first.clone()));
        }
        state
            .stopping
            .then(|| Error::new(ErrorKind::InvalidState, "the group is shut down"))
    }

    /// Queues an operation, or gives it back.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Collective,
        contribute: bool,
        deadline: Instant,
    ) -> Result<Work, Box<Rejected>> {
        self.submit_after(op, contribute, deadline, None)
    }

    /// As [`submit`](Self::submit); on a device it begins after the point `after`.
    pub(crate) fn submit_after(
        self: &Arc<Self>,
        op: Collective,
        contribute: bool,
        deadline: Instant,
        after: Option<Arc<dyn Event>>,
    ) -> Result<Work, Box<Rejected>> {
        let kind = op.kind();
        let refuse = |error: Error, op| {
            let error = self.named(error).with_op(kind.name());
            Err(Box::new(Rejected { error, op }))
        };
        let mut state = self.lock();
        if let Some(error) = self.refusal(&state) {
            return refuse(error, op);
        }
        let weak = Arc::downgrade(self);
        let abort = move |reason: &str| {
            if let Some(engine) = weak.upgrade() {
                engine.abort(reason);
            }
        };
        let ended = Arc::new(AtomicBool::new(false));
        let (seen, world) = (ended.clone(), self.place.world);
        let (work, completer) = driven_work_pair(kind, deadline, abort, move |until| {
            spin::at_the_end(world, until, || seen.load(Ordering::Acquire));
        });
        work.on_complete(move |_| ended.store(true, Ordering::Release));
        let label = Label {
            kind,
            seq: (!kind.is_p2p()).then_some(state.next_seq),
            dtype: op.dtype(),
            count: op.count(),
            message: None,
            submitted: Instant::now(),
            deadline,
            order: self.order(kind, after, deadline, &work, &completer),
        };
        state.next_seq += u64::from(label.seq.is_some());
        let parts = match op {
            Collective::Batch { ops } => {
                let batch = Batch::new(ops.len(), completer);
                let part = |(slot, op)| {
                    (
                        op,
                        Sink::Part {
                            batch: batch.clone(),
                            slot,
                        },
                    )
                };
                ops.into_iter().enumerate().map(part).collect()
            }
            op => vec![(op, Sink::One(completer))],
        };
        if self.place.world == 1 {
            let comms = state.comms.clone();
            drop(state);
            for (op, sink) in parts {
                self.run_alone(comms.as_deref(), op, sink, &label, contribute);
            }
            return Ok(work);
        }
        for (op, sink) in parts {
            self.accept(&mut state, op, sink, &label, contribute);
        }
        let first = state.watch_until.is_none_or(|until| deadline < until);
        drop(state);
        if first {
            self.watch.notify_one();
        }
        Ok(work)
    }

    fn count(&self, contribute: bool) -> Count<'_> {
        Count {
            counted: self.counted,
            contribute,
            tally: self.tally.as_ref(),
        }
    }

    /// Wakes the thread of `lane`.
    fn wake(&self, lane: &Lane) {
        self.arrivals.fetch_add(1, Ordering::Release);
        if lane.asleep {
            lane.wake.notify_all();
        }
    }

    /// On a device: the event of a collective is promised at once, so that streams can wait for what is not enqueued yet.
    /// Messages, and what needs no device, are waited for on the host.
    fn order(
        &self,
        kind: OpKind,
        after: Option<Arc<dyn Event>>,
        deadline: Instant,
        work: &Work,
        completer: &Completer,
    ) -> Option<Order> {
        self.side.as_ref()?;
        let promised = !kind.is_p2p() && kind != OpKind::MonitoredBarrier;
        let promise = promised.then(|| {
            let promise = Promise::new(deadline.checked_add(PROMISED).unwrap_or(deadline));
            completer.recorded(Arc::new(XpuEvent::promised(promise.clone())));
            let ended = promise.clone();
            work.on_complete(move |status| ended.ended(status));
            promise
        });
        Some(Order { after, promise })
    }

    fn accept(
        self: &Arc<Self>,
        state: &mut State,
        op: Collective,
        sink: Sink,
        label: &Label,
        contribute: bool,
    ) {
        let message = match &op {
            Collective::Send { peer, tag, .. } => Some((*peer, *tag)),
            Collective::Recv {
                peer: Some(peer),
                tag,
                ..
            } => Some((*peer, *tag)),
            _ => None,
        };
        let (recipe, dtype, tensors) = match Recipe::of(op) {
            Ok(parts) => parts,
            Err(error) => return sink.fail(error, Vec::new()),
        };
        let id = match recipe {
            Recipe::Send { peer } => LaneId::To(peer),
            Recipe::Recv { peer } => LaneId::From(peer),
            _ => LaneId::Collectives,
        };
        let label = Label {
            dtype,
            count: tensors.iter().map(Tensor::count).sum(),
            message,
            ..label.clone()
        };
        if let Entry::Vacant(vacant) = state.lanes.entry(id) {
            // The thread waits for the lock that is held here.
            if let Err(error) = self.spawn("ox-xccl-p2p", move |e| e.messages(id)) {
                return sink.fail(error, tensors);
            }
            vacant.insert(Lane::default());
        }
        if let Some(lane) = state.lanes.get_mut(&id) {
            lane.queue.push_back(Job {
                label,
                task: Task::Run {
                    recipe,
                    tensors,
                    contribute,
                    sink,
                },
            });
            self.wake(lane);
        }
    }

    /// A world of one needs no thread.
    fn run_alone(&self, comms: Option<&Comms>, op: Collective, sink: Sink, label: &Label, contribute: bool) {
        let (recipe, dtype, tensors) = match Recipe::of(op) {
            Ok(parts) => parts,
            Err(error) => return sink.fail(error, Vec::new()),
        };
        let (held, mut lent) = lend(tensors);
        let count = self.count(contribute);
        let label = &Label {
            dtype,
            ..label.clone()
        };
        let result = match (&recipe, comms, &self.side) {
            (Recipe::MonitoredBarrier { .. }, ..) | (_, None, _) => Ok(0),
            (_, Some(comms), None) => ops::run(&comms.collectives, &recipe, dtype, &mut lent, count),
            (_, Some(comms), Some(side)) => side
                .begin(&recipe, label)
                .and_then(|()| xpu::ops::run(side, &comms.collectives, &recipe, label, &lent, count)),
        };
        drop(lent);
        match result {
            Ok(contributors) => sink.succeed(held.take(), None, contributors),
            Err(error) => sink.fail(label.on(error), held.take()),
        }
    }

    /// Splits the communicators; see [`Task::Split`]. In the order of collectives.
    pub(crate) fn split(
        self: &Arc<Self>,
        color: Option<u32>,
        rank: u32,
        world: u32,
        deadline: Instant,
    ) -> Result<Option<Comms>> {
        let (reply, answer) = mpsc::channel();
        {
            let mut state = self.lock();
            if let Some(error) = self.refusal(&state) {
                return Err(self.named(error).with_op("split"));
            }
            let label = Label {
                kind: OpKind::Barrier,
                seq: None,
                dtype: None,
                count: 0,
                message: None,
                submitted: Instant::now(),
                deadline,
                order: None,
            };
            if let Some(lane) = state.lanes.get_mut(&LaneId::Collectives) {
                let task = Task::Split {
                    color,
                    rank,
                    world,
                    reply,
                };
                lane.queue.push_back(Job { label, task });
                self.wake(lane);
            }
        }
        self.watch.notify_one();
        match answer.recv_timeout(time_left(deadline)) {
            Ok(result) => result.map_err(|e| self.named(e).with_op("split")),
            Err(_) => Err(self.error().unwrap_or_else(|| {
                self.named(Error::timeout("the split did not end by its deadline"))
                    .with_op("split")
            })),
        }
    }

    /// Ends all jobs with `error`. Threads that are in a call are given up.
    fn fail(&self, error: &Error) {
        let mut ended = Vec::new();
        {
            let mut state = self.lock();
            if state.error.is_some() {
                return;
            }
            state.error = Some(error.clone());
            state.leaving = None;
            for lane in state.lanes.values_mut() {
                if let Some(active) = lane.active.take() {
                    if matches!(active.memory, Memory::Lent(_)) {
                        lane.stuck = Some(Stuck::begin());
                    }
                    let tensors = active.memory.take();
                    ended.extend(active.sink.map(|sink| (sink, tensors)));
                }
                for job in lane.queue.drain(..) {
                    if let Task::Run { sink, tensors, .. } = job.task {
                        ended.push((sink, tensors));
                    }
                }
                self.wake(lane);
            }
        }
        self.changed.notify_all();
        self.watch.notify_one();
        for (sink, tensors) in ended {
            sink.fail(error.clone(), tensors);
        }
    }

    /// Ends all pending work with `Aborted`. The peers hear of it through the store. Never blocks.
    pub(crate) fn abort(&self, reason: &str) {
        let text = format!("rank {} aborted the group: {reason}", self.place.rank);
        self.fail(&Error::new(ErrorKind::Aborted, text).with_epoch(self.place.epoch));
        // This process may end at once: not before that is told.
        let listener = self.lock().listener.take();
        listener.into_iter().for_each(part_from);
    }

    /// Ends in good order if idle, else as [`abort`](Self::abort). Never blocks.
    pub(crate) fn leave(&self, reason: &str) {
        let busy = {
            let state = self.lock();
            state
                .lanes
                .values()
                .any(|l| l.active.is_some() || !l.queue.is_empty())
        };
        if busy {
            self.abort(reason);
        }
        self.stop();
    }

    fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        if self.place.world > 1 && state.error.is_none() && !state.ended && state.leaving.is_none() {
            state.leaving = Some(Leaving::begin());
        }
        state.lanes.values().for_each(|lane| self.wake(lane));
        drop(state);
        self.changed.notify_all();
        self.watch.notify_one();
    }

    /// Refuses further work and lets pending work end until `deadline`.
    pub(crate) fn drain(&self, deadline: Instant) -> Result<()> {
        self.stop();
        if self.place.world == 1 {
            return Ok(());
        }
        let mut state = self.lock();
        let courtesy = deadline.min(ftcore::deadline_in(COURTESY));
        loop {
            let busy = state
                .lanes
                .values()
                .any(|l| l.active.is_some() || !l.queue.is_empty());
            if state.error.is_some() || state.ended {
                return Ok(());
            }
            let until = if busy { deadline } else { courtesy };
            let left = time_left(until);
            if left.is_zero() {
                drop(state);
                if !busy {
                    return Ok(());
                }
                self.abort("pending work did not end by the shutdown's deadline");
                let error = Error::timeout("pending work did not end by the deadline; it was aborted");
                return Err(self.named(error).with_op("shutdown"));
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
