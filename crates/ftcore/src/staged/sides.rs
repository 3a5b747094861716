//! The two threads of a staged group and the queue before them.
//!
//! Submitted operations wait in the queue until their stream has made their inputs. That wait is on the host and ends early when
//! the group fails, is configured again or is dropped: the device may never reach that point. Nothing is enqueued on a
//! stream of the caller's.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pool::Pool;
use crate::{
    Accelerator, Checked, Collective, Completer, Completion, DType, Device, Error, ErrorKind, Event, OpKind,
    ProcessGroup, Result, Role, Stream, SubmitOptions, Tensor, Work, deadline_in, time_left,
};

/// How long the copies of one operation's results may take.
const COPY_LIMIT: Duration = Duration::from_secs(60);
/// Between two looks at an event that is not reached: nobody signals it to the host. The first pause, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(500));

/// An operation on its way to the host.
pub(super) struct Submitted {
    pub(super) op: Collective,
    pub(super) contribute: bool,
    /// Reached when the caller's stream has made the inputs.
    pub(super) ready: Option<Arc<dyn Event>>,
    pub(super) deadline: Instant,
    /// Set by [`Sides::enter`].
    pub(super) generation: u64,
    pub(super) completer: Completer,
}

/// An operation that the inner group has ended.
pub(super) struct Ended {
    work: Work,
    op: Collective,
    rank: u32,
    generation: u64,
    completer: Completer,
}

#[derive(Default)]
pub(super) struct State {
    queue: VecDeque<Submitted>,
    /// An operation is between the queue and the inner group.
    handing_over: bool,
    /// How often the group was configured.
    pub(super) generation: u64,
    /// Operations that have not ended.
    pub(super) pending: usize,
    /// Why this configuration is over, where the inner group does not know it by itself or not as well. Nothing that is
    /// queued goes to the inner group any more.
    pub(super) over: Option<Error>,
    /// Shut down: nothing more is accepted until the next configuration.
    pub(super) shut: bool,
    /// The handle is gone: the threads end after what is queued.
    pub(super) dropped: bool,
}

/// What the group and its two threads share.
pub(super) struct Sides {
    pub(super) inner: Arc<dyn ProcessGroup>,
    pub(super) accelerator: Arc<dyn Accelerator>,
    pub(super) device: Device,
    pub(super) pool: Pool,
    pub(super) state: Mutex<State>,
    /// Notified when the state changes.
    pub(super) moved: Condvar,
    /// Held while an operation goes to the inner group and while the generation changes, so that one of an earlier
    /// configuration cannot slip into a later one (INV-1).
    pub(super) handover: Mutex<()>,
}

/// An operation that did not get to the inner group.
struct Stopped {
    error: Error,
    /// The other ranks wait for this one's part, and nobody has told them.
    tell: bool,
    /// A copy may still be reading the caller's memory.
    touched: bool,
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self {
            error,
            tell: true,
            touched: false,
        }
    }
}

