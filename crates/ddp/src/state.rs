//! What a replica of data parallel is made of, and what taking it over does: the caller's state and what error feedback owes.

use checkpoint::{Integrity, StateDict};
use ftcore::{Result, Tensor};
use manager::State;

use crate::attempt::Kept;
use crate::feedback::Feedback;

/// Everything that travels to a healing replica or goes to disk, and what depends on it here.
pub(crate) struct Whole<'a> {
    pub(crate) state: &'a mut dyn State,
    pub(crate) feedback: &'a Feedback,
    /// Gradients that were computed on the state so far.
    pub(crate) kept: &'a mut Kept<Vec<Tensor>>,
    pub(crate) integrity: &'a mut Integrity,
    /// True if what is loaded was saved by this replica itself, false if it comes from one that it heals from.
    pub(crate) own: bool,
}

impl State for Whole<'_> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.integrity.check()?;
        self.feedback.save(out)?;
        self.state.save(out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        // What is owed is checked whole before it is taken over; from then on the state is another one, however far its loading gets.
        self.feedback.load(from, self.own)?;
        self.kept.forget();
        self.integrity.record(self.state.load(from))
    }
}
