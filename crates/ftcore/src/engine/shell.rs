//! The concurrent shell around the machine: one lock, one executor, the queue of what callers and the driver are to be told.
//!
//! Nothing foreign runs under the lock. What the machine orders goes into a queue that one thread at a time empties, so that callers
//! are told in the machine's order whichever threads it speaks through; a callback that calls back in finds the queue being emptied
//! and leaves its part there.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::clock::{self, Timed};
use super::label::{Label, Place};
use super::machine::{Action, Answer, Channel, End, Machine, Refusal, Rules, Stage, Turn};
use super::sync::{Condvar, Mutex, MutexGuard, spawn};
use super::ticket::{Ended, Ticket};
use crate::flight_recorder;
use crate::work::{self, Recorder};
use crate::{
    Collective, Completer, Completion, Error, ErrorKind, Event, Failed, OpKind, Rejected, Result, Tensor,
    Work, deadline_in, lifecycle, time_left,
};

/// What a group submits: an operation with whatever its driver needs besides.
pub trait Job: Send + 'static {
    /// Gives up what the driver never saw.
    fn into_op(self) -> Collective;

    /// What it is ordered with.
    fn channel(&self, label: &Label) -> Channel {
        label.channel()
    }

    /// The event of its end, where that is known before it is on its device.
    fn promised(&self) -> Option<Arc<dyn Event>> {
        None
    }
}

/// How long threads look for what they wait for before they sleep: to be woken costs more than a small operation on a fast transport.
#[derive(Debug, Clone, Copy, Default)]
pub struct SpinBudget {
    /// An executor, for its next operation.
    pub executor: Duration,
    /// A caller, for the end of its operation.
    pub caller: Duration,
}

/// What a backend supplies. See the module.
///
/// - `enqueue` and `release` are called by one thread at a time ([`BLOCKS`](Driver::BLOCKS): one for each channel), `interrupt` from any,
///   beside them.
/// - After `interrupt` a blocked `enqueue` or `release` should return; until it has, the group has not ended. An `enqueue` that was on its
///   way gives its operation back: what `interrupt` does not find stays pending.
/// - An operation's memory is the driver's from `enqueue` until it hands it back through the ticket.
///
/// ```
/// use ftcore::engine::{Driver, Ended, Job, Ticket};
/// use ftcore::{Collective, Completion, Error, Result};
///
/// struct Call(Collective);
///
/// impl Job for Call {
///     fn into_op(self) -> Collective {
///         self.0
///     }
/// }
///
/// /// A driver of a world of one, whose operations are done as they begin.
/// struct Alone;
///
/// impl Driver for Alone {
///     type Job = Call;
///
///     fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
///         let tensors = call.0.into_tensors();
///         ticket.succeed(Completion { tensors, source: None, contributors: 1 });
///     }
///     fn interrupt(&self, _: &Error, ended: Ended<Self>) {
///         ended.clean(); // nothing is in hand
///     }
///     fn release(&self) -> Result<()> {
///         Ok(())
///     }
/// }
/// ```
pub trait Driver: Send + Sync + Sized + 'static {
    /// What is submitted.
    type Job: Job;
    /// `enqueue` lasts as long as its operation, and no channel may wait for another: messages have an executor for each of theirs, beside
    /// the one of the collectives.
    const BLOCKS: bool = false;
    /// How long past its deadline an operation that is with the driver is waited for. Not zero for a driver over a group or a process that
    /// keeps deadlines, too: what that says of one names more than the engine can.
    const OVERTIME: Duration = Duration::ZERO;

    /// How long threads look before they sleep.
    fn spin_budget(&self) -> SpinBudget {
        SpinBudget::default()
    }

    /// Begins `job`. Its ticket is answered here, or later from any thread.
    fn enqueue(&self, job: Self::Job, ticket: Ticket<Self>);

    /// The group has failed: tells the peers, ends everything. Called once, before any caller hears of it. Must not block; the answer may
    /// come later, from any thread.
    fn interrupt(&self, failure: &Error, ended: Ended<Self>);

    /// The grace is over (see [`Rules::gives_up`]): memory that is still here counts as leaked until it is proven free. Called once, after
    /// `interrupt` and before the callers concerned hear of it. Must not block.
    fn give_up(&self) {}

    /// Ends operation `number`, which the driver has, alone: its caller wants that. False: it cannot, and the group is aborted. Must not
    /// block.
    fn abort_one(&self, number: u64, reason: &str) -> bool {
        let _ = (number, reason);
        false
    }

    /// Ends in good order; nothing is in flight. May block, until `interrupt`.
    ///
    /// Errors: why it is not certain that everything has let go.
    fn release(&self) -> Result<()>;

    /// What an operation that has not ended at its deadline waits for, in words that follow "it is …".
    fn waits_for(&self, label: &Label, stage: Stage) -> String {
        let _ = label;
        match stage {
            Stage::Queued => "waiting for earlier ones",
            Stage::Entering => "being handed over",
            Stage::Running => "in flight",
            Stage::Finished => "done, but an earlier one is not",
        }
        .to_string()
    }
}

