//! A submitted operation. The engine holds a [`Completer`], the caller one or more [`Work`]s.
//!
//! Buffers live in the engine until the operation is finished; the result moves into the shared state and `take`
//! hands it out once. Dropping a `Work` detaches it; dropping a `Completer` fails the work rather than leaving it hang.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::flight_recorder::Entry;
use crate::{Error, ErrorKind, Event, OpKind, Rejected, Result, Stream, Tensor, later};

/// How late an engine's report may come: its threads may have to wait for a core.
const MARGIN: Duration = Duration::from_secs(5);

/// What a finished operation gives back.
#[derive(Debug)]
pub struct Completion {
    /// All tensors of the call, in the order of [`Collective::tensors`](crate::Collective::tensors).
    pub tensors: Vec<Tensor>,
    /// For a receive: who sent.
    pub source: Option<u32>,
    /// For a reduction: how many ranks contributed, counted in the reduction itself (INV-4). Otherwise 0.
    pub contributors: u32,
}

impl Completion {
    /// The only tensor of the call, or the last one (the output) of several.
    pub fn into_tensor(mut self) -> Result<Tensor> {
        self.tensors
            .pop()
            .ok_or_else(|| Error::invalid("the operation has no tensors"))
    }
}

/// A blocking call that failed: why, and the tensors that nothing touches any more, with undefined contents.
#[derive(Debug)]
pub struct Failed {
    /// Why.
    pub error: Error,
    /// All tensors of the call if the engine could prove that they are free; otherwise none.
    pub tensors: Vec<Tensor>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// By hand: its text is that of `error`, so its source is that of `error` too; thiserror's `transparent` allows no second field.
impl std::error::Error for Failed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

impl From<Box<Rejected>> for Box<Failed> {
    fn from(rejected: Box<Rejected>) -> Self {
        Box::new(Failed {
            error: rejected.error,
            tensors: rejected.op.into_tensors(),
        })
    }
}

impl From<Box<Failed>> for Error {
    fn from(failed: Box<Failed>) -> Self {
        failed.error
    }
}

/// Where an operation stands.
#[derive(Debug, Clone)]
pub enum Status {
    /// Submitted, not finished.
    Pending,
    /// Finished; the results are there (or were taken).
    Succeeded,
    /// Failed, for this reason.
    Failed(Error),
}

/// When things happened.
#[derive(Debug, Clone, Copy)]
pub struct Timings {
    /// When it was submitted.
    pub submitted: Instant,
    /// From submission to the end, once ended.
    pub duration: Option<Duration>,
}

type Callback = Box<dyn FnOnce(&Status) + Send>;
type OnRecorded = Box<dyn FnOnce(Arc<dyn Event>) + Send>;

enum State {
    Pending(Vec<Callback>),
    Succeeded(Option<Completion>),
    Failed(Error, Vec<Tensor>),
}

struct Progress {
    state: State,
    /// From submission to the end.
    duration: Option<Duration>,
    contributors: u32,
    /// Reached when the device has finished the operation.
    done: Option<Arc<dyn Event>>,
    on_recorded: Vec<OnRecorded>,
    /// Of tasks that await it.
    wakers: Vec<Waker>,
    /// How many threads sleep until it moves: telling none is a system call, too.
    sleepers: u32,
}

struct Shared {
    kind: OpKind,
    /// Its number in its group, once the engine has one.
    sequence: OnceLock<u64>,
    submitted: Instant,
    deadline: Instant,
    /// By when the engine has reported its end, whatever that is.
    latest_report: Instant,
    progress: Mutex<Progress>,
    /// Notified when the operation was recorded and when it has ended.
    moved: Condvar,
    abort: Box<dyn Fn(&str) + Send + Sync>,
    /// Runs the operation on the thread that waits for it, until the instant at most; returns at once if another thread
    /// runs it or it cannot begin yet.
    drive: Option<Box<dyn Fn(Instant) + Send + Sync>>,
    /// Its place in the flight recorder, where the group has one.
    entry: OnceLock<Entry>,
}

/// A handle to a submitted operation. Clones refer to the same operation.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::{ProcessGroup, ProcessGroupExt as _, ReduceOp, Result, Tensor, deadline_in};
///
/// fn mean(group: &dyn ProcessGroup, gradients: Vec<f32>) -> Result<Vec<f32>> {
///     let work = group.all_reduce(Tensor::from_vec(gradients), ReduceOp::Avg)?;
///     // … computing beside it …
///     work.wait(deadline_in(Duration::from_secs(10)))?;
///     Ok(work.take_tensor()?.as_slice()?.to_vec())
/// }
/// ```
#[derive(Clone)]
pub struct Work(Arc<Shared>);

/// The engine's side of a [`Work`].
pub struct Completer(Option<Arc<Shared>>);

/// Tells a [`Work`] that it is on its device, beside its [`Completer`].
pub(crate) struct Recorder(Arc<Shared>);

/// A new operation: `abort` is called with the reason by [`Work::abort`] (usually the group's abort).
pub fn work_pair(
    kind: OpKind,
    deadline: Instant,
    abort: impl Fn(&str) + Send + Sync + 'static,
) -> (Work, Completer) {
    pair(kind, deadline, deadline, Box::new(abort), None)
}

/// As [`work_pair`], for an engine that can run an operation on the thread that waits for it: [`Work::wait`] calls `drive`
/// with its deadline before it blocks. `drive` returns once the operation has ended, at the deadline, or at once if another thread
/// runs it.
pub fn driven_work_pair(
    kind: OpKind,
    deadline: Instant,
    abort: impl Fn(&str) + Send + Sync + 'static,
    drive: impl Fn(Instant) + Send + Sync + 'static,
) -> (Work, Completer) {
    pair(kind, deadline, deadline, Box::new(abort), Some(Box::new(drive)))
}

/// For an engine that reports until `report` what has not ended at its deadline.
pub(crate) fn pair(
    kind: OpKind,
    deadline: Instant,
    report: Instant,
    abort: Box<dyn Fn(&str) + Send + Sync>,
    drive: Option<Box<dyn Fn(Instant) + Send + Sync>>,
) -> (Work, Completer) {
    let shared = Arc::new(Shared {
        kind,
        sequence: OnceLock::new(),
        submitted: Instant::now(),
        deadline,
        latest_report: later(report, MARGIN),
        progress: Mutex::new(Progress {
            state: State::Pending(Vec::new()),
            duration: None,
            contributors: 0,
            done: None,
            on_recorded: Vec::new(),
            wakers: Vec::new(),
            sleepers: 0,
        }),
        moved: Condvar::new(),
        abort,
        drive,
        entry: OnceLock::new(),
    });
    (Work(shared.clone()), Completer(Some(shared)))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, state: State, contributors: u32) {
        let status = match &state {
            State::Pending(_) => return,
            State::Succeeded(_) => Status::Succeeded,
            State::Failed(e, _) => Status::Failed(e.clone()),
        };
        if let Some(entry) = self.entry.get() {
            // First: a caller who knows the end finds it in the record.
            let failure = match &status {
                Status::Failed(error) => Some(error),
                Status::Pending | Status::Succeeded => None,
            };
            entry.ended(failure);
        }
        let (uncalled, wakers, sleepers);
        let callbacks = {
            let mut guard = self.lock();
            let callbacks = match std::mem::replace(&mut guard.state, state) {
                State::Pending(callbacks) => callbacks,
                _ => Vec::new(),
            };
            guard.duration = Some(self.submitted.elapsed());
            guard.contributors = contributors;
            // Dropped outside the lock: a callback may hold another operation's completer.
            uncalled = std::mem::take(&mut guard.on_recorded);
            wakers = std::mem::take(&mut guard.wakers);
            sleepers = guard.sleepers;
            callbacks
        };
        drop(uncalled);
        if sleepers > 0 {
            self.moved.notify_all();
        }
        for callback in callbacks {
            self.guard(|| callback(&status));
        }
        for waker in wakers {
            self.guard(|| waker.wake());
        }
    }

