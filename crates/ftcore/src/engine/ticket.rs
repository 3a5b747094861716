//! What a driver answers through: one [`Ticket`] for each operation, one [`Ended`] for the interruption.

use std::sync::Arc;
use std::time::Instant;

use super::shell::{Driver, Engine, Outcome};
use crate::{Completion, Error, ErrorKind, Event, Tensor};

/// A driver's side of one operation. Answer it once, from any thread; whatever comes after the caller was told changes nothing.
///
/// Dropped without an answer it fails the operation and the group with `Internal`. Memory that the device or a peer may still touch
/// is the driver's to keep or to leak (see [`Held`](super::Held)): what it hands back here is free.
pub struct Ticket<D: Driver> {
    engine: Arc<Engine<D>>,
    number: u64,
    deadline: Instant,
    answered: bool,
}

impl<D: Driver> Ticket<D> {
    pub(super) fn new(engine: Arc<Engine<D>>, number: u64, deadline: Instant) -> Self {
        Self {
            engine,
            number,
            deadline,
            answered: false,
        }
    }

    /// The number of the operation in its group, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// When it fails with `Timeout`, whatever the driver does.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<Engine<D>> {
        &self.engine
    }

    /// The operation is on its device; `done` will be reached when it has finished there.
    pub fn recorded(&self, done: Arc<dyn Event>) {
        self.engine.recorded(self.number, done);
    }

    /// It has ended like this. After a success earlier ones of its channel are told first.
    pub fn answer(mut self, outcome: Outcome) {
        self.answered = true;
        self.engine.answered(self.number, outcome);
    }

    /// It has succeeded. Earlier ones of its channel are told first.
    pub fn succeed(self, completion: Completion) {
        self.answer(Outcome::Succeeded(completion));
    }

    /// It has failed, and the group with it. `tensors`: its memory, if nothing touches it any more.
    pub fn fail(self, error: Error, tensors: Vec<Tensor>) {
        self.answer(Outcome::Fatal(error, tensors));
    }

    /// It alone has failed: the others are none the worse.
    pub fn refuse(self, error: Error, tensors: Vec<Tensor>) {
        self.answer(Outcome::Refused(error, tensors));
    }
}

impl<D: Driver> Drop for Ticket<D> {
    fn drop(&mut self) {
        if !self.answered {
            let error = Error::new(ErrorKind::Internal, "the driver dropped the operation");
            self.engine
                .answered(self.number, Outcome::Fatal(error, Vec::new()));
        }
    }
}

/// A driver's answer to the interruption: everything has ended. Dropped without an answer the end is unclean.
pub struct Ended<D: Driver> {
    engine: Option<Arc<Engine<D>>>,
}

impl<D: Driver> Ended<D> {
    pub(super) fn new(engine: Arc<Engine<D>>) -> Self {
        Self { engine: Some(engine) }
    }

    /// Nothing of the group's is touched any more, except by calls that have not returned.
    pub fn clean(self) {
        self.say(None);
    }

    /// It is not certain that the library or the device has let go.
    pub fn unclean(self, why: impl Into<String>) {
        self.say(Some(why.into()));
    }

    fn say(mut self, why: Option<String>) {
        if let Some(engine) = self.engine.take() {
            engine.interrupted(why);
        }
    }
}

impl<D: Driver> Drop for Ended<D> {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            engine.interrupted(Some("the driver did not say how it ended".to_string()));
        }
    }
}