/// The number of an operation, its caller's side, and the lock under which it was accepted.
type Accepted<'a, J> = (u64, Work, MutexGuard<'a, State<J>>);

/// What a driver says of an operation: see [`Ticket`].
pub enum Outcome {
    /// It has succeeded.
    Succeeded(Completion),
    /// It alone has failed. With its memory, if nothing touches that any more.
    Refused(Error, Vec<Tensor>),
    /// It has failed, and the group with it. With its memory, as above.
    Fatal(Error, Vec<Tensor>),
}

struct Entry<J> {
    label: Label,
    completer: Completer,
    /// Until it is started.
    job: Option<J>,
    /// Until the caller is told.
    outcome: Option<Outcome>,
}

/// What is said outside the lock.
enum Outgoing {
    Succeed(Completer, Completion),
    Fail(Completer, Error, Vec<Tensor>),
    Return(Completer, Error, Later),
    Interrupt(Error),
    GiveUp,
}

/// A job whose tensors are taken out of it outside the lock.
type Later = Box<dyn FnOnce() -> Vec<Tensor> + Send>;

struct State<J> {
    machine: Machine<Error>,
    entries: BTreeMap<u64, Entry<J>>,
    outgoing: VecDeque<Outgoing>,
    /// A thread is emptying `outgoing`.
    telling: bool,
    /// What callers carry out themselves.
    carried: Vec<(u64, Label)>,
    /// Threads that wait for `moved`.
    waiting: usize,
    /// Executors without a turn: whether the one of the collectives is, and how many of messages are.
    idle: [usize; 2],
    /// The channels of messages that have an executor.
    executors: BTreeSet<Channel>,
    /// What the clock was last told.
    armed: Option<Instant>,
    /// Why the end is unclean, if it is.
    unclean: Option<String>,
}

impl<J> State<J> {
    fn label(&self, number: u64) -> Option<Label> {
        let carried = || self.carried.iter().find(|(carried, _)| *carried == number);
        let queued = self.entries.get(&number).map(|entry| entry.label);
        queued.or_else(|| carried().map(|(_, label)| *label))
    }
}

/// One configuration of a group at work.
pub struct Engine<D: Driver> {
    driver: D,
    /// Of its executors.
    name: String,
    place: Place,
    state: Mutex<State<D::Job>>,
    /// Something has ended, or gone to the driver: for callers that wait for either.
    moved: Condvar,
    /// There is a turn, for executors, as in [`State::idle`]. Not `moved`: most of what callers wait for concerns no executor, and to wake one
    /// in vain costs more than a small operation.
    turns: [Condvar; 2],
    /// Counts the turns of collectives, so that their executor can look without the lock.
    arrivals: AtomicU64,
    recorder: OnceLock<flight_recorder::Recorder>,
    /// Itself, for tickets and the clock.
    me: Weak<Self>,
}