    /// Calls what a caller has left here. The thread is an engine's, or waits for another operation: a panic ends neither it nor the group, and
    /// the others are told all the same.
    fn guard(&self, call: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(call)).is_err() {
            let sequence = self.sequence.get().copied();
            tracing::error!(
                op = self.kind.name(),
                sequence,
                "what this operation called has panicked"
            );
        }
    }
}

impl Work {
    /// An operation that is finished already (a world of one, nothing to do).
    pub fn finished(kind: OpKind, completion: Completion) -> Self {
        let (work, completer) = work_pair(kind, Instant::now(), |_| {});
        completer.succeed(completion);
        work
    }

    /// The operation.
    pub fn kind(&self) -> OpKind {
        self.0.kind
    }

    /// The number by which errors and traces call it (`all_reduce #41`), counted within a configuration of its group. `None` where the
    /// backend does not number it: messages between two ranks over gloo, for example.
    pub fn sequence(&self) -> Option<u64> {
        self.0.sequence.get().copied()
    }

    /// Where it stands now.
    pub fn status(&self) -> Status {
        match &self.0.lock().state {
            State::Pending(_) => Status::Pending,
            State::Succeeded(_) => Status::Succeeded,
            State::Failed(e, _) => Status::Failed(e.clone()),
        }
    }

