//! Error feedback of a quantised group as a part of the steps and of the state: a step begins, commits or rolls back its debts
//! ([`quant::ErrorFeedback`]), and they travel with the caller's state.

use std::sync::Arc;

use checkpoint::StateDict;
use ftcore::Result;
use manager::State;
use quant::ErrorFeedback;

/// The debts of this replica's rank; without error feedback there are none.
#[derive(Default)]
pub(crate) struct Feedback {
    debts: Option<Arc<ErrorFeedback>>,
}

/// Under this the debts stand in a state.
const PREFIX: &str = "ddp.feedback/";

impl Feedback {
    pub(crate) fn new(debts: Arc<ErrorFeedback>) -> Self {
        Self { debts: Some(debts) }
    }

    /// Begins an attempt at a step.
    pub(crate) fn begin(&self) {
        if let Some(debts) = &self.debts {
            debts.begin("gradients");
        }
    }

    /// Ends the attempt.
    pub(crate) fn end(&self, committed: bool) {
        match &self.debts {
            Some(debts) if committed => debts.commit(),
            Some(debts) => debts.rollback(),
            None => {}
        }
    }
}

/// The caller's state and what this replica owes.
pub(crate) struct Whole<'a> {
    pub(crate) state: &'a mut dyn State,
    pub(crate) feedback: &'a Feedback,
    /// True if what is loaded was saved by this replica itself, false if it comes from one that it heals from.
    pub(crate) own: bool,
}

impl State for Whole<'_> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        for (name, debts) in self.feedback.debts.iter().flat_map(|d| d.state()) {
            out.insert_f32(format!("{PREFIX}{name}"), &[debts.len()], &debts)?;
        }
        self.state.save(out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        if let Some(debts) = &self.feedback.debts {
            let saved = from.iter().filter_map(|(key, _)| {
                let name = key.strip_prefix(PREFIX)?;
                Some(from.get_f32(key).map(|values| (name.to_string(), values)))
            });
            let saved = saved.collect::<Result<Vec<_>>>()?;
            if self.own {
                debts.load(saved)?;
            } else {
                debts.adopt(saved)?;
            }
        }
        self.state.load(from)
    }
}