impl<D: Driver> Engine<D> {
    /// Starts an engine over `driver`, with the thread `name` as its executor.
    pub fn start(name: &str, place: Place, rules: Rules, driver: D) -> Result<Arc<Self>> {
        let engine = Arc::new_cyclic(|me| Self {
            driver,
            name: name.to_string(),
            place,
            arrivals: AtomicU64::new(0),
            recorder: OnceLock::new(),
            state: Mutex::new(State {
                machine: Machine::new(rules, D::OVERTIME),
                entries: BTreeMap::new(),
                outgoing: VecDeque::new(),
                telling: false,
                carried: Vec::new(),
                waiting: 0,
                idle: [0; 2],
                executors: BTreeSet::new(),
                armed: None,
                unclean: None,
            }),
            moved: Condvar::new(),
            turns: [Condvar::new(), Condvar::new()],
            me: me.clone(),
        });
        let executor = engine.clone();
        spawn(name, move || executor.execute(Channel::Collectives))?;
        Ok(engine)
    }

    /// Which rank of which configuration.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    fn lock(&self) -> MutexGuard<'_, State<D::Job>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the threads that may go on now, if there are any: this is on the path of every call.
    fn wake(&self, state: MutexGuard<'_, State<D::Job>>) {
        let callers = state.waiting > 0;
        let has_turn = |messages: bool| {
            state.idle[usize::from(messages)] > 0 && state.machine.has_turn(D::BLOCKS, messages)
        };
        let executors = [has_turn(false), has_turn(true)];
        drop(state);
        if callers {
            self.moved.notify_all();
        }
        if executors[0] {
            self.arrivals.fetch_add(1, Ordering::Release);
        }
        for (turns, _) in self.turns.iter().zip(executors).filter(|(_, has)| *has) {
            turns.notify_all();
        }
    }

    /// Accepts a job, to be started in order of submission and told after earlier ones of its [`channel`](Label::channel). It fails with `Timeout` at `deadline`.
    ///
    /// Refusals: `Poisoned` with the first failure, `InvalidState` once it leaves; `Io` if no thread can keep the deadline.
    pub fn submit(
        self: &Arc<Self>,
        job: D::Job,
        label: Label,
        deadline: Instant,
    ) -> Result<Work, Box<Rejected>> {
        let (_, work, state) = self.accept(job, label, deadline)?;
        self.wake(state);
        Ok(work)
    }

    /// As [`submit`](Self::submit); the driver's `enqueue` runs on this very thread if this operation is the next, which saves a
    /// hand-over.
    pub fn submit_here(
        self: &Arc<Self>,
        job: D::Job,
        label: Label,
        deadline: Instant,
    ) -> Result<Work, Box<Rejected>> {
        // One lock for both: the executor takes none from callers.
        let (number, work, mut state) = self.accept(job, label, deadline)?;
        match state.machine.turn_of(number) {
            Turn::Start(number) => self.call(state, number),
            Turn::Release | Turn::Wait | Turn::Over => self.wake(state),
        }
        Ok(work)
    }

