//! One configuration of a group at work: lanes of jobs, each with a thread that makes oneCCL's blocking calls.
//!
//! Collectives have one lane, in order of submission; messages have one per peer and direction, on a communicator of their own,
//! so that nobody waits for another's message. A call cannot be cancelled. So a lane's thread is expendable: the watcher ends
//! every job at its deadline, whatever the thread is doing, leaks the memory that it may still touch (INV-8), poisons the group
//! and tells the peers through the store (`news`). A thread that does come back finds its job gone and ends.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Collective, Error, ErrorKind, Rejected, Result, Tensor, Work, time_left, work_pair};

use crate::job::{Active, Batch, Job, Label, Memory, Sink, Task};
use crate::link::Link;
use crate::news::{Channel, Message};
use crate::ops::{self, Count};
use crate::raw::comm::Comm;
use crate::raw::exit::{self, Leaving, Stuck};
use crate::raw::lent::{Lent, lend};
use crate::recipe::Recipe;
use crate::traffic::Counters;

/// How long a rank that leaves waits for the others, so that communicators can be destroyed (a call of all ranks).
const FAREWELL: Duration = Duration::from_secs(60);
/// How long it then waits until they all have.
const LAST_ONES: Duration = Duration::from_secs(4);
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
    /// Counts jobs: the number of a message is the same on both sides.
    turn: u64,
    /// Held while a split runs.
    split: Option<Lent>,
}

/// A lane's turn.
struct Turn {
    number: u64,
    what: What,
    label: Label,
}

enum What {
    Run {
        recipe: Recipe,
        contribute: bool,
        bytes: usize,
    },
    Split {
        color: Option<u32>,
        rank: u32,
        world: u32,
        reply: Sender<Result<Option<Comms>>>,
    },
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
}

/// One configuration.
pub(crate) struct Engine {
    pub(crate) place: Place,
    state: Mutex<State>,
    changed: Condvar,
    watch: Condvar,
    counters: Arc<Counters>,
    /// Whether contributors are counted.
    counted: bool,
    /// `None` in a world of one.
    channel: Option<Channel>,
}

impl Engine {
    /// An engine over communicators that are there already. `channel` is `None` in a world of one, which needs no thread.
    pub(crate) fn start(
        place: Place,
        comms: Comms,
        channel: Option<Channel>,
        counters: Arc<Counters>,
        counted: bool,
    ) -> Result<Arc<Self>> {
        let engine = Arc::new(Self {
            place,
            state: Mutex::new(State {
                comms: Some(Arc::new(comms)),
                ..State::default()
            }),
            changed: Condvar::new(),
            watch: Condvar::new(),
            counters,
            counted,
            channel,
        });
        if place.world > 1 {
            engine.lock().lanes.insert(LaneId::Collectives, Lane::default());
            engine.spawn("ox-xccl", |e| e.collectives())?;
            engine.spawn("ox-xccl-watch", |e| e.watch())?;
            engine.spawn("ox-xccl-news", |e| e.listen())?;
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
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(engine) = weak.upgrade() {
                engine.abort(reason);
            }
        });
        let label = Label {
            kind,
            seq: (!kind.is_p2p()).then_some(state.next_seq),
            dtype: op.dtype(),
            count: op.count(),
            submitted: Instant::now(),
            deadline,
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

    fn accept(
        self: &Arc<Self>,
        state: &mut State,
        op: Collective,
        sink: Sink,
        label: &Label,
        contribute: bool,
    ) {
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
            lane.wake.notify_one();
        }
    }

