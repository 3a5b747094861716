//! One configuration's operations in flight. Three threads, because any call into the library may block:
//!
//! - `ox-hccl-issue` puts operations on streams, in the order of submission, and ends the communicator in good order;
//! - `ox-hccl-watch` sees them end on the device and asks the communicator for asynchronous errors;
//! - `ox-hccl-clock` calls no library and keeps the deadlines, which count from submission (L35).
//!
//! After the first failure (L32) everything pending fails at once, and a fourth thread, which may be given up, aborts the
//! communicator. Tensors that the device may still touch then stay in its hands: they are freed if the library gave the
//! communicator back and every event was reached, and leaked otherwise (INV-8).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::ftcore::{
    Collective, Completer, Completion, DType, Error, ErrorKind, Event, OpKind, Rejected, Result, Work,
    deadline_in, time_left, work_pair,
};
use crate::issue::Issuer;
use crate::raw::hccl::{CommHandle, Hccl};
use crate::stream::{HpuEvent, Patience};

/// How often the communicator is asked for asynchronous errors.
const ASK_EVERY: Duration = Duration::from_millis(5);
/// How long after an abort the device may take to leave the tensors alone.
const RELEASE_TIME: Duration = Duration::from_secs(10);

/// Who this is, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
}

/// What is known of an operation besides its tensors.
struct Ticket {
    seq: u64,
    kind: OpKind,
    data: Option<(DType, usize)>,
    source: Option<u32>,
    submitted: Instant,
    deadline: Instant,
    completer: Completer,
}

struct Queued {
    ticket: Ticket,
    op: Collective,
    after: Option<Arc<dyn Event>>,
}

/// What the issuing thread has in its hands.
struct ToIssue {
    op: Collective,
    after: Option<Arc<dyn Event>>,
    deadline: Instant,
}

struct Flying {
    ticket: Ticket,
    op: Collective,
    done: Arc<HpuEvent>,
}

/// How the communicator ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ended {
    /// Not yet.
    No,
    /// The library gave it back and the device touches nothing any more.
    Released,
    /// Neither is certain.
    Doubtful(String),
}

struct State {
    queue: VecDeque<Queued>,
    /// In the hands of the issuing thread, inside the library perhaps.
    issuing: Option<Ticket>,
    flying: Vec<Flying>,
    failure: Option<Error>,
    /// Nothing more is accepted; ends when everything is done.
    closing: bool,
    ended: Ended,
    seq: u64,
}

/// A configuration's engine.
pub(crate) struct Engine {
    pub(crate) place: Place,
    hccl: &'static Hccl,
    state: Mutex<State>,
    moved: Condvar,
    /// Taken out by whoever ends it; locked while the library is asked about it. `None` for a group of one.
    comm: Mutex<Option<CommHandle>>,
}