    fn accept(
        self: &Arc<Self>,
        job: D::Job,
        label: Label,
        deadline: Instant,
    ) -> Result<Accepted<'_, D::Job>, Box<Rejected>> {
        let mut state = self.lock();
        let due = self.place.due(&label, deadline);
        let channel = job.channel(&label);
        let number = match state.machine.submit(channel, due) {
            Ok(number) => number,
            Err(refusal) => {
                drop(state);
                let error = self.refusal(refusal, &label);
                if let Some(recorder) = self.recorder.get() {
                    recorder.refused(&label.summary, &error);
                }
                let op = job.into_op();
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let (work, completer) = self.pair(number, label.kind, deadline, state.machine.told_by(due));
        completer.numbered(number);
        if let Some(recorder) = self.recorder.get() {
            completer.record(recorder.queued(&label.summary, None));
        }
        if let Some(done) = job.promised() {
            completer.recorded(done);
        }
        let entry = Entry {
            label,
            completer,
            job: Some(job),
            outcome: None,
        };
        state.entries.insert(number, entry);
        let new = D::BLOCKS && channel != Channel::Collectives && state.executors.insert(channel);
        let armed = self.arm(&mut state, due);
        if armed.is_ok() && !new {
            return Ok((number, work, state));
        }
        drop(state);
        let ready = armed.and_then(|()| if new { self.add_executor(channel) } else { Ok(()) });
        if let Err(error) = ready {
            self.fail(self.place.name(error));
        }
        Ok((number, work, self.lock()))
    }

    fn refusal(&self, why: Refusal<Error>, label: &Label) -> Error {
        let error = match why {
            Refusal::Failed(first) => {
                let text = format!("the group failed before: {first}");
                Error::new(ErrorKind::Poisoned, text).with_source(first)
            }
            Refusal::Closed => Error::new(ErrorKind::InvalidState, "the group was shut down"),
        };
        self.place.name(error).with_op(label.kind.name())
    }

    /// Has the caller carry out `job` on its own thread, with `run`, and gives back what comes of it: for drivers whose library keeps the
    /// order and the deadlines of blocking calls itself, so that several threads may be inside. It costs next to nothing, and waits for
    /// earlier ones until the driver has them, not until they have ended. The group does not end before `run` has returned, unless the
    /// driver [gives up](Rules::gives_up); where that is not by the deadline (with [`OVERTIME`](Driver::OVERTIME)) the group fails.
    ///
    /// Errors: as [`submit`](Self::submit), then with the tensors of `job`; what `run` says, or the failure that the group has met with
    /// meanwhile.
    pub fn carry_out(
        &self,
        job: D::Job,
        label: Label,
        deadline: Instant,
        run: impl FnOnce(D::Job) -> Outcome,
    ) -> Result<Completion, Box<Failed>> {
        let due = self.place.due(&label, deadline);
        let mut state = self.lock();
        let entered = loop {
            match state.machine.enter(due) {
                Ok(Some(number)) => break Ok(number),
                Ok(None) if time_left(deadline).is_zero() => {
                    let error = Error::timeout("earlier operations were not handed over by its deadline");
                    break Err(self.place.name(error).with_op(label.kind.name()));
                }
                Ok(None) => {
                    state.waiting += 1;
                    let waited = self.moved.wait_timeout(state, time_left(deadline));
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                    state.waiting -= 1;
                }
                Err(refusal) => break Err(self.refusal(refusal, &label)),
            }
        };
        let number = match entered {
            Ok(number) => number,
            Err(error) => {
                drop(state);
                let tensors = job.into_op().into_tensors();
                return Err(Box::new(Failed { error, tensors }));
            }
        };
        state.carried.push((number, label));
        let armed = self.arm(&mut state, due);
        drop(state);
        if let Err(error) = armed {
            self.fail(self.place.name(error));
        }
        let outcome = run(job);
        let (outcome, answer) = self.name(outcome, Some(&label), number);
        let mut state = self.lock();
        state.carried.retain(|(carried, _)| *carried != number);
        let first = state.machine.left(number, answer, Instant::now());
        self.tell(state);
        let (error, tensors) = match (outcome, first) {
            (Outcome::Succeeded(completion), None) => return Ok(completion),
            (Outcome::Succeeded(completion), Some(first)) => (first, completion.tensors),
            (Outcome::Refused(error, tensors) | Outcome::Fatal(error, tensors), first) => {
                (first.unwrap_or(error), tensors)
            }
        };
        Err(Box::new(Failed { error, tensors }))
    }

    /// The outcome with the operation and its place on a failure of the group, and that for the machine.
    fn name(&self, outcome: Outcome, label: Option<&Label>, number: u64) -> (Outcome, Answer<Error>) {
        match outcome {
            Outcome::Fatal(error, tensors) => {
                let error = match label {
                    Some(label) => label.name(number, error),
                    None => error,
                };
                let error = self.place.name(error);
                (Outcome::Fatal(error.clone(), tensors), Answer::Fatal(error))
            }
            outcome => (outcome, Answer::Through),
        }
    }

    fn add_executor(self: &Arc<Self>, channel: Channel) -> Result<()> {
        let executor = self.clone();
        spawn(&self.name, move || executor.execute(channel))
    }

    fn pair(&self, number: u64, kind: OpKind, deadline: Instant, report: Instant) -> (Work, Completer) {
        let me = self.me.clone();
        let abort = move |reason: &str| {
            if let Some(engine) = me.upgrade()
                && !engine.driver.abort_one(number, reason)
            {
                engine.stop(reason);
            }
        };
        let budget = self.driver.spin_budget().caller;
        if budget.is_zero() {
            return work::pair(kind, deadline, report, Box::new(abort), None);
        }
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let drive =
            move |until: Instant| look(until.min(deadline_in(budget)), || seen.load(Ordering::Acquire));
        let (work, completer) = work::pair(kind, deadline, report, Box::new(abort), Some(Box::new(drive)));
        work.on_complete(move |_| ended.store(true, Ordering::Release));
        (work, completer)
    }

    /// Sees to it that the clock looks at `at`.
    fn arm(&self, state: &mut State<D::Job>, at: Instant) -> Result<()> {
        if state.armed.is_some_and(|armed| armed <= at) {
            return Ok(());
        }
        state.armed = Some(at);
        if cfg!(feature = "shuttle") {
            return Ok(());
        }
        clock::arm(at, self.me.clone() as Weak<dyn Timed>)
    }

    /// An executor: hands one job after the other to the driver until nothing more can come.
    fn execute(self: Arc<Self>, channel: Channel) {
        // Messages are rare, and many channels may wait for one.
        let budget = match channel {
            Channel::Collectives => self.driver.spin_budget().executor,
            _ => Duration::ZERO,
        };
        let kind = usize::from(channel != Channel::Collectives);
        let mut looks = false;
        let mut state = self.lock();
        loop {
            let turn = match D::BLOCKS {
                true => state.machine.turn_in(channel),
                false => state.machine.turn(),
            };
            match turn {
                Turn::Start(number) => {
                    self.call(state, number);
                    looks = !budget.is_zero();
                    state = self.lock();
                }
                Turn::Wait if looks => {
                    looks = false;
                    let seen = self.arrivals.load(Ordering::Acquire);
                    state.idle[kind] += 1;
                    drop(state);
                    look(deadline_in(budget), || {
                        self.arrivals.load(Ordering::Acquire) != seen
                    });
                    state = self.lock();
                    state.idle[kind] -= 1;
                }
                Turn::Release => {
                    drop(state);
                    let released = self.driver.release();
                    state = self.lock();
                    if let Err(error) = &released {
                        tracing::warn!(%error, rank = self.place.rank, "a group did not end in good order");
                        state.unclean.get_or_insert_with(|| error.to_string());
                    }
                    state.machine.released(released.is_ok());
                    self.tell(state);
                    state = self.lock();
                }
                Turn::Wait => {
                    state.idle[kind] += 1;
                    state = self.turns[kind]
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                    state.idle[kind] -= 1;
                }
                Turn::Over => return,
            }
        }
    }

    /// Hands operation `number` to the driver.
    fn call(&self, mut state: MutexGuard<'_, State<D::Job>>, number: u64) {
        let entry = state.entries.get_mut(&number);
        let job = entry.and_then(|entry| {
            entry.completer.started();
            Some((entry.job.take()?, entry.completer.deadline()?))
        });
        drop(state);
        if let (Some((job, deadline)), Some(engine)) = (job, self.me.upgrade()) {
            self.driver.enqueue(job, Ticket::new(engine, number, deadline));
        }
        let mut state = self.lock();
        state.machine.returned(number);
        self.tell(state);
    }

    /// Carries out what the machine orders, in order, outside the lock.
    fn tell<'a>(&'a self, mut state: MutexGuard<'a, State<D::Job>>) {
        let failure = state.machine.failure().cloned();
        let inner = &mut *state;
        for action in inner.machine.take_actions() {
            let said = match (action, &failure) {
                (Action::Interrupt, Some(failure)) => Some(Outgoing::Interrupt(failure.clone())),
                (Action::GiveUp, _) => Some(Outgoing::GiveUp),
                (Action::Tell(number), _) => inner.entries.remove(&number).and_then(Entry::answer),
                (Action::Fail(number), Some(failure)) => inner
                    .entries
                    .remove(&number)
                    .map(|entry| entry.end(failure.clone())),
                (Action::Interrupt | Action::Fail(_), None) => None,
            };
            inner.outgoing.extend(said);
        }
        // Only then has it changed, and looking for it costs as much as there is in flight.
        if let Some(at) = failure.and_then(|_| state.machine.wake_at()) {
            // Without a thread for it, what is with the driver is waited for.
            let _ = self.arm(&mut state, at);
        }
        if !std::mem::replace(&mut state.telling, true) {
            while let Some(outgoing) = state.outgoing.pop_front() {
                drop(state);
                self.say(outgoing);
                state = self.lock();
            }
            state.telling = false;
        }
        self.wake(state);
    }

