//! The one stream of events from the supervisor's threads to the driver, with a bound on what a slow driver can pile up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use ftcore::time_left;
use oxccl::launch::EventKind;

use super::events::SupervisorEvent;

/// Above this many waiting events, `Step` events are dropped.
const SOFT: usize = 16 * 1024;
/// Above this many, a replica's connection is refused: it writes faster than anything honest does.
const HARD: usize = 128 * 1024;

/// The driver's end: all events of a run, in the order in which the supervisor saw them. Everything that an incarnation
/// reported comes before its `Exited`; `Finished` is the last.
#[derive(Debug)]
pub struct SupervisorEvents {
    receiver: Receiver<SupervisorEvent>,
    waiting: Arc<AtomicUsize>,
    ended: bool,
}

impl SupervisorEvents {
    /// The next event; `None` when `deadline` passed first, or when the stream is over (see
    /// [`SupervisorEvents::is_over`]). As an iterator it waits for as long as the run lasts.
    pub fn next_until(&mut self, deadline: Instant) -> Option<SupervisorEvent> {
        if self.ended {
            return None;
        }
        let received = self.receiver.recv_timeout(time_left(deadline));
        self.take(received)
    }

    /// True once `Finished` was handed out; nothing comes after it.
    pub fn is_over(&self) -> bool {
        self.ended
    }

    fn take(&mut self, received: Result<SupervisorEvent, RecvTimeoutError>) -> Option<SupervisorEvent> {
        match received {
            Ok(event) => {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                self.ended = matches!(event, SupervisorEvent::Finished(_));
                Some(event)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                self.ended = true;
                None
            }
        }
    }
}

/// Yields until the stream ends. The supervisor always ends it: with `Finished`, by its overall deadline at the latest.
impl Iterator for SupervisorEvents {
    type Item = SupervisorEvent;

    fn next(&mut self) -> Option<SupervisorEvent> {
        if self.ended {
            return None;
        }
        let received = self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected);
        self.take(received)
    }
}

/// What came of handing over an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handed {
    /// It waits for the driver.
    Queued,
    /// It was a `Step` event and the driver is slow.
    Dropped,
    /// The driver is gone, or so far behind that the writer must be cut off.
    Refused,
}

#[derive(Debug, Clone)]
pub(super) struct EventQueue {
    sender: Sender<SupervisorEvent>,
    waiting: Arc<AtomicUsize>,
}

pub(super) fn event_queue() -> (EventQueue, SupervisorEvents) {
    let (sender, receiver) = channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    (
        EventQueue {
            sender,
            waiting: Arc::clone(&waiting),
        },
        SupervisorEvents {
            receiver,
            waiting,
            ended: false,
        },
    )
}

impl EventQueue {
    /// Never blocks. The supervisor's own events are few (a handful per incarnation) and always queued.
    pub(super) fn push(&self, event: SupervisorEvent) -> Handed {
        if let SupervisorEvent::Replica(replica) = &event {
            let waiting = self.waiting.load(Ordering::Relaxed);
            if waiting >= HARD {
                return Handed::Refused;
            }
            if waiting >= SOFT && matches!(replica.kind, EventKind::Step { .. }) {
                return Handed::Dropped;
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        match self.sender.send(event) {
            Ok(()) => Handed::Queued,
            Err(_) => {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                Handed::Refused
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use oxccl::launch::{ReplicaEvent, ReplicaState};

    use super::*;

    fn replica(kind: EventKind) -> SupervisorEvent {
        SupervisorEvent::Replica(ReplicaEvent {
            rank: 0,
            replica: 0,
            incarnation: 0,
            t_us: 0,
            kind,
        })
    }

    #[test]
    fn a_slow_driver_costs_steps_first_and_memory_never() {
        let (queue, mut events) = event_queue();
        let step = || {
            replica(EventKind::Step {
                inner_step: 0,
                loss: 0.0,
                tokens_per_s: 0.0,
            })
        };
        let state = || {
            replica(EventKind::State {
                state: ReplicaState::Training,
            })
        };
        for _ in 0..SOFT {
            assert_eq!(queue.push(step()), Handed::Queued);
        }
        assert_eq!(queue.push(step()), Handed::Dropped);
        for _ in SOFT..HARD {
            assert_eq!(queue.push(state()), Handed::Queued);
        }
        assert_eq!(queue.push(state()), Handed::Refused);
        let own = SupervisorEvent::LighthouseUp {
            url: "u".into(),
            t_us: 1,
        };
        assert_eq!(queue.push(own), Handed::Queued);
        drop(queue.clone());
        assert!(events.next().is_some());
        assert!(events.next().is_some());
        assert_eq!(queue.push(state()), Handed::Queued);
    }
}