    /// A world of one needs no thread.
    fn run_alone(&self, comms: Option<&Comms>, op: Collective, sink: Sink, label: &Label, contribute: bool) {
        let (recipe, dtype, tensors) = match Recipe::of(op) {
            Ok(parts) => parts,
            Err(error) => return sink.fail(error, Vec::new()),
        };
        let (held, mut lent) = lend(tensors);
        let count = Count {
            counted: self.counted,
            contribute,
        };
        let result = match (&recipe, comms) {
            (Recipe::MonitoredBarrier { .. }, _) | (_, None) => Ok(0),
            (_, Some(comms)) => ops::run(&comms.collectives, &recipe, dtype, &mut lent, count),
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
        let (reply, answer) = std::sync::mpsc::channel();
        {
            let mut state = self.lock();
            if let Some(error) = self.refusal(&state) {
                return Err(self.named(error).with_op("split"));
            }
            let label = Label {
                kind: ftcore::OpKind::Barrier,
                seq: None,
                dtype: None,
                count: 0,
                submitted: Instant::now(),
                deadline,
            };
            if let Some(lane) = state.lanes.get_mut(&LaneId::Collectives) {
                let task = Task::Split {
                    color,
                    rank,
                    world,
                    reply,
                };
                lane.queue.push_back(Job { label, task });
                lane.wake.notify_one();
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

    /// The next job of lane `id`, registered as active; `None` when the lane's thread is to end.
    fn next(&self, id: LaneId) -> Option<Turn> {
        let mut state = self.lock();
        loop {
            let stopping = state.stopping || state.error.is_some();
            let lane = state.lanes.get_mut(&id)?;
            if let Some(Job { label, task }) = lane.queue.pop_front() {
                let number = lane.turn;
                lane.turn += 1;
                let (what, memory, sink) = match task {
                    Task::Run {
                        recipe,
                        tensors,
                        contribute,
                        sink,
                    } => {
                        let bytes = tensors.iter().map(Tensor::byte_len).sum();
                        let what = What::Run {
                            recipe,
                            contribute,
                            bytes,
                        };
                        (what, Memory::Idle(tensors), Some(sink))
                    }
                    Task::Split {
                        color,
                        rank,
                        world,
                        reply,
                    } => {
                        let what = What::Split {
                            color,
                            rank,
                            world,
                            reply,
                        };
                        // A loan of nothing: its thread counts as stuck if it is given up.
                        let (held, lent) = lend(Vec::new());
                        lane.split = Some(lent);
                        (what, Memory::Lent(held), None)
                    }
                };
                lane.active = Some(Active {
                    label: label.clone(),
                    memory,
                    sink,
                });
                return Some(Turn { number, what, label });
            }
            if stopping {
                return None;
            }
            let wake = lane.wake.clone();
            state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives the addresses of the active job's tensors to its thread; `None` if the job was ended meanwhile.
    fn borrow(&self, id: LaneId) -> Option<Lent> {
        let mut state = self.lock();
        let active = state.lanes.get_mut(&id)?.active.as_mut()?;
        let tensors = std::mem::replace(&mut active.memory, Memory::Idle(Vec::new())).take();
        let (held, lent) = lend(tensors);
        active.memory = Memory::Lent(held);
        Some(lent)
    }

    /// Takes the active job out of its lane; `None` if it was ended meanwhile, and then its thread must end too.
    fn finished(&self, id: LaneId) -> Option<Active> {
        let mut state = self.lock();
        let stopping = state.stopping;
        let lane = state.lanes.get_mut(&id)?;
        lane.split = None;
        let active = lane.active.take();
        if active.is_none() {
            lane.stuck = None;
        }
        drop(state);
        if stopping {
            self.changed.notify_all();
            self.watch.notify_one();
        }
        active
    }

    /// Runs jobs of one lane until it is to end. False if this thread was given up.
    fn serve(&self, id: LaneId, comms: &Comms) -> bool {
        while let Some(turn) = self.next(id) {
            let label = turn.label.clone();
            let error = match turn.what {
                What::Run {
                    recipe,
                    contribute,
                    bytes,
                } => {
                    let result = self.run(id, comms, &recipe, contribute, turn.number, &label);
                    let Some(active) = self.finished(id) else {
                        return false;
                    };
                    let Some(sink) = active.sink else { return false };
                    match result {
                        Ok(contributors) => {
                            self.counters.add(&recipe, bytes, self.place);
                            let source = match recipe {
                                Recipe::Recv { peer } => Some(peer),
                                _ => None,
                            };
                            sink.succeed(active.memory.take(), source, contributors);
                            if let (Recipe::Send { peer }, Some(channel)) = (recipe, &self.channel) {
                                channel.forget(self.message_to(peer, turn.number));
                            }
                            None
                        }
                        Err(error) => Some((label.on(self.named(error)), active.memory, sink)),
                    }
                }
                What::Split {
                    color,
                    rank,
                    world,
                    reply,
                } => {
                    let result = split_comms(comms, color, rank, world);
                    let failed = result.as_ref().err().cloned();
                    let _ = reply.send(result);
                    if self.finished(id).is_none() {
                        return false;
                    }
                    if let Some(error) = failed {
                        self.tell_and_fail(&self.named(error).with_op("split"));
                    }
                    None
                }
            };
            if let Some((error, memory, sink)) = error {
                self.tell_and_fail(&error);
                let mut tensors = memory.take();
                if error.kind() == ErrorKind::Backend {
                    // oneCCL's own threads may be half-way through it.
                    for tensor in tensors.drain(..) {
                        tensor.leak("oneCCL failed half-way");
                    }
                }
                sink.fail(error, tensors);
            }
        }
        true
    }

    /// Runs one operation. Its tensors are lent for the time of oneCCL's calls only.
    fn run(
        &self,
        id: LaneId,
        comms: &Comms,
        recipe: &Recipe,
        contribute: bool,
        number: u64,
        label: &Label,
    ) -> Result<u32> {
        let ended = || Error::new(ErrorKind::Aborted, "the group ended");
        let count = Count {
            counted: self.counted,
            contribute,
        };
        let (link, message) = match *recipe {
            Recipe::MonitoredBarrier { wait_all } => return self.monitored(wait_all, label),
            Recipe::Send { peer } => (
                comms.messages.as_ref().unwrap_or(&comms.collectives),
                Some(self.message_to(peer, number)),
            ),
            Recipe::Recv { peer } => (
                comms.messages.as_ref().unwrap_or(&comms.collectives),
                Some(Message {
                    from: peer,
                    to: self.place.rank,
                    number,
                }),
            ),
            _ => (&comms.collectives, None),
        };
        // oneCCL stalls everything between two ranks, collectives too, behind a message that nobody receives yet. So both
        // ends agree first; until then neither is in a call, and can be ended.
        if let (Some(message), Some(channel)) = (message, &self.channel) {
            let content = match label.dtype {
                Some(dtype) => format!("{} elements of {dtype}", label.count),
                None => String::new(),
            };
            let over = || self.error().is_some();
            match recipe {
                Recipe::Send { .. } => channel.offer(message, &content, label.deadline, over)?,
                _ => channel.accept(message, &content, label.deadline, over)?,
            }
        }
        let mut lent = self.borrow(id).ok_or_else(ended)?;
        ops::run(link, recipe, label.dtype, &mut lent, count)
    }

    fn message_to(&self, peer: u32, number: u64) -> Message {
        Message {
            from: self.place.rank,
            to: peer,
            number,
        }
    }

    fn monitored(&self, wait_all: bool, label: &Label) -> Result<u32> {
        let (Some(channel), Some(seq)) = (&self.channel, label.seq) else {
            return Ok(0);
        };
        channel
            .monitored_barrier(seq, wait_all, label.deadline)
            .map(|()| 0)
    }

    /// The thread of the collectives: their lane, then the end of the communicators.
    fn collectives(self: Arc<Self>) {
        let Some(comms) = self.lock().comms.clone() else {
            return;
        };
        let alive = self.serve(LaneId::Collectives, &comms);
        drop(comms);
        if alive && self.error().is_none() {
            self.farewell();
        }
        {
            let mut state = self.lock();
            state.ended = true;
            state.leaving = None;
        }
        self.changed.notify_all();
        self.watch.notify_one();
    }

    fn messages(self: Arc<Self>, id: LaneId) {
        let comms = self.lock().comms.clone();
        let Some(comms) = comms else { return };
        let alive = self.serve(id, &comms);
        drop(comms);
        if alive {
            self.lock().lanes.remove(&id);
            self.changed.notify_all();
        }
    }

    /// Destroys the communicators once all ranks have left: it is a call of all of them.
    fn farewell(&self) {
        let until = ftcore::deadline_in(FAREWELL);
        let mut state = self.lock();
        while state.lanes.len() > 1 {
            if state.error.is_some() || Instant::now() >= until {
                return;
            }
            state = self
                .changed
                .wait_timeout(state, time_left(until))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let comms = state.comms.take().and_then(|c| Arc::try_unwrap(c).ok());
        drop(state);
        let (Some(comms), Some(channel)) = (comms, &self.channel) else {
            return;
        };
        if let Err(error) = channel.all_have_left(until) {
            tracing::debug!(%error, "the other ranks still use a communicator: it is not destroyed");
            return;
        }
        let links = [comms.messages, Some(comms.collectives)];
        let comms = links.into_iter().flatten().filter_map(|link| match link {
            Link::Comm(comm) => Some(comm),
            Link::Alone => None,
        });
        for comm in comms {
            if let Err(error) = comm.destroy() {
                tracing::warn!(%error, "a communicator was not destroyed");
            }
        }
        // Rank 0's process has the key-value server that the others still talk to while they do the same.
        if let Err(error) = channel.all_have_destroyed(ftcore::deadline_in(LAST_ONES)) {
            tracing::debug!(%error, "another rank did not get to destroy its communicator");
        }
    }

    /// Ends every job at its deadline.
    fn watch(self: Arc<Self>) {
        let mut state = self.lock();
        loop {
            let busy = state
                .lanes
                .values()
                .any(|l| l.active.is_some() || !l.queue.is_empty());
            if state.error.is_some() || (state.stopping && !busy) {
                return;
            }
            let due = earliest(&state).map(|(when, stage, label)| (when, stage, label.clone()));
            match due {
                Some((when, stage, label)) if when <= Instant::now() => {
                    let error = self.overdue(&label, stage);
                    drop(state);
                    self.tell_and_fail(&error);
                    return;
                }
                Some((when, ..)) => {
                    state.watch_until = Some(when);
                    state = self
                        .watch
                        .wait_timeout(state, time_left(when))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                None => {
                    state.watch_until = None;
                    state = self.watch.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn overdue(&self, label: &Label, stage: Stage) -> Error {
        let took = label.submitted.elapsed().as_secs_f64();
        let text = match stage {
            Stage::Called => format!(
                "did not end within {took:.3} s: another rank has not called it, or is gone. oneCCL cannot cancel a call: its \
                 thread and its memory are given up, and this process cannot use oneCCL again (an isolated group can)"
            ),
            Stage::Meeting => format!("the other rank did not come within {took:.3} s"),
            Stage::Queued => {
                format!("had not begun after {took:.3} s: earlier operations of this group are not done")
            }
        };
        label.on(self.named(Error::timeout(text)))
    }

    /// Hears what other ranks report, and reports what was not told yet.
    fn listen(self: Arc<Self>) {
        let Some(channel) = &self.channel else { return };
        loop {
            if let Some(error) = channel.news() {
                self.fail(&error);
                return;
            }
            let state = self.lock();
            if let Some(error) = state.error.clone() {
                drop(state);
                channel.tell(&error);
                return;
            }
            if state.ended {
                return;
            }
        }
    }

    /// Tells the other ranks, then ends everything here.
    fn tell_and_fail(&self, error: &Error) {
        if let Some(channel) = &self.channel {
            channel.tell(error);
        }
        self.fail(error);
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
                lane.wake.notify_all();
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
        for lane in state.lanes.values() {
            lane.wake.notify_all();
        }
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

/// How far a job has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// In one of oneCCL's calls.
    Called,
    /// Waiting for the other ranks, outside oneCCL.
    Meeting,
    /// In its lane's queue.
    Queued,
}

/// The first deadline among all jobs.
fn earliest(state: &State) -> Option<(Instant, Stage, &Label)> {
    let jobs = state.lanes.values().flat_map(|lane| {
        let active = lane.active.iter().map(|a| {
            let stage = match a.memory {
                Memory::Lent(_) => Stage::Called,
                Memory::Idle(_) => Stage::Meeting,
            };
            (a.label.watched_until(), stage, &a.label)
        });
        let queued = lane.queue.iter();
        active.chain(queued.map(|j| (j.label.watched_until(), Stage::Queued, &j.label)))
    });
    jobs.min_by_key(|(when, stage, _)| (*when, *stage))
}

/// The communicators of a split group, and those of its messages.
fn split_comms(comms: &Comms, color: Option<u32>, rank: u32, world: u32) -> Result<Option<Comms>> {
    let Link::Comm(parent) = &comms.collectives else {
        return Ok(color.map(|_| Comms {
            collectives: Link::Alone,
            messages: None,
        }));
    };
    let Some(made) = parent.split(color, rank, rank, world)? else {
        return Ok(None);
    };
    with_messages(made).map(Some)
}

/// Adds the communicator for messages to one that is for collectives from now on. A call of all its ranks.
pub(crate) fn with_messages(made: Comm) -> Result<Comms> {
    if made.world() == 1 {
        made.destroy()?;
        return Ok(Comms {
            collectives: Link::Alone,
            messages: None,
        });
    }
    let messages = made.split(Some(0), made.rank(), made.rank(), made.world())?;
    Ok(Comms {
        collectives: Link::Comm(made),
        messages: messages.map(Link::Comm),
    })
}