    fn say(&self, outgoing: Outgoing) {
        match outgoing {
            Outgoing::Succeed(completer, completion) => completer.succeed(completion),
            Outgoing::Fail(completer, error, tensors) => completer.fail(error, tensors),
            Outgoing::Return(completer, error, job) => completer.fail(error, job()),
            Outgoing::Interrupt(failure) => {
                tracing::debug!(error = %failure, rank = self.place.rank, epoch = %self.place.epoch, "the group failed");
                if let Some(engine) = self.me.upgrade() {
                    self.driver.interrupt(&failure, Ended::new(engine));
                }
            }
            Outgoing::GiveUp => self.driver.give_up(),
        }
    }

    pub(super) fn answered(&self, number: u64, outcome: Outcome) {
        let now = Instant::now();
        let mut state = self.lock();
        let label = state.entries.get(&number).map(|entry| entry.label);
        let (outcome, answer) = self.name(outcome, label.as_ref(), number);
        // Kept before the machine may order it to be told. Without an entry the caller was told: the memory is free only now.
        let late = match state.entries.get_mut(&number) {
            Some(entry) => {
                entry.completer.answered();
                entry.outcome.replace(outcome)
            }
            None => Some(outcome),
        };
        state.machine.answered(number, answer, now);
        self.tell(state);
        drop(late);
    }