impl Sides {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits at most `pause` for a change.
    pub(super) fn rest<'a>(&self, state: MutexGuard<'a, State>, pause: Duration) -> MutexGuard<'a, State> {
        self.moved
            .wait_timeout(state, pause)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Puts an operation into the queue.
    pub(super) fn enter(&self, mut job: Submitted) {
        let mut state = self.lock();
        job.generation = state.generation;
        state.pending += 1;
        state.queue.push_back(job);
        drop(state);
        self.moved.notify_all();
    }

    /// Ends everything that is pending with `Aborted`.
    pub(super) fn abort(&self, reason: &str) {
        self.inner.abort(reason);
        // While it is being configured, that is the inner group's affair.
        if self.inner.info().world_size > 0 && self.inner.error().is_none() {
            let error = Error::new(ErrorKind::Aborted, format!("aborted: {reason}"));
            self.lock().over.get_or_insert(error);
        }
        self.moved.notify_all();
    }

    /// Ends the configuration `generation` with `error`, of which the other ranks hear.
    fn end(&self, generation: u64, error: &Error) {
        {
            let mut state = self.lock();
            if state.generation != generation {
                return;
            }
            state.over.get_or_insert_with(|| error.clone());
        }
        self.moved.notify_all();
        self.inner.abort(&error.to_string());
    }

    /// True once everything that was submitted is with the inner group.
    pub(super) fn is_handed_over(state: &State) -> bool {
        state.queue.is_empty() && !state.handing_over
    }

    /// The first failure of this configuration.
    pub(super) fn error(&self) -> Option<Error> {
        let over = self.lock().over.clone();
        over.or_else(|| self.inner.error())
    }

    fn ended(&self) {
        self.lock().pending -= 1;
        self.moved.notify_all();
    }

    fn fail(&self, completer: Completer, error: Error, tensors: Vec<Tensor>) {
        self.ended();
        completer.fail(error, tensors);
    }

    // ---- to the host

    /// The thread that reads inputs. Ends with the group.
    pub(super) fn copy_out(&self, ended: &Sender<Ended>, stream: &dyn Stream) {
        while let Some(job) = self.next() {
            let rank = self.inner.info().rank;
            let started = self.start(&job, rank, stream);
            self.lock().handing_over = false;
            self.moved.notify_all();
            match started {
                Err(stopped) => {
                    let tensors = job.op.into_tensors();
                    let tensors = if stopped.touched {
                        for tensor in tensors {
                            tensor.leak("a copy from the device did not end");
                        }
                        Vec::new()
                    } else {
                        tensors
                    };
                    if stopped.tell {
                        self.end(job.generation, &stopped.error);
                    }
                    self.fail(job.completer, stopped.error, tensors);
                }
                Ok(work) => {
                    let (ended, inner) = (ended.clone(), work.clone());
                    work.on_complete(move |_| {
                        let _ = ended.send(Ended {
                            work: inner,
                            op: job.op,
                            rank,
                            generation: job.generation,
                            completer: job.completer,
                        });
                    });
                }
            }
        }
    }

    fn next(&self) -> Option<Submitted> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                state.handing_over = true;
                return Some(job);
            }
            if state.dropped {
                return None;
            }
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Why `job` is not to run any more.
    fn is_over(&self, job: &Submitted) -> Option<Error> {
        let state = self.lock();
        if state.generation != job.generation {
            return Some(Error::new(
                ErrorKind::Aborted,
                "the group was configured again before the operation began",
            ));
        }
        let over = state.over.clone();
        drop(state);
        over.or_else(|| self.inner.error())
    }

    /// Fails what waits behind the first operation longer than its deadline allows, and the group with it.
    fn fail_overdue(&self) {
        let late = {
            let mut state = self.lock();
            let at = state.queue.iter().position(|j| time_left(j.deadline).is_zero());
            at.and_then(|at| state.queue.remove(at))
        };
        if let Some(job) = late {
            let error =
                Error::timeout("its inputs were not ready at its deadline, behind an earlier operation's")
                    .with_op(job.op.kind().name());
            self.end(job.generation, &error);
            self.fail(job.completer, error, job.op.into_tensors());
        }
    }

    /// Waits until the caller's stream has made the inputs, on the host: the stream of the copies would wait for ever if that point
    /// were never reached.
    fn await_inputs(&self, job: &Submitted) -> Result<(), Stopped> {
        let mut pause = PAUSES.0;
        loop {
            if let Some(error) = self.is_over(job) {
                return Err(Stopped {
                    error,
                    tell: false,
                    touched: false,
                });
            }
            match &job.ready {
                Some(ready) if !ready.query()? => {}
                _ => return Ok(()),
            }
            if time_left(job.deadline).is_zero() {
                let error = Error::timeout("the stream had not made the inputs at the deadline");
                return Err(error.with_op(job.op.kind().name()).into());
            }
            self.fail_overdue();
            let state = self.lock();
            drop(self.rest(state, pause));
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    fn start(&self, job: &Submitted, rank: u32, stream: &dyn Stream) -> Result<Work, Stopped> {
        self.await_inputs(job)?;
        let mut touched = false;
        let mut taken: Vec<Tensor> = Vec::new();
        let host = job.op.with_tensors(rank, &mut |tensor, role| {
            let mut host = self.pool.take(&*self.accelerator, &self.device, tensor)?;
            if role.is_read()
                && let Err(error) = self.accelerator.copy_out(tensor, host.bytes_mut(), stream)
            {
                // The device may still be writing into it (INV-8).
                touched = true;
                taken.push(host);
                return Err(error);
            }
            Ok(host)
        });
        for tensor in taken {
            tensor.leak("a copy from the device did not end");
        }
        let host = host.map_err(|error| Stopped {
            error: error.with_op(job.op.kind().name()),
            tell: true,
            touched,
        })?;
        let options = SubmitOptions {
            stream: None,
            deadline: Some(job.deadline),
            contribute: job.contribute,
        };
        let handover = self.handover.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = self.is_over(job) {
            host.into_tensors().into_iter().for_each(|t| self.pool.put(t));
            return Err(Stopped {
                error,
                tell: false,
                touched: false,
            });
        }
        let checked = Checked::new(host, &self.inner.info(), self.inner.capabilities(), &options);
        let submitted = checked.and_then(|checked| self.inner.submit(checked, options));
        drop(handover);
        submitted.map_err(|rejected| {
            // A group that refuses because it has ended has told the others already, or is being configured.
            let ended = matches!(
                rejected.error.kind(),
                ErrorKind::Poisoned | ErrorKind::Aborted | ErrorKind::InvalidState
            );
            let error = match rejected.error.kind() {
                ErrorKind::Poisoned => self.inner.error().unwrap_or(rejected.error),
                _ => rejected.error,
            };
            rejected
                .op
                .into_tensors()
                .into_iter()
                .for_each(|t| self.pool.put(t));
            Stopped {
                error,
                tell: !ended,
                touched: false,
            }
        })
    }

    // ---- back to the device

    /// The thread that writes results. Ends with the group and the last pending operation.
    pub(super) fn copy_in(&self, incoming: &Receiver<Ended>, stream: &dyn Stream) {
        for ended in incoming {
            match ended.work.take() {
                Ok(completion) => self.write_back(ended, completion, stream),
                Err(error) => {
                    ended.work.recover().into_iter().for_each(|t| self.pool.put(t));
                    // Whatever the inner group keeps: only copies touch the caller's memory, and those have ended.
                    self.fail(ended.completer, error, ended.op.into_tensors());
                }
            }
        }
    }

    fn write_back(&self, ended: Ended, completion: Completion, stream: &dyn Stream) {
        let Ended {
            op,
            rank,
            generation,
            completer,
            ..
        } = ended;
        let mut roles = Vec::new();
        // Only asks for the roles: nothing is made.
        let _ = op.with_tensors(rank, &mut |_, role| {
            roles.push(role);
            Ok(Tensor::zeros(DType::U8, 0))
        });
        let kind = op.kind();
        // The root's own bools come back as 0 or 1 too, as everywhere (L16).
        let canonical = |t: &Tensor| kind == OpKind::Broadcast && t.dtype() == DType::Bool;
        let mut tensors = op.into_tensors();
        let parts = tensors.iter_mut().zip(&completion.tensors).zip(roles);
        let copied = parts
            .filter(|((to, _), role): &((&mut Tensor, _), Role)| role.is_written() || canonical(to))
            .try_for_each(|((to, from), _)| self.accelerator.copy_in(from.bytes(), to, stream))
            .and_then(|()| stream.synchronize(deadline_in(COPY_LIMIT)));
        match copied {
            Ok(()) => {
                completion.tensors.into_iter().for_each(|t| self.pool.put(t));
                self.ended();
                completer.succeed(Completion {
                    tensors,
                    source: completion.source,
                    contributors: completion.contributors,
                });
            }
            Err(error) => {
                // A copy may still be reading the one and writing into the other (INV-8).
                for tensor in tensors.into_iter().chain(completion.tensors) {
                    tensor.leak("a copy to the device did not end");
                }
                let error = error.with_op(kind.name());
                self.end(generation, &error);
                self.fail(completer, error, Vec::new());
            }
        }
    }
}
