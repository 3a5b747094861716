//! One configuration of a group: its communicator, its stream, its flights, and the first cause if it failed.
//!
//! `submit` enqueues collectives on the caller's thread (`enqueue`) and hands messages to their lane (`lanes`); the watchdog (`watch`)
//! ends flights. Whoever fails first sets the cause; the others are told through `control`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Configuration, Error, ErrorKind, Event, OpKind, Rejected, Result, SubmitOptions, Traffic,
    Work, deadline_in, time_left, work_pair,
};

use crate::bounded::bounded;
use crate::control::{Control, Listener, News};
use crate::cuda::event::CudaEvent;
use crate::cuda::gpu::Gpu;
use crate::cuda::stream::CudaStream;
use crate::flight::{Flight, Label};
use crate::lanes::Lanes;
use crate::options::Settings;
use crate::raw::{Comm, Native, Part, Wish};
use crate::{enqueue, lanes};

/// How long whoever waits for the end of an engine waits for the flush of its communicator, which the other ranks may hold up.
const FLUSH: Duration = Duration::from_millis(200);

mod start;

pub(crate) use start::Ingredients;

/// Who this rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
}

/// Bytes over all configurations of a group.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    pub(crate) fn add(&self, sent: usize, received: usize) {
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        self.received.fetch_add(received as u64, Ordering::Relaxed);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }
}

#[derive(Default)]
struct State {
    flights: Vec<Arc<Flight>>,
    /// The first cause.
    failure: Option<Error>,
    /// No more submissions: shut down or left.
    closed: bool,
    /// The watchdog may end once nothing is in flight.
    quit: bool,
    /// The watchdog has ended; nothing is pending.
    ended: bool,
    /// The communicator is flushed and freed, or in the hands of another thread.
    through: bool,
    /// Threads that are telling the others of a failure; the connections stay until they are through.
    reporting: u32,
    barriers: HashMap<u64, Arc<Flight>>,
    /// Barriers that opened before this rank had noted its own.
    released: Vec<u64>,
}

/// See the module.
pub(crate) struct Engine {
    pub(crate) place: Place,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) comm: Arc<Comm>,
    pub(crate) stream: CudaStream,
    pub(crate) settings: Settings,
    pub(crate) configuration: Configuration,
    pub(crate) counters: Arc<Counters>,
    pub(crate) lanes: Lanes,
    control: Option<Arc<Control>>,
    listener: Listener,
    /// Held while an operation is enqueued: the order of submission is the order on the stream.
    order: Mutex<Sequence>,
    state: Mutex<State>,
    moved: Condvar,
}

/// How many of each kind were submitted.
#[derive(Default)]
pub(crate) struct Sequence {
    collectives: u64,
    barriers: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    fn hear(&self, news: News) {
        match news {
            News::Failed(error) => self.set_failure(error),
            News::Released(number) => {
                let flight = {
                    let mut state = lock(&self.state);
                    let flight = state.barriers.remove(&number);
                    if flight.is_none() {
                        state.released.push(number);
                    }
                    flight
                };
                if let Some(flight) = flight {
                    self.finish(&flight);
                }
            }
        }
    }

    fn set_failure(&self, error: Error) {
        let mut state = lock(&self.state);
        if state.failure.is_none() && !state.ended {
            state.failure = Some(error);
        }
        drop(state);
        self.moved.notify_all();
    }

    /// The first failure counts, and is told to everybody; later ones change nothing.
    pub(crate) fn fail(&self, error: Error) {
        let first = {
            let mut state = lock(&self.state);
            let first = state.failure.is_none() && !state.ended;
            if first {
                state.failure = Some(error.clone());
                state.reporting += 1;
            }
            first
        };
        self.moved.notify_all();
        if !first {
            return;
        }
        if let Some(control) = &self.control {
            control.report(&error);
        }
        lock(&self.state).reporting -= 1;
        self.moved.notify_all();
    }

    /// The first cause.
    pub(crate) fn failure(&self) -> Option<Error> {
        lock(&self.state).failure.clone()
    }