    pub(super) fn recorded(&self, number: u64, done: Arc<dyn Event>) {
        let recorder: Option<Recorder> = self
            .lock()
            .entries
            .get(&number)
            .and_then(|e| e.completer.recorder());
        if let Some(recorder) = recorder {
            recorder.recorded(done);
        }
    }

    pub(super) fn interrupted(&self, unclean: Option<String>) {
        let mut state = self.lock();
        state.machine.interrupted(unclean.is_none());
        if let Some(why) = unclean {
            tracing::warn!(why, rank = self.place.rank, "a failed group did not end cleanly");
            state.unclean.get_or_insert(why);
        }
        self.tell(state);
    }

    /// The group has failed: the first failure ends everything that is pending, later ones change nothing. Does not block.
    pub fn fail(&self, error: Error) {
        let mut state = self.lock();
        state.machine.fail(error, Instant::now());
        self.tell(state);
    }

    /// As [`fail`](Self::fail), because of operation `number`, which the driver still has.
    pub fn fail_by(&self, number: u64, error: Error) {
        let label = self.lock().label(number);
        let error = label.map_or(error.clone(), |label| label.name(number, error));
        self.fail(self.place.name(error));
    }

    fn stop(&self, reason: &str) {
        self.fail(self.place.aborted(reason));
    }

    /// Refuses further work. What is pending goes on; then the driver is released.
    fn close(&self) {
        let mut state = self.lock();
        state.machine.close();
        self.wake(state);
    }

    /// Waits until nothing is pending, or the group has failed. `Timeout` at the deadline with `late`.
    pub fn wait_idle(&self, deadline: Instant, late: &str) -> Result<()> {
        let idle = self.wait(deadline, |state| !state.machine.is_pending());
        idle.map(drop).map_err(|()| self.place.name(Error::timeout(late)))
    }

    fn wait(
        &self,
        deadline: Instant,
        done: impl Fn(&State<D::Job>) -> bool,
    ) -> Result<MutexGuard<'_, State<D::Job>>, ()> {
        let mut state = self.lock();
        loop {
            if done(&state) {
                return Ok(state);
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(());
            }
            state.waiting += 1;
            let waited = self.moved.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
    }

