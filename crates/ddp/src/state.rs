//! What a replica of data parallel is made of, and what taking it over does: the caller's state and, in its own checkpoints, what error feedback owes.

use ftcore::{Result, Tensor};
use protocol::training::Steps;
use replica::State;
use replica::StateDict;

use crate::feedback::Feedback;

/// Everything that travels to a healing replica or, with what error feedback owes, to disk, and what depends on it here.
pub(crate) struct Whole<'a> {
    pub(crate) state: &'a mut dyn State,
    pub(crate) feedback: &'a Feedback,
    /// What was computed on the state so far, and whether it is of a step.
    pub(crate) steps: &'a mut Steps<Vec<Tensor>>,
    /// True if the state is for this replica itself (its checkpoint), false if it is healed from.
    pub(crate) own: bool,
}

impl State for Whole<'_> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.steps.check_state()?;
        // Each replica pays its own residuals: to one that heals they would be paid twice.
        if self.own {
            self.feedback.save(out)?;
        }
        self.state.save(out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        // What is owed is checked whole before it is taken over; from then on the state is another one, however far its loading gets.
        self.feedback.load(from, self.own)?;
        self.steps.loaded(self.state.load(from))
    }
}