impl Ticket {
    fn name(&self, error: Error, place: Place) -> Error {
        let error = error
            .with_op(self.kind.name())
            .with_seq(self.seq)
            .with_rank(place.rank)
            .with_epoch(place.epoch);
        match self.data {
            Some((dtype, count)) => error.with_data(dtype, count),
            None => error,
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_string())
        .spawn(body)
        .map(drop)
        .map_err(|e| Error::io(format!("cannot start the thread {name}"), e))
}

fn leak(op: Collective) {
    for tensor in op.into_tensors() {
        tensor.leak("a Gaudi may still use it: its operation failed and HCCL did not give it back");
    }
}

impl Engine {
    /// Starts the threads of a new configuration.
    pub(crate) fn start(
        place: Place,
        hccl: &'static Hccl,
        comm: Option<CommHandle>,
        issuer: Issuer,
    ) -> Result<Arc<Self>> {
        let engine = Arc::new(Self {
            place,
            hccl,
            state: Mutex::new(State {
                queue: VecDeque::new(),
                issuing: None,
                flying: Vec::new(),
                failure: None,
                closing: false,
                ended: Ended::No,
                seq: 0,
            }),
            moved: Condvar::new(),
            comm: Mutex::new(comm),
        });
        let started = {
            let (issue, watch, clock) = (engine.clone(), engine.clone(), engine.clone());
            spawn("ox-hccl-issue", move || issue.issue(issuer))
                .and_then(|()| spawn("ox-hccl-watch", move || watch.watch()))
                .and_then(|()| spawn("ox-hccl-clock", move || clock.keep_deadlines()))
        };
        if let Err(e) = started {
            engine.fail(e.clone());
            return Err(e);
        }
        Ok(engine)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.moved.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts an operation, after `after` on its stream. Refusals give the tensors back.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Collective,
        after: Option<Arc<dyn Event>>,
        deadline: Instant,
    ) -> Result<Work, Box<Rejected>> {
        let kind = op.kind();
        let mut state = self.lock();
        let refusal = match &state.failure {
            Some(first) => Some(
                Error::new(ErrorKind::Poisoned, format!("the group failed before: {first}"))
                    .with_source(first.clone()),
            ),
            None if state.closing => Some(Error::new(ErrorKind::InvalidState, "the group was shut down")),
            None => None,
        };
        if let Some(error) = refusal {
            let error = error.with_op(kind.name()).with_rank(self.place.rank);
            return Err(Box::new(Rejected { error, op }));
        }
        let aborted = Arc::downgrade(self);
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(engine) = aborted.upgrade() {
                engine.abort(reason);
            }
        });
        state.seq += 1;
        let ticket = Ticket {
            seq: state.seq,
            kind,
            data: op.dtype().map(|d| (d, op.count())),
            source: match &op {
                Collective::Recv { peer, .. } => *peer,
                _ => None,
            },
            submitted: Instant::now(),
            deadline,
            completer,
        };
        state.queue.push_back(Queued { ticket, op, after });
        drop(state);
        self.moved.notify_all();
        Ok(work)
    }

    /// The next operation to issue; `None` when it is time to end the communicator.
    fn next(&self) -> Option<ToIssue> {
        let mut state = self.lock();
        loop {
            if state.failure.is_some() {
                return None;
            }
            if let Some(Queued { ticket, op, after }) = state.queue.pop_front() {
                let deadline = ticket.deadline;
                state.issuing = Some(ticket);
                return Some(ToIssue { op, after, deadline });
            }
            if state.closing && state.flying.is_empty() {
                return None;
            }
            state = self.wait(state);
        }
    }

    fn issue(self: Arc<Self>, mut issuer: Issuer) {
        while let Some(ToIssue { op, after, deadline }) = self.next() {
            let issued = issuer.issue(&op, after.as_deref(), deadline);
            let ticket = self.lock().issuing.take();
            match (ticket, issued) {
                (Some(ticket), Ok(done)) => {
                    ticket.completer.recorded(done.clone());
                    let mut state = self.lock();
                    if let Some(error) = state.failure.clone() {
                        drop(state);
                        ticket.completer.fail(error, Vec::new());
                        leak(op);
                        break;
                    }
                    state.flying.push(Flying { ticket, op, done });
                    drop(state);
                    self.moved.notify_all();
                }
                (Some(ticket), Err(error)) => {
                    let error = ticket.name(error, self.place);
                    // Some of its calls may be on the device already.
                    leak(op);
                    // The group first: who learns of the failure finds it poisoned.
                    self.fail(error.clone());
                    ticket.completer.fail(error, Vec::new());
                    break;
                }
                // Failed while it was being issued.
                (None, _) => {
                    leak(op);
                    break;
                }
            }
        }
        let failed = self.lock().failure.is_some();
        if failed {
            // The streams go after the communicator, if it goes.
            let until = deadline_in(RELEASE_TIME + RELEASE_TIME);
            let _ = self.wait_ended(until);
        } else {
            let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner).take();
            let destroyed = comm.map_or(Ok(()), |comm| self.hccl.destroy(comm));
            self.end(match destroyed {
                Ok(()) => Ended::Released,
                Err(error) => {
                    tracing::warn!(%error, "the communicator was not destroyed");
                    Ended::Doubtful(error.to_string())
                }
            });
        }
    }

    fn end(&self, how: Ended) {
        let mut state = self.lock();
        if state.ended == Ended::No {
            state.ended = how;
        }
        drop(state);
        self.moved.notify_all();
    }

    fn watch(self: Arc<Self>) {
        let mut patience = Patience::default();
        let mut asked = Instant::now();
        loop {
            let flying: Vec<(u64, Arc<HpuEvent>)> = {
                let mut state = self.lock();
                loop {
                    if state.failure.is_some() || state.ended != Ended::No {
                        return;
                    }
                    if !state.flying.is_empty() {
                        break;
                    }
                    patience.reset();
                    state = self.wait(state);
                }
                state
                    .flying
                    .iter()
                    .map(|f| (f.ticket.seq, f.done.clone()))
                    .collect()
            };
            let mut finished = Vec::new();
            for (seq, done) in flying {
                match done.query() {
                    Ok(true) => finished.push(seq),
                    Ok(false) => {}
                    Err(error) => return self.fail_one(seq, error),
                }
            }
            if finished.is_empty() {
                patience.pause();
            } else {
                patience.reset();
                self.succeed(&finished);
            }
            if asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                if let Some(error) = self.async_error() {
                    return self.fail(error.with_rank(self.place.rank).with_epoch(self.place.epoch));
                }
            }
        }
    }

    fn succeed(&self, finished: &[u64]) {
        let done: Vec<Flying> = {
            let mut state = self.lock();
            let all = std::mem::take(&mut state.flying);
            let (done, rest) = all.into_iter().partition(|f| finished.contains(&f.ticket.seq));
            state.flying = rest;
            done
        };
        for Flying { ticket, op, .. } in done {
            ticket.completer.succeed(Completion {
                tensors: op.into_tensors(),
                source: ticket.source,
                contributors: 0,
            });
        }
        self.moved.notify_all();
    }

    fn async_error(&self) -> Option<Error> {
        // Not while it is being ended: the handle would be stale.
        let comm = match self.comm.try_lock() {
            Ok(comm) => comm,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        comm.and_then(|comm| self.hccl.async_error(comm))
    }

    fn keep_deadlines(self: Arc<Self>) {
        let mut state = self.lock();
        loop {
            if state.failure.is_some() || state.ended != Ended::No {
                return;
            }
            let waiting = state
                .queue
                .iter()
                .map(|q| (&q.ticket, "waiting for earlier ones"));
            let inside = state
                .issuing
                .iter()
                .map(|t| (t, "inside a call of the library, which has not returned"));
            let running = state.flying.iter().map(|f| (&f.ticket, "on the device"));
            let first = running
                .chain(inside)
                .chain(waiting)
                .min_by_key(|(t, _)| t.deadline);
            let Some((ticket, stands)) = first else {
                state = self.wait(state);
                continue;
            };
            let left = time_left(ticket.deadline);
            if !left.is_zero() {
                state = self
                    .moved
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            let text = format!(
                "not finished {:.3} s after submission: it is {stands}. HCCL does not say which of the {} ranks is \
                 missing",
                ticket.submitted.elapsed().as_secs_f64(),
                self.place.world
            );
            let error = ticket.name(Error::timeout(text), self.place);
            drop(state);
            return self.fail(error);
        }
    }

    fn fail_one(self: &Arc<Self>, seq: u64, error: Error) {
        let named = {
            let state = self.lock();
            match state.flying.iter().find(|f| f.ticket.seq == seq) {
                Some(f) => f.ticket.name(error, self.place),
                None => error,
            }
        };
        self.fail(named);
    }

    /// The first failure ends everything that is pending; later ones change nothing.
    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        let (queue, issuing, flying) = {
            let mut state = self.lock();
            if state.failure.is_some() || state.ended != Ended::No {
                return;
            }
            state.failure = Some(error.clone());
            (
                std::mem::take(&mut state.queue),
                state.issuing.take(),
                std::mem::take(&mut state.flying),
            )
        };
        self.moved.notify_all();
        tracing::warn!(%error, rank = self.place.rank, epoch = self.place.epoch, "the hccl group failed");
        for Queued { ticket, op, .. } in queue {
            // Never seen by the library.
            ticket.completer.fail(error.clone(), op.into_tensors());
        }
        if let Some(ticket) = issuing {
            ticket.completer.fail(error.clone(), Vec::new());
        }
        let mut doubtful = Vec::new();
        for Flying { ticket, op, done } in flying {
            ticket.completer.fail(error.clone(), Vec::new());
            doubtful.push((op, done));
        }
        let engine = self.clone();
        let held = Arc::new(Mutex::new(doubtful));
        let taken = held.clone();
        let spawned = spawn("ox-hccl-abort", move || {
            let doubtful = std::mem::take(&mut *taken.lock().unwrap_or_else(PoisonError::into_inner));
            engine.release(doubtful);
        });
        if let Err(e) = spawned {
            for (op, _) in std::mem::take(&mut *held.lock().unwrap_or_else(PoisonError::into_inner)) {
                leak(op);
            }
            self.end(Ended::Doubtful(e.to_string()));
        }
    }

    /// Aborts the communicator and waits for the device to let go of `doubtful`. Runs on a thread that may be given up.
    fn release(&self, doubtful: Vec<(Collective, Arc<HpuEvent>)>) {
        let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner).take();
        let aborted = comm.map_or(Ok(()), |comm| self.hccl.abort(comm));
        let until = deadline_in(RELEASE_TIME);
        let released =
            aborted.and_then(|()| doubtful.iter().try_for_each(|(_, done)| done.synchronize(until)));
        match released {
            Ok(()) => {
                drop(doubtful);
                self.end(Ended::Released);
            }
            Err(error) => {
                tracing::warn!(%error, "HCCL did not end a failed communicator cleanly");
                for (op, _) in doubtful {
                    leak(op);
                }
                self.end(Ended::Doubtful(error.to_string()));
            }
        }
    }

    /// Fails everything with `Aborted`.
    pub(crate) fn abort(self: &Arc<Self>, reason: &str) {
        self.fail(
            Error::new(
                ErrorKind::Aborted,
                format!("aborted by rank {}: {reason}", self.place.rank),
            )
            .with_rank(self.place.rank)
            .with_epoch(self.place.epoch),
        );
    }

    /// The first failure.
    pub(crate) fn error(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Accepts nothing more. What is pending is aborted, an idle group ends in good order. Does not block.
    pub(crate) fn leave(self: &Arc<Self>, reason: &str) {
        let idle = {
            let mut state = self.lock();
            state.closing = true;
            state.queue.is_empty() && state.issuing.is_none() && state.flying.is_empty()
        };
        self.moved.notify_all();
        if !idle {
            self.abort(reason);
        }
    }

    /// Waits until everything pending has ended, then for the end of the communicator.
    pub(crate) fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        self.lock().closing = true;
        self.moved.notify_all();
        match self.wait_ended(deadline) {
            Ok(()) => Ok(()),
            Err(e) => {
                self.abort("the deadline of the shut-down passed");
                Err(e.with_op("shutdown").with_rank(self.place.rank))
            }
        }
    }

    /// Waits for the end of the communicator. `Timeout` at the deadline, `InvalidState` if it is doubtful whether the
    /// library and the device have let go.
    pub(crate) fn wait_ended(&self, deadline: Instant) -> Result<()> {
        let mut state = self.lock();
        loop {
            match &state.ended {
                Ended::Released => return Ok(()),
                Ended::Doubtful(why) => {
                    return Err(Error::new(
                        ErrorKind::InvalidState,
                        format!(
                            "the communicator of epoch {} did not end cleanly ({why}); this process should not make \
                             another one: restart it, or run the group isolated",
                            self.place.epoch
                        ),
                    ));
                }
                Ended::No => {}
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(format!(
                    "HCCL has not ended the communicator of epoch {} yet",
                    self.place.epoch
                )));
            }
            state = self
                .moved
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