    /// The operation whose deadline has passed ends the group.
    fn look_at_deadlines(&self, now: Instant) {
        let mut state = self.lock();
        if let Some((number, stage)) = state.machine.overdue(now)
            && let Some(label) = state.label(number)
        {
            let text = format!(
                "not finished at its deadline, {:.3} s after submission: it is {}",
                now.saturating_duration_since(label.submitted).as_secs_f64(),
                self.driver.waits_for(&label, stage)
            );
            let error = self.place.name(label.name(number, Error::timeout(text)));
            state.machine.fail(error, now);
        }
        state.machine.tick(now);
        self.tell(state);
    }
}

impl<J: Job> Entry<J> {
    /// The driver's own answer.
    fn answer(self) -> Option<Outgoing> {
        Some(match self.outcome? {
            Outcome::Succeeded(completion) => Outgoing::Succeed(self.completer, completion),
            Outcome::Refused(error, tensors) | Outcome::Fatal(error, tensors) => {
                Outgoing::Fail(self.completer, error, tensors)
            }
        })
    }

    /// The group's failure, with the memory that is here.
    fn end(self, failure: Error) -> Outgoing {
        let tensors = match (self.job, self.outcome) {
            (Some(job), _) => {
                return Outgoing::Return(
                    self.completer,
                    failure,
                    Box::new(move || job.into_op().into_tensors()),
                );
            }
            (None, Some(Outcome::Succeeded(completion))) => completion.tensors,
            (None, Some(Outcome::Refused(_, tensors) | Outcome::Fatal(_, tensors))) => tensors,
            (None, None) => Vec::new(),
        };
        Outgoing::Fail(self.completer, failure, tensors)
    }
}

/// Looks until it is `done`, until `until` at most. Every look gives the core away to any thread that wants it.
fn look(until: Instant, done: impl Fn() -> bool) {
    while !done() && Instant::now() < until {
        std::thread::yield_now();
    }
}

impl<D: Driver> Timed for Engine<D> {
    fn look(&self, at: Instant) -> Option<Instant> {
        {
            let mut state = self.lock();
            if state.armed != Some(at) {
                // An earlier one was armed since.
                return None;
            }
            state.armed = None;
        }
        self.look_at_deadlines(Instant::now());
        let mut state = self.lock();
        let next = state
            .machine
            .wake_at()
            .filter(|next| state.armed.is_none_or(|armed| *next < armed));
        state.armed = next.or(state.armed);
        next
    }
}

impl<D: Driver> lifecycle::Engine for Engine<D> {
    fn abort(self: &Arc<Self>, reason: &str) {
        self.stop(reason);
    }

    fn leave(self: &Arc<Self>, reason: &str) {
        let mut state = self.lock();
        state.machine.close();
        if state.machine.is_pending() {
            state.machine.fail(self.place.aborted(reason), Instant::now());
        }
        self.tell(state);
    }

    fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        let epoch = self.place.epoch;
        let Ok(state) = self.wait(deadline, |state| state.machine.ended().is_some()) else {
            let text = format!("the configuration of epoch {epoch} has not ended yet");
            return Err(Error::timeout(text));
        };
        if state.machine.ended() == Some(End::Clean) {
            return Ok(());
        }
        let why = state.unclean.clone().unwrap_or_default();
        Err(Error::new(
            ErrorKind::InvalidState,
            format!(
                "the configuration of epoch {epoch} did not end cleanly ({why}): something of it may still be in use; restart this \
                 process, or run the group isolated"
            ),
        ))
    }

    fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        self.close();
        let ended = self.wait_ended(deadline);
        match &ended {
            Err(error) if error.kind() == ErrorKind::Timeout => {
                self.stop("the deadline of the shut-down passed");
                Err(error.clone().with_op("shutdown").with_rank(self.place.rank))
            }
            _ => ended,
        }
    }

    fn error(&self) -> Option<Error> {
        self.lock().machine.failure().cloned()
    }

    fn recorder(&self) -> Option<&OnceLock<flight_recorder::Recorder>> {
        Some(&self.recorder)
    }
}
