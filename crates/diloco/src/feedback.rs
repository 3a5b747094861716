//! Error feedback of a quantised group as a part of the rounds and of the state: a round begins, commits or rolls back its residuals
//! ([`quant::ErrorFeedback`]), and they go to its checkpoints. A replica that heals
//! gets none of its source's.

use std::sync::Arc;

use ftcore::Result;
use quant::ErrorFeedback;
use replica::StateDict;

/// The residuals of this replica's rank; without error feedback there are none.
#[derive(Default)]
pub(crate) struct Feedback {
    residuals: Option<Arc<ErrorFeedback>>,
}

/// Under this the residuals stand in a state.
const PREFIX: &str = "feedback/";

impl Feedback {
    pub(crate) fn new(residuals: Arc<ErrorFeedback>) -> Self {
        Self {
            residuals: Some(residuals),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.residuals.is_some()
    }

    /// Begins an attempt at a round of `fragment`.
    pub(crate) fn begin(&self, fragment: usize) {
        if let Some(residuals) = &self.residuals {
            residuals.begin(&format!("fragment.{fragment}"));
        }
    }

    /// Ends the attempt.
    pub(crate) fn end(&self, committed: bool) {
        match &self.residuals {
            Some(residuals) if committed => residuals.commit(),
            Some(residuals) => residuals.rollback(),
            None => {}
        }
    }

    pub(crate) fn save(&self, out: &mut StateDict) -> Result<()> {
        let all = self.residuals.iter().flat_map(|d| d.state());
        all.into_iter().try_for_each(|(name, residuals)| {
            out.insert_f32(format!("{PREFIX}{name}"), &[residuals.len()], &residuals)
        })
    }

    /// Takes back this replica's own residuals from `from`. A replica that heals (`own` false) owes nothing from then on: what its source owes the
    /// source pays, and what it owed itself may be paid in the steps that it missed.
    pub(crate) fn load(&self, from: &StateDict, own: bool) -> Result<()> {
        let Some(residuals) = &self.residuals else {
            return Ok(());
        };
        if !own {
            return residuals.load(Vec::new());
        }
        let saved = from.iter().filter_map(|(key, _)| {
            let name = key.strip_prefix(PREFIX)?;
            Some(from.get_f32(key).map(|values| (name.to_string(), values)))
        });
        residuals.load(saved.collect::<Result<Vec<_>>>()?)
    }
}
