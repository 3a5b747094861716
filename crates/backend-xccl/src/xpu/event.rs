//! Points in a queue, among them points that are not in it yet.
//!
//! oneCCL's calls block, so an operation is enqueued later than it is submitted, by an executor. What the caller gets
//! meanwhile is the [`Promise`] of an event. A stream that waits for one is gated (see `stream`): the host goes on.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ftcore::{Error, Event, Result, Status, poll, time_left};

use super::stream::Core;
use crate::raw::sycl::EventHandle;

/// How an operation is ordered on its device.
#[derive(Clone, Default)]
pub(crate) struct Order {
    /// It begins after this point of the caller's stream.
    pub(crate) after: Option<Arc<dyn Event>>,
    /// Kept once it is enqueued.
    pub(crate) promise: Option<Arc<Promise>>,
}

/// What is known about a point.
#[derive(Clone)]
enum State {
    Open,
    /// It is in a queue; `None`: it is in the past.
    Kept(Option<Arc<EventHandle>>),
    Broken(Error),
}

/// An event that does not exist yet.
pub(crate) struct Promise {
    state: Mutex<State>,
    changed: Condvar,
    /// After this instant no caller waits for it any more.
    until: Instant,
}

impl Promise {
    /// Open until `until`, which is when the engine has reported the operation's failure at the latest.
    pub(crate) fn new(until: Instant) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::Open),
            changed: Condvar::new(),
            until,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, state: State) {
        let mut guard = self.lock();
        if matches!(*guard, State::Open) {
            *guard = state;
            self.changed.notify_all();
        }
    }

    /// The operation is enqueued.
    pub(crate) fn keep(&self, event: Arc<EventHandle>) {
        self.end(State::Kept(Some(event)));
    }

    /// The operation has ended, whether or not it was enqueued.
    pub(crate) fn ended(&self, status: &Status) {
        match status {
            Status::Failed(error) => self.end(State::Broken(error.clone())),
            Status::Succeeded => self.end(State::Kept(None)),
            Status::Pending => {}
        }
    }

    fn overdue() -> Error {
        Error::timeout("the operation was not enqueued on its device by its deadline")
    }

    /// `None` while it is open.
    fn settled(&self) -> Option<Result<Option<Arc<EventHandle>>>> {
        match &*self.lock() {
            State::Kept(event) => Some(Ok(event.clone())),
            State::Broken(error) => Some(Err(error.clone())),
            State::Open if Instant::now() > self.until => Some(Err(Self::overdue())),
            State::Open => None,
        }
    }

    /// Blocks until it is not open any more, until `deadline` at most.
    fn wait(&self, deadline: Instant) -> Result<Option<Arc<EventHandle>>> {
        let deadline = deadline.min(self.until);
        let mut guard = self.lock();
        loop {
            match &*guard {
                State::Kept(event) => return Ok(event.clone()),
                State::Broken(error) => return Err(error.clone()),
                State::Open => {}
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Self::overdue());
            }
            guard = self
                .changed
                .wait_timeout(guard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

enum Point {
    /// In a queue.
    Recorded(Arc<EventHandle>),
    /// The end of an operation that is not in a queue yet.
    Promised(Arc<Promise>),
    /// The end of a stream that waits for such operations: recorded once they are all enqueued.
    Behind {
        gates: Vec<XpuEvent>,
        recorded: Mutex<Option<Arc<EventHandle>>>,
    },
}

/// A point of an xpu stream.
#[derive(Clone)]
pub(crate) struct XpuEvent(Arc<Inner>);

struct Inner {
    point: Point,
    /// The stream on which it was recorded.
    origin: Option<Arc<Core>>,
}

impl XpuEvent {
    /// A point that is in `origin`'s queue.
    pub(crate) fn recorded(event: EventHandle, origin: Option<Arc<Core>>) -> Self {
        let point = Point::Recorded(Arc::new(event));
        Self(Arc::new(Inner { point, origin }))
    }

    /// The end of an operation.
    pub(crate) fn promised(promise: Arc<Promise>) -> Self {
        Self(Arc::new(Inner {
            point: Point::Promised(promise),
            origin: None,
        }))
    }

    /// The present end of `origin`, which waits for `gates`.
    pub(crate) fn behind(gates: Vec<Self>, origin: Arc<Core>) -> Self {
        Self(Arc::new(Inner {
            point: Point::Behind {
                gates,
                recorded: Mutex::default(),
            },
            origin: Some(origin),
        }))
    }

    /// True if both are the same point.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn origin(&self) -> Option<&Arc<Core>> {
        self.0.origin.as_ref()
    }

    /// The event in a queue; `None` while there is none yet. `Ok(None)`: it is in the past.
    pub(crate) fn settled(&self) -> Option<Result<Option<Arc<EventHandle>>>> {
        match &self.0.point {
            Point::Recorded(event) => Some(Ok(Some(event.clone()))),
            Point::Promised(promise) => promise.settled(),
            Point::Behind { gates, .. } => {
                for gate in gates {
                    if let Err(error) = gate.settled()? {
                        return Some(Err(error));
                    }
                }
                Some(self.record_now())
            }
        }
    }

    /// All gates are open: the stream's queue has (or gets) their barriers, and this point is behind them.
    fn record_now(&self) -> Result<Option<Arc<EventHandle>>> {
        let (Point::Behind { recorded, .. }, Some(origin)) = (&self.0.point, &self.0.origin) else {
            return Ok(None);
        };
        let mut recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.is_none() {
            let queue = origin.pass()?;
            *recorded = Some(Arc::new(queue.barrier()?));
        }
        Ok(recorded.clone())
    }

    /// As [`settled`](Self::settled), waiting until `deadline` at most.
    pub(crate) fn settle(&self, deadline: Instant) -> Result<Option<Arc<EventHandle>>> {
        match &self.0.point {
            Point::Recorded(event) => Ok(Some(event.clone())),
            Point::Promised(promise) => promise.wait(deadline),
            Point::Behind { gates, .. } => {
                for gate in gates {
                    gate.settle(deadline)?;
                }
                self.record_now()
            }
        }
    }
}

impl Event for XpuEvent {
    fn query(&self) -> Result<bool> {
        match self.settled() {
            None => Ok(false),
            Some(Ok(None)) => Ok(true),
            Some(Ok(Some(event))) => event.is_done(),
            Some(Err(error)) => Err(error),
        }
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        match self.settle(deadline)? {
            None => Ok(()),
            Some(event) => poll(deadline, "a point of an xpu stream", || event.is_done()),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use ftcore::deadline_in;

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(20))
    }

    #[test]
    fn a_promise_is_open_until_its_operation_has_ended_and_the_first_end_counts() {
        let promise = Promise::new(soon());
        let event = XpuEvent::promised(promise.clone());
        assert!(!event.query().unwrap());
        assert!(event.synchronize(deadline_in(Duration::from_millis(5))).is_err());
        std::thread::scope(|scope| {
            scope.spawn(|| promise.ended(&Status::Succeeded));
            event.synchronize(soon()).unwrap();
        });
        promise.ended(&Status::Failed(Error::invalid("later")));
        assert!(event.query().unwrap());
    }

    #[test]
    fn the_failure_of_an_operation_shows_in_its_event() {
        let promise = Promise::new(soon());
        promise.ended(&Status::Failed(Error::invalid("no such thing")));
        let event = XpuEvent::promised(promise);
        assert!(event.query().unwrap_err().to_string().contains("no such thing"));
        assert!(event.synchronize(soon()).is_err());
    }

    #[test]
    fn nobody_waits_for_a_promise_beyond_its_end() {
        let event = XpuEvent::promised(Promise::new(Instant::now()));
        let e = event.synchronize(soon()).unwrap_err();
        assert_eq!(e.kind(), ftcore::ErrorKind::Timeout);
    }
}