    fn is_pending(&self) -> bool {
        matches!(self.0.lock().state, State::Pending(_))
    }

    /// Blocks until it has ended. `Err` with the operation's error, or `Timeout` if `deadline` passes first (the
    /// operation itself goes on until its own deadline). An operation that has not begun may run on this very thread.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        if let Some(drive) = self.0.drive.as_ref().filter(|_| self.is_pending()) {
            drive(deadline);
        }
        self.wait_until(deadline, |_| None)
    }

    /// Blocks until it has ended, or until `early` finds something while it is pending.
    fn wait_until(&self, deadline: Instant, mut early: impl FnMut(&Progress) -> Option<()>) -> Result<()> {
        let mut guard = self.0.lock();
        loop {
            match &guard.state {
                State::Succeeded(_) => return Ok(()),
                State::Failed(e, _) => return Err(e.clone()),
                State::Pending(_) => {}
            }
            if early(&guard).is_some() {
                return Ok(());
            }
            let left = crate::time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(format!(
                    "still running after {:.3} s; the wait's deadline passed",
                    self.0.submitted.elapsed().as_secs_f64()
                ))
                .with_op(self.0.kind.name()));
            }
            guard.sleepers += 1;
            guard = self
                .0
                .moved
                .wait_timeout(guard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            guard.sleepers -= 1;
        }
    }

    /// As [`wait`](Self::wait), to the operation's own deadline plus the time in which its engine reports it.
    pub fn wait_done(&self) -> Result<()> {
        self.wait(self.0.latest_report)
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.0.deadline
    }

    /// Makes later work of `stream` start after this operation. An operation on a device does not block the host for
    /// longer than until it is enqueued there; one on the CPU is waited for.
    ///
    /// Errors of the device after that show in [`wait`](Self::wait), not here.
    pub fn wait_on(&self, stream: &dyn Stream) -> Result<()> {
        if stream.device().is_cpu() {
            return self.wait_done();
        }
        let mut recorded = None;
        self.wait_until(self.0.latest_report, |progress| {
            recorded.clone_from(&progress.done);
            recorded.as_ref().map(|_| ())
        })?;
        match recorded {
            Some(done) => stream.wait(&*done),
            None => Ok(()),
        }
    }

    /// Waits (see [`wait_done`](Self::wait_done)) and takes the results. A second call is `InvalidState`.
    pub fn take(&self) -> Result<Completion> {
        self.wait_done()?;
        self.taken(&mut self.0.lock())
    }

    /// The results, once it has ended.
    fn taken(&self, progress: &mut Progress) -> Result<Completion> {
        match &mut progress.state {
            State::Succeeded(c) => c.take().ok_or_else(|| {
                Error::new(ErrorKind::InvalidState, "the results were taken already")
                    .with_op(self.0.kind.name())
            }),
            State::Failed(error, _) => Err(error.clone()),
            State::Pending(_) => Err(Error::new(
                ErrorKind::Internal,
                "a finished operation changed its state",
            )),
        }
    }

    /// As [`take`](Self::take); a failure brings the tensors that [`recover`](Self::recover) gives back.
    pub fn finish(&self) -> Result<Completion, Box<Failed>> {
        self.take().map_err(|error| {
            let tensors = self.recover();
            Box::new(Failed { error, tensors })
        })
    }

    /// Waits and takes the only (or last) tensor.
    pub fn take_tensor(&self) -> Result<Tensor> {
        self.take()?.into_tensor()
    }

    /// After a failure: the tensors of the call, with undefined contents, if the engine could prove that nothing
    /// touches them any more. Empty otherwise, or if taken before.
    pub fn recover(&self) -> Vec<Tensor> {
        match &mut self.0.lock().state {
            State::Failed(_, tensors) => std::mem::take(tensors),
            _ => Vec::new(),
        }
    }

    /// The contributors of a finished reduction; 0 before and for other operations.
    pub fn contributors(&self) -> u32 {
        self.0.lock().contributors
    }

    /// Calls `callback` once it has ended: on the engine's thread, or here and now if it has. It must not block. If it panics on the engine's
    /// thread, that is logged and has no other effect.
    pub fn on_complete(&self, callback: impl FnOnce(&Status) + Send + 'static) {
        let mut guard = self.0.lock();
        if let State::Pending(callbacks) = &mut guard.state {
            callbacks.push(Box::new(callback));
            return;
        }
        drop(guard);
        callback(&self.status());
    }

    /// Calls `callback` once the operation is enqueued on its device, or here and now if it is; never if it ends without
    /// that. For wrappers that pass the event on. It must not block.
    pub fn on_recorded(&self, callback: impl FnOnce(Arc<dyn Event>) + Send + 'static) {
        let mut guard = self.0.lock();
        if let Some(done) = guard.done.clone() {
            drop(guard);
            callback(done);
        } else if matches!(guard.state, State::Pending(_)) {
            guard.on_recorded.push(Box::new(callback));
        }
    }

    /// Ends the operation. On groups whose transports cannot cancel one operation alone this aborts the group.
    pub fn abort(&self, reason: &str) {
        (self.0.abort)(reason);
    }

    /// When it was submitted and how long it took.
    pub fn timings(&self) -> Timings {
        Timings {
            submitted: self.0.submitted,
            duration: self.0.lock().duration,
        }
    }
}

