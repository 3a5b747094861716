//! What a replica of data parallel is made of, and what taking it over does: the caller's state, the order in which gradients come, and, in
//! its own checkpoints, what error feedback owes.

use ftcore::{Error, Result, Tensor};
use protocol::training::Steps;
use quant::ErrorFeedback;
use replica::{State, StateDict, save_beside};

use crate::buckets::BucketPlan;

/// Under this the order stands in a state, once it is learnt.
const ORDER: &str = "ddp.order";

/// Under this the residuals of error feedback stand in a replica's own state.
const FEEDBACK: &str = "ddp.feedback";

/// Everything that travels to a healing replica or, with what error feedback owes, to disk, and what depends on it here.
pub(crate) struct Whole<'a> {
    pub(crate) state: &'a mut dyn State,
    pub(crate) feedback: Option<&'a ErrorFeedback>,
    pub(crate) plan: &'a mut BucketPlan,
    /// What was computed on the state so far, and whether it is of a step.
    pub(crate) steps: &'a mut Steps<Vec<Tensor>>,
    /// True if the state is for this replica itself (its checkpoint), false if it is healed from.
    pub(crate) own: bool,
}

impl State for Whole<'_> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.steps.check_state()?;
        // Each replica pays its own residuals: to one that heals they would be paid twice.
        if let Some(feedback) = self.feedback.filter(|_| self.own) {
            out.insert_f32s(FEEDBACK, &feedback.state())?;
        }
        if let Some(order) = self.plan.order() {
            let order: Vec<i64> = order
                .iter()
                .map(|&slot| i64::try_from(slot).unwrap_or(i64::MAX))
                .collect();
            out.insert_i64s(ORDER, &order)?;
        }
        save_beside(&*self.state, out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        // The order and what is owed are checked whole before they are taken over; from then on the state is another one, however far its
        // loading gets.
        let order = saved_order(from)?;
        self.plan.follow(order)?;
        if let Some(feedback) = self.feedback {
            // A replica that heals owes nothing from then on: what its source owes the source pays, and what it owed itself may be paid in the steps
            // that it missed.
            feedback.load(match self.own {
                true => from.f32s_under(FEEDBACK)?,
                false => Vec::new(),
            })?;
        }
        self.steps.loaded(self.state.load(from))
    }
}

/// The order in `from`; `None` if it was not learnt there.
fn saved_order(from: &StateDict) -> Result<Option<Vec<usize>>> {
    if from.get(ORDER).is_none() {
        return Ok(None);
    }
    let index = |slot: i64| {
        usize::try_from(slot).map_err(|_| Error::invalid(format!("{ORDER} has a slot {slot}, below 0")))
    };
    from.get_i64s(ORDER)?
        .into_iter()
        .map(index)
        .collect::<Result<_>>()
        .map(Some)
}