    /// Ends pending work with `Aborted`.
    pub(crate) fn abort(&self, reason: &str) {
        self.fail(Error::new(ErrorKind::Aborted, format!("aborted: {reason}")).with_rank(self.place.rank));
    }

    /// Ends the engine: in good order if nothing is pending, otherwise by an abort.
    pub(crate) fn leave(&self, reason: &str) {
        let (pending, failed) = {
            let mut state = lock(&self.state);
            state.closed = true;
            state.quit = true;
            (!state.flights.is_empty(), state.failure.is_some())
        };
        match (&self.control, failed) {
            (_, true) => {}
            (_, false) if pending => self.abort(reason),
            // At once and not by the watchdog: the process may end right after this.
            (Some(control), false) => control.bye(),
            (None, false) => {}
        }
        self.moved.notify_all();
    }

    /// Waits until nothing is pending after [`leave`](Self::leave), and a little for the communicator: what it still has to hand over to
    /// the other ranks would be lost with the process.
    pub(crate) fn wait_ended(&self, deadline: Instant) -> Result<()> {
        let mut flushed_by = None;
        let mut state = lock(&self.state);
        while !state.through {
            let left = time_left(deadline);
            if state.ended && time_left(*flushed_by.get_or_insert(deadline_in(FLUSH))).is_zero() {
                return Ok(());
            }
            if left.is_zero() {
                return Err(Error::timeout(
                    "the last configuration did not end by the deadline",
                ));
            }
            state = self
                .moved
                .wait_timeout(state, left.min(FLUSH))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    /// Nothing is left to be done for the communicator on the watchdog's thread.
    pub(crate) fn is_through(&self) {
        lock(&self.state).through = true;
        self.moved.notify_all();
    }

    /// Lets pending work end until `deadline`, then ends the rest.
    pub(crate) fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        let mut state = lock(&self.state);
        state.closed = true;
        while !state.flights.is_empty() && state.failure.is_none() {
            let left = time_left(deadline);
            if left.is_zero() {
                drop(state);
                self.abort("shut down with work that did not end by the deadline");
                self.leave("shut down");
                return Err(
                    Error::timeout("work was still pending at the deadline of shutdown").with_op("shutdown"),
                );
            }
            state = self
                .moved
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        drop(state);
        self.leave("shut down");
        self.wait_ended(deadline.max(Instant::now() + Duration::from_millis(500)))
    }

    /// Validated work from the group.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Collective,
        options: &SubmitOptions,
        deadline: Instant,
    ) -> Result<Work, Box<Rejected>> {
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(op.kind().name()).with_rank(self.place.rank);
            Err(Box::new(Rejected { error, op }))
        };
        if let Some(tensor) = op.tensors().iter().find(|t| *t.device() != self.gpu.device()) {
            let text = format!(
                "a tensor is on {}; this group works on {}",
                tensor.device(),
                self.gpu.device()
            );
            return refuse(Error::invalid(text), op);
        }
        // Everything that needs no order is done before the lock: the caller's stream above all.
        let ready = match self.ready(options) {
            Ok(ready) => ready,
            Err(error) => return refuse(error, op),
        };
        let mut order = lock(&self.order);
        {
            let state = lock(&self.state);
            if let Some(cause) = &state.failure {
                let text = format!("the group has failed before: {cause}");
                let error = Error::new(ErrorKind::Poisoned, text).with_source(cause.clone());
                drop(state);
                return refuse(error, op);
            }
            if state.closed {
                drop(state);
                return refuse(Error::new(ErrorKind::InvalidState, "the group was shut down"), op);
            }
        }
        let kind = op.kind();
        if !kind.is_p2p() {
            order.collectives += 1;
        }
        let label = Label {
            kind,
            seq: order.collectives,
            dtype: op.dtype(),
            count: op.count(),
            rank: self.place.rank,
            epoch: self.place.epoch,
        };
        let this = Arc::downgrade(self);
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(engine) = this.upgrade() {
                engine.abort(reason);
            }
        });
        let parts = match &op {
            Collective::Batch { ops } => ops.len(),
            _ => 1,
        };
        let in_order = !kind.is_p2p() && kind != OpKind::MonitoredBarrier;
        let flight = Arc::new(Flight::new(
            label,
            deadline,
            lanes::awaited(&op, self.place),
            in_order,
            parts,
            completer,
        ));
        lock(&self.state).flights.push(flight.clone());
        match op {
            Collective::MonitoredBarrier { .. } => {
                order.barriers += 1;
                let number = order.barriers;
                drop(order);
                self.enter_barrier(number, &flight);
            }
            op if kind.is_p2p() => {
                lanes::send_off(self, op, &flight, ready);
                drop(order);
            }
            op => {
                enqueue::collective(self, op, options.contribute, &flight, ready.as_deref());
                drop(order);
            }
        }
        self.moved.notify_all();
        Ok(work)
    }

    /// The event after which the inputs may be read; `None` if they are ready.
    fn ready(&self, options: &SubmitOptions) -> Result<Option<Arc<dyn Event>>> {
        let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) else {
            return Ok(None);
        };
        let event = stream.record()?;
        if event.as_any().is::<CudaEvent>() {
            return Ok(Some(event));
        }
        Err(Error::unsupported(format!(
            "NCCL cannot order itself after a stream on {}",
            stream.device()
        )))
    }

    fn enter_barrier(&self, number: u64, flight: &Arc<Flight>) {
        match &self.control {
            Some(control) => {
                let opened = {
                    let mut state = lock(&self.state);
                    state.barriers.insert(number, flight.clone());
                    let early = state.released.iter().position(|r| *r == number);
                    early.map(|at| state.released.swap_remove(at)).is_some()
                };
                if opened {
                    self.hear(News::Released(number));
                } else {
                    control.enter(number, &self.listener);
                }
            }
            None => self.finish(flight),
        }
    }

    /// The flight succeeded: forget it and tell the caller, in this order, because the caller may let go of the group at once.
    pub(crate) fn finish(&self, flight: &Arc<Flight>) {
        lock(&self.state).flights.retain(|f| !Arc::ptr_eq(f, flight));
        flight.succeed(&self.gpu);
        self.moved.notify_all();
    }

    /// Who is missing at a monitored barrier, or otherwise whom a flight waits for, in words.
    pub(crate) fn overdue(&self, flight: &Arc<Flight>) -> Option<Error> {
        let number = {
            let state = lock(&self.state);
            state
                .barriers
                .iter()
                .find(|(_, f)| Arc::ptr_eq(f, flight))
                .map(|(n, _)| *n)
        };
        let gone = self.control.as_ref().map(|c| c.left()).unwrap_or_default();
        let note = match gone.as_slice() {
            [] => String::new(),
            [one] => format!("; rank {one} has left"),
            many => format!("; ranks {many:?} have left"),
        };
        let Some(number) = number else {
            return Some(Error::timeout(format!(
                "not finished on rank {} of {} at its deadline: {}{note}",
                self.place.rank, self.place.world, flight.waits_for
            )));
        };
        let control = self.control.as_ref().filter(|_| self.place.rank == 0);
        let Some(control) = control else {
            // Rank 0 names who is missing; its word is on the way.
            let late = flight.deadline + Duration::from_secs(1);
            return (Instant::now() > late)
                .then(|| Error::timeout(format!("rank 0 did not open the barrier{note}")));
        };
        let missing: Vec<String> = control.missing(number).iter().map(ToString::to_string).collect();
        let (who, has) = if missing.len() == 1 {
            ("rank", "has")
        } else {
            ("ranks", "have")
        };
        Some(Error::timeout(format!(
            "{who} {} {has} not entered the barrier{note}",
            missing.join(", ")
        )))
    }

    /// What the watchdog looks at: the flights, the failure, and whether to end.
    pub(crate) fn snapshot(&self) -> (Vec<Arc<Flight>>, Option<Error>, bool) {
        let state = lock(&self.state);
        (state.flights.clone(), state.failure.clone(), state.quit)
    }

    /// Waits for something to do, at most `pause`.
    pub(crate) fn rest(&self, pause: Duration) {
        let state = lock(&self.state);
        if state.failure.is_some() || (state.quit && state.flights.is_empty()) {
            return;
        }
        drop(
            self.moved
                .wait_timeout(state, pause)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Splits the communicator; a collective call of all ranks, in the order of `submit`. The child is connected. What goes wrong on the way
    /// leaves the communicator in a state that nobody knows, so it fails the group, and the other ranks hear of it at once.
    pub(crate) fn split(self: &Arc<Self>, part: Part, wish: Wish, deadline: Instant) -> Result<Option<Comm>> {
        let _order = lock(&self.order);
        if let Some(cause) = self.failure() {
            let text = format!("the group has failed before: {cause}");
            return Err(Error::new(ErrorKind::Poisoned, text).with_source(cause));
        }
        let divided = self.divide(part, wish, deadline);
        divided.map_err(|error| match self.failure() {
            // The group's own failure came first, and only closed the communicator under the call.
            Some(cause) if error.kind() == ErrorKind::Aborted => cause,
            Some(_) => error,
            None => {
                self.fail(error.clone().with_op("split").with_rank(self.place.rank));
                error
            }
        })
    }

    fn divide(self: &Arc<Self>, part: Part, wish: Wish, deadline: Instant) -> Result<Option<Comm>> {
        let stop = || self.failure();
        let late = || Error::timeout("NCCL did not return from ncclCommSplit by the deadline");
        self.comm.settle(deadline, &stop)?;
        let this = self.clone();
        let wanted = part.is_wanted();
        let split = move || {
            let _inside = this.gpu.enter()?;
            this.comm.split(part, &wish)
        };
        bounded("ox-nccl-split", deadline, &stop, &late, split, drop)??;
        let child = match self.comm.settle(deadline, &stop) {
            Ok(()) if !wanted => {
                self.comm.has_no_child();
                return Ok(None);
            }
            Ok(()) => self.comm.take_child()?,
            // The child stays with this communicator, whose abort ends both.
            Err(error) => return Err(self.apart(error)),
        };
        match child.settle(deadline, &stop) {
            Ok(()) => Ok(Some(child)),
            Err(error) => {
                child.give_up();
                Err(self.apart(error))
            }
        }
    }

    fn apart(&self, error: Error) -> Error {
        match (error.kind(), self.failure()) {
            (ErrorKind::Timeout, None) => {
                Error::timeout("the ranks of a part did not come together by the deadline of the split")
            }
            _ => error,
        }
    }

    /// After a failure: waits until nobody is in the middle of enqueuing something; later submissions are refused. False if
    /// somebody still is at `until`.
    pub(crate) fn quiesce(&self, until: Instant) -> bool {
        while self.order.try_lock().is_err() {
            if time_left(until).is_zero() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }

    /// True if the library has that operation.
    pub(crate) fn has(&self, native: Native) -> bool {
        self.comm.has(native)
    }

    /// All flights, to be failed.
    pub(crate) fn take_flights(&self) -> Vec<Arc<Flight>> {
        let mut state = lock(&self.state);
        state.barriers.clear();
        std::mem::take(&mut state.flights)
    }

    /// The watchdog is through: nothing is pending and nothing will be.
    pub(crate) fn end(&self, in_good_order: bool) {
        let until = Instant::now() + Duration::from_secs(1);
        let mut state = lock(&self.state);
        while state.reporting > 0 && Instant::now() < until {
            state = self
                .moved
                .wait_timeout(state, Duration::from_millis(20))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        drop(state);
        if let Some(control) = &self.control {
            if in_good_order {
                control.bye();
            }
            control.close();
        }
        lock(&self.state).ended = true;
        self.moved.notify_all();
    }

    /// True if work was submitted since the flights were taken.
    pub(crate) fn is_pending(&self) -> bool {
        !lock(&self.state).flights.is_empty()
    }
}