/// What [`Work::take`] gives, for any executor: `work.await?`. It ends at the operation's own deadline at the latest, like the operation.
/// Dropping it detaches the work; [`Work::recover`] of a clone has the tensors after a failure.
impl Future for Work {
    type Output = Result<Completion>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut progress = self.0.lock();
        if !matches!(progress.state, State::Pending(_)) {
            return Poll::Ready(self.taken(&mut progress));
        }
        let waker = context.waker();
        if !progress.wakers.iter().any(|known| known.will_wake(waker)) {
            progress.wakers.push(waker.clone());
        }
        Poll::Pending
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("kind", &self.0.kind)
            .field("status", &self.status())
            .finish()
    }
}

impl Recorder {
    /// See [`Completer::recorded`].
    pub(crate) fn recorded(self, done: Arc<dyn Event>) {
        let callbacks = {
            let mut guard = self.0.lock();
            guard.done = Some(done.clone());
            std::mem::take(&mut guard.on_recorded)
        };
        self.0.moved.notify_all();
        for callback in callbacks {
            self.0.guard(|| callback(done.clone()));
        }
    }
}

impl Completer {
    /// The operation is enqueued on its device; `done` will be reached when the device has finished it. It still has to
    /// succeed or fail afterwards.
    pub fn recorded(&self, done: Arc<dyn Event>) {
        if let Some(recorder) = self.recorder() {
            recorder.recorded(done);
        }
    }

    pub(crate) fn recorder(&self) -> Option<Recorder> {
        self.0.clone().map(Recorder)
    }

    /// The operation's number in its group, for [`Work::sequence`]. Once, before the work is given out.
    pub fn numbered(&self, sequence: u64) {
        if let Some(shared) = &self.0 {
            // The first number is the one that messages have.
            let _ = shared.sequence.set(sequence);
        }
    }

    /// Where the flight recorder has the operation: its start and its end go there. Once.
    pub fn record(&self, entry: Entry) {
        if let Some(shared) = &self.0 {
            // A second one would be a second record of the same operation.
            let _ = shared.entry.set(entry);
        }
    }

    fn entry(&self) -> Option<&Entry> {
        self.0.as_ref()?.entry.get()
    }

    /// The operation has begun, for the flight recorder.
    pub fn started(&self) {
        if let Some(entry) = self.entry() {
            entry.started();
        }
    }

    /// The operation has ended and its caller is told later, for the flight recorder.
    pub(crate) fn answered(&self) {
        if let Some(entry) = self.entry() {
            entry.answered();
        }
    }

