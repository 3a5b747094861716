//! Operations on a device until their events are reached: what a driver whose library signals events needs besides its calls.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::sync::spawn;
use super::{Driver, Ticket};
use crate::memory::{end_suspicion, suspect};
use crate::{Collective, Completion, Error, ErrorKind, Event, Result, Tensor, time_left};

/// The longest pause between two looks at events, and the pauses before it that only give way.
const LONGEST_PAUSE: Duration = Duration::from_micros(500);
const GIVES_WAY: u32 = 30;
/// How often the library is asked for asynchronous errors while operations are in flight.
const ASK_EVERY: Duration = Duration::from_millis(5);
/// How long another rank's failure notice may be on its way when the library reports an error. A rank sends its notice before its library ends
/// their connections: the notice has the cause, and what the library reports is the effect.
const GRACE: Duration = Duration::from_millis(250);

/// What an operation needs on the device besides its tensors. Dropped when the device has let go of it, and never before.
pub trait Scratch: Send + 'static {
    /// The number of contributors, once the operation has ended well.
    fn contributors(&self) -> u32;
}

/// An operation whose memory a device may touch. Dropped without [`free`](Self::free) the memory is leaked and counted (INV-8).
pub struct Held {
    op: Option<Collective>,
    scratch: Option<Box<dyn Scratch>>,
    why: &'static str,
    /// Counted as leaked, for the time being.
    suspected: u64,
}

impl Held {
    /// `why` is what the warning about leaked memory says.
    pub fn new(op: Collective, why: &'static str) -> Self {
        Self {
            op: Some(op),
            scratch: None,
            why,
            suspected: 0,
        }
    }

    /// What the operation needs besides: kept as long as its tensors.
    pub fn keep(&mut self, scratch: impl Scratch) {
        self.scratch = Some(Box::new(scratch));
    }

    /// The operation.
    pub fn op(&self) -> Option<&Collective> {
        self.op.as_ref()
    }

    /// Its caller gets it no more: it counts as leaked unless it is freed later.
    pub fn suspect(&mut self) {
        if let Some(op) = self.op.as_ref().filter(|_| self.suspected == 0) {
            self.suspected = suspect(&op.tensors());
        }
    }

    /// Nothing touches the memory any more.
    pub fn free(mut self) -> Vec<Tensor> {
        end_suspicion(self.suspected);
        self.op.take().map(Collective::into_tensors).unwrap_or_default()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Both are there only if nothing has freed them.
        if self.op.is_some() {
            std::mem::forget(self.scratch.take());
            end_suspicion(self.suspected);
        }
        for tensor in self.op.take().into_iter().flat_map(Collective::into_tensors) {
            tensor.leak(self.why);
        }
    }
}

struct Operation<D: Driver> {
    held: Held,
    /// None: it was enqueued in part, and nothing marks its end.
    done: Option<Arc<dyn Event>>,
    ticket: Ticket<D>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Events tell that operations have ended.
    Watching,
    /// The group has failed: events prove nothing until the library has given up.
    Stopped,
    /// What comes now is suspect.
    Settled,
}

struct Table<D: Driver> {
    operations: Vec<Operation<D>>,
    phase: Phase,
}

/// The table of operations in flight and the thread that watches their events.
pub struct InFlight<D: Driver>(Arc<Shared<D>>);

struct Shared<D: Driver> {
    table: Mutex<Table<D>>,
    changed: Condvar,
}

impl<D: Driver> Shared<D> {
    fn lock(&self) -> MutexGuard<'_, Table<D>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Driver> InFlight<D> {
    /// Starts the thread `name`. `ask` is the library's asynchronous error, if it has one: asked every few milliseconds while
    /// something is in flight, on that thread.
    pub fn start(name: &str, ask: impl FnMut() -> Option<Error> + Send + 'static) -> Result<Self> {
        let shared = Arc::new(Shared {
            table: Mutex::new(Table {
                operations: Vec::new(),
                phase: Phase::Watching,
            }),
            changed: Condvar::new(),
        });
        let watched = shared.clone();
        spawn(name, move || watched.watch(ask))?;
        Ok(Self(shared))
    }

    /// `done` is reached when the device has finished the operation.
    pub fn add(&self, held: Held, done: Arc<dyn Event>, ticket: Ticket<D>) {
        self.push(held, Some(done), ticket);
    }

    /// An operation that was enqueued in part: the group is to fail, and then only what [`settle`](Self::settle) takes for a proof
    /// frees its memory.
    pub fn add_unfinished(&self, held: Held, ticket: Ticket<D>) {
        self.push(held, None, ticket);
    }

    fn push(&self, held: Held, done: Option<Arc<dyn Event>>, ticket: Ticket<D>) {
        let mut table = self.0.lock();
        if table.phase != Phase::Settled {
            table.operations.push(Operation { held, done, ticket });
            drop(table);
            self.0.changed.notify_one();
        }
    }

    /// Ends the watch, because the group has failed: from now on events prove nothing, until [`settle`](Self::settle). Does not block.
    pub fn stop(&self) {
        let mut table = self.0.lock();
        if table.phase == Phase::Watching {
            table.phase = Phase::Stopped;
        }
        drop(table);
        self.0.changed.notify_all();
    }

