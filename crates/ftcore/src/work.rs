//! A submitted operation. The engine holds a [`Completer`], the caller one or more [`Work`]s.
//!
//! Buffers live in the engine until the operation is finished; the result moves into the shared state and `take`
//! hands it out once. Dropping a `Work` detaches it; dropping a `Completer` fails the work rather than leaving it hang.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind, OpKind, Result, Stream, Tensor};

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

enum State {
    Pending(Vec<Callback>),
    Succeeded(Option<Completion>),
    Failed(Error, Vec<Tensor>),
}

struct Shared {
    kind: OpKind,
    submitted: Instant,
    deadline: Instant,
    state: Mutex<(State, Option<Duration>, u32)>,
    ended: Condvar,
    abort: Box<dyn Fn(&str) + Send + Sync>,
}

/// A handle to a submitted operation. Clones refer to the same operation.
#[derive(Clone)]
pub struct Work(Arc<Shared>);

/// The engine's side of a [`Work`].
pub struct Completer(Option<Arc<Shared>>);

/// A new operation: `abort` is called with the reason by [`Work::abort`] (usually the group's abort).
pub fn work_pair(
    kind: OpKind,
    deadline: Instant,
    abort: impl Fn(&str) + Send + Sync + 'static,
) -> (Work, Completer) {
    let shared = Arc::new(Shared {
        kind,
        submitted: Instant::now(),
        deadline,
        state: Mutex::new((State::Pending(Vec::new()), None, 0)),
        ended: Condvar::new(),
        abort: Box::new(abort),
    });
    (Work(shared.clone()), Completer(Some(shared)))
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, (State, Option<Duration>, u32)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, state: State, contributors: u32) {
        let status = match &state {
            State::Pending(_) => return,
            State::Succeeded(_) => Status::Succeeded,
            State::Failed(e, _) => Status::Failed(e.clone()),
        };
        let callbacks = {
            let mut guard = self.lock();
            let callbacks = match std::mem::replace(&mut guard.0, state) {
                State::Pending(callbacks) => callbacks,
                _ => Vec::new(),
            };
            guard.1 = Some(self.submitted.elapsed());
            guard.2 = contributors;
            callbacks
        };
        self.ended.notify_all();
        for callback in callbacks {
            callback(&status);
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

    /// Where it stands now.
    pub fn status(&self) -> Status {
        match &self.0.lock().0 {
            State::Pending(_) => Status::Pending,
            State::Succeeded(_) => Status::Succeeded,
            State::Failed(e, _) => Status::Failed(e.clone()),
        }
    }

    /// Blocks until it has ended. `Err` with the operation's error, or `Timeout` if `deadline` passes first (the
    /// operation itself goes on until its own deadline).
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        let mut guard = self.0.lock();
        loop {
            match &guard.0 {
                State::Succeeded(_) => return Ok(()),
                State::Failed(e, _) => return Err(e.clone()),
                State::Pending(_) => {}
            }
            let left = crate::time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(format!(
                    "still running after {:.3} s; the wait's deadline passed",
                    self.0.submitted.elapsed().as_secs_f64()
                ))
                .with_op(self.0.kind.name()));
            }
            guard = self
                .0
                .ended
                .wait_timeout(guard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// As [`wait`](Self::wait), to the operation's own deadline plus a margin in which the engine reports it.
    pub fn wait_done(&self) -> Result<()> {
        self.wait(
            self.0
                .deadline
                .checked_add(Duration::from_secs(5))
                .unwrap_or(self.0.deadline),
        )
    }

    /// Makes later work of `stream` start after this operation, without blocking the host where the device can.
    /// On the CPU that is [`wait_done`](Self::wait_done).
    pub fn wait_on(&self, stream: &dyn Stream) -> Result<()> {
        if !stream.device().is_cpu() {
            return Err(Error::unsupported(format!(
                "this operation runs on the CPU, the stream on {}",
                stream.device()
            )));
        }
        self.wait_done()
    }

    /// Waits (see [`wait_done`](Self::wait_done)) and takes the results. A second call is `InvalidState`.
    pub fn take(&self) -> Result<Completion> {
        self.wait_done()?;
        match &mut self.0.lock().0 {
            State::Succeeded(c) => c.take().ok_or_else(|| {
                Error::new(ErrorKind::InvalidState, "the results were taken already")
                    .with_op(self.0.kind.name())
            }),
            _ => Err(Error::new(
                ErrorKind::Internal,
                "a finished operation changed its state",
            )),
        }
    }

    /// Waits and takes the only (or last) tensor.
    pub fn take_tensor(&self) -> Result<Tensor> {
        self.take()?.into_tensor()
    }

    /// After a failure: the tensors of the call, with undefined contents, if the engine could prove that nobody
    /// touches them any more. Empty otherwise, or if taken before.
    pub fn recover(&self) -> Vec<Tensor> {
        match &mut self.0.lock().0 {
            State::Failed(_, tensors) => std::mem::take(tensors),
            _ => Vec::new(),
        }
    }

    /// The contributors of a finished reduction; 0 before and for other operations.
    pub fn contributors(&self) -> u32 {
        self.0.lock().2
    }

    /// Calls `callback` once it has ended: on the engine's thread, or here and now if it has. It must not block.
    pub fn on_complete(&self, callback: impl FnOnce(&Status) + Send + 'static) {
        let mut guard = self.0.lock();
        if let State::Pending(callbacks) = &mut guard.0 {
            callbacks.push(Box::new(callback));
            return;
        }
        drop(guard);
        callback(&self.status());
    }

    /// Ends the operation. On groups whose transports cannot cancel one operation alone this aborts the group.
    pub fn abort(&self, reason: &str) {
        (self.0.abort)(reason);
    }

    /// When it was submitted and how long it took.
    pub fn timings(&self) -> Timings {
        Timings {
            submitted: self.0.submitted,
            duration: self.0.lock().1,
        }
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

impl Completer {
    /// The operation succeeded.
    pub fn succeed(mut self, completion: Completion) {
        if let Some(shared) = self.0.take() {
            let contributors = completion.contributors;
            shared.end(State::Succeeded(Some(completion)), contributors);
        }
    }

    /// The operation failed. `tensors` is what the caller may have back: only memory nobody touches any more.
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
            let e = Error::new(ErrorKind::Internal, "the engine dropped the operation")
                .with_op(shared.kind.name());
            shared.end(State::Failed(e, Vec::new()), 0);
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