    /// The operation succeeded.
    pub fn succeed(mut self, completion: Completion) {
        if let Some(shared) = self.0.take() {
            let contributors = completion.contributors;
            shared.end(State::Succeeded(Some(completion)), contributors);
        }
    }

    /// The operation failed. `tensors` is what the caller may have back: only memory that nothing touches any more.
    pub fn fail(mut self, error: Error, tensors: Vec<Tensor>) {
        if let Some(shared) = self.0.take() {
            let error = if error.context().op.is_none() {
                error.with_op(shared.kind.name())
            } else {
                error
            };
            shared.end(State::Failed(error, tensors), 0);
        }
    }

    /// The operation's deadline.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.as_ref().map(|s| s.deadline)
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            let error = Error::new(ErrorKind::Internal, "the engine dropped the operation");
            Self(Some(shared)).fail(error, Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline_in;

    fn pair() -> (Work, Completer) {
        work_pair(OpKind::Barrier, deadline_in(Duration::from_secs(5)), |_| {})
    }

    #[test]
    fn results_are_taken_once_and_clones_see_the_end() {
        let (work, completer) = pair();
        let other = work.clone();
        let (tx, rx) = std::sync::mpsc::channel();
        work.on_complete(move |s| tx.send(matches!(s, Status::Succeeded)).unwrap());
        completer.succeed(Completion {
            tensors: vec![Tensor::from_vec(vec![1u8])],
            source: None,
            contributors: 3,
        });
        other.wait(deadline_in(Duration::ZERO)).unwrap();
        assert!(rx.recv().unwrap());
        assert_eq!(other.contributors(), 3);
        assert_eq!(work.take_tensor().unwrap().into_vec::<u8>().unwrap(), [1]);
        assert_eq!(other.take().unwrap_err().kind(), ErrorKind::InvalidState);
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_a_dropped_engine_fails_the_work() {
        let (work, completer) = pair();
        assert_eq!(
            work.wait(deadline_in(Duration::from_millis(20)))
                .unwrap_err()
                .kind(),
            ErrorKind::Timeout
        );
        drop(completer);
        assert_eq!(work.wait_done().unwrap_err().kind(), ErrorKind::Internal);
    }

    struct Bomb;

    impl std::task::Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("a waker of the test");
        }
    }