    /// After [`stop`](Self::stop). The library has given up everything (or not: `released`): waits until `deadline` for the device to let go of each operation's
    /// memory, gives that back, and leaks the rest. `last` lies behind everything on the stream of those that were enqueued in part. May
    /// block.
    ///
    /// Errors: something was leaked.
    pub fn settle(
        &self,
        released: Result<()>,
        last: Option<Arc<dyn Event>>,
        deadline: Instant,
    ) -> Result<()> {
        let mut looks = 0;
        while released.is_ok() && !self.0.lock().operations.is_empty() {
            for operation in self.0.lock().operations.iter_mut().filter(|o| o.done.is_none()) {
                operation.done.clone_from(&last);
            }
            let mut looked = self.0.look();
            looked.retain(|(_, reached)| matches!(reached, Ok(true)));
            let mut reached: Vec<u64> = looked.into_iter().map(|(number, _)| number).collect();
            for operation in self.0.take(&mut reached, Phase::Stopped) {
                // The engine has its own reason.
                let error = Error::new(ErrorKind::Aborted, "the group has failed");
                operation.ticket.fail(error, operation.held.free());
            }
            if time_left(deadline).is_zero() {
                break;
            }
            pause(&mut looks);
        }
        match self.close() {
            0 => released,
            left => released.and(Err(Error::timeout(format!(
                "the device did not let go of the memory of {left} operations"
            )))),
        }
    }

    /// Counts what is still in flight as leaked, until [`settle`](Self::settle) finds that it is free. Does not block.
    pub fn give_up(&self) {
        self.0.lock().operations.iter_mut().for_each(|o| o.held.suspect());
    }

    /// Leaks what is still in flight, and what comes later; how many operations those are now.
    fn close(&self) -> usize {
        let mut table = self.0.lock();
        table.phase = Phase::Settled;
        let operations = std::mem::take(&mut table.operations);
        drop(table);
        self.0.changed.notify_all();
        operations.len()
    }
}

impl<D: Driver> Drop for InFlight<D> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<D: Driver> Shared<D> {
    fn watch(&self, mut ask: impl FnMut() -> Option<Error>) {
        let mut looks = 0u32;
        let mut asked = Instant::now();
        loop {
            {
                let mut table = self.lock();
                while table.phase == Phase::Watching && table.operations.is_empty() {
                    looks = 0;
                    table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
                }
                if table.phase != Phase::Watching {
                    return;
                }
            }
            let mut failed = None;
            let mut reached = Vec::new();
            for (number, looked) in self.look() {
                match looked {
                    Ok(true) => reached.push(number),
                    Ok(false) => {}
                    Err(error) => failed = failed.or(Some((number, error))),
                }
            }
            for operation in self.take(&mut reached, Phase::Watching) {
                let source = match operation.held.op() {
                    Some(Collective::Recv { peer, .. }) => *peer,
                    _ => None,
                };
                let contributors = operation.held.scratch.as_ref().map_or(0, |s| s.contributors());
                operation.ticket.succeed(Completion {
                    tensors: operation.held.free(),
                    source,
                    contributors,
                });
            }
            if let Some((number, error)) = failed {
                // It stays where it is: the interruption finds out whether its memory is free.
                let engine = self.lock().operations.first().map(|o| o.ticket.engine().clone());
                return engine.into_iter().for_each(|e| e.fail_by(number, error.clone()));
            }
            if reached.is_empty() {
                pause(&mut looks);
            } else {
                looks = 0;
            }
            if asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                if let Some(error) = ask() {
                    let watching = |table: &mut Table<D>| table.phase == Phase::Watching;
                    let waited = self.changed.wait_timeout_while(self.lock(), GRACE, watching);
                    let (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
                    let engine = table.operations.first().map(|o| o.ticket.engine().clone());
                    drop(table);
                    if let Some(engine) = engine {
                        engine.fail(engine.place().name(error));
                        return;
                    }
                }
            }
        }
    }

    /// Asks the events. Outside the lock: a call of the library may block.
    fn look(&self) -> Vec<(u64, Result<bool>)> {
        let table = self.lock();
        let events: Vec<_> = (table.operations.iter())
            .map(|f| (f.ticket.number(), f.done.clone()))
            .collect();
        drop(table);
        let ask = |done: Option<Arc<dyn Event>>| done.map_or(Ok(false), |done| done.query());
        events.into_iter().map(|(n, done)| (n, ask(done))).collect()
    }

    /// Those that have been reached, in order. All at once: there may be thousands.
    /// None if `phase` is over: what was seen meanwhile proves nothing.
    fn take(&self, reached: &mut [u64], phase: Phase) -> Vec<Operation<D>> {
        reached.sort_unstable();
        let mut table = self.lock();
        if reached.is_empty() || table.phase != phase {
            return Vec::new();
        }
        let of_these = |o: &mut Operation<D>| reached.binary_search(&o.ticket.number()).is_ok();
        table.operations.extract_if(.., of_these).collect()
    }
}

/// Pauses that grow: quick answers cost no sleep, long waits no core.
fn pause(looks: &mut u32) {
    *looks = looks.saturating_add(1);
    match *looks {
        ..=GIVES_WAY => std::thread::yield_now(),
        n => std::thread::sleep((Duration::from_micros(20) * (n - GIVES_WAY)).min(LONGEST_PAUSE)),
    }
}