    #[test]
    fn a_callback_that_panics_ends_no_thread_and_the_others_are_called() {
        let (mut work, completer) = pair();
        let (tx, rx) = std::sync::mpsc::channel();
        work.on_recorded(|_| panic!("a callback of the test"));
        work.on_complete(|_| panic!("a callback of the test"));
        let (recorded, ended) = (tx.clone(), tx);
        work.on_recorded(move |_| recorded.send("recorded").unwrap());
        work.on_complete(move |_| ended.send("ended").unwrap());
        let unpark = Arc::new(Unpark(std::thread::current())).into();
        for waker in [Arc::new(Bomb).into(), unpark] {
            let mut context = Context::from_waker(&waker);
            assert!(Pin::new(&mut work).poll(&mut context).is_pending());
        }
        completer.recorded(Arc::new(crate::ReachedEvent));
        completer.fail(Error::timeout("no"), Vec::new());
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), ["recorded", "ended"]);
        assert_eq!(work.wait_done().unwrap_err().kind(), ErrorKind::Timeout);
    }

    #[test]
    fn one_thread_that_sleeps_is_woken_by_the_end() {
        let (work, completer) = pair();
        let waits = {
            let work = work.clone();
            std::thread::spawn(move || {
                let began = Instant::now();
                work.wait(deadline_in(Duration::from_secs(20))).unwrap();
                began.elapsed()
            })
        };
        while work.0.lock().sleepers == 0 {
            std::thread::yield_now();
        }
        completer.succeed(Completion {
            tensors: Vec::new(),
            source: None,
            contributors: 0,
        });
        let waited = waits.join().unwrap();
        assert!(waited < Duration::from_secs(10), "it slept for {waited:?}");
    }

    #[test]
    fn waiting_drives_an_operation_that_is_pending_and_only_then() {
        let slot = Arc::new(Mutex::new(None::<Completer>));
        let its_slot = slot.clone();
        let until = deadline_in(Duration::from_secs(5));
        let (work, completer) = driven_work_pair(
            OpKind::Barrier,
            until,
            |_| {},
            move |_| {
                let completer = its_slot.lock().unwrap().take().expect("driven once");
                completer.succeed(Completion {
                    tensors: Vec::new(),
                    source: None,
                    contributors: 0,
                });
            },
        );
        *slot.lock().unwrap() = Some(completer);
        work.wait(until).unwrap();
        work.wait(until).unwrap();
    }

    struct Unpark(std::thread::Thread);

    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// The smallest executor.
    fn block_on(mut work: Work) -> Result<Completion> {
        let waker = Arc::new(Unpark(std::thread::current())).into();
        let mut context = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut work).poll(&mut context) {
                Poll::Ready(done) => return done,
                Poll::Pending => std::thread::park_timeout(Duration::from_secs(20)),
            }
        }
    }

    #[test]
    fn every_task_that_awaits_it_is_woken_by_the_end_and_one_gets_the_results() {
        let (work, completer) = pair();
        let (ready, waits) = std::sync::mpsc::channel();
        let tasks: Vec<_> = (0..2)
            .map(|_| {
                let (mut work, ready) = (work.clone(), ready.clone());
                std::thread::spawn(move || {
                    // Pending for sure before the end comes.
                    let mut context = Context::from_waker(Waker::noop());
                    assert!(Pin::new(&mut work).poll(&mut context).is_pending());
                    ready.send(()).unwrap();
                    block_on(work).map(|done| done.contributors)
                })
            })
            .collect();
        (0..2).for_each(|_| waits.recv().unwrap());
        completer.succeed(Completion {
            tensors: Vec::new(),
            source: None,
            contributors: 3,
        });
        let ends: Vec<_> = tasks.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(ends.iter().filter(|e| matches!(e, Ok(3))).count(), 1, "{ends:?}");
        let refused = ends.iter().find_map(|e| e.as_ref().err()).unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidState);
        let (work, completer) = pair();
        completer.fail(Error::timeout("no"), Vec::new());
        assert_eq!(block_on(work).unwrap_err().kind(), ErrorKind::Timeout);
    }

    #[test]
    fn the_number_of_an_operation_is_the_first_that_its_engine_gives() {
        let (work, completer) = pair();
        assert_eq!(work.sequence(), None);
        completer.numbered(41);
        completer.numbered(42);
        assert_eq!(work.clone().sequence(), Some(41));
    }

    /// A stream of a device that notes what it was told to wait for.
    struct Device(Mutex<u32>);

    impl Stream for Device {
        fn device(&self) -> crate::Device {
            crate::Device::new(crate::DeviceKind::Xpu, 0)
        }
        fn record(&self) -> Result<Arc<dyn Event>> {
            Ok(Arc::new(crate::ReachedEvent))
        }
        fn wait(&self, _event: &dyn Event) -> Result<()> {
            *self.0.lock().unwrap() += 1;
            Ok(())
        }
        fn query(&self) -> Result<bool> {
            Ok(true)
        }
        fn synchronize(&self, _deadline: Instant) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_device_stream_waits_for_the_event_while_the_operation_is_still_pending() {
        let (work, completer) = pair();
        let stream = Device(Mutex::new(0));
        let other = work.clone();
        let (tx, rx) = std::sync::mpsc::channel();
        let late = tx.clone();
        work.on_recorded(move |_| tx.send("early").unwrap());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| other.wait_on(&stream));
            completer.recorded(Arc::new(crate::ReachedEvent));
            waiting.join().unwrap().unwrap();
        });
        assert_eq!(*stream.0.lock().unwrap(), 1);
        work.on_recorded(move |_| late.send("late").unwrap());
        assert_eq!(rx.iter().collect::<Vec<_>>(), ["early", "late"]);
        assert!(matches!(work.status(), Status::Pending));
        completer.fail(Error::new(ErrorKind::Backend, "device lost"), Vec::new());
        assert_eq!(work.wait_on(&stream).unwrap_err().kind(), ErrorKind::Backend);
        assert_eq!(*stream.0.lock().unwrap(), 1);
    }

    #[test]
    fn after_a_failure_the_tensors_can_be_recovered() {
        let (work, completer) = pair();
        completer.fail(
            Error::new(ErrorKind::PeerLost, "gone"),
            vec![Tensor::from_vec(vec![7i64])],
        );
        assert_eq!(work.take().unwrap_err().kind(), ErrorKind::PeerLost);
        assert_eq!(work.recover().len(), 1);
        assert!(work.recover().is_empty());
    }
}
